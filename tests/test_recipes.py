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
from conftest import CHEAP_PPG, ROOT, TINY_PPG, as_flags, interrupt, make_args, parse, read_rows, resume, same, wait_for
from conftest import train as train_script
from gymnasium.spaces import Box, Discrete

ENV = "Use another environment"  # what recipes for gymnasium build on


def section(title):
    return (ROOT / "benchmark" / "RECIPES.md").read_text().split(f"# {title}\n")[1].split("\n##")[0]


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


def load(tmp_path, source):
    path = tmp_path / "my_ppg.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("my_ppg", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_ppg"] = module
    spec.loader.exec_module(module)
    return module


def recipe(tmp_path, *titles, small=True):
    """The module that recipes make."""
    module = load(tmp_path, apply(*titles))
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


def edit(tmp_path, old, new):
    source = apply()
    assert source.count(old) == 1
    return load(tmp_path, source.replace(old, new))


WRONG_EDITS = [
    ("(features).squeeze(-1)\n        if value:", "(features)\n        if value:"),
    ('    buffer["obs"] =', '    buffer["actions"] = torch.zeros((capacity, T))\n    buffer["obs"] ='),
]


@pytest.mark.parametrize("old, new", WRONG_EDITS, ids=["shape", "dtype"])
def test_what_would_be_wrong_in_silence_ends_the_run(tmp_path, old, new):
    """Broadcast to (M, M), actions cast to float."""
    with pytest.raises(AssertionError):
        train(edit(tmp_path, old, new), tmp_path)


def test_a_checkpoint_between_auxiliary_phases_cannot_be_resumed_in_silence(tmp_path):
    module = edit(tmp_path, "is_last or iteration % args.n_iteration == 0:", "True:")
    run_dir = interrupt(module, make_args(module, tmp_path / "run", **TINY_PPG), 3 * 16 + 5)
    with pytest.raises(SystemExit, match="losses/aux/kl_loss is nan"):
        resume(module, run_dir)


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


# ---- Algorithms, Check your copy

ONE_UPDATE = TINY_PPG | {"num_minibatches": 1, "num_aux_rollouts": 8}  # a phase
TITLES = re.findall("^### (.*)", (ROOT / "benchmark" / "RECIPES.md").read_text().split("## Algorithms")[1], re.M)


class Recall:
    """Games of an image that is black or white and two grey ones: the last action must tell which the first was."""

    obs_shape, obs_dtype, num_actions, state_dict = (64, 64, 3), torch.uint8, 2, dict
    t, cues = 0, np.arange(16) % 2

    def reset(self):
        images = np.full(16, 99) if self.t % 3 else 255 * self.cues
        return np.tile(images.astype(np.uint8).reshape(16, 1, 1, 1), self.obs_shape), {}

    def step(self, actions):
        done = np.full(16, self.t % 3 == 2)
        rewards = (done & (actions == self.cues)).astype(np.float32)
        self.t += 1
        self.cues = torch.randint(2, (16,)).numpy() if done[0] else self.cues
        return self.reset()[0], rewards, done, np.zeros(16, bool), {}


@pytest.mark.parametrize("title", TITLES)
def test_first_updates_and_resuming(tmp_path, title):
    """Checks 1 and 3 of "Check your copy"."""
    module = recipe(tmp_path, title)
    whole, part = (make_args(module, tmp_path / x, **ONE_UPDATE | {"env_id": "starpilot"}) for x in "ab")
    rows = read_rows(train_script(module, whole))
    assert {row["losses/approx_kl"] for row in rows} == {row["losses/aux/kl_loss"] or "0.0" for row in rows} == {"0.0"}
    interrupt(module, part, 3 * 16 + 5)
    assert same(resume(module, part.run_dir), tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_two_ranks(tmp_path, title):
    """Check 4."""
    (tmp_path / "my_ppg.py").write_text(apply(title, "Check your copy"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "my_ppg.py"]
    subprocess.run([*torchrun, *as_flags(CHEAP_PPG), "--run-dir", "run"], cwd=tmp_path, check=True)


def test_change_the_policy_loss(tmp_path):
    module = recipe(tmp_path, "Change the policy loss")
    args = module.Args(**TINY_PPG)
    agent = module.Agent(args, module.ProcgenVectorEnv)
    obs, actions = torch.zeros((4, 64, 64, 3), dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    logprobs = module.Policy(agent(obs).logits).log_prob(actions).detach()
    for ratio, expected in ((10, (3 - 1.2) / 2), (2, (2 - 1.2) / 2)):  # 10 is cut at 3, 2 is not
        _, stats = module.policy_loss(agent, args, obs, actions, logprobs - np.log(ratio), advantages)
        assert stats["policy_loss"].item() == pytest.approx(expected, abs=1e-4)


def test_add_memory(tmp_path):
    module = recipe(tmp_path, "Add memory")
    module.make_envs = lambda *_: Recall()
    flags = {"num_envs": 16, "num_aux_rollouts": 16, "e_policy": 4, "e_value": 4, "gamma": 0.9, "learning_rate": 1e-3}
    rows = train(module, tmp_path, arch="detach", total_timesteps=16 * 16 * 20, **flags)
    assert np.mean([float(row["charts/episodic_return"]) for row in rows[-4:]]) > 0.9  # without memory, 0.5


def test_add_an_intrinsic_reward(tmp_path):
    module = recipe(tmp_path, "Add an intrinsic reward")
    seen = record_gae(module)
    rows = train(module, tmp_path, env_id="coinrun", total_timesteps=64 * 12, learning_rate=1e-3)
    assert all((rewards > 0).all() for rewards, *_ in seen)  # coinrun itself has no reward in so few steps
    losses = [float(row["losses/rnd_loss"]) for row in rows]
    assert 0 < losses[-1] < 0.5 * losses[0]


def test_add_an_auxiliary_head(tmp_path):
    rows = train(recipe(tmp_path, "Add an auxiliary head with its own loss"), tmp_path)
    assert [float(row["losses/aux/moment_loss"] or -1) >= 0 for row in rows] == [False, True] * 2


def test_augment_the_observations(tmp_path):
    module = recipe(tmp_path, "Augment the observations")
    rows = torch.arange(64, dtype=torch.uint8).reshape(64, 1, 1).expand(500, 64, 64, 3)  # each pixel: its row
    shifted = module.translate(rows).int()
    shifts = shifted[:, 32] - 32
    assert shifts.unique().tolist() == [*range(-4, 5)] and (shifts == shifts[:, :1]).all()
    assert torch.equal(shifted, (rows.int() + shifts[:, None]).clamp(0, 63))


def test_choose_levels(tmp_path):
    module = recipe(tmp_path, "Choose levels by their value loss")
    envs = module.LevelReplay(make_args(module, tmp_path, num_levels=9))
    envs.scores[:] = torch.arange(9)
    for _ in range(1000):
        obs, _, done, _, _ = envs.step(np.zeros(4, np.int64))
        for e in np.flatnonzero(done):
            game = module.ProcgenVectorEnv("chaser", 1, start_level=int(envs.levels[e]), num_levels=1)
            assert np.array_equal(obs[e], game.reset()[0][0])
    envs.score(np.where(torch.stack(envs.played) == 8, 30, np.random.rand(1000, 4)))
    assert envs.level_probs()[8] > 0.8
