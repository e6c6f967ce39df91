"""The tables of results/README.md and GUIDE.md, computed again from the committed metrics."""

import re

import pandas as pd
import pytest
import tyro
from conftest import ROOT

from benchmark import evaluate, report
from benchmark.reference.figures import scores_by_n_pi

RESULTS = ROOT / "benchmark" / "results"
TEXT = (RESULTS / "README.md").read_text()
RUNS = {file.parent.name: pd.read_csv(file, index_col="iteration") for file in RESULTS.glob("p*/metrics.csv")}
PPO = report.load_references(("ppo",)).query("distribution_mode == 'easy' and num_levels == 0")
RETURN, VARIANCE, KL = "charts/mean_return_100", "losses/explained_variance", "losses/aux/kl_loss"


def table(beginning: str, text: str = TEXT) -> dict[str, list[list[str]]]:
    """The table whose header has this beginning: for the first cell of each row, the numbers in its other cells."""
    lines = text[text.index(f"\n| {beginning}") + 1 :].split("\n\n")[0].splitlines()
    rows = [line.replace("−", "-").strip("| ").split(" | ") for line in lines[2:]]
    return {name: [re.findall(r"-?\d+\.\d+", cell) for cell in cells] for name, *cells in rows}


def means(names: list[str], first: int, last: int, column: str = RETURN) -> list[str]:
    """The mean of each run over these iterations, rising; none of a run that has ended."""
    values = pd.Series([RUNS[name].loc[first:last, column].mean() for name in names])
    return [f"{x:.2f}" for x in values.dropna().sort_values()]


def published(env_id: str, first: int, last: int) -> list[str]:
    """The returns of the published PPO's seeds, rising. A row is the mean of 16 iterations."""
    rows = PPO[(PPO.env_id == env_id) & (PPO.global_step == 16_384 * (first + 15))]
    return [f"{x:.2f}" for x in rows.episodic_return.sort_values()]


def test_bigfish():
    dual, detach, small, ppo = "ppg_bigfish_1", "ppg_detach_bigfish_1", "ppg_128_bigfish_1", "ppo_bigfish_1"
    for block, cells in table("iterations | return, two networks").items():
        span = tuple(map(int, block.split("–")))
        returns, variances = ([means([x], *span, column) for x in (dual, detach, ppo)] for column in (RETURN, VARIANCE))
        assert cells == [*returns, published("bigfish", *span), *variances]
    for block, cells in table("iterations | return, 512").items():
        span, columns = tuple(map(int, block.split("–"))), [RETURN, VARIANCE, "losses/entropy"]
        assert cells == [means([x], *span, column) for column in columns for x in (detach, small)]
    phases = [(name, k, kl) for name in (dual, detach) for k, kl in RUNS[name][KL].dropna().items()]
    for (name, k, kl), cells in zip(phases, table("network, phase after iteration").values(), strict=True):
        spans = [(k - 3, k), (k + 1, k + 4)]
        around = [means([name], *span, column) for column in (VARIANCE, RETURN) for span in spans]
        assert cells == [[f"{kl:.4f}"], *around]


@pytest.mark.parametrize("machine, seeds", [("h200", "[456]"), ("cpu", "*")])
def test_seeds(machine, seeds, tmp_path):
    for block, cells in table(f"iterations | return, PPG on one {machine.upper()}").items():
        span = tuple(map(int, block.split("–")))
        ours = [means([x for x in RUNS if f"{name}_{machine}_bigfish" in x], *span) for name in ("n8", "ppo")]
        assert cells == [*ours, published("bigfish", *span) if span[1] % 16 == 0 else []]
    runs, flags = RESULTS.glob(f"*_{machine}_bigfish_{seeds}"), "--thresholds 3 5 --reps 2 --out"
    report.main(tyro.cli(report.Args, args=[*map(str, runs), *flags.split(), str(tmp_path)]))
    returns, differences, steps, *_ = re.findall(r"(?ms)^\| game.*?\n\n", (tmp_path / "report.md").read_text())
    assert returns in TEXT and differences in TEXT and steps in TEXT


def test_differences():
    _, curves, _ = report.load_runs(tuple(RESULTS.glob("*_h200_bigfish_*")))
    for step in (1_048_576, 1_572_864, 2_097_152):
        [row] = report.difference_table(report.value_at_step(curves, step, 262_144), "ppo").itertuples()
        assert f"| {step:,} | {row.difference} | {row.seeds} |" in TEXT


@pytest.mark.parametrize("beginning", ["iterations | 1–16", "iterations, phases", "iterations, all 96"])
def test_early_iterations(beginning):
    header = TEXT[TEXT.index(f"\n| {beginning}") + 1 :].splitlines()[0]
    blocks = [tuple(map(int, block)) for block in re.findall(r"(\d+)–(\d+)", header)]
    runs = {"PPG, N_π 8": ("ppg_n8", "ppg_detach_n8_cpu"), "PPG, N_π 32": ("ppg_detach",), "PPO": ("ppo",)}
    for name, cells in table(beginning).items():
        env_id, label = name.split(", ", 1)
        wanted = [f"{run}_{env_id}" for run in runs.get(label, ())]
        names = [name for name in RUNS if name.rpartition("_")[0] in wanted]
        assert cells == [means(names, *block) if names else published(env_id, *block)[::2] for block in blocks], name


def test_n_pi():
    scores = scores_by_n_pi().groupby(["setting", "iterations"]).score.agg(["min", "max", "count"])
    for name, cells in table("setting | 64", (ROOT / "benchmark" / "GUIDE.md").read_text()).items():
        setting = "ppo" if "PPO" in name else "ppg_" + name.split(" (")[0].lower().replace("π", "pi").replace(" ", "_")
        rows = scores.loc[setting].loc[[64, 96, 128, 192, 384, 768, 1520]]
        assert cells == [[f"{x:.3f}" for x in sorted({low, high})] for low, high in rows[["min", "max"]].to_numpy()]
        assert set(rows["count"]) == {6 if "six runs" in name else 3 if "three runs" in name else 1}


def test_one_level():
    runs, curves, _ = report.load_runs((RESULTS / "small",))
    values = report.value_at_step(curves, 32_768, 0.05 * 32_768).groupby(["group", "env_id"]).episodic_return
    rows = list(table("| starpilot, level 0").values())[1:]
    for name, cells in zip(["ppg_detach", "cleanrl_ppg", "ppg_procgen", "ppo_procgen"], rows, strict=True):
        for env_id, cell in zip(["starpilot", "dodgeball", "ninja"], cells[:3], strict=True):
            mean, _, low, high = re.findall(r"-?\d+\.\d+", report.seeds_cell(values.get_group((name, env_id)), 2))
            assert cell == [mean, low, high]
        group = runs[runs.group == name]
        speed, minutes = (group.last_step / group.seconds).median(), group.seconds.median() / 60
        assert len(group) == 15 and f" | {speed:.0f} | {minutes:.2f} |" in TEXT


@pytest.mark.slow
def test_the_committed_agent(tmp_path, capsys):
    flags = ["--no-cuda", str(RESULTS / "small" / "starpilot_level_0"), "--levels", "train", "--out", str(tmp_path)]
    evaluate.main(tyro.cli(evaluate.Args, args=flags))
    [figure] = re.findall(r"easy train, 128 episodes: (\S+ ± \S+),", capsys.readouterr().out)
    assert f"gets {figure} over 128 episodes" in TEXT
