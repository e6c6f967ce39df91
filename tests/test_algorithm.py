"""The algorithm's functions against numbers computed in another way."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT, make_agent

import ppg_procgen
import ppo_procgen


def test_gae_is_the_discounted_sum_of_the_errors_up_to_the_end_of_the_episode():
    T, N, gamma, lam, rng = 12, 3, 0.9, 0.7, np.random.default_rng(0)
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
    tensors = map(torch.from_numpy, (rewards, values, firsts.astype(float)))
    np.testing.assert_allclose(ppg_procgen.compute_gae(*tensors, gamma, lam), expected, rtol=1e-12)


def test_reward_normalizer_divides_by_the_deviation_of_all_discounted_sums_so_far(script):
    N, gamma, rng = 30, 0.9, np.random.default_rng(0)
    normalizer = script.RewardNormalizer(script.Args(num_envs=N, reward_gamma=gamma))
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
        result = normalizer(torch.from_numpy(rewards), torch.from_numpy(firsts.astype(np.float32)))
        assert result.dtype == torch.float32
        np.testing.assert_allclose(result, np.array(expected), rtol=1e-5)
        first = firsts[-1]
    assert result.abs().max() == 10


def test_episode_statistics_count_all_episodes_across_rollouts():
    N, rng = 5, np.random.default_rng(0)
    episodes, none = (ppg_procgen.EpisodeStatistics(ppg_procgen.Args(num_envs=N)) for _ in range(2))
    running, lengths, ended = np.zeros(N), np.zeros(N), []
    firsts = np.ones((31, N))
    for _ in range(4):
        rewards = rng.normal(size=(30, N)).astype(np.float32)
        firsts = np.vstack([firsts[-1:], rng.random((30, N)) < 0.2]).astype(np.float32)
        before = len(ended)
        for reward, done in zip(rewards, firsts[1:] > 0, strict=True):
            running, lengths = running + reward, lengths + 1
            ended += [(running[n], lengths[n]) for n in np.flatnonzero(done)]
            running, lengths = np.where(done, 0, running), np.where(done, 0, lengths)
        row = episodes.update(torch.from_numpy(rewards), torch.from_numpy(firsts))
        mean_return, mean_length = np.mean(ended[before:], 0)
        expected = {"charts/mean_return_100": np.mean(ended[-100:], 0)[0]}
        expected |= {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
        assert {name: x.item() for name, x in row.items()} == pytest.approx(expected, rel=1e-6)
    assert len(ended) > 100
    assert all(math.isnan(x) for x in none.update(torch.ones((3, N)), torch.zeros((4, N))).values())


def make_minibatch(M=40, A=5):
    """What the present networks give (logits, auxiliary values, values), and what others gave."""
    torch.set_default_dtype(torch.float64)
    logits, values, aux_values = (torch.randn(shape, requires_grad=True) for shape in ((M, A), (M,), (M,)))
    old_logits = (logits + 0.3 * torch.randn(M, A)).detach()
    mb = {"old_logits": old_logits, "actions": torch.randint(A, (M,)), "advantages": torch.randn(M)}
    mb["logprobs"] = old_logits.log_softmax(-1)[torch.arange(M), mb["actions"]]
    mb |= {"targets": torch.randn(M), "values": values.detach() + 0.3 * torch.randn(M)}
    return (logits, aux_values, values), mb


def as_outputs(logits, aux_values, values):
    return ppg_procgen.Outputs(ppg_procgen.Policy(logits), aux_values, values)


def check_loss(loss_fn, args, tensors, mb, expected, expected_stats):
    loss, stats = loss_fn(None, args, as_outputs(*tensors), mb)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(stats, expected_stats, check_dtype=False)
    gradients = [torch.autograd.grad(x, tensors, materialize_grads=True, retain_graph=True) for x in (loss, expected)]
    torch.testing.assert_close(*gradients)


def define_policy_loss(args, logits, mb):
    probs, epsilon, advantages = logits.softmax(-1), args.clip_coef, mb["advantages"]
    ratio = probs[torch.arange(len(probs)), mb["actions"]] / mb["logprobs"].exp()
    objective, clipped = ratio * advantages, (ratio - 1).abs() > epsilon
    if epsilon > 0:
        objective = torch.where(ratio > 1 + epsilon, (1 + epsilon) * advantages, objective).minimum(objective)
        objective = torch.where(ratio < 1 - epsilon, (1 - epsilon) * advantages, objective).minimum(objective)
    stats = {"entropy": -(probs * probs.log()).sum(-1).mean()}
    stats |= {"approx_kl": (ratio - 1 - ratio.log()).mean(), "approx_kl_k2": (ratio.log() ** 2).mean() / 2}
    stats["clipfrac"] = clipped.double().mean() * (epsilon > 0)
    stats["policy_loss"] = -objective.mean() + getattr(args, "kl_coef", 0) * stats["approx_kl_k2"]
    return stats["policy_loss"] - args.ent_coef * stats["entropy"], stats


SETTINGS = [{}, {"clip_coef": 0.0, "kl_coef": 1.0}, {"clip_coef": 0.1, "kl_coef": 0.5, "ent_coef": 0.3, "vf_coef": 2.0}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_losses_of_the_policy_phase_and_their_gradients(setting):
    args, (tensors, mb) = ppg_procgen.Args(**setting), make_minibatch()
    check_loss(ppg_procgen.policy_loss, args, tensors, mb, *define_policy_loss(args, tensors[0], mb))
    value_loss = ((tensors[2] - mb["targets"]) ** 2).mean() / 2
    check_loss(ppg_procgen.value_loss, args, tensors, mb, args.vf_coef * value_loss, {"value_loss": value_loss})


@pytest.mark.parametrize("clip_vloss, clip_coef", [(False, 0.2), (True, 0.2), (True, 0.0)])
def test_losses_of_ppo_and_their_gradients(clip_vloss, clip_coef):
    args = ppo_procgen.Args(clip_vloss=clip_vloss, clip_coef=clip_coef, vf_coef=0.3)
    tensors, mb = make_minibatch()
    logits, _, values = tensors
    check_loss(ppo_procgen.policy_loss, args, tensors, mb, *define_policy_loss(args, logits, mb))
    errors = (values - mb["targets"]) ** 2
    if clip_vloss and clip_coef > 0:
        nearest = values.minimum(mb["values"] + clip_coef).maximum(mb["values"] - clip_coef)
        errors = errors.maximum((nearest - mb["targets"]) ** 2)
    value_loss = errors.mean() / 2
    check_loss(ppo_procgen.value_loss, args, tensors, mb, 0.3 * value_loss, {"value_loss": value_loss})


def test_the_loss_that_the_script_gives_as_an_example_is_that_of_ppo():
    comment = (ROOT / "ppg_procgen.py").read_text().partition("#     def clipped_value_loss")[2]
    lines = comment.partition("# Numbers and")[0].replace("\n#    ", "\n").strip()
    exec(f"def clipped_value_loss{lines}", scope := {"torch": torch})
    args, (tensors, mb) = ppo_procgen.Args(vf_coef=0.3), make_minibatch()
    expected = ppo_procgen.value_loss(None, args, as_outputs(*tensors), mb)
    check_loss(scope["clipped_value_loss"], args, tensors, mb, *expected)


@pytest.mark.parametrize("beta_clone", [1.0, 0.3])
def test_joint_loss_has_the_kl_from_the_old_policy_to_the_new(beta_clone):
    args, (tensors, mb) = ppg_procgen.Args(beta_clone=beta_clone, vf_coef=0.3), make_minibatch()
    logits, aux_values, _ = tensors
    old_probs = mb["old_logits"].softmax(-1)
    kl = (old_probs * (old_probs / logits.softmax(-1)).log()).sum(-1).mean()
    error = ((aux_values - mb["targets"]) ** 2).mean() / 2
    stats = {"kl_loss": kl, "aux_value_loss": error}
    check_loss(ppg_procgen.joint_loss, args, tensors, mb, beta_clone * kl + error, stats)


def test_values_of_another_shape_than_their_targets_are_refused():
    tensors, mb = make_minibatch()
    out = as_outputs(*tensors)
    for field, loss_fn in {"values": ppg_procgen.value_loss, "aux_values": ppg_procgen.joint_loss}.items():
        with pytest.raises(AssertionError, match="targets"):
            loss_fn(None, ppg_procgen.Args(), out._replace(**{field: torch.zeros(40, 1)}), mb)


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
    params = dict(make_agent(ppg_procgen, arch=arch).named_parameters())
    weights = {name: x for name, x in params.items() if name.endswith("weight")}
    for name, weight in weights.items():
        scale = 0.1 if "head" in name else 1.4 if "dense" in name else 0.639 if "conv" in name else 1.0
        torch.testing.assert_close(weight.flatten(1).norm(dim=1), torch.full((len(weight),), scale), atol=1e-3, rtol=0)
    assert all((x == 0).all() for name, x in params.items() if name.endswith("bias"))
    assert len(weights) == num_encoders * 16 + 3  # a network with its policy and value head has 626,256 parameters
    assert sum(x.numel() for x in params.values()) == num_encoders * (626_256 - 16 * 257) + 17 * 257


def test_ppo_initialization():
    for name, x in make_agent(ppo_procgen).named_parameters():
        if name.endswith("bias"):
            assert (x == 0).all()
        elif "head" in name:
            gain = 0.01 if "policy" in name else 1.0
            torch.testing.assert_close(x @ x.T, torch.eye(len(x)) * gain**2, atol=1e-5, rtol=0)
        else:  # Xavier uniform
            bound = math.sqrt(6 / ((x.shape[0] + x.shape[1]) * x[0, 0].numel()))
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
    assert trained(agent(obs).pi.logits) == {"policy_encoder", "policy_head"}
    assert trained(agent(obs).aux_values) == {"policy_encoder", "aux_value_head"}
    assert trained(agent(obs).values) == {"value_head"} | encoder


AUX_LOSSES = (ppg_procgen.joint_loss, ppg_procgen.value_loss)


def update_once(chunk_size=10, stale_gradients=False, losses=AUX_LOSSES, **more):
    """Weights after an auxiliary update on 10 samples, and its statistics."""
    torch.manual_seed(0)
    args = ppg_procgen.Args(chunk_size=chunk_size, cuda=False)
    agent = make_agent(ppg_procgen)
    optimizer = torch.optim.SGD(agent.parameters(), lr=1.0)  # unlike Adam's, its step shows the size of a gradient
    minibatch = {"obs": torch.randint(0, 256, (10, 64, 64, 3), dtype=torch.uint8)}
    minibatch |= {"old_logits": torch.randn(10, 15), "targets": torch.randn(10)}
    if stale_gradients:
        for x in agent.parameters():
            x.grad = torch.randn_like(x)
    stats = ppg_procgen.gradient_step(agent, args, optimizer, losses, **minibatch, **more)
    return [x.detach() for x in agent.parameters()], stats


@pytest.mark.parametrize("chunk_size", [10, 4])  # of 4: 4, 4 and 2 samples
def test_chunks_and_gradients_from_before_change_no_update(chunk_size):
    torch.testing.assert_close(update_once(chunk_size, stale_gradients=True), update_once(), atol=1e-5, rtol=1e-4)


def test_a_coefficient_in_the_minibatch_reaches_losses_whole():
    def scaled(agent, args, out, mb):
        loss, stats = ppg_procgen.joint_loss(agent, args, out, mb)
        return loss * mb["coef"], stats

    with_coef = update_once(4, losses=(scaled, ppg_procgen.value_loss), coef=torch.tensor(1.0))
    torch.testing.assert_close(with_coef, update_once(4), atol=1e-6, rtol=1e-6)
