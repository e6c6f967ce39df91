"""Two pictures of the published curves alone:

    python -m benchmark.reference.figures

benchmark/reference/figure2.png is Figure 2 of the PPG paper: 16 hard games, 100M steps. benchmark/results/page/n_pi.png
has the mean score over these games for each N_pi.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns

from benchmark.report import COLORS, OTHER_COLORS, REFERENCE, WIDTH, draw_curves, load_references, normalized

AUTHORS = "openai/phasic-policy-gradient"


def scores_by_n_pi() -> pd.DataFrame:
    """Mean score over the 16 games of each run of PPG's authors, in blocks of 16 iterations (of 65,536 steps)."""
    curves = pd.read_csv(REFERENCE / "procgen_curves.csv.gz")
    curves = normalized(curves[curves.source == AUTHORS], "hard")
    curves["iterations"] = 16 * np.ceil(curves.global_step / 2**20).astype(int)  # a block has one or two rows
    curves["setting"] = curves.algorithm.replace(["ppg", "ppg_e_aux_6", "ppg_e_pi_1"], "ppg_n_pi_32")  # the default
    return curves.groupby(["setting", "iterations", "algorithm", "run"], as_index=False).score.mean()


def draw_n_pi(rows: pd.DataFrame) -> plt.Figure:
    """Scores for each N_pi, and their difference from the default's mean. Bands: from the lowest to the highest run."""
    default = rows[rows.setting == "ppg_n_pi_32"].groupby("iterations").score.mean()
    settings = [*(f"ppg_n_pi_{n}" for n in (32, 16, 8, 4, 2)), "ppo"]
    colors = [COLORS["PPG ("], *OTHER_COLORS[:4], COLORS["PPO ("]]
    look = {"hue_order": settings, "palette": colors, "errorbar": ("pi", 100)}
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.2), layout="constrained")
    for ax, y, base in zip(axes, ["score", "difference from N_pi 32"], [0, rows.iterations.map(default)], strict=True):
        sns.lineplot(x=rows.iterations, y=rows.score - base, hue=rows.setting, ax=ax, legend=ax is axes[0], **look)
        ax.set(ylabel=y, xscale="log", xlim=(16, 1520), xticks=2 ** np.arange(4, 11), xticklabels=2 ** np.arange(4, 11))
    return fig


if __name__ == "__main__":
    curves = load_references(("ppg", "ppo"))
    figure2 = draw_curves(curves[curves.source == AUTHORS], "global_step", 100e6, "Environment steps")
    figure2.savefig(REFERENCE / "figure2.png", dpi=200, bbox_inches="tight")
    page = REFERENCE.parent / "results" / "page"
    draw_n_pi(scores_by_n_pi()).savefig(page / "n_pi.png", dpi=200, bbox_inches="tight")
