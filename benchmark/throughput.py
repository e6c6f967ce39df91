"""Training speed of the scripts here, and of another script beside them, in one run on one machine.

    python benchmark/throughput.py                                                          # all variants
    python benchmark/throughput.py --variants detach --baseline "path/to/other_script.py" --repeats 3
    python benchmark/throughput.py --variants dual "ppg_procgen.py --arch dual --aux-dtype bfloat16"

Each command runs in a process and a folder of its own, in turn (A B A B ...), at settings given once for all. Its first
phase, and what comes before (imports, compilation), warms up and is reported apart; the clock covers whole phases after
it: rollouts, updates, auxiliary phase, records, checkpoint. A phase costs the same a step whatever --n-iteration is,
which is why a benchmark can do with fewer iterations than training; the memory of the buffer does depend on it.

The floor is the time that arithmetic and traffic of the networks take at the rates of this machine's simplest loops;
"× floor" says how many times as long a step takes. Peak memory includes the start of a script, that of the GPU its
context and the allocator's reserve.

Times come from metrics.csv, or, of a script with CleanRL's command line, from its TensorBoard events: an iteration ends
with the last event that carries its step. The JSON is written anew after each run, so an interrupted benchmark keeps
the runs that it has finished.
"""

import csv
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import count, product, takewhile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any folder, nothing installed
import ppg_procgen  # noqa: E402
from ppg_procgen import Game, ImpalaCNN, ProcgenVectorEnv, UsageError  # noqa: E402

VARIANTS = {
    "dual": "ppg_procgen.py --arch dual",
    "detach": "ppg_procgen.py --arch detach",
    "shared": "ppg_procgen.py --arch shared --e-policy 3 --e-value 3 --e-auxiliary 0",  # the PPG paper's PPO
    "ppo": "ppo_procgen.py",
}
NEEDED = ("env_id", "num_envs", "num_steps", "num_minibatches", "total_timesteps", "seed")
SETTINGS = (*NEEDED, "n_iteration", "e_auxiliary", "num_aux_rollouts")  # the last three only where a script knows them
COMMON = {*NEEDED, "n_iteration", "aux_interval", "run_dir", "resume"}  # what no command may set for itself alone

# of one sample in one network, forward + backward in "backward"; the traffic is that of activations in NHWC with the
# pointwise operations fused, from the code that Inductor generates
FORWARD_FLOP, BACKWARD_FLOP, BACKWARD_BYTES = 61e6, 180e6, {"float32": 10.2e6, "bfloat16": 5.1e6}
NETWORK_SAMPLES = 1024

console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)


@dataclass
class Args:
    variants: tuple[str, ...] = tuple(VARIANTS)  # dual, detach, shared, ppo, or commands in quotes
    baseline: str = ""  # command of another script, in quotes, by which the steps/s of the variants are divided
    repeats: int = 2  # rounds; in each, every command runs once
    phases: int = 1  # phases to measure in a run, after one phase of warm-up
    budget_minutes: float = 9.5  # then the run in progress is cut; phases that it has finished count
    probe_seconds: float = 2.0  # for each measurement of network, environment and machine alone; 0: none
    out: Path = Path("report/throughput.json")  # file to write to
    cuda: bool = True  # use the GPU if there is one

    # ---- settings of all scripts; those of auxiliary phases go to the scripts that have them
    env_id: Game = "starpilot"  # procgen game
    num_envs: int = 64  # parallel environments
    num_steps: int = 256  # steps of each environment in a rollout
    num_minibatches: int = 8  # minibatches of an epoch
    n_iteration: int = 8  # policy iterations of a phase, for PPO too
    e_auxiliary: int = 6  # epochs of an auxiliary phase
    num_aux_rollouts: int = 4  # rollouts in an auxiliary minibatch

    def __post_init__(self) -> None:
        for name in "repeats phases budget_minutes num_envs num_steps n_iteration num_aux_rollouts".split():
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


# ----------------------------------------------------------------------------------------------------------------------
# The machine, the network and the environment alone


def network_pass(network: ImpalaCNN, parts: tuple[torch.Tensor, ...], dtype: str, backward: bool) -> None:
    network.zero_grad()
    for part in parts:
        low = torch.autocast(part.device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)
        with torch.set_grad_enabled(backward), low:
            features = network(part)
        if backward:
            features.float().sum().backward()


def as_graph(work):
    """The work as one CUDA graph: its kernels without the time it takes to launch them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def seconds_per_call(work, seconds: float) -> float:
    """The median over that time; torch's timer warms up first and waits for the GPU."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def probe(args: Args) -> dict[str, float]:
    """What bounds the speed here: t and f (milliseconds of NETWORK_SAMPLES forward + backward, and forward, in one
    network) by precision; environment steps/s; bytes/s of a copy and FLOP/s of a matrix product."""
    cuda = args.cuda and torch.cuda.is_available()
    device, seconds = torch.device("cuda" if cuda else "cpu"), partial(seconds_per_call, seconds=args.probe_seconds)
    if cuda:
        torch.set_float32_matmul_precision("high")  # TF32
    else:
        ppg_procgen.speed_up(torch.nn.Module(), args, device)  # keeps freed memory

    rng, found = np.random.default_rng(1), {}
    num_threads = ppg_procgen.choose_auto(ppg_procgen.Args(cuda=args.cuda))["env_threads"]
    with closing(ProcgenVectorEnv(args.env_id, args.num_envs, num_threads=num_threads)) as envs:

        def step() -> None:
            envs.step(rng.integers(15, size=args.num_envs))

        found["env_steps_per_second"] = args.num_envs / seconds(step)

    network = ImpalaCNN().to(device, memory_format=torch.channels_last)
    obs = torch.randint(256, (NETWORK_SAMPLES, 64, 64, 3), dtype=torch.uint8, device=device)
    for dtype in ("float32", "bfloat16"):
        for name, backward in {"t": True, "f": False}.items():
            work = partial(network_pass, network, obs.chunk(1 if cuda else 4), dtype, backward)
            found[f"{name}_{dtype}_ms"] = 1000 * seconds(as_graph(work) if cuda else work)

    source, rates = torch.ones(2**28, dtype=torch.uint8, device=device), []
    target = torch.empty_like(source)
    found["bytes_per_second"] = 2 * source.numel() / seconds(lambda: target.copy_(source))
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size := 8192 if cuda else 1024, size, device=device).to(dtype)
        rates.append(2 * size**3 / seconds(partial(torch.mm, a, a)))
    return found | {"flop_per_second": max(rates)}


# ----------------------------------------------------------------------------------------------------------------------
# Runs


@cache
def known_flags(files: tuple[Path, ...]) -> set[str]:
    """The flags in a script's --help."""
    command, wide = [sys.executable, *files, "--help"], os.environ | {"COLUMNS": "200"}
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(command, cwd=folder, env=wide, capture_output=True, text=True)
    if shown.returncode != 0:
        raise UsageError(f"{files[-1].name} --help fails: {' '.join(shown.stderr.strip().splitlines()[-1:])}")
    return {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9_-]*)", shown.stdout)}


class Command(NamedTuple):
    name: str
    files: tuple[Path, ...]  # the script; several, if the first one runs the next
    flags: list[str]


def parse_command(text: str, args: Args) -> Command:
    """A command with the settings put into its flags; a setting that it names itself, such as --e-auxiliary, stays."""
    try:
        words = shlex.split(VARIANTS.get(text, text))
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}") from None
    found = [next((path.resolve() for path in (Path(word), ROOT / word) if path.is_file()), None) for word in words]
    files = tuple(takewhile(bool, found))
    flags = words[len(files) :]
    own = {flag[2:].partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")}
    if not files:
        raise UsageError(f"{text!r} is not one of {', '.join(VARIANTS)} and does not begin with a script")
    if fixed := own & COMMON:
        raise UsageError(f"{text!r}: {', '.join(sorted(fixed))} cannot be set for one command alone")
    if missing := set(NEEDED) - (known := known_flags(files)):
        raise UsageError(f"{text!r} has no flag for {', '.join(sorted(missing))}")
    total = (1 + args.phases) * args.n_iteration * args.num_envs * args.num_steps
    values = vars(args) | {"total_timesteps": total, "seed": 1}
    settings = [f"--{name.replace('_', '-')}={values[name]}" for name in SETTINGS if name in known - own]
    name = text if text in VARIANTS else shlex.join([*(file.name for file in files), *flags])
    return Command(name, files, [*settings, *([] if args.cuda else ["--no-cuda"]), *flags])


def run_script(command: Command, folder: Path, seconds: float, cuda: bool) -> dict:
    """Run it in the folder, for so many seconds at most: exit code (None: cut), seconds, peak memory."""
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    start, result = time.perf_counter(), {"load_before": os.getloadavg()[0]}
    argv = [sys.executable, *command.files, *command.flags]
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    try:
        while process.poll() is None and time.perf_counter() - start < seconds:
            with suppress(OSError):  # only Linux has it, and no more once the process has ended
                if peak := re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()):
                    result["host_gb"] = int(peak[1]) * 1024 / 1e9
            if cuda:  # what the whole GPU has lost meanwhile: context and allocator's reserve included
                result["gpu_gb"] = max((free - torch.cuda.mem_get_info()[0]) / 1e9, result.get("gpu_gb", 0))
            time.sleep(0.1)
    finally:
        if (exit_code := process.poll()) is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return result | {"exit_code": exit_code, "seconds": time.perf_counter() - start}


def work_of(run: dict) -> tuple[float, int, int, int, float]:
    """From a run's arguments: forward-backward and forward passes of one network for each environment step, updates of
    an iteration and of an auxiliary phase, and how many of the forward-backward passes are the auxiliary phase's."""
    networks = 2 if run.get("arch") == "dual" else 1
    epochs = [run["update_epochs"]] * 2 if "update_epochs" in run else [run["e_policy"], run["e_value"]]
    num_epochs = epochs[0] if epochs[0] == epochs[1] else sum(epochs)
    backward, forward, aux_updates, aux_backward = sum(epochs) if networks == 2 else num_epochs, networks, 0, 0
    if e_auxiliary := run.get("e_auxiliary", 0):
        buffer = run["n_iteration"] * run["num_envs"] // run["num_aux_rollouts"]  # minibatches that it holds
        aux_updates = e_auxiliary * (run["num_aux_minibatches"] or buffer)
        aux_backward = networks * aux_updates / buffer
        backward, forward = backward + aux_backward, forward + 1  # pi_old
    return backward, forward, num_epochs * run["num_minibatches"], aux_updates, aux_backward


def measure(folder: Path, args: Args, machine: dict, seconds: float | None) -> dict:
    """What the records of a run, which took so many seconds if it was not cut, say about its whole phases after the
    first; empty if there are none."""
    phase_steps, rows, ends = args.n_iteration * args.num_envs * args.num_steps, [], {}
    if metrics := next(folder.rglob("metrics.csv"), None):
        complete = metrics.read_text().rpartition("\n")[0]  # of a run that was cut, half a line may be the last
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(complete.splitlines())]
        ends = {row["global_step"]: row["wall_time"] for row in rows}
    elif events := next(folder.rglob("events.out.tfevents*"), None):
        records = EventAccumulator(str(events.parent), size_guidance={"scalars": 0}).Reload()
        for point in (point for tag in records.Tags()["scalars"] for point in records.Scalars(tag)):
            ends[point.step] = max(ends.get(point.step, 0), point.wall_time)
    times = [ends[step] for step in takewhile(ends.__contains__, count(phase_steps, phase_steps))]
    if len(times) < 2:
        return {}
    phase_seconds = np.diff(times).tolist()
    speed = phase_steps * len(phase_seconds) / sum(phase_seconds)
    result = {"steps_per_second": speed, "phase_seconds": phase_seconds}
    if seconds is not None:
        result["warm_up_seconds"] = seconds - sum(phase_seconds)
    if not rows:
        return result
    about = json.loads(metrics.with_name("args.json").read_text())
    args_of_run = about["args"] | about.get("used", {})  # what "auto" stood for
    backward, forward, policy_updates, aux_updates, aux_backward = work_of(args_of_run)
    result["passes_per_step"] = {"forward_backward": backward, "forward": forward}
    measured = rows[args.n_iteration : args.n_iteration * len(times)]
    for name, column, calls in (
        ("rollout_step_ms", "time/rollout", len(measured) * args.num_steps),
        ("policy_update_ms", "time/policy_phase", len(measured) * policy_updates),
        ("aux_update_ms", "time/aux_phase", len(phase_seconds) * aux_updates),
    ):
        if calls:
            result[name] = 1000 * sum(row.get(column, 0) for row in measured) / calls
    if machine:
        arithmetic = (BACKWARD_FLOP * backward + FORWARD_FLOP * forward) / machine["flop_per_second"]
        aux_bytes = BACKWARD_BYTES[args_of_run.get("aux_dtype", "float32")] * aux_backward
        traffic = (BACKWARD_BYTES["float32"] * (backward - aux_backward) + aux_bytes) / machine["bytes_per_second"]
        result["times_floor"] = 1 / speed / max(arithmetic, traffic)
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Results

COLUMNS = {
    "steps_per_second": "steps/s",
    "times_baseline": "× baseline",
    "times_floor": "× floor",
    "warm_up_seconds": "warm-up s",
    "rollout_step_ms": "rollout step ms",
    "policy_update_ms": "policy update ms",
    "aux_update_ms": "aux. update ms",
    "gpu_gb": "GPU GB",
    "host_gb": "host GB",
}
RANGED = ("steps_per_second", "times_baseline")


def summarise(runs: list[dict], baseline: str) -> list[dict]:
    """A row a command: medians over its runs, and of steps/s and of its ratio to the baseline's in the same round
    lowest and highest too."""
    summary, measured = [], [run for run in runs if "steps_per_second" in run]
    by_round = {run["round"]: run["steps_per_second"] for run in measured if run["name"] == baseline}
    for run in measured:
        if run["round"] in by_round:
            run["times_baseline"] = run["steps_per_second"] / by_round[run["round"]]
    for name in dict.fromkeys(run["name"] for run in measured):
        own = [run for run in measured if run["name"] == name]
        row = {"name": name, "runs": len(own)}
        for key in COLUMNS:
            if values := [run[key] for run in own if key in run]:
                row[key] = median(values)
                if key in RANGED:
                    row[f"{key}_range"] = [min(values), max(values)]
        summary.append(row)
    return summary


def show(summary: list[dict], machine: dict) -> None:
    columns = [key for key in COLUMNS if any(key in row for row in summary)]
    table = Table("", "runs", *(COLUMNS[key] for key in columns))
    for row in summary:
        cells = [f"{row[key]:,.4g}" if key in row else "" for key in columns]
        for i, key in enumerate(columns):
            low, high = row.get(f"{key}_range", (0, 0))
            cells[i] += f" ({low:,.4g} to {high:,.4g})" if high > low else ""
        table.add_row(row["name"], str(row["runs"]), *cells)
    console.print(table)
    if machine:
        console.print("alone:", ", ".join(f"{name} {value:,.4g}" for name, value in machine.items()))


def main(args: Args) -> int:
    """Gives the number of runs that ended, but without a measured phase."""
    start = time.perf_counter()
    if args.out.is_dir():
        raise UsageError(f"--out is a file, and {args.out} is a folder")
    commands = [parse_command(text, args) for text in (*filter(None, [args.baseline]), *args.variants)]
    if len({command.name for command in commands}) < len(commands):
        raise UsageError("two commands have the same name: rename a script, or give one a flag of its own")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out cannot be written: {error}") from None
    baseline = commands[0].name if args.baseline else ""  # first: an interrupted benchmark can compare too
    about = ppg_procgen.describe(ppg_procgen.Args(num_envs=1, e_auxiliary=0, cuda=args.cuda))
    about |= {"args": asdict(args) | {"out": str(args.out)}, "machine": {}, "runs": []}
    del about["algorithm"]
    with suppress(OSError, TypeError):  # not every system says
        about["hardware"]["cpu"] = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]

    def save() -> list[dict]:
        summary = summarise(about["runs"], baseline)
        args.out.write_text(json.dumps(about | {"summary": summary}, indent=2) + "\n")
        return summary

    if args.probe_seconds > 0:  # in a process that takes its memory with it when it ends
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            about["machine"] = pool.submit(probe, args).result()
    try:
        for number, command in product(range(1, args.repeats + 1), commands):
            longest = max((run["seconds"] for run in about["runs"] if run["name"] == command.name), default=0)
            left = start + 60 * args.budget_minutes - time.perf_counter()
            if left <= longest:
                console.print(f"round {number}: {command.name}: left out, {max(left, 0):.0f} s of the budget left")
                continue
            run = {"name": command.name, "round": number, "flags": command.flags}
            with tempfile.TemporaryDirectory() as folder:
                run |= run_script(command, Path(folder), left, cuda=about["hardware"]["gpu"] is not None)
                if not run["exit_code"]:
                    seconds = run["seconds"] if run["exit_code"] == 0 else None
                    run |= measure(Path(folder), args, about["machine"], seconds)
                output = (Path(folder) / "output.txt").read_text(errors="replace").strip().splitlines()
            about["runs"].append(run)
            save()
            speed = f"{run['steps_per_second']:,.4g} steps/s" if "steps_per_second" in run else "no whole phase"
            console.print(f"round {number}: {command.name}: {speed}, {run['seconds']:.0f} s in all")
            if run["exit_code"] != 0:
                how = "cut: the budget is spent" if run["exit_code"] is None else f"exit code {run['exit_code']}"
                console.print(f"    {how}", *output[-5:], sep="\n    ")
    finally:
        show(save(), about["machine"])
        console.print(f"all numbers: {args.out}")
    return sum(run["exit_code"] is not None and "steps_per_second" not in run for run in about["runs"])


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the run in progress ends too
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)) > 0)
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
