"""benchmark/report.py: its numbers against scipy, rliable, hand computation and published figures; what its pictures
and pages show; and what it makes of broken, short and missing runs."""

import json
import runpy
import shutil
import sys
from itertools import dropwhile, takewhile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from PIL import Image
from rliable import library, metrics
from torch.utils.tensorboard import SummaryWriter

from benchmark import pictures, report

REPORT = Path(report.__file__)

BATCH = 16_384


def write_run(root, env_id="starpilot", exp_name="ppg_procgen", seed=1, *, score=0.7, num_rows=100, **changes) -> Path:
    """A run folder as the training scripts write it, whose return rises towards a normalised score; with evaluations
    (60 % of it on unseen levels) where num_levels is given."""
    args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "num_envs": 64, "num_steps": 256}
    args |= {"total_timesteps": num_rows * BATCH, "distribution_mode": "easy", "num_levels": 0} | changes
    record = {"args": args, "algorithm": "ppo" if "ppo" in exp_name else "ppg", "hardware": {"cores": 2, "gpu": None}}
    rng = np.random.default_rng([seed, *f"{env_id}{exp_name}".encode()])
    steps = BATCH * np.arange(1, num_rows + 1)
    low, high = report.RANGES[env_id][args["distribution_mode"]]
    scores = score * (1 - np.exp(-steps / 5e5)) * rng.uniform(0.9, 1.1) + rng.normal(0, 0.02, num_rows)
    returns = low + (high - low) * scores
    evaluated = np.where((np.arange(num_rows) % 10 == 9) & (args["num_levels"] > 0), returns, np.nan)
    columns = {"iteration": np.arange(1, num_rows + 1), "global_step": steps, "wall_time": steps / 2000}
    columns |= {"charts/episodic_return": returns, "charts/mean_return_100": returns, "losses/aux/kl_loss": np.nan}
    columns |= {"eval/train_return": evaluated, "eval/test_return": 0.6 * evaluated}
    folder = Path(root) / f"{env_id}__{exp_name}__{seed}__20250101-000000-abcd"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(record))
    pd.DataFrame(columns).round(4).to_csv(folder / "metrics.csv", index=False)
    return folder


def write_events(
    folder, returns, steps, hyperparameters="|param|value|\n|-|-|\n|exp_name|ppo|\n|total_timesteps|9000|"
):
    """TensorBoard events as CleanRL writes them: a return an episode, and the arguments as a table."""
    writer = SummaryWriter(folder)
    writer.add_text("hyperparameters", hyperparameters)
    for value, step in zip(returns, steps, strict=True):
        writer.add_scalar("charts/episodic_return", np.float32(value), step)
    writer.close()
    return folder


def curve(values, steps, **columns) -> pd.DataFrame:
    fixed = {"own": True, "name": "a", "split": "train", "env_id": "maze", "seed": 1, "run": "1", "wall_time": steps}
    fixed["aux_phase"] = False
    return pd.DataFrame({"global_step": steps, "episodic_return": values, **(fixed | columns)})


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    lines = page.split(heading, 1)[1].splitlines()
    table = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table]


@pytest.fixture
def tool(tmp_path):
    """Runs the report in this process; returns the page."""

    def run(*paths, **changes):
        report.main(report.Args(paths=tuple(map(Path, paths)), out=tmp_path / "out", **{"reps": 200} | changes))
        return (tmp_path / "out" / "report.md").read_text() if not changes.get("figure2") else ""

    return run


# ---- numbers


@pytest.mark.parametrize(
    "mode, num_levels, split, step, window, name, printed",
    [
        ("easy", 0, "train", 25e6, 1e6, "PPO (openai/train-procgen)", "0.641"),  # 0.64146; rounded twice, .642
        ("easy", 200, "train", 25e6, 1e6, "PPO (openai/train-procgen)", "0.596"),
        ("easy", 200, "test", 25e6, 1e6, "PPO (openai/train-procgen)", "0.354"),
        ("hard", 0, "train", 25e6, 2e6, "PPO (openai/phasic-policy-gradient)", "0.248"),
        ("hard", 0, "train", 25e6, 2e6, "PPG (openai/phasic-policy-gradient)", "0.467"),
        ("hard", 0, "train", 25e6, 2e6, "PPG kl (openai/phasic-policy-gradient)", "0.478"),  # 0.47848, likewise
        ("hard", 0, "train", 25e6, 2e6, "PPG single (openai/phasic-policy-gradient)", "0.410"),
        ("hard", 0, "train", 100.1e6, 5e6, "PPO (openai/phasic-policy-gradient)", "0.577"),
        ("hard", 0, "train", 100.1e6, 5e6, "PPG (openai/phasic-policy-gradient)", "0.756"),
        ("hard", 0, "train", 100.1e6, 5e6, "PPG kl (openai/phasic-policy-gradient)", "0.755"),
        ("hard", 0, "train", 100.1e6, 5e6, "PPG single (openai/phasic-policy-gradient)", "0.754"),
    ],
)
def test_published_mean_normalised_scores(mode, num_levels, split, step, window, name, printed):
    curves = report.load_references(("ppg", "ppo", "ppg_kl", "ppg_single"))
    curves = curves[(curves.distribution_mode == mode) & (curves.num_levels == num_levels) & (curves.split == split)]
    scores = report.normalised(report.value_at_step(curves[curves.name == name], step, window), mode)
    matrix = report.score_matrix(scores, sorted(report.RANGES))
    assert matrix.shape == (3, 16)
    assert f"{report.mean_and_iqm(matrix)[0]:.3f}" == printed


def test_a_window_without_rows_takes_the_last_row_before_the_step():
    """... which is how the yardstick in the README of the published curves is computed."""
    table = rows_of((report.REFERENCE.parent / "README.md").read_text(), "as a quick yardstick")
    assert len(table) == 2 + 9
    references = report.load_references(("ppg", "ppo"))
    for title, *printed in table[2:]:
        algorithm, mode, env_id = title.split()
        source = "openai/train-procgen" if mode == "easy" else "openai/phasic-policy-gradient"
        curves = references[(references.name == f"{algorithm} ({source})") & (references.env_id == env_id)]
        curves = curves[(curves.distribution_mode == mode) & (curves.num_levels == 0)]
        steps = [1e6 * float(cell.rstrip("M")) + 1e5 for cell in table[0][1:]]
        values = [report.value_at_step(curves, step, window=1).episodic_return for step in steps]
        assert all(len(value) == 3 for value in values)
        assert [f"{value.mean():.1f}" for value in values] == printed, title


def test_value_at_step():
    whole = curve([1.0, 2, 3, 4], [100, 200, 300, 400])
    short = curve([5.0, 6], [100, 200], seed=2, run="2")
    values = report.value_at_step(pd.concat([whole, short]), step=400, window=200)
    assert values.run.tolist() == ["1"] and values.episodic_return.tolist() == [3.5]  # 200 is not in (200, 400]
    values = report.value_at_step(pd.concat([whole, short]), step=250, window=100)
    assert values.episodic_return.tolist() == [2, 6]


def test_normalised_scores_in_both_conventions():
    values = pd.DataFrame({"env_id": ["jumper", "leaper", "maze", "fruitbot"], "episodic_return": [6.4, 6.5, 7.5, 0.0]})
    easy, hard = report.normalised(values, "easy"), report.normalised(values, "hard")
    assert easy.score.tolist() == pytest.approx([5.4 / 9, 5 / 8.5, 0.5, 1.5 / 33.9])
    assert hard.score.tolist() == pytest.approx([5.4 / 9, 5 / 8.5, 3.5 / 6, 0.5 / 27.7])
    other = report.normalised(values, "easy", report.OTHER_MINIMA)
    assert other.score.tolist() == pytest.approx([3.4 / 7, 3.5 / 7, 0.5, 1.5 / 33.9])


def test_a_score_matrix_has_the_seeds_that_every_game_has():
    scores = pd.DataFrame({"env_id": ["maze"] * 3 + ["miner"] * 2, "seed": [3, 1, 2, 1, 3], "score": [3, 1, 2, 10, 30]})
    assert report.score_matrix(scores, ["maze", "miner"]).tolist() == [[1, 10], [2, 30]]


def test_aggregates_are_those_of_scipy_and_rliable():
    x, y = np.random.default_rng(0).normal(size=(2, 5, 16)).round(1)  # rounded, so that there are ties
    mean, iqm = report.mean_and_iqm(x)
    assert mean == pytest.approx(x.mean())
    assert iqm == pytest.approx(scipy.stats.trim_mean(x, 0.25, axis=None)) == np.sort(x.ravel())[20:60].mean()
    assert report.probability_of_improvement(x, y) == pytest.approx(metrics.probability_of_improvement(x, y))
    assert report.probability_of_improvement(x, x[:, ::-1]) + report.probability_of_improvement(x[:, ::-1], x) == 1
    by_hand = np.mean([scipy.stats.mannwhitneyu(x[:, k], y[:3, k]).statistic / 15 for k in range(16)])
    assert report.probability_of_improvement(x, y[:3]) == pytest.approx(by_hand)
    thresholds = np.linspace(-1, 1, 9)
    assert pictures.share_above(x, thresholds) == pytest.approx(library.score_distributions(x, thresholds))


def test_intervals_are_rliables_and_repeatable():
    x, y = np.random.default_rng(1).normal(size=(2, 4, 16))
    found = report.estimates({"x": x}, report.mean_and_iqm, reps=300)
    np.random.seed(0)
    points, intervals = library.get_interval_estimates(
        {"x": x}, lambda s: np.array([metrics.aggregate_iqm(s)]), reps=300
    )
    assert found["x"][1] == pytest.approx((points["x"][0], *intervals["x"][:, 0]))
    assert found == report.estimates({"x": x}, report.mean_and_iqm, reps=300)
    [(point, low, high)] = report.estimates({"": [x, y]}, report.probability_of_improvement, reps=300)[""]
    assert 0 < low < point < high < 1


def test_bins_average_within_a_run_and_interpolate_only_inside_it():
    runs = pd.concat([curve([1.0, 3, 9], [5, 10, 40]), curve([4.0, 8], [20, 30], run="2")])
    table = pictures.binned(runs, "global_step", limit=50, bins=5)
    assert table.index.tolist() == [10, 20, 30, 40, 50]
    assert table["1"].tolist() == pytest.approx([2, 2 + 7 / 3, 2 + 14 / 3, 9, np.nan], nan_ok=True)
    assert table["2"].tolist() == pytest.approx([np.nan, 4, 8, np.nan, np.nan], nan_ok=True)


# ---- reading


def test_a_run_is_found_once_wherever_the_search_begins(tmp_path):
    folder = write_run(tmp_path / "sweep" / "runs")
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    write_events(folder / "wandb", [1], [1])  # inside a run folder: not a run
    write_run(tmp_path / "sweep" / "aside")  # cut, and begun afresh
    found = report.find_run_folders((tmp_path, tmp_path / "sweep", folder))
    assert [path.resolve() for path in found] == [folder.resolve()]


def test_own_runs_are_read(tmp_path):
    write_run(tmp_path, "maze", "wide", 3, num_levels=200, distribution_mode="hard")
    runs, curves, notes = report.load_runs((tmp_path,))
    assert notes == []
    run = runs.iloc[0]
    assert (run["name"], run.env_id, run.seed, run.num_levels) == ("ppg wide", "maze", 3, 200)
    assert run.last_step == 100 * BATCH and run.hours == pytest.approx(100 * BATCH / 2000 / 3600)
    assert curves.split.value_counts().to_dict() == {"train": 100, "eval_train": 10, "test": 10}
    assert (curves.distribution_mode == "hard").all() and curves.own.all()


def test_broken_runs_are_named_and_do_not_stop_the_others(tmp_path, tool, capsys):
    for seed in (1, 2, 3):
        write_run(tmp_path / "good", seed=seed)
    broken = {}
    for number, (line, spoil) in enumerate(
        {
            "EmptyDataError": lambda run: (run / "metrics.csv").write_text(""),
            "no iteration has finished": lambda run: (run / "metrics.csv").write_text(
                (run / "metrics.csv").read_text().splitlines()[0] + "\n"
            ),
            "could not convert": lambda run: (run / "metrics.csv").write_text("global_step,wall_time\nx,1\n"),
            "'utf-8' codec": lambda run: (run / "metrics.csv").write_bytes(b"\xff\xfe\x00" * 99),
            "metrics.csv": lambda run: (run / "metrics.csv").unlink(),
            "args.json": lambda run: (run / "args.json").unlink(),
            "JSONDecodeError": lambda run: (run / "args.json").write_text('{"args": {'),
            "KeyError: 'args'": lambda run: (run / "args.json").write_text("{}"),
            "TypeError": lambda run: (run / "args.json").write_text("[]"),
            "pong is no Procgen game": lambda run: (run / "args.json").write_text(
                (run / "args.json").read_text().replace('"starpilot"', '"pong"')
            ),
        }.items()
    ):
        run = write_run(tmp_path / "bad", seed=10 + number)
        spoil(run)
        broken[run.name] = line
    page = tool(tmp_path)
    printed = capsys.readouterr().out.splitlines()
    for name, line in broken.items():
        [note] = [note for note in printed if name in note]
        assert "left out" in note and line in note
        assert note in page
    assert rows_of(page, "# Training runs")[2][:6] == [
        "ppg_procgen",
        "easy, all levels",
        "1",
        "3",
        "3",
        "1.64M to 1.64M",
    ]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    path = write_run(tmp_path) / "metrics.csv"
    whole = path.read_text()
    path.write_text(whole[:-12])  # ends within the numbers of the last row
    _, curves, notes = report.load_runs((tmp_path,))
    assert len(curves) == 99 and "last line of metrics.csv is incomplete" in notes[0]


def test_cleanrl_events_become_means_of_the_last_100_episodes(tmp_path):
    returns = np.random.default_rng(0).normal(5, 2, 300).round(3)
    write_events(tmp_path / "bigfish__ppo__7__1700000000", returns, np.arange(300) * 10)
    runs, curves, notes = report.load_runs((tmp_path,))
    assert runs.iloc[0][["name", "env_id", "seed", "distribution_mode", "num_levels"]].tolist() == [
        "ppo (TensorBoard)",
        "bigfish",
        7,
        "easy",
        0,
    ]
    last_100 = [returns[max(0, k - 99) : k + 1].mean() for k in range(300)]
    assert curves.episodic_return.to_numpy() == pytest.approx(np.array(last_100), abs=1e-5)
    assert curves.global_step.tolist() == [10 * k for k in range(300)]
    assert "names no distribution mode" in notes[0] and "stopped before their total_timesteps" in notes[1]


def test_hyperparameters_in_events_count(tmp_path):
    table = "|param|value|\n|-|-|\n|env_id|maze|\n|exp_name|a|\n|seed|3|\n|distribution_mode|hard|\n|num_levels|500|"
    write_events(tmp_path / "any_name", [1, 2], [10, 20], table)
    runs, _, notes = report.load_runs((tmp_path,))
    run = runs.iloc[0]
    assert (run.env_id, run.seed, run.distribution_mode, run.num_levels, notes) == ("maze", 3, "hard", 500, [])


@pytest.mark.parametrize("kept, line", [(0.5, "is truncated"), (0, "no charts/episodic_return")])
def test_truncated_and_empty_events_are_named(tmp_path, kept, line):
    folder = write_events(tmp_path / "maze__ppo__1__17", np.ones(200), np.arange(200))
    [file] = folder.iterdir()
    data = file.read_bytes()
    assert report.is_whole(file)
    file.write_bytes(data[: int(len(data) * kept)])
    runs, _, notes = report.load_runs((tmp_path,))
    assert len(runs) == (kept > 0) and line in notes[0]


def test_missing_seeds_early_ends_repeats_and_different_arguments_are_said(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path, "maze", seed=seed)
    write_run(tmp_path, "miner", seed=1)
    write_run(tmp_path, "miner", seed=2, num_rows=30, total_timesteps=100 * BATCH, num_envs=32)
    write_run(tmp_path / "again", "maze", seed=1, num_rows=50)
    runs, _, notes = report.load_runs((tmp_path,))
    assert len(runs) == 5
    text = "\n".join(notes)
    assert "again" in notes[0] and "another run with the same name, game and seed is used" in notes[0]
    assert "seeds that other games have are missing: miner 3" in text
    assert "still running: ppg_procgen miner seed 2 (491,520)" in text
    assert "runs differ in num_envs: 32, 64" in text and "seed:" not in text


@pytest.mark.parametrize("levels, said", [((10, 10), False), ((10, 11), True)])
def test_games_may_have_levels_of_their_own_but_seeds_of_a_game_share_them(tmp_path, tool, levels, said):
    for seed, level in enumerate(levels):
        write_run(tmp_path / "runs", "maze", seed=seed, num_levels=1, start_level=0)
        write_run(tmp_path / "runs", "ninja", seed=seed, num_levels=1, start_level=level)
    page = tool(tmp_path / "runs")
    assert ("runs differ in start_level" in page) == said
    assert "## easy, 1 training level\n" in page


# ---- pictures


def test_figure2_from_the_published_curves_alone(tmp_path, tool):
    tool(figure2=True)
    with Image.open(tmp_path / "out" / "figure2.png") as png:
        assert png.size[0] == 1400  # 7 inches, two columns of a paper, at 200 dots an inch
    assert (tmp_path / "out" / "figure2.svg").read_text().startswith("<?xml")

    curves = report.load_references(("ppg", "ppo"))
    curves = curves[curves.source == "openai/phasic-policy-gradient"]
    fig = pictures.draw_curves(curves, "global_step", report.FIGURE2_STEPS)
    assert [ax.get_title() for ax in fig.axes] == sorted(report.RANGES)
    for ax in fig.axes:
        assert len(ax.lines) == 2 and len(ax.collections) == 2  # PPO and PPG, each with its band
        assert ax.get_xlim() == (0, 100)
        assert {line.get_linestyle() for line in ax.lines} == {"-", "--"}  # told apart without colour
    assert fig.get_supxlabel() == "Environment steps (millions)" and fig.get_supylabel() == "Episodic return"
    [legend] = fig.legends
    assert [text.get_text()[:3] for text in legend.get_texts()] == ["PPG", "PPO"]

    starpilot = curves[(curves.env_id == "starpilot") & curves.name.str.startswith("PPG")]
    middle = starpilot.global_step - 524288 / 2  # of the steps whose mean a row is
    in_bin = starpilot[(middle > 49e6) & (middle <= 50e6)]
    line = fig.axes[-1].lines[1]  # ours and the first of the legend are drawn last, on top
    assert line.get_xdata()[49] == 50
    assert line.get_ydata()[49] == pytest.approx(in_bin.groupby("run").episodic_return.mean().mean())


@pytest.mark.slow
def test_figure2_with_our_runs_over_it(tmp_path, tool, capsys):
    for seed in (1, 2):
        write_run(tmp_path / "runs", "maze", seed=seed, distribution_mode="hard", num_rows=610)
    write_run(tmp_path / "runs" / "easy", "maze", seed=1)  # has no place in it
    _, own, _ = report.load_runs((tmp_path / "runs",))
    tool(tmp_path / "runs", figure2=True)
    assert "not drawn, as Figure 2 is about all hard levels: 1 runs" in capsys.readouterr().out
    published = report.load_references(("ppg", "ppo"))
    published = published[published.source == "openai/phasic-policy-gradient"]
    fig = pictures.draw_curves(pd.concat([own[own.distribution_mode == "hard"], published]), "global_step", 100e6)
    lines = {ax.get_title(): len(ax.lines) for ax in fig.axes}
    assert lines.pop("maze") == 4 and set(lines.values()) == {2}
    maze = fig.axes[sorted(report.RANGES).index("maze")]
    ours, published = maze.lines[2:], maze.lines[:2]  # ours on top, a thin line a seed
    assert {line.get_color() for line in ours} == {pictures.COLOURS["ppg_procgen"]}
    assert ours[0].get_linewidth() < published[0].get_linewidth()
    assert [line.get_xdata()[-1] for line in ours] == [10, 10]
    colours = [pictures.COLOURS[f"{name} (openai/phasic-policy-gradient)"] for name in ("PPO", "PPG")]
    assert [line.get_color() for line in published] == colours
    assert "-" not in {line.get_linestyle() for line in published}
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "ppg_procgen, 2 seeds",
        "PPG (openai/phasic-policy-gradient), 3 seeds",
        "PPO (openai/phasic-policy-gradient), 3 seeds",
    ]


def test_value_at_time():
    slow = curve([1.0, 2, 3, 4], [100, 200, 300, 400]).assign(wall_time=[10.0, 20, 30, 40])
    fast = curve([5.0, 6], [100, 200], seed=2, run="2").assign(wall_time=[4.0, 8])
    values = report.value_at_time(pd.concat([slow, fast]), seconds=35, window=10)
    assert values.episodic_return.tolist() == [3, 5.5]  # the row at 30 s; both of the one that ended before


def test_cells_of_tables():
    low, high = scipy.stats.ttest_1samp([1.0, 2.0, 6.0], 0).confidence_interval(0.95)
    assert report.seeds_cell(pd.Series([1.0, 2, 6]), 2) == f"3.00 ± 2.65 [{low:.2f}, {high:.2f}] (3)"
    assert report.seeds_cell(pd.Series([5.0, 5, 5]), 1) == "5.0 ± 0.0 [5.0, 5.0] (3)"
    assert report.seeds_cell(pd.Series([6.0, 1]), 2) == "6.00, 1.00 (2)"  # Student's interval of two: -28.27 to 35.27
    assert report.seeds_cell(pd.Series([1.0]), 2) == "1.00 (1)"


def test_runs_on_a_few_levels_have_intervals_and_times_but_no_normalised_scores(tmp_path, tool):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", seed=seed, num_levels=1, num_rows=4)
    page = tool(tmp_path / "runs")
    [header, _, row] = rows_of(page, "### Return at 65,536 steps")
    assert header == ["game", "ppg_procgen"] and row[1].endswith("] (3)")
    [header, _, row] = rows_of(page, "Return after 32.8 s")
    assert row[0] == "starpilot" and row[1].endswith("] (3)")
    assert "Normalised" not in page and "no normalised scores" in page
    [header, _, row] = rows_of(page, "# Training runs")
    assert row[header.index("time a run")] == "32.8 s" and row[header.index("steps/s")] == "2,000"


@pytest.mark.parametrize("suffix", ["", " and much more that makes the name long"])
def test_the_legend_covers_no_panel(suffix):
    curves = report.load_references(("ppg", "ppo", "ppg_kl"))
    curves["name"] += suffix
    fig = pictures.draw_curves(curves[curves.distribution_mode == "hard"], "global_step", 50e6)
    fig.draw_without_rendering()
    legend = fig.legends[0].get_window_extent()
    assert not any(legend.overlaps(ax.get_tightbbox()) for ax in fig.axes)
    assert legend.x0 >= 0 and legend.x1 <= fig.bbox.width


def test_published_means_are_drawn_at_the_middle_of_their_steps():
    steps = np.arange(10, 110, 10)
    published = curve(steps - 5.0, steps, own=False, name="b", split="train")  # what grows by 1 a step
    ours = curve(np.arange(1.0, 101), np.arange(1, 101))
    [ax] = pictures.draw_curves(pd.concat([ours, published]), "global_step", 100).axes
    for line in ax.lines:
        assert line.get_ydata() == pytest.approx(line.get_xdata() * 1e3)


def test_over_time_a_run_that_has_ended_counts_on():
    runs = [
        curve(np.full(n, value), np.arange(1, n + 1), run=str(value)) for value, n in ((9.0, 50), (3.0, 90), (3.0, 91))
    ]
    runs[2]["run"] = "third"
    [ax] = pictures.draw_curves(pd.concat(runs), "wall_time", 100).axes
    line = ax.lines[0]
    assert line.get_ydata() == pytest.approx(5)  # not 3 after the first has ended
    assert line.get_xdata()[-1] * 60 == pytest.approx(90)


def test_seeds_of_different_lengths_and_sparse_evaluations():
    steps = np.arange(1, 101)
    curves = [curve(np.ones(n) * n, steps[:n], run=str(n), seed=n) for n in (40, 80, 100)]
    curves.append(curve([0.5], [100], split="test", name="b"))
    fig = pictures.draw_curves(pd.concat(curves), "global_step", 100)
    [ax] = fig.axes
    test, train, cross = ax.lines
    assert train.get_xdata()[-1] * 1e3 == pytest.approx(80)  # one of three seeds is left after it
    assert cross.get_marker() == "x" and cross.get_xdata()[0] * 1e3 == pytest.approx(40)
    assert cross.get_ydata()[0] == pytest.approx((40 + 80 + 100) / 3)
    assert train.get_ydata()[-1] == pytest.approx(90)
    assert test.get_marker() == "o" and len(test.get_xdata()) == 1
    band = ax.collections[0].get_paths()[0].vertices
    at_40 = band[np.isclose(band[:, 0], 40e-3), 1]
    assert np.ptp(at_40) == pytest.approx(2 * np.std([40, 80, 100], ddof=1))


def test_performance_profiles():
    groups = [pictures.Group(True, "a", "train"), pictures.Group(False, "b", "train")]
    scores = np.random.default_rng(0).uniform(0, 1.2, size=(2, 3, 16))
    fig = pictures.draw_profiles(dict(zip(groups, scores, strict=True)), reps=50)
    [ax] = fig.axes
    assert len(ax.lines) == len(ax.collections) == 2
    assert ax.get_xlabel().startswith("Normalised score") and ax.get_ylim() == (0, 1)
    line = ax.lines[0]
    assert line.get_ydata() == pytest.approx([(scores[0] > threshold).mean() for threshold in line.get_xdata()])


@pytest.mark.parametrize("lowest, highest", [(0.1, 0.17), (0.3, 1.4), (-0.2, -0.1)])
def test_the_axis_of_a_profile_ends_where_the_scores_end(lowest, highest):
    scores = np.linspace(lowest, highest, 6).reshape(2, 3)
    [ax] = pictures.draw_profiles({pictures.Group(True, "a", "train"): scores}, reps=50).axes
    assert ax.get_xlim() == pytest.approx((min(lowest, 0), highest))
    assert not ax.collections  # two seeds have no band


# ---- what a curve is called and how it looks


def test_a_run_without_a_name_of_its_own_is_called_by_its_flags(tmp_path):
    write_run(tmp_path / "1", arch="dual")
    write_run(tmp_path / "2", arch="detach", kl_coef=1.0)
    write_run(tmp_path / "3", exp_name="ppg_wide", arch="detach")
    write_run(tmp_path / "4", exp_name="ppo_procgen", update_epochs=3)
    write_run(tmp_path / "5", num_aux_minibatches=128, beta_clone=1.0)
    runs, _, notes = report.load_runs((tmp_path,))
    others = {"ppg_procgen --arch detach --kl-coef 1.0", "ppg_procgen --num-aux-minibatches 128"}
    assert set(runs.name) == {"ppg_procgen", "ppg_wide", "ppo_procgen"} | others
    assert notes == []  # the second is no repeat of the first


def test_an_algorithm_has_one_colour_whatever_else_is_on_the_page():
    names = ["ppg_procgen --arch detach", "ppo_procgen", "PPO (openai/train-procgen)"]
    groups = [pictures.Group("(" not in name, name, "train") for name in names]
    alone = [pictures.line_styles([group])[group]["color"] for group in groups]
    styles = pictures.line_styles([pictures.Group(True, "a", "train"), *groups])
    assert [styles[group]["color"] for group in groups] == alone
    assert len({style["color"] for style in styles.values()}) == 4


def test_a_single_game_is_large_and_marks_the_auxiliary_phases(tmp_path):
    run = write_run(tmp_path, arch="detach")
    table = pd.read_csv(run / "metrics.csv")
    table.loc[table.iteration % 32 == 0, "losses/aux/kl_loss"] = 0.1
    table.to_csv(run / "metrics.csv", index=False)
    write_run(tmp_path, exp_name="ppo_procgen")
    _, curves, _ = report.load_runs((tmp_path,))
    fig = pictures.draw_curves(curves, "global_step", 100 * BATCH)
    [ax] = fig.axes
    [phases] = ax.collections
    assert [segment[0][0] * 1e6 for segment in phases.get_segments()] == pytest.approx(
        [32 * BATCH, 64 * BATCH, 96 * BATCH]
    )
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    assert legend == ["ppg_procgen --arch detach, 1 seed", "ppo_procgen, 1 seed", "end of an auxiliary phase"]
    width, height = fig.get_size_inches()
    assert width == 7 and height > 3
    assert not pictures.draw_curves(curves, "wall_time", 1000).axes[0].collections


def test_two_seeds_are_two_lines_and_their_tables_have_no_interval(tmp_path, tool):
    for seed in (1, 2):
        write_run(tmp_path / "runs", "maze", seed=seed)
        write_run(tmp_path / "runs", "ninja", seed=seed)
    write_run(tmp_path / "runs", "ninja", seed=3)
    _, curves, _ = report.load_runs((tmp_path / "runs",))
    fig = pictures.draw_curves(curves, "global_step", 100 * BATCH)
    maze, ninja = fig.axes
    assert (len(maze.lines), len(maze.collections)) == (2, 0)
    assert (len(ninja.lines), len(ninja.collections)) == (1, 1)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["ppg_procgen, 2 to 3 seeds"]
    page = tool(tmp_path / "runs", references=())
    assert "of fewer than three seeds the value of each" in page
    assert all(("[" in row[1]) == (row[0] == "ninja") for row in rows_of(page, "### Normalised scores")[2:])
    assert "[" not in rows_of(page, "### Over maze, ninja")[2][2]


# ---- runs without a finished episode


def test_a_smoke_run_has_losses_and_speed_on_the_page(tmp_path, tool, capsys):
    run = write_run(tmp_path / "runs", num_rows=2)
    table = pd.read_csv(run / "metrics.csv").assign(**{"losses/value_loss": 0.5, "charts/SPS": 90.0})
    table[["charts/episodic_return", "charts/mean_return_100"]] = np.nan
    table.to_csv(run / "metrics.csv", index=False)
    page = tool(tmp_path / "runs")
    assert rows_of(page, "# Training runs")[2][5] == "32,768 to 32,768"
    assert "No episode of these runs has finished yet: ppg_procgen starpilot seed 1." in page
    assert "![smoke](smoke.png)" in page and (tmp_path / "out" / "smoke.png").stat().st_size > 10_000
    assert "### Return at" not in page
    assert "no episode has finished yet: losses and speed only, no return" in capsys.readouterr().out
    write_run(tmp_path / "runs", "maze")  # beside a longer run
    page = tool(tmp_path / "runs")
    assert "![smoke]" in page and [row[0] for row in rows_of(page, "### Return at")[2:]] == ["maze"]


def test_measurements_are_drawn_where_a_run_has_them():
    tables = [
        pd.DataFrame({"losses/a": [1.0, 2], "charts/SPS": [5.0, 6]}, [10, 20]),
        pd.DataFrame({"charts/SPS": [7.0]}, [10]),
    ]
    lines = [(name, table, {}) for name, table in zip("xy", tables, strict=True)]
    fig = pictures.draw_measurements(lines, ["losses/a", "charts/SPS"], "steps")
    assert [len(ax.lines) for ax in fig.axes] == [1, 2]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["x", "y"]


# ---- the page


def test_the_page(tmp_path, tool):
    for env_id in ("jumper", "starpilot"):
        for seed in (1, 2, 3):
            write_run(tmp_path / "runs", env_id, "ppg_procgen", seed, score=0.8)
            write_run(tmp_path / "runs", env_id, "ppo_procgen", seed, score=0.4)
    write_run(tmp_path / "runs", "starpilot", "ppg_wide", 1)
    page = tool(tmp_path / "runs", step=1_638_400, window=200_000)
    for line in page.splitlines():
        if line.startswith("!["):
            name = line.split("](")[1].rstrip(")")
            assert (tmp_path / "out" / name).stat().st_size > 10_000
            assert (tmp_path / "out" / name).with_suffix(".svg").exists()
    pictures = ["easy_steps", "easy_hours", "easy_profile_1", "easy_profile_2"]
    assert [line[2:].split("]")[0] for line in page.splitlines() if line.startswith("![")] == pictures

    def last_rows(env_id, exp_name, seed):
        table = pd.read_csv(tmp_path / "runs" / f"{env_id}__{exp_name}__{seed}__20250101-000000-abcd" / "metrics.csv")
        return table["charts/mean_return_100"][table.global_step > 1_638_400 - 200_000].mean()

    header, _, jumper, starpilot = rows_of(page, "### Return at 1.64M steps")
    assert header == ["game", "ppg_procgen", "ppg_wide", "ppo_procgen", "PPO (openai/train-procgen)"]
    returns = [last_rows("jumper", "ppg_procgen", seed) for seed in (1, 2, 3)]
    assert jumper[1].startswith(f"{np.mean(returns):.2f} ± {np.std(returns, ddof=1):.2f} [")
    assert jumper[1].endswith("] (3)")
    assert jumper[2] == "" and starpilot[2] == f"{last_rows('starpilot', 'ppg_wide', 1):.2f} (1)"

    scores = rows_of(page, "### Normalised scores")
    assert [row[0] for row in scores[2:]] == ["jumper", "jumper (R_min 3)", "starpilot"]
    assert scores[3][1].startswith(f"{np.mean([(value - 3) / 7 for value in returns]):.3f} ± ")

    header, _, ppg, ppo, published = rows_of(page, "### Over jumper, starpilot")
    assert header == ["group", "seeds", "mean", "IQM", "mean (R_min 3)", "IQM (R_min 3)", "P(improvement)"]
    assert ppg[0] == "ppg_procgen" and ppg[-1] == "1.000 [1.000, 1.000]" and ppo[-1] == "baseline"
    assert published[0] == "PPO (openai/train-procgen)" and published[1] == "3"
    alone = rows_of(page, "### Over starpilot")
    assert [row[0] for row in alone[2:]] == ["ppg_procgen", "ppg_wide", "ppo_procgen", "PPO (openai/train-procgen)"]
    assert "[" not in alone[3][2]  # a single seed has no interval


def test_restricted_levels_show_training_against_unseen_levels(tmp_path, tool):
    for seed in (1, 2, 3):
        write_run(tmp_path / "runs", "maze", seed=seed, num_levels=200)
    page = tool(tmp_path / "runs")
    header = rows_of(page, "### Return at")[0]
    assert header[1:3] == ["ppg_procgen, train levels", "ppg_procgen, test levels"]
    ours, published = rows_of(page, "### Training levels against unseen levels")[2:]
    train, test, gap = (float(cell.split()[0]) for cell in ours[2:])
    assert test == pytest.approx(0.6 * train, abs=0.02) and gap == pytest.approx(0.4 * train, abs=0.02)
    assert published[0] == "PPO (openai/train-procgen)"
    _, curves, _ = report.load_runs((tmp_path / "runs",))
    [ax] = pictures.draw_curves(curves[curves.split != "eval_train"], "global_step", 100 * BATCH).axes
    assert [line.get_marker() for line in ax.lines] == ["o", "None"]


def test_settings_without_published_ranges_or_rows_at_the_step(tmp_path, tool, capsys):
    run = write_run(tmp_path / "runs", "maze")
    args = (run / "args.json").read_text()
    (run / "args.json").write_text(args.replace('"easy"', '"memory"'))
    page = tool(tmp_path / "runs")
    assert "nobody has published ranges" in page and "### Normalised scores" not in page
    (run / "args.json").write_text(args)
    page = tool(tmp_path / "runs", step=1e9)
    assert "not in the tables, as they ended before 1,000M steps: ppg_procgen maze seed 1 (1.64M)" in page


def test_tables_compare_where_published_rows_end(tmp_path, tool):
    """Published rows are means over 262,144 steps, so ours is averaged over the same ones, not those after them."""
    run = write_run(tmp_path / "runs", "maze", num_rows=61)  # 999,424 steps; the published rows end at 786,432
    header, _, row = rows_of(tool(tmp_path / "runs"), "### Return at 786,432 steps")
    table = pd.read_csv(run / "metrics.csv").query("524_288 < global_step <= 786_432")
    assert len(table) == 16 and row[1] == f"{table['charts/mean_return_100'].mean():.2f} (1)"
    references = report.load_references(("ppo",))
    references = references.query("distribution_mode == 'easy' and num_levels == 0 and env_id == 'maze'")
    assert row[2].startswith(f"{references[references.global_step == 786_432].episodic_return.mean():.2f} ±")
    assert "### Return at 999,424 steps" in tool(tmp_path / "runs", step=999_424)
    assert report.step_to_compare_at(99_942_400, report.load_references(("ppg", "ppo")))[0] == 99_614_720
    assert report.step_to_compare_at(100_000, references) == (100_000, 0)


def test_an_aborted_run_moves_neither_the_step_nor_the_time_of_the_tables(tmp_path, tool, capsys):
    for seed in (1, 2):
        write_run(tmp_path / "runs", "maze", seed=seed, num_levels=1)
    write_run(tmp_path / "runs", "maze", "ppg_debug", num_levels=1, num_rows=5)
    page = tool(tmp_path / "runs")
    assert (
        "### Return at 1.64M steps" in page and "Return after 13.7 min" in page
    )  # 100 x 16,384 steps at 2,000 a second
    shutil.rmtree(next((tmp_path / "runs").glob("maze__ppg_procgen__2__*")))
    capsys.readouterr()
    tool(tmp_path / "runs")
    assert "some runs go on to 1.64M, but the tables are at 81,920: --step" in capsys.readouterr().out


def test_odd_budgets_and_baselines_become_notes(tmp_path, tool):
    run = write_run(tmp_path / "runs", "maze")
    (run / "args.json").write_text((run / "args.json").read_text().replace("1638400", '"25M"'))
    page = tool(tmp_path / "runs", baseline="typo")
    assert "### Return at" in page and "no group is named 'typo'" in page


def test_the_same_runs_give_the_same_files(tmp_path, tool):
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed=seed)
    tool(tmp_path / "runs")
    shutil.move(tmp_path / "out", tmp_path / "first")
    tool(tmp_path / "runs")
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


# ---- the command


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "name at least one folder with runs, or --figure2"),
        (["no/such/folder"], "no such folder: no/such/folder"),
        (["--figure2", "--references", "dqn"], "no published curve of dqn, only of"),
        (["--figure2", "--references"], "--figure2 needs the name of at least one published curve"),
        (["--figure2", "--reps", "0"], "--reps must be positive"),
        (["--figure2", "--step", "nan"], "--step must be positive"),
        (["."], "no run to report on under ."),
    ],
)
def test_bad_arguments_give_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPORT), run_name="__main__")
    found = capsys.readouterr()
    assert end.value.code == 2 and found.out == ""
    assert found.err.startswith(f"report.py: {line}") and found.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds, num_rows", [(1, 100), (5, 1525)])
def test_a_whole_benchmark(tmp_path, tool, num_seeds, num_rows):
    """4 algorithms on 16 games; the full one has 320 runs of 25M steps, and takes about 20 s."""
    for name, score in (("ppg_procgen", 0.8), ("ppg_detach", 0.7), ("ppg_kl", 0.75), ("ppo_procgen", 0.5)):
        for env_id in report.RANGES:
            for seed in range(num_seeds):
                write_run(tmp_path / "runs", env_id, name, seed, score=score, num_rows=num_rows)
    page = tool(tmp_path / "runs", reps=2000 if num_seeds == 5 else 50, step=num_rows * BATCH)
    assert len(rows_of(page, "### Over all 16 games")) == 2 + 5
    assert len(rows_of(page, f"### Return at {num_rows * BATCH / 1e6:.3g}M steps")) == 2 + 16


def test_foreign_names_and_modes_stay_inside_the_page(tmp_path, tool, capsys):
    """What a run says of itself neither chooses a path nor becomes Markdown, HTML or a formula."""
    for seed, changes in enumerate(
        [
            {"distribution_mode": "../../x"},
            {"exp_name": "ppg a|b<img src=x>$\\frac$[l](http://x)"},
            {"num_levels": "many"},
        ]
    ):
        run = write_run(tmp_path / "runs", seed=seed)
        record = json.loads((run / "args.json").read_text())
        (run / "args.json").write_text(json.dumps(record | {"args": record["args"] | changes}))
    before = set(tmp_path.rglob("*"))
    page = tool(tmp_path / "runs")
    printed = capsys.readouterr().out
    assert "'../../x' is no distribution mode" in printed and "invalid literal" in printed
    assert r"a\|b\<img src=x\>" in page and r"[l]\(http" in page
    assert {path for path in tmp_path.rglob("*") if "out" not in path.parts} == before


def test_rows_that_are_not_finite_are_left_out_and_said(tmp_path, tool, capsys):
    run = write_run(tmp_path / "runs")
    header, first, *rest = (run / "metrics.csv").read_text().splitlines()
    cells = first.split(",")
    cells[header.split(",").index("charts/mean_return_100")] = "inf"
    (run / "metrics.csv").write_text("\n".join([header, ",".join(cells), *rest]) + "\n")
    assert "starpilot" in tool(tmp_path / "runs")
    assert "1 rows are not finite and left out" in capsys.readouterr().out


def test_events_damaged_in_the_middle_are_named(tmp_path):
    folder = write_events(tmp_path / "maze__ppo__1__17", np.ones(200), np.arange(200))
    [file] = folder.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    _, curves, notes = report.load_runs((tmp_path,))
    assert "is truncated or damaged" in notes[0] and 0 < len(curves) < 200
