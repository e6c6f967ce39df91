"""Evaluation during training, and benchmark/evaluate.py on what training leaves."""

import json
import sys

import imageio_ffmpeg
import numpy as np
import pandas as pd
import pytest
import torch
import tyro
from conftest import comparable, level_seeds, make_agent, make_args, read_rows, train
from test_recipes import apply
from worker import SmallCNN

import ppg_procgen
import ppo_procgen
from benchmark import evaluate as tool
from ppg_procgen import NUM_LEVELS, ProcgenVectorEnv

GAME = {"env_id": "bossfight", "num_levels": 3, "start_level": 10, "total_timesteps": 128}  # short episodes


class SimpleAgent(torch.nn.Module):
    """Stands in for an agent: the most probable action depends on the image alone, and not on the batch."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(100.0))

    def forward(self, obs, value=True):
        best = obs.flatten(1).long().sum(1) % 15
        logits = self.scale * torch.nn.functional.one_hot(best, 15)
        return ppg_procgen.Outputs(logits, None, None)


class ShortEnv(ProcgenVectorEnv):
    """Environment i ends an episode every i + 1 steps, and gives a reward of 1 in each step, in hard mode 2."""

    def __init__(self, env_id, num_envs, mode="easy", **options):
        super().__init__(env_id, num_envs, mode, **options)
        self.rewards = np.full(num_envs, 2 if mode == "hard" else 1)
        self.time = 0

    def step(self, actions):
        obs, *_, infos = super().step(actions)
        self.time += 1
        done = self.time % np.arange(1, self.num_envs + 1) == 0
        limited = np.arange(self.num_envs) % 2 == 1  # these end by a time limit
        return obs, self.rewards, done & ~limited, done & limited, infos


def test_short_episodes_count_no_more_than_long_ones():
    """One episode of each environment, also if others end many in the same time."""
    lengths = list(range(1, 9))
    for evaluate in (ppg_procgen.evaluate, ppo_procgen.evaluate):
        assert evaluate(SimpleAgent(), ShortEnv("bossfight", 8), 1).tolist() == lengths
    played = tool.play(ppg_procgen, SimpleAgent(), ShortEnv("bossfight", 8), 1)
    np.testing.assert_array_equal(played, [lengths, lengths])


def test_the_seed_draws_the_actions(script, monkeypatch):
    monkeypatch.setattr(script, "ImpalaCNN", SmallCNN)
    agent = make_agent(script)
    envs = ProcgenVectorEnv("starpilot", 8, num_levels=1, start_level=5)
    first, second, other = (script.evaluate(agent, envs, seed).tolist() for seed in (1, 1, 2))
    assert first == second != other


class WatchedEnv(ProcgenVectorEnv):
    """Notes the first levels, and all that are played."""

    created = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.first, self.levels = level_seeds(self), set()
        self.created.append(self)

    def step(self, actions):
        self.levels.update(level_seeds(self))
        return super().step(actions)


@pytest.fixture(scope="module", params=[ppg_procgen, ppo_procgen])
def evaluated(request, tmp_path_factory):
    """A script, the folder of its run with evaluations, and the environments that it made."""
    script = request.param
    run_dir = tmp_path_factory.mktemp("evaluated") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "ProcgenVectorEnv", WatchedEnv)
        patch.setattr(WatchedEnv, "created", [])
        train(script, make_args(script, run_dir, **GAME, eval_interval=1), small=False)
        return script, run_dir, WatchedEnv.created


def test_unseen_levels_are_unseen_and_the_same_every_time(evaluated):
    script, run_dir, (training, test) = evaluated  # made once: procgen never frees all memory of an environment
    assert training.levels == {10, 11, 12}
    assert min(test.levels) >= 13
    assert level_seeds(test) == test.first  # where the next evaluation would begin
    options = {"seed": NUM_LEVELS - 1, "start_level": 13, "num_levels": NUM_LEVELS - 13}
    assert test.first == level_seeds(ProcgenVectorEnv("bossfight", 4, **options))  # from the first one that is unseen

    agent = make_agent(script)
    agent.load_state_dict(torch.load(run_dir / "agent.pt"))
    envs = ProcgenVectorEnv("bossfight", 4, **options)
    returns, _ = tool.play(script, agent, envs, seed=1)
    assert float(read_rows(run_dir)[-1]["eval/test_return"]) == returns.mean()


def test_evaluation_does_not_touch_training(evaluated, run):
    script, run_dir, _ = evaluated
    _, weights = comparable(run_dir)
    _, plain_weights = comparable(run(script, **GAME, small=False))
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=0)


def test_evaluations_come_at_their_interval_and_at_the_end(run, script, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda *_: np.array([1.0, 2]))
    rows = read_rows(run(script, total_timesteps=4 * 64, eval_interval=3))
    assert [row["eval/test_return"] for row in rows] == ["", "", "1.5", "1.5"]


def command(*argv):
    flags = ["--no-cuda", *map(str, argv)]
    tool.main(tyro.cli(tool.Args, args=flags))


def test_each_level_is_played_whatever_the_batches(monkeypatch):
    def play(episodes):
        args = tool.Args(path=None, episodes=episodes)
        rows = tool.play_set(ppg_procgen, SimpleAgent(), config, args, range(7), "")
        return rows.sort_values("level", ignore_index=True)

    config = ppg_procgen.Args(env_id="bossfight", cuda=False)
    together = play(7)
    assert play(17)["level"].value_counts().min() == 2
    monkeypatch.setattr(tool, "BATCH_SIZE", 3)  # three batches
    pd.testing.assert_frame_equal(play(7), together)
    for level in range(7):
        envs = ProcgenVectorEnv("bossfight", 1, num_levels=1, start_level=level)
        returns, lengths = tool.play(ppg_procgen, SimpleAgent(), envs, seed=1)
        assert together.loc[level].tolist() == [level, *returns, *lengths]


def test_a_run_is_evaluated(evaluated, tmp_path, capsys):
    _, run_dir, _ = evaluated
    command(run_dir, "--episodes", 5, "--out", tmp_path)
    printed = capsys.readouterr().out
    episodes = pd.read_csv(tmp_path / "episodes.csv")
    levels = episodes["level"].tolist()
    assert episodes["levels"].tolist() == ["train"] * 5 + ["test"] * 5
    assert set(levels[:5]) == {10, 11, 12}
    assert min(levels[5:]) >= 13
    for row in pd.read_csv(tmp_path / "summary.csv").to_dict("records"):
        returns = episodes[episodes["levels"] == row["levels"]]["return"]
        mean = returns.mean()
        stderr = returns.sem()
        assert row["mean"] == pytest.approx(mean)
        assert row["high"] == pytest.approx(mean + 2.776445 * stderr)  # Student's distribution, 4 degrees of freedom
        assert row["score_mean"] == pytest.approx((mean - 0.5) / 12.5)
        assert f"easy {row['levels']}, 5 episodes: {mean:.2f} ± {stderr:.2f}" in printed

    command(run_dir / "checkpoint.pt", "--episodes", 5, "--out", tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "episodes.csv"), episodes)


def test_greedy_episodes_on_hard_levels_and_a_video(tmp_path, monkeypatch):
    def load_short(path, load=tool.load_script):
        script = load(path)
        script.ProcgenVectorEnv = type("ShortEnv", (ShortEnv,), {})  # a new one, because the tool changes it
        return script

    monkeypatch.setattr(tool, "load_script", load_short)
    monkeypatch.chdir(tmp_path)
    torch.save(make_agent(ppg_procgen).state_dict(), "agent.pt")
    flags = "agent.pt --env-id starpilot --greedy --modes hard --levels 12:15 --episodes 3 --video --out 12:30".split()
    with monkeypatch.context() as patch, pytest.raises(TypeError, match="not callable"):
        patch.setattr(imageio_ffmpeg, "write_frames", None)
        command(*flags)
    rows = pd.read_csv("12:30/episodes.csv")
    assert sorted(rows["level"]) == [12, 13, 14]
    assert rows["return"].tolist() == [2, 4, 6]
    command(*flags)
    assert sys.modules["evaluated_script"].Policy(torch.tensor([[0.0, 0.1]] * 99)).sample().all()
    _, *frames = imageio_ffmpeg.read_frames(f"{tmp_path}/12:30/hard_12-15.mp4")
    assert len(frames) == 4
    image = np.frombuffer(frames[-1], np.uint8).reshape(2, 512, 2, 512, 3)
    assert image.std((1, 3, 4)).min() > 5  # none of the four parts is blank


def make_run(folder, source, env_id):
    """The run folder of a copy, with an agent that prefers its actions clearly."""
    (folder / "my_ppg.py").write_text(source)
    script = tool.load_script(folder / "my_ppg.py")
    args = script.Args(env_id=env_id, arch="detach", num_envs=8, cuda=False)
    envs = script.make_envs(args, 0, 5, 1)
    agent = script.Agent(args, envs)
    agent.policy_head.weight.data *= 10
    torch.save(agent.state_dict(), folder / "agent.pt")
    (folder / "args.json").write_text(json.dumps({"args": vars(args)}))
    return script, agent, envs


@pytest.mark.parametrize(
    "recipes, old, new",
    [((), "/ 255.0", "/ 127.5 - 1"), ((), "F.relu(self.dense", "F.gelu(self.dense"), (("Stack frames",), "", "")],
)
def test_a_changed_copy_plays_as_its_evaluate(recipes, old, new, tmp_path, monkeypatch):
    script, agent, envs = make_run(tmp_path, apply(*recipes).replace(old, new), "starpilot")
    monkeypatch.setattr("random.Random.getrandbits", lambda *_: 0)  # the seed
    command(tmp_path, "--levels", "5:6", "--episodes", 8)
    returns = pd.read_csv(tmp_path / "evaluation" / "episodes.csv")["return"].tolist()
    assert returns == script.evaluate(agent, envs, 0).tolist()
    script.ImpalaCNN.forward = ppg_procgen.ImpalaCNN.forward
    assert (returns == script.evaluate(agent, envs, 0).tolist()) == bool(recipes)


def test_environments_without_levels_are_played_on_fresh_episodes(tmp_path):
    make_run(tmp_path, apply("Use another environment"), "Blink-v0")
    command(tmp_path, "--episodes", 70, "--video")
    rows = pd.read_csv(tmp_path / "evaluation" / "episodes.csv")
    assert rows["level"].isna().all()
    assert rows["return"].tolist() == rows["length"].tolist() == [5] * 70
    _, *frames = imageio_ffmpeg.read_frames(f"{tmp_path}/evaluation/easy_all.mp4")
    assert len(frames) == 5
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path, "--levels", "test")


BAD = {"": "add --env-id", "--env-id maze --levels test": "are unseen levels", "--episodes 0": "must be at least 1"}


@pytest.mark.parametrize("flags, message", BAD.items())
def test_bad_arguments_are_refused(flags, message, tmp_path, capsys):
    torch.save(make_agent(ppo_procgen).state_dict(), tmp_path / "agent.pt")
    old_run = {"num_levels": 0, "start_level": 2**30}  # of all levels: procgen ignored its start_level
    (tmp_path / "args.json").write_text(json.dumps({"args": old_run}))
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path, *flags.split())
    assert message in capsys.readouterr().err
    assert not (tmp_path / "evaluation").exists()
