"""benchmark/throughput.py: numbers from records of known times, order of the runs, failures."""

import json
import sys

import pandas as pd
import pytest

from benchmark import throughput

# 2 iterations of 4 x 8 steps a phase, two phases measured
SIZES = {"num_envs": 4, "num_steps": 8, "n_iteration": 2, "phases": 2}

# scripts that write records of known times without training; each notes that it ran, and how
HEAD = """
import argparse, json, sys
from pathlib import Path

parser = argparse.ArgumentParser()
for name in "env-id num-envs num-steps num-minibatches total-timesteps n-iteration e-auxiliary".split():
    parser.add_argument("--" + name)
args, _ = parser.parse_known_args()
with open(Path(__file__).with_name("calls"), "a") as calls:
    calls.write(json.dumps([Path(__file__).stem, *sys.argv[1:]]) + "\\n")
Path("runs/one").mkdir(parents=True)
num_iterations = int(args.total_timesteps) // 32
"""
# phases of 100 s, 11 s and 13 s
OURS = """
with open("runs/one/metrics.csv", "w") as file:
    print("global_step,wall_time,losses/none,time/rollout,time/policy_phase,time/aux_phase", file=file)
    for k, clock in enumerate([50, 100, 104, 111, 115, 124][:num_iterations]):
        times = (40, 8, 50) if k < 2 else (1.6, 0.8, "" if k % 2 == 0 else 4.8)
        print(32 * (k + 1), clock, "", *times, sep=",", file=file)
"""
# phases of 50 s, 40 s and 56 s, which end with what is written after the auxiliary phase
OTHER = """
from torch.utils.tensorboard import SummaryWriter

with SummaryWriter("runs/one") as writer:
    for k, (clock, end) in enumerate([(9, 9), (20, 50), (59, 59), (70, 90), (99, 99), (110, 146)][:num_iterations]):
        writer.add_scalar("charts/episodic_return", 1, 32 * (k + 1) - 3, 1e9 + clock - 5)
        writer.add_scalar("charts/SPS", 1, 32 * (k + 1), 1e9 + clock)
        writer.add_scalar("losses/aux/kl_loss", 1, 32 * (k + 1), 1e9 + end)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """bench(scripts, **flags): number of failures, rows of the table, and calls of these scripts."""

    def bench(scripts, **flags):
        for name, text in scripts.items():
            (tmp_path / f"{name}.py").write_text(HEAD + text)
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "out" / "page.md"
        failed = throughput.main(throughput.Args(out=path, cuda=False, **SIZES, **flags))
        rows = pd.read_csv(path, skiprows=4, sep=r" *\| *", engine="python", dtype=str, index_col="command")
        calls = (tmp_path / "calls").read_text().splitlines()
        return failed, rows, [json.loads(call) for call in calls]

    return bench


def test_numbers_order_and_sizes(bench):
    baseline = f"{sys.executable} other.py --e-auxiliary 9"
    failed, rows, calls = bench({"ours": OURS, "other": OTHER}, baseline=baseline, variants=("ours.py --arch=dual",))
    assert failed == 0
    assert [call[0] for call in calls] == ["other", "ours", "other", "ours"]
    assert calls[0][-2:] == ["--e-auxiliary", "9"]
    assert {"--total-timesteps=192", "--num-envs=4", "--e-auxiliary=6", "--no-cuda", "--arch=dual"} < set(calls[1])
    assert rows.loc[baseline]["steps/s"] == "1.333 (1.333–1.333)"  # 128 / (40 + 56)
    row = rows.loc["ours.py --arch=dual"]
    assert row["steps/s"] == "5.333 (5.333–5.333)"  # 128 / (11 + 13)
    assert row["× baseline"] == "4 (4–4)"
    assert [row[name] for name in throughput.TIMES] == ["3.2", "1.6", "4.8"]
    assert float(row["host GB"]) > 0


def test_a_failure_is_reported_and_the_others_go_on(bench, capsys):
    scripts = {"broken": "sys.exit('no such luck')", "ours": OURS}
    failed, rows, _ = bench(scripts, variants=("broken.py", "ours.py"), repeats=1)
    assert failed == 1
    assert rows.index[1:].tolist() == ["ours.py"]
    assert "no such luck" in capsys.readouterr().out
