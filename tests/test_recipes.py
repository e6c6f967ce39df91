"""The recipes of benchmark/RECIPES.md, applied to copies of the script, train and do what they say."""

import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import conftest
import gymnasium
import numpy as np
import pytest
import torch
import worker
from conftest import CHEAP_PPG, ROOT, TINY_PPG, TORCHRUN, as_flags, interrupt, parse, read_rows, resume, same, wait_for
from gymnasium.spaces import Box, Discrete

from benchmark.recipe import RECIPES, apply

ENV, VECTORS, CONTINUOUS, ENVPOOL, MEMORY, RND, STORE, CLEANRL, WHOLE, FEWER = RECIPES


def load(tmp_path, source, small=True):
    path = tmp_path / "my_ppg.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("my_ppg", path)
    module = sys.modules["my_ppg"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ImpalaCNN = worker.SmallCNN if small else module.ImpalaCNN
    return module


def train(module, run_dir, **flags):
    module.main(conftest.make_args(module, run_dir, **flags))
    return read_rows(run_dir)


def record(module, name):
    calls, original = [], getattr(module, name)
    setattr(module, name, lambda *args: calls.append(args) or original(*args))
    return calls


def first_kls(rows):
    names = "losses/first_approx_kl", "losses/aux/first_kl_loss"
    return np.array([float(row[name]) for row in rows for name in names if row[name]])


def test_the_command(tmp_path):
    def recipe(*words):
        run = subprocess.run([sys.executable, "benchmark/recipe.py", *words], cwd=ROOT, capture_output=True, text=True)
        assert run.stderr.count("\n") == (run.returncode == 2)
        return run.stdout + run.stderr

    assert [line[:36].strip() for line in recipe().splitlines()] == list(RECIPES)
    path = tmp_path / "my_ppg.py"
    assert recipe("add memory", "take CONTINUOUS actions", "-o", path) == f"wrote {path}\n"
    source = path.read_text()
    assert source == apply(ENV, VECTORS, CONTINUOUS, MEMORY)
    assert "agent(last_obs, hidden[t + 1], 1)" in source and "hidden[t + 1]" not in apply(ENV)
    assert recipe(ENV, "-o", path) == f"recipe.py: {path} exists\n"
    assert source.startswith("# Recipes: Use another environment; Read vectors; Take continuous actions; Add memory\n")
    base, other = tmp_path / "base.py", tmp_path / "other.py"  # with a change of one's own, and a recipe
    base.write_text(apply(MEMORY).replace("seed: int = 1", "seed: int = 7"))
    assert recipe(ENV, MEMORY, "--base", base, "-o", other) == f"wrote {other}\n"  # with the part that needs both
    assert other.read_text() == apply(ENV, MEMORY).replace("seed: int = 1", "seed: int = 7")
    assert '"Add magic"' in recipe("Add magic", "-o", tmp_path / "new.py")
    error = recipe(ENV, ENVPOOL, "-o", tmp_path / "new.py")
    assert f'"{ENVPOOL}"' in error and "make_train_envs(" in error


class Blink(gymnasium.Env):
    """A reward of 1 a step, cut by a time limit after 5. The last image is another."""

    action_space, observation_space, seeds = Discrete(3), Box(0, 255, (64, 64, 3), np.uint8), []

    def reset(self, seed=None, options=None):
        self.seeds += [seed] if seed is not None else []
        self.t = 0
        return np.full((64, 64, 3), 7, np.uint8), {}

    def step(self, action):
        self.t += 1
        return np.full((64, 64, 3), 200 if self.t == 5 else 7, np.uint8), 1.0, False, False, {}


gymnasium.register("Blink-v0", Blink, max_episode_steps=5)


def test_another_environment(tmp_path, monkeypatch, capsys):
    module = load(tmp_path, apply(ENV))
    monkeypatch.setattr(Blink, "seeds", [])
    flags = {"env_id": "Blink-v0", "eval_interval": 2, "learning_rate": 0, "aux_learning_rate": 0}
    calls = record(module, "compute_gae")
    args = conftest.make_args(module, tmp_path / "run", **flags)
    rows = read_rows(resume(module, interrupt(module, args, 3 * 16 + 7)))
    assert [float(row["charts/episodic_return"]) for row in rows] == [5.0] * 4  # no episode is counted in part
    assert [row["eval/test_return"] for row in rows] == ["", "5.0"] * 2
    # each evaluation plays the same episodes; seeds of training are disjoint: resumed, of the next seed or rank
    training, evaluation, resumed, evaluation_ = np.reshape(Blink.seeds, (4, 4)).tolist()
    assert evaluation == evaluation_
    args = conftest.make_args(module, tmp_path, **flags | {"eval_interval": 0})
    run = SimpleNamespace(iteration=0, restore=lambda *_: None, log=print, save=print)
    module.train(module.replace(args, seed=2), run)
    monkeypatch.setattr(module, "RANK", 1)
    module.train(args, run)
    assert len({*training, *evaluation, *resumed, *Blink.seeds[16:]}) == 5 * 4
    # at a time limit, the value of the last observation is added; all rewards are the same
    agent = module.Agent(args, module.make_envs(args, 0, 0, 0))
    agent.load_state_dict(torch.load(tmp_path / "run" / "agent.pt"))
    last_value = agent(torch.full((1, 64, 64, 3), 200, dtype=torch.uint8)).values.item()
    rewards, _, firsts, *_ = calls[-9]
    ended = firsts[1:] == 1
    assert (rewards[ended] - rewards[~ended].mean()).numpy() == pytest.approx(0.999 * last_value, abs=1e-5)
    for space in (Box(0, 1, (64, 64, 3)), Box(0, 255, (3, 64, 64), np.uint8)):
        monkeypatch.setattr(Blink, "observation_space", space)
        with pytest.raises(SystemExit, match="2"):
            module.make_envs(args, 0, 0, 0)
        assert "has no uint8 images" in capsys.readouterr().err


REAL = {  # an environment: recipes, a package that need not be there, the return that training reaches
    "CartPole-v1": ([VECTORS], "gymnasium", 200),
    "Pendulum-v1": ([CONTINUOUS], "gymnasium", -250),
    "Acrobot-v1": ([VECTORS, MEMORY, RND], "gymnasium", None),
    "MiniGrid-Empty-5x5-v0": ([ENV], "minigrid", 0.9),
    "ALE/Breakout-v5": ([ENV], "ale_py", None),
    "bossfight": ([ENVPOOL], "envpool", None),
}
MARKS = [pytest.mark.learning, pytest.mark.timeout(3600)]
LEARNED = [pytest.param(name, x[2], marks=MARKS) for name, x in REAL.items() if x[2]]


@pytest.mark.parametrize("env_id, goal", [*((name, None) for name in REAL), *LEARNED])
def test_real_environments(tmp_path, env_id, goal):
    names, package, _ = REAL[env_id]
    pytest.importorskip(package)
    source, text = apply(*names), RECIPES[names[0]]
    if make_env := next((x for x in re.findall("```python\n(.*?)```", text, re.S) if package in x), ""):
        source = re.sub(r"def make_env\(.*?\n\n\n", lambda _: make_env + "\n\n", source, flags=re.S)
    command = re.search(f"python my_ppg.py --env-id {env_id}(.*?)```", text, re.S)
    flags = command[1].replace("\\\n", "").split() if command else as_flags(TINY_PPG)[2:]
    flags += ["--total-timesteps=256", "--num-steps=16", "--n-iteration=1"] if goal is None else []
    module, run_dir = load(tmp_path, source, small=False), tmp_path / "run"
    module.main(parse(module, "--env-id", env_id, *flags, "--no-cuda", "--run-dir", run_dir))
    returns = [float(row["charts/mean_return_100"]) for row in read_rows(run_dir)]
    assert first_kls(read_rows(run_dir)).max() < 1e-5 and (goal is None or returns[-1] > goal)


ONE_UPDATE = {"env_id": "starpilot", "num_minibatches": 1, "num_aux_rollouts": 8, "num_levels": 3}  # in a phase
ALGORITHM = [[MEMORY], [RND], [STORE], [CLEANRL], [WHOLE], [FEWER], [MEMORY, RND, CLEANRL, FEWER]]


@pytest.mark.parametrize("names", ALGORITHM)
def test_first_updates_and_resuming(tmp_path, names):
    module = load(tmp_path, apply(*names))
    kls = first_kls(train(module, tmp_path / "a", **ONE_UPDATE))
    assert len(kls) == (5 if FEWER in names else 6) and abs(kls).max() < 1e-7
    part = interrupt(module, conftest.make_args(module, tmp_path / "b", **ONE_UPDATE), 3 * 16 + 5)
    assert same(tmp_path / "a", resume(module, part))


@pytest.mark.slow
@pytest.mark.parametrize("names", [ALGORITHM[-1], [STORE], [VECTORS, MEMORY, RND], [CONTINUOUS, CLEANRL]])
def test_two_ranks(tmp_path, names):
    """A run ends where they have different weights. It is killed after its first checkpoint, and resumed."""
    (tmp_path / "my_ppg.py").write_text(apply(*names))
    env_id = "Pendulum-v1" if CONTINUOUS in names else "CartPole-v1" if VECTORS in names else "maze"
    flags = {"env_id": env_id, "total_timesteps": 512, "num_levels": 3, "num_minibatches": 1, "run_dir": "run"}
    with subprocess.Popen([*TORCHRUN, "my_ppg.py", *as_flags(CHEAP_PPG | flags)], cwd=tmp_path) as process:
        path = tmp_path / "run" / "checkpoint.pt"
        wait_for(lambda: path.exists() and torch.load(path)["iteration"] > 0)
        process.terminate()
    subprocess.run([*TORCHRUN, "my_ppg.py", "--resume=run"], cwd=tmp_path, check=True)
    assert len(read_rows(tmp_path / "run")) == 16


class Recall(Blink):
    """An image that is black or white and two grey ones: the last action must tell which the first was."""

    action_space = Discrete(2)

    def reset(self, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.t, self.cue = 0, self.np_random.integers(2)
        return np.full((64, 64, 3), 255 * self.cue, np.uint8), {}

    def step(self, action):
        self.t += 1
        return np.full((64, 64, 3), 99, np.uint8), float(self.t == 3 and action == self.cue), self.t == 3, False, {}


gymnasium.register("Recall-v0", Recall)


@pytest.mark.slow
def test_memory_recalls_and_its_chunks_are_whole_rollouts(tmp_path):
    module = load(tmp_path, apply(MEMORY, ENV))
    flags = {"env_id": "Recall-v0", "num_envs": 16, "num_aux_rollouts": 16, "gamma": 0.9, "learning_rate": 1e-3}
    more = {"e_policy": 4, "e_value": 4, "arch": "detach", "total_timesteps": 16 * 16 * 14}
    rows = train(module, tmp_path / "a", **flags, **more)
    assert np.mean([float(row["charts/episodic_return"]) for row in rows[-4:]]) > 0.9  # without memory, 0.5
    rows, other_rows = (train(module, tmp_path / f"{n}", chunk_size=n, total_timesteps=512, **flags) for n in (999, 70))
    for name in [name for name in rows[1] if name.startswith("losses/")]:
        assert float(rows[1][name]) == pytest.approx(float(other_rows[1][name]), abs=1e-5, rel=1e-4), name


def test_add_an_intrinsic_reward(tmp_path):
    module = load(tmp_path, apply(RND))
    calls = record(module, "compute_gae")
    rows = train(module, tmp_path / "run", env_id="coinrun", total_timesteps=64 * 12, learning_rate=1e-3)
    assert all((rewards > 0).all() for rewards, *_ in calls)  # coinrun itself has no reward in so few steps
    assert 0 < float(rows[-1]["losses/rnd_loss"]) < 0.5 * float(rows[0]["losses/rnd_loss"])


def test_losses_and_counts_of_updates(tmp_path):
    module = load(tmp_path, apply(STORE, CLEANRL, WHOLE, FEWER))
    pi, aux_values = module.Policy(torch.zeros(2, 3)), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    out = module.Outputs(pi, aux_values, torch.ones(2))
    mb = {"targets": torch.tensor([2.0, 0]), "values": torch.zeros(2), "old_logits": torch.zeros(2, 3)}
    mb |= {"advantages": torch.tensor([0.0, 7]), "actions": torch.tensor([2, 0])}
    inputs = None, module.Args(), out, mb
    assert module.clipped_value_loss(*inputs)[0] == 0.25 * (1.8**2 + 1) / 2  # the first change is clipped
    assert module.value_loss(*inputs)[0] == 0.5 * (1 + 1) / 2  # in the auxiliary phase
    assert module.joint_loss(*inputs)[1]["aux_value_loss"] == 0.5 * (3**2 + 3**2) / 2
    rewards = module.RewardNormalizer(module.Args(num_envs=1))(torch.tensor([[1.0], [3.0]]), torch.ones(3, 1))
    assert rewards.round().tolist() == [[10], [3]]  # after the first step, the deviation is nearly 0
    calls, rollouts, updates = (record(module, name) for name in ("mean_stats", "compute_gae", "policy_loss"))
    train(module, tmp_path / "a")
    columns = {tuple(x) for *_, mb in updates for x in mb["values"].view(16, -1).T.tolist()}
    assert columns == {tuple(x) for _, values, *_ in rollouts for x in values[:-1].T.tolist()}  # whole rollouts
    assert [stats["grad_norm"][0] for stats, _ in calls] == [2, 2, 2, 2, 4]  # the second of two auxiliary phases
    saved = torch.load(tmp_path / "a" / "checkpoint.pt")["shared"]
    for name in ("adam", "aux_adam"):  # one: of both phases, or of the auxiliary one
        assert {x["step"].item() for x in saved[name]["state"].values()} == {12.0, 4.0}
    train(module, tmp_path / "b", skip_phases=0, aux_share=0.3)
    assert [stats["grad_norm"][0] for stats, _ in calls[5:]] == [2, 2, 2, 2, 2, 2]
