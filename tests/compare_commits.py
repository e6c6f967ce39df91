"""Do two versions of the scripts compute the same? Runs both on the CPU with the same small flags; compares the weights
to the bit, and metrics.csv without times to 1e-6.

    python tests/compare_commits.py main~3         # that commit against the files of this folder
    python tests/compare_commits.py main~3 main    # two commits
    python tests/compare_commits.py ../old . kl    # two folders; only variants whose name has one of the words

Prints a line for each variant; exit code 1 if any differs. A few minutes on two cores.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--no-cuda --num-envs 8 --num-steps 16 --num-minibatches 4 --total-timesteps 640 --seed 3"  # 5 iterations
PPG = f"ppg_procgen.py {SMALL} --n-iteration 2 --e-auxiliary 2 --aux-dtype float32"
PPO = f"ppo_procgen.py {SMALL} --env-id starpilot"
VARIANTS = {
    "dual": f"{PPG} --env-id starpilot",
    "detach": f"{PPG} --env-id coinrun --arch detach",
    "shared": f"{PPG} --env-id bigfish --arch shared --e-policy 3 --e-value 3",
    "kl, separate epochs": f"{PPG} --env-id chaser --clip-coef 0 --kl-coef 1 --e-policy 2 --e-value 3",
    "auxiliary minibatches": f"{PPG} --env-id starpilot --aux-interval 2 --num-aux-minibatches 3",
    "single_optimizer": f"{PPG} --single-optimizer --e-policy 2 --anneal-lr --clip-vloss --max-grad-norm 0.5",
    "no auxiliary phase": f"{PPG} --env-id chaser --e-auxiliary 0 --num-levels 20 --eval-interval 2",
    "2 ranks": f"{PPG} --env-id starpilot --total-timesteps 1280",
    "ppo": PPO,
    "ppo no clipping": f"{PPO} --no-clip-vloss --max-grad-norm 0 --anneal-lr",
    "ppo 2 ranks": f"{PPO} --total-timesteps 1280",
}


def run(version: str, folder: Path, name: str) -> tuple[dict, pd.DataFrame]:
    """Run a variant with the scripts of a folder or a commit. Returns its weights and metrics."""
    folder.mkdir()
    for script in ("ppg_procgen.py", "ppo_procgen.py"):
        if Path(version).is_dir():
            source = Path(version, script).read_bytes()
        else:
            source = subprocess.check_output(["git", "show", f"{version}:{script}"], cwd=ROOT)
        (folder / script).write_bytes(source)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if "2 ranks" in name else []
    argv = [sys.executable, *ranks, *VARIANTS[name].split(), "--run-dir", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{name}, {version}: exit code {result.returncode}\n{result.stderr[-2000:]}")
    weights = torch.load(folder / "run" / "agent.pt", weights_only=True)
    return weights, pd.read_csv(folder / "run" / "metrics.csv").dropna(axis=1, how="all")


def differences(old: tuple[dict, pd.DataFrame], new: tuple[dict, pd.DataFrame]) -> list[str]:
    """What differs between two runs: names of parameters and of columns. A column that one lacks does not count."""
    (old_weights, old_rows), (new_weights, new_rows) = old, new
    assert old_weights.keys() == new_weights.keys() and len(old_rows) == len(new_rows) == 5
    found = [name for name, x in old_weights.items() if not torch.equal(x, new_weights[name])]
    for name in old_rows.columns.intersection(new_rows.columns):
        is_time = name.startswith(("time/", "wall_time", "charts/SPS"))
        if not is_time and not np.allclose(old_rows[name], new_rows[name], rtol=1e-6, atol=1e-6, equal_nan=True):
            found.append(name)
    return found


def main(old: str, new: str = str(ROOT), *words: str) -> int:
    num_different = 0
    for name in [name for name in VARIANTS if not words or any(word in name for word in words)]:
        with tempfile.TemporaryDirectory() as folder:
            found = differences(run(old, Path(folder, "old"), name), run(new, Path(folder, "new"), name))
        num_different += bool(found)
        print(f"{name:22} {'differs: ' + ', '.join(found[:5]) if found else 'equal'}", flush=True)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
