"""benchmark/run_cleanrl.py with a script that stands in for CleanRL's."""

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, read_rows

from ppg_procgen import EpisodeStatistics, ProcgenVectorEnv

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info >= (3, 13), reason="procgen has no wheel")]

# takes actions by their number; its own levels and seed are others
SCRIPT = """
import argparse, json
import numpy as np
from procgen import ProcgenEnv

parser = argparse.ArgumentParser()
for name in "seed total-timesteps num-envs num-steps n-iteration chatter env-id exp-name".split():
    parser.add_argument(f"--{name}")
args = parser.parse_args()
envs = ProcgenEnv(num_envs=4, env_name=args.env_id, num_levels=0, start_level=0, distribution_mode="easy")
envs.reset()
for t in range(int(args.total_timesteps) // 4):
    obs, reward, done, info = envs.step(np.full(4, t % 15))
    print(json.dumps({"level": int(info[0]["level_seed"]), "seen": int(obs["rgb"].sum())}))
"""
FLAGS = (
    "--run-dir run --num-levels 1 --start-level 7 --chatter 1 --env-id starpilot --exp-name other --seed 3 "
    "--num-envs 4 --num-steps 64 --n-iteration 2 --total-timesteps 512"
)


def test_all_episodes_are_counted_on_the_chosen_levels(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, ROOT / "benchmark" / "run_cleanrl.py", "script.py", *FLAGS.split()]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    envs = ProcgenVectorEnv("starpilot", 4, num_levels=1, start_level=7, seed=3)
    rewards, dones = np.zeros((2, 128, 4))
    for t, line in enumerate(lines):
        obs, rewards[t], dones[t], _, _ = envs.step(np.full(4, t % 15))
        assert line == {"level": 7, "seen": int(obs.sum())}
    rows = read_rows(tmp_path / "run")
    assert [(row["iteration"], row["global_step"]) for row in rows] == [("1", "256"), ("2", "512")]
    expected = EpisodeStatistics(4).update(rewards, dones)["charts/mean_return_100"]
    assert float(rows[-1]["charts/mean_return_100"]) == pytest.approx(expected)
    args = json.loads((tmp_path / "run" / "args.json").read_text())["args"]
    assert (args["num_iterations"], args["start_level"]) == (2, 7)
