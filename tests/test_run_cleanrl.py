"""benchmark/cleanrl.py with a script that stands in for CleanRL's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import read_rows

from ppg_procgen import ProcgenVectorEnv

WRAPPER = Path(__file__).parents[1] / "benchmark" / "cleanrl.py"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info >= (3, 13), reason="procgen has no wheel")]

# takes actions by their number, as many steps as it is told; its own levels and seed are others
SCRIPT = """
import argparse, json
import numpy as np
from procgen import ProcgenEnv

parser = argparse.ArgumentParser()
for name in "seed total-timesteps num-envs num-steps n-iteration chatter".split():
    parser.add_argument(f"--{name}", type=int)
for name in "env-id exp-name".split():
    parser.add_argument(f"--{name}")
args = parser.parse_args()
envs = ProcgenEnv(num_envs=args.num_envs, env_name=args.env_id, num_levels=0, start_level=0, distribution_mode="easy")
obs = envs.reset()["rgb"]
for t in range(args.total_timesteps // args.num_envs):
    obs, reward, done, info = envs.step(np.full(args.num_envs, t % 15))
    print(json.dumps({"level": int(info[0]["level_seed"]), "seen": int(obs["rgb"].sum())}))
"""


@pytest.fixture
def wrapped(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def wrapped(*flags):
        argv = [sys.executable, WRAPPER, tmp_path / "script.py", "--env-id", "bossfight", "--seed", "3", *flags]
        argv += ["--num-envs", "4", "--num-steps", "64", "--n-iteration", "2", "--run-dir", tmp_path / "run"]
        return subprocess.run(list(map(str, argv)), cwd=tmp_path, capture_output=True, text=True)

    return wrapped


def test_all_episodes_are_counted_on_the_levels_that_were_asked_for(tmp_path, wrapped):
    result = wrapped("--total-timesteps", 512, "--num-levels", 1, "--start-level", 7, "--chatter", 1)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert {line["level"] for line in lines} == {7}

    envs = ProcgenVectorEnv("bossfight", 4, num_levels=1, start_level=7, seed=3)
    obs, lengths, current = [], [], np.zeros(4, int)
    for t in range(128):
        seen, _, done, _, _ = envs.step(np.full(4, t % 15))
        obs.append(int(seen.sum()))
        current += 1
        lengths += [(t, length) for length in current[done]]
        current[done] = 0
    envs.close()
    assert [line["seen"] for line in lines] == obs  # the seed is the run's
    rows = read_rows(tmp_path / "run")
    assert [(int(row["iteration"]), int(row["global_step"])) for row in rows] == [(1, 256), (2, 512)]
    assert [int(row["episodes"]) for row in rows] == [sum(t < 64 for t, _ in lengths), len(lengths)]
    for i, row in enumerate(rows):
        ended = [length for t, length in lengths if t // 64 == i]
        assert float(row["charts/episodic_length"] or "nan") == pytest.approx(np.mean(ended or np.nan), nan_ok=True)

    about = json.loads((tmp_path / "run" / "args.json").read_text())
    assert about["args"]["num_iterations"] == 2 and about["args"]["start_level"] == 7 and about["algorithm"] == "ppg"


def test_iterations_that_the_script_would_drop_are_refused(tmp_path, wrapped):
    result = wrapped("--total-timesteps", 768)
    assert result.returncode == 2 and "no whole phase: 3 iterations" in result.stderr
    assert not (tmp_path / "run").exists()
