"""What conftest.py forks: a script in a process of its own, with some functions replaced."""

import functools
import importlib
import itertools
import os
import signal
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import nn

import ppg_procgen
import ppo_procgen  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

if "WARM_UP" in os.environ:  # load what a run imports late, and procgen's pictures, so that forks have them
    torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=True)
    ppg_procgen.make_envs(ppg_procgen.Args(env_id="coinrun", num_envs=1, env_threads=0), 0, 0, 0)


class SmallCNN(nn.Module):
    """Stands in for ImpalaCNN, which has tests of its own: a run takes a twentieth of the time."""

    num_features = 256

    def __init__(self, obs_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.dense = nn.Linear(8 * 8 * 3, self.num_features)

    def forward(self, obs: torch.Tensor, bf16: bool = False) -> torch.Tensor:
        with torch.autocast(obs.device.type, torch.bfloat16, bf16, cache_enabled=False):
            return self.dense(obs[:, ::8, ::8].flatten(1) / 255.0).relu().float()


class ScriptedGames:
    """Game e of rank r has number r * N + e. Its images depend on number and time, its rewards on image and action."""

    single_observation_space, single_action_space = Box(0, 255, (64, 64, 3), np.uint8), Discrete(15)

    def __init__(self, num_envs: int, rank: int) -> None:
        self.numbers, self.t = rank * num_envs + np.arange(num_envs), 0

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict]:
        draws = [np.random.default_rng([number, self.t]) for number in self.numbers]
        self.obs = np.stack([draw.integers(256, size=(64, 64, 3), dtype=np.uint8) for draw in draws])
        return self.obs, {}

    def step(self, actions: np.ndarray) -> tuple:
        rewards = ((self.obs[:, 0, 0, 0] + 37 * actions) % 11 / 3 - 1).astype(np.float32)
        self.t += 1
        done = (self.t + self.numbers) % 7 == 0
        return self.reset()[0], rewards, done, np.zeros_like(done), {}

    def state_dict(self) -> dict:
        return {}


def install_scripted(script, setattr) -> None:
    """Have two ranks of two games do what one process of all four does in minibatches of both."""
    action_calls, permutation_calls = itertools.count(), itertools.count()

    def sample(pi, generator=None):
        call, probs = next(action_calls), pi.probs
        first = script.RANK * len(probs)
        uniform = [np.random.default_rng([first + e, call, 1]).random() for e in range(len(probs))]
        return (probs.cumsum(-1)[:, :-1] < torch.tensor(uniform).unsqueeze(-1)).sum(-1)

    def randperm(n, **_):
        call = next(permutation_calls)
        if script.NUM_RANKS > 1:
            return torch.from_numpy(np.random.default_rng([call, script.RANK, 2]).permutation(n))
        parts = []
        for rank in range(2):  # index row * 2 + e of the rank, where row is a step or an iteration
            row, e = np.divmod(np.random.default_rng([call, rank, 2]).permutation(n // 2), 2)
            parts.append((row * 4 + rank * 2 + e).reshape(2, -1))
        return torch.from_numpy(np.concatenate(parts, 1).flatten())

    if script.__name__ == "ppo_procgen":  # it would normalize the advantages of each rank's minibatch on their own
        setattr(torch, "std_mean", lambda x, **_: (1.0, 0.0))
    setattr(script, "make_envs", lambda args, *_: ScriptedGames(args.num_envs, script.RANK))
    setattr(script.Policy, "sample", sample)
    setattr(torch, "randperm", randperm)
    # float64 from rewards to weights: in float32 what differs by rounding differs in the third digit ten updates later
    use_float64(script, setattr)


def use_float64(script, setattr) -> None:
    """Everything that a run computes."""
    setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


def install_recording(script, setattr) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """A list that fills with all gradients, all parameters and the iteration's random seed after each update."""

    def gradient_step(agent, *rest, **minibatch):
        stats = original(agent, *rest, **minibatch)
        params = list(agent.parameters())
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in params]
        vectors = [torch.cat([x.detach().flatten() for x in part]) for part in (grads, params)]
        record.append((*vectors, torch.initial_seed()))
        return stats

    original, record = script.gradient_step, []
    setattr(script, "gradient_step", gradient_step)
    return record


def install_kill(script, setattr, target: str, k: int, number: int = signal.SIGKILL) -> None:
    """Signal this process at the k-th call of a function that the script calls target, or the k-th "step" of games."""

    def counting(original, *args, **kwargs):
        if next(calls) == k:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    def make_envs(*args, original=script.make_envs, **options):
        envs = original(*args, **options)
        envs.step = functools.partial(counting, envs.step)
        return envs

    calls = itertools.count(1)
    if target == "step":
        return setattr(script, "make_envs", make_envs)
    path, _, name = target.rpartition(".")
    owner = attrgetter(path)(script) if path else script
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: counting(original, *args, **kwargs))


def begin(files: list[Path], environment: dict[str, str], name: str, options: dict, flags: list[str]) -> None:
    """SCRIPT.py FLAGS with what options replace; a kill may be of one rank. Output and errors go to two files."""
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    script, record = importlib.import_module(name), None
    if "RANK" in os.environ:
        importlib.reload(script)  # it has read another environment
    script.ImpalaCNN = SmallCNN
    if "scripted" in options:
        install_scripted(script, setattr)
    if "lonely" in options:
        script.average_grads = lambda params: None
    if "uneven" in options:
        script.RewardNormalizer.gamma = property(lambda self: script.RANK * 1e-9, lambda *_: None)
    if "record" in options:
        record = install_recording(script, setattr)
    kill = options.get("kill", {"rank": -1})
    if kill.pop("rank", 0) == script.RANK:
        install_kill(script, setattr, **kill)
    sys.argv = [f"{name}.py", *flags]
    try:
        script.main(script.parse_args())
    finally:
        if record is not None:
            torch.save(record, f"{options['record']}{script.RANK}.pt")
