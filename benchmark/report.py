"""Tables and pictures from training runs, beside published Procgen curves.

    python benchmark/report.py runs --out report             # report/report.md with its pictures
    python benchmark/report.py --figure2 --out report        # the paper's Figure 2 from the published curves alone
    python benchmark/report.py --figure2 runs --out report   # the same with our own runs laid over it

A run is a folder with args.json and metrics.csv, or with TensorBoard events only, as CleanRL writes them. A folder may
also hold a table of many runs: metrics.csv.gz with a column "run", and args.json with an entry for each run. Runs are
grouped by name (exp_name, or the script and its important flags), distribution mode and number of levels.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from rliable import library, metrics
from scipy import stats
from tbparse import SummaryReader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder, with nothing installed
from benchmark.pictures import CURVE, MIN_SEEDS, UNSEEN, draw_curves, draw_profiles, in_order, picture  # noqa: E402
from benchmark.ranges import RANGES  # noqa: E402

# Everything works on one long table, `curves`, one row a point: own (ours or published), group, distribution_mode,
# num_levels, env_id, seed, run, global_step, wall_time, aux_phase, episodic_return. A group's returns on unseen levels
# are a group of their own, whose name ends in UNSEEN.

REFERENCE = Path(__file__).parent / "reference" / "procgen_curves.csv.gz"
SETTING = ["distribution_mode", "num_levels"]
RETURNS = {"charts/mean_return_100": "", "eval/test_return": UNSEEN}  # columns of metrics.csv
# flags that make another algorithm of a script, with the published values
VARIANT_FLAGS = {"arch": "dual", "e_policy": 1, "e_value": 1, "update_epochs": 3, "clip_coef": 0.2}
VARIANT_FLAGS |= {"kl_coef": 0.0, "beta_clone": 1.0, "aux_interval": 1, "num_aux_minibatches": 0}
# flags that may differ within a group: they tell its runs apart, or do not change the result
PER_RUN_FLAGS = ["env_id", "seed", "run_dir", "resume", "track", "checkpoint_interval", "env_threads"]
MIN_SCORE_RANGE = 0.05  # a profile over a smaller range shows noise

CURVE_CAPTION = "Mean return of the last 100 episodes: mean over seeds ± one standard deviation."
STEP_TEXT = (
    "Mean return of the last 100 episodes, averaged in each run over the steps from {start} to {step}. If a run has no "
    "row there, its last row before counts. Mean ± standard deviation [Student's 95 % interval of the mean] (number of "
    "seeds). With fewer than three seeds: the value of each."
)
SCORE_TEXT = (
    "score = (return - R_min) / (R_max - R_min), with the ranges of the Procgen paper. IQM: interquartile mean. "
    "P(improvement): probability that a run scores higher than a run of the baseline on the same game. In brackets: "
    "95 % interval of a bootstrap over seeds, stratified by game."
)


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders, sweep folders, or any parent of them
    out: Path = Path("report")  # folder to write to
    figure2: bool = False  # draw Figure 2 of the PPG paper (16 games, hard), with our runs, if any, laid over it
    # environment step of the tables; default: where the median run ended, or the last published row before it
    step: float | None = None
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
    files = [file for path in paths for name in ("args.json", "events.out.tfevents*") for file in path.rglob(name)]
    folders = {file.parent.resolve(): file.parent for file in files}
    # inside a run folder are files of other loggers, not runs
    return [folders[key] for key in sorted(folders) if not any(parent in folders for parent in key.parents)]


def read_runs(folder: Path) -> list[tuple[str, dict, pd.DataFrame]]:
    """Name, arguments and metrics of each run in a folder."""
    if not (folder / "args.json").exists():
        return [read_events(folder)]
    record = json.loads((folder / "args.json").read_text())
    [file] = folder.glob("metrics.csv*")
    rows = pd.read_csv(file)
    if "run" in rows:
        return [(f"{folder}/{run}", record[run]["args"], table) for run, table in rows.groupby("run")]
    return [(str(folder), record["args"], rows)]


def read_events(folder: Path) -> tuple[str, dict, pd.DataFrame]:
    """The same from TensorBoard events of another script, which logs a return an episode."""
    events = SummaryReader(str(folder), extra_columns={"wall_time"})
    rows = events.scalars.query("tag == 'charts/episodic_return'").rename(columns={"step": "global_step"})
    rows["charts/mean_return_100"] = rows.value.rolling(100, min_periods=1).mean()
    rows["wall_time"] -= events.scalars.wall_time.min()
    args = {"distribution_mode": "easy", "num_levels": 0}  # CleanRL's setting
    args |= dict(zip(("env_id", "exp_name", "seed"), folder.name.split("__"), strict=False))
    for text in events.text.get("value", []):
        args |= dict(line.strip("|").split("|", 1) for line in text.splitlines()[2:])
    args |= {key: int(args[key]) for key in ("seed", "num_levels")}
    return str(folder), args | {"exp_name": f"{args['exp_name']} (TensorBoard)"}, rows


def group_name(args: dict) -> str:
    """exp_name. The scripts' own names say nothing of their flags, so those that matter are added."""
    name = args["exp_name"]
    if name not in ("ppg_procgen", "ppo_procgen"):
        return name
    flags = {flag: args[flag] for flag, value in VARIANT_FLAGS.items() if args.get(flag, value) != value}
    return " ".join([name, *(f"--{flag.replace('_', '-')} {value}" for flag, value in flags.items())])


def load_runs(paths: tuple[Path, ...]) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The runs (one row a run), their curves, and notes on what is missing or odd."""
    runs, curves, notes = [], [pd.DataFrame(columns=[*CURVE, *SETTING])], []
    for folder in find_run_folders(paths):
        try:
            for path, args, rows in read_runs(folder):
                run = {key: args[key] for key in ("env_id", "seed", *SETTING)}
                run |= {"own": True, "group": group_name(args), "run": path}
                rows["aux_phase"] = rows.filter(["losses/aux/kl_loss"]).notna().any(axis=1)
                for column in set(RETURNS) & set(rows):
                    curve = rows[["global_step", "wall_time", "aux_phase"]].assign(episodic_return=rows[column])
                    curves.append(curve.dropna().assign(**run | {"group": run["group"] + RETURNS[column]}))
                runs.append(run | {"last_step": rows.global_step.max(), "seconds": rows.wall_time.max(), "args": args})
        except Exception as error:  # a broken or foreign folder must not cost the page of a whole sweep
            notes.append(f"{folder}: left out: {error!r}")
    if not runs:
        return pd.DataFrame(), curves[0], notes
    runs = pd.DataFrame(runs).sort_values(["last_step", "run"])
    again = runs.duplicated(["group", *SETTING, "env_id", "seed"], keep="last")
    notes += [f"{run}: left out: another run with the same name, game and seed is longer" for run in runs.run[again]]
    runs, curves = runs[~again], pd.concat([curve for curve in curves if len(curve)] or curves, ignore_index=True)
    return runs, curves[curves.run.isin(runs.run)], notes + check_groups(runs)


def check_groups(runs: pd.DataFrame) -> list[str]:
    """Runs that stopped early, and flags that differ within a group."""
    notes = []
    for (group, *setting), rows in runs.groupby(["group", *SETTING]):
        title = f"{group} ({setting_title(*setting)})"
        short = rows[rows.last_step < 0.98 * pd.to_numeric(rows.args.str.get("total_timesteps"))]
        if len(short):
            notes.append(f"{title}: stopped before their total_timesteps, or still running: {run_list(short)}")
        flags = pd.DataFrame(list(rows.args)).drop(columns=PER_RUN_FLAGS, errors="ignore").astype(str)
        for flag, values in flags.items():
            by_game = values.groupby(rows.env_id.to_numpy()).nunique()
            differ = by_game.max() if flag == "start_level" else values.nunique()  # games may have their own levels
            if differ > 1:
                notes.append(f"{title}: runs differ in {flag}: {', '.join(sorted(values.unique()))}")
    return notes


def value_at_step(curves: pd.DataFrame, step: float, window: float) -> pd.DataFrame:
    """Each curve's mean over its rows in (step - window, step]; curves that end before the window are left out.

    A curve that has no row in the window but goes on after it counts with its last row before the step.
    """
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


def score_matrix(scores: pd.DataFrame, games: list[str]) -> np.ndarray:
    """Seeds x games of a group. rliable needs it full: as many seeds as each of the games has."""
    row = scores.groupby("env_id").seed.rank()
    return scores.assign(row=row).pivot(index="row", columns="env_id", values="score")[games].dropna().to_numpy()


def mean_and_iqm(scores: np.ndarray) -> np.ndarray:
    return np.array([metrics.aggregate_mean(scores), metrics.aggregate_iqm(scores)])


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """rliable's metric without its p-values: 100 times faster."""
    x, y = x[:, None], y[None]
    return np.mean((x > y) + 0.5 * (x == y))


def estimates(scores: dict[str, list[np.ndarray]], func, reps: int) -> dict[str, list[str]]:
    """rliable's point estimates with 95 % stratified bootstrap intervals: for each key, one text a metric."""
    np.random.seed(0)  # rliable draws from numpy's global generator
    points, intervals = library.get_interval_estimates(scores, func, reps=reps)
    texts = {}
    for key, matrices in scores.items():
        bounds = zip(np.atleast_1d(points[key]), *intervals[key], strict=True)
        texts[key] = [f"{point:.3f} [{low:.3f}, {high:.3f}]" for point, low, high in bounds]
        if min(len(matrix) for matrix in matrices) < MIN_SEEDS:
            texts[key] = [text.split()[0] for text in texts[key]]
    return texts


def steps_text(step: float) -> str:
    return f"{step / 1e6:.3g}M" if step >= 1e6 else f"{step:,.0f}"


def setting_title(mode: str, num_levels: int) -> str:
    return f"{mode}, {num_levels or 'all'} level{'' if num_levels == 1 else 's'}"


def run_list(runs: pd.DataFrame) -> str:
    rows = runs.itertuples()
    return ", ".join(f"{run.group} {run.env_id} seed {run.seed} ({steps_text(run.last_step)})" for run in rows)


def markdown(table: pd.DataFrame) -> str:
    align = ["left"] + ["right"] * (len(table.columns) - 1)
    return table.to_markdown(index=False, disable_numparse=True, colalign=align)


def run_table(runs: pd.DataFrame) -> str:
    runs = runs.assign(games=runs.env_id, runs=runs.run, minutes=runs.seconds / 60, speed=runs.last_step / runs.seconds)
    count = {"games": "nunique", "seed": "nunique", "runs": "count"}
    median = {"last_step": "median", "minutes": "median", "speed": "median"}
    table = runs.groupby(["group", *SETTING], as_index=False).agg(count | median)
    return markdown(table.round({"minutes": 2, "speed": 0}).astype({"last_step": int, "speed": int}))


def seeds_cell(values: pd.Series, digits: int) -> str:
    texts = [f"{value:.{digits}f}" for value in values]
    if len(values) >= MIN_SEEDS:
        half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
        numbers = [values.mean(), values.std(), values.mean() - half, values.mean() + half]
        texts = ["{} ± {} [{}, {}]".format(*(f"{number:.{digits}f}" for number in numbers))]
    return f"{', '.join(texts)} ({len(values)})"


def game_table(values: pd.DataFrame, column: str, digits: int) -> str:
    cells = values.groupby(["env_id", "group"])[column].agg(seeds_cell, digits=digits).unstack(fill_value="")
    return markdown(cells[in_order(values)].rename_axis("game").reset_index())


def aggregate_table(scores: dict[str, np.ndarray], baseline: str, reps: int) -> str:
    """One row a group. scores: seeds x games of each group."""
    aggregates = estimates({group: [matrix] for group, matrix in scores.items()}, mean_and_iqm, reps)
    rows = []
    for group in scores:
        same_levels = [other for other in scores if other.endswith(UNSEEN) == group.endswith(UNSEEN)]
        rival = next((other for other in same_levels if baseline.lower() in other.lower()), group)
        pair = {group: [scores[group], scores[rival]]}
        improvement = ["-"] if rival == group else estimates(pair, probability_of_improvement, reps)[group]
        rows.append([group, len(scores[group]), *aggregates[group], *improvement])
    return markdown(pd.DataFrame(rows, columns=["group", "seeds", "mean", "IQM", "P(improvement)"]))


def report_scores(args: Args, path: Path, mode: str, values: pd.DataFrame) -> list[str]:
    """Normalized scores: a table by game; aggregates and performance profiles for each set of games."""
    values = normalized(values, mode)
    text = ["### Normalized scores", game_table(values, "score", 3), SCORE_TEXT]
    games_of = {group: set(values.env_id[values.group == group]) for group in in_order(values)}
    # groups can be compared on the same games only: a table for each set of games that one of our groups has
    game_sets = {tuple(sorted(games_of[group])) for group in set(values.group[values.own])}
    for number, games in enumerate(sorted(game_sets, key=lambda games: (-len(games), games)), start=1):
        groups = [group for group in games_of if set(games) <= games_of[group]]
        scores = {group: score_matrix(values[values.group == group], list(games)) for group in groups}
        text.append(f"### Over {', '.join(games) if len(games) < len(RANGES) else 'all 16 games'}")
        text.append(aggregate_table(scores, args.baseline, args.reps))
        spread = np.ptp(np.concatenate([matrix.ravel() for matrix in scores.values()]))
        if spread < MIN_SCORE_RANGE:
            text.append(f"No performance profile: all scores lie within {spread:.3f}.")
        else:
            fig = draw_profiles(scores, args.reps)
            text.append(picture(fig, Path(f"{path}_profile_{number}"), "Performance profile with 95 % intervals."))
    return text


def report_setting(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, notes: list[str]) -> list[str]:
    """The page on one distribution mode and number of levels; adds to the notes."""
    mode, num_levels = runs[SETTING].iloc[0]
    title = setting_title(mode, num_levels)
    path = args.out / (f"{mode}_{num_levels}_levels" if num_levels else mode)
    if not num_levels:  # all levels are in training: an evaluation repeats what the training episodes say
        curves = curves[~curves.group.str.endswith(UNSEEN)]
    own, published = curves[curves.own], curves[~curves.own]
    step, row = step_to_compare_at(runs.last_step.quantile(0.5, interpolation="lower"), published)
    step = args.step or step
    window = min(max(row, 0.05 * step), step)
    values = value_at_step(curves, step, window)
    text = [f"## {title}", f"### Return at {steps_text(step)} steps"]
    text.append(STEP_TEXT.format(start=steps_text(step - window), step=steps_text(step)))
    text.append(game_table(values, "episodic_return", 2))
    fig = draw_curves(curves, "global_step", own.global_step.max(), "Environment steps")
    text += ["### Return over steps", picture(fig, Path(f"{path}_steps"), CURVE_CAPTION)]
    unit, seconds = ("hours", 3600) if own.wall_time.max() > 2 * 3600 else ("minutes", 60)
    own = own.assign(wall_time=own.wall_time / seconds)
    fig = draw_curves(own, "wall_time", own.wall_time.max(), f"Time ({unit})")
    text += ["### Return over time", picture(fig, Path(f"{path}_time"), CURVE_CAPTION)]
    # the published ranges are over many levels of Procgen
    if (num_levels == 0 or num_levels >= 100) and set(values.env_id) <= set(RANGES):
        text += report_scores(args, path, mode, values)

    absent = runs[~runs.run.isin(values.run)]
    for reason, rows in absent.groupby(np.where(absent.last_step < step, "ended before", "have no value yet at")):
        notes.append(f"{title}: not in the tables, as they {reason} {steps_text(step)} steps: {run_list(rows)}")
    if len(published) and values.own.all():
        first = steps_text(published.global_step.min())
        notes.append(f"{title}: no published values in the tables: the published curves begin at {first} steps")
    if mode == "easy" and len(published):
        notes.append(f"{title}: there are no published curves of PPG, only of PPO")
    if runs.last_step.max() > 1.5 * step and not args.step:
        notes.append(f"{title}: some runs go on to {steps_text(runs.last_step.max())} steps; --step moves the tables")
    return text


def report(args: Args, runs: pd.DataFrame, curves: pd.DataFrame, references: pd.DataFrame, notes: list[str]) -> Path:
    """Write report.md and its pictures; returns the page and adds to the notes."""
    text = ["# Training runs", run_table(runs), "Last step, minutes and speed (steps/s): medians over the runs."]
    for setting, own in curves.groupby(SETTING):
        setting_runs = runs[(runs[SETTING] == setting).all(axis=1)]
        published = references[(references[SETTING] == setting).all(axis=1) & references.env_id.isin(own.env_id)]
        text += report_setting(args, setting_runs, pd.concat([own, published]), notes)
    text += ["## Notes", "\n".join(f"- {note}" for note in notes)]
    page = args.out / "report.md"
    page.write_text("\n\n".join(text) + "\n")
    return page


def figure2(args: Args, curves: pd.DataFrame, references: pd.DataFrame) -> Path:
    """The paper's Figure 2 from its own curves, with our runs on all hard levels over them; returns the picture."""
    own = curves[(curves[SETTING] == ("hard", 0)).all(axis=1)]
    paper = references[references.source == "openai/phasic-policy-gradient"]
    fig = draw_curves(pd.concat([own, paper]) if len(own) else paper, "global_step", 100e6, "Environment steps")
    picture(fig, args.out / "figure2", "")
    return args.out / "figure2.png"


def require(condition: bool, message: str) -> None:
    if not condition:
        print(f"report.py: {message}", file=sys.stderr)
        sys.exit(2)


def main(args: Args) -> None:
    require(bool(args.paths) or args.figure2, "name at least one folder with runs, or --figure2")
    references = load_references(args.references)
    unknown = set(args.references) - set(references.algorithm)
    require(not unknown, f"no published curves of {', '.join(unknown)}; see benchmark/reference/README.md")
    runs, curves, notes = load_runs(args.paths)
    require(len(runs) > 0 or args.figure2, "\n".join([f"no runs under {', '.join(map(str, args.paths))}", *notes]))
    args.out.mkdir(parents=True, exist_ok=True)
    page = figure2(args, curves, references) if args.figure2 else report(args, runs, curves, references, notes)
    print(*notes, f"wrote {page}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
