"""Tables and pictures from training runs, beside published Procgen curves.

    python benchmark/report.py runs --out report             # report/report.md with its pictures
    python benchmark/report.py --figure2 --out report        # the paper's Figure 2 from the published curves alone
    python benchmark/report.py --figure2 runs --out report   # the same with our own runs laid over it

A run is a folder with args.json and metrics.csv, as the training scripts write it, or with TensorBoard events only, as
CleanRL writes it. Runs are grouped by name (exp_name; without one the script and the flags that make it another
algorithm), distribution mode and number of levels.
"""

import io
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pandas as pd
import tyro
from rliable import library, metrics
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, nothing installed
from benchmark.pictures import (  # noqa: E402
    CURVE,
    GROUP,
    MIN_SEEDS,
    NUM_BINS,
    Group,
    colours,
    curve_caption,
    draw_curves,
    draw_measurements,
    draw_profiles,
    group_titles,
    ordered_groups,
    picture,
)

# Everything works on one long table, `curves`, a row a point: own, name, split, distribution_mode, num_levels, env_id,
# seed, run, global_step, wall_time, aux_phase, episodic_return. The split is train (training episodes), test (unseen
# levels) or, for runs of ours, eval_train (an evaluation on the training levels).

REFERENCE = Path(__file__).parent / "reference" / "procgen_curves.csv.gz"

# (R_min, R_max) of the Procgen paper; score = (return - R_min) / (R_max - R_min)
RANGES = {
    "bigfish": {"easy": (1, 40), "hard": (0, 40)},
    "bossfight": {"easy": (0.5, 13), "hard": (0.5, 13)},
    "caveflyer": {"easy": (3.5, 12), "hard": (2, 13.4)},
    "chaser": {"easy": (0.5, 13), "hard": (0.5, 14.2)},
    "climber": {"easy": (2, 12.6), "hard": (1, 12.6)},
    "coinrun": {"easy": (5, 10), "hard": (5, 10)},
    "dodgeball": {"easy": (1.5, 19), "hard": (1.5, 19)},
    "fruitbot": {"easy": (-1.5, 32.4), "hard": (-0.5, 27.2)},
    "heist": {"easy": (3.5, 10), "hard": (2, 10)},
    "jumper": {"easy": (1, 10), "hard": (1, 10)},
    "leaper": {"easy": (1.5, 10), "hard": (1.5, 10)},
    "maze": {"easy": (5, 10), "hard": (4, 10)},
    "miner": {"easy": (1.5, 13), "hard": (1.5, 20)},
    "ninja": {"easy": (3.5, 10), "hard": (2, 10)},
    "plunder": {"easy": (4.5, 30), "hard": (3, 30)},
    "starpilot": {"easy": (2.5, 64), "hard": (1.5, 35)},
}
MODES = ("easy", "hard", "extreme", "memory", "exploration")
# the Procgen repository's own list has 3 for both games on easy, and some papers follow it
OTHER_MINIMA = {"jumper": 3, "leaper": 3}
OTHER_SUFFIX = " (R_min 3)"

# flags that make another algorithm of a script, with the published values: a run without an exp_name shows the others
VARIANT_FLAGS = {"arch": "dual", "e_policy": 1, "e_value": 1, "update_epochs": 3}
VARIANT_FLAGS |= {"clip_coef": 0.2, "kl_coef": 0.0, "beta_clone": 1.0, "aux_interval": 1, "num_aux_minibatches": 0}
METRICS = {"charts/mean_return_100": "train", "eval/train_return": "eval_train", "eval/test_return": "test"}
# arguments that may differ within a group: they tell its runs apart, or do not touch the result
PER_RUN_ARGS = "env_id seed run_dir resume track capture_video checkpoint_interval env_threads name hardware".split()
SETTING = ["distribution_mode", "num_levels"]

FIGURE2_STEPS = 100e6

AGGREGATE_CAPTION = (
    "Normalised scores of all runs. In brackets: 95 % percentile interval of a bootstrap over seeds, stratified by "
    "game ({reps} samples; none below three seeds). IQM: interquartile mean. P(improvement): probability that a run "
    "scores higher than one of the baseline on the same game, averaged over games. Of each game as many seeds "
    "are used as every one has."
)
PROFILE_CAPTION = "Performance profile; bands: 95 % intervals of the same bootstrap. The axis ends at the best score."
CELL_TEXT = (
    "Mean ± sample standard deviation [Student's 95 % interval of the mean] (number of seeds); "
    "of fewer than three seeds the value of each, for they tell no spread."
)


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders to search for runs: run folders, sweep folders, or any parent of them"""
    out: Path = Path("report")
    """folder to write to"""
    figure2: bool = False
    """draw Figure 2 of the PPG paper (16 games, hard) instead of a report; our runs, if any, are laid over it"""
    step: float | None = None
    """environment step of the tables (default: the median of the steps at which the runs of a setting ended, or the
    last published row before it)"""
    window: float | None = None
    """the tables average each run over the rows in (step - window, step] (default: 5 % of step, and at least what a
    published row stands for)"""
    references: tuple[str, ...] = ("ppg", "ppo")
    """published curves to show, by the names in benchmark/reference/README.md"""
    baseline: str = "ppo"
    """probabilities of improvement are over the first group whose name contains this, ours before published ones"""
    reps: int = 2000
    """bootstrap samples of each interval"""


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def load_references(algorithms: tuple[str, ...]) -> pd.DataFrame:
    """The published curves of these algorithms."""
    curves = pd.read_csv(REFERENCE)
    for algorithm in algorithms:
        if algorithm not in set(curves.algorithm):
            raise ValueError(f"no published curve of {algorithm}, only of {', '.join(curves.algorithm.unique())}")
    curves = curves[curves.algorithm.isin(algorithms)]
    title = curves.algorithm.str[:3].str.upper() + curves.algorithm.str[3:].str.replace("_", " ")
    name = title + " (" + curves.source + ")"
    curves = curves.assign(own=False, name=name, seed=curves.run, run=curves.run.astype(str))
    return curves.assign(wall_time=np.nan, aux_phase=False)


def find_run_folders(paths: tuple[Path, ...]) -> list[Path]:
    """Every folder under the paths that holds a run's files, once."""
    folders = {}
    for path in paths:
        for file in path.rglob("*"):
            if "aside" in file.relative_to(path).parts:  # where a sweep puts what it began afresh
                continue
            if file.name in ("args.json", "metrics.csv") or file.name.startswith("events.out.tfevents"):
                folders.setdefault(file.parent.resolve(), file.parent)
    # what lies inside a run folder, such as the files of another logger, is no run of its own
    return [folders[key] for key in sorted(folders) if not any(parent in folders for parent in key.parents)]


def read_csv(file: Path) -> tuple[pd.DataFrame, list[str]]:
    """A run's metrics.csv, and a remark if its last line is cut: that line could hold half a number."""
    complete, _, rest = file.read_text().rpartition("\n")
    table = pd.read_csv(io.StringIO(complete), dtype=float)
    return table, [f"the last line of {file.name} is incomplete and left out"] if rest else []


def run_name(algorithm: str, args: dict) -> str:
    """exp_name with the algorithm in it. A script's own name says nothing of its flags, so these are added."""
    name = args["exp_name"]
    if name == f"{algorithm}_procgen":
        flags = {flag: args[flag] for flag, value in VARIANT_FLAGS.items() if args.get(flag, value) != value}
        return " ".join([name, *(f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items())])
    return name if algorithm in name else f"{algorithm} {name}"


def read_metrics(folder: Path) -> tuple[dict, pd.DataFrame, list[str]]:
    """Arguments, curve, and remarks on the files, of a run of the training scripts."""
    record = json.loads((folder / "args.json").read_text())
    args, algorithm, hardware = record["args"], record["algorithm"], record.get("hardware", {})
    args["name"] = run_name(algorithm, args)
    args["hardware"] = hardware.get("gpu") or f"{hardware.get('cores')} CPU cores"
    table, remarks = read_csv(folder / "metrics.csv")
    table["aux_phase"] = table.filter(["losses/aux/kl_loss"]).notna().any(axis=1)
    point = ["global_step", "wall_time", "aux_phase"]
    table = table.rename(columns=METRICS)[[*point, *table.columns.map(METRICS).dropna()]]
    curve = table.melt(point, var_name="split", value_name="episodic_return")
    return args, curve, remarks


def is_whole(events: Path) -> bool:
    """Whether an event file can be read to its end. EventAccumulator stops without a word where it cannot."""
    reader = PyRecordReader_New(str(events))
    try:
        while True:
            reader.GetNext()
    except OutOfRangeError:
        return True
    except DataLossError:
        return False


def read_events(folder: Path) -> tuple[dict, pd.DataFrame, list[str]]:
    """The same from TensorBoard events. Other tools log a return an episode, so the last 100 are averaged here."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    tag = next((tag for tag in ("charts/mean_return_100", "charts/episodic_return") if tag in tags["scalars"]), None)
    if tag is None:
        raise ValueError("its TensorBoard events hold no charts/episodic_return")
    points = pd.DataFrame(events.Scalars(tag)).dropna()
    last = 1 if tag == "charts/mean_return_100" else 100
    curve = pd.DataFrame(
        {
            "global_step": points.step,
            "wall_time": points.wall_time - events.FirstEventTimestamp(),
            "aux_phase": False,
            "split": "train",
            "episodic_return": points.value.rolling(last, min_periods=1).mean(),
        }
    )
    args = dict(zip(("env_id", "exp_name", "seed"), folder.name.split("__"), strict=False))
    if "hyperparameters/text_summary" in tags["tensors"]:
        text = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
        args |= dict(line.strip("|").split("|", 1) for line in text.splitlines()[2:])
    damaged = [file.name for file in folder.glob("events.out.tfevents*") if not is_whole(file)]
    remarks = [f"{name} is truncated or damaged: it counts up to there" for name in damaged]
    if "distribution_mode" not in args:
        remarks.append("names no distribution mode; taken as easy with all levels, CleanRL's setting")
    args = {"distribution_mode": "easy", "num_levels": 0} | args
    args |= {"name": f"{args['exp_name']} (TensorBoard)", "hardware": "not known"}
    return args, curve, remarks


def load_runs(paths: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs (a row a run), their curves, and what there is to say about them, a line each."""
    runs, curves, notes = [], [], []
    for folder in find_run_folders(paths):
        own_format = (folder / "args.json").exists() or (folder / "metrics.csv").exists()
        try:
            args, curve, remarks = read_metrics(folder) if own_format else read_events(folder)
            finite = np.isfinite(curve[["global_step", "wall_time"]]).all(axis=1) & ~np.isinf(curve.episodic_return)
            if not finite.all():
                remarks.append(f"{(~finite).sum()} rows are not finite and left out")
            curve = curve[finite]
            if curve.empty:
                raise ValueError("no iteration has finished yet")
            if curve.episodic_return.isna().all():
                remarks.append("no episode has finished yet: losses and speed only, no return")
            if args["distribution_mode"] not in MODES:  # it becomes part of a file's name
                raise ValueError(f"{args['distribution_mode']!r} is no distribution mode")
            if args["env_id"] not in RANGES:
                raise ValueError(f"{args['env_id']} is no Procgen game")
            run = {key: args[key] for key in ("name", "env_id", "distribution_mode", "hardware")}
            run |= {"num_levels": int(args["num_levels"]), "seed": int(args["seed"]), "run": str(folder), "args": args}
            run |= {"last_step": curve.global_step.max(), "hours": curve.wall_time.max() / 3600}
        except Exception as error:  # whatever a broken or foreign file leads to
            notes.append(f"{folder}: left out: {type(error).__name__}: {error}")
            continue
        notes += [f"{folder}: {remark}" for remark in remarks]
        runs.append(run)
        keys = ("name", *SETTING, "env_id", "seed", "run")
        curve = curve.dropna(subset="episodic_return")
        curves.append(curve.assign(own=True, **{key: run[key] for key in keys}))
    if not runs:
        return pd.DataFrame(), pd.DataFrame(columns=[*CURVE, *SETTING, "global_step", "episodic_return"]), notes

    runs = pd.DataFrame(runs).sort_values(["last_step", "run"])
    again = runs.duplicated(["name", *SETTING, "env_id", "seed"], keep="last")
    notes += [
        f"{run}: left out: another run with the same name, game and seed is used, which got as far or further"
        for run in runs.run[again]
    ]
    runs, curves = runs[~again], pd.concat(curves, ignore_index=True)
    return runs, curves[curves.run.isin(runs.run)], notes + check_groups(runs)


def run_list(runs: pd.DataFrame) -> str:
    rows = runs.itertuples()
    return ", ".join(f"{run.name} {run.env_id} seed {run.seed} ({steps_text(run.last_step)})" for run in rows)


def check_groups(runs: pd.DataFrame) -> list[str]:
    """Missing seeds, runs that stop early and arguments that differ within a group."""
    notes = []
    for (name, *setting), group in runs.groupby(["name", *SETTING]):
        title = f"{name} ({setting_title(*setting)})"
        seeds = group.groupby("env_id").seed.agg(set)
        missing = {game: set(group.seed) - seeds[game] for game in seeds.index}
        if any(missing.values()):
            games = [f"{game} {', '.join(map(str, sorted(missing[game])))}" for game in missing if missing[game]]
            notes.append(f"{title}: seeds that other games have are missing: {'; '.join(games)}")
        budgets = pd.to_numeric(group.args.str.get("total_timesteps"), errors="coerce")
        short = group[group.last_step < 0.98 * budgets]
        if len(short):
            notes.append(f"{title}: stopped before their total_timesteps, or still running: {run_list(short)}")
        flags = pd.DataFrame(list(group.args)).drop(columns=PER_RUN_ARGS, errors="ignore").astype(str)
        differ = (flags.nunique() > 1) & (flags.columns != "start_level")
        differ |= (flags.groupby(group.env_id.to_numpy()).nunique() > 1).any()  # games may have levels of their own
        for flag in flags.columns[differ]:
            notes.append(f"{title}: runs differ in {flag}: {', '.join(sorted(flags[flag].unique()))}")
    return notes


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


def value_at_step(curves: pd.DataFrame, step: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (step - window, step]; curves that end before the window are left out.

    A curve with no row in the window that goes on after it counts with its last row before the step.
    """
    reached = curves.groupby(CURVE).global_step.transform("max") > step - window
    before = curves[reached & (curves.global_step <= step)]
    last = before.groupby(CURVE).global_step.transform("max")
    in_window = before.global_step > np.minimum(step - window, last - 1)
    return before[in_window].groupby(CURVE, as_index=False).episodic_return.mean()


def step_to_compare_at(end: float, published: pd.DataFrame) -> tuple[float, float]:
    """A published row is the mean over the steps since the row before. Returns the last step up to `end` at which all
    published curves that go on to `end` have a row, and over how many steps the coarsest row is a mean."""
    rows = published[published.groupby(CURVE).global_step.transform("max") >= end].query("global_step <= @end")
    steps = rows.groupby(CURVE).global_step
    return (end, 0) if rows.empty else (steps.max().min(), steps.min().max())


def value_at_time(curves: pd.DataFrame, seconds: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (seconds - window, seconds]. One that has ended before counts with its end."""
    end = curves[curves.wall_time <= seconds].groupby(CURVE).wall_time.max().rename("end")
    before = curves.join(end, on=CURVE).query("wall_time <= end and wall_time > end - @window")
    return before.groupby(CURVE, as_index=False).episodic_return.mean()


def normalised(values: pd.DataFrame, mode: str, minima: dict[str, float] | None = None) -> pd.DataFrame:
    """The values with a column `score`; minima replace R_min where they name a game."""
    low = values.env_id.map({game: (minima or {}).get(game, ranges[mode][0]) for game, ranges in RANGES.items()})
    high = values.env_id.map({game: ranges[mode][1] for game, ranges in RANGES.items()})
    return values.assign(score=(values.episodic_return - low) / (high - low))


def score_matrix(scores: pd.DataFrame, games: list[str]) -> np.ndarray:
    """Seeds x games of a group. rliable wants it full, so only as many seeds as every one of the games has."""
    scores = scores.sort_values("seed")
    columns = [scores.score[scores.env_id == game].to_numpy() for game in games]
    num_seeds = min(map(len, columns))
    return np.stack([column[:num_seeds] for column in columns], axis=1)


def mean_and_iqm(scores: np.ndarray) -> np.ndarray:
    return np.array([metrics.aggregate_mean(scores), metrics.aggregate_iqm(scores)])


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """rliable's metric without the p-values that it computes and drops, which is 100 times faster."""
    x, y = x[:, None], y[None]
    return np.mean((x > y) + 0.5 * (x == y))


def estimates(scores: dict[str, object], func, reps: int) -> dict[str, list[tuple[float, float, float]]]:
    """rliable's point estimates with 95 % stratified bootstrap intervals: for each key, (point, low, high) a metric."""
    np.random.seed(0)  # rliable draws from numpy's global generator, whatever random_state it is given
    points, intervals = library.get_interval_estimates(scores, func, reps=reps)
    return {key: list(zip(np.atleast_1d(points[key]), *intervals[key], strict=True)) for key in scores}


# ----------------------------------------------------------------------------------------------------------------------
# The report


def steps_text(step: float) -> str:
    return f"{step / 1e6:{'.3g' if step < 1e9 else ',.0f'}}M" if step >= 1e6 else f"{step:,.0f}"


def time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 3600:.3g} h" if seconds >= 7200 else f"{seconds / 60:.3g} min"


def setting_title(mode: str, num_levels: int) -> str:
    levels = f"{num_levels:,} training level{'s' if num_levels > 1 else ''}" if num_levels else "all levels"
    return f"{mode}, {levels}"


def seeds_cell(values: pd.Series, digits: int) -> str:
    """What CELL_TEXT says. scipy's t.interval would be nan where all seeds have the same value."""
    mean, number = f"{values.mean():.{digits}f}", f"({len(values)})"
    if len(values) < MIN_SEEDS:
        return f"{', '.join(f'{value:.{digits}f}' for value in values)} {number}"
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    low, high = values.mean() - half, values.mean() + half
    return f"{mean} ± {values.std():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] {number}"


def escape(text: object) -> str:
    """Text of others, such as an exp_name, as it is: no Markdown, no HTML, no second line."""
    return re.sub(r"([|<>`]|(?<=\])\()", r"\\\1", " ".join(str(text).split()))


def markdown(header: list[str], rows: list[list[object]]) -> str:
    lines = [["---"] + ["---:"] * (len(header) - 1), *(map(escape, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [map(escape, header), *lines])


def interval(estimate: tuple[float, float, float], num_seeds: int) -> str:
    point, low, high = estimate
    return f"{point:.3f} [{low:.3f}, {high:.3f}]" if num_seeds >= MIN_SEEDS else f"{point:.3f}"


def game_table(values: pd.DataFrame, column: str, digits: int) -> str:
    titles = group_titles(ordered_groups(values))
    cells = values.groupby(["env_id", *GROUP])[column].agg(seeds_cell, digits=digits)
    rows = [[game, *(cells.get((game, *group), "") for group in titles)] for game in sorted(set(values.env_id))]
    return markdown(["game", *titles.values()], rows)


def gap_table(values: pd.DataFrame) -> str:
    """Return on training and on unseen levels, and their difference in each run."""
    values = values[~(values.own & (values.split == "train"))].replace({"split": {"eval_train": "train"}})
    pairs = values.pivot(index=["own", "name", "env_id", "run"], columns="split", values="episodic_return")
    pairs = pairs.reindex(columns=["train", "test"]).dropna().assign(gap=lambda pair: pair.train - pair.test)
    rows = [
        [name, game, *(seeds_cell(group[column], 2) for column in pairs)]
        for (_, name, game), group in sorted(pairs.groupby(["own", "name", "env_id"]), key=lambda item: not item[0][0])
    ]
    return markdown(["group", "game", "training levels", "unseen levels", "gap"], rows)


def aggregate_table(matrices: dict[str, dict[Group, np.ndarray]], baseline: str, reps: int) -> str:
    """A row a group. matrices: for each convention ("" is the main one), the groups' scores, seeds x games."""
    main = matrices[""]
    rows = {group: [title, len(main[group])] for group, title in group_titles(list(main)).items()}
    for convention in matrices.values():
        for group, found in estimates(convention, mean_and_iqm, reps).items():
            rows[group] += [interval(estimate, len(main[group])) for estimate in found]
    for group, scores in main.items():
        rivals = [rival for rival in main if baseline.lower() in rival.name.lower() and rival.split == group.split]
        if not rivals or rivals[0] == group:
            rows[group].append("baseline" if rivals else "")
            continue
        rival_scores = main[rivals[0]]
        [estimate] = estimates({"": [scores, rival_scores]}, probability_of_improvement, reps)[""]
        rows[group].append(interval(estimate, min(len(scores), len(rival_scores))))
    columns = [f"{metric}{suffix}" for suffix in matrices for metric in ("mean", "IQM")]
    return markdown(["group", "seeds", *columns, "P(improvement)"], list(rows.values()))


def report_curves(args: Args, slug: str, runs: pd.DataFrame, curves: pd.DataFrame, at_step: set[str]) -> list[str]:
    """Return over steps, with the published curves, and over time. at_step: the runs of the table at equal steps."""
    own = curves[curves.own]
    limit, seconds = own.global_step.max(), own.wall_time.max()
    fig = draw_curves(curves, "global_step", limit)
    caption = curve_caption(f"{steps_text(limit / NUM_BINS)} steps", curves[curves.global_step <= limit])
    text = ["### Sample efficiency", picture(fig, args.out / f"{slug}_steps", caption)]
    if seconds > 0:
        fig = draw_curves(own, "wall_time", seconds)
        caption = curve_caption(time_text(seconds / NUM_BINS), own, "; its last value counts on")
        caption += f" On {', '.join(runs.hardware.unique())}."
        text += ["### Wall-clock time", picture(fig, args.out / f"{slug}_hours", caption)]
        whole = runs[runs.run.isin(at_step)] if at_step else runs
        seconds = 3600 * whole.groupby("name").hours.median().min()
        text += [
            f"Return after {time_text(seconds)}, the median time of the fastest group's runs. A run that ended before "
            f"counts with its last value. {CELL_TEXT}",
            game_table(value_at_time(own, seconds, 0.05 * seconds), "episodic_return", 2),
        ]
    return text


def report_scores(args: Args, slug: str, mode: str, values: pd.DataFrame) -> list[str]:
    """Normalised scores: a table by game; aggregates and performance profiles for each set of games."""
    scores = {"": normalised(values, mode)}
    by_game = scores[""]
    if mode == "easy" and values.env_id.isin(OTHER_MINIMA).any():
        scores[OTHER_SUFFIX] = other = normalised(values, mode, OTHER_MINIMA)
        other = other[other.env_id.isin(OTHER_MINIMA)]
        by_game = pd.concat([by_game, other.assign(env_id=other.env_id + OTHER_SUFFIX)])
    text = ["### Normalised scores", game_table(by_game, "score", 3), AGGREGATE_CAPTION.format(reps=args.reps)]

    groups = {suffix: {Group(*key): rows for key, rows in table.groupby(GROUP)} for suffix, table in scores.items()}
    games_of = {group: frozenset(groups[""][group].env_id) for group in ordered_groups(values)}
    # groups compare over the same games only: a table for each set of games that one of our groups covers
    game_sets = {games for group, games in games_of.items() if group.own}
    for number, games in enumerate(sorted(game_sets, key=lambda games: (-len(games), sorted(games))), start=1):
        matrices = {
            suffix: {group: score_matrix(rows[group], sorted(games)) for group in games_of if games <= games_of[group]}
            for suffix, rows in groups.items()
        }
        fig = draw_profiles(matrices[""], args.reps)
        text += [
            f"### Over {', '.join(sorted(games)) if len(games) < len(RANGES) else 'all 16 games'}",
            aggregate_table(matrices, args.baseline, args.reps),
            picture(fig, args.out / f"{slug}_profile_{number}", PROFILE_CAPTION),
        ]
    return text


def report_setting(args: Args, runs: pd.DataFrame, curves: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Paragraphs and notes on one distribution mode and number of levels."""
    mode, num_levels = runs[SETTING].iloc[0]
    title = setting_title(mode, num_levels)
    slug = f"{mode}_{num_levels}_levels" if num_levels else mode
    step, row = step_to_compare_at(runs.last_step.quantile(0.5, interpolation="lower"), curves[~curves.own])
    step = args.step or step
    window = args.window or min(max(row, 0.05 * step), step)
    values = value_at_step(curves, step, window)
    # with all levels in training, an evaluation only repeats what the training episodes say
    splits = ["train", "test"] if num_levels else ["train"]
    shown = values[values.split.isin(splits)]
    text = [
        f"## {title}",
        f"### Return at {steps_text(step)} steps",
        "Mean return of the last 100 episodes, averaged in each run over the steps from "
        f"{steps_text(step - window)} to {steps_text(step)}; a curve without a row there counts with the last before. "
        f"{CELL_TEXT}",
        game_table(shown, "episodic_return", 2),
    ]
    if "test" in set(shown.split):
        text.append("Test levels of our runs: mean return of an evaluation's episodes, one in each environment.")
    if num_levels and "test" in set(values.split):
        text += [
            "### Training levels against unseen levels",
            "Ours from evaluations on both; published: training episodes on training levels.",
            gap_table(values),
        ]
    text += report_curves(args, slug, runs, curves[curves.split.isin(splits)], set(runs.run) & set(values.run))
    short, longest, notes = runs[~runs.run.isin(values.run)], runs.last_step.max(), []
    if longest > 1.5 * step and not args.step:
        notes.append(
            f"{title}: some runs go on to {steps_text(longest)}, but the tables are at {steps_text(step)}: --step"
        )
    if len(short):
        notes.append(f"{title}: not in the tables, as they ended before {steps_text(step)} steps: {run_list(short)}")
    if 0 < num_levels < 100:
        notes.append(f"{title}: no normalised scores, because the published ranges are over many levels")
    elif mode in ("easy", "hard"):
        text += report_scores(args, slug, mode, shown)
    else:
        notes.append(f"{title}: no normalised scores, because nobody has published ranges")
    return text, notes


def report_smoke_runs(args: Args, runs: pd.DataFrame) -> list[str]:
    """Losses and speed of the runs that have no return yet."""
    colour_of, names, lines = colours(runs.name), [], []
    for run in runs.itertuples():
        names.append(f"{run.name} {run.env_id} seed {run.seed}")
        table = read_csv(Path(run.run) / "metrics.csv")[0].set_index("global_step")
        table = table.filter(regex="^losses/|^charts/SPS$").dropna(axis=1, how="all")
        table = table.rename(columns=lambda name: name.removeprefix("losses/"))
        lines.append((names[-1], table, {"color": colour_of[run.name], "linewidth": 1.1, "marker": "o"}))
    columns = list(dict.fromkeys(column for _, table, _ in lines for column in table))
    return [
        "## Runs without a return",
        "No episode of these runs has finished yet: " + escape(", ".join(names)) + ".",
        picture(draw_measurements(lines, columns, "Environment steps"), args.out / "smoke", "Losses and steps/s."),
    ]


def report(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, references: pd.DataFrame, notes: list[str]) -> Path:
    """Write report.md and its pictures; returns the page and adds to the notes."""
    header = ["name", "levels", "games", "seeds", "runs", "last step", "time a run", "steps/s", "hardware"]
    rows = []
    for (name, *setting), group in runs.groupby(["name", *SETTING]):
        counts = [group.env_id.nunique(), group.seed.nunique(), len(group)]
        steps = f"{steps_text(group.last_step.min())} to {steps_text(group.last_step.max())}"
        speed = f"{(group.last_step / group.hours).median() / 3600:,.0f}"
        hardware = ", ".join(group.hardware.unique())
        hours = group.hours.median()
        rows.append([name, setting_title(*setting), *counts, steps, time_text(3600 * hours), speed, hardware])
    text = ["# Training runs", markdown(header, rows), "Time and steps/s: medians over the runs."]
    has_return = runs.run.isin(curves.run)
    for (mode, num_levels), setting_runs in runs[has_return].groupby(SETTING):
        own = curves[curves.run.isin(setting_runs.run)]
        published = references[(references.distribution_mode == mode) & (references.num_levels == num_levels)]
        both = pd.concat([own, published[published.env_id.isin(own.env_id)]])
        try:
            setting_text, setting_notes = report_setting(args, setting_runs, both)
        except Exception as error:  # one odd run must not cost the page
            setting_text, setting_notes = [], [f"{setting_title(mode, num_levels)}: not drawn: {error!r}"]
        text += setting_text
        notes += setting_notes
        if mode == "easy" and len(published):
            notes.append(f"{setting_title(mode, num_levels)}: no published curve of PPG, only of PPO")
    if not has_return.all():
        text += report_smoke_runs(args, runs[~has_return])
    names = {*runs.name, *references.name}
    if not any(args.baseline.lower() in name.lower() for name in names):
        notes.append(f"no probabilities of improvement: no group is named {args.baseline!r}")
    notes = [escape(note) for note in notes] or ["All runs are whole, and no seed is missing."]
    text += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    page = args.out / "report.md"
    page.write_text("\n\n".join(text) + "\n")
    return page


def figure2(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, references: pd.DataFrame, notes: list[str]) -> Path:
    """The paper's Figure 2 from its own curves, with our runs on all hard levels over them; returns the picture and
    adds to the notes."""
    paper = references[references.source == "openai/phasic-policy-gradient"]
    own = curves[(curves.distribution_mode == "hard") & (curves.num_levels == 0) & (curves.split == "train")]
    both = pd.concat([own, paper]) if len(own) else paper
    if len(runs) > own.run.nunique():
        notes.append(f"not drawn, as Figure 2 is about all hard levels: {len(runs) - own.run.nunique()} runs")
    caption = curve_caption(f"{steps_text(FIGURE2_STEPS / NUM_BINS)} steps", both)
    notes.append(caption)
    picture(draw_curves(both, "global_step", FIGURE2_STEPS), args.out / "figure2", caption)
    return args.out / "figure2.png"


def fail(line: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
    sys.exit(2)


def check_folders(paths: tuple[Path, ...], out: Path) -> None:
    for path in paths:
        if not path.is_dir():
            fail(f"no such folder: {path}")
    if out.exists() and not out.is_dir():
        fail(f"--out is a folder, and {out} is a file")


def main(args: Args) -> None:
    if not (args.paths or args.figure2):
        fail("name at least one folder with runs, or --figure2")
    if args.figure2 and not args.references:
        fail("--figure2 needs the name of at least one published curve in --references")
    for name in ("step", "window", "reps"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            fail(f"--{name} must be positive, not {value:g}")
    check_folders(args.paths, args.out)
    try:
        references = load_references(args.references)
    except ValueError as error:
        fail(str(error))
    runs, curves, notes = load_runs(args.paths)
    if runs.empty and args.paths and args.figure2:
        notes.append(f"no run of ours under {', '.join(map(str, args.paths))}")
    if runs.empty and not args.figure2:
        fail("\n".join([f"no run to report on under {', '.join(map(str, args.paths))}", *notes]))

    args.out.mkdir(parents=True, exist_ok=True)
    write = figure2 if args.figure2 else report
    page = write(args, runs, curves, references, notes)
    print(*notes, f"wrote {page}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
