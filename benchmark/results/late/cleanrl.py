"""CleanRL's ppg_procgen.py, as it is, on an easy level, with its episodes counted as ours are.

    git clone https://github.com/vwxyzjn/cleanrl
    git -C cleanrl checkout fe8d8a0
    OMP_NUM_THREADS=1 python benchmark/results/late/cleanrl.py starpilot 1    # game, seed

Its environment needs torch, tensorboard, tyro and, without what they ask for, gym 0.23.1 and Procgen. It writes
cleanrl_starpilot_1/metrics.csv: a row for each iteration, when its updates are done. (The script itself logs the return
of one environment a step, and drops those of others.)
"""

import csv
import os
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import procgen.env

env_id, seed = sys.argv[1:]
num_envs, num_steps = 16, 64
flags = f"""--env-id {env_id} --seed {seed} --total-timesteps 32768 --num-envs {num_envs} --num-steps {num_steps}
    --num-minibatches 4 --gamma 0.99 --n-iteration 8 --e-auxiliary 2 --num-aux-rollouts 4 --exp-name cleanrl_ppg"""


class CountedGames(procgen.env.ProcgenGym3Env):
    def __init__(self, num: int, env_name: str, **options):
        super().__init__(num, env_name, **options | {"num_levels": 1, "start_level": 0, "rand_seed": int(seed)})
        self.start_time, self.steps, self.acted = time.time(), 0, False
        self.totals = np.zeros(num)  # of the episodes under way
        self.returns, self.new = [], []  # of those that ended, before and in this iteration

    def act(self, actions):
        if self.steps and self.steps % num_steps == 0:  # the first action after the updates
            self.end_iteration()
        super().act(actions)
        self.acted = True

    def observe(self):
        rewards, obs, first = super().observe()
        if self.acted:  # the same may be looked at again
            self.steps, self.acted = self.steps + 1, False
            self.totals += rewards
            self.new += self.totals[first].tolist()
            self.totals[first] = 0
        return rewards, obs, first

    def end_iteration(self):
        self.returns, new, self.new = self.returns + self.new, self.new, []
        row = {"iteration": self.steps // num_steps, "global_step": self.steps * num_envs}
        row |= {"wall_time": time.time() - self.start_time, "charts/episodic_return": np.mean(new)}
        row["charts/mean_return_100"] = np.mean(self.returns[-100:])
        with open("metrics.csv", "a", newline="") as file:
            rows = csv.DictWriter(file, row)
            if self.steps == num_steps:
                rows.writeheader()
            rows.writerow(row)


script = Path("cleanrl/cleanrl/ppg_procgen.py").resolve()
games = []
procgen.env.ProcgenGym3Env = lambda *args, **options: games.append(CountedGames(*args, **options)) or games[-1]
sys.argv = [str(script), *flags.split()]
folder = Path(f"cleanrl_{env_id}_{seed}")
folder.mkdir()
os.chdir(folder)  # the script writes its TensorBoard events into runs/ here
runpy.run_path(str(script), run_name="__main__")
games[0].end_iteration()
