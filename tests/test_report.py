"""benchmark/report.py: its numbers against scipy, rliable and published figures, its groups, and odd or broken runs."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from PIL import Image
from rliable import metrics
from torch.utils.tensorboard import SummaryWriter

from benchmark import report

BATCH = 16_384


def write_run(root, env_id="starpilot", exp_name="ppg_procgen", seed=1, *, num_rows=100, **flags) -> Path:
    """A run folder as the training scripts write it, with returns of seed + 1, 2, 3... and hours of 100 iterations."""
    args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "num_envs": 64, "num_steps": 256, "num_levels": 0}
    args |= {"distribution_mode": "easy", "total_timesteps": num_rows * BATCH} | flags
    k = np.arange(1, num_rows + 1)
    columns = {"global_step": BATCH * k, "wall_time": 36 * k, "charts/mean_return_100": seed + k}
    columns["eval/test_return"] = np.where(k % 10, np.nan, 0.6 * k)
    folder = Path(root, f"{env_id}__{exp_name}__{seed}")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"args": args, "num_ranks": 1, "commit": "abc"}))
    pd.DataFrame(columns).to_csv(folder / "metrics.csv", index=False)
    return folder


def write_events(folder, returns) -> None:
    """TensorBoard events as CleanRL writes them: a return an episode, here every 10 steps."""
    with SummaryWriter(folder) as writer:
        for k, value in enumerate(returns):
            writer.add_scalar("charts/episodic_return", np.float32(value), 10 * k)


def curve(values, steps, seed=1) -> pd.DataFrame:
    fixed = {"own": True, "group": "a", "env_id": "maze", "seed": seed, "run": str(seed)}
    return pd.DataFrame({"global_step": steps, "wall_time": steps, "episodic_return": values, **fixed})


def make_page(out, *paths, **arguments) -> str:
    report.main(report.Args(paths=paths, out=out, **{"reps": 50} | arguments))
    return (out / "report.md").read_text()


def rows_of(page: str, heading: str) -> list[list[str]]:
    lines = page.split(heading, 1)[1].split("\n|", 1)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]]


def test_published_mean_normalized_scores():
    easy, hard = "PPO (openai/train-procgen)", "{} (openai/phasic-policy-gradient)"
    names = [hard.format(name) for name in ("PPO", "PPG", "PPG kl", "PPG single")]
    curves = report.load_references(("ppg", "ppo", "ppg_kl", "ppg_single"))
    for mode, num_levels, step, window, groups, printed in [
        ("easy", 0, 25e6, 1e6, [easy], [0.641]),
        ("easy", 200, 25e6, 1e6, [easy, easy + report.UNSEEN], [0.596, 0.354]),
        ("hard", 0, 25e6, 2e6, names, [0.248, 0.467, 0.478, 0.410]),
        ("hard", 0, 100.1e6, 5e6, names, [0.577, 0.756, 0.755, 0.754]),
    ]:
        setting = curves[(curves.distribution_mode == mode) & (curves.num_levels == num_levels)]
        scores = report.normalized(report.value_at_step(setting, step, window), mode)
        games = sorted(set(report.RANGES.env_id))
        matrices = [report.score_matrix(scores[scores.group == group], games) for group in groups]
        assert [(*matrix.shape, round(matrix.mean(), 3)) for matrix in matrices] == [(3, 16, x) for x in printed]


def test_value_at_step():
    curves = pd.concat([curve([1.0, 2, 3, 4], [100, 200, 300, 400]), curve([5.0, 6], [100, 200], seed=2)])
    values = report.value_at_step(curves, step=400, window=200)
    assert values.run.tolist() == ["1"] and values.episodic_return.tolist() == [3.5]  # 200 is not in (200, 400]
    assert report.value_at_step(curves, step=250, window=100).episodic_return.tolist() == [2, 6]
    assert report.value_at_step(curves, step=290, window=10).episodic_return.tolist() == [2, 6]  # the last row before
    assert report.value_at_step(curves, step=301, window=150).episodic_return.tolist() == [2.5]  # one ends at 200
    rare = curve([7.0], [100]).assign(group="a" + report.UNSEEN)  # an evaluation, after which the run goes on
    assert report.value_at_step(pd.concat([curves, rare]), 400, 100).episodic_return.tolist() == [4, 7]


def test_published_rows_that_can_be_compared_and_are_drawn_in_the_middle_of_their_steps():
    ends = {1: [100, 200, 300, 400, 500], 2: [150, 300, 450], 3: [410]}  # the third does not go on to 420
    published = pd.concat([curve(0.0, steps, seed) for seed, steps in ends.items()])
    assert [report.step_to_compare_at(step, published) for step in (420, 50)] == [(300, 150), (50, 0)]
    curves = curve([1.0, 2, 3], [100, 200, 300]).assign(own=False)
    x = report.draw_curves(curves, "global_step", 300, "").axes[0].lines[0].get_xdata()
    assert x[[0, -1]].tolist() == [51, 252]  # of bins with 3 steps


def test_tables_are_those_of_scipy_and_rliable():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, 16)).round(1)  # rounded, so that there are ties

    def statistics(x, y):
        return x.mean(), scipy.stats.trim_mean(x, 0.25, axis=None), np.mean((np.sign(x[:, None] - y) + 1) / 2)

    samples = [[np.take_along_axis(z, rng.integers(5, size=z.shape), 0) for z in (x, y)] for _ in range(4000)]
    intervals = np.quantile([statistics(*sample) for sample in samples], [0.025, 0.975], axis=0).T
    [ours, other] = rows_of("#\n" + report.aggregate_table({"ours": x, "PPO": y}, "ppo", reps=4000), "#")[1:]
    for cell, value, interval in zip(ours[2:], statistics(x, y), intervals, strict=True):
        point, *ends = map(float, re.findall(r"-?\d\.\d+", cell))
        assert point == pytest.approx(value, abs=1e-3) and ends == pytest.approx(interval, abs=0.1 * np.ptp(interval))
    assert ours[:2] == ["ours", "5"] and other[-1] == "–"
    assert report.estimate([x[:2]], metrics.aggregate_mean, reps=50) == f"{x[:2].mean():.3f}"  # of two: no interval
    low, high = scipy.stats.ttest_1samp([1.0, 2.0, 6.0], 0).confidence_interval(0.95)
    assert report.seeds_cell(pd.Series([1.0, 2, 6]), 2) == f"3.00 ± 2.65 [{low:.2f}, {high:.2f}] (3)"
    assert report.seeds_cell(pd.Series([6.0, 1]), 2) == "6.00, 1.00 (2)"


def test_difference_from_the_baseline():
    values = {"ppg": [4.0, 5, 9], "ppo": [1.0, 3], "one seed": [2.0], "PPO (openai/x)": [2.0, 2, 3]}
    rows = [(name != "PPO (openai/x)", "maze", name, value) for name in values for value in values[name]]
    table = report.difference_table(pd.DataFrame(rows, columns=["own", "env_id", "group", "episodic_return"]), "ppo")
    assert set(table.group) == {"ppg", "PPO (openai/x)"} and set(table.baseline) == {"ppo"}
    variances = np.array([7 / 3, 2 / 2])  # Welch: of the two means
    freedom = variances.sum() ** 2 / (variances**2 / [2, 1]).sum()
    half = scipy.stats.t.ppf(0.975, freedom) * variances.sum() ** 0.5
    assert table.set_index("group").difference["ppg"] == f"+4.00 [{4 - half:+.2f}, {4 + half:+.2f}]"
    groups = ["my_ppo", "ppo", "ppo" + report.UNSEEN]
    assert [report.find_baseline(group, groups, "ppo") for group in ("x", "x" + report.UNSEEN)] == groups[1:]
    groups_of_devices = ["ppo --device cpu", "ppo --device gpu, mixed scripts"]
    assert report.find_baseline("ppg --a 1 --device gpu", groups_of_devices, "ppo") == groups_of_devices[1]
    assert report.find_baseline("x", groups, "my") == "my_ppo" and report.find_baseline("x", groups, "pgg") is None


@pytest.mark.parametrize("x", ["global_step", "wall_time"])
def test_what_is_drawn(x):
    steps = np.arange(1.0, 101)
    curves = pd.concat([curve(np.full(n, float(n)), steps[:n], seed=n) for n in (40, 80, 100)])
    [ax] = report.draw_curves(curves, x, 100, "").axes.flat
    mean, *runs = (line.get_xydata() for line in ax.lines if len(line.get_xdata()))
    assert mean == pytest.approx(np.column_stack([steps[:40], np.full(40, 220 / 3)]))
    for n, run in zip((100, 40, 80), runs, strict=True):  # in the order of names
        assert run == pytest.approx(np.column_stack([steps[:n], np.full(n, n)]))
    [band] = ax.collections
    corners = {(x, round(y, 3)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(k, round(220 / 3 + sign * 30.55050, 3)) for k in steps[:40] for sign in (-1, 1)}


def test_runs_are_found_once_and_read(tmp_path):
    folder = write_run(tmp_path / "sweep" / "runs", "maze", "wide", 3, num_levels=200, distribution_mode="hard")
    write_events(folder / "wandb", [1])  # inside a run folder: not a run
    with open(folder / "metrics.csv", "a") as file:
        file.write("1654784,3636,10")  # the running script has not yet written all of 104
    runs, curves, notes = report.load_runs((tmp_path, tmp_path / "sweep", folder))
    assert runs.iloc[0][["group", "env_id", "seed", "num_levels"]].tolist() == ["wide", "maze", 3, 200]
    assert runs.last_step.tolist() == [100 * BATCH] and notes == []
    assert curves.group.value_counts().to_dict() == {"wide": 100, "wide, unseen levels": 10}


def test_cleanrl_events_become_means_of_the_last_100_episodes(tmp_path):
    returns = np.random.default_rng(0).normal(5, 2, 300)
    write_events(tmp_path / "bigfish__ppo__7__1700000000", returns)
    runs, curves, _ = report.load_runs((tmp_path,))
    assert runs.iloc[0][["group", "env_id", "seed"]].tolist() == ["ppo (TensorBoard)", "bigfish", 7]
    last_100 = [returns[max(0, k - 99) : k + 1].mean() for k in range(300)]
    assert curves.episodic_return.tolist() == pytest.approx(last_100, abs=1e-5)
    assert curves.global_step.tolist() == [10 * k for k in range(300)]


def test_broken_and_foreign_runs_are_named_and_do_not_stop_the_others(tmp_path):
    write_run(tmp_path / "good")
    (tmp_path / "link").symlink_to(write_run(tmp_path.with_name("elsewhere"), seed=3))  # a link is followed
    write_run(tmp_path / "good", seed=4).joinpath("metrics.csv").write_text("global_step,wall_time\n256,1\n")
    bad = [write_run(tmp_path / "bad", seed=10 + k) for k in range(4)]
    (bad[0] / "metrics.csv").write_bytes(b"\xff\xfe\x00" * 99)
    (bad[1] / "metrics.csv").unlink()
    (bad[2] / "metrics.csv").write_text("global_step,wall_time\n16384")
    (bad[3] / "args.json").write_text('{"args": {')
    page = make_page(tmp_path / "out", tmp_path)
    assert all(f"- {folder}: left out" in page for folder in bad) and page.count("left out") == len(bad)
    [_, *rows] = rows_of(page, "## Runs")
    assert [row[8:] for row in rows] == [["3", "1,638,400", "455"], ["1, 4", "1,638,400, 256", "455, 256"]]
    assert re.search(r"no episode has finished yet: \S+starpilot__ppg_procgen__4 \(at 256\)\n", page)
    with pytest.raises(SystemExit, match="report.py: no such file or folder: .*misspelt"):
        make_page(tmp_path / "out", tmp_path, tmp_path / "misspelt")


def test_early_ends_are_said(tmp_path):
    levels = {"num_levels": 99}  # too few for scores, and without published runs
    write_run(tmp_path, "maze", seed=1, total_timesteps=101 * BATCH - 1, **levels)  # it has ended: no whole batches
    write_run(tmp_path, "maze", seed=2, num_rows=30, total_timesteps=100 * BATCH, **levels)
    write_run(tmp_path / "again", "maze", seed=1, total_timesteps=101 * BATCH - 1, **levels)
    page = make_page(tmp_path / "out", tmp_path, step=50 * BATCH)
    assert rows_of(page, "### Return at")[1][1:] == ["ppg_procgen, mixed folders, repeated seeds", "50.00 (1)"]
    early, absent, baseline = page.split("## Notes")[1].strip().split("\n\n")
    path = os.path.relpath(tmp_path / "maze__ppg_procgen__2")
    assert early.endswith(f"still running: {path} (at 491,520)")
    assert absent.endswith(f"no value at 819,200 steps: {path} (at 491,520)")
    assert baseline.endswith("no baseline ppo") and "Normalized" not in page and "from 778,240 to 819,200" in page


def test_flags_that_change_the_numbers_make_groups_and_old_names_do_not(tmp_path):
    write_run(tmp_path / "a", "maze", learning_rate=5e-4, start_level=3, cuda=True)
    write_run(tmp_path / "b", "maze", learning_rate=1e-4, start_level=3, cuda=False)
    write_run(tmp_path / "c", "miner", start_level=4, num_rows=50)  # of a script without learning_rate
    write_run(tmp_path / "a", "maze", "x", anneal_lr=True, aux_dtype="float32")
    write_run(tmp_path / "b", "maze", "x", anneal_lr=True, aux_dtype="bfloat16", num_rows=50)
    write_run(tmp_path / "a", "maze", "y", 1, n_iteration=32, vf_coef=0.5, clip_vloss=False, tf32=True)  # before 0.11
    write_run(tmp_path / "a", "maze", "y", 2, n_iteration=32, vf_coef=1.0)
    runs, _, notes = report.load_runs((tmp_path,))
    groups = ["ppg_procgen", "ppg_procgen --learning-rate 0.0001", "ppg_procgen --learning-rate 0.0005"]
    groups += ["x --total-timesteps 1638400 --aux-dtype float32", "x --total-timesteps 819200 --aux-dtype bfloat16"]
    assert sorted(runs.group) == [*groups, "y", "y"] and notes == []


def test_runs_of_one_group_that_differ_are_never_pooled_without_a_word(tmp_path):
    def groups(*runs):
        for seed, (folder, script, record) in enumerate(runs):
            file = write_run(tmp_path / folder, "maze", "x", seed % 2) / "args.json"
            (file.parent / "x.py").write_text(script)
            file.write_text(json.dumps(json.loads(file.read_text()) | record))
        found = set(report.load_runs((tmp_path,))[0].group)
        shutil.rmtree(tmp_path / "a")
        return found

    new, torch = {"device": "cpu"}, {"packages": {"torch": "2.13", "pip": "1"}}
    assert groups(("a", "y = x  # comment", new), ("a", "y = x", new)) == {"x"}
    assert groups(("a", "y = x", new), ("a", "y = -x", new)) == {"x, mixed scripts"}
    assert groups(("a", "", new), ("a", "", {"device": "NVIDIA H200"})) == {"x --device cpu", "x --device gpu"}
    assert groups(("a", "", {"device": "NVIDIA H100"}), ("a", "", {"device": "NVIDIA H200"})) == {"x, mixed devices"}
    assert groups(("a", "", torch), ("a", "", {"packages": {"torch": "2.12"}})) == {"x, mixed packages"}
    assert groups(("a/1", "", new), ("a/2", "", new), ("a/3", "", new)) == {"x, mixed folders, repeated seeds"}


def test_a_page_on_many_levels(tmp_path):
    for k in range(11):
        write_run(tmp_path / "runs", "miner" if k > 5 else "maze", seed=k % 6 + 1, num_rows=120 if k > 5 else 100)
    write_run(tmp_path / "runs", "miner", "few", num_rows=100)
    write_run(tmp_path / "runs", "Other-v0", num_rows=120)
    page = make_page(tmp_path / "out", tmp_path / "runs", thresholds=(4, 92))
    [header, *rows] = rows_of(page, "### Return at 1,572,864 steps")
    assert "from 1,310,720 to 1,572,864" in page  # 262,144: the interval of published rows
    assert header == ["game", "group", "return"] and rows[1][2].endswith("] (6)")
    assert [x[1] for x in rows if x[0] == "miner"] == ["few", "ppg_procgen", "PPO (openai/train-procgen)"]
    [_, ours] = rows_of(page, "### Over maze, miner")  # with as many runs as both games have; the others have too few
    assert ours[:2] == ["ppg_procgen", "5"] and ours[-1] == "–" and page.count("### Over") == 1
    [header, _, maze, *_] = rows_of(page, "### Steps to a return")
    assert header == ["game", "group", "steps to 4", "hours to 4", "steps to 92", "hours to 92"]
    assert maze[2:4] == ["; ".join(["262,144"] * 6), "; ".join(["0.16"] * 6)]  # rows 1 to 16
    assert maze[4:] == ["–; –; –; 1,572,864; 1,572,864; 1,572,864", "–; –; –; 0.96; 0.96; 0.96"]  # rows 81 to 96: 92.5
    for name in ("easy_steps", "easy_time"):
        image = np.asarray(Image.open(tmp_path / "out" / f"{name}.png").convert("L"))
        assert f"({name}.png)" in page and image.std() > 10 and image.shape[1] > 700
