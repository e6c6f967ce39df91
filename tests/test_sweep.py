"""Sweeps of real processes: a fake training script that keeps to the contract and misbehaves by game."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import ROOT, wait_for

from benchmark import sweep

SWEEP = ROOT / "benchmark" / "sweep.py"
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the shell scripts call python3

FAKE = """
import fcntl, os, signal, subprocess, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
game = flags["--env-id"].partition(".")[0]
begins = "--run-dir" in flags
run_dir = Path(flags["--run-dir" if begins else "--resume"])
home = Path(__file__).parent
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
with open(home / "starts.txt", "a") as file:
    file.write(f"{game} {'start' if begins else 'resume'} {gpu or 'none'} {os.getpid()}\\n")
slot = open(home / f"gpu-{gpu}", "w")
fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if two runs share a slot
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
        (home / "child").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        print("the GPU caught fire")
        sys.exit(1)
    if game == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
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
        (home / "fake.py").write_text(FAKE)
        self.command = f"{sys.executable} -S -E {home / 'fake.py'}"

    def popen(self, *env_ids, flags=(), prefix=(), cwd=None, **environment) -> subprocess.Popen:
        argv = [*prefix, sys.executable, SWEEP, "--folder", self.folder, "--num-seeds", "1"]
        argv += ["--command", self.command, "--env-ids", *env_ids, *flags]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(argv, cwd=cwd, env=os.environ | environment, text=True, **streams)

    def sweep(self, *env_ids, **options) -> tuple[int, str]:
        process = self.popen(*env_ids, **options)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def starts(self, column: int) -> list[str]:
        """Of each start of a fake: its game (column 0), how it began (1), GPU (2), process (3)."""
        lines = (self.home / "starts.txt").read_text().splitlines()
        return [line.split()[column] for line in lines]

    def wait_until_live(self):
        wait_for((self.home / "ready").exists)
        (self.home / "ready").unlink()

    def add_program(self, name: str, source: str) -> str:
        """Add a program. Returns the PATH that has it."""
        folder = self.home / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Lab(tmp_path)


def status(pid: int | str, name: str) -> str:
    return re.search(rf"{name}:\t(\w+)", Path(f"/proc/{pid}/status").read_text())[1]


def has_ended(pid: str) -> bool:
    try:
        return status(pid, "State") == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_crashes_one_is_killed_one_is_fine_and_the_same_call_completes(lab):
    code, output = lab.sweep("crash", "killed", "flaky", "fine", flags=["--retries", "1"])
    assert code == 1
    assert "FAILED crash__fake__1: exit code 1: the GPU caught fire" in output
    assert "FAILED killed__fake__1: killed by SIGKILL" in output
    assert "2 of 4 runs failed" in output
    assert sorted(lab.starts(0)) == "crash crash fine flaky flaky killed killed".split()
    wait_for(lambda: has_ended((lab.home / "child").read_text()))  # what the crashed run left behind
    assert (lab.folder / "logs" / "crash__fake__1.log").read_text().count("the GPU caught fire") == 2

    (lab.home / "fixed").touch()
    code, output = lab.sweep("crash", "killed", "flaky", "fine", "fine.2")  # and a game more
    assert code == 0 and "all runs are finished" in output
    assert lab.starts(0)[7:] == ["crash", "killed", "fine"]
    assert lab.starts(1)[7:] == ["resume", "resume", "start"]


def test_other_flags_do_not_pass_for_finished_runs_and_bad_arguments_are_not_tried_again(lab):
    assert lab.sweep("fine")[0] == 0
    lab.command += " --size 3"
    code, output = lab.sweep("fine")
    assert code == 1 and "FAILED fine__fake__1: exit code 2: size cannot change" in output
    assert lab.starts(1) == ["start", "resume"]


def test_gpu_slots_are_never_shared(lab):
    games = "fine crash flaky fine.2 crash.2 flaky.2 fine.3 crash.3 flaky.3".split()
    flags = "--gpus 0,3 GPU-5e1f --retries 1".split()
    output = lab.sweep(*games, flags=flags)[1]
    assert "3 of 9 runs failed" in output and "BlockingIOError" not in output
    assert len(lab.starts(0)) == 3 + 6 + 6
    assert set(lab.starts(2)) == {"0", "3", "GPU-5e1f"}


def test_where_the_default_gpus_come_from(lab):
    path = lab.add_program("nvidia-smi", "#!/bin/sh\nprintf '0\\n1\\n'\n")
    assert lab.sweep("fine.1", "fine.2", PATH=path)[0] == 0
    assert lab.sweep("fine.3", "fine.4", PATH=path, CUDA_VISIBLE_DEVICES="6,7")[0] == 0
    assert sorted(lab.starts(2)) == ["0", "1", "6", "7"]
    for number, failure in enumerate(["exit 9", "echo No devices were found"]):
        lab.add_program("nvidia-smi", f"#!/bin/sh\n{failure}\n")
        assert lab.sweep(f"ALE/fine-v{number}", PATH=path)[0] == 0
        assert (lab.folder / "runs" / f"ALE_fine-v{number}__fake__1" / "finished").exists()
    assert lab.starts(2)[4:] == ["unset", "unset"]


def test_a_run_in_use_is_tried_again_later(tmp_path):
    script = "echo run >>starts; [ $(wc -l <starts) = 3 ] || { echo RUN is in use by another process; exit 1; }"
    commands = {"a": script, "b": "echo other >>starts", "c": "echo RUN is in use by another process; exit 1"}
    a, b, c = [sweep.Run(tmp_path, name, ["sh", "-c", f"cd {tmp_path}; {commands[name]}"]) for name in commands]
    for folder in ("logs", "runs/a", "runs/b"):
        (tmp_path / folder).mkdir(parents=True)
    assert sweep.work([a, b], [None], retries=0, lock_wait=1) == []
    assert (tmp_path / "starts").read_text().split() == ["run", "other", "run"]  # meanwhile, others go on
    assert sweep.work([c], [None], retries=1, lock_wait=0.1) == [c] and c.attempts == 2  # after ten waits


def test_a_second_sweep_is_refused_and_nohup_keeps_the_first_alive(lab):
    first = lab.popen("waits", prefix=["nohup"])
    lab.wait_until_live()
    code, output = lab.sweep("waits")
    assert code == 2 and output == f"sweep.py: another sweep is at work in {lab.folder}\n"
    first.send_signal(signal.SIGHUP)
    (lab.home / "fixed").touch()
    assert first.wait(timeout=60) == 0 and lab.starts(1) == ["start"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_stops_the_runs_and_a_moved_folder_continues(lab, signum):
    process = lab.popen("waits", "fine")
    lab.wait_until_live()
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    if signum == signal.SIGKILL:
        wait_for(lambda: has_ended(lab.starts(3)[0]))
    else:
        assert process.returncode == 128 + signum and "stopped" in output
    assert lab.starts(0) == ["waits"]
    assert has_ended(lab.starts(3)[0])
    (lab.home / "fixed").touch()
    lab.folder = lab.folder.rename(lab.home / "elsewhere")
    assert lab.sweep("waits")[0] == 0
    assert lab.starts(1) == ["start", "resume"]


SBATCH = """
# Runs the tasks one after the other; a task that asks for a requeue runs again.
import os, pathlib, subprocess, sys
array = sys.argv[1].removeprefix("--array=")
requeued = pathlib.Path(__file__).with_name("requeued")
for index in array.partition("%")[0].split(","):
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}
    requeued.touch()
    while requeued.exists():
        requeued.unlink()
        task = subprocess.run(["bash", *sys.argv[4:]], env=environment, capture_output=True)
    print(f"array {array} task {index}: {task.returncode}", flush=True)
"""
# A requeue ends the processes of the job.
SCONTROL = '#!/bin/sh\n[ "$*" = "requeue 7" ] && touch "$(dirname "$0")/requeued" && pkill -TERM -P "$PPID" python'


def test_slurm_array_runs_requeues_and_skips(lab):
    path = lab.add_program("sbatch", f"#!{sys.executable}{SBATCH}")
    lab.add_program("scontrol", SCONTROL)
    for name in ("nvidia-smi", "python3"):  # a login node, no active environment
        lab.add_program(name, "#!/bin/sh\nexit 9\n")
    games = ["fine", "crash", "waits"]
    flags = ["--slurm", "--workers", "2", "--retries", "1"]
    assert lab.sweep("fine", flags=flags, PATH="")[1].endswith("sweep.py: this machine has no sbatch\n")
    submission = lab.popen(*games, flags=flags, PATH=path, cwd=lab.home)
    lab.wait_until_live()
    script = status(status(lab.starts(3)[-1], "PPid"), "PPid")  # the run's parent is sweep.py, whose is slurm.sbatch
    os.kill(int(script), signal.SIGUSR1)  # what SLURM does before the time limit
    lab.wait_until_live()
    assert lab.sweep(*games, flags=["--index", "0"])[0] == 0, "another task may work beside it"
    assert lab.sweep("fine")[0] == 2, "a sweep may not"
    (lab.home / "fixed").touch()
    output, _ = submission.communicate(timeout=60)
    assert submission.returncode == 0
    assert lab.starts(0) == "fine crash crash waits waits".split()
    assert re.findall(r"0,1,2%2 task (\d): (\d)", output) == [("0", "0"), ("1", "1"), ("2", "0")]

    output = lab.sweep(*games, flags=flags, PATH=path)[1]
    assert "array 1%2 task 1: 0" in output, "only what has failed is submitted again"


RUNS = {"ppg": 9, "ppo": 9, "ppg_16": 48, "ppo_16": 48}
RUNS |= {"ppg_paper": 48, "ppg_generalization": 48, "ppg_ablations": 45}


@pytest.mark.parametrize("tiny", ["", "1"])
@pytest.mark.parametrize("name", RUNS)
def test_the_commands_of_the_shell_scripts_are_good(name, tiny, tmp_path):
    argv = ["bash", ROOT / "benchmark" / f"{name}.sh", "--dry-run", "--folder", tmp_path / "sweep"]
    output = subprocess.check_output(argv, env=os.environ | {"TINY": tiny}, text=True)
    commands = [shlex.split(line) for line in output.splitlines()]
    assert len(commands) == RUNS[name]
    for _, script, *flags in commands:
        module = importlib.import_module(Path(script).stem)
        args = tyro.cli(module.Args, args=flags)
        assert (args.total_timesteps == 256) == (tiny == "1")
