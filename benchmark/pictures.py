"""The pictures of report.py and dynamics.py: one look, and one colour for one algorithm."""

import math
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rliable import library

# Okabe and Ito's colours, safe for the colour-blind; line styles tell curves apart in black and white
COLOURS = {
    "ppg_procgen": "#0072B2",
    "ppg_procgen --arch detach": "#009E73",
    "ppg_detach": "#009E73",  # the same, as sweeps name it
    "ppo_procgen": "#D55E00",
    "cleanrl_ppg": "#CC79A7",
    "PPG (openai/phasic-policy-gradient)": "#56B4E9",
    "PPO (openai/phasic-policy-gradient)": "0.3",
    "PPO (openai/train-procgen)": "0.3",
}
OTHER_COLOURS = ["#882255", "#999933", "#332288", "#E69F00"]
LINES = ["-", "--", "-.", (0, (6, 1, 1, 1, 1, 1))]
PUBLISHED_LINES = [(0, (1, 1)), (0, (3, 1, 1, 1)), (0, (1, 2))]
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1,
    "lines.markersize": 2.5,
    "svg.hashsalt": "report",  # the same data give the same file
    "text.parse_math": False,  # a name with a dollar is no formula
}
MIN_SEEDS = 3  # below, seeds are shown one by one: an interval of two is wider than what it is about
NUM_BINS = 100  # points of a drawn curve


class Group(NamedTuple):
    """What shares a line in a picture and a column in a table."""

    own: bool  # ours, or published
    name: str
    split: str


GROUP = list(Group._fields)
CURVE = [*GROUP, "env_id", "seed", "run"]


def ordered_groups(curves: pd.DataFrame) -> list[Group]:
    """Ours first, train before test."""
    groups = curves[GROUP].drop_duplicates().sort_values(GROUP, ascending=[False, True, False])
    return [Group(*row) for row in groups.itertuples(index=False)]


def group_titles(groups: list[Group]) -> dict[Group, str]:
    """The groups' names, with the split where there are several."""
    several = len({group.split for group in groups}) > 1
    return {group: f"{group.name}, {group.split} levels" if several else group.name for group in groups}


def colours(names: Iterable[str]) -> dict[str, str]:
    others = cycle(OTHER_COLOURS)
    return {name: COLOURS.get(name) or next(others) for name in dict.fromkeys(names)}


def line_styles(groups: list[Group]) -> dict[Group, dict]:
    """Colour and line by name, dots for test levels. Published curves are dotted where there are curves of ours."""
    ours, published = cycle(LINES), cycle(PUBLISHED_LINES)
    any_own = any(group.own for group in groups)
    colour_of, line_of, styles = colours(group.name for group in groups), {}, {}
    for group in groups:
        if group.name not in line_of:
            line_of[group.name] = next(ours if group.own or not any_own else published)
        marker = "o" if group.split == "test" else None
        look = {"color": colour_of[group.name], "linestyle": line_of[group.name]}
        styles[group] = look | {"linewidth": 1.3, "marker": marker}
    return styles


def panels(number: int, num_legend_lines: int) -> tuple[Figure, list[Axes]]:
    """A figure as wide as a page, with panels that share their x axis; the lowest of each column shows its numbers."""
    num_columns = min(4, number)
    num_rows = math.ceil(number / num_columns)
    height = {1: 3.2, 2: 2.6, 3: 2, 4: 1.4}[num_columns]
    fig = Figure(figsize=(7, height * num_rows + 0.4 + 0.08 * num_legend_lines), layout="constrained")
    axes = fig.subplots(num_rows, num_columns, sharex=True, squeeze=False).flatten()
    for ax in axes[number:]:
        ax.remove()
    for ax in axes[number - num_columns : number]:
        ax.tick_params(labelbottom=True)
    return fig, list(axes[:number])


def binned(curves: pd.DataFrame, x: str, limit: float, bins: int = NUM_BINS) -> pd.DataFrame:
    """The runs of a group on one axis: a column a run, a row a bin of x, labelled by the bin's end. Bins without a
    point are interpolated inside a run, and stay empty outside it."""
    edges = np.linspace(0, limit, bins + 1)
    ends = pd.cut(curves[x], edges, labels=edges[1:], include_lowest=True)
    table = curves.groupby([ends, "run"], observed=False).episodic_return.mean().unstack()
    return table.set_axis(edges[1:]).interpolate(limit_area="inside")


def curve_caption(bin_width: str, curves: pd.DataFrame, ended: str = "") -> str:
    caption = (
        f"Mean return of the last 100 episodes, averaged in each run over bins of {bin_width}; bins without data are "
        "interpolated. Line: mean over seeds; band: ± one sample standard deviation. It is drawn while more than half "
        f"of the seeds last; a cross marks where the first of them ends{ended}. Below three seeds, each is a line."
    )
    if "test" in set(curves.split):
        caption += " Dots: unseen levels."
    if not curves.own.all():
        caption += " Dotted: published curves." if curves.own.any() else ""
        caption += " Published points are means over many updates, drawn at the middle of these."
    return caption


def num_seeds_text(curves: pd.DataFrame) -> str:
    """How many runs a game has."""
    counts = curves.groupby("env_id").run.nunique()
    fewest = "" if counts.min() == counts.max() else f"{counts.min()} to "
    return f"{fewest}{counts.max()} seed{'s' if counts.max() > 1 else ''}"


def draw_mean(ax: Axes, table: pd.DataFrame, style: dict, keep_last: bool) -> None:
    """Mean over seeds with a band of one standard deviation. keep_last: a run that has ended keeps its last value, else
    the mean over time jumps when a fast seed ends."""
    num_runs = table.count(axis=1)
    if keep_last:
        table = table.ffill()
    table = table[num_runs > table.shape[1] / 2]
    if table.empty:
        return
    mean, spread = table.mean(axis=1), table.std(axis=1)
    ax.fill_between(mean.index, mean - spread, mean + spread, color=style["color"], alpha=0.2, linewidth=0)
    draw_line(ax, mean, style)
    first_end = num_runs.index[num_runs == num_runs.max()][-1]
    if first_end < mean.index[-1]:
        ax.plot(first_end, mean[first_end], "x", color=style["color"], markersize=5)


def draw_line(ax: Axes, values: pd.Series, style: dict) -> None:
    if len(values) == 1:
        style = style | {"marker": "o"}  # a line of one point cannot be seen
    ax.plot(values, **style, markevery=((len(values) - 1) % 8, 8))


@matplotlib.rc_context(STYLE)
def draw_curves(curves: pd.DataFrame, x: str, limit: float) -> Figure:
    """Returns for x from 0 to limit, a panel a game. A single game has room for the ends of the auxiliary phases."""
    window = curves.groupby(CURVE).global_step.diff().fillna(curves.global_step)
    middle = curves.global_step - window / 2  # a published row is a mean over the steps since the row before it
    curves = curves.assign(global_step=np.where(curves.own, curves.global_step, middle))
    curves = curves[curves[x] <= limit]
    games, groups = sorted(set(curves.env_id)), ordered_groups(curves)
    titles, styles = group_titles(groups), line_styles(groups)
    if x == "global_step":
        unit, scale = ("millions", 1e6) if limit >= 1e6 else ("thousands", 1e3)
    else:
        unit, scale = ("hours", 3600) if limit >= 7200 else ("minutes", 60)
    fig, axes = panels(len(games), len(groups))
    by_panel = dict(list(curves.groupby(["env_id", *GROUP])))
    for ax, game in zip(axes, games, strict=True):
        for group in reversed([group for group in groups if (game, *group) in by_panel]):  # ours over published ones
            table = binned(by_panel[(game, *group)], x, limit)
            table = table.set_axis(table.index / scale)
            if table.shape[1] >= MIN_SEEDS:
                draw_mean(ax, table, styles[group], keep_last=x == "wall_time")
                continue
            width = 1.3 if table.shape[1] == 1 else 0.8
            for run in table:
                draw_line(ax, table[run].dropna(), styles[group] | {"linewidth": width})
        ax.set_title(game)
        ax.set_xlim(0, limit / scale)
        ax.locator_params(nbins=4 if len(games) > 1 else 8)
    fig.supxlabel(f"Environment steps ({unit})" if x == "global_step" else f"Wall-clock time ({unit})", fontsize=8)
    fig.supylabel("Episodic return", fontsize=8)
    by_group = dict(list(curves.groupby(GROUP)))
    labels = {group: f"{titles[group]}, {num_seeds_text(by_group[group])}" for group in groups}
    handles = [Line2D([], [], label=labels[group], **styles[group]) for group in groups]
    phases = curves.global_step[curves.aux_phase].unique() / scale
    if len(games) == 1 and x == "global_step" and len(phases):
        look = {"color": "0.6", "linewidth": 0.6, "label": "end of an auxiliary phase"}
        handles.append(axes[0].vlines(phases, 0, 1, transform=axes[0].get_xaxis_transform(), zorder=0, **look))
    longest = max(len(label) for label in labels.values())
    fig.legend(handles=handles, loc="outside upper center", ncols=2 if longest < 45 else 1)
    return fig


@matplotlib.rc_context(STYLE)
def draw_measurements(lines: list[tuple[str, pd.DataFrame, dict]], columns: list[str], x_label: str) -> Figure:
    """A panel a column. lines: label, table and look of each run; a label appears once in the legend."""
    fig, axes = panels(len(columns), len(lines))
    handles = {}
    for ax, column in zip(axes, columns, strict=True):
        for label, table, look in lines:
            if column in table:
                [handles[label]] = ax.plot(table[column].dropna(), **look)
        ax.set_title(column)
    fig.supxlabel(x_label, fontsize=8)
    fig.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2)
    return fig


def share_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """What rliable computes by default, but for all thresholds at once, which is 13 times faster."""
    return (scores[..., None] > thresholds).mean(axis=(0, 1))


@matplotlib.rc_context(STYLE)
def draw_profiles(matrices: dict[Group, np.ndarray], reps: int) -> Figure:
    """rliable's performance profiles: the share of runs, over all games, whose score lies above each threshold."""
    scores = np.concatenate([matrix.ravel() for matrix in matrices.values()])
    low = min(0, scores.min())
    thresholds = np.linspace(low, max(scores.max(), low + 0.01), 101)
    np.random.seed(0)  # as in estimates
    profiles, intervals = library.create_performance_profile(
        matrices, thresholds, custom_profile_func=share_above, reps=reps
    )
    titles, styles = group_titles(list(matrices)), line_styles(list(matrices))
    fig = Figure(figsize=(3.5, 2.4 + 0.15 * len(matrices)), layout="constrained")
    ax = fig.subplots()
    for group, matrix in matrices.items():
        if len(matrix) >= MIN_SEEDS:
            ax.fill_between(thresholds, *intervals[group], color=styles[group]["color"], alpha=0.2, linewidth=0)
        ax.plot(thresholds, profiles[group], **styles[group], markevery=8, label=titles[group])
    ax.set(xlabel="Normalised score τ", ylabel="Fraction of runs with score > τ", ylim=(0, 1), xlim=thresholds[[0, -1]])
    fig.legend(loc="outside upper center")
    return fig


@matplotlib.rc_context(STYLE)
def picture(fig: Figure, path: Path, caption: str) -> str:
    """Save as PNG and SVG; returns the Markdown that shows it."""
    fig.savefig(path.with_suffix(".png"), dpi=200)
    fig.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return f"![{path.name}]({path.name}.png)\n\n*{caption}*"
