"""The pictures of report.py: learning curves and performance profiles, with one color for one algorithm."""

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: a window needs a display

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import seaborn as sns  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from rliable import plot_utils  # noqa: E402

# Okabe and Ito's colors, safe for the color-blind
COLORS = {
    "ppg_procgen": "#0072B2",
    "ppg_procgen --arch detach": "#009E73",
    "ppg_detach": "#009E73",  # the same, as sweeps name it
    "ppo_procgen": "#D55E00",
    "cleanrl_ppg": "#CC79A7",
    "PPG (openai/phasic-policy-gradient)": "#56B4E9",
    "PPO (openai/phasic-policy-gradient)": "#4D4D4D",
    "PPO (openai/train-procgen)": "#4D4D4D",
}
OTHER_COLORS = ["#882255", "#999933", "#332288", "#E69F00"]
UNSEEN = ", unseen levels"  # ends the name of a group's curve on test levels
CURVE = ["env_id", "group", "run"]
NUM_BINS = 100  # points of a drawn curve
PANEL_HEIGHT = {1: 3.2, 2: 2.6, 3: 2.2, 4: 1.7}  # inches, by the number of columns
MIN_SCORE_RANGE = 0.05  # a profile over less shows noise

sns.set_theme(context="paper", style="whitegrid")


def palette(groups: Iterable[str]) -> dict[str, str]:
    """A color for each group. A group's curves on training and on unseen levels share it."""
    others = cycle(OTHER_COLORS)
    names = dict.fromkeys(group.removesuffix(UNSEEN) for group in groups)
    color_of = {name: COLORS.get(name) or next(others) for name in names}
    return {group: color_of[group.removesuffix(UNSEEN)] for group in groups}


def in_order(curves: pd.DataFrame) -> list[str]:
    """The groups: ours first, then published ones."""
    groups = curves[["own", "group"]].drop_duplicates()
    return groups.sort_values(["own", "group"], ascending=[False, True]).group.tolist()


def binned(curves: pd.DataFrame, x: str, limit: float) -> pd.DataFrame:
    """Each run's mean in NUM_BINS bins of x, at the end of the bin, as a table of env_id, group, run, x and return.

    Inside a run, bins without a value are interpolated, so that each point of a mean has the same runs. A point that at
    most half of a group's runs have reached is left out.
    """
    width = limit / NUM_BINS
    bins = np.ceil(curves[x] / width) * width
    table = curves.groupby([bins, *CURVE]).episodic_return.mean().unstack(CURVE)
    table = table.interpolate(method="index", limit_area="inside")
    points = table.stack(CURVE, future_stack=True).dropna().rename("episodic_return").reset_index()
    reached = points.groupby([x, "env_id", "group"]).run.transform("nunique")
    num_runs = points.groupby(["env_id", "group"]).run.transform("nunique")
    return points[reached > num_runs / 2]


def draw_curves(curves: pd.DataFrame, x: str, limit: float, label: str) -> Figure:
    """Mean return over seeds with a band of one standard deviation, for x from 0 to limit, a panel a game."""
    curves = curves[curves[x] <= limit]
    groups = in_order(curves)
    num_seeds = curves.groupby(["env_id", "group"]).run.nunique().groupby("group").max()
    label_of = {group: f"{group}, {num_seeds[group]} seed{'s' * (num_seeds[group] > 1)}" for group in groups}
    points = binned(curves, x, limit)
    points["label"] = points.group.map(label_of)
    num_columns = min(4, curves.env_id.nunique())
    height = PANEL_HEIGHT[num_columns]
    grid = sns.relplot(
        points,
        kind="line",
        x=x,
        y="episodic_return",
        col="env_id",
        col_order=sorted(curves.env_id.unique()),
        col_wrap=num_columns,
        hue="label",
        style="label",
        hue_order=label_of.values(),
        style_order=label_of.values(),
        palette={label_of[group]: color for group, color in palette(groups).items()},
        errorbar="sd",
        height=height,
        aspect=7 / num_columns / height,
        facet_kws={"sharey": False},
    )
    grid.set_titles("{col_name}").set_axis_labels("", "").set(xlim=(0, limit))
    grid.figure.supxlabel(label, fontsize="medium", y=0)
    grid.figure.supylabel("Episodic return", fontsize="medium", x=0)
    phases = curves.loc[curves.aux_phase, x].unique()
    if num_columns == 1 and x == "global_step" and len(phases):
        ax = grid.ax
        ax.vlines(phases, 0, 1, transform=ax.get_xaxis_transform(), color="0.6", linewidth=0.6)
        ax.set_title(f"{ax.get_title()} (vertical lines: ends of auxiliary phases)")
    grid.tight_layout()
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.5, 1), ncols=2, title=None)
    return grid.figure


def draw_profiles(thresholds: np.ndarray, profiles: dict[str, np.ndarray], intervals: dict[str, np.ndarray]) -> Figure:
    """The share of runs, over all games, whose score lies above each threshold."""
    fig, ax = plt.subplots(figsize=(4, 3))
    dashes = dict(zip(profiles, cycle(["-", "--", ":", "-."]), strict=False))
    plot_utils.plot_performance_profiles(
        profiles,
        thresholds,
        performance_profile_cis=intervals,
        ax=ax,
        colors=palette(profiles),
        linestyles=dashes,
        labelsize="medium",
        ticklabelsize="medium",
        xlabel="Score",
        ylabel="Fraction of runs with a higher score",
    )
    fig.legend(loc="lower center", bbox_to_anchor=(0.5, 1))
    return fig


def save(fig: Figure, path: Path, caption: str) -> str:
    """Save as PNG and SVG; returns the Markdown that shows it."""
    for suffix in (".png", ".svg"):
        fig.savefig(path.with_suffix(suffix), dpi=200, bbox_inches="tight")
    plt.close(fig)
    return f"![{path.name}]({path.name}.png)\n\n*{caption}*"
