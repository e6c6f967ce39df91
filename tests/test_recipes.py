"""The recipes of benchmark/RECIPES.md, applied to copies of the file, train."""

import importlib.util
import re
import signal
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
import worker
from conftest import CHEAP_PPG, ROOT, TINY_PPG, interrupt, make_args, parse, read_rows, resume, same, wait_for
from conftest import train as train_script
from gymnasium.spaces import Box, Discrete

ENV = "Use another environment"  # what recipes for gymnasium build on


def section(title):
    return (ROOT / "benchmark" / "RECIPES.md").read_text().split(f"### {title}\n")[1].split("\n##")[0]


def apply(*titles):
    """What recipes, one after the other, make of the text of ppg_procgen.py."""
    source = (ROOT / "ppg_procgen.py").read_text()
    for title in titles:
        for block in re.findall(r"```diff\n(.*?)```", section(title), re.S):
            lines = block.splitlines(keepends=True)
            before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in ("- ", "+ "))
            assert source.count("\n" + before) == 1, f"the recipe's lines are not, or not once, in the file:\n{before}"
            source = source.replace(before, after)
    return source


def recipe(tmp_path, *titles, small=True):
    """The module that recipes make."""
    path = tmp_path / "my_ppg.py"
    path.write_text(apply(*titles))
    spec = importlib.util.spec_from_file_location("my_ppg", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_ppg"] = module
    spec.loader.exec_module(module)
    if small:
        module.ImpalaCNN = worker.SmallCNN
    return module


def train(module, tmp_path, **flags):
    module.main(make_args(module, tmp_path / "run", **TINY_PPG | flags))
    return read_rows(tmp_path / "run")


def record_gae(module):
    """The arguments of each call of compute_gae from now on."""
    seen, original = [], module.compute_gae
    module.compute_gae = lambda *args: seen.append(args) or original(*args)
    return seen


class Blink(gymnasium.Env):
    """A reward of 1 a step, cut by a time limit after 5."""

    action_space = Discrete(3)
    observation_space = Box(0, 255, (64, 64, 3), np.uint8)
    image = np.full((64, 64, 3), 7, np.uint8)
    seeds = []

    def reset(self, seed=None, options=None):
        self.seeds += [seed] if seed is not None else []
        return self.image.copy(), {}

    def step(self, action):
        return self.image.copy(), 1.0, False, False, {}


gymnasium.register("Blink-v0", Blink, max_episode_steps=5)


def test_change_the_policy_loss(tmp_path):
    module = recipe(tmp_path, "Change the policy loss")
    assert len(train(module, tmp_path)) == 4
    agent, n = module.Agent("shared"), 4
    obs = torch.zeros((n, 64, 64, 3), dtype=torch.uint8)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    args, zeros = module.Args(**TINY_PPG), torch.zeros(n)
    logprobs = agent(obs).logits.log_softmax(-1)[:, 0].detach()
    for ratio, expected in ((10, (3 - 1.2) / 2), (2, (2 - 1.2) / 2)):  # 10 is cut at 3, 2 is not
        batch = obs, zeros.long(), logprobs - np.log(ratio), advantages
        _, stats = module.policy_phase_loss(agent, args, *batch, returns=zeros, old_values=zeros)
        assert stats["policy_loss"].item() == pytest.approx(expected, abs=1e-4)


def test_another_environment_and_its_time_limits_and_resuming(tmp_path, monkeypatch):
    module = recipe(tmp_path, ENV, "Bootstrap at time limits")
    monkeypatch.setattr(Blink, "seeds", [])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        worker.install_kill(module, patch.setattr, "compute_gae", 4, signal.SIGINT)
        train(module, tmp_path, env_id="Blink-v0", eval_interval=2)
    seen = record_gae(module)
    rows = read_rows(resume(module, tmp_path / "run"))
    assert [float(row["charts/episodic_return"]) for row in rows] == [5.0] * 4  # no episode is counted in part
    assert float(rows[-1]["eval/test_return"]) == 5.0
    rewards, values, firsts, *_ = seen[-1]
    ended = firsts[1:] == 1
    # all observations are the same: where the limit cuts, the value of one more of them is added
    np.testing.assert_allclose(rewards[ended], rewards[~ended].mean() + 0.999 * values[:-1][ended], atol=1e-3)
    # each evaluation plays the same episodes; seeds of training are disjoint: resumed, of the next seed or rank
    training, evaluation, resumed, evaluation2 = np.reshape(Blink.seeds, (4, 4)).tolist()
    assert evaluation == evaluation2
    module.main(make_args(module, tmp_path / "seed2", env_id="Blink-v0", seed=2))
    monkeypatch.setattr(module, "RANK", 1)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # a rank above 0 replaces it
    module.main(make_args(module, tmp_path / "rank1", env_id="Blink-v0"))
    assert len({*training, *evaluation, *resumed, *Blink.seeds[16:]}) == 5 * 4


@pytest.mark.parametrize("space", [Box(0, 1, (64, 64, 3)), Box(0, 255, (3, 64, 64), np.uint8), Discrete(3, start=1)])
def test_an_environment_that_does_not_fit(tmp_path, monkeypatch, capsys, space):
    module = recipe(tmp_path, ENV)
    monkeypatch.setattr(Blink, "action_space" if isinstance(space, Discrete) else "observation_space", space)
    with pytest.raises(SystemExit, match="2"):
        train(module, tmp_path, env_id="Blink-v0")
    assert capsys.readouterr().err.count("\n") == 1


REAL = {"ale_py": [ENV, "Play Atari"], "minigrid": [ENV, "Play MiniGrid"], "CartPole": [ENV, "Read vectors"]}
REAL["Pendulum"] = [*REAL["CartPole"], "Take continuous actions"]
REAL["envpool"] = ["Use Procgen without its wheels"]
LEARNED = [
    pytest.param(*x, marks=pytest.mark.learning) for x in (("minigrid", 0.9), ("CartPole", 200), ("Pendulum", -250))
]


def command(name, *flags):
    """The flags of the recipe's command, and others. In lower case: a package that need not be there."""
    apply(*REAL[name])
    if name.islower():
        pytest.importorskip(name)
    text = section(REAL[name][-1]).split("```bash\npython my_ppg.py ")[1].split("```")[0]
    return [*text.replace("\\\n", "").split(), *flags, "--no-cuda"]


@pytest.mark.parametrize("name, goal", [*((name, None) for name in REAL), *LEARNED])
def test_real_environments(tmp_path, name, goal):
    short = ["--total-timesteps=128", "--num-steps=8", "--n-iteration=1"] if goal is None else []
    flags = command(name, *short, f"--run-dir={tmp_path / 'run'}")
    module = recipe(tmp_path, *REAL[name], small=False)
    row = read_rows(train_script(module, parse(module, *flags), small=False))[-1]
    assert float(row["losses/aux/kl_loss"]) > 0
    assert goal is None or float(row["charts/mean_return_100"]) > goal


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_environments_with_two_ranks_and_resuming(tmp_path, name):
    flags = command(name, "--total-timesteps=2048", "--num-steps=16", "--n-iteration=1", "--run-dir=run")
    (tmp_path / "my_ppg.py").write_text(apply(*REAL[name]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "my_ppg.py"]
    with subprocess.Popen([*torchrun, *flags], cwd=tmp_path) as process:
        wait_for((tmp_path / "run" / "checkpoint.pt").exists)
        process.terminate()
    subprocess.run([*torchrun, "--resume=run"], cwd=tmp_path, check=True)
    rows = read_rows(tmp_path / "run")
    assert len(rows) == int(rows[-1]["iteration"]) and rows[-1]["global_step"] == "2048"


def test_stack_frames(tmp_path):
    module = recipe(tmp_path, "Stack frames")
    envs = module.FrameStack("chaser", 1, seed=1)
    plain = module.ProcgenVectorEnv("chaser", 1, seed=1)
    images, done = [plain.reset()[0]] * 4, False
    while not done:
        assert np.array_equal(envs.reset()[0], np.concatenate(images[-4:], -1))
        obs, _, done, _, _ = plain.step(np.zeros(1, np.int64))
        assert np.array_equal(envs.step(np.zeros(1, np.int64))[0][..., 9:], obs)
        images.append(obs)
    assert np.array_equal(envs.reset()[0], np.tile(obs, 4))


def test_stacked_frames_resume_exactly(tmp_path):
    module = recipe(tmp_path, "Stack frames", small=False)
    whole, part = (make_args(module, tmp_path / x, **CHEAP_PPG) for x in "ab")
    train_script(module, whole, small=False)
    interrupt(module, part, 2 * 8 + 5, small=False)
    assert same(resume(module, part.run_dir, small=False), tmp_path / "a")


def test_use_another_network(tmp_path):
    module = recipe(tmp_path, "Use another environment", "Use another network", small=False)
    train(module, tmp_path, **CHEAP_PPG | {"env_id": "Blink-v0", "arch": "dual"})
    weights = torch.load(tmp_path / "run" / "agent.pt", weights_only=True)
    assert weights["value_encoder.dense.weight"].shape == (512, 4 * 4 * 64)


def test_add_an_intrinsic_reward(tmp_path):
    module = recipe(tmp_path, "Add an intrinsic reward")
    seen = record_gae(module)
    rows = train(module, tmp_path, env_id="coinrun", total_timesteps=64 * 12, learning_rate=1e-3)
    assert all((rewards > 0).all() for rewards, *_ in seen)  # coinrun itself has no reward in so few steps
    losses = [float(row["losses/rnd_loss"]) for row in rows]
    assert 0 < losses[-1] < 0.5 * losses[0]


def test_add_an_auxiliary_head(tmp_path):
    module = recipe(tmp_path, "Add an auxiliary head with its own loss")
    rows = train(module, tmp_path)
    assert [float(row["losses/aux/moment_loss"] or -1) >= 0 for row in rows] == [False, True] * 2
    weights = torch.load(tmp_path / "run" / "agent.pt", weights_only=True)
    assert weights["second_moment_head.weight"].norm() != pytest.approx(0.1, abs=1e-4)  # it has been trained
