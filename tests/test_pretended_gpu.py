"""The CUDA code of both scripts on a machine without a GPU: PRETENDED_GPU names a command that runs Python with torch's
own CUDA code on a pretended GPU, whose kernels do nothing, and that reports what it saw when SHOW_CONV=1.

    PRETENDED_GPU=path/to/pretend_gpu pytest -m pretended_gpu

It finds violations of capture rules, synchronizations, wrong layouts and wrong devices, not wrong values."""

import os
import re
import subprocess

import pytest
from conftest import ROOT, read_rows

pytestmark = [pytest.mark.pretended_gpu, pytest.mark.timeout(1800)]
PPO = "ppo_procgen.py --num-envs 4 --num-minibatches 2 --checkpoint-interval 2"
PPG = "ppg_procgen.py --num-envs 4 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --aux-dtype bfloat16"
SETTINGS = [PPG, f"{PPG} --arch detach --aux-device file", f"{PPG} --e-value 2 --chunk-size 13 --aux-device cpu", PPO]

# Black pictures: kernels write nothing, so outputs are what their memory held before, and white pixels read as floats
# are nan. STOP_AT: Ctrl-C at this step.
BLACK = """
import importlib, itertools, os, pathlib, sys
sys.path.insert(0, ".")
script = importlib.import_module(pathlib.Path(sys.argv.pop(1)).stem)
steps = itertools.count(1)
class BlackGames(script.ProcgenVectorEnv):
    def reset(self):
        return 0 * super().reset()[0], {}
    def step(self, actions):
        if next(steps) == int(os.environ.get("STOP_AT", 0)):
            raise KeyboardInterrupt
        obs, *rest = super().step(actions)
        return 0 * obs, *rest

script.ProcgenVectorEnv = BlackGames
script.main(script.parse_args())
"""


@pytest.fixture
def pretended(tmp_path):
    """Runs a command line on the pretended GPU; gives the synchronizations, the kernels of each graph, all it said."""
    command_name = os.environ.get("PRETENDED_GPU") or pytest.skip("PRETENDED_GPU names no command")
    (tmp_path / "black.py").write_text(BLACK)

    def run(command: str, exit_code: int = 0, **environment: str):
        argv = [command_name, *re.sub(r"(\S+\.py)", rf"{tmp_path}/black.py \1", command).split()]
        env = os.environ | {"SHOW_CONV": "1"} | environment
        process = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
        assert process.returncode == exit_code, process.stderr[-3000:]
        ends = re.findall(r"end: .* syncs (\d+), .* violations (\d+),", process.stderr)  # one for each process
        assert ends and all(violations == "0" for _, violations in ends), process.stderr[-3000:]
        kernels = re.findall(r"captured a graph: (\d+) kernels", process.stderr)
        return int(ends[-1][0]), [int(number) for number in kernels], process.stderr

    return run


def test_kernels_of_a_replay_do_not_grow(pretended, tmp_path):
    """Of act, policy update and auxiliary update."""
    _, kernels, _ = pretended(f"{PPG} --no-compile --num-steps 16 --total-timesteps 256 --run-dir {tmp_path}/run")
    assert all(n <= most for n, most in zip(kernels, (93, 317, 412), strict=True)), kernels  # as first counted


@pytest.mark.parametrize("compiled", ["--no-compile", "--compile"])
@pytest.mark.parametrize("setting", SETTINGS, ids=["dual", "detach", "e_value", "ppo"])
def test_runs_and_resumes_without_a_violation(pretended, tmp_path, setting, compiled):
    flags = f"{compiled} --num-steps 16 --total-timesteps 256 --run-dir {tmp_path}/run"
    _, _, said = pretended(f"{setting} {flags}", exit_code=130, STOP_AT=str(2 * 16 + 5))
    strides = re.findall(r"\('(?:fwd|bwd)', \([^)]*\), \(\d+, (\d+),", said)
    assert strides and set(strides) == {"1"}  # of the channels: channels_last
    pretended(f"{setting.split()[0]} --resume {tmp_path}/run")
    assert len(read_rows(tmp_path / "run")) == 4


def test_the_host_waits_once_a_rollout_step_and_not_in_updates(pretended, tmp_path):
    def syncs(name, flags):
        return pretended(f"{PPG} --no-compile {flags} --run-dir {tmp_path}/{name}")[0]

    least = syncs("least", "--num-steps 16 --total-timesteps 256")
    assert syncs("steps", "--num-steps 32 --total-timesteps 512") == least + 4 * 16
    assert syncs("updates", "--num-steps 16 --total-timesteps 256 --e-policy 2 --e-value 2 --e-auxiliary 9") == least


@pytest.mark.parametrize("compiled", ["--no-compile", "--compile"])
def test_two_ranks(pretended, tmp_path, compiled):
    flags = f"{compiled} --num-steps 16 --total-timesteps 512 --run-dir {tmp_path}/run"
    _, kernels, _ = pretended(f"-m torch.distributed.run --standalone --nproc-per-node 2 {PPG} {flags}")
    assert len(kernels) == 6 and len(read_rows(tmp_path / "run")) == 4
