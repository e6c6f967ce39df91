"""benchmark/report.py: its numbers against scipy, rliable, hand computation and published figures; what its pages and
pictures show; and what it makes of broken, short and missing runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from conftest import ROOT
from PIL import Image
from rliable import metrics
from torch.utils.tensorboard import SummaryWriter

from benchmark import pictures, report

BATCH = 16_384


def write_run(root, env_id="starpilot", exp_name="ppg_procgen", seed=1, *, num_rows=100, **flags) -> Path:
    """A run folder as the training scripts write it, whose return rises towards a score of 0.7; with evaluations on
    unseen levels (60 % of it) where num_levels is given."""
    args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "num_envs": 64, "distribution_mode": "easy"}
    args |= {"total_timesteps": num_rows * BATCH, "num_levels": 0} | flags
    steps = BATCH * np.arange(1, num_rows + 1)
    low, high = report.RANGES[env_id].get(args["distribution_mode"], (0, 1))
    returns = low + (high - low) * 0.7 * (1 - np.exp(-steps / 5e5)) * (1 + seed / 100)
    columns = {"iteration": steps // BATCH, "global_step": steps, "wall_time": steps / 2000}
    columns |= {"charts/mean_return_100": returns, "losses/aux/kl_loss": np.where(steps % (32 * BATCH), np.nan, 0.1)}
    if args["num_levels"]:
        columns["eval/test_return"] = np.where(steps // BATCH % 10, np.nan, 0.6 * returns)
    folder = Path(root, f"{env_id}__{exp_name}__{seed}")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"args": args}))
    pd.DataFrame(columns).to_csv(folder / "metrics.csv", index=False)
    return folder


def curve(values, steps, **columns) -> pd.DataFrame:
    fixed = {"own": True, "group": "a", "env_id": "maze", "seed": 1, "run": "1", "wall_time": steps, "aux_phase": False}
    return pd.DataFrame({"global_step": steps, "episodic_return": values, **(fixed | columns)})


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the rule."""
    lines = page.split(heading, 1)[1].split("\n|", 1)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


@pytest.fixture
def page(tmp_path, capsys):
    """page(paths, **arguments): the page on these runs, and what was printed."""

    def page(*paths, **arguments):
        report.main(report.Args(paths=paths, out=tmp_path / "out", **{"reps": 50} | arguments))
        return (tmp_path / "out" / "report.md").read_text(), capsys.readouterr().out

    return page


# ---- numbers


@pytest.mark.parametrize(
    "mode, num_levels, step, window, name, printed",
    [
        ("easy", 0, 25e6, 1e6, "PPO (openai/train-procgen)", "0.641"),
        ("easy", 200, 25e6, 1e6, "PPO (openai/train-procgen)", "0.596"),
        ("easy", 200, 25e6, 1e6, "PPO (openai/train-procgen), unseen levels", "0.354"),
        ("hard", 0, 25e6, 2e6, "PPO (openai/phasic-policy-gradient)", "0.248"),
        ("hard", 0, 25e6, 2e6, "PPG (openai/phasic-policy-gradient)", "0.467"),
        ("hard", 0, 25e6, 2e6, "PPG kl (openai/phasic-policy-gradient)", "0.478"),
        ("hard", 0, 25e6, 2e6, "PPG single (openai/phasic-policy-gradient)", "0.410"),
        ("hard", 0, 100.1e6, 5e6, "PPO (openai/phasic-policy-gradient)", "0.577"),
        ("hard", 0, 100.1e6, 5e6, "PPG (openai/phasic-policy-gradient)", "0.756"),
        ("hard", 0, 100.1e6, 5e6, "PPG kl (openai/phasic-policy-gradient)", "0.755"),
        ("hard", 0, 100.1e6, 5e6, "PPG single (openai/phasic-policy-gradient)", "0.754"),
    ],
)
def test_published_mean_normalized_scores(mode, num_levels, step, window, name, printed):
    curves = report.load_references(("ppg", "ppo", "ppg_kl", "ppg_single"))
    curves = curves[(curves.distribution_mode == mode) & (curves.num_levels == num_levels) & (curves.group == name)]
    scores = report.normalized(report.value_at_step(curves, step, window), mode)
    matrix = report.score_matrix(scores, sorted(report.RANGES))
    assert matrix.shape == (3, 16)
    assert f"{matrix.mean():.3f}" == printed


def test_value_at_step():
    curves = pd.concat([curve([1.0, 2, 3, 4], [100, 200, 300, 400]), curve([5.0, 6], [100, 200], seed=2, run="2")])
    values = report.value_at_step(curves, step=400, window=200)
    assert values.run.tolist() == ["1"] and values.episodic_return.tolist() == [3.5]  # 200 is not in (200, 400]
    assert report.value_at_step(curves, step=250, window=100).episodic_return.tolist() == [2, 6]
    assert report.value_at_step(curves, step=290, window=10).episodic_return.tolist() == [2]  # the last row before


def test_aggregates_are_those_of_scipy_and_rliable():
    x, y = np.random.default_rng(0).normal(size=(2, 5, 16)).round(1)  # rounded, so that there are ties
    assert report.probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))
    table = report.aggregate_table({"ours": x, "PPO": y}, "ppo", reps=200)
    [rows, other] = rows_of(f"# title\n{table}", "# title")[1:]
    expected = x.mean(), scipy.stats.trim_mean(x, 0.25, axis=None), metrics.probability_of_improvement(x, y)
    for cell, value in zip(rows[2:], expected, strict=True):
        point, low, high = (float(word) for word in cell.replace("[", "").replace("]", "").replace(",", "").split())
        assert point == pytest.approx(value, abs=1e-3) and low < point < high
    assert rows[:2] == ["ours", "5"] and other[-1] == "-"
    few = report.estimate([x[:2]], metrics.aggregate_mean, reps=50)
    assert few == f"{x[:2].mean():.3f}"  # two seeds have no interval


def test_cells_of_tables():
    low, high = scipy.stats.ttest_1samp([1.0, 2.0, 6.0], 0).confidence_interval(0.95)
    assert report.seeds_cell(pd.Series([1.0, 2, 6]), 2) == f"3.00 ± 2.65 [{low:.2f}, {high:.2f}] (3)"
    assert report.seeds_cell(pd.Series([6.0, 1]), 2) == "6.00, 1.00 (2)"


def test_curves_average_in_bins_and_last_while_most_runs_do():
    steps = np.arange(1.0, 101)
    curves = pd.concat([curve(np.full(n, float(n)), steps[:n], run=str(n), seed=n) for n in (40, 80, 100)])
    points = pictures.binned(curves, "global_step", 100)
    assert points[points.run == "40"].global_step.max() == 40 and points.global_step.max() == 80
    over_time = pictures.binned(curves, "wall_time", 100)  # there a run that has ended keeps its value
    assert over_time.groupby("wall_time").episodic_return.mean().tolist() == pytest.approx([220 / 3] * 80)


# ---- reading


def test_runs_are_found_once_and_read(tmp_path):
    folder = write_run(tmp_path / "sweep" / "runs", "maze", "wide", 3, num_levels=200, distribution_mode="hard")
    write_events(folder / "wandb", [1], [1])  # inside a run folder: not a run
    runs, curves, notes = report.load_runs((tmp_path, tmp_path / "sweep", folder))
    assert notes == []
    [run] = runs.to_dict("records")
    assert [run[x] for x in ("group", "env_id", "seed", "num_levels", "last_step")] == ["wide", "maze", 3, 200, 1638400]
    assert curves.group.value_counts().to_dict() == {"wide": 100, "wide, unseen levels": 10}
    assert curves.aux_phase[curves.group == "wide"].sum() == 3


def write_events(folder, returns, steps) -> None:
    """TensorBoard events as CleanRL writes them: a return an episode."""
    with SummaryWriter(folder) as writer:
        for value, step in zip(returns, steps, strict=True):
            writer.add_scalar("charts/episodic_return", np.float32(value), step)


def test_cleanrl_events_become_means_of_the_last_100_episodes(tmp_path):
    returns = np.random.default_rng(0).normal(5, 2, 300)
    write_events(tmp_path / "bigfish__ppo__7__1700000000", returns, np.arange(300) * 10)
    runs, curves, _ = report.load_runs((tmp_path,))
    assert runs.iloc[0][["group", "env_id", "seed"]].tolist() == ["ppo (TensorBoard)", "bigfish", 7]
    assert runs.iloc[0][report.SETTING].tolist() == ["easy", 0]
    last_100 = [returns[max(0, k - 99) : k + 1].mean() for k in range(300)]
    assert curves.episodic_return.tolist() == pytest.approx(last_100, abs=1e-5)
    assert curves.global_step.tolist() == [10 * k for k in range(300)]


def test_broken_runs_are_named_and_do_not_stop_the_others(tmp_path, page):
    for seed in (1, 2):
        write_run(tmp_path / "good", seed=seed)
    (tmp_path / "link").symlink_to(write_run(tmp_path.with_name("elsewhere"), seed=3))  # a link is followed
    write_run(tmp_path / "bad", distribution_mode="../easy")
    broken = [write_run(tmp_path / "bad", seed=10 + k) for k in range(3)]
    (broken[0] / "metrics.csv").write_bytes(b"\xff\xfe\x00" * 99)
    (broken[1] / "metrics.csv").unlink()
    (broken[2] / "args.json").write_text('{"args": {')
    text, printed = page(tmp_path)
    for folder in broken:
        [note] = [line for line in printed.splitlines() if str(folder) in line]
        assert "left out" in note and note in text
    assert rows_of(text, "# Training runs")[2][:6] == ["ppg_procgen", "easy", "0", "1", "3", "3"]
    assert not list(tmp_path.glob("easy*"))  # where the foreign mode leads
    with pytest.raises(SystemExit, match="2"):
        page(tmp_path, tmp_path / "misspelt")


def test_runs_while_and_before_their_first_checkpoint_is_written(tmp_path, page):
    (write_run(tmp_path) / "metrics.csv.tmp").touch()
    (write_run(tmp_path, seed=2) / "metrics.csv").unlink()
    _, printed = page(tmp_path)
    assert printed.count("left out") == 1 and "starpilot__ppg_procgen__2: left out" in printed
    assert "its first checkpoint is still to come" in printed


def test_early_ends_and_repeats_are_said(tmp_path, page):
    write_run(tmp_path, "maze", seed=1)
    write_run(tmp_path, "maze", seed=2, num_rows=30, total_timesteps=100 * BATCH)
    again = write_run(tmp_path / "again", "maze", seed=1, num_rows=50)
    _, printed = page(tmp_path, step=50 * BATCH)
    repeat, early, absent, _ = printed.splitlines()
    assert str(again) in repeat and "left out" in repeat
    assert "still running: ppg_procgen maze seed 2 (at 491,520)" in early
    assert "no value at 819,200 steps: ppg_procgen maze seed 2 (at 491,520)" in absent


def test_flags_that_change_the_numbers_make_groups(tmp_path):
    write_run(tmp_path / "a", "maze", learning_rate=5e-4, start_level=3, aux_dtype="float32")
    write_run(tmp_path / "b", "maze", learning_rate=1e-4, start_level=3)
    write_run(tmp_path / "c", "miner", start_level=4, aux_dtype="bfloat16", num_rows=50)  # of another version
    write_run(tmp_path / "a", "maze", "x", anneal_lr=True, arch="shared")
    write_run(tmp_path / "b", "maze", "x", anneal_lr=True, arch="shared", num_rows=50)
    runs, _, notes = report.load_runs((tmp_path,))
    groups = ["ppg_procgen", "ppg_procgen", "ppg_procgen --learning-rate 0.0001"]
    groups += ["x --total-timesteps 1638400", "x --total-timesteps 819200"]
    assert sorted(runs.group) == groups and notes == []


@pytest.mark.parametrize("program", ["report.py", "evaluate.py"])
def test_it_starts_from_a_notebook_and_beside_another_package_of_this_name(tmp_path, program):
    (tmp_path / "benchmark.py").touch()
    environment = os.environ | {"MPLBACKEND": "module://nowhere.backend_inline", "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, ROOT / "benchmark" / program, "--help"], env=environment, check=True)


# ---- pages and pictures


def test_a_page_without_episodes(tmp_path, page):
    (write_run(tmp_path) / "metrics.csv").write_text("global_step,wall_time\n256,1\n")
    assert "no episode has finished yet: ppg_procgen starpilot seed 1" in page(tmp_path)[0]


def test_a_page_on_many_levels(tmp_path, page):
    for seed in (1, 2, 3):
        for env_id in ("maze", "miner"):
            write_run(tmp_path / "runs", env_id, seed=seed)
    write_run(tmp_path / "runs", "maze", seed=4)  # scores over both games have the seeds of both
    text, _ = page(tmp_path / "runs", step=96 * BATCH)
    [header, maze, _] = rows_of(text, "### Return at 1,572,864 steps")
    assert header == ["game", "ppg_procgen", "PPO (openai/train-procgen)"] and maze[1].endswith("] (4)")
    [header, ours, published] = rows_of(text, "### Over maze, miner")
    assert ours[:2] == ["ppg_procgen", "3"] and ours[-1].startswith("1.000") and published[-1] == "-"
    for name in ("easy_steps", "easy_time", "easy_profile_1"):
        assert f"({name}.png)" in text
        image = np.asarray(Image.open(tmp_path / "out" / f"{name}.png").convert("L"))
        assert image.std() > 10 and image.shape[1] > 700


def test_the_page_of_the_committed_runs(page):
    """They are on one level, and have no scores."""
    folder = ROOT / "benchmark" / "results" / "small"
    text, _ = page(folder)
    assert text == (folder / "page" / "report.md").read_text()


@pytest.mark.slow
def test_figure2_from_the_shell(tmp_path):
    argv = [sys.executable, ROOT / "benchmark" / "report.py"]
    subprocess.run([*argv, "--figure2"], cwd=tmp_path, check=True)
    assert Image.open(tmp_path / "report" / "figure2.png").width > 1300
