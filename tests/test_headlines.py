"""The figures of README.md, results/README.md and GUIDE.md, computed again from the committed metrics."""

import math
import re

import pandas as pd
import pytest
import scipy.stats
import tyro
from conftest import ROOT

from benchmark import evaluate, report

RESULTS = ROOT / "benchmark" / "results"
README = (ROOT / "README.md").read_text().replace("\n", " ")
TEXT = (RESULTS / "README.md").read_text()
GUIDE = (ROOT / "benchmark" / "GUIDE.md").read_text()
CURVES = pd.read_csv(ROOT / "benchmark" / "reference" / "procgen_curves.csv.gz")
RETURN, VARIANCE, KL = "charts/mean_return_100", "losses/explained_variance", "losses/aux/kl_loss"


def table(beginning: str, text: str = TEXT) -> list[tuple[str, list[list[str]]]]:
    """The table of the results whose header has this beginning: of each row, its first cell, the numbers of others."""
    lines = text[text.index(f"\n| {beginning}") + 1 :].split("\n\n")[0].splitlines()
    rows = [line.replace("−", "-").strip("| ").split(" | ") for line in lines[2:]]
    return [(name, [re.findall(r"-?\d+\.\d+", cell) for cell in cells]) for name, *cells in rows]


def run(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / name / "metrics.csv").set_index("iteration")


def block(name: str) -> slice:
    return slice(*map(int, name.split("–")))


def mean(rows: pd.DataFrame, column: str) -> list[str]:
    """Nothing where a run has ended."""
    return [f"{x:.2f}" for x in [rows[column].mean()] if not math.isnan(x)]


def published(env_id: str, iterations: slice) -> list[str]:
    """The returns of the published PPO's seeds, rising. A row is the mean of 16 iterations."""
    step = 16_384 * (iterations.start + 15)
    rows = CURVES[(CURVES.algorithm == "ppo") & (CURVES.distribution_mode == "easy") & (CURVES.num_levels == 0)]
    return [f"{x:.2f}" for x in sorted(rows[(rows.env_id == env_id) & (rows.global_step == step)].episodic_return)]


def test_bigfish():
    runs = run("ppg_bigfish_1"), run("ppg_detach_bigfish_1"), run("ppo_bigfish_1")
    rows = dict(table("iterations | return, two networks"))
    for name, cells in rows.items():
        returns, variances = ([mean(x.loc[block(name)], column) for x in runs] for column in (RETURN, VARIANCE))
        assert cells == [*returns, published("bigfish", block(name)), *variances]
    dual, detach, ppo, seeds = ([f"{float(x):.1f}" for x in cell] for cell in rows["145–160"][:4])
    sentence = f"two networks get {dual[0]}, the single network {detach[0]}, our PPO {ppo[0]}"
    assert f"{sentence}, the published PPO runs {seeds[0]} to {seeds[2]}." in README
    detach, ppo, seeds = ([f"{float(x):.1f}" for x in cell] for cell in rows["177–191"][1:4])
    assert f"single network has {detach[0]}, our PPO {ppo[0]}, the published runs {seeds[0]} to {seeds[2]}." in README


def test_auxiliary_phases_of_bigfish():
    runs = {"two networks": run("ppg_bigfish_1"), "single network": run("ppg_detach_bigfish_1")}
    phases = table("network, phase after iteration")
    ends = [f"{name}, {k}" for name, ppg in runs.items() for k in ppg.index[ppg[KL].notna()]]
    assert [name for name, _ in phases] == ends
    for name, cells in phases:
        ppg, k = runs[name.split(", ")[0]], int(name.split(", ")[1])
        before, after = ppg.loc[k - 3 : k], ppg.loc[k + 1 : k + 4]
        assert cells[0] == [f"{ppg.loc[k, KL]:.4f}"]
        assert cells[1:] == [mean(rows, column) for column in (VARIANCE, RETURN) for rows in (before, after)]


def test_a_quarter_of_the_auxiliary_updates():
    runs = run("ppg_detach_bigfish_1"), run("ppg_128_bigfish_1")
    for name, cells in table("iterations | return, 512"):
        columns = [RETURN, VARIANCE, "losses/entropy"]
        assert cells == [mean(rows.loc[block(name)], column) for column in columns for rows in runs]


@pytest.mark.parametrize("env_id, seeds", [("starpilot", (1, 2)), ("fruitbot", (7, 8))])
def test_one_million_steps(env_id, seeds):
    ppg, ppo, seeds_of_ppo = [cells for name, cells in table("updates") if name.startswith(env_id)]
    for k, iterations in enumerate([slice(1, 16), slice(17, 32), slice(33, 48), slice(49, 61)]):
        assert ppg[k] == mean(run(f"ppg_detach_{env_id}_1").loc[iterations], RETURN)
        assert ppo[k] == mean(pd.concat([run(f"ppo_{env_id}_{seed}").loc[iterations] for seed in seeds]), RETURN)
        assert seeds_of_ppo[k] == published(env_id, iterations)[::2]


def test_phases_of_eight_iterations():
    """The published runs' last block ends an iteration later than ours."""
    for name, cells in table("updates, phases of 8"):
        env_id, kind = name.split(", ", 1)
        ppos = {"starpilot": ["ppo_starpilot_1", "ppo_starpilot_2"], "fruitbot": ["ppo_fruitbot_7", "ppo_fruitbot_8"]}
        names = {"PPG, N_π 8": [f"ppg_n8_{env_id}_1"], "PPG, N_π 32": [f"ppg_detach_{env_id}_1"], "PPO": ppos[env_id]}
        for cell, iterations in zip(cells, [slice(1, 16), slice(17, 32), slice(33, 47)], strict=True):
            if kind == "published PPO":
                assert cell == published(env_id, iterations)[::2]
            else:
                means = [run(folder).loc[iterations, RETURN].mean() for folder in names[kind]]
                assert cell == [f"{x:.2f}" for x in sorted(means)]


def test_n_pi():
    scores = report.published_scores().groupby(["setting", "iterations"]).score.agg(["min", "max", "count"])
    for name, cells in table("setting | 64", GUIDE):
        setting = "ppo" if "PPO" in name else "ppg_" + name.split(" (")[0].lower().replace("π", "pi").replace(" ", "_")
        rows = scores.loc[setting].loc[[64, 96, 128, 192, 384, 768, 1520]]
        assert cells == [[f"{x:.3f}" for x in sorted({low, high})] for low, high in rows[["min", "max"]].to_numpy()]
        assert set(rows["count"]) == {6 if "six runs" in name else 3 if "three runs" in name else 1}
    low, high = scores["min"].unstack(), scores["max"].unstack()
    above, below = low.gt(high.loc["ppg_n_pi_32"]), high.lt(low.loc["ppg_n_pi_32"])
    for n, end in (8, 288), (16, 560):  # GUIDE.md and results/README.md name these iterations
        assert above.loc[f"ppg_n_pi_{n}", 32:end].all() and not above.loc[f"ppg_n_pi_{n}", end + 16]
    assert not below.loc["ppg_n_pi_16"].any()
    for n, start in (32, 80), (8, 32):
        above_ppo = low.loc[f"ppg_n_pi_{n}"] > high.loc["ppo"]
        assert above_ppo.loc[start:].all() and not above_ppo.loc[start - 16]


def test_figure_2():
    """Three runs of each."""
    rows = CURVES[(CURVES.source == "openai/phasic-policy-gradient") & (CURVES.global_step > 97e6)]
    last = rows.groupby(["env_id", "algorithm"]).episodic_return.mean().unstack()
    assert len(last) == 16 and (last.ppg > last.ppo).all()
    assert "PPG ends ahead of PPO on 16 hard games (97M to 100M steps)." in README


def test_one_level():
    rows = pd.read_csv(RESULTS / "small" / "metrics.csv.gz")
    last = rows.groupby("run")[["global_step", "wall_time"]].max()
    last[RETURN] = rows[rows.global_step > 0.95 * 32_768].groupby("run")[RETURN].mean()
    last = last.reset_index()
    last[["env_id", "name", "seed"]] = last.run.str.split("__", expand=True)
    names = ["ppg_detach", "cleanrl_ppg", "ppg_procgen", "ppo_procgen"]
    for name, (_, cells) in zip(names, table("| starpilot, level 0")[1:], strict=True):
        runs = last[last.name == name]
        for k, env_id in enumerate(["starpilot", "dodgeball", "ninja"]):
            values = runs[runs.env_id == env_id][RETURN]
            half = scipy.stats.t.ppf(0.975, 4) * values.sem()
            assert len(values) == 5
            assert cells[k] == [f"{x:.2f}" for x in (values.mean(), values.mean() - half, values.mean() + half)]
        speed = (runs.global_step / runs.wall_time).median()
        assert f" | {speed:.0f} | {(runs.wall_time / 60).median():.2f} |" in TEXT


@pytest.mark.slow
def test_the_committed_agent(tmp_path, capsys):
    flags = ["--no-cuda", str(RESULTS / "small" / "starpilot_level_0"), "--levels", "train", "--out", str(tmp_path)]
    evaluate.main(tyro.cli(evaluate.Args, args=flags))
    [figure] = re.findall(r"easy train, 128 episodes: (\S+ ± \S+),", capsys.readouterr().out)
    assert f"gets {figure} over 128 episodes" in TEXT
    assert f"gets {figure}, random" in README
