"""Run a sweep, commands × games × seeds, on this machine's GPUs or as a SLURM array, such that nothing fails silently.

    python benchmark/sweep.py --env-ids starpilot bossfight --command "python ppg_procgen.py" --num-seeds 3

The same call again skips finished runs and continues interrupted ones from their checkpoint (--resume). Exit codes:
    0      every run is finished (--slurm: submitted)
    1      runs failed, after their retries; they are listed, with reason and log
    2      bad arguments, or another sweep is at work in the folder; nothing was started
    128+n  signal n (Ctrl-C, SIGTERM, ...) stopped the sweep and its runs

A sweep is a folder that holds no path of its machine: copy it, and continue elsewhere.
    sweep.json       the commands, the runs, and each call's time, machine, commit and package versions
    runs/NAME/       what the training script writes; NAME is {env_id}__{exp_name}__{seed}
    logs/NAME.log    the output of all attempts at that run
    state/NAME.json  running, retrying, finished, stopped or failed, and why; a file per run, because the tasks of an
                     array job write at the same time from several machines
    aside/           runs that were stopped before their first checkpoint, and started afresh
"""

import argparse
import csv
import ctypes
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import tyro

LABEL = "[a-zA-Z0-9.-]+(?:_[a-zA-Z0-9.-]+)*"  # part of a run's name: "__" inside could make two names collide
OWN_FLAGS = ("env_id", "seed", "run_dir", "resume")  # what the sweep itself gives to each run
PACKAGES = ("torch", "numpy", "gym3", "procgen", "procgen-mirror", "procgen-gym")


libc = ctypes.CDLL(None)


class UsageError(Exception):
    """The request cannot be served: one line, exit code 2."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise UsageError(message)


class Command:
    """A training command. `argv` is without the two flags that the sweep has to know."""

    def __init__(self, text: str):
        self.text = text
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name in ("exp_name", *OWN_FLAGS):
            parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}")
        parser.add_argument("--total-timesteps", "--total_timesteps", type=int, default=0)  # 0: the script's default
        try:
            flags, self.argv = parser.parse_known_args(shlex.split(text))
        except (argparse.ArgumentError, ValueError) as error:
            raise UsageError(f"--command {text!r}: {error}") from None
        own = [f"--{name.replace('_', '-')}" for name in OWN_FLAGS if getattr(flags, name) is not None]
        require(not own, f"{' '.join(own)} in --command {text!r}: the sweep sets that for each run")
        require(self.argv, f"--command {text!r} does not begin with a program that exists")
        script = next((word for word in self.argv if word.endswith(".py")), self.argv[0])
        self.exp_name = flags.exp_name or Path(script).stem
        self.total_timesteps = flags.total_timesteps


@dataclass
class Args:
    env_ids: tuple[str, ...] = ()
    """games; without games and commands, all the runs that the folder's sweep.json lists"""
    command: tuple[str, ...] = ()
    """training commands, each in quotes; if several, each with an --exp-name of its own (default: the script's name)"""
    num_seeds: int = 3
    """seeds per command and game"""
    start_seed: int = 1
    """the first seed"""
    folder: Path | None = None
    """where the sweep lives (default: sweeps/ and the exp_name of the first command)"""
    workers: int | None = None
    """runs, or SLURM tasks, at a time (default: one per GPU, or one without GPUs; SLURM: no limit)"""
    gpus: tuple[str, ...] | None = None
    """GPU slots; a GPU named twice takes two runs at a time (default: all visible GPUs; nothing after the flag: CPU)"""
    retries: int = 2
    """further attempts at a run that failed; bad arguments (exit code 2) are not tried again"""
    retry_delay: float = 10.0
    """seconds before a further attempt"""
    report_interval: float = 60.0
    """seconds between lines that say how the runs stand"""
    grace: float = 60.0
    """seconds that runs have to end when the sweep is stopped, before they are killed"""
    dry_run: bool = False
    """print the commands and do nothing"""
    slurm: bool = False
    """submit the unfinished runs as an array job, by FOLDER/slurm.sbatch (at first a copy of benchmark/slurm.sbatch)"""
    index: int | None = None
    """do the one run at this place in sweep.json: what each task of a SLURM array calls"""
    commands: dict[str, Command] = field(init=False)

    def __post_init__(self):
        parsed = [Command(text) for text in self.command]
        self.commands = {command.exp_name: command for command in parsed}
        is_unique = len(self.commands) == len(parsed) and len(set(self.env_ids)) == len(self.env_ids)
        require(is_unique, "runs must differ in name: name each game once, and give each command its own --exp-name")
        for command in parsed:
            message = f"--command {command.text!r} does not begin with a program that exists"
            require(shutil.which(command.argv[0]), message)
        for label in (*self.env_ids, *self.commands):
            require(re.fullmatch(LABEL, label), f"{label!r} cannot be part of a run's name, ENV__EXP__SEED")
        require(bool(self.env_ids) == bool(self.command), "--env-ids and --command go together")
        require(self.folder or parsed, "give --env-ids and --command, or the --folder of a sweep to continue")
        self.folder = self.folder or Path("sweeps") / parsed[0].exp_name
        is_alone = self.index is None or not (self.command or self.slurm)
        require(is_alone, "--index takes a run of --folder, and goes with neither --command nor --slurm")
        for count in (self.num_seeds, 1 if self.workers is None else self.workers):
            require(1 <= count <= 10_000, f"--num-seeds and --workers must be at least 1, at most 10000, not {count}")
        for name in ("retries", "retry_delay", "report_interval", "grace", "start_seed"):
            value = getattr(self, name)
            is_good = 0 <= value < 2**31  # nan is neither
            require(is_good, f"--{name.replace('_', '-')} must be zero or positive, not {value}")


class Progress(NamedTuple):
    iteration: int
    num_iterations: int
    budget: int
    text: str  # for people


@dataclass(eq=False)
class Run:
    folder: Path
    name: str
    command: Command
    attempt: int = 0
    not_before: float = 0.0  # time.monotonic() of the next attempt
    slot: str | None = None  # the GPU; None leaves CUDA_VISIBLE_DEVICES as it is
    process: subprocess.Popen | None = None

    def __post_init__(self):
        self.run_dir = self.folder / "runs" / self.name
        self.log_file = self.folder / "logs" / f"{self.name}.log"
        self.state_file = self.folder / "state" / f"{self.name}.json"

    def progress(self) -> Progress:
        """Where the run stands by its own files. Raises almost anything before the first row, or if they are odd."""
        args = json.loads((self.run_dir / "args.json").read_text())["args"]
        with open(self.run_dir / "metrics.csv", newline="") as file:
            # A line without its end is being written, or was when the run was killed.
            lines = [line for line in file if line.endswith("\n")]
        (row,) = csv.DictReader([lines[0], lines[-1]])
        iteration = int(row["iteration"])
        step = int(row["global_step"])
        num_iterations = int(args["num_iterations"])
        total = num_iterations * int(args["batch_size"]) * int(args.get("num_ranks", 1))
        left = timedelta(seconds=int((total - step) / float(row["charts/SPS"])))
        mean_return = float(row["charts/mean_return_100"] or "nan")  # blank before the first episode ends
        text = f"{step:,} steps, {step / total:.0%}, return {mean_return:.2f}, {left} left"
        return Progress(iteration, num_iterations, int(args["total_timesteps"]), text)

    def shortfall(self) -> str | None:
        """What the run lacks, by its own files, to be whole: the last iteration, of the command's budget."""
        try:
            at = self.progress()
        except Exception as error:  # odd files can raise almost anything, and must not end the other runs
            return f"args.json or metrics.csv cannot be read: {type(error).__name__}: {error}"
        if at.iteration != at.num_iterations:
            return f"metrics.csv ends at iteration {at.iteration} of {at.num_iterations}"
        if at.budget < self.command.total_timesteps:
            return f"args.json has {at.budget} timesteps of {self.command.total_timesteps}"
        return None

    def next_step(self) -> str:
        """A run is finished when it said so by exit code 0 and its metrics agree; one that only looks whole is resumed,
        and says at once that nothing is left to do."""
        state = None
        with suppress(Exception):  # missing, or cut by a full disk: then the run itself says how far it is
            state = json.loads(self.state_file.read_text())["state"]
        if state == "finished" and self.shortfall() is None:
            return "skip"
        return "resume" if os.path.exists(self.run_dir / "checkpoint.pt") else "start"

    def argv(self) -> list[str]:
        env_id, exp_name, seed = self.name.split("__")
        argv = [*self.command.argv, "--env-id", env_id, "--seed", seed, "--exp-name", exp_name]
        if self.command.total_timesteps:
            argv += ["--total-timesteps", str(self.command.total_timesteps)]
        return argv + ["--run-dir" if self.next_step() == "start" else "--resume", str(self.run_dir)]

    def start(self, slot: str | None):
        self.slot = slot
        self.attempt += 1
        with open(self.log_file, "ab", buffering=0) as log:
            try:
                # The process inherits the lock with its output, so that nobody starts the run a second time while any
                # part of it lives: neither another array task, nor a new sweep where something outlived the old one.
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(f"another process is at work on it, and holds {self.log_file}") from None
            if self.next_step() == "start" and self.run_dir.exists():  # stopped before its first checkpoint
                self.run_dir.rename(self.folder / "aside" / f"{self.name}.{datetime.now():%Y%m%d-%H%M%S-%f}")
            argv = self.argv()
            log.write(os.fsencode(f"=== {datetime.now():%F %T} {platform.node()}: {shlex.join(argv)}\n"))
            environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # or a killed run's last words are lost
            if slot is not None:
                environment["CUDA_VISIBLE_DEVICES"] = slot
            self.process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C reaches the sweep alone, which stops its runs in order
                preexec_fn=die_with_sweep,
            )
        self.write_state("running")

    def send(self, signum: int):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self.process.pid, signum)

    def failure(self) -> str | None:
        """Why the ended process has not finished its run; None if it has."""
        code = self.process.returncode
        if code == 0:
            shortfall = self.shortfall()
            return shortfall and f"exit code 0, but {shortfall}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        with suppress(ValueError):
            return f"stopped by {signal.Signals(code - 128).name}"
        try:
            output = self.log_file.read_text(errors="replace").rpartition("=== ")[2].partition("\n")[2]
        except OSError as error:
            output = str(error)
        output = re.sub("[│─╭╮╰╯]", "", output).strip()  # tyro frames its messages
        words = output if code == 2 else output.rpartition("\n")[2]  # the whole message, or a traceback's last line
        return f"exit code {code}: {' '.join(words.split())[:200]}"

    def write_state(self, state: str, reason: str | None = None):
        content = {"state": state, "reason": reason, "attempt": self.attempt, "gpu": self.slot}
        try:
            write_json(self.state_file, content)
        except OSError as error:  # a full disk must not end the other runs, and what counts is in the run's folder
            say(f"{self.name}: cannot write its state: {error}")


def die_with_sweep():
    """Called in the child before exec: prctl(PR_SET_PDEATHSIG) has the kernel kill it when the sweep dies, be it by
    SIGKILL, so that no run goes on unwatched on a GPU that the next sweep believes free. Between fork and exec this is
    safe only because the sweep has no threads."""
    libc.prctl(1, signal.SIGKILL)


def say(text: str):
    try:
        print(f"{datetime.now():%m-%d %H:%M:%S} {text}", flush=True)
    except OSError:  # the reader is gone (| head), or the terminal, or the disk is full: no reason to end the runs
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_json(path: Path, content: dict):
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def about_this_call() -> dict:
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit, versions = None, {}
    with suppress(OSError):  # there is no git
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    about = {"time": now, "host": platform.node(), "commit": commit}
    return about | {"python": platform.python_version(), "versions": versions}


def gpu_slots(args: Args) -> list[str | None]:
    gpus = args.gpus
    if gpus is None and "CUDA_VISIBLE_DEVICES" in os.environ:
        gpus = tuple(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    elif gpus is None and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True)
        message = " ".join((found.stdout + found.stderr).split())
        # A broken driver must not send the runs to the CPU.
        require(found.returncode == 0, f"nvidia-smi fails: {message}; --gpus names the GPUs, or none")
        gpus = tuple(found.stdout.split())
    if not gpus:
        return [None if gpus is None else ""] * (args.workers or 1)
    workers = args.workers or len(gpus)
    message = f"--workers {workers} on GPUs {' '.join(gpus)}: to share a GPU, name it twice, as in --gpus 0 0"
    require(workers <= len(gpus), message)
    return list(gpus[:workers])


def lock_folder(args: Args):
    """The kernel lets go of the lock when the process ends, however it ends. Array tasks share the lock with one
    another, since each locks its own run, but not with a sweep."""
    for name in ("runs", "logs", "state", "aside"):
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    lock = open(args.folder / "lock", "a+", errors="replace")
    try:
        fcntl.flock(lock, (fcntl.LOCK_EX if args.index is None else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise UsageError(f"another sweep is at work in {args.folder}: {' '.join(lock.read().split())}") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {platform.node()}\n")
    lock.flush()
    return lock


def read_sweep(path: Path) -> dict:
    """The content of sweep.json, which is checked because people edit it."""
    if not os.path.exists(path):
        return {"commands": {}, "runs": {}, "calls": []}
    try:
        sweep = json.loads(path.read_text())
        for exp_name, text in sweep["commands"].items():
            is_command = isinstance(text, str) and Command(text).exp_name == exp_name
            require(is_command, f"{text!r} is no command of {exp_name!r}")
        for name, run in sweep["runs"].items():
            parts = re.fullmatch(f"({LABEL})__({LABEL})__([0-9]+)", name)
            require(parts and parts[2] in sweep["commands"], f"{name!r} is no run of a sweep")
            expected = {"env_id": parts[1], "exp_name": parts[2], "seed": int(parts[3])}
            require(run == expected, f"{name!r} has {run}, not {expected}")
        calls = sweep["calls"]
        require(isinstance(calls, list) and all(isinstance(call, dict) for call in calls), "its calls are odd")
    except Exception as error:  # odd files can raise almost anything
        reason = error if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is broken, or not of a sweep: {reason}") from None
    return sweep


def plan(args: Args) -> tuple[dict, list[Run]]:
    """The content of sweep.json, with what this call adds to it, and the runs that this call is about."""
    sweep = read_sweep(args.folder / "sweep.json")
    for exp_name, command in args.commands.items():
        old = Command(sweep["commands"].get(exp_name, command.text))
        continues = command.argv == old.argv and command.total_timesteps >= old.total_timesteps
        # A larger budget only: other flags would make runs of one name that do not compare.
        message = f"{args.folder} has runs of another command, {old.text!r}: choose another --folder or --exp-name"
        require(continues, message)
        sweep["commands"][exp_name] = command.text
    selected = []
    for seed in range(args.start_seed, args.start_seed + args.num_seeds):
        for exp_name in args.commands:
            for env_id in args.env_ids:
                selected.append(f"{env_id}__{exp_name}__{seed}")
                # New runs go to the end: array tasks that wait in SLURM's queue know theirs by its place.
                sweep["runs"].setdefault(selected[-1], {"env_id": env_id, "exp_name": exp_name, "seed": seed})
    selected = selected or list(sweep["runs"])
    if args.index is not None:
        is_there = 0 <= args.index < len(selected)
        require(is_there, f"{args.folder} has no run {args.index}, only {len(selected)} runs, counted from 0")
        selected = [selected[args.index]]
    require(selected, f"{args.folder} has no runs")
    commands = {exp_name: Command(text) for exp_name, text in sweep["commands"].items()}
    return sweep, [Run(args.folder, name, commands[name.split("__")[1]]) for name in selected]


def submit(args: Args, sweep: dict, runs: list[Run]) -> int:
    """One array with a task per run; when and where they run, and again if interrupted, is SLURM's affair."""
    script = args.folder / "slurm.sbatch"
    if not script.exists():
        shutil.copyfile(Path(__file__).with_name("slurm.sbatch"), script)
    places = {name: str(place) for place, name in enumerate(sweep["runs"])}
    array = ",".join(places[run.name] for run in runs) + (f"%{args.workers}" if args.workers else "")
    options = [f"--array={array}", f"--job-name={args.folder.name}", f"--output={args.folder}/logs/slurm-%A_%a.log"]
    return subprocess.run(["sbatch", *options, script, args.folder]).returncode


def work(runs: list[Run], slots: list[str | None], args: Args) -> int:
    signals = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
            signal.signal(signum, lambda signum, frame: signals.append(signum))

    waiting, running, failed = list(runs), [], {}
    next_report = 0.0

    def attempt_failed(run: Run, reason: str, can_retry: bool = True) -> str:
        if can_retry and run.attempt <= args.retries:
            say(f"{run.name}: {reason}; retry {run.attempt} of {args.retries} in {args.retry_delay:g} s")
            run.not_before = time.monotonic() + args.retry_delay
            waiting.append(run)
            return "retrying"
        say(f"{run.name}: FAILED, {reason}")
        failed[run] = reason
        return "failed"

    try:
        while (waiting or running) and not signals:
            for run in [run for run in running if run.process.poll() is not None]:
                run.send(signal.SIGKILL)  # what a crashed run left behind must not share the GPU with the next one
                running.remove(run)
                slots.append(run.slot)
                if reason := run.failure():
                    run.write_state(attempt_failed(run, reason, run.process.returncode != 2), reason)
                else:
                    say(f"{run.name}: finished")
                    run.write_state("finished")
            for run in [run for run in waiting if run.not_before <= time.monotonic()][: len(slots)]:
                waiting.remove(run)
                step = run.next_step()
                try:
                    run.start(slots[0])
                except BlockingIOError as error:
                    attempt_failed(run, str(error))  # its state is for the process that holds it to write
                except (OSError, ValueError) as error:  # no disk space, no such program, a NUL in the command, ...
                    run.write_state(attempt_failed(run, str(error)), str(error))
                else:
                    running.append(run)
                    say(f"{run.name}: {step}" + (f" on GPU {slots[0]}" if slots[0] else ""))
                    del slots[0]
            if time.monotonic() >= next_report:
                for run in running:
                    with suppress(Exception):  # no row yet, or odd files: then there is nothing to show
                        say(f"{run.name}: {run.progress().text}")
                next_report = time.monotonic() + args.report_interval
            time.sleep(0.1)
    finally:
        stop(running, signals, args.grace)

    for run, reason in failed.items():
        say(f"FAILED {run.name}: {reason} (see {run.log_file})")
    if signals:
        say(f"stopped by {signal.Signals(signals[-1]).name}; the same call again continues")
        return 128 + signals[-1]
    say(f"{len(failed)} of {len(runs)} runs failed" if failed else "all runs are finished")
    return 1 if failed else 0


def stop(running: list[Run], signals: list[int], grace: float):
    for run in running:
        run.send(signal.SIGTERM)
    if running:
        say(f"stopping {len(running)} runs, in at most {grace:g} s; Ctrl-C again kills them")
    deadline = time.monotonic() + grace
    while any(run.process.poll() is None for run in running) and time.monotonic() < deadline:
        if signal.SIGINT in signals[1:]:
            break
        time.sleep(0.1)
    for run in running:
        run.send(signal.SIGKILL)
        run.process.wait()
        reason = run.failure()
        run.write_state("stopped" if reason else "finished", reason)
        say(f"{run.name}: {reason or 'finished'}")


def main(args: Args) -> int:
    is_sweep = args.command or os.path.exists(args.folder / "sweep.json")
    require(is_sweep, f"{args.folder} is not a sweep: give --env-ids and --command")
    require(not args.slurm or shutil.which("sbatch"), "--slurm needs the command sbatch")
    slots = [] if args.dry_run or args.slurm else gpu_slots(args)
    try:
        lock = None if args.dry_run else lock_folder(args)
        sweep, runs = plan(args)
        todo = [run for run in runs if run.next_step() != "skip"]
        if args.index is None and not args.dry_run:
            sweep["calls"].append(about_this_call())
            write_json(args.folder / "sweep.json", sweep)
    except OSError as error:
        raise UsageError(f"{args.folder} cannot be used: {error}") from None
    if args.dry_run:
        for run in runs:
            print(f"# {run.name}: {run.next_step()}")
            if run in todo:
                print(shlex.join(run.argv()))
        return 0
    say(f"{args.folder}: {len(runs) - len(todo)} of {len(runs)} runs are finished")
    if args.slurm and todo:
        lock.close()  # the tasks may start before sbatch returns
        return submit(args, sweep, todo)
    return work(todo, slots, args)


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only
    try:
        raise SystemExit(main(tyro.cli(Args, description=__doc__)))
    except UsageError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
