"""The algorithm's functions against numbers computed in another way."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import ppg_procgen
import ppo_procgen
from ppg_procgen import Agent


@pytest.fixture(autouse=True)
def numbers():
    """The same for a test whichever ran before."""
    global rng
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
    rewards, values, dones = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.random((T + 1, N)) < 0.3
    expected = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                following = 0.0 if dones[k + 1, n] else values[k + 1, n]
                expected[t, n] += weight * (rewards[k, n] + gamma * following - values[k, n])
                if dones[k + 1, n]:
                    break
                weight *= gamma * lam
    np.testing.assert_allclose(ppg_procgen.compute_gae(rewards, values, dones, gamma, lam), expected, rtol=1e-12)


@pytest.mark.parametrize("script", [ppg_procgen, ppo_procgen], ids=["ppg", "ppo"])
def test_reward_normalizer_divides_by_the_deviation_of_all_discounted_sums_so_far(script):
    """PPG: with those of the whole rollout; PPO: with those up to each step."""
    N, gamma, normalizer = 30, 0.9, script.RewardNormalizer(30, 0.9)
    sums, running, first = [], np.zeros(N), np.ones(N, bool)

    def normalized(rewards):
        # the statistics begin with 1e-4 samples of mean 0 and variance 1
        data, weights = np.append(np.ravel(sums), [-1.0, 1.0]), np.append(np.ones(np.size(sums)), [5e-5, 5e-5])
        mean = np.average(data, weights=weights)
        deviation = math.sqrt(np.average((data - mean) ** 2, weights=weights) + 1e-8)
        return np.clip(rewards / deviation, -10, 10)

    for outlier in (0, 0, 0, 1e5):
        rewards = (rng.normal(size=(7, N)) * 30).astype(np.float32)
        rewards[3, 1] += outlier
        firsts, by_step = np.vstack([first[None], rng.random((6, N)) < 0.2]), []
        for reward, begins in zip(rewards, firsts, strict=True):
            running = np.where(begins, reward, reward + gamma * running)
            sums.append(running)
            by_step.append(normalized(reward))
        expected = normalized(rewards) if script is ppg_procgen else by_step
        result = normalizer(rewards, firsts)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
        first = rng.random(N) < 0.2
    assert np.abs(result).max() == 10


def test_episode_statistics_count_all_episodes_across_rollouts():
    N, script = 5, ppg_procgen
    episodes, running, lengths, ended = script.EpisodeStatistics(N), np.zeros(N), np.zeros(N), []
    for _ in range(4):
        rewards, dones = rng.normal(size=(30, N)).astype(np.float32), rng.random((30, N)) < 0.2
        before = len(ended)
        for reward, done in zip(rewards, dones, strict=True):
            running, lengths = running + reward, lengths + 1
            ended += [(running[n], lengths[n]) for n in np.flatnonzero(done)]
            running, lengths = np.where(done, 0, running), np.where(done, 0, lengths)
        row = episodes.update(rewards, dones)
        mean_return, mean_length = np.mean(ended[before:], 0)
        expected = {"episodes": len(ended), "charts/mean_return_100": np.mean(ended[-100:], 0)[0]}
        expected |= {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
        assert row == pytest.approx(expected, rel=1e-6)
    assert len(ended) > 100
    none = script.EpisodeStatistics(N).update(np.ones((3, N)), np.zeros((3, N)))
    assert none.pop("episodes") == 0 and all(math.isnan(x) for x in none.values())


class Policy:
    """In place of an agent: gives the outputs that it was made with, whatever it sees, if they are asked for."""

    def __init__(self, outputs):
        self.outputs = {name: torch.tensor(x, requires_grad=True) for name, x in outputs.items()}

    def __call__(self, obs, policy=True, value=True, aux=False):
        asked = {"logits": policy, "values": value, "aux_values": aux}
        return ppg_procgen.Outputs(*(self.outputs[name] if asked[name] else None for name in asked))


def make_minibatch(B=40, A=5):
    """Outputs of the new networks and a minibatch of the old ones', in numpy."""
    logits, values, aux_values = rng.normal(size=(B, A)), rng.normal(size=B), rng.normal(size=B)
    actions = rng.integers(A, size=B)
    old_logits = np.log(softmax(logits + 0.3 * rng.normal(size=(B, A))))
    batch = {"actions": actions, "old_logprobs": old_logits[np.arange(B), actions], "advantages": rng.normal(size=B)}
    batch |= {"returns": rng.normal(size=B), "old_values": values + 0.3 * rng.normal(size=B)}
    return {"logits": logits, "values": values, "aux_values": aux_values}, batch, old_logits


def evaluate_loss(loss_fn, args, outputs, **batch):
    """Loss, statistics, and gradients with respect to the outputs."""
    agent = Policy(outputs)
    obs = torch.zeros(())
    loss, stats = loss_fn(agent, args, obs=obs, **{name: torch.tensor(x) for name, x in batch.items()})
    loss.backward()
    gradients = {name: np.zeros(x.shape) if x.grad is None else x.grad.numpy() for name, x in agent.outputs.items()}
    return loss.item(), {name: x.item() for name, x in stats.items()}, gradients


def policy_losses(args, outputs, batch):
    """Policy's and value's part of the loss by their definitions, and the statistics."""
    rows, probs, kl_coef = np.arange(len(batch["actions"])), softmax(outputs["logits"]), getattr(args, "kl_coef", 0)
    logratio = np.log(probs[rows, batch["actions"]]) - batch["old_logprobs"]
    ratio, advantages, epsilon = np.exp(logratio), batch["advantages"], args.clip_coef
    objective = ratio * advantages
    if epsilon > 0:
        objective = np.minimum(objective, np.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages)
    errors = (outputs["values"] - batch["returns"]) ** 2
    if args.clip_vloss:
        clipped = np.clip(outputs["values"], batch["old_values"] - epsilon, batch["old_values"] + epsilon)
        errors = np.maximum(errors, (clipped - batch["returns"]) ** 2)
    stats = {"entropy": -(probs * np.log(probs)).sum(-1).mean(), "old_approx_kl": -logratio.mean()}
    stats |= {"approx_kl": (ratio - 1 - logratio).mean(), "approx_kl_k2": (logratio**2).mean() / 2}
    stats["clipfrac"] = (np.abs(ratio - 1) > epsilon).mean() if epsilon > 0 else 0.0
    stats["policy_loss"] = -objective.mean() + kl_coef * stats["approx_kl_k2"]
    return stats["policy_loss"] - args.ent_coef * stats["entropy"], args.vf_coef * errors.mean(), stats


SETTINGS = [{}, {"clip_coef": 0.0, "kl_coef": 1.0}, {"clip_coef": 0.1, "kl_coef": 0.5, "ent_coef": 0.3, "vf_coef": 2.0}]
SETTINGS += [{"clip_vloss": True, "clip_coef": 0.2}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("heads", [(True, True), (True, False), (False, True)], ids=["joint", "policy", "value"])
def test_policy_phase_loss_and_its_gradient(setting, heads):
    args, (outputs, batch, _) = ppg_procgen.Args(**setting), make_minibatch()

    def expected(outputs):
        return np.dot(heads, policy_losses(args, outputs, batch)[:2])

    loss_fn = partial(ppg_procgen.policy_phase_loss, policy=heads[0], value=heads[1])
    loss, stats, gradients = evaluate_loss(loss_fn, args, outputs, **batch)
    _, value_loss, expected_stats = policy_losses(args, outputs, batch)
    assert loss == pytest.approx(expected(outputs), rel=1e-12)
    wanted = (expected_stats if heads[0] else {}) | ({"value_loss": value_loss} if heads[1] else {})
    assert stats == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    for name in outputs:
        numeric = numeric_gradient(lambda x, name=name: expected(outputs | {name: x}), outputs[name])
        np.testing.assert_allclose(gradients[name], numeric, atol=1e-8)


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_ppo_loss_and_its_gradient(clip_vloss):
    args, (outputs, batch, _) = ppo_procgen.Args(clip_vloss=clip_vloss), make_minibatch()
    del outputs["aux_values"]

    def expected(outputs):  # vf_coef here is the weight of half the mean squared error
        policy, value, _ = policy_losses(args, outputs, batch)
        return policy + 0.5 * value

    loss, stats, gradients = evaluate_loss(ppo_procgen.policy_phase_loss, args, outputs, **batch)
    policy, value, expected_stats = policy_losses(args, outputs, batch)
    assert loss == pytest.approx(expected(outputs), rel=1e-12) and args.vf_coef == 0.5
    assert stats == pytest.approx(expected_stats | {"value_loss": value}, rel=1e-6, abs=1e-7)
    for name in outputs:
        numeric = numeric_gradient(lambda x, name=name: expected(outputs | {name: x}), outputs[name])
        np.testing.assert_allclose(gradients[name], numeric, atol=1e-8)


@pytest.mark.parametrize("beta_clone", [1.0, 0.3])
def test_auxiliary_loss_has_the_kl_from_the_old_policy_to_the_new(beta_clone, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    args, (outputs, batch, old_logits) = ppg_procgen.Args(beta_clone=beta_clone, aux_dtype="float32"), make_minibatch()
    old, returns = np.exp(old_logits), batch["returns"]

    def parts(outputs):
        new = softmax(outputs["logits"])
        errors = [((outputs[name] - returns) ** 2).mean() / 2 for name in ("aux_values", "values")]
        return (old * (np.log(old) - np.log(new))).sum(-1).mean(), *errors

    new = softmax(outputs["logits"])
    assert parts(outputs)[0] != pytest.approx((new * (np.log(new) - np.log(old))).sum(-1).mean(), rel=1e-3)
    loss, stats, gradients = evaluate_loss(
        ppg_procgen.auxiliary_phase_loss, args, outputs, old_all_logprobs=np.log(old), returns=returns
    )
    weights = np.array([beta_clone, 1, 1])
    assert loss == pytest.approx(weights @ parts(outputs), rel=1e-12)
    names = ("kl_loss", "aux_value_loss", "real_value_loss")
    assert stats == pytest.approx(dict(zip(names, parts(outputs), strict=True)), rel=1e-9)
    for name in outputs:
        numeric = numeric_gradient(lambda x, name=name: weights @ parts(outputs | {name: x}), outputs[name])
        np.testing.assert_allclose(gradients[name], numeric, atol=1e-8)


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


@pytest.mark.parametrize("arch", ["dual", "detach", "shared"])
def test_which_loss_trains_which_parameters(arch):
    agent = Agent(arch)
    obs = torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)

    def trained(output):
        agent.zero_grad()
        output.square().sum().backward()
        return {name.split(".")[0] for name, x in agent.named_parameters() if x.grad is not None and x.grad.any()}

    encoder = {"dual": {"value_encoder"}, "detach": set(), "shared": {"policy_encoder"}}[arch]
    assert trained(agent(obs).logits) == {"policy_encoder", "policy_head"}
    assert agent(obs).aux_values is None
    assert trained(agent(obs, aux=True).aux_values) == {"policy_encoder", "aux_value_head"}
    assert trained(agent(obs).values) == {"value_head"} | encoder
    logits, values, _ = agent(obs)
    torch.testing.assert_close(agent(obs, policy=False).values, values)  # what is left out changes nothing
    torch.testing.assert_close(agent(obs, value=False).logits, logits)


def update_once(chunk_size, stale_gradients=False):
    """Weights after an auxiliary update on 10 samples, its statistics, the most bytes of activations held at once."""
    torch.manual_seed(0)
    agent, args = Agent("dual"), ppg_procgen.Args(chunk_size=chunk_size, cuda=False, aux_dtype="float32")
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)  # unlike Adam's, its step shows the size of a gradient
    minibatch = {
        "obs": torch.randint(0, 256, (10, 64, 64, 3), dtype=torch.uint8),
        "old_all_logprobs": torch.randn(10, 15).log_softmax(-1),
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

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        stats = ppg_procgen.update(agent, args, optimizer, ppg_procgen.auxiliary_phase_loss, **minibatch)
    return [x.detach() for x in agent.parameters()], stats, peak


@pytest.mark.parametrize("chunk_size", [5, 4, 1])  # of 4: 4, 4 and 2 samples
def test_chunks_make_the_same_step_in_less_memory(chunk_size):
    whole, whole_stats, whole_peak = update_once(10)
    parts, parts_stats, parts_peak = update_once(chunk_size)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(parts_stats, whole_stats, atol=1e-5, rtol=1e-4)
    assert parts_peak <= whole_peak * chunk_size / 10 * 1.02


def test_an_update_begins_without_gradients():
    assert all(map(torch.equal, update_once(10)[0], update_once(10, stale_gradients=True)[0]))
