"""Evaluation during training, and benchmark/evaluate.py on what training leaves."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import imageio_ffmpeg
import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
import tyro
from conftest import ROOT, comparable, level_seeds, make_agent, make_args, read_rows, train
from worker import SmallCNN

import ppg_procgen
import ppo_procgen
from benchmark import evaluate as tool
from benchmark import report
from ppg_procgen import NUM_LEVELS

GAME = {"env_id": "bossfight", "num_levels": 2, "start_level": 25, "num_steps": 8, "total_timesteps": 64}
GAMES = {ppg_procgen: GAME | {"arch": "detach"}, ppo_procgen: GAME}  # short episodes, one network: fast
SOURCE = (ROOT / "ppg_procgen.py").read_text()
ENVS = """
class make_envs:  # a level's number gives its length; rewards of 1, in hard mode 2
    def __init__(self, args, seed, *levels, **options):
        self.length, self.reward = seed % 4 + 1, 1 + (args.distribution_mode == "hard")
        self.single_observation_space = argparse.Namespace(shape=(64, 64, 3))
        self.single_action_space = argparse.Namespace(n=2)

    def reset(self, seed=None):
        self.time = 0
        return np.full((1, 64, 64, 3), 7, np.uint8), {}

    def step(self, actions):
        self.time += 1
        ends = np.array([self.time == self.length])
        return np.full((1, 64, 64, 3), 7, np.uint8), np.array([self.reward]), ~ends & ends, ends, {}

    def close(self):
        pass
"""


class SimpleAgent(torch.nn.Linear):  # evaluate() asks for the device of its parameters
    """Stands in for an agent: the most probable action depends on the image alone, and not on the batch."""

    def forward(self, obs):
        best = obs.flatten(1).long().sum(1) % 15
        return SimpleNamespace(pi=ppg_procgen.Policy(100.0 * torch.nn.functional.one_hot(best, 15)))


def test_short_episodes_count_no_more_than_long_ones(script):
    """Environment i ends an episode every i + 1 steps, the second one by a time limit. One episode counts of each."""

    def step(actions):
        envs.time += 1
        ends = envs.time % np.array([1, 2, 3]) == 0
        return obs, np.ones(3), ends & [True, False, True], ends & [False, True, False], {}

    obs = np.zeros((3, 64, 64, 3), np.uint8)
    envs = SimpleNamespace(num_envs=3, time=0, reset=lambda seed: (obs, {}), step=step)
    assert script.evaluate(SimpleAgent(1, 1), envs, 1).tolist() == [1, 2, 3]


def test_the_seed_draws_the_actions(script, monkeypatch):
    monkeypatch.setattr(script, "ImpalaCNN", SmallCNN)
    agent = make_agent(script)
    args = script.Args(env_id="fruitbot", num_envs=8, cuda=False)
    first, second, other = (script.evaluate(agent, script.make_envs(args, 0, 5, 1), x).tolist() for x in (1, 1, 2))
    assert first == second != other


def test_a_reset_begins_new_episodes_but_not_twice(script):
    envs = script.make_envs(script.Args(env_id="bossfight", num_envs=8, env_threads=0), 3, 0, 0)
    levels = [level_seeds(envs)]
    for _ in range(3):
        assert np.array_equal(envs.reset(seed=1)[0].copy(), envs.reset()[0]) and level_seeds(envs) == levels[-1]
        for _ in range(5):
            envs.step(np.zeros(8, np.int32))
        envs.reset()
        levels.append(level_seeds(envs))
    assert all(len(set(played)) == 4 for played in zip(*levels, strict=True))


@pytest.fixture(scope="module", params=[ppg_procgen, ppo_procgen], ids=["ppg", "ppo"])
def evaluated(request, tmp_path_factory):
    """A script, the folder of its run with evaluations; for each environment its first levels, and all played."""
    script, levels = request.param, []

    def make_envs(*args, original=script.make_envs):
        envs = original(*args)
        first, played, step = level_seeds(envs), set(), envs.step
        levels.append((first, played))
        envs.step = lambda actions: (played.update(level_seeds(envs)), step(actions))[1]
        return envs

    args = make_args(script, tmp_path_factory.mktemp("evaluated") / "run", **GAMES[script], eval_interval=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "make_envs", make_envs)
        return script, train(script, args, small=False), levels


def test_unseen_levels_are_unseen_and_the_same_every_time(evaluated):
    script, run_dir, [(_, training), (first, played), (second, _)] = evaluated
    assert training == {25, 26} and min(played) >= 27 and first == second
    agent = make_agent(script, **GAMES[script])
    agent.load_state_dict(torch.load(run_dir / "agent.pt"))
    args = script.Args(env_id="bossfight", num_envs=4, cuda=False)
    envs = script.make_envs(args, NUM_LEVELS - 2, 27, NUM_LEVELS - 27)  # from the first level that is unseen
    assert level_seeds(envs) == first
    assert float(read_rows(run_dir)[-1]["eval/test_return"]) == script.evaluate(agent, envs, 1).mean()


def test_evaluation_does_not_touch_training(evaluated, run):
    script, run_dir, _ = evaluated
    weights, plain_weights = comparable(run_dir)[1], comparable(run(script, **GAMES[script], small=False))[1]
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=0)


def test_evaluations_come_at_their_interval_and_at_the_end(run, script, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda *_: np.array([1.0, 2]))
    rows = read_rows(run(script, eval_interval=3))  # of four iterations
    assert [row["eval/test_return"] for row in rows] == ["", "", "1.5", "1.5"]


def command(*argv):
    args = tyro.cli(tool.Args, args=["--no-cuda", *map(str, argv)])
    tool.main(args)
    out = args.out or max((args.paths[0] / "evaluation").iterdir())
    return pd.read_csv(out / "episodes.csv"), pd.read_csv(out / "summary.csv")


def test_each_level_is_played_whatever_the_batches(monkeypatch):
    def play(**flags):
        rows = tool.play(ppg_procgen, SimpleAgent(1, 1), config, tool.Args(paths=(), **flags), range(7), "")
        return rows.sort_values("level", ignore_index=True)

    config = ppg_procgen.Args(env_id="fruitbot", cuda=False, num_envs=1)
    together = play(episodes=7)
    assert len({play(episodes=1, seed=seed)["level"].item() for seed in range(9)}) > 1
    assert play(episodes=17)["level"].value_counts().tolist() == [3, 3, 3, 2, 2, 2, 2]
    monkeypatch.setattr(tool, "BATCH_SIZE", 3)  # three batches
    pd.testing.assert_frame_equal(play(episodes=17, greedy=True), together)  # a repeat would be the same episode
    for level, value in zip(together["level"], together["return"], strict=True):
        assert ppg_procgen.evaluate(SimpleAgent(1, 1), ppg_procgen.make_envs(config, 0, level, 1), 1) == value
    assert together["level"].tolist() == list(range(7)) and together["return"].nunique() > 1


def test_intervals_are_over_levels():
    rows = pd.DataFrame({"level": [4, 5, 4, 9, 4], "return": [0.0, 5, 3, 10, 6]})  # means 3, 5, 10
    summary = tool.summarize(rows, 1, 11)
    margin = 4.302653 * 13**0.5 / 3**0.5  # Student's distribution with 2 degrees of freedom; the variance is 13
    expected = {"episodes": 5, "num_levels": 3, "mean": 6, "stderr": (13 / 3) ** 0.5, "low": 6 - margin}
    assert summary == pytest.approx(expected | {"high": 6 + margin, "score": 0.5})
    one_level = tool.summarize(rows.assign(level=4), 1, 11)
    assert one_level["stderr"] == pytest.approx(rows["return"].sem()) and one_level["num_levels"] == 1


def test_a_run_is_evaluated(evaluated, tmp_path, capsys):
    _, run_dir, _ = evaluated
    episodes, summary = command(run_dir, "--episodes", 4)
    printed = capsys.readouterr().out
    levels = episodes["level"].tolist()
    assert episodes["levels"].tolist() == ["train"] * 4 + ["test"] * 4
    assert set(levels[:4]) == {25, 26} and min(levels[4:]) >= 27
    assert set(summary["iteration"]) == set(episodes["iteration"]) == {2}
    for row in summary.to_dict("records"):
        assert row["mean"] == episodes[episodes["levels"] == row["levels"]].groupby("level")["return"].mean().mean()
        assert row["score"] == pytest.approx((row["mean"] - 0.5) / 12.5)
        assert f"easy {row['levels']}, 4 episodes: {row['mean']:.2f} ± {row['stderr']:.2f}" in printed
    assert tool.level_range("test", {"start_level": 10, "num_levels": 2}).start == 12
    again, _ = command(run_dir / "agent.pt", "--episodes", 4, "--out", tmp_path / "again")
    assert again.pop("iteration").unique() == ["unknown"]
    pd.testing.assert_frame_equal(again.drop(columns="weights"), episodes.drop(columns=["weights", "iteration"]))
    alone = shutil.copy(run_dir / "agent.pt", tmp_path)  # weights alone: by this repository's script
    again, _ = command(alone, *"--env-id bossfight --levels 25:27 --episodes 4 --out".split(), tmp_path / "alone")
    assert again["return"].tolist() == episodes["return"].tolist()[:4]


def test_agents_on_the_same_levels_are_paired_and_reported(evaluated, tmp_path, monkeypatch, capsys):
    _, run_dir, _ = evaluated
    (tmp_path / "other").mkdir()
    for name in ("args.json", "agent.pt"):
        shutil.copy(run_dir / name, tmp_path / "other")
    returns = [[0.0, 5, 3], [1.0, 5, 7]]
    rows = iter(pd.DataFrame({"level": [40, 41, 42], "return": x, "length": 1}) for x in returns)
    monkeypatch.setattr(tool, "play", lambda *_: next(rows))
    _, summary = command(run_dir, tmp_path / "other", "--levels", "40:43", "--out", tmp_path / "out")
    first, second = summary.filter(like="difference").to_numpy()
    interval = scipy.stats.ttest_rel(*reversed(returns)).confidence_interval()
    assert np.isnan(first).all() and second == pytest.approx([5 / 3, *interval])
    assert f"minus {run_dir}/checkpoint.pt: +1.67" in capsys.readouterr().out
    text = report.report_evaluations(report.Args((tmp_path,)), {str(run_dir.resolve()): "a group"})[-1]
    assert "a group" in text and " other " in text and "2.67 (1)" in text and "4.33 (1)" in text


def make_run(folder, source, **flags):
    """The run folder of a copy, with an agent that prefers its actions clearly."""
    (folder / "my_ppg.py").write_text(source)
    (folder / "plot.py").write_text("def evaluate(): pass\nraise SystemExit('this must not be run')")
    torch.save({}, folder / "agent.pt")
    (folder / "args.json").write_text(json.dumps({"args": {"arch": "detach", "num_levels": 2} | flags}))
    script = tool.load_script(folder, {})
    args = script.Args(arch="detach", num_envs=8, env_threads=0, cuda=False)
    agent = script.Agent(args, script.make_envs(args, 0, 5, 1))
    agent.policy_head.weight.data *= 10
    torch.save(agent.state_dict(), folder / "agent.pt")
    return lambda: script.evaluate(agent, script.make_envs(args, 0, 5, 1), 0).tolist(), script


def test_a_changed_copy_plays_as_its_evaluate(tmp_path, monkeypatch):
    evaluate, script = make_run(tmp_path, SOURCE.replace("/ 255.0", "/ 127.5 - 1"))
    monkeypatch.setattr("random.Random.getrandbits", lambda *_: 0)  # the seed
    episodes, _ = command(tmp_path, "--env-id", "starpilot", "--levels", "5:6", "--episodes", 8)
    assert episodes["return"].tolist() == evaluate()
    script.ImpalaCNN.forward = ppg_procgen.ImpalaCNN.forward
    assert episodes["return"].tolist() != evaluate()


def test_other_environments_are_played_by_their_seeds_greedily_in_hard_mode_with_a_video(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_module.py").touch()  # in the folder where the copy was started
    Path("run").mkdir()
    make_run(tmp_path / "run", "import argparse\nimport my_module\n" + SOURCE + ENVS, env_id="Other-v0")
    out = tmp_path / "12:30"
    episodes, summary = command(tmp_path / "run", *"--greedy --levels 12:15 --mode hard --video --out".split(), out)
    rows = episodes.sort_values("level")[["level", "length", "return"]]
    assert rows.values.tolist() == [[12, 1, 2], [13, 2, 4], [14, 3, 6]] and summary["score"].isna().all()
    assert sys.modules["evaluated_script"].Policy(torch.tensor([[0.0, 0.1]] * 99)).sample().all()
    _, *frames = imageio_ffmpeg.read_frames(f"{out}/0_hard_12-15.mp4")
    assert len(frames) == 3


def test_a_video_has_procgens_own_images(tmp_path, monkeypatch):
    monkeypatch.setattr(ppg_procgen, "evaluate", lambda _, envs, seed: envs.step(np.zeros(4, int)))
    tool.record_video(ppg_procgen, None, ppg_procgen.Args(), [1, 2, 3, 4], 1, tmp_path / "x.mp4")
    _, frame = imageio_ffmpeg.read_frames(str(tmp_path / "x.mp4"))
    assert np.frombuffer(frame, np.uint8).reshape(512, 4, 512, 3).std((0, 2, 3)).min() > 5  # none is blank


BAD = {
    "--env-id maze --levels test": "none are unseen",
    "--env-id maze --levels 5:3": "no such levels",
    "--env-id maze --out out": "--out out is not empty",  # results are never replaced
    "--env-id maze --episodes 0": "--episodes of at least 1",
    "--env-id maze": "one file of",
    "": "add --env-id",
}


@pytest.mark.parametrize("flags, message", BAD.items())
def test_bad_arguments_are_refused(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save({}, "agent.pt")
    (tmp_path / "out").mkdir()
    for path in ("out/summary.csv", "my_ppg.py", "copy_of_my_ppg.py", "args.json"):
        (tmp_path / path).write_text('{"args": {}}' if path == "args.json" else SOURCE)
    with pytest.raises(SystemExit, match="2"):
        command(tmp_path, *flags.split())
    assert message in capsys.readouterr().err
