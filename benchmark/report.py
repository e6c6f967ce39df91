"""Tables and pictures from training runs, beside published Procgen curves.

    python benchmark/report.py runs --out report             # report/report.md with its pictures
    python benchmark/report.py --figure2 --out report        # the paper's Figure 2 from the published curves alone
    python benchmark/report.py --figure2 runs --out report   # the same with our own runs laid over it

A run is a folder with args.json and metrics.csv, or with TensorBoard events only, as CleanRL writes them. A folder may
also hold a table of many runs: metrics.csv.gz with a column "run", and args.json with an entry for each run. Runs are
grouped by exp_name, the flags that change their numbers, distribution mode and number of levels.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro

os.environ["MPLBACKEND"] = "Agg"  # rliable imports matplotlib, which may not know the backend of a notebook
from rliable import library, metrics
from scipy import stats
from tbparse import SummaryReader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder, with nothing installed
import ppg_procgen  # noqa: E402
from benchmark import require  # noqa: E402
from benchmark.pictures import CURVE, MIN_SEEDS, UNSEEN, draw_curves, draw_n_pi, draw_profiles, in_order, picture  # noqa: E402
from benchmark.ranges import RANGES  # noqa: E402

# Everything works on one long table, `curves`, one row a point: own (ours or published), group, distribution_mode,
# num_levels, env_id, seed, run, global_step, wall_time, aux_phase, episodic_return. A group's returns on unseen levels
# are a group of their own, whose name ends in UNSEEN.

REFERENCE = Path(__file__).parent / "reference" / "procgen_curves.csv.gz"
SETTING = ["distribution_mode", "num_levels"]
RETURNS = {"charts/mean_return_100": "", "eval/test_return": UNSEEN}  # columns of metrics.csv
# Flags that make no other group: they tell its runs apart, follow from other flags, or may change within a run. Among
# the last is aux_dtype, which "auto" takes from the hardware: compare precisions by --exp-name.
SAME_GROUP = {"env_id", "seed", "exp_name", "run_dir", "resume", "checkpoint_interval", "device", *SETTING}
SAME_GROUP |= {"batch_size", "num_iterations", "num_phases", "max_chunk", "num_env_threads", *ppg_procgen.MAY_CHANGE}

CURVE_CAPTION = "Mean return of the last 100 episodes: mean over seeds ± one standard deviation."
STEP_TEXT = (
    "Mean return of the last 100 episodes, averaged in each run over the steps from {start:,.0f} to {step:,.0f}, or "
    "its last row before (`--step` chooses another step). Mean ± standard deviation [Student's 95 % interval of the "
    "mean] (number of seeds); with fewer than three seeds, the value of each."
)
SCORE_TEXT = (
    "score = (return - R_min) / (R_max - R_min), with the ranges of the Procgen paper: 0 for an agent that cannot see "
    "the game, 1 for about the best possible one. IQM: interquartile mean of the scores. P(improvement): probability "
    "that a run has a higher score than a run of the baseline on the same game. In brackets: 95 % interval of a "
    "bootstrap over seeds, stratified by game."
)
PROFILE_CAPTION = "Performance profile: the fraction of runs with a score above each value, with 95 % intervals."


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders, sweep folders, or any parent of them
    out: Path = Path("report")  # folder to write to
    figure2: bool = False  # draw Figure 2 of the PPG paper (16 games, hard), with our runs, if any, laid over it
    n_pi: bool = False  # draw the published scores for each N_pi (mean over 16 games, hard)
    step: float | None = None  # step of the tables; default: where the median run ended, or the published row before it
    references: tuple[str, ...] = ("ppg", "ppo")  # published curves, by the names in benchmark/reference/README.md
    baseline: str = "ppo"  # P(improvement) is over the first group whose name contains this, ours before published
    reps: int = 2000  # bootstrap samples of each interval


def load_references(algorithms: tuple[str, ...]) -> pd.DataFrame:
    """The published curves of these algorithms."""
    curves = pd.read_csv(REFERENCE)
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
    """Name, arguments and metrics of each run in a folder."""
    if not (folder / "args.json").exists():
        return [read_events(folder)]
    record = json.loads((folder / "args.json").read_text())
    files = [folder / name for name in ("metrics.csv", "metrics.csv.gz") if (folder / name).exists()]
    if not files:
        raise ValueError("no metrics.csv yet: its first checkpoint is still to come")
    rows = pd.read_csv(files[0])
    if "run" in rows:
        return [(f"{folder}/{run}", record[run]["args"], table) for run, table in rows.groupby("run")]
    return [(str(folder), record["args"], rows)]


def read_events(folder: Path) -> tuple[str, dict, pd.DataFrame]:
    """The same from TensorBoard events of CleanRL, which logs a return an episode and plays all easy levels."""
    env_id, exp_name, seed, *_ = folder.name.split("__")
    args = {"env_id": env_id, "exp_name": f"{exp_name} (TensorBoard)", "seed": int(seed)}
    args.update(distribution_mode="easy", num_levels=0)
    events = SummaryReader(str(folder), extra_columns={"wall_time"}).scalars
    rows = events[events.tag == "charts/episodic_return"].rename(columns={"step": "global_step"})
    rows["charts/mean_return_100"] = rows.value.rolling(100, min_periods=1).mean()
    rows["wall_time"] -= events.wall_time.min()
    return str(folder), args, rows


def result_flags(args: dict) -> dict[str, str]:
    """The flags that change a run's numbers. The budget does so only by annealing."""
    same = SAME_GROUP if args.get("anneal_lr") else SAME_GROUP | {"total_timesteps"}
    return {flag: str(value) for flag, value in args.items() if flag not in same}


def group_names(runs: pd.DataFrame) -> pd.Series:
    """exp_name, and the flags that differ between the runs of this name and setting, where they are not PPG's defaults.
    A flag that a run lacks, because its script was of another version, is no difference."""
    names = runs.group.copy()
    flags = pd.DataFrame([result_flags(args) for args in runs.args], index=runs.index)
    for flag, values in flags.items():
        games = ["env_id"] if flag == "start_level" else []  # games may have their own levels
        differs = values.groupby([runs[column] for column in ["group", *SETTING, *games]]).transform("nunique") > 1
        default = str(getattr(ppg_procgen.Args, flag, None))
        shown = differs & values.notna() & (values != default)
        names[shown] += f" --{flag.replace('_', '-')} " + values[shown]
    return names


def load_runs(paths: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs (one row a run), their curves, and notes on what is missing or odd."""
    runs, curves, notes = [], [], []
    for folder in find_run_folders(paths):
        try:
            for path, args, rows in read_runs(folder):
                run = {key: args[key] for key in ("env_id", "seed", *SETTING)}
                run.update(own=True, group=args["exp_name"], run=path)
                rows["aux_phase"] = rows.filter(["losses/aux/kl_loss"]).notna().any(axis=1)
                for column in RETURNS:  # all rows are dropped where no episode has ended
                    curve = rows[["global_step", "wall_time", "aux_phase"]].assign(episodic_return=rows.get(column))
                    curves.append(curve.dropna().assign(**run | {"group": RETURNS[column]}))
                runs.append(run | {"last_step": rows.global_step.max(), "seconds": rows.wall_time.max(), "args": args})
        except Exception as error:  # a broken or foreign folder must not cost the page of a whole sweep
            notes.append(f"{folder}: left out: {error!r}")
    if not runs:
        return pd.DataFrame(), pd.DataFrame(columns=[*CURVE, *SETTING]), notes
    runs = pd.DataFrame(runs).sort_values(["last_step", "run"])
    runs["group"] = group_names(runs)
    curves = pd.concat([curve for curve in curves if len(curve)] or curves, ignore_index=True)
    curves["group"] = curves.run.map(runs.set_index("run").group) + curves.group
    again = runs.duplicated(["group", *SETTING, "env_id", "seed"], keep="last")
    notes += [f"{run}: left out: a run of its group, game and seed is as long or longer" for run in runs.run[again]]
    runs = runs[~again]
    notes += run_notes("no episode has finished yet", runs[~runs.run.isin(curves.run)])
    is_short = runs.last_step < 0.98 * pd.to_numeric(runs.args.str.get("total_timesteps"))
    notes += run_notes("stopped before their total_timesteps, or still running", runs[is_short])
    return runs, curves[curves.run.isin(runs.run)], notes


def value_at_step(curves: pd.DataFrame, step: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (step - window, step], or its last row before `step` if it has none there and
    goes on afterwards. Curves that end before the window are left out."""
    reached = curves.groupby(CURVE).global_step.transform("max") > step - window
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
    low, high = (values.env_id.map(lambda game, k=k: RANGES[game][mode][k]) for k in (0, 1))
    return values.assign(score=(values.episodic_return - low) / (high - low))


def published_scores() -> pd.DataFrame:
    """Mean score over the 16 hard games of each run of PPG's authors, in blocks of 16 iterations (of 65,536 steps)."""
    curves = pd.read_csv(REFERENCE)
    curves = normalized(curves[curves.source == "openai/phasic-policy-gradient"], "hard")
    curves["iterations"] = 16 * np.ceil(curves.global_step / 2**20).astype(int)  # a block has one or two rows
    curves["setting"] = curves.algorithm.replace(["ppg", "ppg_e_aux_6", "ppg_e_pi_1"], "ppg_n_pi_32")  # the default
    return curves.groupby(["setting", "iterations", "algorithm", "run"], as_index=False).score.mean()


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


def setting_title(mode: str, num_levels: int) -> str:
    return f"{mode}, {num_levels or 'all'} level{'' if num_levels == 1 else 's'}"


def run_notes(text: str, runs: pd.DataFrame) -> list[str]:
    names = [f"{x.group} {x.env_id} seed {x.seed} (at {x.last_step:,})" for x in runs.itertuples()]
    return [f"{text}: {', '.join(names)}"] if names else []


def run_table(runs: pd.DataFrame) -> str:
    runs = runs.assign(minutes=runs.seconds / 60, speed=runs.last_step / runs.seconds)
    groups = runs.groupby(["group", *SETTING])
    counts = groups.agg(games=("env_id", "nunique"), seeds=("seed", "nunique"), runs=("run", "count"))
    medians = groups[["last_step", "minutes", "speed"]].median().round(2).astype({"last_step": int})
    return counts.join(medians).reset_index().to_markdown(index=False, disable_numparse=True)


def seeds_cell(values: pd.Series, digits: int) -> str:
    texts = [f"{value:.{digits}f}" for value in values]
    if len(values) >= MIN_SEEDS:
        half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        numbers = [values.mean(), values.std(), values.mean() - half, values.mean() + half]
        texts = ["{:.{d}f} ± {:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*numbers, d=digits)]
    return f"{', '.join(texts)} ({len(values)})"


def game_table(values: pd.DataFrame, column: str, digits: int) -> str:
    cells = values.groupby(["env_id", "group"])[column].agg(seeds_cell, digits=digits).unstack(fill_value="")
    return cells[in_order(values)].rename_axis("game").reset_index().to_markdown(index=False, disable_numparse=True)


def aggregate_table(scores: dict[str, np.ndarray], baseline: str, reps: int) -> str:
    """One row a group. scores: seeds x games of each group."""
    rows = []
    for group, matrix in scores.items():
        same_levels = [other for other in scores if other.endswith(UNSEEN) == group.endswith(UNSEEN)]
        rival = next((other for other in same_levels if baseline.lower() in other.lower()), group)
        improvement = "-" if rival == group else estimate([matrix, scores[rival]], probability_of_improvement, reps)
        averages = [estimate([matrix], metric, reps) for metric in (metrics.aggregate_mean, metrics.aggregate_iqm)]
        rows.append([group, len(matrix), *averages, improvement])
    table = pd.DataFrame(rows, columns=["group", "seeds", "mean", "IQM", "P(improvement)"])
    return table.to_markdown(index=False, disable_numparse=True)


def report_scores(args: Args, path: Path, mode: str, values: pd.DataFrame) -> list[str]:
    """Normalized scores: a table by game; aggregates and performance profiles for each set of games."""
    values = normalized(values, mode)
    text = ["### Normalized scores", SCORE_TEXT, game_table(values, "score", 3)]
    games_of = {group: set(values.env_id[values.group == group]) for group in in_order(values)}
    # groups can be compared on the same games only: a table for each set of games that one of our groups has
    game_sets = {tuple(sorted(games_of[group])) for group in set(values.group[values.own])}
    for number, games in enumerate(sorted(game_sets, key=lambda games: (-len(games), games)), start=1):
        groups = [group for group in games_of if set(games) <= games_of[group]]
        scores = {group: score_matrix(values[values.group == group], list(games)) for group in groups}
        text.append(f"### Over {', '.join(games) if len(games) < len(RANGES) else 'all 16 games'}")
        text.append(aggregate_table(scores, args.baseline, args.reps))
        all_scores = np.concatenate([matrix.ravel() for matrix in scores.values()])
        if np.ptp(all_scores) >= 0.05:  # a profile over a smaller range shows noise
            fig = draw_profiles(scores, args.reps)
            text.append(picture(fig, Path(f"{path}_profile_{number}"), PROFILE_CAPTION))
    return text


def report_setting(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, notes: list[str]) -> list[str]:
    """The page on one distribution mode and number of levels; adds to the notes."""
    mode, num_levels = runs[SETTING].iloc[0]
    title = setting_title(mode, num_levels)
    name = f"{mode}_{num_levels}_levels" if num_levels else mode  # from args.json, which may be foreign: never a path
    path = args.out / name.replace("/", "_")
    if not num_levels:  # all levels are in training: an evaluation repeats what the training episodes say
        curves = curves[~curves.group.str.endswith(UNSEEN)]
    own, published = curves[curves.own], curves[~curves.own]
    step, row = step_to_compare_at(runs.last_step.quantile(0.5, interpolation="lower"), published)
    step = args.step or step
    window = min(max(row, 0.05 * step), step)
    values = value_at_step(curves, step, window)
    text = [f"## {title}", f"### Return at {step:,.0f} steps"]
    text.append(STEP_TEXT.format(start=step - window, step=step))
    text.append(game_table(values, "episodic_return", 2))
    fig = draw_curves(curves, "global_step", own.global_step.max(), "Environment steps")
    text += ["### Return over steps", picture(fig, Path(f"{path}_steps"), CURVE_CAPTION)]
    unit, seconds = ("hours", 3600) if own.wall_time.max() > 2 * 3600 else ("minutes", 60)
    own = own.assign(wall_time=own.wall_time / seconds)
    fig = draw_curves(own, "wall_time", own.wall_time.max(), f"Time ({unit})")
    text += ["### Return over time", picture(fig, Path(f"{path}_time"), CURVE_CAPTION)]
    # the published ranges are over many levels of Procgen
    if (num_levels == 0 or num_levels >= 100) and all(mode in RANGES.get(game, ()) for game in values.env_id):
        text += report_scores(args, path, mode, values)

    notes += run_notes(f"{title}: no value at {step:,.0f} steps", runs[~runs.run.isin(values.run)])
    for group, first in published.groupby("group").global_step.min().items():
        if first > step:
            notes.append(f"{title}: the published curves begin later, at {first:,.0f} steps: {group}")
    return text


def main(args: Args) -> None:
    references = load_references(args.references)
    unknown = set(args.references) - set(references.algorithm)
    require(not unknown, f"no published curves of {', '.join(unknown)}; see benchmark/reference/README.md")
    absent = [str(path) for path in args.paths if not path.exists()]
    require(not absent, f"no such file or folder: {', '.join(absent)}")
    runs, curves, notes = load_runs(args.paths)
    no_runs = f"no runs under {', '.join(map(str, args.paths))}"
    require(len(runs) > 0 or args.figure2 or args.n_pi, "\n".join([no_runs, *notes]))
    args.out.mkdir(parents=True, exist_ok=True)
    if args.n_pi:
        picture(draw_n_pi(published_scores()), args.out / "n_pi", "")
    elif args.figure2:
        own = curves[(curves[SETTING] == ("hard", 0)).all(axis=1)]
        paper = references[references.source == "openai/phasic-policy-gradient"]
        fig = draw_curves(pd.concat([own, paper]) if len(own) else paper, "global_step", 100e6, "Environment steps")
        picture(fig, args.out / "figure2", "")
    else:
        text = ["# Training runs", run_table(runs), "Last step, minutes and speed (steps/s): medians over the runs."]
        for setting, own in curves.groupby(SETTING):
            setting_runs = runs[(runs[SETTING] == setting).all(axis=1)]
            published = references[(references[SETTING] == setting).all(axis=1) & references.env_id.isin(own.env_id)]
            text += report_setting(args, setting_runs, pd.concat([own, published]), notes)
        text += ["## Notes", *(f"- {note}" for note in notes)]
        (args.out / "report.md").write_text("\n\n".join(text) + "\n")
    print(*notes, f"wrote {args.out}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
