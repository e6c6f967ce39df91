"""Do two versions of the scripts compute the same? Runs both on the CPU with the same small flags, and compares all of
metrics.csv except times, and the weights in agent.pt, to the bit.

    python tests/compare_commits.py main~3         # that commit against the files of this folder
    python tests/compare_commits.py main~3 main    # two commits
    python tests/compare_commits.py ../old . kl    # two folders; only variants whose name has one of the words

Prints a line for each variant; exit code 1 if any differs. A few minutes on two cores.
"""

import csv
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["ppg_procgen.py", "ppo_procgen.py"]
TIMES = ("time/", "wall_time", "charts/SPS")

SMALL = "--no-cuda --num-envs 8 --num-steps 16 --num-minibatches 4 --total-timesteps 640 --seed 3"  # 5 iterations
PPG = f"ppg_procgen.py {SMALL} --n-iteration 2 --e-auxiliary 2 --aux-dtype float32"
PPO = f"ppo_procgen.py {SMALL} --env-id starpilot"
VARIANTS = {
    "dual": f"{PPG} --env-id starpilot",
    "detach": f"{PPG} --env-id coinrun --arch detach",
    "shared": f"{PPG} --env-id bigfish --arch shared --e-policy 3 --e-value 3",
    "separate epochs": f"{PPG} --env-id fruitbot --e-policy 2 --e-value 3",
    "kl penalty": f"{PPG} --env-id chaser --clip-coef 0 --kl-coef 1",
    "num_grad_accum": f"{PPG} --env-id jumper --num-grad-accum 2 --num-aux-grad-accum 2",
    "aux_interval": f"{PPG} --env-id starpilot --aux-interval 2",
    "num_aux_minibatches": f"{PPG} --env-id starpilot --num-aux-minibatches 3",
    "anneal_lr": f"{PPG} --env-id leaper --anneal-lr",
    "single_optimizer": f"{PPG} --env-id maze --single-optimizer --e-policy 2",
    "clip_vloss": f"{PPG} --env-id ninja --clip-vloss --max-grad-norm 0.5",
    "no auxiliary phase": f"{PPG} --env-id heist --e-auxiliary 0",
    "evaluation": f"{PPG} --env-id chaser --num-levels 20 --eval-interval 2 --eval-episodes 4",
    "2 ranks": f"{PPG} --env-id starpilot --total-timesteps 1280",
    "ppo": PPO,
    "ppo anneal_lr": f"{PPO} --anneal-lr",
    "ppo evaluation": f"{PPO} --num-levels 20 --eval-interval 2 --eval-episodes 4",
    "ppo no clipping": f"{PPO} --no-clip-vloss --max-grad-norm 0 --num-grad-accum 2",
    "ppo 2 ranks": f"{PPO} --total-timesteps 1280",
}


def check_out(version: str, folder: Path) -> None:
    """Put the scripts of a folder or a commit into a folder."""
    folder.mkdir()
    for script in SCRIPTS:
        if Path(version).is_dir():
            source = (Path(version) / script).read_bytes()
        else:
            source = subprocess.check_output(["git", "show", f"{version}:{script}"], cwd=ROOT)
        (folder / script).write_bytes(source)


def run(folder: Path, name: str) -> Path:
    """Run a variant with the scripts of a folder, and return the run's folder."""
    run_dir = folder / name.replace(" ", "_")
    starter = [sys.executable]
    if "2 ranks" in name:
        starter += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*starter, *shlex.split(VARIANTS[name]), "--run-dir", run_dir.name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{name}: exit code {result.returncode}\n{shlex.join(command)}\n{result.stderr[-2000:]}")
    return run_dir


def read_columns(run_dir: Path) -> dict[str, list[str]]:
    """The columns of metrics.csv that do not depend on the clock."""
    with open(run_dir / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] for row in rows] for name in rows[0] if not name.startswith(TIMES)}
    return {name: values for name, values in columns.items() if any(values)}  # a version may leave out blank ones


def differences(old: Path, new: Path) -> list[str]:
    """What differs between two runs, a line each."""
    found = []
    old_columns = read_columns(old)
    new_columns = read_columns(new)
    for name in old_columns.keys() & new_columns.keys():
        rows = zip(old_columns[name], new_columns[name], strict=True)
        for number, (old_value, new_value) in enumerate(rows, start=1):
            if old_value != new_value:
                found.append(f"iteration {number}: {name} {old_value} -> {new_value}")
                break
    for name in old_columns.keys() ^ new_columns.keys():
        found.append(f"only one has the column {name}")
    old_weights = torch.load(old / "agent.pt", weights_only=True)
    new_weights = torch.load(new / "agent.pt", weights_only=True)
    if old_weights.keys() != new_weights.keys():
        found.append("the parameters have other names")
    for name in old_weights.keys() & new_weights.keys():
        if not torch.equal(old_weights[name], new_weights[name]):
            found.append(f"weights: {name}")
    return sorted(found)


def main(old: str, new: str, words: list[str]) -> int:
    chosen = [name for name in VARIANTS if not words or any(word in name for word in words)]
    num_different = 0
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as pool:
        folders = [Path(temporary) / "old", Path(temporary) / "new"]
        check_out(old, folders[0])
        check_out(new, folders[1])
        for name in chosen:
            found = differences(*pool.map(partial(run, name=name), folders))
            num_different += bool(found)
            print(f"{name:20} {'differs' if found else 'equal'}", flush=True)
            for line in found[:5]:
                print(f"    {line}")
    print(f"{num_different} of {len(chosen)} variants differ")
    return 1 if num_different else 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], (sys.argv[2:] or [ROOT])[0], sys.argv[3:]))
