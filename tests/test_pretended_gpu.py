"""The CUDA code of both scripts on a machine without a GPU: PRETENDED_GPU names a command that runs Python with torch's
own CUDA code on a pretended GPU, whose kernels do nothing, and that reports what it saw when SHOW_CONV=1.

    PRETENDED_GPU=path/to/pretend_gpu pytest -m pretended_gpu

It finds violations of capture rules, synchronisations, recompilations and wrong devices; it says nothing of values."""

import os
import re
import subprocess

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.pretended_gpu, pytest.mark.timeout(1800)]
PPG = "ppg_procgen.py --num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2"
PPO = "ppo_procgen.py --num-envs 4 --num-steps 16 --num-minibatches 2 --checkpoint-interval 2"

# Runs SCRIPT FLAGS with black pictures: kernels write nothing, so networks give what their memory held before, and
# white pixels, read as floats, are nan.
BLACK = """
import importlib, pathlib, sys
sys.path.insert(0, ".")
script = importlib.import_module(pathlib.Path(sys.argv.pop(1)).stem)

class BlackGames(script.ProcgenVectorEnv):
    def reset(self):
        obs, infos = super().reset()
        return 0 * obs, infos

    def step(self, actions):
        obs, *rest = super().step(actions)
        return 0 * obs, *rest

script.ProcgenVectorEnv = BlackGames
script.main(script.parse_args())
"""


@pytest.fixture
def pretended(tmp_path):
    """Runs a command line on the pretended GPU; gives the process, with what the pretended GPU counted."""
    command = os.environ.get("PRETENDED_GPU")
    if not command:
        pytest.skip("PRETENDED_GPU names no command")

    (tmp_path / "black.py").write_text(BLACK)

    def run(arguments: str, **environment: str):
        argv = [command, *re.sub(r"(\S+\.py)", rf"{tmp_path}/black.py \1", arguments).split()]
        argv += [] if "--resume" in arguments else ["--run-dir", str(tmp_path / "run")]
        # in processes of its own, torch's compiler would wait 300 seconds for their end
        env = os.environ | {"SHOW_CONV": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | environment
        process = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
        counts = re.findall(r"\[fakecuda\] end: (.*)", process.stderr)
        pairs = re.findall(r"([a-z0-9 ]+?) (\d+)(?=,)", counts[-1]) if counts else []
        process.counts = {name.strip(): int(number) for name, number in pairs}
        return process

    return run


def test_kernels_of_a_replay_do_not_grow(pretended):
    """Of act, policy update and auxiliary update, dual, not compiled: as counted when this was written."""
    process = pretended(f"{PPG} --no-compile --aux-dtype bfloat16 --total-timesteps 256")
    kernels = [int(n) for n in re.findall(r"captured a graph: (\d+) kernels", process.stderr)]
    assert len(kernels) == 3 and all(n <= most for n, most in zip(kernels, (49, 322, 417), strict=True)), kernels


@pytest.mark.parametrize("compiled", ["--no-compile", "--compile"])
@pytest.mark.parametrize("script", [PPG, PPG + " --arch detach", PPO], ids=["dual", "detach", "ppo"])
def test_runs_and_resumes_without_a_violation(pretended, tmp_path, script, compiled):
    process = pretended(f"{script} {compiled} --total-timesteps 256")
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.counts["violations"] == 0
    convolutions = re.findall(
        r"\('(?:fwd|bwd)', \((\d+), (\d+), (\d+), (\d+)\), \((\d+), (\d+), (\d+), (\d+)\)", process.stderr
    )
    assert convolutions  # the stride of the channels is 1: channels_last
    assert all(int(strides[5]) == 1 for strides in convolutions)
    process = pretended(f"{script.split()[0]} --resume {tmp_path / 'run'} --total-timesteps 384")
    assert process.returncode == 0 and process.counts["violations"] == 0, process.stderr[-2000:]


def test_the_host_waits_once_a_rollout_step_and_not_in_updates(pretended):
    """Runs that differ by one phase of 2 iterations of 16 steps."""
    counts = [pretended(f"{PPG} --no-compile --total-timesteps {steps}").counts for steps in (256, 384)]
    assert counts[1]["syncs"] - counts[0]["syncs"] <= 2 * (16 + 8) + 10


def test_a_full_gpu_ends_with_advice(pretended):
    process = pretended(f"{PPG} --no-compile --total-timesteps 4096 --num-steps 256", FAKE_LIMIT_GB="0.3")
    assert process.returncode == 1
    assert "stopped: OutOfMemoryError" in process.stderr and "--num-grad-accum" in process.stderr


def test_two_ranks(pretended, tmp_path):
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 "
    process = pretended(f"{torchrun}{PPG} --no-compile --total-timesteps 1024")
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.counts["violations"] == 0
