"""Run a sweep, commands × games × seeds, on this machine's GPUs or CPU.

    python benchmark/sweep.py --env-ids starpilot bossfight --command "python ppg_procgen.py" --seeds 1 2 3

The same call again skips finished runs and continues interrupted ones. The folder of a sweep holds
    runs/NAME/           what the training script writes; NAME is {env_id}__{exp_name}__{seed}
    runs/NAME/finished   the command of the run, written when it has ended with exit code 0
    logs/NAME.log        the output of all attempts at the run

Exit codes: 0: all runs are finished; 1: some failed, and are listed at the end; 2: bad arguments,
or another sweep is at work in the folder; 128 + n: signal n (Ctrl-C, SIGTERM) stopped the sweep and its runs.
"""

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # they stop a sweep and its runs


@dataclass
class Args:
    env_ids: tuple[str, ...]  # games
    command: tuple[str, ...]  # training commands, each in quotes; if several, each needs its own --exp-name
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of each command and game
    folder: Path | None = None  # folder of the sweep; default: sweeps/ and the exp_name of the first command
    workers: int | None = None  # runs at a time; default: 1 on the CPU; on GPUs, one a slot at most
    gpus: tuple[str, ...] | None = None  # GPU slots, as in 0 0 1 or 0,0,1; nothing after the flag: CPU; default: all
    retries: int = 2  # further attempts at a run that fails, except with exit code 2: bad arguments, a gradient of nan
    dry_run: bool = False  # print the commands of the unfinished runs and do nothing


def require(condition: object, message: str) -> None:
    if not condition:
        print("sweep.py:", message, file=sys.stderr)
        sys.exit(2)


def say(text: str) -> None:
    print(time.strftime("%m-%d %H:%M:%S"), text, flush=True)


class Run:
    def __init__(self, folder: Path, name: str, command: list[str]) -> None:
        self.name = name
        self.command = command  # without --run-dir: the folder may move
        self.run_dir = folder / "runs" / name
        self.log_file = folder / "logs" / f"{name}.log"
        self.attempts = 0

    def is_finished(self) -> bool:
        """With these very flags. Of a run with others, the script must say whether it accepts them."""
        marker = self.run_dir / "finished"
        return marker.exists() and marker.read_text("utf-8") == shlex.join(self.command)

    def argv(self) -> list[str]:
        return [*self.command, "--run-dir", str(self.run_dir)]  # the script continues a run that has begun

    def start(self, slot: str | None) -> None:
        self.slot = slot
        self.attempts += 1
        say(f"{self.name}: attempt {self.attempts}" + (f" on GPU {slot}" if slot else ""))
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # else the last words of a killed run are lost
        if slot is not None:
            environment["CUDA_VISIBLE_DEVICES"] = slot
        with open(self.log_file, "a", encoding="utf-8") as log:
            print(f"=== {time.strftime('%F %T')} {os.uname().nodename}:", shlex.join(self.argv()), file=log, flush=True)
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            # a new session: end() reaches all its processes
            self.process = subprocess.Popen(self.argv(), env=environment, start_new_session=True, **streams)

    def result(self) -> str:
        code = self.process.returncode  # -9: killed by signal 9
        log = self.log_file.read_text("utf-8", "replace").rpartition("\n=== ")[2]
        box = re.findall(r"^│ (\w.*?) *│$", log, re.MULTILINE)  # tyro's: its first line says which flag is bad
        reason = box[0] if box else re.findall(r"\w.*", log)[-1]
        return f"exit code {code}: {reason}" if code else "finished"


def plan(args: Args) -> list[Run]:
    """All runs, the first seed of everything first."""
    runs, commands = {}, {}
    for text in args.command:
        words = shlex.split(text)
        require(words and shutil.which(words[0]), f"--command {text!r} does not begin with a program that exists")
        flags = [word.partition("=")[0].replace("_", "-") for word in words]
        for own in ("--env-id", "--seed", "--run-dir", "--resume"):
            require(own not in flags, f"--command {text!r}: the sweep sets {own}")
        exp_name = Path(next((word for word in words if word.endswith(".py")), words[0])).stem
        if "--exp-name" in flags:
            i = flags.index("--exp-name")
            exp_name = words[i].partition("=")[2] or words[i + 1]
        commands[exp_name] = words
    require(len(commands) == len(args.command), "commands need different names: give each its own --exp-name")
    args.folder = args.folder or Path("sweeps", next(iter(commands)))
    for seed in args.seeds:
        for exp_name, words in commands.items():
            for env_id in args.env_ids:
                name = f"{env_id}__{exp_name}__{seed}".replace("/", "_")
                require(name not in runs, f"two runs would share the folder {name}: choose another --exp-name")
                runs[name] = Run(args.folder, name, [*words, "--env-id", env_id, "--seed", str(seed)])
    return list(runs.values())


def gpu_slots(args: Args) -> list[str | None]:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if args.gpus is None else ",".join(args.gpus)
    if gpus is None:
        output = subprocess.getoutput("nvidia-smi --query-gpu=index --format=csv,noheader")
        gpus = ",".join(re.findall(r"^\d+$", output, re.MULTILINE)) or None  # other lines say what is wrong
    if gpus in (None, "", "-1"):
        return [None if gpus is None else ""] * (args.workers or 1)
    return gpus.split(",")[: args.workers]


def end(runs: list[Run]) -> None:
    """End all processes of these runs. They lose what they have done since their checkpoints."""
    for signum in (signal.SIGTERM, signal.SIGKILL):  # torchrun hands on the first to its ranks, in other sessions
        for run in runs:
            with suppress(ProcessLookupError):
                os.killpg(run.process.pid, signum)
        deadline = time.monotonic() + 30
        for run in runs:
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(max(0, deadline - time.monotonic()))


def work(waiting: list[Run], slots: list[str | None], retries: int) -> list[Run]:
    """Do the runs. Returns those that failed."""
    running, failed = [], []
    try:
        while waiting or running:
            while waiting and slots:
                run = waiting.pop(0)
                run.start(slots.pop(0))
                running.append(run)
            time.sleep(0.1)
            for run in [run for run in running if run.process.poll() is not None]:
                end([run])  # what a crashed run left behind must not share the GPU with the next one
                running.remove(run)
                slots.append(run.slot)
                say(f"{run.name}: {run.result()}")
                if run.process.returncode == 0:
                    (run.run_dir / "finished").write_text(shlex.join(run.command), "utf-8")
                elif run.process.returncode == 2 or run.attempts > retries:
                    failed.append(run)
                else:
                    waiting.append(run)
    finally:
        end(running)
        for run in running:
            say(f"{run.name}: stopped; the same call again continues")
    return failed


def stop(signum: int, frame: object) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # another one must not interrupt the end of the runs
    sys.exit(128 + signum)


def main(args: Args) -> int:
    runs = plan(args)
    require(args.workers is None or args.workers >= 1, "--workers must be at least 1")
    todo = [run for run in runs if not run.is_finished()]
    if args.dry_run:
        print(*(shlex.join(run.argv()) for run in todo), sep="\n")
        return 0
    (args.folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = open(args.folder / "lock", "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_NB | fcntl.LOCK_EX)
    except BlockingIOError:
        require(False, f"another sweep is at work in {args.folder}")
    say(f"{args.folder}: {len(runs) - len(todo)} of {len(runs)} runs are finished")
    if not todo:
        return 0
    for signum in SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP, and it stays ignored
            signal.signal(signum, stop)
    slots = gpu_slots(args)[: len(runs)]
    if not any(slots):  # runs on the CPU share its cores; each would start a thread for every one
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // len(slots))))
    failed = work(todo, slots, args.retries)
    for run in failed:
        say(f"FAILED {run.name}: {run.result()} (see {run.log_file})")
    say(f"{len(failed)} of {len(runs)} runs failed" if failed else "all runs are finished")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
