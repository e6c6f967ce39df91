"""Sweeps of real processes: a fake training script that keeps to the contract and misbehaves by game."""

import fcntl
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, wait_for

from benchmark import sweep

FAKE = """
for word; do
    case $flag in
        --env-id) game=${word##*/} game=${game%.*} ;;
        --run-dir) run_dir=$word ;;
    esac
    flag=$word
done
[ -e "$run_dir/args.json" ] && how=continues || how=begins
echo "$game $how ${CUDA_VISIBLE_DEVICES-unset} ${OMP_NUM_THREADS-unset}" >>starts
exec 9>"lock.${CUDA_VISIBLE_DEVICES-$game}"
flock --nonblock 9 || { echo locked; exit 1; }  # two runs share a GPU, or an attempt has left a process
[ $how = continues ] && [ "$1" = --size ] && { printf "%s\\n" "╭─ Error ─╮" "│ size cannot change │" ╰──╯; exit 2; }
mkdir -p "$run_dir"
touch "$run_dir/args.json"
[ -e fixed ] || case $game in
    flaky) [ $how = continues ] || exit 1 ;;
    crash) sleep 1000 & echo the GPU caught fire; exit 1 ;;
    slow) trap "sleep 1; exit" TERM; echo >>ready; until [ -e fixed ]; do sleep 0.02; done ;;
    waits)  # with a process in a session of its own, as torchrun has
        setsid sleep 1000 & trap "kill $!" EXIT; trap exit TERM
        echo >>ready
        until [ -e fixed ]; do sleep 0.02; done ;;
esac
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with sweep.py, which needs nothing else of the project, and with the fake script as a program."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    Path("benchmark").mkdir()
    shutil.copy(ROOT / "benchmark" / "sweep.py", "benchmark")
    add_program("train", FAKE)


def add_program(name: str, source: str) -> None:
    Path(name).write_text(f"#!/bin/bash\n{source}\n")
    Path(name).chmod(0o755)


def start(*words: str, folder="sweep", command="train", prefix=()) -> subprocess.Popen:
    argv = [*prefix, sys.executable, "-m", "benchmark.sweep", "--folder", folder, "--seeds", "1"]
    argv += ["--command", command, "--env-ids", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*words: str, **options) -> tuple[int, str]:
    process = start(*words, **options)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def starts(column: int) -> list[str]:
    """Of each start of the fake script: its game (column 0), how it began (1), GPU (2), threads (3)."""
    return [line.split(" ")[column] for line in Path("starts").read_text().splitlines()]


def test_one_crashes_the_others_go_on_and_the_same_call_completes():
    code, output = run("crash", "flaky", "fine", "--retries", "1")
    assert code == 1 and "1 of 3 runs failed" in output
    assert "FAILED crash__train__1: exit code 1: the GPU caught fire" in output
    assert sorted(starts(0)) == "crash crash fine flaky flaky".split()
    Path("fixed").touch()
    code, output = run("crash", "flaky", "fine", "ALE/fine")  # and a game more
    assert code == 0 and "all runs are finished" in output
    assert starts(0)[5:] == ["crash", "fine"] and starts(1)[5:] == ["continues", "begins"]
    code, output = run("fine", command="train --size 3")  # no finished run; a bad argument is not tried again
    assert code == 1 and "FAILED fine__train__1: exit code 2: size cannot change (see" in output
    assert starts(1)[7:] == ["continues"]


def test_gpu_slots_are_never_shared():
    games = "fine crash flaky fine.2 crash.2 flaky.2 fine.3 crash.3 flaky.3".split()
    output = run(*games, *"--gpus 0,3 GPU-5e1f --retries 1 --workers 5".split())[1]
    assert "3 of 9 runs failed" in output and "locked" not in output
    assert len(starts(0)) == 3 + 6 + 6 and set(starts(2)) == {"0", "3", "GPU-5e1f"} and set(starts(3)) == {"unset"}


def test_where_the_default_gpus_come_from_and_runs_without_one_share_the_cores(monkeypatch):
    add_program("nvidia-smi", "echo No devices were found")
    num_cores = len(os.sched_getaffinity(0))
    for games in (["one", "two"], ["one", "two", "three"], ["four"]):  # what is left has as many threads as before
        assert run(*games, "--workers", "2")[0] == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run("five")[0] == 0 and starts(2) == ["unset"] * 5
    assert starts(3) == [*[str(max(1, num_cores // 2))] * 3, str(num_cores), "7"]
    add_program("nvidia-smi", "echo 0; echo 1")
    assert run("fine.1", "fine.2")[0] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert run("fine.3", "fine.4")[0] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert run("fine.5")[0] == 0 and sorted(starts(2)[5:]) == ["", "0", "1", "6", "7"]


def test_a_second_sweep_is_refused_and_nohup_keeps_the_first_alive():
    first = start("waits", prefix=["nohup"])
    wait_for(Path("ready").exists)
    assert run("waits") == (2, "sweep.py: another sweep is at work in sweep\n")
    first.send_signal(signal.SIGHUP)
    Path("fixed").touch()
    assert first.wait(timeout=60) == 0 and starts(1) == ["begins"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_runs_and_a_moved_folder_continues(signum):
    process = start("waits", "waits.2", "fine", *"--gpus 0 1".split())
    wait_for(lambda: Path("ready").exists() and Path("ready").stat().st_size == 2)
    if signum == signal.SIGHUP:
        process.stdout.close()  # as a closed terminal, which takes no more words
    process.send_signal(signum)
    if signum != signal.SIGHUP:
        assert process.communicate(timeout=60)[0].count("stopped") == 2 and process.returncode == 128 + signum
    assert process.wait(60) > 0
    for gpu in ("0", "1"):
        with open(f"lock.{gpu}") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run has ended
    Path("fixed").touch()
    Path("sweep").rename("elsewhere")
    assert run("waits", folder="elsewhere")[0] == 0
    assert starts(0) == ["waits"] * 3 and starts(1) == ["begins", "begins", "continues"]


def test_all_runs_are_ended_then_waited_for():
    process = start("slow", "slow.2", "slow.3", "slow.4", *"--gpus 0 1 2 3".split())
    wait_for(lambda: Path("ready").exists() and Path("ready").stat().st_size == 4)
    process.terminate()
    began = time.monotonic()
    assert process.communicate(timeout=60)[0].count("stopped") == 4 and time.monotonic() - began < 3


def test_names_of_runs_and_the_flags_that_a_sweep_sets():
    def names(flags: str) -> list[str]:
        return [run.name for run in sweep.plan(sweep.Args(("maze",), (f"sh train.py {flags}",), seeds=(4, 2)))]

    assert names("--seed-offset 3 --exp-name 'my run' --resumed") == ["maze__my run__4", "maze__my run__2"]
    assert names("--exp_name=other") == ["maze__other__4", "maze__other__2"]
    for flag in ("--env-id maze", "--env_id=maze", "--seed 1", "--run_dir x", "--resume=x"):
        with pytest.raises(SystemExit, match="2"):
            names(flag)
    with pytest.raises(SystemExit, match="2"):  # one folder for both
        sweep.plan(sweep.Args(("maze",), ("sh a.py --exp-name lr/1", "sh a.py --exp-name lr_1")))


RUNS = {"ppg.sh": 9, "ppo.sh": 9, "ppg.sh all": 48, "ppo.sh all": 48, "ppg_paper.sh": 96}
RUNS |= {"ppg_generalization.sh": 96, "ppg_ablations.sh": 45, "check_learning.sh": 45}


@pytest.mark.parametrize("tiny", ["", "1"])
@pytest.mark.parametrize("name", RUNS)
def test_the_commands_of_the_shell_scripts_are_good(name, tiny, tmp_path):
    argv = ["bash", *f"{ROOT}/benchmark/{name}".split(), "--dry-run", "--folder", tmp_path / "sweep"]
    lines = subprocess.check_output(argv, env=os.environ | {"TINY": tiny}, text=True).splitlines()
    commands = [shlex.split(line) for line in lines if "--seed 1 " in line]
    assert commands and len(lines) == RUNS[name]
    for _, script, *flags in commands:
        module = importlib.import_module(Path(script).stem)
        module.check(args := tyro.cli(module.Args, args=flags))
        assert (args.total_timesteps == 256) == (tiny == "1")
