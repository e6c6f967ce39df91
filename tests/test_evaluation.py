"""Evaluation and videos during training, and benchmark/evaluate.py on what training leaves."""

import csv
import importlib
import math
import runpy
import shutil
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from conftest import level_seeds, make_args, read_rows, train
from torch import nn

import ppg_procgen
import ppo_procgen
from ppg_procgen import ProcgenVectorEnv, evaluate, load_checkpoint

GAME = {"env_id": "bossfight", "num_levels": 3, "start_level": 10, "total_timesteps": 128}  # short episodes
EVALUATION = {"eval_interval": 1, "eval_episodes": 4}


VIDEO_STEPS = (2, 4, 6, 8)  # where the episodes of a video are said to end: whole ones take a while to encode


class WatchedEnv(ProcgenVectorEnv):
    """Notes the levels that are played: a session for each state that is loaded, with the level seeds at each step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.is_video = "render_mode" in options
        self.sessions = [[level_seeds(self)]]

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.sessions.append([level_seeds(self)])

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        self.sessions[-1].append(level_seeds(self))
        if self.is_video:
            terminated = np.array([len(self.sessions[-1]) > steps for steps in VIDEO_STEPS])
        return obs, rewards, terminated, truncated, info

    def all_levels(self):
        return set(chain(*chain(*self.sessions)))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Folder and environments of a PPG run with evaluations and videos."""
    run_dir, created = tmp_path_factory.mktemp("evaluated") / "run", []

    class Listed(WatchedEnv):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.options = options
            created.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppg_procgen, "ProcgenVectorEnv", Listed)
        train(ppg_procgen, make_args(ppg_procgen, run_dir, **GAME, **EVALUATION, capture_video=True), small=False)
    return run_dir, created


class SimpleAgent(nn.Module):
    """Stands in for Agent where only speed matters, or that an observation's logits are the same in any batch."""

    def __init__(self, arch="dual", num_actions=15, obs_shape=(64, 64, 3)):
        super().__init__()
        self.heads = nn.Linear(12, num_actions + 2)
        nn.init.zeros_(self.heads.weight)

    def forward(self, obs, policy=True, value=True):
        x = self.heads(obs[:, ::32, ::32].flatten(1).float())
        best = obs.flatten(1).long().sum(1) % 15
        return ppg_procgen.Outputs(x[:, :-2] + nn.functional.one_hot(best, 15), x[:, -1], x[:, -2])


# ---- evaluate()


class ScriptedEnvs:
    """Episodes of given lengths (num_envs, episodes), and a reward of 1 a step."""

    def __init__(self, lengths):
        self.num_envs, self.lengths, self.actions = len(lengths), lengths, []
        self.left, self.next = lengths[:, 0].copy(), np.ones(len(lengths), int)

    def reset(self):
        return np.zeros((self.num_envs, 64, 64, 3), np.uint8), {}

    def step(self, actions):
        self.actions.append(actions)
        self.left -= 1
        done = self.left == 0
        self.left[done] = self.lengths[done, self.next[done]]
        self.next += done
        return *self.reset()[:1], np.ones(self.num_envs), done, np.zeros_like(done), {}


def test_short_episodes_count_no_more_than_long_ones():
    """An episode from each environment, also if others end many in the same time."""
    lengths = np.random.default_rng(1).choice([1, 20], (64, 40))
    lengths[0] = 1  # and a game in which all are short
    agent, playing = SimpleAgent(), []
    returns = evaluate(agent, ScriptedEnvs(lengths), 1, on_step=lambda mask: playing.append(mask.tolist()))
    np.testing.assert_array_equal(returns, lengths[:, 0])
    assert playing == [(lengths[:, 0] > t).tolist() for t in range(1, 21)]


def test_actions_are_sampled_from_a_stream_of_their_own_or_greedy():
    agent = SimpleAgent()
    state = torch.get_rng_state()

    def actions(seed, greedy):
        envs = ScriptedEnvs(np.full((8, 2), 5))
        evaluate(agent, envs, seed, greedy)
        return np.array(envs.actions)

    sampled = actions(1, False)
    np.testing.assert_array_equal(sampled, actions(1, False))
    assert (sampled != actions(2, False)).any() and len(np.unique(sampled)) > 1
    assert (actions(1, True) == 0).all()  # all observations are black, so action 0 is the most probable
    assert torch.equal(torch.get_rng_state(), state)


# ---- evaluation during training


def test_unseen_levels_are_unseen_and_the_same_every_time(evaluated):
    run_dir, (training, test, train, video) = evaluated  # no more than these four are ever made
    assert training.all_levels() <= {10, 11, 12} and train.all_levels() <= {10, 11, 12}
    assert min(test.all_levels() | video.all_levels()) >= 13
    for envs in (test, video):  # a few levels of two thousand million seldom hit the three of the training
        assert envs.options["start_level"] == 13 and envs.options["num_levels"] == ppg_procgen.NUM_LEVELS - 13
    assert len(test.all_levels()) > 4
    for envs in (test, train, video):
        _, first, second = envs.sessions  # what came before was never played
        assert first[0] == second[0] and len(first[0]) == 4
    for row in read_rows(run_dir):
        gap = float(row["eval/train_return"]) - float(row["eval/test_return"])
        assert float(row["eval/generalization_gap"]) == pytest.approx(gap)
        assert float(row["eval/train_stderr"]) >= 0 and float(row["eval/test_stderr"]) >= 0


def test_without_training_levels_all_levels_are_the_test(run):
    row = read_rows(run(env_id="bossfight", total_timesteps=64, eval_interval=5, eval_episodes=2))[0]  # once at the end
    assert row["eval/test_return"] != "" and not {"eval/train_return", "eval/generalization_gap"} & set(row)


def test_evaluations_come_at_their_interval_and_at_the_end(run, script, monkeypatch):
    monkeypatch.setattr(script, "evaluate", lambda *_: np.array([1.0, 2]))
    rows = read_rows(run(script, total_timesteps=4 * 64, eval_interval=3))
    assert [row["eval/test_return"] != "" for row in rows] == [False, False, True, True]


def test_an_evaluation_logs_mean_and_standard_error(run, monkeypatch, script):
    monkeypatch.setattr(script, "evaluate", lambda *_: np.array([1.0, 2, 6]))
    row = read_rows(run(script, total_timesteps=64, eval_interval=1))[0]
    assert float(row["eval/test_return"]) == 3
    assert float(row["eval/test_stderr"]) == pytest.approx(scipy.stats.sem([1, 2, 6]))


def identical(run_dir, other):
    """Whether two runs have the same records, but for evaluations and times, and the same weights, games and random
    generators in the end."""
    states = []
    for folder in (run_dir, other):
        timed = ("time/", "eval/", "wall_time", "charts/SPS")
        rows = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_rows(folder)]
        checkpoint = load_checkpoint(folder / "checkpoint.pt")
        (own,) = checkpoint["ranks"]
        tensors = [*checkpoint["agent"].values(), *own["envs"]["games"], own["rng"]]
        tensors += torch.load(folder / "agent.pt", weights_only=True).values()
        states.append((rows, [tensor.numpy().tobytes() for tensor in tensors]))
    return states[0] == states[1]


def test_evaluation_and_video_do_not_touch_training(evaluated, run):
    run_dir, _ = evaluated
    plain = run(**GAME, small=False)
    assert identical(run_dir, plain)
    assert not list(plain.glob("*.mp4")) and "eval/test_return" not in read_rows(plain)[0]


def test_evaluation_does_not_touch_training_in_ppo(run):
    plain, with_evaluation = run(ppo_procgen, **GAME), run(ppo_procgen, **GAME, **EVALUATION)
    assert identical(with_evaluation, plain)
    assert read_rows(with_evaluation)[0]["eval/test_return"] != ""


def decode(path):
    """Frames (T, 1024, 1024, 3) of an mp4."""
    from imageio_ffmpeg import read_frames

    meta, *frames = read_frames(str(path))
    assert meta["size"] == (1024, 1024) and meta["fps"] == 15
    return np.stack([np.frombuffer(frame, np.uint8).reshape(1024, 1024, 3) for frame in frames]).astype(int)


def test_videos_show_all_frames_of_four_games(evaluated):
    run_dir, _ = evaluated
    for step in (64, 128):
        frames = decode(run_dir / f"{step}.mp4")
        assert len(frames) == VIDEO_STEPS[-1]
        tiles = frames.reshape(-1, 2, 512, 2, 512, 3).swapaxes(2, 3).reshape(-1, 4, 512, 512, 3)
        assert (tiles.std(axis=(2, 3, 4)) > 5).all() and (tiles.max(axis=(2, 3, 4)) > 100).all()  # not black or blank
        assert (abs(np.diff(tiles, axis=0)).mean(axis=(2, 3, 4)) > 0.1).all()  # each plays on, in every frame
        assert all(abs(tiles[0, i] - tiles[0, j]).mean() > 1 for i in range(4) for j in range(i))
    assert not list(run_dir.glob("*.tmp*"))


def test_a_broken_ffmpeg_does_not_end_the_run(run, monkeypatch, capsys):
    import imageio_ffmpeg

    def write_frames(path, *args, **options):
        Path(path).write_bytes(b"half a video")
        raise OSError("no ffmpeg here")

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", write_frames)
    run_dir = run(total_timesteps=64, capture_video=True)
    assert len(read_rows(run_dir)) == 1 and not list(run_dir.glob("*.mp4"))
    assert "no ffmpeg here" in capsys.readouterr().err


def resident_megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.slow
def test_memory_does_not_grow_over_fifty_evaluations(run, monkeypatch):
    megabytes = []

    def watched(*args, **options):
        result = evaluate(*args, **options)
        megabytes.append(resident_megabytes())
        return result

    monkeypatch.setattr(ppg_procgen, "Agent", SimpleAgent)
    monkeypatch.setattr(ppg_procgen, "evaluate", watched)
    run(**GAME | EVALUATION | {"num_steps": 4, "total_timesteps": 50 * 16, "e_auxiliary": 0, "checkpoint_interval": 99})
    assert len(megabytes) == 2 * 50  # on unseen and on training levels
    assert megabytes[-1] - megabytes[19] < 8  # new games for each would leak 0.4 MB, 16 in all


# ---- benchmark/evaluate.py


@pytest.fixture
def tool():
    """benchmark/evaluate.py as a module."""
    return importlib.import_module("benchmark.evaluate")


@pytest.fixture
def command(tool, monkeypatch):
    """Runs it as from the command line, and gives its exit code."""

    def run_command(*argv):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, argv)])
        try:
            runpy.run_path(tool.__file__, run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0

    return run_command


def read_csv(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_each_level_is_played_whatever_the_batches(tool, monkeypatch):
    agent = SimpleAgent()  # its actions do not depend on the batch
    nn.init.zeros_(agent.heads.bias)

    def play(episodes):
        args = tool.Args(path=Path(), greedy=True, episodes=episodes)
        return tool.play_set(agent, args, "bossfight", "easy", "0:7", range(7), Path()).to_dict("records")

    def by_level(rows):
        return sorted((row["level"], row["return"], row["length"]) for row in rows)

    together = by_level(play(7))
    assert [level for level, *_ in together] == list(range(7))
    levels = [row["level"] for row in play(17)]
    assert len(levels) == 17 and {levels.count(level) for level in range(7)} == {2, 3}
    monkeypatch.setattr(tool, "BATCH_SIZE", 3)  # three batches, of which the last is filled up with two of the first
    assert by_level(play(7)) == together

    for level, expected_return, expected_length in together:
        envs, total, length, done = ProcgenVectorEnv("bossfight", 1, num_levels=1, start_level=level), 0, 0, False
        while not done:
            with torch.no_grad():
                actions = agent(torch.from_numpy(envs.reset()[0])).logits.argmax(-1).numpy()
            _, reward, done, *_ = envs.step(actions)
            total, length = total + reward[0], length + 1
        assert (total, length) == (expected_return, expected_length)
        envs.close()


@pytest.mark.parametrize("module", [ppg_procgen, pytest.param(ppo_procgen, marks=pytest.mark.slow)])
def test_runs_of_both_scripts_are_evaluated(module, evaluated, run, command, tmp_path, capsys, monkeypatch):
    run_dir = evaluated[0] if module is ppg_procgen else run(module, **GAME, small=False)
    assert command(run_dir, "--episodes", 5, "--no-cuda", "--out", tmp_path / "a") == 0
    table = capsys.readouterr().out
    episodes, summary = read_csv(tmp_path / "a" / "episodes.csv"), read_csv(tmp_path / "a" / "summary.csv")
    assert [row["levels"] for row in episodes] == ["train"] * 5 + ["test"] * 5
    train_levels = [int(row["level"]) for row in episodes[:5]]
    assert sorted(train_levels.count(level) for level in (10, 11, 12)) == [1, 2, 2]
    assert min(int(row["level"]) for row in episodes[5:]) >= 13
    for name, row in zip(("train", "test"), summary, strict=True):
        returns = [float(episode["return"]) for episode in episodes if episode["levels"] == name]
        assert float(row["mean"]) == pytest.approx(np.mean(returns))
        assert float(row["stderr"]) == pytest.approx(np.std(returns, ddof=1) / math.sqrt(5))
        half = 2.776445 * float(row["stderr"])  # of Student's distribution with 4 degrees of freedom
        assert float(row["high"]) - float(row["mean"]) == pytest.approx(half, rel=1e-6)
        assert float(row["score_mean"]) == pytest.approx((np.mean(returns) - 0.5) / 12.5)
        assert name in table and f"{np.mean(returns):.2f} ±" in table

    # the same numbers from the checkpoint, from the weights alone, and with the levels written out
    shutil.copy(run_dir / "agent.pt", tmp_path / "alone.pt")
    alone = (tmp_path / "alone.pt", "--env-id", "bossfight", "--levels", "10:13", f"13:{2**31 - 1}")
    for i, arguments in enumerate([(run_dir / "checkpoint.pt",), alone]):
        assert command(*arguments, "--episodes", 5, "--no-cuda", "--out", tmp_path / str(i)) == 0
        again = read_csv(tmp_path / str(i) / "episodes.csv")
        assert [row | {"levels": ""} for row in again] == [row | {"levels": ""} for row in episodes]

    # and others for another seed, greedy actions, another mode
    monkeypatch.setattr(ppg_procgen, "ProcgenVectorEnv", WatchedEnv)
    flags = ("--seed", 2, "--greedy", "--modes", "hard", "--levels", "12:14", "--no-cuda", "--episodes", 2)
    assert command(run_dir, *flags, *(["--video"] if module is ppo_procgen else [])) == 0
    rows = read_csv(run_dir / "evaluation" / "episodes.csv")
    assert {row["level"] for row in rows} == {"12", "13"} and {row["mode"] for row in rows} == {"hard"}
    assert {row["greedy"] for row in rows} == {"True"}
    if module is ppo_procgen:
        assert len(decode(run_dir / "evaluation" / "hard_12-14.mp4")) == VIDEO_STEPS[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nowhere"], "no such file: nowhere"),
        (["empty"], "no such file: empty/agent.pt or empty/checkpoint.pt"),
        (["noise.pt"], "noise.pt is damaged, or no checkpoint"),
        (["half.pt", "--env-id", "starpilot"], "half.pt is damaged, or no checkpoint"),
        (["other.pt", "--env-id", "starpilot"], "other.pt does not hold the weights"),
        (["agent.pt"], "add --env-id"),
        (["agent.pt", "--env-id", "starpilot", "--levels", "test"], "no level is known to be unseen"),
        (["agent.pt", "--env-id", "starpilot", "--levels", "5:5"], "--levels 5:5: not one of"),
        (["agent.pt", "--env-id", "starpilot", "--levels", "0:9999999999"], "A:B with A < B <= 2147483647"),
        (["agent.pt", "--env-id", "starpilot", "--modes", "memory"], "starpilot has no memory mode"),
        (["agent.pt", "--env-id", "maze", "--modes", "exploration", "--levels", "0:2"], "a single level of its own"),
        (["agent.pt", "--env-id", "starpilot", "--episodes", "1"], "at least 2 episodes"),
        (["agent.pt", "--env-id", "starpilot", "--levels", "0:"], "--levels 0:: not one of"),
        (["agent.pt", "--env-id", "starpilot", "--levels", f"0:{'9' * 5000}"], "A:B with A < B <= 2147483647"),
        (["agent.pt", "--env-id", "starpilot", "--levels", f"{'9' * 5000}:1"], "A:B with A < B <= 2147483647"),
        (["agent.pt", "--env-id", "starpilot", "--episodes", f"1{'0' * 12}"], "--episodes must be at most 100000"),
        (["agent.pt", "--env-id", "starpilot", "--seed", "-1"], "--seed must be from 0 to 2147483647, not -1"),
        (["agent.pt", "--env-id", "starpilot", "--seed", f"1{'0' * 20}"], "--seed must be from 0 to 2147483647"),
        (["agent.pt", "--env-id", "starpilot", "--out", "occupied"], "--out: [Errno 21] Is a directory"),
        (["agent.pt", "--env-id", "chess"], "chess"),
    ],
)
def test_bad_arguments_end_with_one_clear_line(flags, message, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "occupied" / "summary.csv").mkdir(parents=True)
    torch.save(ppo_procgen.Agent().state_dict(), "agent.pt")
    torch.save({"weight": torch.zeros(3)}, "other.pt")
    data = Path("agent.pt").read_bytes()
    Path("half.pt").write_bytes(data[: len(data) // 2])
    Path("noise.pt").write_bytes(bytes(1000))
    assert command(*flags) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and len(error) < 1000
    assert not Path("evaluation").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "odd.pt does not hold the weights"),
        (None, "odd.pt does not hold the weights"),
        (3, "odd.pt does not hold the weights"),
        (["about"], "odd.pt does not hold the weights"),
        ({1: 2}, "odd.pt does not hold the weights"),
        ({"encoder.dense.weight": 3}, "odd.pt does not hold the weights"),
        ({"about": {"args": {}}, "agent": None}, "odd.pt does not hold the weights"),
        ({"about": None, "agent": {}}, "odd.pt is broken: TypeError"),
        ({"about": {"args": {}}}, "odd.pt is broken: KeyError: 'agent'"),
    ],
    ids=repr,
)
def test_a_file_without_weights_is_refused_in_one_line(content, message, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(content, "odd.pt")
    assert command("odd.pt", "--env-id", "starpilot") == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"args": ' + "[" * 1000 + "]" * 1000 + "}", "Error"),  # Python 3.12 reads that deep
        ("[]", "TypeError"),
        ('{"args": null}', "TypeError"),
        ('{"args": {"env_id": "bossfight", "start_level": 1e400}}', "OverflowError"),
        ('{"args": {"env_id": "bossfight", "start_level": -5, "num_levels": 10}}', "negative levels"),
        ('{"args": {"env_id": "bossfight", "num_levels": -1}}', "negative levels"),
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_record_is_refused_in_one_line(record, message, command, tmp_path, capsys):
    torch.save(ppo_procgen.Agent().state_dict(), tmp_path / "agent.pt")
    (tmp_path / "args.json").write_text(record)
    assert command(tmp_path, "--episodes", "2") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/args.json is broken: " in error and message in error and len(error.splitlines()) == 1


def test_the_interval_of_equal_returns_is_their_mean(tool):
    summary = tool.summarise(pd.Series([10.0, 10.0, 10.0]), 0, 10)
    assert (summary["mean"], summary["low"], summary["high"], summary["stderr"]) == (10, 10, 10, 0)


def test_the_interval_is_scipys(tool):
    returns = pd.Series([1.0, 2.0, 6.0])
    summary = tool.summarise(returns, 0, 10)
    low, high = scipy.stats.t.interval(0.95, 2, returns.mean(), returns.sem())
    assert (summary["low"], summary["high"]) == pytest.approx((low, high))


def test_its_environments_step_in_the_main_thread(tool, monkeypatch):
    made = []
    monkeypatch.setattr(tool, "ProcgenVectorEnv", lambda *args, **options: made.append(options) or WatchedEnv(*args))
    monkeypatch.setattr(ppg_procgen.Args, "env_threads", -1)
    tool.play_set(SimpleAgent(), tool.Args(path=Path(), episodes=2), "bossfight", "easy", "0:2", range(2), Path())
    assert all(options.get("num_threads", 0) == 0 for options in made)


def test_one_episode_has_no_standard_error(run, recwarn):
    row = read_rows(run(**GAME, small=False, eval_interval=2, eval_episodes=1))[-1]
    assert row["eval/test_return"] != "" and "eval/test_stderr" not in row
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
