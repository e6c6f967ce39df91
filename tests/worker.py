"""A script in a process of its own, with some functions replaced: forked by conftest.py, or as a rank by torchrun with
`worker.py SCRIPT OPTIONS FLAGS...`, OPTIONS in JSON."""

import hashlib
import importlib
import itertools
import json
import os
import runpy
import signal
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402, F401

# what a run imports late, and the pictures that procgen loads for its first environment, so that forks have them
torch.optim.Adam([nn.Parameter(torch.zeros(1))], fused=True)
ppg_procgen.ProcgenVectorEnv("coinrun", 1).close()


class SmallCNN(nn.Module):
    """Stands in for ImpalaCNN, which has tests of its own: a run takes a twentieth of the time."""

    num_features = 256

    def __init__(self, obs_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.dense = nn.Linear(8 * 8 * 3, self.num_features)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.dense(obs[:, ::8, ::8].flatten(1) / 255.0).relu()


class ScriptedGames:
    """Game e of rank r is number r * N + e of the whole run, however many processes play it: what it shows depends on
    its number and the time, its rewards on what it shows and the action."""

    obs_shape, num_actions, rank = (64, 64, 3), 15, 0

    def __init__(self, env_id: str, num_envs: int, mode: str, seed: int, **options) -> None:
        self.num_envs, self.t = num_envs, 0
        self.numbers = self.rank * num_envs + np.arange(num_envs)

    def observe(self) -> np.ndarray:
        return np.stack([np.random.default_rng([i, self.t]).integers(256, size=(64, 64, 3)) for i in self.numbers])

    def reset(self) -> tuple[np.ndarray, dict]:
        self.obs = self.observe().astype(np.uint8)
        return self.obs, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        rewards = ((self.obs[:, 0, 0, 0] + 37 * actions) % 11 / 3 - 1).astype(np.float32)
        self.t += 1
        done = (self.t + self.numbers) % 7 == 0
        return self.reset()[0], rewards, done, np.zeros_like(done), {}

    def close(self) -> None:
        pass

    def state_dict(self) -> dict:
        return {"t": self.t}

    def load_state_dict(self, state: dict) -> None:
        self.t = state["t"]


def install_scripted(script, setattr, num_ranks: int, num_envs: int, rows: dict[str, int]) -> None:
    """Have num_ranks ranks of num_envs games do the very same as one process of all the games: scripted games and
    actions, and in the one process minibatches that are the ranks' together. rows: the number of minibatches that a
    permutation of a rank's so many samples or rollouts makes. Sets torch's default dtype."""

    def sample_action(logits, generator=None):
        call, logprobs = next(action_calls), logits.log_softmax(-1)
        first = script.RANK * len(logits)
        uniform = [np.random.default_rng([first + e, call, 1]).random() for e in range(len(logits))]
        below = logprobs.exp().cumsum(-1) < torch.tensor(uniform).unsqueeze(-1)
        actions = below.sum(-1).clamp(max=logits.shape[-1] - 1)
        return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def randperm(n, **_):
        call = next(permutation_calls)
        if script.NUM_RANKS > 1:
            return torch.from_numpy(np.random.default_rng([call, script.RANK, 2]).permutation(n))
        n, parts = n // num_ranks, []
        for rank in range(num_ranks):  # index row * num_envs + e of the rank, where row is a step or an iteration
            row, e = np.divmod(np.random.default_rng([call, rank, 2]).permutation(n), num_envs)
            parts.append((row * num_ranks * num_envs + rank * num_envs + e).reshape(rows[str(n)], -1))
        return torch.from_numpy(np.concatenate(parts, 1).flatten())

    def std_mean(x, original=torch.std_mean, **options):
        """PPO normalises the advantages of each rank's minibatch on their own."""
        parts = [original(part, **options) for part in x.chunk(num_ranks)]
        size = len(x) // num_ranks
        return [torch.cat([part[i].expand(size) for part in parts]) for i in range(2)]

    if script.__name__ == "ppo_procgen" and script.NUM_RANKS == 1:
        setattr(torch, "std_mean", std_mean)
    action_calls, permutation_calls = itertools.count(), itertools.count()
    setattr(script, "ProcgenVectorEnv", type("Games", (ScriptedGames,), {"rank": script.RANK}))
    setattr(script, "sample_action", sample_action)
    setattr(torch, "randperm", randperm)
    # float64 from rewards to weights: in float32 what differs by rounding differs in the third digit ten updates later
    use_float64(script, setattr)


def use_float64(script, setattr) -> None:
    """Everything that a run computes; the caller restores torch's default dtype."""
    setattr(script, "np", SimpleNamespace(**vars(np) | {"float32": np.float64}))
    setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


def install_recording(script, setattr, grads: bool) -> dict[str, list]:
    """Gives lists that fill with a hash of the parameters after each update and, if asked, with the gradients of it."""

    def update(agent, *rest, **minibatch):
        stats = original(agent, *rest, **minibatch)
        params = list(agent.parameters())
        flat = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params] if grads else []
        record["grads"].append(torch.cat(flat) if grads else None)
        data = torch.cat([param.detach().flatten() for param in params]).numpy().tobytes()
        record["hashes"].append(hashlib.sha256(data).hexdigest())
        return stats

    original, record = script.update, {"grads": [], "hashes": []}
    setattr(script, "update", update)
    return record


def install_kill(script, setattr, target: str, k: int, number: int = signal.SIGKILL) -> None:
    """Signal this process at the k-th call of a function that the script sees under the name target."""

    def counting(*args, **kwargs):
        if next(calls) == k:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    path, _, name = target.rpartition(".")
    owner, calls = attrgetter(path)(script) if path else script, itertools.count(1)
    original = getattr(owner, name)
    setattr(owner, name, counting)


def install_poison(script, setattr, k: int) -> None:
    """Make the k-th loss of the policy phase nan."""

    def loss(*args, **kwargs):
        value, stats = original(*args, **kwargs)
        bad = torch.nan if next(calls) == k else 1.0
        return value * bad, stats | {"policy_loss": stats["policy_loss"] * bad}

    original, calls = script.policy_phase_loss, itertools.count(1)
    setattr(script, "policy_phase_loss", loss)


def main(name: str, options: dict, flags: list[str]) -> None:
    """SCRIPT.py FLAGS with what options replace; those of kill and poison are for one rank."""
    script, record = importlib.import_module(name), None
    if "WORLD_SIZE" in os.environ:
        importlib.reload(script)  # a forked process has read another environment
    if options.get("small", True):
        script.ImpalaCNN = SmallCNN
    if "scripted" in options:
        install_scripted(script, setattr, **options["scripted"])
    if "record" in options:
        record = install_recording(script, setattr, "scripted" in options)
    for option, install in {"kill": install_kill, "poison": install_poison}.items():
        values = dict(options.get(option, {"rank": -1}))
        if values.pop("rank", 0) == script.RANK:
            install(script, setattr, **values)
    sys.argv = [sys.argv[0] if "TORCHELASTIC_RUN_ID" in os.environ else f"{name}.py", *flags]
    sys.orig_argv = ["python", *sys.argv]  # as if it had been started so
    try:
        script.main(script.parse_args())
    finally:
        if record:
            torch.save(record, f"{options['record']}{script.RANK}.pt")


def begin(folder: Path, environment: dict[str, str], name: str, options: dict | None, flags: list[str]) -> None:
    """A forked process, its output in files of the folder."""
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if options is not None:
        main(name, options, flags)
    else:
        sys.argv = [f"{name}.py", *flags]
        runpy.run_path(f"{name}.py", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
