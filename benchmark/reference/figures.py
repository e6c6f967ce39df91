"""Five pictures:

    python -m benchmark.reference.figures

benchmark/reference/figure2.png is Figure 2 of the PPG paper: 16 hard games, 100M steps. The others are in
benchmark/results/page: n_pi.png has the mean score over these games for each N_pi, bigfish_seeds.png our runs on
bigfish beside published ones, one_level.png runs on one level, and differences.png "ours minus theirs" of
differences.csv, which tests/test_headlines.py computes from the runs.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import EngFormatter
from scipy import stats

from benchmark.report import COLORS, OTHER_COLORS, REFERENCE, WIDTH, draw_curves, load_references, load_runs, normalized

AUTHORS = "openai/phasic-policy-gradient"
RESULTS = REFERENCE.parent / "results"


def scores_by_n_pi() -> pd.DataFrame:
    """Mean score over the 16 games of each run of PPG's authors, in blocks of 16 iterations (of 65,536 steps)."""
    curves = pd.read_csv(REFERENCE / "procgen_curves.csv.gz")
    curves = normalized(curves[curves.source == AUTHORS], "hard")
    curves["iterations"] = 16 * np.ceil(curves.global_step / 2**20).astype(int)  # a block has one or two rows
    curves["setting"] = curves.algorithm.replace(["ppg", "ppg_e_aux_6", "ppg_e_pi_1"], "ppg_n_pi_32")  # the default
    return curves.groupby(["setting", "iterations", "algorithm", "run"], as_index=False).score.mean()


def draw_n_pi(rows: pd.DataFrame) -> plt.Figure:
    """Scores for each N_pi, and their difference from the default's mean. Bands: from the lowest to the highest run."""
    rows = rows.assign(setting=rows.setting.str.replace("ppg_n_pi_", "N_π ").replace("ppo", "PPO"))
    default = rows[rows.setting == "N_π 32"].groupby("iterations").score.mean()
    settings = [*(f"N_π {n}" for n in (32, 16, 8, 4, 2)), "PPO"]
    colors = [COLORS["PPG ("], *OTHER_COLORS[:4], COLORS["PPO ("]]
    look = {"hue_order": settings, "palette": colors, "errorbar": ("pi", 100)}
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    for ax, y, base in zip(axes, ["score", "difference from N_π 32"], [0, rows.iterations.map(default)], strict=True):
        x = (rows.iterations * 2**16).rename("steps")
        sns.lineplot(x=x, y=rows.score - base, hue=rows.setting, ax=ax, legend=ax is axes[0], **look)
        ticks = [1e6, 2e6, 4e6, 8e6, 16e6, 32e6, 64e6]
        ax.set(ylabel=y, xscale="log", xlim=(1e6, 1e8), xticks=ticks, xticklabels=map(EngFormatter(sep=""), ticks))
    return fig


def bigfish_blocks() -> pd.DataFrame:
    """Mean return of each run of one H200, and of published PPO, in blocks of 16 iterations that it has whole."""
    runs = load_runs(tuple(RESULTS.glob("*_h200_bigfish_*")))[1]
    runs["group"] = np.where(runs.group.str.startswith("ppo"), "our PPO", "our PPG (single network, N_π 8)")
    ppo = load_references(("ppo",)).query("env_id == 'bigfish' and distribution_mode == 'easy' and num_levels == 0")
    rows = pd.concat([runs, ppo.assign(group="published PPO")])  # a published row is the mean of its block
    rows["steps"] = 2**18 * np.ceil(rows.global_step / 2**18)
    rows = rows[rows.steps <= rows.groupby(["group", "run"]).global_step.transform("max").clip(upper=3.2e6)]
    return rows.groupby(["group", "steps", "run"], as_index=False).episodic_return.mean()


def draw_bigfish(rows: pd.DataFrame) -> plt.Figure:
    """The beginning, in which no run ends, with each group's mean; and all of each run."""
    rows = rows.assign(steps=rows.steps - 2**17)  # the middle of a block
    look = {"x": "steps", "y": "episodic_return", "hue": "group", "style": "group"}
    look["palette"] = [COLORS["ppg_detach"], COLORS["ppo"], COLORS["PPO ("]]
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    sns.lineplot(rows, errorbar=None, lw=2, marker="o", markersize=4, ax=axes[0], **look)
    for ax, width, end, limits in zip(axes, (0.5, 1), (0.9e6, 3.1e6), ((0.6, 1.6), (0, 10)), strict=True):
        sns.lineplot(rows, units="run", estimator=None, lw=width, legend=False, ax=ax, **look)
        ax.set(xlabel="steps", ylabel="return, mean of 0.26M steps", xlim=(0, end), ylim=limits)
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    axes[0].get_legend().remove()
    return fig


def draw_differences(rows: pd.DataFrame) -> plt.Figure:
    """Ours minus theirs: a panel for each game's levels, with its own linear axis, and a row for each comparison."""
    rows = rows[rows.a.str.startswith("our") & (rows.a.str[-3:] == rows.b.str[-3:])]
    rows = rows.sort_values(["setting", "b"], kind="stable")
    colors = {"authors' PPG": COLORS["ppg"], "CleanRL's PPG": COLORS["cleanrl"], "published PPO": COLORS["PPO ("]}
    levels = np.where(rows.setting.str.startswith("one level"), ", one level", ", all levels")
    groups = list(rows.groupby(rows.game + levels, sort=False))
    heights = [len(group) + 2 for _, group in groups]
    size = WIDTH, 0.19 * sum(heights)
    fig, axes = plt.subplots(len(groups), 1, figsize=size, height_ratios=heights, layout="constrained")
    for ax, (title, group) in zip(axes, groups, strict=True):
        for y, row in enumerate(group.itertuples()):
            ends = [[row.difference - row.low], [row.high - row.difference]]
            ax.errorbar(row.difference, y, xerr=ends, fmt="o", ms=4, lw=1.5, color=colors[row.b])
            runs = f"{row.runs_of_a} v {row.runs_of_b}"
            ax.text(1.01, y, runs, va="center", fontsize="small", transform=ax.get_yaxis_transform())
        ax.axvline(0, color="black", lw=0.8)
        ax.set_xlim(np.array([-1.05, 1.05]) * group[["low", "high"]].abs().max(axis=None))
        names = group.setting.str.removeprefix("one level, ")
        names = names.where(names.str.contains("PPO|two"), names + ", one network") + ":  " + group.steps
        ax.set_yticks(range(len(group)), names, fontsize="small")
        ax.set_ylim(len(group) - 0.5, -0.5)
        ax.set_title(title, loc="left", fontsize="medium", weight="bold")
    axes[-1].set_xlabel("difference of returns in these steps")
    handles = [plt.Line2D([], [], marker="o", ms=4, lw=1.5, color=color) for color in colors.values()]
    names = "ours − the authors' PPG", "ours − CleanRL's PPG", "our PPO − published PPO"
    fig.legend(handles, names, loc="outside upper center", ncols=3, frameon=False)
    return fig


def draw_one_level() -> plt.Figure:
    """Mean return on level 0 of starpilot: with Student's 95 % interval of the mean over runs, or, of PPO, each run."""
    rows = pd.concat(map(pd.read_csv, [RESULTS / "late" / "metrics.csv.gz", *RESULTS.glob("small/**/metrics.csv*")]))
    rows["run"] = rows.run.fillna("e_auxiliary_2__1")  # starpilot_level_0, a run of its own
    n_pi_4 = {
        "ours, one network": ("e_auxiliary_2_", COLORS["ppg_detach"]),
        "the authors', one network": ("authors_ppg_", COLORS["ppg"]),
        "our PPO": ("ppo_", COLORS["ppo"]),
    }
    n_pi_8 = {
        "ours, one network": ("starpilot__ppg_detach_", COLORS["ppg_detach"]),
        "ours, two networks": ("starpilot__ppg_procgen_", OTHER_COLORS[1]),
        "the authors', two networks": ("authors_dual_starpilot_level", COLORS["PPG ("]),
        "CleanRL's, one network": ("starpilot__cleanrl_ppg_", COLORS["cleanrl"]),
        "our PPO": ("starpilot__ppo_procgen_", COLORS["ppo"]),
    }
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 4.6), layout="constrained", sharey=True)
    for ax, title, groups in zip(axes, ("N_π 4", "N_π 8"), (n_pi_4, n_pi_8), strict=True):
        for name, (run, color) in groups.items():
            part = rows[rows.run.str.fullmatch(run + r"_\d+")]
            curves = part.pivot(index="global_step", columns="run", values="charts/mean_return_100")
            mean, count = curves.mean(axis=1), curves.shape[1]
            half = curves.sem(axis=1) * stats.t.ppf(0.975, count - 1)
            ax.plot(mean, color=color, label=f"{name} ({count} runs)")
            if name == "our PPO":  # few
                ax.plot(curves, color=color, alpha=0.4, lw=0.7)
            else:
                ax.fill_between(mean.index, mean - half, mean + half, color=color, alpha=0.15, lw=0)
        ax.axvline(curves.index[-1] / 2, color="grey", ls=":")
        ax.set(xlabel="steps", xlim=(0, None), ylim=(0, 11))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.legend(
            title=title, loc="lower left", bbox_to_anchor=(0, 1), alignment="left", fontsize="small", frameon=False
        )
    axes[0].set_ylabel("mean return of 100 episodes")
    return fig


if __name__ == "__main__":
    curves = load_references(("ppg", "ppo"))
    figure2 = draw_curves(curves[curves.source == AUTHORS], "global_step", 100e6, "Environment steps")
    figure2.savefig(REFERENCE / "figure2.png", dpi=200, bbox_inches="tight")
    draw_n_pi(scores_by_n_pi()).savefig(RESULTS / "page" / "n_pi.png", dpi=200, bbox_inches="tight")
    draw_bigfish(bigfish_blocks()).savefig(RESULTS / "page" / "bigfish_seeds.png", dpi=200)
    rows = pd.read_csv(RESULTS / "page" / "differences.csv")
    draw_differences(rows).savefig(RESULTS / "page" / "differences.png", dpi=200)
    draw_one_level().savefig(RESULTS / "page" / "one_level.png", dpi=200)
