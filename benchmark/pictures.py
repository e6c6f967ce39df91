"""The pictures of report.py: learning curves and performance profiles. Each algorithm has its color."""

from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import EngFormatter
from rliable import library, plot_utils

# Okabe and Ito's colors, which color-blind readers can tell apart
COLORS = {
    "ppg_procgen": "#0072B2",
    "ppg_procgen --arch detach": "#009E73",
    "ppg_detach": "#009E73",  # the same algorithm; sweeps use this name
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
WIDTH = 7  # inches of a whole picture
MIN_SEEDS = 3  # fewer seeds have no interval: one of two seeds is wider than what it is about

plt.switch_backend("Agg")  # files only, no display needed
sns.set_theme(context="paper", style="ticks", rc={"axes.grid": True, "grid.alpha": 0.4, "text.parse_math": False})


def palette(groups: list[str]) -> dict[str, str]:
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
    """Each run's mean in NUM_BINS bins of x, interpolated inside a run, as long as more than half of the runs last."""
    width = limit / NUM_BINS
    bins = np.ceil(curves[x] / width) * width
    table = curves.groupby([bins, *CURVE]).episodic_return.mean().unstack(CURVE)
    table = table.interpolate(method="index", limit_area="inside")
    reached = table.notna().T.groupby(["env_id", "group"]).transform("mean").T
    if x == "wall_time":  # else the mean would jump where a fast seed ends
        table = table.ffill()
    return table[reached > 0.5].stack(CURVE, future_stack=True).dropna().rename("episodic_return").reset_index()


def draw_curves(curves: pd.DataFrame, x: str, limit: float, label: str) -> plt.Figure:
    """Mean return over seeds with a band of one standard deviation, for x from 0 to limit, a panel a game."""
    first = curves.groupby(CURVE).global_step.transform("min")
    middle = curves.global_step - first / 2  # a published row is the mean over the steps since the row before
    curves = curves.assign(global_step=curves.global_step.where(curves.own, middle))
    curves = curves[curves[x] <= limit]
    groups = in_order(curves)
    num_seeds = curves.groupby(["env_id", "group"]).run.nunique().groupby("group").max()
    label_of = {group: f"{group}, {num_seeds[group]} seed{'' if num_seeds[group] == 1 else 's'}" for group in groups}
    colors = {label_of[group]: color for group, color in palette(groups).items()}
    solid = set(curves.group[curves.own & ~curves.group.str.endswith(UNSEEN)]) or groups
    dashes = {label_of[group]: "" if group in solid else (2, 1) for group in groups}
    points = binned(curves, x, limit)
    points["label"] = points.group.map(label_of)

    games = sorted(curves.env_id.unique())
    num_columns = min(4, len(games))
    height = 1.2 + 2.2 / num_columns
    lines = {"hue": "label", "hue_order": colors, "palette": colors, "style": "label", "dashes": dashes}
    panels = {"col_order": games, "col_wrap": num_columns, "height": height, "aspect": WIDTH / num_columns / height}
    options = {"errorbar": "sd", "err_kws": {"linewidth": 0}, "facet_kws": {"sharey": False, "legend_out": False}}
    grid = sns.relplot(points, kind="line", x=x, y="episodic_return", col="env_id", **lines, **panels, **options)
    grid.set_titles("{col_name}").set_axis_labels("", "").set(xlim=(0, limit))
    for ax in grid.axes.flat:
        if x == "global_step":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    phases = curves.loc[curves.aux_phase, x].unique()
    if len(games) == 1 and x == "global_step" and len(phases):
        ax.vlines(phases, 0, 1, transform=ax.get_xaxis_transform(), color="0.6", linewidth=0.8)
        ax.set_title(f"{games[0]} (vertical lines: ends of auxiliary phases)")
    grid.figure.supxlabel(label, fontsize="medium")
    grid.figure.supylabel("Episodic return", fontsize="medium")
    grid.figure.set_layout_engine("constrained")
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.5, 1), ncols=2, title=None, frameon=False)
    return grid.figure


def draw_profiles(scores: dict[str, np.ndarray], reps: int) -> plt.Figure:
    """rliable's performance profiles: the share of runs, over all games, whose score lies above each threshold."""
    everything = np.concatenate([matrix.ravel() for matrix in scores.values()])
    thresholds = np.linspace(min(0, everything.min()), everything.max(), 101)
    np.random.seed(0)  # rliable draws from numpy's global generator
    profiles, intervals = library.create_performance_profile(scores, thresholds, reps=reps)
    bands = {group: intervals[group] for group in scores if len(scores[group]) >= MIN_SEEDS}
    fig, ax = plt.subplots(figsize=(WIDTH / 1.75, 3))
    look = {"colors": palette(list(scores)), "labelsize": "medium", "ticklabelsize": "medium"}
    look.update(xlabel="Score", ylabel="Fraction of runs with a higher score")
    plot_utils.plot_performance_profiles(profiles, thresholds, bands, ax=ax, **look)
    ax.locator_params(axis="x", nbins=6)
    fig.legend(loc="lower center", bbox_to_anchor=(0.5, 0.9), frameon=False)
    return fig


def draw_n_pi(rows: pd.DataFrame) -> plt.Figure:
    """Scores for each N_pi, and their difference to the default's mean. Bands: from the lowest to the highest run."""
    default = rows[rows.setting == "ppg_n_pi_32"].groupby("iterations").score.mean()
    look = {"hue_order": [*(f"ppg_n_pi_{n}" for n in (32, 16, 8, 4, 2)), "ppo"], "palette": "colorblind"}
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    for ax, y, base in zip(axes, ["score", "difference to N_pi 32"], [0, rows.iterations.map(default)], strict=True):
        sns.lineplot(x=rows.iterations, y=rows.score - base, hue=rows.setting, ax=ax, errorbar=("pi", 100), **look)
        ax.set(ylabel=y, xscale="log", xlim=(16, 1520), xticks=2 ** np.arange(4, 11), xticklabels=2 ** np.arange(4, 11))
    return fig


def picture(fig: plt.Figure, path: Path, caption: str) -> str:
    """Save as PNG and SVG; returns the Markdown that shows it."""
    for suffix in (".png", ".svg"):
        fig.savefig(f"{path}{suffix}", dpi=200, bbox_inches="tight")
    plt.close(fig)
    return f"![{path.name}]({path.name}.png)\n\n*{caption}*"
