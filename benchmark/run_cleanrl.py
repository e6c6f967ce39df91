"""Run CleanRL's ppg_procgen.py as it is, on chosen levels, with its returns counted as ours are.

    PYTHON benchmark/run_cleanrl.py path/to/cleanrl/cleanrl/ppg_procgen.py --env-id starpilot --seed 1 \
        --exp-name cleanrl_ppg --num-envs 16 --num-steps 64 --n-iteration 16 --total-timesteps 49152 \
        --num-levels 1 --run-dir runs/cleanrl

PYTHON must have gym 0.23, procgen, numpy<2, torch, tyro, tensorboard and tqdm. --num-levels, --start-level and
--run-dir are for this file (--resume is the same as --run-dir: the run begins again); all other flags go to the script.
The run folder gets args.json and metrics.csv like one of ours, so sweep.py and report.py can read it. Counting is
needed because the script logs the return of one environment a step, and drops those of others.

The row of an iteration is written when its updates are done, at the first step of the next one. Time begins with the
first action, when networks and buffers are made, as ours does. Procgen steps in the main thread.
"""

import argparse
import csv
import json
import os
import platform
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import procgen.env
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs with nothing installed
from ppg_procgen import EpisodeStatistics  # noqa: E402

COLUMNS = ["iteration", "global_step", "wall_time", "charts/SPS"]
COLUMNS += ["charts/episodic_return", "charts/episodic_length", "charts/mean_return_100"]


class CountedGames(procgen.env.ProcgenGym3Env):
    """procgen's environments, with options of ours, which write a row for each iteration of num_steps steps."""

    def __init__(self, num: int, env_name: str, num_steps: int, file, **options) -> None:
        super().__init__(num, env_name, **options)
        self.num_steps = num_steps
        self.statistics = EpisodeStatistics(num)
        self.table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        self.table.writeheader()
        self.iteration = 0
        self.start = None
        self.rewards = []
        self.dones = []

    def act(self, actions) -> None:
        if self.start is None:
            self.start = time.monotonic()
        if len(self.rewards) == self.num_steps:
            self.end_iteration()
        super().act(actions)
        rewards, _, first = self.observe()
        self.rewards.append(rewards.copy())
        self.dones.append(first.copy())

    def end_iteration(self) -> None:
        rewards = np.stack(self.rewards)
        dones = np.stack(self.dones)
        self.rewards = []
        self.dones = []
        self.iteration += 1
        row = {"iteration": self.iteration, "global_step": self.iteration * rewards.size}
        row["wall_time"] = time.monotonic() - self.start
        row["charts/SPS"] = row["global_step"] / row["wall_time"]
        row.update(self.statistics.update(rewards, dones))
        self.table.writerow({name: x if np.isfinite(x) else "" for name, x in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("script", type=Path, help="CleanRL's ppg_procgen.py")
    parser.add_argument("--run-dir", "--resume", type=Path, required=True, help="folder for the run's files")
    parser.add_argument("--num-levels", type=int, default=0)
    parser.add_argument("--start-level", type=int, default=0)
    own, rest = parser.parse_known_args()
    flags = argparse.ArgumentParser(description="flags of the script", allow_abbrev=False)
    for name in ["env-id", "exp-name"]:
        flags.add_argument(f"--{name}", required=True)
    for name in ["seed", "total-timesteps", "num-envs", "num-steps", "n-iteration"]:
        flags.add_argument(f"--{name}", type=int, required=True)
    args, _ = flags.parse_known_args(rest)
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    if num_iterations % args.n_iteration:
        parser.error(f"the script drops what is no whole phase: {num_iterations} iterations")

    own.run_dir.mkdir(parents=True, exist_ok=True)
    levels = {"num_levels": own.num_levels, "start_level": own.start_level}
    saved = {**vars(args), **levels, "distribution_mode": "easy", "run_dir": str(own.run_dir)}
    saved.update(batch_size=batch_size, num_iterations=num_iterations)
    git = ["git", "-C", str(own.script.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    about = {"args": saved, "command": shlex.join(sys.orig_argv), "commit": commit}
    about.update(date=time.strftime("%FT%T%z"), python=platform.python_version(), torch=torch.__version__)
    (own.run_dir / "args.json").write_text(json.dumps(about, indent=2))
    file = open(own.run_dir / "metrics.csv", "w", newline="", buffering=1)  # flushes lines
    made = []

    def make_games(num: int, env_name: str, **options) -> CountedGames:
        options.update(levels, rand_seed=args.seed, num_threads=0)
        made.append(CountedGames(num, env_name, args.num_steps, file, **options))
        return made[0]

    procgen.env.ProcgenGym3Env = make_games
    script = str(own.script.resolve())
    sys.argv = [script, *rest]
    os.chdir(own.run_dir)  # the script writes its TensorBoard events into runs/ of the folder it is in
    runpy.run_path(script, run_name="__main__")
    made[0].end_iteration()


if __name__ == "__main__":
    main()
