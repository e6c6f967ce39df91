"""What a PPO run measures at each update, beside the published runs of openai/train-procgen.

    python benchmark/dynamics.py runs --out report           # report/dynamics.md with a picture a game

A port that is the same has the same numbers from the first update on, long before returns differ. Published are the
first 160 updates of PPO on all easy levels, 64 environments of 256 steps, 3 runs a game. Any run of ours on
all easy levels with updates of that size can be laid beside them; only ppo_procgen.py with its defaults should agree.
"""

import json
import re
import sys
from dataclasses import dataclass
from itertools import combinations, cycle
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, nothing installed
from benchmark.pictures import COLOURS, LINES, colours, draw_measurements  # noqa: E402
from benchmark.report import check_folders, escape, fail, find_run_folders, markdown, read_csv  # noqa: E402

REFERENCE = Path(__file__).parent / "reference" / "ppo_easy_updates.csv.gz"
# published name: our column. approxkl is half the mean squared log-ratio, the estimator k2
QUANTITIES = {
    "value_loss": "losses/value_loss",
    "explained_variance": "losses/explained_variance",
    "approxkl": "losses/approx_kl_k2",
    "clipfrac": "losses/clipfrac",
    "policy_entropy": "losses/entropy",
    "policy_loss": "losses/policy_loss",
    "eprewmean": "charts/mean_return_100",
}
BLOCKS = [
    (1, 1),
    (2, 4),
    (5, 8),
    (9, 16),
    (17, 24),
    (25, 32),
    (33, 40),
    (41, 48),
    (49, 60),
    (61, 80),
    (81, 120),
    (121, 160),
]

SUMMARY = ["value_loss", "clipfrac", "policy_entropy", "explained_variance"]  # over updates 1 to 24


@dataclass
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]]
    """folders to search for runs"""
    out: Path = Path("report")
    """folder to write to"""


def load_published(game: str) -> dict[str, pd.DataFrame]:
    """The published runs of a game, a row an update, by their number."""
    table = pd.read_csv(REFERENCE)
    table = table[table.env_id == game].set_index("nupdates")
    return {f"published {run}": rows[list(QUANTITIES)] for run, rows in table.groupby("run")}


def load_run(folder: Path) -> tuple[str, pd.DataFrame, list[str]]:
    """A run's game, measurements and remarks. Older runs lack the KL estimator k2; its column is empty then."""
    args = json.loads((folder / "args.json").read_text())["args"]
    setting = {"distribution_mode": "easy", "num_levels": 0, "batch_size": 16_384, "num_ranks": 1}
    if setting | {name: args[name] for name in setting if name in args} != setting:
        raise ValueError("not on all easy levels in updates of 16,384 steps, as the published runs")
    table, remarks = read_csv(folder / "metrics.csv")
    table = table.astype({"iteration": int}).set_index("iteration").reindex(columns=QUANTITIES.values())
    return args["env_id"], table.set_axis(list(QUANTITIES), axis=1), remarks


def block_means(table: pd.DataFrame) -> pd.DataFrame:
    """Means over blocks of updates, a row a block. A block that the run has not completed is empty."""
    means = {block: table.loc[block[0] : block[1]].mean() for block in BLOCKS if block[1] <= table.index.max()}
    return pd.DataFrame(means, index=QUANTITIES).T.reindex(pd.MultiIndex.from_tuples(BLOCKS))


def deviation(own: pd.Series, published: pd.DataFrame) -> pd.Series:
    """How far block means lie from the published mean, in units of what is allowed: 15 % of it, or the published spread
    (half the range of the runs). At most 1 is agreement."""
    allowed = np.maximum(0.15 * published.mean(axis=1).abs(), (published.max(axis=1) - published.min(axis=1)) / 2)
    return (own - published.mean(axis=1)).abs() / allowed


def agreement(own: pd.DataFrame, published: list[pd.DataFrame]) -> tuple[float, int]:
    """How many of a run's block means agree with those of two published runs, on average over the pairs of them, and
    how many block means there are. Pairs, because a published run itself has only two others to agree with. Clipping in
    update 1 does not count: in most published runs it is 0, so that nothing else would agree."""
    counts = []
    for pair in combinations(published, 2):
        far = pd.DataFrame({x: deviation(own[x], pd.concat([table[x] for table in pair], axis=1)) for x in SUMMARY})
        far = far[[end <= 24 for _, end in far.index]]
        far.loc[(1, 1), "clipfrac"] = np.nan
        far = far.stack().dropna()
        counts.append((far <= 1).sum())
    return float(np.mean(counts)), len(far)


def summary_table(games: dict[str, dict[str, pd.DataFrame]]) -> str:
    """A row a run of ours, with what the published runs reach, each beside the other two."""
    rows = []
    for game, runs in sorted(games.items()):
        published = [block_means(table) for table in load_published(game).values()]
        among = [agreement(table, [other for other in published if other is not table])[0] for table in published]
        for name, table in runs.items():
            mean, number = agreement(block_means(table), published)
            each = ", ".join(f"{count:.0f}" for count in among)
            rows.append([game, name, f"{mean:.1f} of {number}", f"{np.mean(among):.1f} ({each})"])
    return markdown(["game", "run", "agrees", "published runs"], rows)


def game_text(runs: dict[str, pd.DataFrame], published: dict[str, pd.DataFrame]) -> list[str]:
    """A table a quantity: published runs, ours, and where ours disagree."""
    reference = {name: block_means(table) for name, table in published.items()}
    own = {name: block_means(table) for name, table in runs.items()}
    last = max(table.index.max() for table in runs.values())
    blocks = [block for block in BLOCKS if block[1] <= last]
    text = []
    for quantity in QUANTITIES:
        spread = pd.DataFrame({name: means[quantity] for name, means in reference.items()})
        rows = [[name, *(f"{spread[name][block]:.3f}" for block in blocks)] for name in spread]
        for name, means in own.items():
            far = deviation(means[quantity], spread)
            cells = [f"{means[quantity][block]:.3f}" + (" (!)" if far[block] > 1 else "") for block in blocks]
            rows.append([f"**{name}**", *(cell.replace("nan", "") for cell in cells)])
        titles = [f"{first}" if first == end else f"{first}-{end}" for first, end in blocks]
        text += [f"### {quantity}", markdown(["updates", *titles], rows)]
    return text


def algorithm(folder: str, game: str) -> str:
    """What a folder's name says besides game, seed and date: runs that share it share a colour on all games' pages."""
    words = [word for word in re.split("_+", folder) if word != game and not re.match(r"\d", word)]
    name = "_".join(words)
    return f"{name}_procgen" if name in ("ppg", "ppo") else name


def looks(games: dict[str, dict[str, pd.DataFrame]]) -> dict[str, dict[str, dict]]:
    """For each game the look of each run: a colour for an algorithm, a line for each run of it."""
    algorithms = {(game, run): algorithm(Path(run).name, game) for game, runs in games.items() for run in runs}
    colour_of = colours(sorted(set(algorithms.values())))
    styles = {}
    for game, runs in games.items():
        lines = {name: cycle(LINES) for name in colour_of}
        names = {run: algorithms[game, run] for run in runs}
        styles[game] = {run: {"color": colour_of[name], "linestyle": next(lines[name])} for run, name in names.items()}
    return styles


def draw(runs: dict[str, pd.DataFrame], published: dict[str, pd.DataFrame], styles: dict[str, dict]) -> Figure:
    """A panel a quantity over updates: published runs thin, ours in front."""
    last = max(table.index.max() for table in runs.values())
    thin = {"color": COLOURS["PPO (openai/train-procgen)"], "linewidth": 0.8}
    lines = [("published, 3 runs", table.loc[:last], thin) for table in published.values()]
    lines += [(name, table, styles[name] | {"linewidth": 1.2}) for name, table in runs.items()]
    later = "value_loss from update 2"  # that of update 1 is five times as high, and would flatten the rest
    lines = [(name, table.assign(**{later: table.value_loss.loc[2:]}), style) for name, table, style in lines]
    columns = [later if name == "value_loss" else name for name in QUANTITIES]
    return draw_measurements(lines, columns, "Updates of 16,384 steps")


def main(args: Args) -> None:
    if not args.paths:
        fail("name at least one folder with runs")
    check_folders(args.paths, args.out)
    games: dict[str, dict[str, pd.DataFrame]] = {}
    notes = []
    for folder in find_run_folders(args.paths):
        try:
            game, table, remarks = load_run(folder)
            runs = games.setdefault(game, {})
            runs[folder.name if folder.name not in runs else str(folder)] = table
            notes += [f"- {folder}: {remark}" for remark in remarks]
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"- {folder}: left out: {type(error).__name__}: {error}")
    if not games:
        fail("\n".join([f"no run under {', '.join(map(str, args.paths))}", *notes]))
    args.out.mkdir(parents=True, exist_ok=True)
    text = [
        "# Updates beside the published ones",
        "Published: openai/train-procgen, PPO, easy, all levels, 3 runs. Means over blocks of updates. (!): further "
        "from the published mean than 15 % of it and than half the range of the three runs.",
    ]
    known = {game: runs for game, runs in games.items() if load_published(game)}
    notes += [f"- {game}: no published updates" for game in games.keys() - known]
    text += [
        f"How many block means of {', '.join(SUMMARY)} up to update 24 agree with two published runs: ours beside each "
        "pair of them, on average; a published run beside the other two (mean, and each of the three).",
        summary_table(known),
    ]
    styles = looks(known)
    for game, runs in sorted(known.items()):
        published = load_published(game)
        drawn = {name: table for name, table in runs.items() if len(table) > 1}
        text.append(f"## {game}")
        if drawn:
            draw(drawn, published, styles[game]).savefig(args.out / f"dynamics_{game}.png", dpi=200)
            text.append(f"![{game}](dynamics_{game}.png)")
        text += [f"Not drawn, as it has one update only: {escape(name)}." for name in runs if name not in drawn]
        text += game_text(runs, published)
    (args.out / "dynamics.md").write_text("\n\n".join(text + notes) + "\n")
    print(*notes, f"wrote {args.out / 'dynamics.md'}", sep="\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
