"""Sweeps of real processes: most of them a stub that keeps to the training scripts' contract and misbehaves by game."""

import csv
import importlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from conftest import CHEAP_PPG, CHEAP_PPO, ROOT, as_flags, wait_for

SWEEP = ROOT / "benchmark" / "sweep.py"

STUB = """
import argparse, fcntl, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("--env-id", "--seed", "--exp-name", "--run-dir", "--resume", "--size"):
    parser.add_argument(flag)
parser.add_argument("--total-timesteps", type=int, default=256)
args = parser.parse_args()
game, here = args.env_id.split(".")[0], Path(__file__).parent
run_dir = Path(args.resume or args.run_dir)
name = run_dir.name
with open(here / "starts.txt", "a") as file:
    file.write(f"{name} {'resume' if args.resume else 'start'} {os.getpid()}\\n")

gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
slot = open(here / f"gpu-{gpu}", "w")
try:
    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    use = "alone"
except BlockingIOError:
    use = "shared"
with open(here / "gpus.txt", "a") as file:
    file.write(f"{gpu} {use}\\n")

if game == "refused":
    print("error: no such flag")
    sys.exit(2)
if game == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / "ready").touch()
    time.sleep(1000)
stop = []
signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))
iteration = 0
if args.resume:
    iteration = json.loads((run_dir / "checkpoint.pt").read_text())
    rows = (run_dir / "metrics.csv").read_text().splitlines(keepends=True)[: iteration + 1]
else:
    run_dir.mkdir()
    rows = ["iteration,global_step,episodes,wall_time,charts/mean_return_100,charts/SPS\\n"]
(run_dir / "metrics.csv").write_text("".join(rows))
num_iterations = args.total_timesteps // 64
numbers = {"num_iterations": num_iterations, "batch_size": 64, "total_timesteps": args.total_timesteps}
(run_dir / "args.json").write_text(json.dumps({"args": vars(args) | numbers}))

while iteration < num_iterations and not stop:
    iteration += 1
    with open(run_dir / "metrics.csv", "a") as file:
        file.write(f"{iteration},{iteration * 64},0,0.1,,100\\n")
    if game == "early":
        sys.exit(1)
    if iteration == 2:
        (run_dir / "checkpoint.pt").write_text("2")
    if iteration == 3 and not (here / "fixed").exists():
        if game == "crash":
            print("the GPU caught fire")
            sys.exit(1)
        if game == "liar":
            sys.exit(0)
        if game == "accent":
            sys.stdout.buffer.write("brûlé".encode())
            sys.exit(1)
        if game == "unlogged":
            (run_dir.parents[1] / "logs" / f"{name}.log").unlink()
            sys.exit(1)
        if game == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if game == "chatty":
            print("x" * 1_000_000, flush=True)
        if game == "waits":
            (here / "ready").touch()
            while not stop and not (here / "fixed").exists():
                time.sleep(0.02)
    if game == "flaky" and iteration == 3 and not args.resume:
        sys.exit(1)
(run_dir / "checkpoint.pt").write_text(str(iteration))
if game == "odd":
    for file in (here / args.env_id).iterdir():
        (run_dir / file.name).write_text(file.read_text())
    time.sleep(0.5)  # a report falls into it
sys.exit(128 + stop[0] if stop else 0)
"""


class Lab:
    """A stub command, a sweep folder, and what the stubs recorded."""

    def __init__(self, home: Path):
        self.home, self.folder = home, home / "sweep"
        (home / "stub.py").write_text(STUB)
        self.command = f"{sys.executable} -S -E {home / 'stub.py'}"

    def popen(self, *env_ids, flags=(), command=None, **options) -> subprocess.Popen:
        what = ["--env-ids", *env_ids, "--command", command or self.command, "--num-seeds", "1"] if env_ids else []
        argv = [sys.executable, SWEEP, "--folder", self.folder, *what, "--retry-delay", "0", *flags]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT} | options
        return subprocess.Popen([str(word) for word in argv], **options)

    def sweep(self, *env_ids, **options) -> tuple[int, str]:
        process = self.popen(*env_ids, **options)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def starts(self) -> list[tuple[str, str]]:
        path = self.home / "starts.txt"
        return [tuple(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []

    def last_pid(self) -> int:
        return int((self.home / "starts.txt").read_text().split()[-1])

    def state(self, name: str) -> dict:
        return json.loads((self.folder / "state" / f"{name}.json").read_text())

    def fix(self):
        (self.home / "fixed").touch()


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def iterations(run_dir: Path) -> list[int]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [int(row["iteration"]) for row in csv.DictReader(file)]


def test_one_crashes_one_is_killed_one_finishes_and_a_second_call_completes(lab):
    code, output = lab.sweep("crash", "killed", "fine", flags=["--retries", "0"])
    assert code == 1
    assert "FAILED crash__stub__1: exit code 1: the GPU caught fire" in output
    assert "FAILED killed__stub__1: killed by SIGKILL" in output
    assert "2 of 3 runs failed" in output
    assert lab.state("fine__stub__1")["state"] == "finished" and lab.state("crash__stub__1")["state"] == "failed"

    lab.fix()
    code, output = lab.sweep("crash", "killed", "fine")
    assert code == 0, output
    assert lab.starts()[3:] == [("crash__stub__1", "resume"), ("killed__stub__1", "resume")]
    for name in ("crash", "killed", "fine"):
        assert iterations(lab.folder / "runs" / f"{name}__stub__1") == [1, 2, 3, 4]


def test_retries_are_bounded_and_go_on_from_the_checkpoint(lab):
    code, output = lab.sweep("flaky", "crash", "refused", flags=["--retries", "2"])
    assert code == 1
    names = [name.split("__")[0] for name, _ in lab.starts()]
    assert (names.count("flaky"), names.count("crash"), names.count("refused")) == (2, 3, 1)
    assert ("flaky__stub__1", "resume") in lab.starts()
    assert "FAILED refused__stub__1: exit code 2: error: no such flag" in output
    assert "2 of 3 runs failed" in output


def test_exit_code_0_alone_does_not_make_a_run_finished(lab):
    code, output = lab.sweep("liar", flags=["--retries", "0"])
    assert code == 1
    assert "exit code 0, but metrics.csv ends at iteration 3 of 4" in output


GOOD_ARGS = {"num_iterations": 4, "batch_size": 64, "total_timesteps": 256}
HEAD = "iteration,global_step,episodes,wall_time,charts/mean_return_100,charts/SPS\n"
ODD_FILES = {  # name: file, content, what the reason says
    "no_num_iterations": ("args.json", {"args": GOOD_ARGS | {"num_iterations": None}}, "TypeError"),
    "no_total_timesteps": (
        "args.json",
        {"args": {"num_iterations": 4, "batch_size": 64}},
        "KeyError: 'total_timesteps'",
    ),
    "null_timesteps": ("args.json", {"args": GOOD_ARGS | {"total_timesteps": None}}, "TypeError"),
    "list_iterations": ("args.json", {"args": GOOD_ARGS | {"num_iterations": [4]}}, "TypeError"),
    "list_timesteps": ("args.json", {"args": GOOD_ARGS | {"total_timesteps": [256]}}, "TypeError"),
    "infinite": ("args.json", {"args": GOOD_ARGS | {"num_iterations": float("inf")}}, "OverflowError"),
    "no_batch": ("args.json", {"args": GOOD_ARGS | {"batch_size": 0}}, "ZeroDivisionError"),
    "list": ("args.json", ["args"], "TypeError"),
    "empty_args": ("args.json", {"args": {}}, "KeyError: 'num_iterations'"),
    "deep": ("args.json", "[" * 100_000, "RecursionError"),
    "empty": ("args.json", "", "JSONDecodeError"),
    "stopped_clock": ("metrics.csv", HEAD + "4,256,0,0.1,,0\n", "ZeroDivisionError"),
    "nan_speed": ("metrics.csv", HEAD + "4,256,0,0.1,,nan\n", "ValueError"),
    "tiny_speed": ("metrics.csv", HEAD + "4,255,0,0.1,,1e-300\n", "OverflowError"),
    "no_metrics": ("metrics.csv", "", "IndexError"),
    "short_row": ("metrics.csv", HEAD + "4\n", "TypeError"),
    "nul": ("metrics.csv", HEAD + "4,\0,0,0.1,,100\n", "Error"),
}


def test_an_odd_run_is_failed_and_the_others_go_on(lab):
    games = {f"odd.{name.replace('_', '-')}": odd for name, odd in ODD_FILES.items()}
    for game, (file, content, _) in games.items():
        (lab.home / game).mkdir()
        (lab.home / game / file).write_text(content if isinstance(content, str) else json.dumps(content))
    flags = ["--retries", "0", "--workers", "6", "--report-interval", "0.2"]
    code, output = lab.sweep(*games, "fine", flags=flags)
    assert code == 1 and "Traceback" not in output
    for game, (*_, reason) in games.items():
        expected = f"FAILED {game}__stub__1: exit code 0, but args.json or metrics.csv cannot be read: .*{reason}"
        assert re.search(expected, output), game
    assert (
        f"{len(games)} of {len(games) + 1} runs failed" in output and lab.state("fine__stub__1")["state"] == "finished"
    )


@pytest.mark.parametrize("text", ['{"args": {}}', '{"args": null}', "[" * 100_000])
def test_an_odd_file_does_not_make_a_sweep_impossible_to_continue(lab, text):
    assert lab.sweep("fine", "fine.2")[0] == 0
    (lab.folder / "runs" / "fine__stub__1" / "args.json").write_text(text)
    (lab.folder / "state" / "fine.2__stub__1.json").write_text(text)
    code, output = lab.sweep()
    assert code == 0 and "0 of 2 runs are finished" in output and "all runs are finished" in output
    assert lab.starts()[2:] == [("fine__stub__1", "resume"), ("fine.2__stub__1", "resume")]


def test_a_budget_that_is_not_reached_is_told_as_such(lab):
    (lab.home / "odd").mkdir()
    (lab.home / "odd" / "args.json").write_text(json.dumps({"args": GOOD_ARGS}))
    (lab.home / "odd" / "metrics.csv").write_text(HEAD + "4,256,0,0.1,,100\n")
    code, output = lab.sweep("odd", command=f"{lab.command} --total-timesteps 512", flags=["--retries", "0"])
    assert code == 1 and "exit code 0, but args.json has 256 timesteps of 512" in output


@pytest.mark.parametrize("game, reason", [("unlogged", "No such file or directory"), ("accent", "br?l?")])
def test_a_failed_run_with_an_odd_log_does_not_end_the_others(lab, game, reason):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    code, output = lab.sweep(game, "fine", flags=["--retries", "0"], env=environment)
    assert code == 1 and "1 of 2 runs failed" in output
    assert f"FAILED {game}__stub__1: exit code 1: " in output and reason in output


def test_a_command_that_cannot_be_started_fails_its_run_alone(lab):
    assert lab.sweep("fine")[0] == 0
    sweep = json.loads((lab.folder / "sweep.json").read_text())
    for name, text in (("gone", "nosuchprogram"), ("nul", "true \0")):
        sweep["commands"][name] = f"{text} --exp-name {name}"
        sweep["runs"][f"fine__{name}__1"] = {"env_id": "fine", "exp_name": name, "seed": 1}
    sweep["runs"]["fine.2__stub__1"] = {"env_id": "fine.2", "exp_name": "stub", "seed": 1}
    (lab.folder / "sweep.json").write_text(json.dumps(sweep))
    code, output = lab.sweep(flags=["--retries", "0"])
    assert code == 1 and "2 of 3 runs failed" in output and lab.state("fine.2__stub__1")["state"] == "finished"
    assert "FAILED fine__gone__1: [Errno 2]" in output and "FAILED fine__nul__1: embedded null byte" in output


def test_a_name_that_is_too_long_fails_its_run_alone(lab):
    code, output = lab.sweep("x" * 300, "fine", flags=["--retries", "0"])
    assert code == 1 and "File name too long" in output and lab.state("fine__stub__1")["state"] == "finished"


def test_a_folder_whose_name_is_no_text(lab):
    lab.folder = lab.home / os.fsdecode(b"\xff")
    code, output = lab.sweep("fine")
    assert code == 0 and "all runs are finished" in output


def test_it_works_without_standard_streams(lab):
    argv = shlex.join(
        map(str, [sys.executable, SWEEP, "--folder", lab.folder, "--num-seeds", "1", "--env-ids", "fine"])
    )
    argv += f" --command {shlex.quote(lab.command)}"
    assert subprocess.run(f"{argv} <&- >&- 2>&-", shell=True).returncode == 0
    assert lab.state("fine__stub__1")["state"] == "finished"


def test_a_run_cut_before_its_first_checkpoint_starts_afresh_and_is_kept_aside(lab):
    code, _ = lab.sweep("early", flags=["--retries", "1"])
    assert code == 1
    assert lab.starts() == [("early__stub__1", "start")] * 2
    (cut,) = (lab.folder / "aside").iterdir()
    assert iterations(cut) == [1]


def test_a_killed_sweep_takes_its_runs_along_and_a_second_call_continues(lab):
    first = lab.popen("waits", "fine")
    wait_for((lab.home / "ready").exists)
    first.kill()
    first.communicate()
    wait_for(lambda: has_ended(lab.last_pid()))

    lab.fix()
    lab.folder = lab.folder.rename(lab.home / "elsewhere")
    code, output = lab.sweep()  # the folder says what to do, wherever it lies
    assert code == 0, output
    assert lab.starts() == [("waits__stub__1", "start"), ("waits__stub__1", "resume"), ("fine__stub__1", "start")]
    assert iterations(lab.folder / "runs" / "waits__stub__1") == [1, 2, 3, 4]
    assert len(json.loads((lab.folder / "sweep.json").read_text())["calls"]) == 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_stops_the_runs_in_order(lab, signum):
    process = lab.popen("waits", "fine")
    wait_for((lab.home / "ready").exists)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"stopped by {signum.name}; the same call again continues" in output
    assert (lab.folder / "runs" / "waits__stub__1" / "checkpoint.pt").read_text() == "3", "stopped at a safe point"
    assert lab.state("waits__stub__1")["state"] == "stopped"
    assert not (lab.folder / "state" / "fine__stub__1.json").exists(), "nothing was started after the signal"


def test_a_run_that_ignores_sigterm_is_killed_after_the_grace(lab):
    process = lab.popen("stubborn", flags=["--grace", "0.3"])
    wait_for((lab.home / "ready").exists)
    process.terminate()
    assert process.wait(timeout=60) == 143
    assert has_ended(lab.last_pid())


def test_a_second_ctrl_c_does_not_wait_for_the_grace(lab):
    process = lab.popen("stubborn", flags=["--grace", "1000"])
    wait_for((lab.home / "ready").exists)
    process.send_signal(signal.SIGINT)
    assert any("Ctrl-C again" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert has_ended(lab.last_pid())


def test_gpu_slots_are_never_shared_and_a_crash_gives_its_slot_back(lab):
    games = [f"{kind}.{number}" for number in range(5) for kind in ("fine", "crash", "flaky")]
    code, output = lab.sweep(*games, flags=["--gpus", "0", "3", "GPU-5e1f", "--retries", "1"])
    assert code == 1 and "5 of 15 runs failed" in output
    uses = [line.split() for line in (lab.home / "gpus.txt").read_text().splitlines()]
    assert len(uses) == 5 + 10 + 10
    assert {use for _, use in uses} == {"alone"}
    assert {gpu for gpu, _ in uses} == {"0", "3", "GPU-5e1f"}


def test_gpus_come_from_the_environment_and_workers_fit_them(lab):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "6,7"}
    code, output = lab.sweep("fine", flags=["--workers", "3"], env=environment)
    assert code == 2 and "--workers 3 on GPUs 6 7" in output and not lab.folder.exists()
    assert lab.sweep("fine", "fine.2", env=environment)[0] == 0
    assert {line.split()[0] for line in (lab.home / "gpus.txt").read_text().splitlines()} == {"6", "7"}


def test_a_broken_driver_is_refused_and_its_message_is_no_list_of_gpus(lab):
    nvidia_smi = lab.home / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    nvidia_smi.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PATH"] = f"{lab.home}:{environment['PATH']}"
    code, output = lab.sweep("fine", env=environment)
    assert code == 2 and "nvidia-smi fails: No devices were found" in output and not lab.folder.exists()
    nvidia_smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    assert lab.sweep("fine", "fine.2", env=environment)[0] == 0
    assert {line.split()[0] for line in (lab.home / "gpus.txt").read_text().splitlines()} == {"0", "1"}


@pytest.mark.parametrize("num_seeds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_many_runs(lab, num_seeds):
    """The full one has 200."""
    games, number = [f"fine.{number}" for number in range(20)], 20 * num_seeds
    flags = ["--num-seeds", str(num_seeds), "--workers", "8"]
    code, output = lab.sweep(*games, flags=flags)
    assert code == 0, output
    assert len(set(lab.starts())) == len(lab.starts()) == number
    code, output = lab.sweep(*games, flags=flags)
    assert code == 0 and f"{number} of {number} runs are finished" in output
    assert len(lab.starts()) == number


def test_a_full_log_disk_fails_its_run_and_no_other(lab):
    (lab.folder / "logs").mkdir(parents=True)
    (lab.folder / "logs" / "fine__stub__1.log").symlink_to("/dev/full")

    def allow_small_files_only():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    flags = ["--retries", "0"]
    code, output = lab.sweep("fine", "chatty", "fine.2", flags=flags, preexec_fn=allow_small_files_only)
    assert code == 1
    assert "FAILED fine__stub__1: [Errno 28] No space left on device" in output
    assert re.search("FAILED chatty__stub__1: exit code 1", output)
    assert "2 of 3 runs failed" in output and lab.state("fine.2__stub__1")["state"] == "finished"


def test_two_sweeps_in_one_folder_refuse_each_other(lab):
    first = lab.popen("waits")
    wait_for((lab.home / "ready").exists)
    with open(lab.folder / "lock", "ab") as lock:
        lock.write(b"\xff\n")
    code, output = lab.sweep("fine")
    assert code == 2 and len(output.splitlines()) == 1
    assert f"another sweep is at work in {lab.folder}: process {first.pid} on" in output
    lab.fix()
    assert first.wait(timeout=60) == 0
    assert lab.starts() == [("waits__stub__1", "start")]


def test_another_command_is_refused_but_a_larger_budget_more_games_and_more_seeds_are_not(lab):
    assert lab.sweep("fine")[0] == 0
    code, output = lab.sweep("fine", command=f"{lab.command} --size 3")
    assert code == 2 and "has runs of another command" in output
    larger = f"{lab.command} --total-timesteps 512"
    code, output = lab.sweep("fine", "fine.2", command=larger, flags=["--num-seeds", "2"])
    assert code == 0, output
    assert iterations(lab.folder / "runs" / "fine__stub__1") == list(range(1, 9))
    assert len(lab.starts()) == 1 + 4
    assert lab.sweep("fine", command=f"{lab.command} --total-timesteps 256")[0] == 2, "and not a smaller one"


def test_several_commands_in_one_sweep_run_under_their_own_names(lab):
    commands = [lab.command, f"{lab.command} --exp-name big --size 9"]
    what = ["--env-ids", "fine", "--num-seeds", "2", "--command", *commands]
    assert lab.sweep(flags=what)[0] == 0
    assert {path.name for path in (lab.folder / "runs").iterdir()} == {
        "fine__stub__1", "fine__stub__2", "fine__big__1", "fine__big__2",
    }  # fmt: skip
    assert json.loads((lab.folder / "runs" / "fine__big__2" / "args.json").read_text())["args"]["size"] == "9"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "give --env-ids and --command"),
        ("--env-ids a", "go together"),
        ("--env-ids a a --command true", "each game once"),
        ("--env-ids a --command true 'true x'", "its own --exp-name"),
        ("--env-ids a__b --command true", "cannot be part of a run's name"),
        ("--env-ids a --command 'true --seed 3'", "--seed in --command"),
        ("--env-ids a --command 'true --run_dir=x'", "--run-dir in --command"),
        ("--env-ids a --command 'nosuchprogram x'", "does not begin with a program"),
        ("--env-ids a --command ''", "does not begin with a program"),
        ('--env-ids a --command "true \'x"', "No closing quotation"),
        ("--env-ids a --command 'true --exp-name'", "expected one argument"),
        ("--env-ids a --command 'true --total-timesteps 1e6'", "invalid int value"),
        ("--env-ids a --command true --num-seeds 1000000000", "at most 10000"),
        ("--env-ids a --command true --workers 1000000000", "at most 10000"),
        (f"--folder {'x' * 300}", "is not a sweep"),
        ("--env-ids a --command true --num-seeds 0", "must be at least 1"),
        ("--env-ids a --command true --index 3", "--index"),
        ("--folder nosuchfolder", "is not a sweep"),
    ],
)
def test_bad_arguments_give_exit_code_2_and_leave_nothing_behind(tmp_path, arguments, message):
    argv = [sys.executable, str(SWEEP), *shlex.split(arguments)]
    result = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_dry_run_prints_commands_that_a_shell_can_run(lab):
    code, output = lab.sweep("fine", "fine.2", flags=["--dry-run"])
    assert code == 0 and not lab.folder.exists()
    assert [line for line in output.splitlines() if line.startswith("#")] == [
        "# fine__stub__1: start",
        "# fine.2__stub__1: start",
    ]
    (lab.folder / "runs").mkdir(parents=True)
    subprocess.run(["bash", "-e"], input=output, text=True, check=True)
    assert iterations(lab.folder / "runs" / "fine.2__stub__1") == [1, 2, 3, 4]


def test_lines_say_how_the_runs_stand(lab):
    process = lab.popen("waits", flags=["--report-interval", "0.2"])
    wait_for((lab.home / "ready").exists)
    assert any("waits__stub__1: 192 steps, 75%, return nan, 0:00:00 left" in line for line in process.stdout)
    lab.fix()
    process.stdout.read()
    assert process.wait(timeout=60) == 0


RUNS = {"ppg": 9, "ppo": 9, "ppg_16": 48, "ppo_16": 48, "ppg_paper": 48, "ppg_generalization": 48, "ppg_ablations": 45}
RUNS |= {"small": 45}


@pytest.mark.parametrize("tiny", ["", "1"])
@pytest.mark.parametrize("name", RUNS)
def test_the_commands_of_the_scripts_are_good(name, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: 2**20)  # a terabyte of memory: the machines of these runs have enough
    argv = ["bash", ROOT / "benchmark" / f"{name}.sh", "--dry-run", "--folder", tmp_path / "sweep"]
    result = subprocess.run(argv, env=os.environ | {"TINY": tiny}, capture_output=True, text=True, check=True)
    commands = [shlex.split(line) for line in result.stdout.splitlines() if not line.startswith("#")]
    assert len(commands) == RUNS[name]
    for python, script, *flags in commands:
        assert python == "python3"
        args = tyro.cli(importlib.import_module(Path(script).stem).Args, args=flags)
        assert (args.total_timesteps == 256) == (tiny == "1")


def test_the_scripts_share_their_games_and_tiny_sizes():
    for words in ("leaper maze miner", "--num-minibatches 2", "--distribution-mode hard --num-envs 256"):
        files = [path.name for path in (ROOT / "benchmark").glob("*.sh") if words in path.read_text()]
        assert files == ["common.sh"], words


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_procgen", "ppg_procgen"])
def test_training_runs_of_a_killed_sweep_are_whole_after_a_second_call(lab, script):
    """With the real scripts: the second run is killed with the sweep as its first row is on the disk."""
    tiny = CHEAP_PPG if script == "ppg_procgen" else CHEAP_PPO | {"checkpoint_interval": 1}
    flags = as_flags({name: value for name, value in tiny.items() if name != "env_id"})
    argv = [sys.executable, SWEEP, "--folder", lab.folder, "--env-ids", "starpilot", "bossfight", "--num-seeds", "1"]
    argv += ["--command", shlex.join([sys.executable, f"{script}.py", *flags])]
    first = subprocess.Popen(argv, cwd=ROOT)
    runs = [lab.folder / "runs" / f"{env_id}__{script}__1" for env_id in ("starpilot", "bossfight")]
    wait_for(lambda: (runs[1] / "metrics.csv").exists() and iterations(runs[1]), seconds=180)
    first.kill()
    first.wait()
    assert iterations(runs[0]) == [1, 2, 3, 4]

    assert subprocess.run(argv, cwd=ROOT, timeout=300).returncode == 0
    for run_dir in runs:
        assert iterations(run_dir) == [1, 2, 3, 4]
    log = (lab.folder / "logs" / f"{runs[0].name}.log").read_text()
    assert log.count("===") == 1, "the finished run was not started again"


SLURM = {
    # Runs the tasks one after the other; a task that asks for a requeue runs again, as under SLURM.
    "sbatch": """
import os, pathlib, re, subprocess, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
script, *arguments = [word for word in sys.argv[1:] if not word.startswith("--")]
requeued = pathlib.Path(__file__).with_name("requeued")
for index in re.sub("%.*", "", options["array"]).split(","):
    while True:
        requeued.unlink(missing_ok=True)
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}
        with open(options["output"].replace("%A", "7").replace("%a", index), "a") as output:
            task = subprocess.run(["bash", script, *arguments], env=environment, stdout=output, stderr=output)
        if not requeued.exists():
            break
    print("task", index, "exit code", task.returncode)
""",
    "srun": "import os, sys; assert sys.argv[1] == '--cpus-per-task=8'; os.execvp(sys.argv[2], sys.argv[2:])",
    "scontrol": "import pathlib, sys; assert sys.argv[1:] == ['requeue', '7']; "
    "pathlib.Path(__file__).with_name('requeued').touch()",
}


@pytest.fixture
def slurm(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, source in SLURM.items():
        (programs / name).write_text(f"#!{sys.executable}\n{source}")
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path}


def test_slurm_array_runs_resumes_and_skips(lab, slurm):
    template = (ROOT / "benchmark" / "slurm.sbatch").read_text()
    lab.folder.mkdir()  # with a template that the user has changed
    (lab.folder / "slurm.sbatch").write_text(template.replace("--index", "--retry-delay 0 --index"))
    submission = lab.popen("fine", "crash", "waits", flags=["--slurm", "--workers", "2"], env=slurm)
    wait_for((lab.home / "ready").exists)
    step = int(Path(f"/proc/{lab.last_pid()}/stat").read_text().rsplit(")", 1)[1].split()[1])  # the run's parent
    os.kill(step, signal.SIGUSR1)  # what SLURM does before the time limit
    output, _ = submission.communicate(timeout=60)
    assert submission.returncode == 0
    assert re.findall(r"task (\d) exit code (\d)", output) == [("0", "0"), ("1", "1"), ("2", "0")]
    assert lab.starts()[-2:] == [("waits__stub__1", "start"), ("waits__stub__1", "resume")]

    lab.fix()
    output = lab.sweep(flags=["--slurm"], env=slurm)[1]  # only what has failed is submitted again
    assert re.findall(r"task (\d) exit code (\d)", output) == [("1", "0")]
    code, output = lab.sweep(flags=["--slurm"], env=slurm)
    assert code == 0 and "3 of 3 runs are finished" in output and "task" not in output
    for game in ("fine", "crash", "waits"):
        assert iterations(lab.folder / "runs" / f"{game}__stub__1") == [1, 2, 3, 4]


def test_slurm_is_submitted_from_a_machine_with_a_broken_driver(lab, slurm):
    """A login node: the GPUs are elsewhere."""
    nvidia_smi = lab.home / "bin" / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    nvidia_smi.chmod(0o755)
    environment = {name: value for name, value in slurm.items() if name != "CUDA_VISIBLE_DEVICES"}
    (lab.home / "bin" / "sbatch").write_text("#!/bin/sh\necho submitted\n")
    code, output = lab.sweep("fine", flags=["--slurm"], env=environment)
    assert code == 0 and "submitted" in output
    code, output = lab.sweep("fine", flags=["--dry-run"], env=environment)
    assert code == 0 and "# fine__stub__1: start" in output


def test_two_array_tasks_never_work_on_one_run(lab):
    first = lab.popen("waits", "fine")
    wait_for((lab.home / "ready").exists)
    first.kill()
    first.communicate()
    wait_for(lambda: has_ended(lab.last_pid()))
    (lab.home / "ready").unlink()

    holder = lab.popen(flags=["--index", "0"])
    wait_for((lab.home / "ready").exists)
    code, output = lab.sweep(flags=["--index", "0", "--retries", "0"])
    assert code == 1 and "another process is at work on it" in output
    assert lab.state("waits__stub__1")["state"] == "running"
    assert lab.sweep(flags=["--index", "1"])[0] == 0, "another run's task is not in the way"
    assert lab.sweep(flags=["--index", "2"])[0] == 2, "there is no such run"
    assert lab.sweep("fine")[0] == 2, "nor does a sweep start while tasks run"
    patient = lab.popen(flags=["--index", "0", "--retries", "1000", "--retry-delay", "0.1"])
    assert any("retry 1 of 1000" in line for line in patient.stdout)
    lab.fix()
    assert holder.wait(timeout=60) == 0
    assert "all runs are finished" in patient.communicate(timeout=60)[0] and patient.returncode == 0
    assert lab.state("waits__stub__1")["state"] == "finished"


COMMANDS = {"true": "true"}
NO_RUN = {"commands": COMMANDS, "runs": {}, "calls": []}
A_RUN = {"env_id": "x", "exp_name": "true", "seed": 1}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ([], "TypeError"),
        ([1], "TypeError"),
        (0, "TypeError"),
        ({}, "KeyError: 'commands'"),
        (NO_RUN | {"calls": [3]}, "its calls are odd"),
        (NO_RUN | {"calls": {}}, "its calls are odd"),
        (NO_RUN | {"commands": {"a": "true 'x"}}, "No closing quotation"),
        (NO_RUN | {"commands": {"a": "true --exp-name"}}, "expected one argument"),
        (NO_RUN | {"commands": {"a": None}}, "None is no command of 'a'"),
        (NO_RUN | {"commands": {"a": "true --exp-name b"}}, "is no command of 'a'"),
        (NO_RUN | {"runs": {"../../x__true__1": A_RUN}}, "'../../x__true__1' is no run of a sweep"),
        (NO_RUN | {"runs": {"x__a__1": A_RUN | {"exp_name": "a"}}}, "'x__a__1' is no run of a sweep"),
        (NO_RUN | {"runs": {"x__true__1": {"exp_name": "true", "seed": 1}}}, "not {'env_id': 'x'"),
        (NO_RUN | {"runs": {"5__true__1": A_RUN | {"env_id": 5}}}, "not {'env_id': '5'"),
        (NO_RUN | {"runs": {"x__true__1": A_RUN | {"env_id": "y"}}}, "not {'env_id': 'x'"),
        (NO_RUN | {"runs": {"x__true__1": 3}}, "not {'env_id': 'x'"),
        (NO_RUN | {"runs": [3]}, "AttributeError"),
    ],
)
def test_a_broken_record_is_refused_in_one_line(lab, content, message):
    lab.folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (lab.folder / "sweep.json").write_text(text)
    argv = [sys.executable, SWEEP, "--folder", lab.folder, "--env-ids", "a", "--command", "true"]
    result = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert f"{lab.folder}/sweep.json is broken, or not of a sweep: " in result.stderr and message in result.stderr
    assert (lab.folder / "sweep.json").read_text() == text and not list(lab.home.rglob("*x__*"))


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--retry-delay -1", "--retry-delay must be zero or positive, not -1.0"),
        ("--grace nan", "--grace must be zero or positive, not nan"),
        ("--retries -1", "--retries must be zero or positive, not -1"),
        ("--folder file/sweep", "file/sweep cannot be used"),
        ("--folder full", "full cannot be used: [Errno 28]"),
    ],
)
def test_unusable_folders_and_numbers_are_refused_in_one_line(tmp_path, flags, message):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sweep.tmp").symlink_to("/dev/full")
    argv = [sys.executable, str(SWEEP), "--env-ids", "a", "--command", "true", *flags.split()]
    result = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_a_reader_that_goes_away_does_not_stop_the_runs(lab):
    process = lab.popen("fine", "fine.2")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert iterations(lab.folder / "runs" / "fine.2__stub__1") == [1, 2, 3, 4]


def test_a_broken_state_file_does_not_hide_a_run(lab):
    assert lab.sweep("fine")[0] == 0
    (lab.folder / "state" / "fine__stub__1.json").write_text('{"state": "fin')
    code, output = lab.sweep("fine")
    assert code == 0 and "all runs are finished" in output
    assert lab.state("fine__stub__1")["state"] == "finished"
