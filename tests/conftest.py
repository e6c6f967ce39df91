import csv
import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # for runs this small, and their processes, threads cost more than they give
for number in (signal.SIGINT, signal.SIGHUP):  # a background job and nohup ignore them, and so would what tests start
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

import pytest  # noqa: E402
import torch  # noqa: E402

import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402

TINY = {"env_id": "chaser", "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "total_timesteps": 256, "cuda": False}
TINY_PPG = TINY | {"n_iteration": 2, "num_aux_rollouts": 2, "e_auxiliary": 1, "aux_dtype": "float32"}


@pytest.fixture
def run(tmp_path):
    """Train with a script's main in this process: run(module, **flags) gives the run folder."""
    counter = iter(range(1000))

    def run(module=ppg_procgen, **flags) -> Path:
        defaults = TINY_PPG if module is ppg_procgen else TINY
        run_dir = tmp_path / f"run{next(counter)}"
        module.main(module.Args(**(defaults | {"run_dir": str(run_dir)} | flags)))
        return run_dir

    return run


def read_rows(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def comparable(run_dir: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """All of a run's results that do not depend on the clock: rows of metrics.csv, final weights."""
    timed = ("time/", "wall_time", "charts/SPS")
    rows = [{k: v for k, v in row.items() if not k.startswith(timed)} for row in read_rows(run_dir)]
    return rows, torch.load(run_dir / "agent.pt", weights_only=True)


def same(run_dir: Path, other: Path) -> bool:
    (rows, weights), (other_rows, other_weights) = comparable(run_dir), comparable(other)
    return rows == other_rows and all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.fixture(params=[ppg_procgen, ppo_procgen], ids=["ppg", "ppo"])
def script(request):
    return request.param
