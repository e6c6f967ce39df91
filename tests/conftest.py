"""What tests share: small runs in this process, real ones in processes of their own, reading what they leave."""

import csv
import functools
import gc
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # for runs this small, and their processes, threads cost more than they give
os.environ["MPLBACKEND"] = "module://nowhere"  # a notebook has such a one; report.py must not need it
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and nohup ignore these two,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and so would what tests start

import pytest  # noqa: E402
import torch  # noqa: E402
import worker  # noqa: E402

import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402

gc.disable()  # gym3 waits for ever where old games are collected while new ones are made
SLOW = [pytest.mark.slow]  # times False: none
ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TINY = {"env_id": "chaser", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 256}
TINY |= {"cuda": False, "env_threads": 0}
TINY_PPG = TINY | {"n_iteration": 2, "num_aux_rollouts": 2, "e_auxiliary": 1}
# for what starts the real command line: the real network at its cheapest, two phases in a fifth of a second
CHEAP_PPG = TINY_PPG | {"num_envs": 2, "num_steps": 8, "total_timesteps": 64, "arch": "detach"}


@pytest.fixture(autouse=True)
def seed():
    """A test draws the same numbers whichever ran before."""
    gc.collect()
    gc.freeze()  # what outlives a test is not gone through again
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)  # after use_float64


def level_seeds(envs) -> list[int]:
    if sys.version_info < (3, 13):
        return [info["level_seed"] for info in envs.games.get_info()]
    return envs._clib.observe()[3]["level_seed"].tolist()


def train(script, args, small: bool = True) -> Path:
    """A script's main in this process, with a small network unless the test is about the real one."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(script, "ImpalaCNN", worker.SmallCNN)
        script.main(args)
    return Path(args.run_dir)


def interrupt(script, args, k: int, small: bool = True) -> Path:
    """As train, but Ctrl-C comes in the k-th step of the environments."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        worker.install_kill(script, patch.setattr, "step", k, signal.SIGINT)
        train(script, args, small)
    return Path(args.run_dir)


def make_agent(script, **flags):
    return script.Agent(script.Args(cuda=False, **flags), worker.ScriptedGames)  # for their spaces


def make_args(script, run_dir: Path, **flags):
    return script.Args(**((TINY if script is ppo_procgen else TINY_PPG) | {"run_dir": str(run_dir)} | flags))


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """run(script, **flags) trains in a new folder and gives it."""

    def run(script=ppg_procgen, small=True, **flags) -> Path:
        return train(script, make_args(script, tmp_path_factory.mktemp("run") / "run", **flags), small)

    return run


@pytest.fixture(scope="session")
def trained(run):
    """Like run, but each set of flags is trained once a session: for tests that leave the folder as it is."""
    return functools.cache(run)


def parse(script, *argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, argv)])
        return script.parse_args()


def resume(script, run_dir: Path, *flags, small: bool = True) -> Path:
    return train(script, parse(script, "--resume", run_dir, *flags), small)


def as_flags(flags: dict) -> list[str]:
    return ["--no-cuda", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if name != "cuda")]


def read_rows(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def comparable(run_dir: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """All of a run's results that do not depend on the clock: rows of metrics.csv, final weights."""
    rows = [{k: v for k, v in row.items() if k not in ("wall_time", "charts/SPS")} for row in read_rows(run_dir)]
    return rows, torch.load(run_dir / "agent.pt", weights_only=True)


def same(run_dir: Path, other: Path) -> bool:
    (rows, weights), (other_rows, other_weights) = comparable(run_dir), comparable(other)
    return rows == other_rows and all(torch.equal(weights[name], other_weights[name]) for name in weights)


class Process:
    """SCRIPT.py FLAGS with what options replace in it (worker.py), forked from one that has imported the packages."""

    def __init__(self, folder: Path, script, options: dict, *flags, **environment: str) -> None:
        self.files = [folder / "out", folder / "err"]
        for file in self.files:
            file.touch()
        task = self.files, environment, script.__name__, options, list(map(str, flags))
        self.process = multiprocessing.get_context("forkserver").Process(target=worker.begin, args=task)
        self.process.start()

    def end(self, timeout: float = 120) -> subprocess.CompletedProcess:
        self.process.join(timeout)
        self.process.kill()  # nothing, if it has ended
        self.process.join()
        return subprocess.CompletedProcess((), self.process.exitcode, *(file.read_text() for file in self.files))


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """start(script, options, *flags) begins a Process. Named arguments are its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARM_UP", "1")
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        multiprocessing.set_forkserver_preload(["worker", "pytest"])
        multiprocessing.forkserver.ensure_running()
    started = []

    def start(*task, **environment: str) -> Process:
        started.append(Process(tmp_path_factory.mktemp("process"), *task, **environment))
        return started[-1]

    yield start
    for process in started:
        process.process.kill()


@pytest.fixture(scope="session")
def start_ranks(start):
    """start_ranks(script, options, *flags) starts ranks, two unless told, as torchrun does. own: more flags of each."""

    def start_ranks(*task, num_ranks: int = 2, own: list | None = None) -> list[Process]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # free; a fixed one may be that of another session of pytest
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
        numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        own = own or [[]] * num_ranks
        return [start(*task, *flags, **environment, **x) for x, flags in zip(numbers, own, strict=True)]

    return start_ranks


@pytest.fixture(scope="session")
def ranks(start_ranks):
    """ranks(script, options, *flags): the results of two ranks that run to their end."""
    return lambda *task, **own: [process.end() for process in start_ranks(*task, **own)]


def wait_for(condition, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for does not come"
        time.sleep(0.02)


@pytest.fixture(params=[ppg_procgen, ppo_procgen], ids=["ppg", "ppo"])
def script(request):
    return request.param
