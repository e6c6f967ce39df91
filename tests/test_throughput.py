"""benchmark/throughput.py: numbers from records of known times, order of the runs, failures, cuts, and a real run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHEAP_PPG

import ppg_procgen
import ppo_procgen
from benchmark import throughput

# 2 iterations of 4 x 8 steps a phase, two phases measured
SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "n_iteration": 2, "num_aux_rollouts": 2, "phases": 2}
SMALL |= {"e_auxiliary": 3, "repeats": 2, "probe_seconds": 0, "cuda": False}
MACHINE = {"bytes_per_second": 1e12, "flop_per_second": 1e12}

# scripts that write records of known times without training; each notes in CALLS that it ran, and how
HEAD = """
import argparse, json, os, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
for name in "env-id num-envs num-steps num-minibatches total-timesteps seed {more}".split():
    parser.add_argument("--" + name)
parser.add_argument("--no-cuda", action="store_true")
args = parser.parse_args()
with open(Path(__file__).with_name("calls"), "a") as calls:
    calls.write(json.dumps([Path(__file__).stem, *sys.argv[1:]]) + "\\n")
iterations = int(args.total_timesteps) // 32
"""
# phases of 100 s, 11 s and 13 s; the row's clock stops before what comes after it
OURS = (
    HEAD
    + """
folder = Path("runs/one")
folder.mkdir(parents=True)
run = {"arch": "dual", "e_policy": 1, "e_value": 1, "e_auxiliary": 3, "num_minibatches": 2, "n_iteration": 2}
run |= {"num_envs": 4, "num_aux_rollouts": 2, "num_aux_minibatches": 0}
(folder / "args.json").write_text(json.dumps({"args": run}))
with open(folder / "metrics.csv", "w") as file:
    print("global_step,wall_time,losses/none,time/rollout,time/policy_phase,time/aux_phase", file=file)
    for k, clock in enumerate([50, 100, 104, 111, 115, 124][:iterations]):
        times = (40, 8, 50) if k < 2 else (1.6, 0.8, 0 if k % 2 == 0 else 4.8)
        print(32 * (k + 1), clock, "", *times, sep=",", file=file, flush=True)
    file.write("224,1")
"""
)
# phases of 50 s, 40 s and 56 s, which end with what is written after the auxiliary phase
OTHER = (
    HEAD
    + """
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter("runs/other")
def write(tag, step, clock):
    value = Summary.Value(tag=tag, simple_value=1.0)
    writer.add_event(Event(wall_time=1e9 + clock, step=step, summary=Summary(value=[value])))
for k, (clock, end) in enumerate([(9, 9), (20, 50), (59, 59), (70, 90), (99, 99), (110, 146)][:iterations]):
    write("charts/episodic_return", 32 * (k + 1) - 3, clock - 5)
    write("charts/SPS", 32 * (k + 1), clock)
    if end > clock:
        write("losses/aux/kl_loss", 32 * (k + 1), end)
writer.close()
"""
)
PPG_FLAGS = "n-iteration e-auxiliary num-aux-rollouts arch"


@pytest.fixture
def scripts(tmp_path):
    """Write stub scripts by name and give their paths."""

    def write(**texts: str) -> list[str]:
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text.replace("{more}", PPG_FLAGS))
        return [str(tmp_path / f"{name}.py") for name in texts]

    return write


def bench(tmp_path, **flags) -> tuple[int, dict]:
    out = tmp_path / "out" / "throughput.json"
    failed = throughput.main(throughput.Args(**(SMALL | {"out": out} | flags)))
    return failed, json.loads(out.read_text())


def calls(tmp_path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def test_numbers_order_and_settings(tmp_path, scripts, monkeypatch, capsys):
    ours, other = scripts(ours=OURS, other=OTHER)
    monkeypatch.setattr(throughput.console, "width", 160)
    monkeypatch.setattr(throughput, "probe", lambda args: MACHINE)
    failed, result = bench(tmp_path, variants=(f"{ours} --arch=dual",), baseline=f"{other} --e-auxiliary 9")
    assert failed == 0
    assert [call[0] for call in calls(tmp_path)] == ["other", "ours", "other", "ours"]
    second, first = calls(tmp_path)[:2]
    assert {"--total-timesteps=192", "--num-envs=4", "--e-auxiliary=3", "--no-cuda", "--arch=dual"} <= set(first)
    assert second[-2:] == ["--e-auxiliary", "9"] and "--e-auxiliary=3" not in second

    baseline, run = result["runs"][:2]
    assert run["phase_seconds"] == [11, 13] and baseline["phase_seconds"] == [40, 56]
    assert run["steps_per_second"] == 128 / 24 and baseline["steps_per_second"] == 128 / 96
    assert run["rollout_step_ms"] == pytest.approx(1600 / 8)
    assert run["policy_update_ms"] == pytest.approx(800 / 2)
    assert run["aux_update_ms"] == pytest.approx(4800 / 12)  # 3 epochs of 2 x 4 / 2 minibatches
    assert run["passes_per_step"] == {"forward_backward": 8, "forward": 3}
    assert "rollout_step_ms" not in baseline
    row = result["summary"][1]
    assert row["times_baseline"] == pytest.approx(4) and row["runs"] == 2
    assert result["hardware"] and result["versions"]["torch"] == torch.__version__ and result["date"]
    shown = capsys.readouterr().out
    assert "5.333" in shown and "1.333" in shown and "× baseline" in shown


def test_floor(tmp_path, scripts):
    (ours,) = scripts(ours=OURS)
    args = throughput.Args(**SMALL)
    subprocess.run([sys.executable, ours, "--total-timesteps=192"], cwd=tmp_path, check=True)
    slow = throughput.measure(tmp_path, args, MACHINE, 150.0)  # bound by arithmetic
    assert slow["times_floor"] == pytest.approx((24 / 128) / ((8 * 180e6 + 3 * 61e6) / 1e12))
    assert slow["warm_up_seconds"] == 126
    fast = throughput.measure(tmp_path, args, MACHINE | {"flop_per_second": 1e15}, None)  # bound by traffic
    assert fast["times_floor"] == pytest.approx((24 / 128) / (8 * 10.2e6 / 1e12)) and "warm_up_seconds" not in fast
    path = next(tmp_path.rglob("args.json"))  # with the 6 passes of the auxiliary phase in bfloat16
    path.write_text(path.read_text().replace('"arch"', '"aux_dtype": "bfloat16", "arch"'))
    fast = throughput.measure(tmp_path, args, MACHINE | {"flop_per_second": 1e15}, None)
    assert fast["times_floor"] == pytest.approx((24 / 128) / ((2 * 10.2e6 + 6 * 5.1e6) / 1e12))


@pytest.mark.parametrize(
    ("script", "flags", "passes", "gflop"),
    [
        (ppg_procgen, {"arch": "dual"}, (14, 3), 2.71),
        (ppg_procgen, {"arch": "detach"}, (7, 2), 1.38),
        (ppg_procgen, {"arch": "shared", "e_policy": 3, "e_value": 3, "e_auxiliary": 0}, (3, 1), 0.60),
        (ppo_procgen, {}, (3, 1), 0.60),
        (ppg_procgen, {"arch": "dual", "e_value": 9}, (22, 3), 4.15),
        (ppg_procgen, {"arch": "detach", "num_aux_minibatches": 128}, (2.5, 2), 0.57),
    ],
)
def test_work(script, flags, passes, gflop):
    backward, forward, *_ = throughput.work_of(vars(script.Args(**flags)))
    assert (backward, forward) == passes
    flop = backward * throughput.BACKWARD_FLOP + forward * throughput.FORWARD_FLOP
    assert flop / 1e9 == pytest.approx(gflop, abs=0.01)


def test_failure_is_reported_and_the_others_go_on(tmp_path, scripts, capsys):
    broken, ours = scripts(broken=HEAD + "sys.exit('no such luck')", ours=OURS)
    failed, result = bench(tmp_path, variants=(broken, ours), repeats=1)
    assert failed == 1
    assert [run["exit_code"] for run in result["runs"]] == [1, 0]
    assert [row["name"] for row in result["summary"]] == ["ours.py"]
    assert "no such luck" in capsys.readouterr().out


def test_cut_run_counts_with_its_whole_phases(tmp_path, scripts, capsys):
    slow, other = scripts(slow=OURS + "    file.flush(); time.sleep(500)", other=OTHER)
    failed, result = bench(tmp_path, variants=(slow, other), budget_minutes=4 / 60)
    assert failed == 0
    (run,) = result["runs"]
    assert run["exit_code"] is None and run["phase_seconds"] == [11, 13] and "warm_up_seconds" not in run
    assert capsys.readouterr().out.count("left out") == 3


def test_one_phase_is_not_enough(tmp_path, scripts):
    (short,) = scripts(short=OURS.replace("[:iterations]", "[:3]"))
    failed, result = bench(tmp_path, variants=(short,), repeats=1)
    assert failed == 1 and result["summary"] == [] and "steps_per_second" not in result["runs"][0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dula", "not one of dual, detach"),
        ("ppg_procgen.py --num-envs 8", "num_envs cannot be set for one command alone"),
        ("{stub}", "no flag for seed"),
        ("{broken}", "unheard of"),
        ("'dual", "No closing quotation"),
    ],
)
def test_bad_commands(tmp_path, scripts, text, message):
    stub, broken = scripts(stub=HEAD.replace(" seed ", " "), broken="raise ValueError('unheard of')")
    with pytest.raises(ppg_procgen.UsageError, match=message):
        bench(tmp_path, variants=(text.format(stub=stub, broken=broken),))
    assert not (tmp_path / "out").exists()


def test_two_commands_of_one_name_are_refused(tmp_path, scripts):
    """Else their runs would be merged into one row: an older checkout beside this one."""
    (script,) = scripts(same=OURS)
    (tmp_path / "old").mkdir()
    older = tmp_path / "old" / Path(script).name
    older.write_text(Path(script).read_text())
    with pytest.raises(ppg_procgen.UsageError, match="the same name"):
        bench(tmp_path, variants=(script,), baseline=str(older))


@pytest.mark.parametrize("name", ["repeats", "phases", "budget_minutes", "num_envs"])
def test_bad_arguments(name):
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        throughput.Args(**{name: 0})


@pytest.mark.slow
def test_probe(monkeypatch):
    monkeypatch.setattr(throughput, "NETWORK_SAMPLES", 8)
    machine = throughput.probe(throughput.Args(num_envs=2, cuda=False, probe_seconds=0.001))
    network = {f"{name}_{dtype}_ms" for name in "tf" for dtype in ("float32", "bfloat16")}
    assert network | {"env_steps_per_second", "bytes_per_second", "flop_per_second"} == machine.keys()
    assert all(value > 0 for value in machine.values())


@pytest.mark.slow
def test_real_run(tmp_path):
    """From the command line, in another folder; the phases measured are those of the script's own clock."""
    out = tmp_path / "throughput.json"
    command = [sys.executable, throughput.__file__, "--variants", "ppg_procgen.py --arch detach", "--no-cuda"]
    command += ["--probe-seconds", "0", "--repeats", "1", "--e-auxiliary", "1", "--out", str(out)]
    for name in ("num_envs", "num_steps", "num_minibatches", "n_iteration", "num_aux_rollouts"):
        command += [f"--{name.replace('_', '-')}", str(CHEAP_PPG[name])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert run["exit_code"] == 0 and len(run["phase_seconds"]) == 1
    measured = run["rollout_step_ms"] * 16 + run["policy_update_ms"] * 4 + run["aux_update_ms"] * 2
    assert 0 < measured / 1000 <= run["phase_seconds"][0]  # the rest: records and a checkpoint
    assert 0.1 < run["host_gb"] < 5
    assert [path.name for path in Path(tmp_path).iterdir()] == ["throughput.json"]


@pytest.mark.gpu
def test_probe_on_a_gpu():
    machine = throughput.probe(throughput.Args(probe_seconds=0.1))
    assert machine["t_bfloat16_ms"] > machine["f_bfloat16_ms"] > 0
