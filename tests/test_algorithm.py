"""The algorithm's functions against numbers computed in another way."""

import math

import numpy as np
import pytest
import torch
from conftest import make_agent

import ppg_procgen
import ppo_procgen


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_gae_is_the_discounted_sum_of_the_errors_up_to_the_end_of_the_episode(rng):
    T, N, gamma, lam = 12, 3, 0.9, 0.7
    rewards, values, firsts = rng.normal(size=(T, N)), rng.normal(size=(T + 1, N)), rng.random((T + 1, N)) < 0.3
    expected = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                following = 0.0 if firsts[k + 1, n] else values[k + 1, n]
                expected[t, n] += weight * (rewards[k, n] + gamma * following - values[k, n])
                if firsts[k + 1, n]:
                    break
                weight *= gamma * lam
    np.testing.assert_allclose(ppg_procgen.compute_gae(rewards, values, firsts, gamma, lam), expected, rtol=1e-12)


@pytest.mark.parametrize("script", [ppg_procgen, ppo_procgen], ids=["ppg", "ppo"])
def test_reward_normalizer_divides_by_the_deviation_of_all_discounted_sums_so_far(script, rng):
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
        firsts, by_step = np.vstack([first[None], rng.random((7, N)) < 0.2]), []
        for reward, begins in zip(rewards, firsts[:-1], strict=True):
            running = np.where(begins, reward, reward + gamma * running)
            sums.append(running)
            by_step.append(normalized(reward))
        expected = normalized(rewards) if script is ppg_procgen else by_step
        result = normalizer(rewards[:, :20], rewards, firsts)  # of a rank with 20 of the environments
        np.testing.assert_allclose(result, np.array(expected)[:, :20], rtol=1e-5)
        first = firsts[-1]
    assert np.abs(result).max() == 10


def test_episode_statistics_count_all_episodes_across_rollouts(rng):
    N, script = 5, ppg_procgen
    episodes, running, lengths, ended = script.EpisodeStatistics(N), np.zeros(N), np.zeros(N), []
    firsts = np.ones((31, N))
    for _ in range(4):
        rewards = rng.normal(size=(30, N)).astype(np.float32)
        firsts = np.vstack([firsts[-1:], rng.random((30, N)) < 0.2]).astype(np.float32)
        before = len(ended)
        for reward, done in zip(rewards, firsts[1:] > 0, strict=True):
            running, lengths = running + reward, lengths + 1
            ended += [(running[n], lengths[n]) for n in np.flatnonzero(done)]
            running, lengths = np.where(done, 0, running), np.where(done, 0, lengths)
        row = episodes.update(rewards, firsts)
        mean_return, mean_length = np.mean(ended[before:], 0)
        expected = {"charts/mean_return_100": np.mean(ended[-100:], 0)[0]}
        expected |= {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
        assert row == pytest.approx(expected, rel=1e-6)
    assert len(ended) > 100
    none = script.EpisodeStatistics(N).update(np.ones((3, N)), np.zeros((4, N)))
    assert all(math.isnan(x) for x in none.values())


def make_minibatch(M=40, A=5):
    """Outputs of the new networks, a minibatch of the old ones', and the old logits."""
    torch.set_default_dtype(torch.float64)
    logits, values, aux_values = (torch.randn(shape, requires_grad=True) for shape in ((M, A), (M,), (M,)))
    pi_old = (logits + 0.3 * torch.randn(M, A)).detach()
    batch = {"obs": torch.zeros(M), "actions": torch.randint(A, (M,)), "advantages": torch.randn(M)}
    batch["old_logprobs"] = pi_old.log_softmax(-1)[torch.arange(M), batch["actions"]]
    batch |= {"targets": torch.randn(M), "old_values": values.detach() + 0.3 * torch.randn(M)}
    torch.set_default_dtype(torch.float32)
    return ppg_procgen.Outputs(logits, aux_values, values), batch, pi_old


def check_loss(loss_fn, args, outputs, batch, expected, expected_stats):
    """The loss, its statistics, and its gradient with respect to the outputs."""
    loss, stats = loss_fn(lambda *_, **__: outputs, args, **batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(stats, expected_stats, check_dtype=False)
    gradients = [torch.autograd.grad(x, outputs, materialize_grads=True) for x in (loss, expected)]
    torch.testing.assert_close(*gradients)


def policy_losses(args, outputs, batch):
    """Policy's and value's part of the loss by their definitions, and the statistics."""
    probs, epsilon, advantages = outputs.logits.softmax(-1), args.clip_coef, batch["advantages"]
    ratio = probs[torch.arange(len(probs)), batch["actions"]] / batch["old_logprobs"].exp()
    objective, clipped = ratio * advantages, (ratio - 1).abs() > epsilon
    errors = (outputs.values - batch["targets"]) ** 2
    if epsilon > 0:
        objective = torch.where(ratio > 1 + epsilon, (1 + epsilon) * advantages, objective).minimum(objective)
        objective = torch.where(ratio < 1 - epsilon, (1 - epsilon) * advantages, objective).minimum(objective)
    if args.clip_vloss and epsilon > 0:
        nearest = outputs.values.minimum(batch["old_values"] + epsilon).maximum(batch["old_values"] - epsilon)
        errors = errors.maximum((nearest - batch["targets"]) ** 2)
    stats = {"entropy": -(probs * probs.log()).sum(-1).mean(), "old_approx_kl": -ratio.log().mean()}
    stats |= {"approx_kl": (ratio - 1 - ratio.log()).mean(), "approx_kl_k2": (ratio.log() ** 2).mean() / 2}
    stats["clipfrac"] = clipped.double().mean() * (epsilon > 0)
    stats["policy_loss"] = -objective.mean() + getattr(args, "kl_coef", 0) * stats["approx_kl_k2"]
    return stats["policy_loss"] - args.ent_coef * stats["entropy"], errors.mean(), stats


SETTINGS = [{}, {"clip_coef": 0.0, "kl_coef": 1.0}, {"clip_coef": 0.1, "kl_coef": 0.5, "ent_coef": 0.3, "vf_coef": 2.0}]
SETTINGS += [{"clip_vloss": True, "clip_coef": 0.2}, {"clip_vloss": True, "clip_coef": 0.0}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["policy_and_value_loss", "policy_loss", "value_loss"])
def test_losses_of_the_policy_phase_and_their_gradients(setting, name):
    args, (outputs, batch, _) = ppg_procgen.Args(**setting), make_minibatch()
    policy_loss, error, policy_stats = policy_losses(args, outputs, batch)
    value_loss = args.vf_coef * error
    expected, stats = policy_loss + value_loss, policy_stats | {"value_loss": value_loss}
    if name == "policy_loss":
        expected, stats = policy_loss, policy_stats
    elif name == "value_loss":
        expected, stats = value_loss, {"value_loss": value_loss}
    check_loss(getattr(ppg_procgen, name), args, outputs, batch, expected, stats)


@pytest.mark.parametrize("clip_vloss, clip_coef", [(False, 0.2), (True, 0.2), (True, 0.0)])
def test_ppo_loss_and_its_gradient(clip_vloss, clip_coef):
    args = ppo_procgen.Args(clip_vloss=clip_vloss, clip_coef=clip_coef, vf_coef=0.3)
    outputs, batch, _ = make_minibatch()
    policy_loss, error, stats = policy_losses(args, outputs, batch)
    stats["value_loss"] = error / 2
    check_loss(ppo_procgen.policy_and_value_loss, args, outputs, batch, policy_loss + 0.3 * error / 2, stats)


@pytest.mark.parametrize("beta_clone", [1.0, 0.3])
def test_auxiliary_loss_has_the_kl_from_the_old_policy_to_the_new(beta_clone, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    args, (outputs, batch, pi_old) = ppg_procgen.Args(beta_clone=beta_clone, vf_coef=0.3), make_minibatch()
    old_probs = pi_old.softmax(-1)
    args.aux_dtype = "float32"
    kl = (old_probs * (old_probs / outputs.logits.softmax(-1)).log()).sum(-1).mean()
    aux_error, error = (((x - batch["targets"]) ** 2).mean() / 2 for x in (outputs.aux_values, outputs.values))
    stats = {"kl_loss": kl, "aux_value_loss": aux_error, "real_value_loss": error}
    batch = {"obs": batch["obs"], "pi_old": pi_old, "targets": batch["targets"]}
    expected = beta_clone * kl + aux_error + error
    check_loss(ppg_procgen.aux_loss, args, outputs, batch, expected, stats)


def test_actions_are_drawn_from_the_policy():
    logits = torch.randn(1, 15) * 1.5
    pi = ppg_procgen.Policy(logits.expand(200_000, 15))
    actions = pi.sample()
    frequencies = torch.bincount(actions, minlength=15) / len(actions)
    probs = logits.softmax(-1)[0]
    assert ((frequencies - probs).abs() < 5 * (probs * (1 - probs) / len(actions)).sqrt()).all()
    torch.testing.assert_close(pi.log_prob(actions), probs.log()[actions])


@pytest.mark.parametrize("arch, num_encoders", [("dual", 2), ("detach", 1), ("shared", 1)])
def test_normalized_initialization(arch, num_encoders):
    agent = make_agent(ppg_procgen, arch=arch)
    weights = {name: x for name, x in agent.named_parameters() if name.endswith("weight")}
    for name, weight in weights.items():
        scale = 0.1 if "head" in name else 1.4 if "dense" in name else 0.639 if "blocks" in name else 1.0
        torch.testing.assert_close(weight.flatten(1).norm(dim=1), torch.full((len(weight),), scale), atol=1e-3, rtol=0)
    assert all((x == 0).all() for name, x in agent.named_parameters() if name.endswith("bias"))
    assert len(weights) == num_encoders * 16 + 3
    # 626,256 parameters for a network with its policy and value head
    assert sum(x.numel() for x in agent.parameters()) == num_encoders * (626_256 - 16 * 257) + 17 * 257


def test_ppo_initialization():
    agent = make_agent(ppo_procgen)
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


@pytest.mark.parametrize("arch", ["dual", "detach", "shared"])
def test_which_loss_trains_which_parameters(arch):
    agent = make_agent(ppg_procgen, arch=arch)
    obs = torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)

    def trained(output):
        agent.zero_grad()
        output.square().sum().backward()
        return {name.split(".")[0] for name, x in agent.named_parameters() if x.grad is not None and x.grad.any()}

    encoder = {"dual": {"value_encoder"}, "detach": set(), "shared": {"policy_encoder"}}[arch]
    assert trained(agent(obs).logits) == {"policy_encoder", "policy_head"}
    assert trained(agent(obs).aux_values) == {"policy_encoder", "aux_value_head"}
    assert trained(agent(obs).values) == {"value_head"} | encoder
    logits, _, values = agent(obs)
    torch.testing.assert_close(agent(obs, policy=False).values, values)  # what is left out changes nothing
    torch.testing.assert_close(agent(obs, value=False).logits, logits)


def update_once(chunk_size, stale_gradients):
    """Weights after an auxiliary update on 10 samples, and its statistics."""
    torch.manual_seed(0)
    args = ppg_procgen.Args(chunk_size=chunk_size, cuda=False, aux_dtype="float32")
    agent = ppg_procgen.Agent(args, ppg_procgen.ProcgenVectorEnv)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)  # unlike Adam's, its step shows the size of a gradient
    minibatch = {
        "obs": torch.randint(0, 256, (10, 64, 64, 3), dtype=torch.uint8),
        "pi_old": torch.randn(10, 15),
        "targets": torch.randn(10),
    }
    if stale_gradients:
        for x in agent.parameters():
            x.grad = torch.randn_like(x)
    stats = ppg_procgen.gradient_step(agent, args, optimizer, ppg_procgen.aux_loss, **minibatch)
    return [x.detach() for x in agent.parameters()], stats


@pytest.mark.parametrize("chunk_size", [10, 4])  # of 4: 4, 4 and 2 samples
def test_chunks_and_gradients_from_before_change_no_update(chunk_size):
    changed, plain = update_once(chunk_size, stale_gradients=True), update_once(10, stale_gradients=False)
    torch.testing.assert_close(changed, plain, atol=1e-5, rtol=1e-4)
