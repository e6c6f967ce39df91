"""The tables and verdicts of README.md and results/README.md, computed again from the committed metrics."""

import itertools
import math
import re

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT
from scipy import stats

from benchmark import evaluate, report
from benchmark.reference.figures import AUTHORS, bigfish_blocks, scores_by_n_pi

RESULTS = ROOT / "benchmark" / "results"
FILES = RESULTS / "README.md", RESULTS / "page" / "runs.md", ROOT / "README.md"
TEXT, PAGE, README = (file.read_text().replace("−", "-") for file in FILES)
PUBLISHED = pd.read_csv(report.REFERENCE / "ppo_easy_updates.csv.gz")  # PPO, to update 160
WINDOWS = report.load_references(("ppo",)).query("distribution_mode == 'easy' and num_levels == 0")
NAMES = {  # of the runs in a column of the tables
    "PPG, two networks": "ppg_{}_1",
    "PPG, single network": "ppg_detach_(cpu_)?{}_.",
    "authors' PPG": r"authors_ppg_{}_\w+",
    "authors' PPG, N_π 8": "authors_ppg_n8_{}_.",
    "our PPG": "ppg_detach_cpu_{}_.",
    "the same, N_π 8": "ppg_(detach_n8_cpu|detach_n8_h200|n8)_{}_.",
    "our PPO": r"ppo_(cpu_|h200_)?{}_\d+",
    "our PPG, N_π 8": "ppg_detach_n8_h200_{}_.",  # and in differences.csv
    "our PPO, N_π 8": "ppo_h200_{}_.",
    "our PPG, one level, N_π 4": r"e_auxiliary_2__\d+",
    "authors' PPG, one level, N_π 4": r"authors_ppg__\d+",
    "our PPO, one level, N_π 4": "ppo__.",
    "our PPG, one level, N_π 8": r"{}__ppg_detach__\d+",
    "our PPG, one level, N_π 8, two networks": r"{}__ppg_procgen__\d+",
    "authors' PPG, one level, N_π 8, two networks": r"authors_dual_{}_level_\d+",
    "CleanRL's PPG": r"{}__cleanrl_ppg__\d+",
    "our PPO, one level": "{}__ppo_procgen__.",
    "our PPO, TensorFlow's Adam": "earlier_ppo_{}_.*",
}
RUNS = {file.parent.name: pd.read_csv(file, index_col="iteration") for file in sorted(RESULTS.glob("p*/metrics.csv"))}
RUNS["e_auxiliary_2__1"] = pd.read_csv(RESULTS / "small" / "starpilot_level_0" / "metrics.csv", index_col="iteration")
for file in sorted(RESULTS.rglob("metrics.csv.gz")):
    rows = pd.read_csv(file, index_col="iteration").groupby("run")
    RUNS |= {"earlier_" * (file.parent.name == "earlier") + run: x for run, x in rows}
BLOCKS = (17, 31), (25, 40), (33, 47), (49, 61), (81, 96), (113, 128), (161, 176)
STEPS = {f"{(first - 1) * 0.016384:.1f}–{last * 0.016384:.1f}M": (first, last) for first, last in BLOCKS}
STEPS |= {"0.52–0.79M": (33, 48), "0–16,384, first half": (1, 16), "0–32,768, all": (1, 32), "32,768, end": (31, 32)}
STEPS |= {"0–32,768, first half": (1, 32), "0–65,536, all": (1, 64), "65,536, end": (64, 64)}


def table(beginning: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the table whose header has this beginning, the header first."""
    header, _, *rows = text[text.index(f"\n| {beginning}") + 1 :].split("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in [header, *rows]]


def seeds(name: str, env_id: str, first: int, last: int) -> list[float]:
    """The mean of each run over these iterations; none of a run that ends before. What NAMES lack in a name is cut."""
    name = name.split(" (")[0]
    while name not in NAMES and ", " in name:
        name = name.rpartition(", ")[0]
    if name == "published PPO" and last > 160:  # here a row is the mean of 16 iterations
        return WINDOWS[(WINDOWS.env_id == env_id) & (WINDOWS.global_step == 16_384 * last)].episodic_return.tolist()
    if name == "published PPO":
        rows = PUBLISHED[(PUBLISHED.env_id == env_id) & PUBLISHED.nupdates.between(first, last)]
        return rows.groupby("run").eprewmean.mean().tolist()
    pattern = NAMES.get(name, name).format(env_id)
    runs = [run for run in RUNS if re.fullmatch(pattern, run) and RUNS[run].index.max() >= last]
    return [RUNS[run].loc[first:last, "charts/mean_return_100"].mean() for run in runs]


def verdict(x: list[float], y: list[float]) -> str:
    """The difference of two means with Welch's 95 % interval."""
    if min(len(x), len(y)) < 2:
        return "–"
    low, high = stats.ttest_ind(x, y, equal_var=False).confidence_interval()
    return f"{np.mean(x) - np.mean(y):+.2f} [{low:+.2f}, {high:+.2f}]"


def span(values: list[float]) -> str:
    """The lowest and the highest value, and how many there are."""
    ends = [f"{x:.2f}" for x in sorted({min(values), max(values)})] if values else []
    return f"{(' to ' if min(values) < 0 else '–').join(ends)} ({len(values)})" if values else "–"


def test_what_is_known():
    known, early = {}, {row[0]: row[1:] for row in table("game, 0.3–0.5M")}
    for row in pd.read_csv(RESULTS / "page" / "differences.csv").itertuples():
        x, y = (seeds(f"{name}, {row.setting}", row.game, *STEPS[row.steps]) for name in (row.a, row.b))
        cell = f"{row.difference:+.2f} [{row.low:+.2f}, {row.high:+.2f}]"
        assert (cell, len(x), len(y)) == (verdict(x, y), row.runs_of_a, row.runs_of_b)
        known[row.game, row.setting, f"{len(x)}, {len(y)}", row.steps, f"{np.mean(y):.2f}", row.a, row.b] = cell
        if row.steps == "0.3–0.5M" and row.b == "our PPO":
            assert early[f"{row.game}, {len(x)} v {len(y)}"][row.a != "our PPG"] == cell
    both = [(n[4], x) for n, x in known.items() if n[5:] == ("our PPG", "CleanRL's PPG")]
    means, cells = map(list, zip(*both, strict=True))  # by game, networks, window
    assert [row[1:] for row in table("ours -", PAGE)[1:]] == [cells[3 * n + k :: 6] for k in range(3) for n in (0, 1)]
    assert [row[1:] for row in table("ours - Clean")[1:]] == [means[:3], cells[:3], cells[3:6]]  # starpilot
    theirs = [[n[2], n[4], x] for n, x in known.items() if n[5:] == ("our PPG", "authors' PPG")]
    for group, counts in ([x[2] for x in theirs], [1, 7, 10]), (cells, [5, 16, 18]):  # exclude 0; are below it; all
        assert [sum(", -" in x for x in group), sum(x[0] == "-" for x in group), len(group)] == counts
    rows = [[theirs[k][0], *(f"{x} of {mean}" for _, mean, x in theirs[k : k + 3])] for k in (4, 7)]  # on one level
    assert [[row[1], *row[3:]] for row in table("training | runs")[1:]] == rows
    runs = [readmes_run(*when) for when in ((1, 32), (33, 64), (49, 64), (64, 64))]
    known = {*known.values(), *(verdict(x, y) for each in runs for x, y in itertools.permutations(each, 2))}
    drawn = bigfish_blocks().groupby(["steps", "group"]).episodic_return.sum().unstack(fill_value=0)
    names = ["our PPG, N_π 8", "our PPO, N_π 8", "published PPO"]
    for when, *cells in table("iterations | runs", PAGE)[1:]:
        values = [seeds(name, "bigfish", *map(int, when.split("–"))) for name in names]
        differences = [verdict(x, y) for x, y in itertools.combinations(values, 2)][:2]  # of PPG
        assert cells == [", ".join(str(len(x)) for x in values), *differences], when
        known.update(differences)
        assert drawn.loc[16_384 * int(when.split("–")[1])].tolist() == pytest.approx([sum(x) for x in values], abs=0.01)
    names = "{}__ppg_procgen__", "{}__ppg_detach__", "authors_dual_{}_level_", "{}__ppg_recipe__"
    batches = r"\d+", "(1[1-9]|20)", r"(\d|10)"  # all, the new ten, the first
    pairs = [(name + batch, "{}__cleanrl_ppg__" + batch) for batch in batches for name in names]
    pairs += [(names[1] + batches[0], r"{}__cleanrl_ppg__([6-9]|1\d|20)")]  # without those on another CPU
    pairs += [(names[3] + batch, names[1] + batch) for batch in batches]
    pairs += [("e_auxiliary_2__" + batch, "authors_ppg__" + batch) for batch in ("[1-6]", r"([7-9]|1\d)")]
    for label, *row in table("iterations | CleanRL's", PAGE)[1:]:
        when = [int(x) for x in re.findall(r"\d+", label)]
        cells = [verdict(*(seeds(name, "starpilot", *when) for name in pair)) for pair in pairs]
        assert row == [f"{np.mean(seeds(pairs[0][1], 'starpilot', *when)):.2f}", *cells[:3]]
        assert when != [1, 16] or f"(CleanRL's: {row[0]})" in README and f"(CleanRL's: {row[0]})" in TEXT
        known |= {*cells, verdict(*(seeds(name, "ninja", *when) for name in pairs[1]))}
    x, y = (seeds(name, "starpilot", 25, 40) for name in ("our PPO", "published PPO"))
    assert (len(x), sum(a < min(y) for a in x), max(x) < max(y)) == (8, 5, True)
    known.add(verdict(x + seeds(list(NAMES)[-1], "starpilot", 25, 40), y))
    assert not {*re.findall(r"[-+]\d\S+ \[\S+ \S+\]", " ".join((README + TEXT + PAGE).split()))} - known
    assert re.findall("ahead|behind|undecided|alike", README + TEXT) == ["undecided"]
    undecided = re.findall(r"\[(\S+), (\S+)\]", README.split("undecided")[1].split(". ")[0])
    assert all(float(low) < 0 < float(high) for low, high in undecided) and len(undecided) == 1


def test_returns_of_each_run():
    [header, *rows] = table("game, iterations", PAGE)
    for where, *cells in rows:
        env_id, first, last = re.match(r"(\w+), (\d+)–(\d+)", where).groups()
        for name, cell in zip(header[1:], cells, strict=True):
            values = sorted(seeds(name, env_id, int(first), int(last)))
            assert cell == (", ".join(f"{x:.2f}" for x in values) or "–"), (where, name)


def readmes_run(first: int, last: int) -> pd.Series:
    names = "authors_ppg", "e_auxiliary_0", "e_auxiliary_2", "e_policy_3", "n_iteration_16", "ppo"
    return pd.Series({name: seeds(rf"{name}__\d+", "", first, last) for name in names})


def test_readmes_run():
    ends, means = readmes_run(64, 64), readmes_run(49, 64)
    values = {name: ", ".join(f"{x:.2f}" for x in sorted(ends[name])) for name in ends.index}
    for (what, *cells), name in zip(table("README's run", PAGE)[2:], ends.index.drop("e_auxiliary_2"), strict=True):
        assert name in re.sub("[- ]", "_", what.lower().replace("'", "")) and cells[0] == values[name]
        assert cells[1:] == [verdict(x[name], x.e_auxiliary_2) for x in (ends, means)]
    assert values["e_auxiliary_2"] in PAGE and all(span(ends[x]) in README for x in ends.index[[1, 2, 3, 5]])


def test_every_late_beginning():
    curves = pd.read_csv(report.REFERENCE / "procgen_curves.csv.gz")
    settings = curves.distribution_mode + curves.num_levels.astype(str)  # of train-procgen's PPO: hard0 and others
    curves["algorithm"] = curves.algorithm.where(curves.source == AUTHORS, settings)
    curves["block"] = np.ceil(curves.global_step / 2**20).astype(int)  # 16 iterations
    rows = curves.groupby(["block", "env_id", "algorithm", "run"]).episodic_return.mean().unstack([2, 3])
    settings = ["ppg", "ppg_e_aux_6", "ppg_e_pi_1", "ppg_n_pi_32"], "ppg_single", "ppg_n_pi_8"
    for (_, chance, *cells), setting in zip(table("16 hard games", PAGE)[1:], settings, strict=True):
        for block, cell in zip([2, 3, 4, 6, 10, 95], cells, strict=True):
            ppg, ppo = rows.loc[block, setting], rows.loc[block, ["ppo", "hard0"]]
            assert chance == f"{16 / math.comb(ppg.shape[1] + 6, 6):.1g}"
            below, above = ppg.max(axis=1) < ppo.min(axis=1), ppg.min(axis=1) > ppo.max(axis=1)
            assert cell == f"{sum(below)} ({sum(above)})", (setting, block)
        assert (ppg.mean(axis=1) > ppo.mean(axis=1)).all()  # at the end
        assert setting != settings[0] or f"on [{sum(above)} of 16 games]" in README
    counts = [cell.strip(")").split(" (") for cell in table("16 hard games", PAGE)[1][2:]]
    assert [row[1:] for row in table("16 hard games")[1:]] == [[counts[k][m] for k in (0, 1, 4, 5)] for m in (0, 1)]
    stands = []  # ours: lower than theirs among the runs of PPO, could be, higher, could be
    for where, *cells in table("signs, N_π", PAGE)[1:]:
        game, n_pi, *window = re.match(r"(\w+), N_π (\d+), (\d+)–(\d+)", where).groups()
        theirs, ours = {"8": ("ppg_n_pi_8", "the same, N_π 8"), "32": ("ppg_single", "PPG, single network")}[n_pi]
        values = [rows.loc[np.ceil(int(window[1]) / 16), game][name].tolist() for name in (theirs, "ppo")]
        values += [seeds(name, game, *map(int, window)) for name in (ours, "our PPO", "published PPO")]
        assert cells == list(map(span, values)), where
        pairs = [values[:2], (values[2], values[3] + values[4])]
        theirs, ours = (int(min(x) > max(y)) - int(max(x) < min(y)) for x, y in pairs)
        stands.append([ours < theirs, theirs > -1, ours > theirs, theirs < 1])
    assert np.sum(stands, 0).tolist() == [8, 11, 0, 4] and len(stands) == 13
    names = {"32": ("authors' PPG", "PPG, single network"), "8": ("authors' PPG, N_π 8", "the same, N_π 8")}
    names["32, two networks"] = "none", "PPG, two networks"
    header, *rows = table("game, N_π |", PAGE)
    for (where, *cells), k in itertools.product(rows, range(1, len(header))):
        (game, n_pi), window = where.split(", ", 1), STEPS[header[k]]
        theirs, ours, *ppo = (seeds(x, game, *window) for x in (*names[n_pi], "our PPO", "published PPO"))
        ppg, ppo = theirs + ours, sum(ppo, [])
        stands = ppg and ("below" if max(ppg) < min(ppo) else "above" if min(ppg) > max(ppo) else "among")
        assert cells[k - 1] == (f"{stands}, {len(ours)} v {len(ppo)}" if ours else "–"), (where, header[k])
    for game in ("bigfish", "starpilot", "fruitbot"):
        lead = np.mean(seeds("our PPO", game, 17, 31)) - np.mean(seeds("authors' PPG", game, 17, 31))
        assert f"| -{lead / (evaluate.RANGES.r_max - evaluate.RANGES.r_min)[game, 'easy']:.3f} |" in TEXT


def test_n_pi():
    scores = scores_by_n_pi().groupby(["setting", "iterations"]).score.agg(["min", "max", "count"])
    [header, *rows] = table("setting | 1–2M", PAGE)
    blocks = [16 * round(int(cell.split("–")[1][:-1]) / 1.048576) for cell in header[1:]]
    for name, *cells in rows:
        setting = {"PPO": "ppo", "single": "ppg_single"}.get(name.split()[0], f"ppg_{'_'.join(name.split()[:2])}")
        spans = scores.loc[setting.replace("π", "pi").lower()].loc[blocks]
        assert cells == ["–".join(f"{x:.3f}" for x in sorted({x.min, x.max})) for x in spans.itertuples()]
        assert set(spans["count"]) == {6 if "six runs" in name else 3 if "three runs" in name else 1}
    lowest, highest, count = (scores[x].unstack(0) for x in ("min", "max", "count"))
    one_run = [setting for setting in count if count[setting].max() == 1]
    assert highest.ppg_e_pi_3[32] < lowest.ppo[32]
    above, below = lowest[one_run].gt(highest.ppg_n_pi_32, axis=0), highest[one_run].lt(lowest.ppg_n_pi_32, axis=0)
    assert above.ppg_n_pi_8.loc[32:288].all() and above.ppg_n_pi_16.loc[32:560].all()
    assert below.loc[1520, ["ppg_n_pi_8", "ppg_n_pi_4", "ppg_n_pi_2"]].all() and below.ppg_n_pi_8.sum() == 45
    assert above.sum()[below.sum() == 0].to_dict() == {"ppg_n_pi_16": 65, "ppg_e_aux_9": 74} and above.shape == (95, 13)


def test_the_pages_are_what_their_commands_make(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "draw_curves", lambda *_: None)
    monkeypatch.setattr(report, "picture", lambda _, path, caption: f"![{path.name}]({path.name}.png)\n\n*{caption}*")
    steps = {"bigfish": 2_097_152, "starpilot": 786_432, "fruitbot": 786_432, "bossfight": 1_572_864, "one_level": None}
    for name, step in steps.items():
        paths = RESULTS.glob(f"pp*_{name}_*" if step else "small")
        report.main(report.Args(tuple(paths), out=tmp_path / name, step=step))
        assert (tmp_path / name / "report.md").read_text() == (RESULTS / "page" / name / "report.md").read_text()


@pytest.mark.slow
def test_the_committed_agent(tmp_path, capsys):
    evaluate.main(evaluate.Args((RESULTS / "small" / "starpilot_level_0",), ("train",), out=tmp_path, cuda=False))
    [figure] = re.findall(r"easy train, 128 episodes: (\S+ ± \S+),", capsys.readouterr().out)
    assert f"{figure} over 128 episodes" in README
