"""Tables and pictures of training runs, beside published Procgen curves.

    python benchmark/report.py runs --out report                     # report/report.md with its pictures
    python benchmark/report.py runs --out report --thresholds 3 5    # and the steps and hours to these returns

A run is a folder with args.json and metrics.csv, or with TensorBoard events only, as CleanRL writes them. A folder may
also hold a table of many runs: metrics.csv.gz with a column "run", and args.json with an entry for each run. Runs are
grouped by exp_name, distribution mode, number of levels, and the flags that change their numbers.
"""

import io
import json
import math
import os
import sys
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
from tbparse import SummaryReader

# Everything works on one long table, `curves`, one row a point: own (ours or published), group, distribution_mode,
# num_levels, env_id, seed, run, global_step, wall_time, aux_phase, episodic_return. A group's returns on unseen levels
# are a group of their own, whose name ends in UNSEEN.
REFERENCE = Path(__file__).parent / "reference"
RANGES = pd.read_csv(REFERENCE / "ranges.csv")  # score = (return - r_min) / (r_max - r_min)
SETTING = ["distribution_mode", "num_levels"]
CURVE = ["env_id", "group", "run"]
UNSEEN = ", unseen levels"
RETURNS = {"charts/mean_return_100": "", "eval/test_return": UNSEEN}  # columns of metrics.csv
MIN_SEEDS = 3  # fewer seeds get no interval of their mean: it would be wider than what it is about
SAME_GROUP = {  # flags that tell a group's runs apart, follow from other flags, or change no numbers
    "env_id", "seed", "exp_name", "run_dir", "resume", "checkpoint_interval", *SETTING,
    "device", "cuda", "compile", "cuda_graphs", "tf32", "buffer_on_cpu", "aux_device", "env_threads",
    "chunk_size", "batch_size", "num_iterations", "num_phases", "eval_interval",
    "track", "wandb_project_name", "wandb_entity",
}  # fmt: skip

# Okabe and Ito's colors, which color-blind readers can tell apart
COLORS = {
    "ppg_procgen": "#0072B2",
    "ppg_procgen --arch dual": "#0072B2",  # the same algorithm, where other runs of this name have another network
    "ppg_procgen --arch detach": "#009E73",
    "ppg_detach": "#009E73",  # the same algorithm; sweeps use this name
    "ppo_procgen": "#D55E00",
    "cleanrl_ppg": "#CC79A7",
    "PPG (openai/phasic-policy-gradient)": "#56B4E9",
    "PPO (openai/phasic-policy-gradient)": "#4D4D4D",
    "PPO (openai/train-procgen)": "#4D4D4D",
}
OTHER_COLORS = ["#882255", "#E69F00", "#332288", "#999933", "#000000", "#A0522D", "#44AA99", "#AA88DD"]
NUM_BINS = 100  # points of a drawn curve
WIDTH = 7  # inches of a whole picture
STYLE = {"axes.grid": True, "grid.alpha": 0.4, "axes.spines.right": False, "axes.spines.top": False}
STYLE["text.parse_math"] = False  # an exp_name may contain $
sns.set_theme(context="paper", style="ticks", rc=STYLE)

CURVE_CAPTION = "Mean return of the last 100 episodes: mean ± standard deviation over seeds, until one of them ends."
STEP_TEXT = (
    "Mean return of the last 100 episodes, averaged in each run over its rows from {start:,.0f} to {step:,.0f} steps "
    "(none there: its last row before). Mean ± standard deviation [Student's 95 % interval of the mean] (number of "
    "seeds); with fewer than three seeds, the value of each."
)
DIFFERENCE_TEXT = "Difference of the mean return from the baseline's, [Welch's 95 % interval], seeds of both."
THRESHOLD_TEXT = (
    "The first step, and the hours until it, at which the mean return of the last 100 episodes (of all, while there "
    "are fewer) is at least this high. One value a seed, in the order of the seeds; –: not reached."
)
SCORE_TEXT = (
    "score = (return - R_min) / (R_max - R_min), with the ranges of the Procgen paper. A group counts with as many "
    "seeds of each game as it has of every game: those of the lowest numbers. IQM: interquartile mean. "
    "P(improvement): probability that a run has a higher score than a run of the baseline on the same game. In "
    "brackets: 95 % interval of a bootstrap over seeds, stratified by game."
)


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]]  # run folders, sweep folders, or any parent of them
    out: Path = Path("report")  # folder to write to
    step: float | None = None  # step of the tables; default: where the median run ended, or the published row before it
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
    return curves.assign(own=False, group=group, seed=curves.run, run=curves.run.astype(str), aux_phase=False)


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
    events = SummaryReader(str(folder), extra_columns={"wall_time"}).scalars
    rows = events[events.tag == "charts/episodic_return"].rename(columns={"step": "global_step"})
    rows["charts/mean_return_100"] = rows.value.rolling(100, min_periods=1).mean()
    rows["wall_time"] -= events.wall_time.min()
    return str(folder), {"args": args}, rows


def describe_run(folder: Path, path: str, record: dict, rows: pd.DataFrame) -> dict:
    """A run's row in the table of runs."""
    args = record["args"]
    run = {key: args[key] for key in ("env_id", "seed", *SETTING)}
    if args["distribution_mode"] not in ("easy", "hard") or not isinstance(args["num_levels"], int):
        raise ValueError(f"not a setting of Procgen: {args['distribution_mode']}, {args['num_levels']} levels")
    if rows.empty:
        raise ValueError("no episode or row of metrics yet")
    num_ranks = record.get("num_ranks", args.get("num_ranks", 1))
    batch_size = args.get("num_envs", 0) * args.get("num_steps", 0) * num_ranks
    num_iterations = args.get("num_iterations", args["total_timesteps"] // batch_size) if batch_size else 0
    same = SAME_GROUP if args.get("anneal_lr") else SAME_GROUP | {"total_timesteps"}
    options = {flag: str(value) for flag, value in (args | {"num_ranks": num_ranks}).items() if flag not in same}
    run.update(own=True, group=args["exp_name"], run=path, options=options, planned_step=num_iterations * batch_size)
    run.update(last_step=rows.global_step.max(), seconds=rows.wall_time.max(), commit=record.get("commit"))
    copies = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))]
    return run | {"script": "\n".join(copies) or None}


def load_runs(paths: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs (one row a run), their curves, and notes on what is missing or odd."""
    runs, curves, notes = [], [], []
    for folder in find_run_folders(paths):
        try:
            for path, record, rows in read_runs(folder):
                run = describe_run(folder, path, record, rows)
                fixed = {key: run[key] for key in ("own", "env_id", "seed", "run", *SETTING)}
                aux_phase = rows.filter(["losses/aux/kl_loss"]).notna().any(axis=1)
                for column, suffix in RETURNS.items():  # all rows are dropped where no episode has ended
                    curve = rows[["global_step", "wall_time"]].assign(episodic_return=rows.get(column), group=suffix)
                    curves.append(curve.assign(aux_phase=aux_phase, **fixed).dropna())
                runs.append(run)
        except Exception as error:  # a broken or foreign folder must not cost the page of a whole sweep
            notes.append(f"{folder}: left out: {error!r}")
    if not runs:
        return pd.DataFrame(), pd.DataFrame(), notes
    runs = pd.DataFrame(runs).sort_values(["last_step", "run"])
    runs["group"] = group_names(runs)
    curves = pd.concat([curve for curve in curves if len(curve)] or curves, ignore_index=True)
    curves["group"] = curves.run.map(runs.set_index("run").group) + curves.group
    again = runs.duplicated(["group", *SETTING, "env_id", "seed"], keep="last")
    notes += [f"{run}: left out: a run of its group, game and seed is as long or longer" for run in runs.run[again]]
    runs = runs[~again]
    notes += run_notes("no episode has finished yet", runs[~runs.run.isin(curves.run)])
    notes += run_notes("stopped early, or still running", runs[runs.last_step < runs.planned_step])
    for _, group in runs.groupby(["group", *SETTING]):
        programs = group.script if group.script.notna().all() else group.commit
        if programs.nunique() > 1:
            odd = group[programs != programs.mode()[0]]
            notes += run_notes(f"{programs.nunique()} different scripts in one group; other than most runs", odd)
    return runs, curves[curves.run.isin(runs.run)], notes


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


def run_notes(text: str, runs: pd.DataFrame) -> list[str]:
    names = [f"{x.group} {x.env_id} seed {x.seed} (at {x.last_step:,})" for x in runs.itertuples()]
    return [f"{text}: {', '.join(names)}"] if names else []


def in_order(curves: pd.DataFrame) -> list[str]:
    """The groups: ours first, then published ones."""
    groups = curves[["own", "group"]].drop_duplicates()
    return groups.sort_values(["own", "group"], ascending=[False, True]).group.tolist()


def value_at_step(curves: pd.DataFrame, step: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (step - window, step], or its last row before `step` if it has none there and
    goes on afterwards. Runs that end before the window are left out."""
    run = ["env_id", curves.group.str.removesuffix(UNSEEN), "run"]  # evaluations on unseen levels may be rare
    reached = curves.groupby(run).global_step.transform("max") > step - window
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
    """Seeds x games of a group. rliable needs it full: as many seeds as each of the games has."""
    row = scores.groupby("env_id").seed.rank()
    return scores.assign(row=row).pivot(index="row", columns="env_id", values="score")[games].dropna().to_numpy()


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """rliable's metric without its p-values: 100 times faster."""
    return np.mean((x[:, None] > y) + 0.5 * (x[:, None] == y))


def estimate(matrices: list[np.ndarray], metric: Callable, reps: int) -> str:
    """rliable's point estimate with a 95 % stratified bootstrap interval."""
    np.random.seed(0)  # rliable draws from numpy's global generator
    points, intervals = library.get_interval_estimates({"": matrices}, metric, reps=reps)
    text = f"{points['']:.3f}"
    if min(len(matrix) for matrix in matrices) >= MIN_SEEDS:
        text += " [{:.3f}, {:.3f}]".format(*intervals[""].ravel())
    return text


def find_baseline(group: str, groups: list[str], name: str) -> str | None:
    """The group of this name, else the first whose name contains it; on the same levels."""
    same_levels = [other for other in groups if other.endswith(UNSEEN) == group.endswith(UNSEEN)]
    matching = [other for other in same_levels if name.lower() in other.lower()]
    return min(matching, key=lambda other: other.removesuffix(UNSEEN) != name, default=None)


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
    cells = values.groupby(["env_id", "group"])[column].agg(seeds_cell, digits=digits).unstack(fill_value="")
    return markdown(cells[in_order(values)].rename_axis("game").reset_index())


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


def threshold_table(curves: pd.DataFrame, thresholds: tuple[float, ...]) -> str:
    """For each threshold, the first step and hour at which each run's return is at least as high."""
    keys = ["env_id", "group", "seed"]
    curves = curves[~curves.group.str.endswith(UNSEEN)]
    table = pd.DataFrame(index=curves.groupby(keys).size().index)
    for threshold in thresholds:
        first = curves[curves.episodic_return >= threshold].groupby(keys)[["global_step", "wall_time"]].min()
        table[f"steps to {threshold:g}"] = first.global_step.map("{:,.0f}".format)
        table[f"hours to {threshold:g}"] = (first.wall_time / 3600).map("{:.2f}".format)
    return markdown(table.fillna("–").groupby(keys[:2]).agg("; ".join).rename_axis(["game", "group"]).reset_index())


def aggregate_table(scores: dict[str, np.ndarray], baseline: str, reps: int) -> str:
    """One row a group. scores: seeds x games of each group."""
    rows = []
    for group, matrix in scores.items():
        rival = find_baseline(group, list(scores), baseline)
        improvement = "-"
        if rival and rival != group:
            improvement = estimate([matrix, scores[rival]], probability_of_improvement, reps)
        averages = [estimate([matrix], metric, reps) for metric in (metrics.aggregate_mean, metrics.aggregate_iqm)]
        rows.append([group, len(matrix), *averages, improvement])
    return markdown(pd.DataFrame(rows, columns=["group", "seeds", "mean", "IQM", "P(improvement)"]))


def looks(groups: list[str]) -> dict[str, tuple]:
    """Color and line of each group. A group on training and on unseen levels has one color."""
    all_published = all("(openai/" in group for group in groups)
    used, look_of = {None}, {}
    for name in dict.fromkeys(group.removesuffix(UNSEEN) for group in groups):
        color = next((x for x in (COLORS.get(name), *OTHER_COLORS) if x not in used), "0.5")
        used.add(color)
        look_of[name] = color, "--" if "(openai/" in name and not all_published else "-"
        look_of[name + UNSEEN] = color, ":"
    return {group: look_of[group] for group in groups}


def binned(curves: pd.DataFrame, x: str, limit: float) -> pd.DataFrame:
    """Mean returns in NUM_BINS bins of x, a column a run; interpolated between the first and the last bin of a run."""
    width = limit / NUM_BINS
    bins = np.ceil(curves[x] / width) * width
    table = curves.groupby([bins, *CURVE]).episodic_return.mean().unstack(CURVE).sort_index(axis=1)
    return table.interpolate(method="index", limit_area="inside")


def draw_curves(curves: pd.DataFrame, x: str, limit: float, label: str) -> plt.Figure:
    """Mean return over seeds with a band of one standard deviation, for x from 0 to limit, a panel a game."""
    first = curves.groupby(CURVE).global_step.transform("min")
    middle = curves.global_step - first / 2  # a published row is the mean over the steps since the row before
    curves = curves.assign(global_step=curves.global_step.where(curves.own, middle))
    curves = curves[curves[x] <= limit]
    table = binned(curves, x, limit)
    num_seeds = curves.groupby(["env_id", "group"]).run.nunique().groupby("group").max()
    games = sorted(curves.env_id.unique())
    num_columns = min(4, len(games))
    num_rows = math.ceil(len(games) / num_columns)
    size = WIDTH, num_rows * (1.2 + 2.2 / num_columns)
    fig, axes = plt.subplots(num_rows, num_columns, figsize=size, layout="constrained", squeeze=False)
    for ax in axes.flat[len(games) :]:
        ax.remove()
    legend = {}
    for game, ax in zip(games, axes.flat, strict=False):
        for group, (color, style) in looks(in_order(curves)).items():
            runs = table.get((game, group), pd.DataFrame()).dropna()  # until the first of them ends
            mean, deviation = runs.mean(axis=1), runs.std(axis=1)
            name = f"{group}, {num_seeds[group]} seed{'' if num_seeds[group] == 1 else 's'}"
            [legend[name]] = ax.plot(runs.index, mean, color=color, linestyle=style)
            ax.fill_between(runs.index, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
        ax.set(title=game, xlim=(0, limit))
        if x == "global_step":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    phases = curves.loc[curves.aux_phase, x].unique()
    if len(games) == 1 and x == "global_step" and len(phases):
        ax.vlines(phases, 0, 1, transform=ax.get_xaxis_transform(), color="0.6", linewidth=0.8)
        ax.set_title(f"{games[0]} (vertical lines: ends of auxiliary phases)")
    fig.supxlabel(label, fontsize="medium")
    fig.supylabel("Episodic return", fontsize="medium")
    fig.legend(legend.values(), legend, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    return fig


def picture(fig: plt.Figure, path: Path, caption: str) -> str:
    """Save as PNG; returns the Markdown that shows it."""
    fig.savefig(f"{path}.png", dpi=200, bbox_inches="tight")
    plt.close(fig)
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
    step, row = step_to_compare_at(runs.last_step.quantile(0.5, interpolation="lower"), published)
    step = args.step or step
    window = min(max(row, 0.05 * step), step)
    values = value_at_step(curves, step, window)
    text = [f"## {title}", f"### Return at {step:,.0f} steps"]
    text += [STEP_TEXT.format(start=step - window, step=step), game_table(values, "episodic_return", 2)]
    differences = difference_table(values, args.baseline)
    if len(differences):
        text += ["### Difference from the baseline", DIFFERENCE_TEXT, markdown(differences)]
    if args.thresholds:
        text += ["### Steps to a return", THRESHOLD_TEXT, threshold_table(own, args.thresholds)]
    fig = draw_curves(curves, "global_step", own.global_step.max(), "Environment steps")
    text += ["### Return over steps", picture(fig, Path(f"{path}_steps"), CURVE_CAPTION)]
    unit, seconds = ("hours", 3600) if own.wall_time.max() > 2 * 3600 else ("minutes", 60)
    own = own.assign(wall_time=own.wall_time / seconds)
    fig = draw_curves(own, "wall_time", own.wall_time.max(), f"Time ({unit})")
    text += ["### Return over time", picture(fig, Path(f"{path}_time"), CURVE_CAPTION)]
    procgen = values[values.env_id.isin(RANGES.env_id)]
    if procgen.own.any() and (num_levels == 0 or num_levels >= 100):  # the published ranges are over many levels
        text += report_scores(args, mode, procgen)

    groups = in_order(values)
    notes += [] if find_baseline("", groups, args.baseline) else [f"{title}: no baseline {args.baseline}"]
    notes += run_notes(f"{title}: no value at {step:,.0f} steps", runs[~runs.run.isin(values.run)])
    return text


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
    groups = runs.assign(minutes=runs.seconds / 60, speed=runs.last_step / runs.seconds).groupby(["group", *SETTING])
    counts = groups.agg(games=("env_id", "nunique"), seeds=("seed", "nunique"), runs=("run", "count"))
    medians = groups[["last_step", "minutes", "speed"]].median().round(2).astype({"last_step": int})
    text = ["# Training runs", markdown(counts.join(medians).reset_index())]
    text += ["Last step, minutes and speed (steps/s): medians over the runs."]
    for setting, own in curves.groupby(SETTING):
        setting_runs = runs[(runs[SETTING] == setting).all(axis=1)]
        published = references[(references[SETTING] == setting).all(axis=1) & references.env_id.isin(own.env_id)]
        text += report_setting(args, setting_runs, pd.concat([own, published]), notes)
    text += ["## Notes", *(f"- {note}" for note in notes)]
    (args.out / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print(*notes, f"wrote {args.out}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
