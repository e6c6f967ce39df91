"""Run CleanRL's ppg_procgen.py as it is, on chosen levels, with its returns counted as ours are.

    PYTHON benchmark/cleanrl.py path/to/cleanrl/cleanrl/ppg_procgen.py --env-id starpilot --seed 1 --num-levels 1 \
        --num-envs 16 --num-steps 64 --n-iteration 16 --total-timesteps 49152 --run-dir runs/cleanrl

PYTHON must have gym 0.23, procgen, numpy<2, torch, tyro, tensorboard and tqdm. --num-levels, --start-level and
--run-dir are for this file; all other flags go to the script. The flags of the example are required, but for
--num-levels. The run folder has args.json and metrics.csv like one of ours, so that sweep.py and report.py read it.
Counting is needed because the script logs the return of one environment a step, and drops those of others. procgen
steps in the main thread.

An iteration's row is written when its updates are done, at the first step of the next one. Time begins when networks
and buffers are made, as ours does: with the first action.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that nothing needs to be installed
from ppg_procgen import EpisodeStatistics  # noqa: E402

COLUMNS = "iteration global_step episodes wall_time charts/episodic_return charts/episodic_length".split()
COLUMNS += ["charts/mean_return_100", "charts/SPS"]


class CountedGames(procgen.env.ProcgenGym3Env):
    """procgen's environments on the levels of `levels`, which write a row an iteration to `run_dir`/metrics.csv."""

    levels: dict
    run_dir: Path
    num_steps: int

    def __init__(self, num: int, env_name: str, **options) -> None:
        super().__init__(num, env_name, **options | self.levels)
        self.statistics, self.rows, self.start_time = EpisodeStatistics(num), 0, None
        self.rewards, self.dones, self.acted = [], [], False
        self.write(COLUMNS)

    def write(self, row: list) -> None:
        with open(self.run_dir / "metrics.csv", "a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)

    def act(self, actions) -> None:
        self.start_time = self.start_time or time.time()
        if len(self.rewards) == self.num_steps:
            self.end_iteration()
        super().act(actions)
        self.acted = True

    def observe(self):
        rewards, obs, first = super().observe()
        if self.acted:  # the first look after an action; the same may be seen again
            self.rewards.append(rewards.copy())
            self.dones.append(first.copy())
            self.acted = False
        return rewards, obs, first

    def end_iteration(self) -> None:
        rewards, dones = (np.stack(x).astype(np.float32) for x in (self.rewards, self.dones))
        self.rewards, self.dones, self.rows = [], [], self.rows + 1
        row = {"iteration": self.rows, "global_step": self.rows * rewards.size}
        row |= {"wall_time": time.time() - self.start_time} | self.statistics.update(rewards, dones)
        row["charts/SPS"] = row["global_step"] / row["wall_time"]
        self.write([row[name] if np.isfinite(row[name]) else "" for name in COLUMNS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("script", type=Path, help="CleanRL's ppg_procgen.py")
    parser.add_argument("--run-dir", type=Path, required=True, help="new folder for the run's files")
    for name, default in {"num-levels": 0, "start-level": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    passed = parser.add_argument_group("given to the script as well")
    passed.add_argument("--env-id", required=True)
    passed.add_argument("--exp-name", default="cleanrl_ppg")
    for name in ("seed", "total-timesteps", "num-envs", "num-steps", "n-iteration"):
        passed.add_argument(f"--{name}", type=int, required=True)
    known, rest = parser.parse_known_args()
    args = vars(known) | {"distribution_mode": "easy", "batch_size": known.num_envs * known.num_steps}
    args["num_iterations"] = known.total_timesteps // args["batch_size"]
    if args["num_iterations"] % known.n_iteration:
        parser.error(f"the script drops what is no whole phase: {args['num_iterations']} iterations")
    script = args.pop("script").resolve()
    if not script.is_file():
        parser.error(f"there is no {script}")

    known.run_dir.mkdir(parents=True)
    args["run_dir"] = str(known.run_dir)
    git = ["git", "-C", str(script.parent), "rev-parse", "HEAD"]
    about = {"algorithm": "ppg", "args": args, "command": shlex.join(["python", *sys.argv])}
    about["commit"] = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    about["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and "--no-cuda" not in rest else None
    about["hardware"] = {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu}
    (known.run_dir / "args.json").write_text(json.dumps(about, indent=2) + "\n")

    CountedGames.run_dir, CountedGames.num_steps = known.run_dir.resolve(), known.num_steps
    CountedGames.levels = {"num_levels": known.num_levels, "start_level": known.start_level}
    CountedGames.levels |= {"rand_seed": known.seed, "num_threads": 0}
    games = []
    procgen.env.ProcgenGym3Env = lambda *args, **options: games.append(CountedGames(*args, **options)) or games[-1]
    names = ("env_id", "exp_name", "seed", "total_timesteps", "num_envs", "num_steps", "n_iteration")
    sys.argv = [str(script), *(f"--{name.replace('_', '-')}={args[name]}" for name in names), *rest]
    os.chdir(known.run_dir)  # the script writes its TensorBoard events into runs/ of the folder it is in
    runpy.run_path(str(script), run_name="__main__")
    games[0].end_iteration()


if __name__ == "__main__":
    main()
