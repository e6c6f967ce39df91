"""The algorithm's functions against numbers computed in another way."""

import math

import numpy as np
import pytest
import torch

import ppg_procgen
import ppo_procgen
from ppg_procgen import Agent

rng = np.random.default_rng(0)


def softmax(logits):
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def numeric_gradient(function, x, step=1e-6):
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (function(up) - function(down)) / (2 * step)
    return gradient


def test_gae_is_the_discounted_sum_of_the_errors_up_to_the_end_of_the_episode():
    T, N, gamma, lam = 12, 3, 0.9, 0.7
    rewards, values, dones = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.random((T, N)) < 0.3
    expected = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                following = 0.0 if dones[k, n] else values[k + 1, n]
                expected[t, n] += weight * (rewards[k, n] + gamma * following - values[k, n])
                if dones[k, n]:
                    break
                weight *= gamma * lam
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (rewards, values, dones)]
    np.testing.assert_allclose(ppg_procgen.compute_gae(*tensors, gamma, lam).numpy(), expected, rtol=1e-12)


def test_reward_normalizer_divides_by_the_deviation_of_all_discounted_sums_so_far():
    N, gamma, normalizer = 3, 0.9, ppg_procgen.RewardNormalizer(3, 0.9)
    sums, running, first = [], np.zeros(N), np.ones(N, bool)
    for _ in range(4):
        rewards = (rng.normal(size=(7, N)) * 30).astype(np.float32)
        firsts = np.vstack([first[None], rng.random((6, N)) < 0.2])
        for reward, begins in zip(rewards, firsts, strict=True):
            running = np.where(begins, reward, reward + gamma * running)
            sums.append(running)
        # the statistics begin with 1e-4 samples of mean 0 and variance 1
        data, weights = np.append(np.ravel(sums), [-1.0, 1.0]), np.append(np.ones(np.size(sums)), [5e-5, 5e-5])
        mean = np.average(data, weights=weights)
        deviation = math.sqrt(np.average((data - mean) ** 2, weights=weights) + 1e-8)
        np.testing.assert_allclose(normalizer(rewards, firsts), np.clip(rewards / deviation, -10, 10), rtol=1e-5)
        first = rng.random(N) < 0.2


@pytest.mark.parametrize("clip_coef, kl_coef", [(0.2, 0.0), (0.0, 1.0), (0.1, 0.5)])
def test_ppo_loss_and_its_gradient(clip_coef, kl_coef):
    B, A = 40, 5
    logits, actions, advantages = rng.normal(size=(B, A)), rng.integers(A, size=B), rng.normal(size=B)
    old_logprobs = np.log(softmax(logits + 0.3 * rng.normal(size=(B, A))))[np.arange(B), actions]

    def loss(logits):
        ratio = softmax(logits)[np.arange(B), actions] / np.exp(old_logprobs)
        objective = ratio * advantages
        if clip_coef > 0:
            objective = np.minimum(objective, np.clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantages)
        return -objective.mean() + kl_coef * (np.log(ratio) ** 2).mean() / 2

    tensor = torch.tensor(logits, requires_grad=True)
    arguments = [tensor] + [torch.tensor(x) for x in (actions, old_logprobs, advantages)]
    pg_loss, entropy, k1, k3, clipfrac = ppg_procgen.ppo_loss(*arguments, clip_coef, kl_coef)
    pg_loss.backward()
    probs = softmax(logits)
    ratio = probs[np.arange(B), actions] / np.exp(old_logprobs)
    assert pg_loss.item() == pytest.approx(loss(logits), rel=1e-12)
    assert entropy.item() == pytest.approx(-(probs * np.log(probs)).sum(-1).mean(), rel=1e-12)
    assert k1.item() == pytest.approx(-np.log(ratio).mean(), rel=1e-9)
    assert k3.item() == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-9)
    assert clipfrac.item() == pytest.approx((np.abs(ratio - 1) > clip_coef).mean() if clip_coef else 0, abs=1e-7)
    np.testing.assert_allclose(tensor.grad.numpy(), numeric_gradient(loss, logits), atol=1e-8)
    if kl_coef == 0:  # the baseline's function is the same without the penalty
        assert ppo_procgen.ppo_loss(*arguments, clip_coef)[0].item() == pytest.approx(loss(logits), rel=1e-12)


@pytest.mark.parametrize("clip_coef", [None, 0.2])
def test_value_loss(clip_coef):
    values, returns, old_values = rng.normal(size=(3, 50))
    errors = (values - returns) ** 2
    if clip_coef:
        errors = np.maximum(errors, (np.clip(values, old_values - 0.2, old_values + 0.2) - returns) ** 2)
    loss = ppg_procgen.value_loss(*map(torch.tensor, (values, returns, old_values)), clip_coef)
    assert loss.item() == pytest.approx(errors.mean(), rel=1e-12)


def test_aux_loss_has_the_kl_from_the_old_policy_to_the_new():
    logits, old_logits = rng.normal(size=(2, 30, 5))
    values, aux_values, returns = rng.normal(size=(3, 30))
    new, old = softmax(logits), softmax(old_logits)
    forward = (old * (np.log(old) - np.log(new))).sum(-1).mean()
    assert forward != pytest.approx((new * (np.log(new) - np.log(old))).sum(-1).mean(), rel=1e-3)
    arguments = map(torch.tensor, (logits, np.log(old), values, aux_values, returns))
    kl_loss, aux_value_loss, real_value_loss = ppg_procgen.aux_loss(*arguments)
    assert kl_loss.item() == pytest.approx(forward, rel=1e-12)
    assert aux_value_loss.item() == pytest.approx(((aux_values - returns) ** 2).mean() / 2, rel=1e-12)
    assert real_value_loss.item() == pytest.approx(((values - returns) ** 2).mean() / 2, rel=1e-12)


def test_explained_variance():
    values, returns = rng.normal(size=(2, 100))
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert ppg_procgen.explained_variance(*map(torch.tensor, (values, returns))).item() == pytest.approx(expected)
    assert math.isnan(ppg_procgen.explained_variance(torch.randn(5), torch.ones(5)).item())


def test_actions_are_drawn_from_the_policy():
    torch.manual_seed(0)
    logits = torch.randn(1, 15) * 1.5
    actions, logprobs = ppg_procgen.sample_action(logits.expand(200_000, 15))
    frequencies = torch.bincount(actions, minlength=15) / len(actions)
    probs = logits.softmax(-1)[0]
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / len(actions)).sqrt()).all()
    torch.testing.assert_close(logprobs, probs.log()[actions])


@pytest.mark.parametrize("arch, num_encoders", [("dual", 2), ("detach", 1), ("shared", 1)])
def test_normalized_initialization(arch, num_encoders):
    agent = Agent(arch)
    weights = {name: x for name, x in agent.named_parameters() if name.endswith("weight")}
    for name, weight in weights.items():
        scale = 0.1 if "head" in name else 1.4 if "dense" in name else 0.639 if "blocks" in name else 1.0
        torch.testing.assert_close(weight.flatten(1).norm(dim=1), torch.full((len(weight),), scale), atol=1e-3, rtol=0)
    assert all((x == 0).all() for name, x in agent.named_parameters() if name.endswith("bias"))
    assert len(weights) == num_encoders * 16 + 3
    # 626,256 parameters for a network with its policy and value head
    assert sum(x.numel() for x in agent.parameters()) == num_encoders * (626_256 - 16 * 257) + 17 * 257


def test_ppo_initialization():
    agent = ppo_procgen.Agent()
    for name, x in agent.named_parameters():
        if name.endswith("bias"):
            assert (x == 0).all()
        elif "head" in name:
            gain = 0.01 if "policy" in name else 1.0
            torch.testing.assert_close(x @ x.T, torch.eye(len(x)) * gain**2, atol=1e-5, rtol=0)
        else:  # Xavier uniform
            fans = (x.shape[0] + x.shape[1]) * x[0, 0].numel()
            bound = math.sqrt(6 / fans)
            assert bound * 0.98 < x.abs().max() <= bound
            assert x.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)


def test_the_network_is_the_published_one():
    obs = torch.randint(0, 256, (2, 64, 64, 3), dtype=torch.uint8)
    agent = Agent("detach")
    weights = dict(agent.named_parameters())

    def conv(x, name):
        return torch.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)

    x = obs.movedim(3, 1).float() / 255
    for i in range(3):
        prefix = f"policy_encoder.stacks.{i}"
        x = torch.max_pool2d(conv(x, f"{prefix}.conv"), 3, 2, 1)
        for j in range(2):
            y = conv(x.relu(), f"{prefix}.blocks.{j}.conv0")
            x = x + conv(y.relu(), f"{prefix}.blocks.{j}.conv1")
    features = x.relu().flatten(1) @ weights["policy_encoder.dense.weight"].T + weights["policy_encoder.dense.bias"]
    logits = features.relu() @ weights["policy_head.weight"].T + weights["policy_head.bias"]
    torch.testing.assert_close(agent(obs)[0], logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("arch", ["dual", "detach", "shared"])
def test_which_loss_trains_which_parameters(arch):
    agent = Agent(arch)
    obs = torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)

    def trained(output):
        agent.zero_grad()
        output.square().sum().backward()
        return {name.split(".")[0] for name, x in agent.named_parameters() if x.grad is not None and x.grad.any()}

    logits, values, aux_values = agent(obs)
    encoder = {"dual": {"value_encoder"}, "detach": set(), "shared": {"policy_encoder"}}[arch]
    assert trained(logits) == {"policy_encoder", "policy_head"}
    logits, values, aux_values = agent(obs)
    assert trained(aux_values) == {"policy_encoder", "aux_value_head"}
    assert trained(agent(obs)[1]) == {"value_head"} | encoder
    torch.testing.assert_close(agent(obs, policy=False)[1], values)  # what is left out changes nothing
    torch.testing.assert_close(agent(obs, value=False)[0], logits)


def update_once(num_parts, stale_gradients=False):
    """Weights after an auxiliary update on 10 samples, its statistics, the most bytes of activations held at once."""
    torch.manual_seed(0)
    agent, args = Agent("dual"), ppg_procgen.Args()
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)  # unlike Adam's, its step shows the size of a gradient
    minibatch = {
        "obs": torch.randint(0, 256, (10, 64, 64, 3), dtype=torch.uint8),
        "old_logprobs": torch.randn(10, 15).log_softmax(-1),
        "returns": torch.randn(10),
    }
    if stale_gradients:
        for x in agent.parameters():
            x.grad = torch.randn_like(x)
    weights = {x.data_ptr() for x in agent.parameters()}
    live, peak = 0, 0

    class Saved:
        def __init__(self, tensor):
            nonlocal live, peak
            self.tensor, self.num_bytes = tensor, 0 if tensor.data_ptr() in weights else tensor.nbytes
            live += self.num_bytes
            peak = max(peak, live)

        def __del__(self):
            nonlocal live
            live -= self.num_bytes

    def loss_fn(**part):
        return ppg_procgen.auxiliary_phase_loss(agent, args, **part)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        stats = ppg_procgen.update(optimizer, loss_fn, num_parts, 0.0, **minibatch)
    return [x.detach() for x in agent.parameters()], stats, peak


@pytest.mark.parametrize("num_parts", [2, 3, 10])  # 3 parts are unequal: 4, 4 and 2 samples
def test_gradient_accumulation_takes_the_same_step_in_less_memory(num_parts):
    whole, whole_stats, whole_peak = update_once(1)
    parts, parts_stats, parts_peak = update_once(num_parts)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts_stats, whole_stats, atol=1e-5, rtol=1e-4)
    assert parts_peak <= whole_peak * math.ceil(10 / num_parts) / 10 * 1.02


def test_an_update_begins_without_gradients():
    assert all(map(torch.equal, update_once(1)[0], update_once(1, stale_gradients=True)[0]))


def test_auxiliary_minibatches_are_full_rollouts():
    slot, t, env = torch.meshgrid(torch.arange(3), torch.arange(5), torch.arange(4), indexing="ij")
    buffer = {"obs": torch.stack([slot, t, env], -1), "returns": slot * 100 + t * 10 + env}
    selected = ppg_procgen.select_rollouts(torch.device("cpu"), torch.tensor([6, 11, 0]), **buffer)
    for rollout, (i, n) in zip(selected["obs"].view(3, 5, 3), [(1, 2), (2, 3), (0, 0)], strict=True):
        assert rollout.tolist() == [[i, t, n] for t in range(5)]
    assert torch.equal(selected["returns"], (selected["obs"] * torch.tensor([100, 10, 1])).sum(-1))
