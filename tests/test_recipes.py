"""The recipes of benchmark/GUIDE.md, applied to copies of the file, train."""

import importlib.util
import re
import sys

import gymnasium
import numpy as np
import pytest
import torch
import worker
from conftest import ROOT, TINY_PPG, read_rows


def recipe(tmp_path, title):
    """The module that a recipe makes of ppg_procgen.py."""
    text = (ROOT / "benchmark" / "GUIDE.md").read_text().split(f"### {title}\n")[1].split("\n### ")[0]
    source = (ROOT / "ppg_procgen.py").read_text()
    for block in re.findall(r"```diff\n(.*?)```", text, re.S):
        lines = block.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in ("- ", "+ "))
        assert source.count(before) == 1, f"the recipe's lines are not, or not once, in the file:\n{before}"
        source = source.replace(before, after)
    path = tmp_path / "my_ppg.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("my_ppg", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_ppg"] = module
    spec.loader.exec_module(module)
    module.ImpalaCNN = worker.SmallCNN
    return module


def train(module, tmp_path, **flags):
    module.main(module.Args(**TINY_PPG | {"run_dir": str(tmp_path / "run")} | flags))
    return read_rows(tmp_path / "run")


def test_change_the_policy_loss(tmp_path):
    module = recipe(tmp_path, "Change the policy loss")
    rows = train(module, tmp_path)
    assert len(rows) == 4 and all(np.isfinite(float(row["losses/policy_loss"])) for row in rows)
    agent, n = module.Agent("shared"), 4
    obs = torch.zeros((n, 64, 64, 3), dtype=torch.uint8)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    for log_ratio, expected in ((np.log(10), (3 - 1.2) / 2), (np.log(2), (2 - 1.2) / 2)):  # 10 is cut at 3, 2 is not
        logprobs = agent(obs).logits.log_softmax(-1)[:, 0].detach() - log_ratio
        args = module.Args(**TINY_PPG)
        zeros = torch.zeros(n)
        batch = {"obs": obs, "actions": zeros.long(), "logprobs": logprobs, "advantages": advantages}
        _, stats = module.policy_phase_loss(agent, args, **batch, returns=zeros, values=zeros)
        assert stats["policy_loss"].item() == pytest.approx(expected, abs=1e-4)


def test_put_another_environment_in(tmp_path):
    class Blink(gymnasium.Env):
        """A reward of 1 a step, cut by a time limit after 5."""

        observation_space = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(3)

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return np.full((64, 64, 3), 7, np.uint8), {}

        def step(self, action):
            return np.full((64, 64, 3), 7, np.uint8), 1.0, False, False, {}

    gymnasium.register("Blink-v0", Blink, max_episode_steps=5)
    module = recipe(tmp_path, "Put another environment in")
    seen, original = [], module.compute_gae

    def compute_gae(rewards, values, dones, *rest):
        seen.append((rewards, values, dones))
        return original(rewards, values, dones, *rest)

    module.compute_gae = compute_gae
    rows = train(module, tmp_path, env_id="Blink-v0")
    assert [float(row["charts/episodic_return"]) for row in rows] == [5.0] * 4
    rewards, values, dones = seen[-1]
    ended = dones[1:].bool()
    # all observations are the same: where the limit cuts, the value of one more of them is added
    scale = rewards[~ended].mean()
    assert torch.allclose(rewards[ended], scale + 0.999 * values[:-1][ended], atol=1e-3)


def test_add_an_auxiliary_head(tmp_path):
    rows = train(
        recipe(tmp_path, "Add an auxiliary head with a loss of its own"), tmp_path, num_steps=32, total_timesteps=512
    )
    losses = [float(row["losses/aux/moment_loss"]) for row in rows if row["losses/aux/moment_loss"]]
    assert len(losses) >= 2 and all(np.isfinite(losses))
    weights = torch.load(tmp_path / "run" / "agent.pt", weights_only=True)
    assert weights["second_moment_head.weight"].norm() != pytest.approx(0.1, abs=1e-4)  # it has been trained
