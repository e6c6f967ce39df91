"""Our functions against the numbers of openai/phasic-policy-gradient and openai/baselines (published_code.py)."""

import json
from functools import partial

import numpy as np
import pytest
import tensorflow_habits
import torch
from conftest import make_agent
from published_code import GAE_LAMBDA, GAMMA, LEARNING_RATE, RESULTS, VARIANTS, N, T, inputs, weights

import ppg_procgen
import ppo_procgen

PUBLISHED = json.loads(RESULTS.read_text())
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
# after the last step: where a gradient is almost zero, Adam makes a difference in rounding as large as a step
near = partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-5)


@pytest.fixture
def data():
    return {name: torch.from_numpy(x) for name, x in inputs().items()}


def with_weights(agent):
    parameters = list(agent.parameters())
    for parameter, x in zip(parameters, weights([x.shape for x in parameters]), strict=True):
        parameter.data.copy_(torch.from_numpy(x))
    return agent.to(memory_format=torch.channels_last)


def advantages_and_targets(script, data):
    rewards, values, firsts = (data[name].numpy() for name in ("rewards", "values", "firsts"))
    scaled_rewards = script.RewardNormalizer(N, 0.99)(rewards, rewards, firsts.astype(np.float32))
    advantages = script.compute_gae(scaled_rewards, values, firsts.astype(np.float32), GAMMA, GAE_LAMBDA)
    return torch.from_numpy(advantages), torch.from_numpy(advantages + values[:-1])


@pytest.mark.parametrize("name", VARIANTS)
def test_ppg(name, data):
    """Advantages, two updates of the policy phase, two of the auxiliary phase."""
    published, (arch, kl_coef, clip_coef) = PUBLISHED[name], VARIANTS[name]
    advantages, targets = advantages_and_targets(ppg_procgen, data)
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    np.testing.assert_allclose(targets, published["returns"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(advantages, published["advantages"], rtol=1e-5, atol=1e-6)

    agent, obs = with_weights(make_agent(ppg_procgen, arch=arch)), data["obs"].transpose(0, 1).flatten(0, 1)
    with torch.no_grad():
        pi_old = agent(obs).logits
    args = ppg_procgen.Args(arch=arch, clip_coef=clip_coef, kl_coef=kl_coef, cuda=False, aux_dtype="float32")
    batch = {"obs": data["obs"], "actions": data["actions"], "advantages": advantages, "targets": targets}
    batch |= {"old_logprobs": data["logprobs"], "old_values": data["values"][:-1]}
    batch = {x: y.transpose(0, 1) for x, y in batch.items()}  # (N, T, ...)
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-8, fused=True)
    update = partial(ppg_procgen.gradient_step, agent, args, optimizer, ppg_procgen.policy_and_value_loss)
    for expected, rows in zip(published["updates"], torch.arange(N).split(N // 2), strict=True):
        stats = update(**{x: y[rows].flatten(0, 1) for x, y in batch.items()})
        close(stats["policy_loss"], expected["pg"] + expected["pi_kl"])
        close(stats["entropy"], expected["entropy"])
        close(stats["value_loss"], expected["vf"])
        close(stats["approx_kl_k2"], expected["approxkl"])
        if clip_coef > 0:
            assert stats["clipfrac"] == expected["clipfrac"]

    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-8, fused=True)
    update = partial(ppg_procgen.gradient_step, agent, args, optimizer, ppg_procgen.aux_loss)
    mb = {"obs": obs, "pi_old": pi_old, "targets": batch["targets"].flatten()}
    for expected in published["aux_updates"]:
        stats = update(**mb)
        close(stats["kl_loss"], expected["pol_distance"])
        close(stats["aux_value_loss"], expected["vf_aux"])
        close(stats["real_value_loss"], expected["vf_true"])
    outputs = agent(obs[::T])
    near(outputs.logits.log_softmax(-1).detach(), published["logits"])
    near(outputs.values.detach(), published["values"])
    near(outputs.aux_values.detach(), published["aux_values"])


def test_ppo(data, monkeypatch):
    """Returns and three updates, with TensorFlow's Adam and pooling. Samples are ordered by environment."""
    tensorflow_habits.install(monkeypatch.setattr)
    published = PUBLISHED["ppo"]
    _, targets = advantages_and_targets(ppo_procgen, data)
    np.testing.assert_allclose(targets, published["returns"], rtol=1e-6, atol=1e-6)

    agent, args = with_weights(make_agent(ppo_procgen)), ppo_procgen.Args(cuda=False)
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE, eps=1e-5)
    batch = {"obs": data["obs"], "actions": data["actions"], "old_logprobs": data["logprobs"]}
    batch |= {"targets": targets, "old_values": data["values"][:-1]}
    batch = {x: y.transpose(0, 1).flatten(0, 1) for x, y in batch.items()}
    for k, expected in enumerate(published["updates"]):
        mb = {x: y[k * N * T // 4 : (k + 1) * N * T // 4] for x, y in batch.items()}
        advantages = mb["targets"] - mb["old_values"]
        mb["advantages"] = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        stats = ppo_procgen.gradient_step(agent, args, optimizer, ppo_procgen.policy_and_value_loss, **mb)
        names = {"policy_entropy": "entropy", "approxkl": "approx_kl_k2"}
        for name, value in expected.items():
            close(stats[names.get(name, name)], value, err_msg=name)
    with torch.no_grad():
        logits, values = agent(data["obs"][0])
    near(logits.log_softmax(-1), torch.tensor(published["logits"]).log_softmax(-1))
    near(values, published["values"])
