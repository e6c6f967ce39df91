"""Tables and pictures of training runs, beside published Procgen curves.

    python benchmark/report.py runs --out report    # report/report.md with its pictures

A run is a folder with args.json and metrics.csv, or with TensorBoard events (CleanRL's). A folder may also hold many
runs: metrics.csv.gz with a column "run", args.json with an entry for each. A group has the same exp_name, mode, levels,
CPU or GPU, and flags that change numbers; if scripts, packages, devices or folders differ, its name says so.
"""

import ast
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro

os.environ["MPLBACKEND"] = "Agg"  # files only; a notebook's backend may be unknown here
import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.ticker import EngFormatter
from rliable import library, metrics
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Everything works on one long table, `curves`, one row a point: own (ours or published), group, distribution_mode,
# num_levels, env_id, seed, run, global_step, wall_time (hours), episodic_return. A group's returns on unseen levels
# are a group of their own, whose name ends in UNSEEN.
REFERENCE = Path(__file__).parent / "reference"
RANGES = pd.read_csv(REFERENCE / "ranges.csv")  # score = (return - r_min) / (r_max - r_min)
SETTING = ["distribution_mode", "num_levels"]
CURVE = ["env_id", "group", "run"]
UNSEEN = ", unseen levels"
RETURNS = {"charts/mean_return_100": "", "eval/test_return": UNSEEN}  # columns of metrics.csv
MIN_SEEDS = 3  # fewer seeds get no interval of their mean: it would be wider than what it is about
MIN_SCORES = 10  # seeds x games; of fewer, a mean says little and a bootstrap's interval is too narrow
SAME_GROUP = {  # flags that tell a group's runs apart, follow from other flags, or change no numbers
    "env_id", "seed", "exp_name", "run_dir", "resume", "checkpoint_interval", *SETTING,
    "compile", "cuda_graphs", "tf32", "buffer_on_cpu", "aux_device", "env_threads",
    "chunk_size", "batch_size", "num_iterations", "num_phases", "eval_interval",
    "track", "wandb_project_name", "wandb_entity",
}  # fmt: skip

# Okabe and Ito's colors, which color-blind readers can tell apart, by the beginning of a group's name
COLORS = {"ppg_detach": "#009E73", "ppg": "#0072B2", "ppo": "#D55E00", "cleanrl": "#CC79A7"}
COLORS |= {"PPG (": "#56B4E9", "PPO (": "#4D4D4D"}
OTHER_COLORS = ["#882255", "#E69F00", "#332288", "#999933", "#000000", "#A0522D", "#44AA99", "#AA88DD"]
NUM_BINS = 100  # points of a drawn curve
WIDTH = 7  # inches of a whole picture
STYLE = {"axes.grid": True, "grid.alpha": 0.4, "text.parse_math": False}  # an exp_name may contain $
sns.set_theme(context="paper", style="ticks", rc=STYLE)

CURVE_CAPTION = "Thin lines: runs; thick: their mean ± standard deviation, until the first of them ends."
STEP_TEXT = (
    "Mean return of the last 100 episodes, averaged in each run over its rows from {start:,.0f} to {step:,.0f} steps "
    "(none there: its last row before). Mean ± standard deviation [Student's 95 % interval] (number of seeds). One or "
    "two seeds: each value. Runs of one seed count as one, with their mean."
)
DIFFERENCE_TEXT = "Difference of the mean return from the baseline's, [Welch's 95 % interval], seeds of both."
THRESHOLD_TEXT = (
    "Steps and hours at the end of the first {block:,.0f} steps (counted from 0) in which the mean return of the last "
    "100 episodes is at least this high on average. One value a run, in the order of the seeds; –: not reached."
)
SCORE_TEXT = (
    "score = (return - R_min) / (R_max - R_min), with the ranges of the Procgen paper. IQM: interquartile mean. "
    "P(improvement): probability that a run has a higher score than a run of the baseline on the same game. In "
    "brackets: 95 % interval of a bootstrap over seeds, stratified by game. Not of groups with fewer than ten scores."
)
EVALUATION_TEXT = "Mean return over levels after this iteration, by `evaluate.py`; over runs, as in the tables above."
RUNS_TEXT = "script: a checksum of the copy in the run folder, or the commit. steps/s: with what ran beside it."


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]]  # run folders, sweep folders, or any parent of them
    out: Path = Path("report")  # folder to write to
    step: float | None = None  # step of the tables, or the published row before it; default: where the median run ended
    thresholds: tuple[float, ...] = ()  # also show the first step at which each run has these returns
    references: tuple[str, ...] = ("ppg", "ppo")  # published curves, by the names in benchmark/reference/README.md
    baseline: str = "ppo"  # comparisons are with the group of this name, else the first that contains it, ours first
    reps: int = 2000  # bootstrap samples of each interval


def load_references(algorithms: tuple[str, ...]) -> pd.DataFrame:
    """The published curves of these algorithms."""
    curves = pd.read_csv(REFERENCE / "procgen_curves.csv.gz")
    curves = curves[curves.algorithm.isin(algorithms)]
    title = curves.algorithm.str[:3].str.upper() + curves.algorithm.str[3:].str.replace("_", " ")
    group = title + " (" + curves.source + ")" + curves.split.map({"train": "", "test": UNSEEN})
    return curves.assign(own=False, group=group, seed=curves.run, run=curves.run.astype(str))


def find_run_folders(paths: tuple[Path, ...]) -> list[Path]:
    """Every folder under the paths that holds a run's files, once."""
    walks = [walk for path in paths for walk in os.walk(path, followlinks=True)]
    files = [Path(folder, name) for folder, _, names in walks for name in names]
    folders = {file.parent.resolve() for file in files if file.match("args.json") or file.match("events.out.tfevents*")}
    # inside a run folder are files of other loggers, not runs
    return sorted(folder for folder in folders if folders.isdisjoint(folder.parents))


def read_runs(folder: Path) -> list[tuple[str, dict, pd.DataFrame]]:
    """Name, entry in args.json, and metrics of each run in a folder."""
    if not (folder / "args.json").exists():
        return [read_events(folder)]
    record = json.loads((folder / "args.json").read_text())
    if (folder / "metrics.csv.gz").exists():
        tables = pd.read_csv(folder / "metrics.csv.gz").groupby("run")
        return [(f"{folder}/{run}", record[run], table) for run, table in tables]
    text = (folder / "metrics.csv").read_text()
    complete_lines = text[: text.rfind("\n") + 1]  # a running script may be writing the last one
    return [(str(folder), record, pd.read_csv(io.StringIO(complete_lines)))]


def read_events(folder: Path) -> tuple[str, dict, pd.DataFrame]:
    """The same from TensorBoard events of CleanRL, which logs a return an episode and plays all easy levels."""
    env_id, exp_name, seed, *_ = folder.name.split("__")
    args = {"env_id": env_id, "exp_name": f"{exp_name} (TensorBoard)", "seed": int(seed)}
    args.update(distribution_mode="easy", num_levels=0)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: all of them
    rows = pd.DataFrame(events.Scalars("charts/episodic_return")).rename(columns={"step": "global_step"})
    rows["charts/mean_return_100"] = rows.value.rolling(100, min_periods=1).mean()
    rows["wall_time"] -= events.FirstEventTimestamp()
    return str(folder), {"args": args}, rows


def describe_run(folder: Path, path: str, record: dict, rows: pd.DataFrame) -> dict:
    """A run's row in the table of runs."""
    args = dict(record["args"])
    run = {key: args[key] for key in ("env_id", "seed", *SETTING)}
    if rows.empty:
        raise ValueError("no episode or row of metrics yet")
    args["num_ranks"] = record.get("num_ranks", args.get("num_ranks", 1))
    if "clip_vloss" in args and "n_iteration" in args:
        args["vf_coef"] *= 2  # PPG before 0.11: the weight of the squared error, not of its half
    args.pop("cuda", None)  # asks for a GPU; the device tells whether there was one
    if device := record.get("device", args.get("device")):
        args["device"] = "cpu" if device.startswith("cpu") else "gpu"
    same = SAME_GROUP if args.get("anneal_lr") else SAME_GROUP | {"total_timesteps"}
    options = {flag: str(value) for flag, value in args.items() if flag not in same}
    run.update(own=True, group=args["exp_name"], run=path, options=options, device=device, seconds=rows.wall_time.max())
    run["last_step"] = rows.global_step.max()
    run["is_whole"] = run["last_step"] + rows.global_step.min() > args.get("total_timesteps", 0)  # no iteration is left
    versions = record.get("packages", {})
    run["packages"] = ", ".join(f"{x} {versions[x]}" for x in sorted(versions) if x.startswith(("procgen", "torch")))
    copies = [ast.unparse(ast.parse(file.read_text("utf-8"))) for file in sorted(folder.glob("*.py"))]  # no comments
    script = f"{zlib.crc32(''.join(copies).encode()):08x}" if copies else record.get("commit", "unknown")[:7]
    return run | {"script": script, "folder": os.path.relpath(os.path.dirname(path))}


def load_runs(paths: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs (one row a run), their curves, and notes on what is missing or odd."""
    runs, curves, notes = [], [], []
    for folder in find_run_folders(paths):
        try:
            for path, record, rows in read_runs(folder):
                run = describe_run(folder, path, record, rows)
                fixed = {key: run[key] for key in ("own", "env_id", "seed", "run", *SETTING)}
                for column, suffix in RETURNS.items():  # all rows are dropped where no episode has ended
                    curve = rows[["global_step"]].assign(wall_time=rows.wall_time / 3600, group=suffix, **fixed)
                    curves.append(curve.assign(episodic_return=rows.get(column)).dropna())
                runs.append(run)
        except Exception as error:  # a broken or foreign folder must not cost the page of a whole sweep
            notes.append(f"{folder}: left out: {type(error).__name__}: {error}")
    if not runs:
        return pd.DataFrame(), pd.DataFrame(), notes
    runs = pd.DataFrame(runs).sort_values(["last_step", "run"])
    curves = pd.concat([curve for curve in curves if len(curve)] or curves, ignore_index=True)
    runs["group"] = group_names(runs)
    runs["group"] += mixtures(runs)
    curves["group"] = curves.run.map(runs.set_index("run").group) + curves.group
    notes += run_notes("no episode has finished yet", runs[~runs.run.isin(curves.run)])
    notes += run_notes("stopped early, or still running", runs[~runs.is_whole])
    return runs, curves, notes


def group_names(runs: pd.DataFrame) -> pd.Series:
    """exp_name, and the flags that differ between the runs of this name and setting. A flag that a run lacks, because
    its script was of another version, is no difference."""
    names = runs.group.copy()
    for flag, values in pd.DataFrame(list(runs.options), index=runs.index).items():
        games = ["env_id"] if flag == "start_level" else []  # games may have their own levels
        differs = values.groupby([runs[column] for column in ["group", *SETTING, *games]]).transform("nunique") > 1
        shown = differs & values.notna()
        names[shown] += f" --{flag.replace('_', '-')} " + values[shown]
    return names


def mixtures(runs: pd.DataFrame) -> pd.Series:
    """For the name of each run's group: in what else its runs differ, or what they repeat."""
    group = [runs[column] for column in ["group", *SETTING]]
    folders = runs.groupby([*group, "env_id"]).folder.transform("nunique")  # games may have folders of their own
    repeats = runs.groupby([*group, "env_id", "seed"]).run.transform("nunique")
    found = {"mixed folders": folders > 1, "repeated seeds": repeats > 1}
    for column in ("script", "packages", "device"):
        found[f"mixed {column.rstrip('s')}s"] = runs.groupby(group)[column].transform("nunique") > 1
    texts = pd.Series("", index=runs.index)
    for text, is_so in found.items():
        texts[is_so.groupby(group).transform("any")] += f", {text}"
    return texts


def run_notes(text: str, runs: pd.DataFrame) -> list[str]:
    names = [f"{os.path.relpath(x.run)} (at {x.last_step:,})" for x in runs.itertuples()]
    return [f"{text}: {', '.join(names)}"] if names else []


def in_order(curves: pd.DataFrame) -> list[str]:
    """The groups: ours first, then published ones."""
    groups = curves[["own", "group"]].drop_duplicates()
    return groups.sort_values(["own", "group"], ascending=[False, True]).group.tolist()


def value_at_step(curves: pd.DataFrame, step: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (step - window, step], or its last row before `step` if it has none there.
    Runs that end more than an iteration (their first row) before `step` are left out."""
    run = ["env_id", curves.group.str.removesuffix(UNSEEN), "run"]  # evaluations on unseen levels may be rare
    steps = curves.groupby(run).global_step
    reached = steps.transform("max") + steps.transform("min") >= step
    before = curves[reached & (curves.global_step <= step)]
    last = before.groupby(CURVE).global_step.transform("max")
    in_window = before.global_step > np.minimum(step - window, last - 1)
    return before[in_window].groupby(["own", *CURVE, "seed"], as_index=False).episodic_return.mean()


def step_to_compare_at(end: float, published: pd.DataFrame) -> tuple[float, float]:
    """A published row is the mean over the steps since the row before. Returns the last step up to `end` at which all
    published curves that go on to `end` have a row, and over how many steps the coarsest row is a mean."""
    rows = published[published.groupby(CURVE).global_step.transform("max") >= end].query("global_step <= @end")
    steps = rows.groupby(CURVE).global_step
    return (end, 0) if rows.empty else (steps.max().min(), steps.min().max())


def normalized(values: pd.DataFrame, mode: str) -> pd.DataFrame:
    """The values with a column `score`."""
    ranges = RANGES[RANGES.distribution_mode == mode].set_index("env_id")
    low, high = values.env_id.map(ranges.r_min), values.env_id.map(ranges.r_max)
    return values.assign(score=(values.episodic_return - low) / (high - low))


def score_matrix(scores: pd.DataFrame, games: list[str]) -> np.ndarray:
    """Seeds x games of a group. rliable needs it full: as many runs of a game as each game has."""
    row = scores.groupby("env_id").seed.rank("first")
    return scores.assign(row=row).pivot(index="row", columns="env_id", values="score")[games].dropna().to_numpy()


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """rliable's metric without its p-values: 100 times faster."""
    return np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y))


def estimate(matrices: list[np.ndarray], metric: Callable, reps: int) -> str:
    """rliable's point estimate with a 95 % stratified bootstrap interval."""
    text = f"{metric(*matrices):.3f}"
    if min(len(matrix) for matrix in matrices) >= MIN_SEEDS:
        np.random.seed(0)  # rliable draws from numpy's global generator
        _, intervals = library.get_interval_estimates({"": matrices}, metric, reps=reps)
        text += " [{:.3f}, {:.3f}]".format(*intervals[""].ravel())
    return text


def find_baseline(group: str, groups: list[str], name: str) -> str | None:
    """The group of this name, else of those that contain it the one that shares most flags; on the same levels."""
    flags = [set(re.findall(r"--\S+ [^\s,]+", x)) for x in (group, *groups)]
    shared = {other: len(flags[0] & flags[i + 1]) for i, other in enumerate(groups)}
    same_levels = [other for other in groups if other.endswith(UNSEEN) == group.endswith(UNSEEN)]
    matching = [other for other in same_levels if name.lower() in other.lower()]
    return min(matching, key=lambda other: (other.removesuffix(UNSEEN) != name, -shared[other]), default=None)


def markdown(table: pd.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True)


def seeds_cell(values: pd.Series, digits: int) -> str:
    texts = [f"{value:.{digits}f}" for value in values]
    if len(values) >= MIN_SEEDS:
        half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        numbers = [values.mean(), values.std(), values.mean() - half, values.mean() + half]
        texts = ["{:.{d}f} ± {:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*numbers, d=digits)]
    return f"{', '.join(texts)} ({len(values)})"


def game_table(values: pd.DataFrame, column: str, digits: int) -> str:
    values = values.assign(group=pd.Categorical(values.group, in_order(values)))
    cells = values.groupby(["env_id", "group"], observed=True)[column].agg(seeds_cell, digits=digits)
    return markdown(cells.reset_index().rename(columns={"env_id": "game", "episodic_return": "return"}))


def difference_table(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Of each game and group with two seeds or more: the difference of its mean return from the baseline's."""
    returns = dict(list(values.groupby(["env_id", "group"]).episodic_return))
    groups, rows = in_order(values), []
    for (game, group), x in returns.items():
        rival = find_baseline(group, groups, baseline)
        y = returns.get((game, rival), [])
        if rival != group and min(len(x), len(y)) >= 2:
            low, high = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
            difference = f"{x.mean() - y.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
            rows.append([game, group, rival, difference, f"{len(x)}, {len(y)}"])
    return pd.DataFrame(rows, columns=["game", "group", "baseline", "difference", "seeds"])


def threshold_table(curves: pd.DataFrame, thresholds: tuple[float, ...], block: float) -> str:
    """For each threshold, the steps and hours of each run at the end of its first block of steps whose mean return is
    at least as high: the first single row would favor the noisier group."""
    keys = ["env_id", "group", "seed", "run"]
    curves = curves[~curves.group.str.endswith(UNSEEN)]
    number = np.ceil(curves.global_step / block)
    whole = number * block <= curves.groupby("run").global_step.transform("max")
    means = {"global_step": "max", "wall_time": "max", "episodic_return": "mean"}
    blocks = curves[whole].groupby([*keys, number[whole].rename("block")]).agg(means)
    table = pd.DataFrame(index=curves.groupby(keys).size().index)
    for threshold in thresholds:
        first = blocks[blocks.episodic_return >= threshold].groupby(keys).first()
        table[f"steps to {threshold:g}"] = first.global_step.map("{:,.0f}".format)
        table[f"hours to {threshold:g}"] = first.wall_time.map("{:.2f}".format)
    return markdown(table.fillna("–").groupby(keys[:2]).agg("; ".join).rename_axis(["game", "group"]).reset_index())


def aggregate_table(scores: dict[str, np.ndarray], baseline: str, reps: int) -> str:
    """One row a group. scores: seeds x games of each group."""
    rows = []
    for group, matrix in scores.items():
        rival = find_baseline(group, list(scores), baseline)
        improvement = "–"
        if rival and rival != group:
            improvement = estimate([matrix, scores[rival]], probability_of_improvement, reps)
        averages = [estimate([matrix], metric, reps) for metric in (metrics.aggregate_mean, metrics.aggregate_iqm)]
        rows.append([group, len(matrix), *averages, improvement])
    return markdown(pd.DataFrame(rows, columns=["group", "seeds", "mean", "IQM", "P(improvement)"]))


def looks(groups: list[str]) -> tuple[dict[str, str], dict[str, tuple]]:
    """Color and dashes of each group. A group on training and on unseen levels has one color."""
    all_published = all("(openai/" in group for group in groups)
    colors, dashes = {}, {}
    for name in dict.fromkeys(group.removesuffix(UNSEEN) for group in groups):
        own_color = [color for beginning, color in COLORS.items() if name.startswith(beginning)]
        color = next((x for x in (*own_color, *OTHER_COLORS) if x not in colors.values()), "0.5")
        colors |= {name: color, name + UNSEEN: color}
        dashes |= {name: (4, 2) if "(openai/" in name and not all_published else (), name + UNSEEN: (1, 1)}
    return colors, dashes


def binned(curves: pd.DataFrame, x: str, limit: float) -> pd.DataFrame:
    """Mean returns in NUM_BINS bins of x, interpolated between the first and the last bin of a run."""
    width = limit / NUM_BINS
    bins = np.ceil(curves[x] / width) * width
    table = curves.groupby([bins, *CURVE]).episodic_return.mean().unstack(CURVE)
    return table.interpolate(method="index", limit_area="inside").unstack().dropna().rename("y").reset_index()


def draw_curves(curves: pd.DataFrame, x: str, limit: float, label: str) -> sns.FacetGrid:
    """Each run, and their mean with a band of one standard deviation, for x from 0 to limit, a panel a game."""
    first = curves.groupby(CURVE).global_step.transform("min")
    middle = curves.global_step - first / 2  # a published row is the mean over the steps since the row before
    curves = curves.assign(global_step=curves.global_step.where(curves.own, middle))
    rows = binned(curves[curves[x] <= limit], x, limit)
    num_runs = rows.groupby(["env_id", "group"]).run.transform("nunique")
    shared = rows[rows.groupby([x, "env_id", "group"]).run.transform("count") == num_runs]  # until the first run ends
    colors, dashes = looks(groups := in_order(curves))
    look = {"x": x, "y": "y", "hue": "group", "hue_order": groups, "palette": colors}
    look |= {"style": "group", "dashes": dashes}
    num_columns = 4 if rows.env_id.nunique() > 4 else min(2, rows.env_id.nunique())
    height = 1.2 + 2.2 / num_columns
    panels = {"col": "env_id", "col_wrap": num_columns, "height": height, "aspect": WIDTH / num_columns / height}
    panels["facet_kws"] = {"sharey": False, "legend_out": False}
    grid = sns.relplot(shared, kind="line", errorbar="sd", **look, **panels)
    for game, ax in grid.axes_dict.items():
        thin = {"units": "run", "estimator": None, "legend": False, "linewidth": 0.5, "alpha": 0.6, "ax": ax}
        sns.lineplot(rows[rows.env_id == game], **look, **thin)
        if x == "global_step":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    grid.set_titles("{col_name}").set_axis_labels(label, "Episodic return").set(xlim=(0, limit))
    num_columns = 2 if max(map(len, groups)) < 40 else 1
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.5, 1), ncols=num_columns, title=None, frameon=False)
    return grid


def picture(grid: sns.FacetGrid, path: Path, caption: str) -> str:
    """Save as PNG; returns the Markdown that shows it."""
    grid.savefig(f"{path}.png", dpi=200)
    plt.close(grid.figure)
    return f"![{path.name}]({path.name}.png)\n\n*{caption}*"


def report_scores(args: Args, mode: str, values: pd.DataFrame) -> list[str]:
    """Normalized scores: a table by game, and aggregates for each set of games."""
    values = normalized(values, mode)
    text = ["### Normalized scores", SCORE_TEXT, game_table(values, "score", 3)]
    games_of = {group: set(values.env_id[values.group == group]) for group in in_order(values)}
    # groups can be compared on the same games only: a table for each set of games that one of our groups has
    game_sets = {tuple(sorted(games_of[group])) for group in set(values.group[values.own])}
    for games in sorted(game_sets, key=lambda games: (-len(games), games)):
        groups = [group for group in games_of if set(games) <= games_of[group]]
        scores = {group: score_matrix(values[values.group == group], list(games)) for group in groups}
        scores = {group: matrix for group, matrix in scores.items() if matrix.size >= MIN_SCORES}
        if scores:
            text.append(f"### Over {', '.join(games) if len(games) < 16 else 'all 16 games'}")
            text.append(aggregate_table(scores, args.baseline, args.reps))
    return text


def report_setting(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, notes: list[str]) -> list[str]:
    """The page on one distribution mode and number of levels; adds to the notes."""
    mode, num_levels = runs[SETTING].iloc[0]
    title = f"{mode}, {num_levels or 'all'} level{'' if num_levels == 1 else 's'}"
    path = args.out / (f"{mode}_{num_levels}_levels" if num_levels else mode)
    if not num_levels:  # all levels are in training: an evaluation repeats what the training episodes say
        curves = curves[~curves.group.str.endswith(UNSEEN)]
    own, published = curves[curves.own], curves[~curves.own]
    step, row = step_to_compare_at(args.step or runs.last_step.quantile(0.5, interpolation="lower"), published)
    window = min(max(row, 0.05 * step), step)
    values = value_at_step(curves, step, window)
    notes += run_notes(f"{title}: no value at {step:,.0f} steps", runs[~runs.run.isin(values.run)])
    values = values.groupby(["own", "env_id", "group", "seed"], as_index=False).episodic_return.mean()
    text = [f"## {title}", f"### Return at {step:,.0f} steps"]
    text += [STEP_TEXT.format(start=step - window, step=step), game_table(values, "episodic_return", 2)]
    differences = difference_table(values, args.baseline)
    if len(differences):
        text += ["### Difference from the baseline", DIFFERENCE_TEXT, markdown(differences)]
    if args.thresholds:
        text += ["### Steps to a return", THRESHOLD_TEXT.format(block=window)]
        text += [threshold_table(own, args.thresholds, window)]
    grid = draw_curves(curves, "global_step", own.global_step.max(), "Environment steps")
    text += ["### Return over steps", picture(grid, Path(f"{path}_steps"), CURVE_CAPTION)]
    grid = draw_curves(own, "wall_time", own.wall_time.max(), "Hours")
    text += ["### Return over time", picture(grid, Path(f"{path}_time"), CURVE_CAPTION)]
    procgen = values[values.env_id.isin(RANGES.env_id)]
    if procgen.own.any() and (num_levels == 0 or num_levels >= 100):  # the published ranges are over many levels
        text += report_scores(args, mode, procgen)
    notes += [] if find_baseline("", in_order(values), args.baseline) else [f"{title}: no baseline {args.baseline}"]
    return text


def report_evaluations(args: Args, names: dict[str, str]) -> list[str]:
    """A table of what evaluate.py has written under the paths. names: the group of each run folder."""
    files = sorted({file.resolve() for path in args.paths for file in path.rglob("summary.csv")})
    if not files:
        return []
    rows = pd.concat([pd.read_csv(file) for file in files]).drop_duplicates()
    folders = rows.weights.map(lambda path: Path(path).resolve().parent)
    rows["group"] = [names.get(str(folder), folder.name) for folder in folders]
    rows["levels"] = rows["mode"] + " " + rows["levels"] + rows.greedy.map({True: ", greedy", False: ""})
    means = rows.groupby(["env_id", "levels", "iteration", "group"])["mean"]
    cells = means.agg(seeds_cell, digits=2).unstack(fill_value="")
    return ["## Evaluations", EVALUATION_TEXT, markdown(cells.reset_index())]


def runs_table(runs: pd.DataFrame) -> str:
    """A row for each game, machine and script of a group."""
    runs = runs.sort_values("seed").rename(columns={"env_id": "game", "seed": "seeds", "last_step": "steps"})
    runs["steps/s"] = runs.steps / runs.seconds
    columns = ["group", *SETTING, "game", "device", "script", "packages", "folder"]
    rows = runs.groupby(columns, dropna=False, as_index=False)
    return markdown(rows[["seeds", "steps", "steps/s"]].agg(lambda values: ", ".join(map("{:,.0f}".format, values))))


def main(args: Args) -> None:
    references = load_references(args.references)
    for algorithm in set(args.references) - set(references.algorithm):
        sys.exit(f"report.py: no published curves of {algorithm}; see benchmark/reference/README.md")
    for path in args.paths:
        if not path.exists():
            sys.exit(f"report.py: no such file or folder: {path}")
    runs, curves, notes = load_runs(args.paths)
    if runs.empty:
        sys.exit("\n".join([*notes, f"report.py: no runs under {', '.join(map(str, args.paths))}"]))
    args.out.mkdir(parents=True, exist_ok=True)
    text = ["# Training runs"]
    for setting, own in curves.groupby(SETTING):
        own_runs = runs[(runs[SETTING] == setting).all(axis=1)]
        published = references[(references[SETTING] == setting).all(axis=1) & references.env_id.isin(own.env_id)]
        text += report_setting(args, own_runs, pd.concat([own, published]), notes)
    text += report_evaluations(args, dict(zip(runs.run, runs.group, strict=True)))
    text += ["## Runs", RUNS_TEXT, runs_table(runs), "## Notes", *(f"- {note}" for note in notes)]
    (args.out / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print(*notes, f"wrote {args.out}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
