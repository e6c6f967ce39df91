"""What test_distributed.py starts as a rank: `rank_worker.py SCRIPT OPTIONS FLAGS...` is `SCRIPT.py FLAGS...` with some
functions replaced, as the JSON OPTIONS say."""

import hashlib
import importlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class ScriptedGames:
    """Game e of rank r is number r * N + e of the whole run, however many processes play it: what it shows depends on
    its number and the time, its rewards on what it shows and the action."""

    rank = 0

    def __init__(self, env_id: str, num_envs: int, mode: str, **options) -> None:
        import gym

        self.num_envs, self.t = num_envs, 0
        self.numbers = self.rank * num_envs + np.arange(num_envs)
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)

    def observe(self) -> np.ndarray:
        return np.stack([np.random.default_rng([i, self.t]).integers(256, size=(64, 64, 3)) for i in self.numbers])

    def reset(self) -> tuple[np.ndarray, dict]:
        self.obs = self.observe().astype(np.uint8)
        return self.obs, {}

    def step_async(self, actions: np.ndarray) -> None:
        self.rewards = ((self.obs[:, 0, 0, 0] + 37 * actions) % 11 / 3 - 1).astype(np.float32)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.t += 1
        done = (self.t + self.numbers) % 7 == 0
        return self.reset()[0], self.rewards, done, np.zeros_like(done), {}

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
        for rank in range(num_ranks):  # index row * num_envs + e of the rank, where row is a step or a slot
            row, e = np.divmod(np.random.default_rng([call, rank, 2]).permutation(n), num_envs)
            parts.append((row * num_ranks * num_envs + rank * num_envs + e).reshape(rows[str(n)], -1))
        return torch.from_numpy(np.concatenate(parts, 1).flatten())

    def normalized(self, *rollout):
        return normalize(self, *rollout).astype(np.float64)

    action_calls, permutation_calls, normalize = itertools.count(), itertools.count(), script.RewardNormalizer.__call__
    games = type("Games", (ScriptedGames,), {"rank": script.RANK})
    setattr(script, "ProcgenVectorEnv", games)
    setattr(script, "sample_action", sample_action)
    setattr(torch, "randperm", randperm)
    # float64 from rewards to weights: in float32 what differs by rounding differs in the third digit ten updates later
    setattr(torch.Tensor, "float", torch.Tensor.double)
    setattr(script.RewardNormalizer, "__call__", normalized)
    torch.set_default_dtype(torch.float64)


def install_recording(script, setattr, grads: bool) -> dict[str, list]:
    """Gives lists that fill with a hash of the parameters after each update and, if asked, with the gradients of it."""

    def update(optimizer, *rest, **minibatch):
        stats, params = original(optimizer, *rest, **minibatch), optimizer.param_groups[0]["params"]
        flat = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params] if grads else []
        record["grads"].append(torch.cat(flat) if grads else None)
        data = torch.cat([param.detach().flatten() for param in params]).numpy().tobytes()
        record["hashes"].append(hashlib.sha256(data).hexdigest())
        return stats

    original, record = script.update, {"grads": [], "hashes": []}
    setattr(script, "update", update)
    return record


def install_kill(script, setattr, target: str, k: int, note: str) -> None:
    """Kill this process at the k-th call of a function: step_wait of the games, or one of the script."""

    def counting(*args, **kwargs):
        if next(calls) == k:
            Path(note).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    owner, calls = script.ProcgenVectorEnv if target == "step_wait" else script, itertools.count(1)
    original = getattr(owner, target)
    setattr(owner, target, counting)


def install_poison(script, setattr, k: int) -> None:
    """Make the k-th loss of the policy phase nan."""

    def loss(*args, **kwargs):
        value, stats = original(*args, **kwargs)
        bad = torch.nan if next(calls) == k else 1.0
        return value * bad, stats | {"policy_loss": stats["policy_loss"] * bad}

    original, calls = script.policy_phase_loss, itertools.count(1)
    setattr(script, "policy_phase_loss", loss)


if __name__ == "__main__":
    name, options = sys.argv[1], json.loads(sys.argv[2])
    script, record = importlib.import_module(name), None
    if "scripted" in options:
        install_scripted(script, setattr, **options["scripted"])
    if "record" in options:
        record = install_recording(script, setattr, "scripted" in options)
    if options.get("kill", {}).get("rank") == script.RANK:
        install_kill(script, setattr, **{k: v for k, v in options["kill"].items() if k != "rank"})
    if options.get("poison", {}).get("rank") == script.RANK:
        install_poison(script, setattr, options["poison"]["k"])
    sys.argv = [f"{name}.py", *sys.argv[3:]]
    try:
        script.main(script.parse_args())
    except script.UsageError as error:
        sys.exit(f"usage: {error}")
    finally:
        if record:
            torch.save(record, f"{options['record']}{script.RANK}.pt")
