"""Training speed of the scripts here, and of others beside them, in one run on one machine.

    python benchmark/throughput.py                                                    # all variants
    python benchmark/throughput.py --variants dual "ppg_procgen.py --aux-dtype bfloat16"
    python benchmark/throughput.py --baseline "other_venv/bin/python path/to/cleanrl/cleanrl/ppg_procgen.py"

The commands run in turn (A B A B ...), each in a process and a folder of its own, with sizes given once for all. A
command that begins with a .py file runs with this Python. The first phase of a run warms up (imports, compilation);
whole phases after it are measured: rollouts, updates, auxiliary phase, records, checkpoints. A phase costs the same for
each step whatever --n-iteration is, so fewer iterations than in training will do; the buffer's memory is smaller then.

Times come from metrics.csv or, for a script with CleanRL's command line, from its TensorBoard events: an iteration ends
with the last event of its step. Memory is the peak of a run; on the GPU, with the context and the allocator's reserve.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {
    "dual": "ppg_procgen.py --arch dual",
    "detach": "ppg_procgen.py --arch detach",
    "shared": "ppg_procgen.py --arch shared --e-policy 3 --e-value 3 --e-auxiliary 0",  # the PPG paper's PPO
    "ppo": "ppo_procgen.py",
}
SIZES = ["env_id", "num_envs", "num_steps", "num_minibatches", "n_iteration", "e_auxiliary", "num_aux_rollouts"]
TIMES = {"rollout s": "time/rollout", "policy phase s": "time/policy_phase", "aux. phase s": "time/aux_phase"}


@dataclass
class Args:
    variants: tuple[str, ...] = tuple(VARIANTS)  # dual, detach, shared, ppo, or commands in quotes
    baseline: str = ""  # command of another script, in quotes, by which the speeds of the variants are divided
    repeats: int = 2  # rounds; in each, every command runs once
    phases: int = 1  # phases to measure in a run, after one phase of warm-up
    budget_minutes: float = 9.5  # after them the run in progress is killed; its finished phases count
    out: Path = Path("report/throughput.md")  # page to write
    cuda: bool = True  # use the GPU if there is one

    # sizes; a script gets those that it knows
    env_id: str = "starpilot"  # Procgen game
    num_envs: int = 64  # parallel environments
    num_steps: int = 256  # steps of each environment in a rollout
    num_minibatches: int = 8  # minibatches of an epoch
    n_iteration: int = 8  # policy iterations of a phase, for PPO too
    e_auxiliary: int = 6  # epochs of an auxiliary phase
    num_aux_rollouts: int = 4  # rollouts in an auxiliary minibatch


def require(condition: object, message: str) -> None:
    if not condition:
        print(f"throughput.py: {message}", file=sys.stderr)
        sys.exit(2)


def absolute(word: str) -> str:
    """The absolute path of a file, relative to this folder or to the repository; any other word as it is."""
    for folder in (Path.cwd(), ROOT):
        if (folder / word).is_file():
            return str(folder / word)  # not resolved: a link to Python knows its virtual environment
    return word


def make_command(text: str, args: Args) -> list[str]:
    """The words of a command, with the sizes as flags before its own: the last one of equal flags counts."""
    words = [absolute(word) for word in shlex.split(VARIANTS.get(text, text))]
    if words[0].endswith(".py"):
        words.insert(0, sys.executable)
    require(shutil.which(words[0]), f"{text!r} is none of {', '.join(VARIANTS)}, and no command")
    num_files = max(i for i, word in enumerate(words) if word.endswith(".py")) + 1
    shown = subprocess.run([*words[:num_files], "--help"], capture_output=True, text=True)
    require(shown.returncode == 0, f"{text!r} --help fails: {shown.stderr.strip()[-200:]}")
    flags = ["--seed=1", "--cuda" if args.cuda else "--no-cuda"]
    flags.append(f"--total-timesteps={(1 + args.phases) * phase_steps(args)}")
    for name in SIZES:
        flag = "--" + name.replace("_", "-")
        if f"{flag} " in shown.stdout:
            flags.append(f"{flag}={getattr(args, name)}")
    return words[:num_files] + flags + words[num_files:]


def phase_steps(args: Args) -> int:
    return args.n_iteration * args.num_envs * args.num_steps


def run_command(command: list[str], args: Args, deadline: float) -> dict:
    """Run a command until the deadline at most; give its numbers by column."""
    start = time.monotonic()
    free = torch.cuda.mem_get_info()[0] if args.cuda else 0
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder, "output.txt"), "w") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                status = Path(f"/proc/{process.pid}/status").read_text()  # exists until poll() has seen the end
                if kilobytes := re.search(r"VmHWM:\s+(\d+)", status):
                    peaks["host GB"] = int(kilobytes[1]) * 1024 / 1e9
                if args.cuda:
                    peaks["GPU GB"] = max(peaks.get("GPU GB", 0), (free - torch.cuda.mem_get_info()[0]) / 1e9)
                time.sleep(0.1)
        finally:
            was_cut = process.poll() is None
            process.kill()
            process.wait()
        result = {**peaks, **measure(Path(folder), args)}
        lines = Path(folder, "output.txt").read_text(errors="replace").splitlines()
    if was_cut:
        print("    cut: the time is up")
    elif process.returncode != 0 or "steps/s" not in result:
        print(f"    failed with exit code {process.returncode}", *lines[-5:], sep="\n    ")
        result["failed"] = True
    else:
        result["warm-up s"] = time.monotonic() - start - result.pop("measured s")
    return result


def measure(folder: Path, args: Args) -> dict:
    """A run's speed over its whole phases after the first, and seconds by part of a phase; empty if there are none."""
    rows = pd.DataFrame()
    ends = {}  # of iterations: step -> time
    tables = [path for path in folder.rglob("metrics.csv") if path.stat().st_size > 0]
    if tables:
        rows = pd.read_csv(tables[0], index_col="global_step")
        ends = rows["wall_time"].to_dict()
    elif events := next(folder.rglob("events.out.tfevents*"), None):
        records = EventAccumulator(str(events.parent), size_guidance={"scalars": 0}).Reload()
        for tag in records.Tags()["scalars"]:
            for event in records.Scalars(tag):
                ends[event.step] = max(ends.get(event.step, 0), event.wall_time)
    first = phase_steps(args)  # the end of the first phase
    num_phases = max(ends, default=0) // first - 1
    if num_phases < 1:
        return {}
    last = first + num_phases * first
    seconds = ends[last] - ends[first]
    result = {"measured s": seconds, "steps/s": (last - first) / seconds}
    for name, column in TIMES.items():
        if column in rows:
            result[name] = rows[column].loc[first + 1 : last].sum() / num_phases
    return result


def make_table(runs: list[dict], args: Args) -> str:
    """Medians of the rounds, and of speeds lowest and highest too; a ratio is of two runs of one round."""
    table = pd.DataFrame(runs)
    if "steps/s" not in table:
        return "no run has finished two phases"
    speeds = ["steps/s"]
    if args.baseline:
        baseline = table[table["command"] == args.baseline].set_index("round")["steps/s"]
        table["× baseline"] = table["steps/s"] / table["round"].map(baseline)
        speeds.append("× baseline")
    groups = table.dropna(subset="steps/s").groupby("command", sort=False)
    columns = [name for name in [*speeds, *TIMES, "warm-up s", "GPU GB", "host GB"] if name in table]
    shown = groups[columns].median().map("{:,.4g}".format)
    if args.repeats > 1:
        shown[speeds] += groups[speeds].min().map(" ({:,.4g}–".format)
        shown[speeds] += groups[speeds].max().map("{:,.4g})".format)
    shown.insert(0, "runs", groups.size())
    return shown.replace("nan", "").to_markdown()


def main(args: Args) -> int:
    """Give the number of failed runs."""
    deadline = time.monotonic() + 60 * args.budget_minutes
    args.cuda = args.cuda and torch.cuda.is_available()
    texts = [args.baseline, *args.variants] if args.baseline else args.variants
    commands = {text: make_command(text, args) for text in texts}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if args.cuda else "no GPU"
    about = f"{time.strftime('%F')}, {os.cpu_count()} cores, {gpu}, torch {torch.__version__}\n\n"
    about += f"    {shlex.join(['python', *sys.argv])}\n\n"
    runs = []
    for number in range(1, args.repeats + 1):
        for text, command in commands.items():
            if time.monotonic() > deadline:
                break
            print(f"round {number}: {text}", flush=True)
            runs.append({"command": text, "round": number, **run_command(command, args, deadline)})
            args.out.write_text(about + make_table(runs, args) + "\n")
    print(make_table(runs, args))
    return sum("failed" in run for run in runs)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)) > 0)
