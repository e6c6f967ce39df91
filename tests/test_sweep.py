"""Sweeps of real processes: a fake training script that keeps to the contract and misbehaves by game."""

import fcntl
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, wait_for

from benchmark import sweep

os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the shell scripts call python3

FAKE = """
import fcntl, os, subprocess, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
game = flags["--env-id"].split(".")[0].split("/")[-1]
begins = "--run-dir" in flags
run_dir = Path(flags["--run-dir" if begins else "--resume"])
home = Path(__file__).parent
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
with open(home / "starts.txt", "a") as file:
    print(game, "start" if begins else "resume", gpu, os.environ.get("OMP_NUM_THREADS"), file=file)
lock = open(home / f"{game if gpu == 'unset' else gpu}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if two runs share a GPU, or an attempt has left a process
if begins:
    run_dir.mkdir(parents=True)
    (run_dir / "args.json").touch()
elif "--size" in flags:
    print("size cannot change")
    sys.exit(2)
if not (home / "fixed").exists():
    if game == "flaky" and begins:
        sys.exit(1)
    if game == "crash":
        subprocess.Popen(["sleep", "1000"], pass_fds=[lock.fileno()])
        print("the GPU caught fire")
        sys.exit(1)
    if game == "waits":
        (home / "ready").touch()
        while not (home / "fixed").exists():
            time.sleep(0.02)
"""


class Lab:
    """A fake script, the folder of a sweep, and what the fakes have recorded."""

    def __init__(self, home: Path):
        self.home = home
        self.folder = home / "sweep"
        self.command = f"{sys.executable} -S -E {home / 'fake.py'}"
        (home / "fake.py").write_text(FAKE)
        for name in ("sweep.py", "slurm.sbatch"):  # they need nothing else of the project
            shutil.copy(ROOT / "benchmark" / name, home)

    def start(self, *env_ids, flags=(), prefix=(), **environment) -> subprocess.Popen:
        argv = [*prefix, sys.executable, self.home / "sweep.py", "--folder", self.folder, "--num-seeds", "1"]
        argv += ["--command", self.command, "--env-ids", *env_ids, *flags]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(argv, cwd=self.home, env=os.environ | environment, text=True, **streams)

    def sweep(self, *env_ids, **options) -> tuple[int, str]:
        process = self.start(*env_ids, **options)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def starts(self, column: int) -> list[str]:
        """Of each start of a fake: its game (column 0), how it began (1), GPU (2), threads (3)."""
        lines = (self.home / "starts.txt").read_text().splitlines()
        return [line.split(" ")[column] for line in lines]

    def add_program(self, name: str, source: str) -> str:
        """Add a shell script. Returns the PATH that has it."""
        (self.home / name).write_text(f"#!/bin/sh\n{source}\n")
        (self.home / name).chmod(0o755)
        return f"{self.home}:{os.environ['PATH']}"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return Lab(tmp_path)


def test_one_crashes_the_others_go_on_and_the_same_call_completes(lab):
    code, output = lab.sweep("crash", "flaky", "fine", flags=["--retries", "1"])
    assert code == 1 and "1 of 3 runs failed" in output
    assert "FAILED crash__fake__1: exit code 1: the GPU caught fire" in output
    assert sorted(lab.starts(0)) == "crash crash fine flaky flaky".split()
    (lab.home / "fixed").touch()
    code, output = lab.sweep("crash", "flaky", "fine", "ALE/fine")  # and a game more
    assert code == 0 and "all runs are finished" in output
    assert lab.starts(0)[5:] == ["crash", "fine"] and lab.starts(1)[5:] == ["resume", "start"]


def test_other_flags_do_not_pass_for_finished_runs_and_bad_arguments_are_not_tried_again(lab):
    assert lab.sweep("fine")[0] == 0
    lab.command += " --size 3"
    code, output = lab.sweep("fine")
    assert code == 1 and "FAILED fine__fake__1: exit code 2: size cannot change" in output
    assert lab.starts(1) == ["start", "resume"]


def test_gpu_slots_are_never_shared(lab):
    games = "fine crash flaky fine.2 crash.2 flaky.2 fine.3 crash.3 flaky.3".split()
    code, output = lab.sweep(*games, flags="--gpus 0,3 GPU-5e1f --retries 1 --workers 5".split())
    assert "3 of 9 runs failed" in output and "BlockingIOError" not in output
    assert len(lab.starts(0)) == 3 + 6 + 6
    assert set(lab.starts(2)) == {"0", "3", "GPU-5e1f"} and set(lab.starts(3)) == {"None"}
    assert "--workers 5: 3 at a time, one for each GPU slot; for more: --gpus 0 3 GPU-5e1f 0 3\n" in output


def test_where_the_default_gpus_come_from_and_runs_without_one_share_the_cores(lab):
    path = lab.add_program("nvidia-smi", "echo 0; echo 1")
    assert lab.sweep("fine.1", "fine.2", PATH=path)[0] == 0
    assert lab.sweep("fine.3", "fine.4", PATH=path, CUDA_VISIBLE_DEVICES="6,7")[0] == 0
    assert sorted(lab.starts(2)) == ["0", "1", "6", "7"]
    num_cores = len(os.sched_getaffinity(0))
    lab.add_program("nvidia-smi", "echo No devices were found")
    assert lab.sweep("one", "two", "three", PATH=path, flags=["--workers", "2"])[0] == 0
    assert lab.sweep("four", PATH=path, flags=["--workers", "2"])[0] == 0
    assert lab.sweep("five", PATH=path, OMP_NUM_THREADS="7")[0] == 0
    assert lab.starts(2)[4:] == ["unset"] * 5
    assert lab.starts(3)[4:] == [*[str(max(1, num_cores // 2))] * 3, str(num_cores), "7"]


def test_a_second_sweep_is_refused_and_nohup_keeps_the_first_alive(lab):
    first = lab.start("waits", prefix=["nohup"])
    wait_for((lab.home / "ready").exists)
    assert lab.sweep("waits") == (2, f"sweep.py: another sweep is at work in {lab.folder}\n")
    first.send_signal(signal.SIGHUP)
    (lab.home / "fixed").touch()
    assert first.wait(timeout=60) == 0 and lab.starts(1) == ["start"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_runs_and_a_moved_folder_continues(lab, signum):
    process = lab.start("waits", "fine")
    wait_for((lab.home / "ready").exists)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum and "stopped" in output
    with open(lab.home / "waits.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run has ended
    (lab.home / "fixed").touch()
    lab.folder = lab.folder.rename(lab.home / "elsewhere")
    assert lab.sweep("waits")[0] == 0
    assert lab.starts(0) == ["waits", "waits"] and lab.starts(1) == ["start", "resume"]


def test_slurm_array_does_the_unfinished_runs(lab):
    path = lab.add_program("sbatch", 'for word; do echo "$word"; done >call')
    games = ["fine", "crash", "fine.2"]
    assert lab.sweep("fine")[0] == 0
    assert lab.sweep(*games, flags=["--slurm", "--workers", "2"], PATH=path)[0] == 0
    array, _, _, *task = (lab.home / "call").read_text().splitlines()
    assert array == "--array=1,2%2"
    codes = [subprocess.call(["bash", *task], env=os.environ | {"SLURM_ARRAY_TASK_ID": index}) for index in "12"]
    assert codes == [1, 0] and lab.starts(0)[1:] == ["crash", "crash", "crash", "fine"]


def test_names_of_runs_and_the_flags_that_a_sweep_sets():
    def names(flags: str) -> list[str]:
        return [run.name for run in sweep.plan(sweep.Args(("maze",), (f"sh train.py {flags}",), num_seeds=1))]

    assert names("--seed-offset 3 --exp-name 'my run' --resumed") == ["maze__my run__1"]
    assert names("--exp_name=other") == ["maze__other__1"]
    for flag in ("--env-id maze", "--env_id=maze", "--seed 1", "--run_dir x", "--resume=x"):
        with pytest.raises(SystemExit, match="2"):
            names(flag)


def test_it_runs_as_a_module():
    assert subprocess.call([sys.executable, "-m", "benchmark.sweep", "--help"], cwd=ROOT) == 0


RUNS = {"ppg.sh": 9, "ppo.sh": 9, "ppg.sh all": 48, "ppo.sh all": 48, "ppg_paper.sh": 96}
RUNS |= {"ppg_generalization.sh": 96, "ppg_ablations.sh": 45, "check_learning.sh": 45}


@pytest.mark.parametrize("tiny", ["", "1"])
@pytest.mark.parametrize("name", RUNS)
def test_the_commands_of_the_shell_scripts_are_good(name, tiny, tmp_path):
    argv = ["bash", *f"{ROOT}/benchmark/{name}".split(), "--dry-run", "--folder", tmp_path]
    output = subprocess.check_output(argv, env=os.environ | {"TINY": tiny}, text=True)
    commands = [shlex.split(line) for line in output.splitlines()]
    assert len(commands) == RUNS[name]
    for _, script, *flags in commands:
        module = importlib.import_module(Path(script).stem)
        args = tyro.cli(module.Args, args=flags)
        assert (args.total_timesteps == 256) == (tiny == "1")
