# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch>=2.6,<2.14",
#   "numpy",
#   "procgen==0.10.7; python_version < '3.11'",
#   "procgen-mirror==0.10.7; python_version >= '3.11'",
#   "tensorboard>=2.14",
#   "tqdm>=4.64",
#   "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization on Procgen as the Procgen paper ran it (Cobbe et al., 2020,
https://arxiv.org/abs/1912.01588), in one file: the baseline of ppg_procgen.py, and the same file where the two agree.

    python ppo_procgen.py --env-id starpilot                        # the published setting, 25M steps
    python ppo_procgen.py --env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 \
        --total-timesteps 256                                       # seconds on a CPU: is everything in place?

Letters: T = num_steps, N = num_envs, B = samples in a minibatch, A = number of actions.

Departure from openai/train-procgen, with the flag that takes it back:
- rewards are normalised with the discount of the algorithm, not 0.99                --reward-gamma 0.99
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

with contextlib.redirect_stderr(io.StringIO()):  # procgen imports gym, which prints a notice about its own retirement
    import gym
    from procgen import ProcgenGym3Env

# fmt: off
Game = Literal["bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
               "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"]
# every game has easy and hard levels; procgen aborts the whole process when asked for another mode a game lacks
GAMES_WITH_MODE = {
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": ("caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"),
}
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class Args:
    # ---- the run
    env_id: Game = "starpilot"
    """procgen game"""
    total_timesteps: int = 25_000_000
    """environment steps of the whole run, rounded down to whole iterations of num_envs * num_steps"""
    seed: int = 1
    """seeds Python, numpy, torch and procgen; the same seed on the same CPU gives the same bits"""
    exp_name: str = "ppo_procgen"
    """name of the experiment, part of the run folder's name"""
    run_dir: str = ""
    """folder for this run's records (default: runs/{env_id}__{exp_name}__{seed}__{time})"""
    resume: str = ""
    """run folder to continue from its checkpoint; all other arguments are read from there, and only
    total_timesteps may be raised"""
    checkpoint_interval: int = 32
    """iterations between checkpoints"""
    cuda: bool = True
    """use the GPU if there is one"""
    track: bool = False
    """also send the records to Weights & Biases (pip install wandb)"""
    wandb_project_name: str = "ppg-procgen"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""

    # ---- environment
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    """procgen's level distribution; every game has easy and hard"""
    num_levels: int = 0
    """number of training levels; 0: all"""
    start_level: int = 0
    """first training level"""
    num_envs: int = 64
    """N: parallel environments"""
    env_threads: int | None = None
    """procgen's threads; 0 steps in the main thread (default: 0 up to 2 cores, else 4)"""

    # ---- PPO
    num_steps: int = 256
    """T: steps of each environment in a rollout"""
    learning_rate: float = 5e-4
    """Adam's step size"""
    anneal_lr: bool = False
    """anneal the learning rate linearly to zero over the whole run"""
    gamma: float = 0.999
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    reward_gamma: float | None = None
    """discount of the reward normalisation (default: gamma; the reference code: 0.99)"""
    num_minibatches: int = 8
    """minibatches of an epoch over the N * T samples"""
    num_grad_accum: int = 1
    """parts in which a minibatch is run: same step, less memory"""
    update_epochs: int = 3
    """epochs over the N * T samples"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective and of the clipped value loss"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss, half a mean squared erro"""
    clip_vloss: bool = True
    """clip the value loss"""
    max_grad_norm: float = 0.5
    """clip the gradient to this norm; 0: not clipped"""
    # ---- derived
    batch_size: int = field(init=False)
    minibatch_size: int = field(init=False)
    num_iterations: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive sizes; ValueError for what cannot run. tyro turns it into one message and exit code 2."""

        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(message)

        for name in (
            "num_envs num_steps num_minibatches num_grad_accum checkpoint_interval total_timesteps learning_rate"
        ).split():
            require(0 < getattr(self, name) < math.inf, f"{name} must be positive, not {getattr(self, name)}")
        for name in ("update_epochs num_levels clip_coef ent_coef vf_coef max_grad_norm seed start_level").split():
            require(0 <= getattr(self, name) < math.inf, f"{name} must not be negative, not {getattr(self, name)}")
        if self.reward_gamma is None:
            self.reward_gamma = self.gamma
        self.run_dir = self.run_dir or (
            f"runs/{self.env_id}__{self.exp_name}__{self.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        )
        for name in ("gamma", "gae_lambda", "reward_gamma"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], not {getattr(self, name)}")
        games = GAMES_WITH_MODE.get(self.distribution_mode, (self.env_id,))
        require(self.env_id in games, f"{self.env_id} has no {self.distribution_mode} mode; {', '.join(games)} have")
        require(
            self.distribution_mode != "exploration" or self.num_levels == self.start_level == 0,
            "exploration mode is a single level: num_levels and start_level must stay 0",
        )
        require(
            self.seed < 2**31 and self.start_level + self.num_levels < 2**31, "seed and levels must stay below 2**31"
        )

        self.batch_size = self.num_envs * self.num_steps
        require(
            self.batch_size % (self.num_minibatches * self.num_grad_accum) == 0,
            f"num_minibatches * num_grad_accum ({self.num_minibatches} * {self.num_grad_accum}) must divide "
            f"num_envs * num_steps ({self.num_envs} * {self.num_steps})",
        )
        self.minibatch_size = self.batch_size // self.num_minibatches
        self.num_iterations = self.total_timesteps // self.batch_size
        require(
            self.num_iterations > 0,
            f"total_timesteps ({self.total_timesteps}) is less than one iteration: num_envs * num_steps = "
            f"{self.num_envs} * {self.num_steps} = {self.batch_size}",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Environments


class ProcgenVectorEnv:
    """N games of procgen behind gym's vector API. Games reset themselves; procgen's time-outs count as endings.

    Observations are uint8 (N, 64, 64, 3), actions integers (N,), rewards raw float32 (N,).
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        distribution_mode: str = "easy",
        num_levels: int = 0,
        start_level: int = 0,
        seed: int = 0,
        num_threads: int = 0,
    ) -> None:
        levels = {"num_levels": num_levels, "start_level": start_level}
        self.num_envs = num_envs
        self.games = ProcgenGym3Env(
            num=num_envs,
            env_name=env_id,
            distribution_mode=distribution_mode,
            rand_seed=seed,  # without it procgen draws a seed of its own
            num_threads=num_threads,
            **({} if distribution_mode == "exploration" else levels),  # exploration is a level of its own
        )
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)

    def reset(self) -> tuple[np.ndarray, dict]:
        """The current observations: procgen's games cannot be cut short."""
        return self.games.observe()[1]["rgb"], {}

    def step_async(self, actions: np.ndarray) -> None:
        self.games.act(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}

    def close(self) -> None:
        self.games.close()

    def state_dict(self) -> dict:
        return {"games": [torch.frombuffer(bytearray(s), dtype=torch.uint8) for s in self.games.get_state()]}

    def load_state_dict(self, state: dict) -> None:
        self.games.set_state([s.numpy().tobytes() for s in state["games"]])


class EpisodeStatistics:
    """Raw returns and lengths of all finished episodes, and the mean return of the last 100."""

    def __init__(self, num_envs: int) -> None:
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)
        self.num_episodes = 0
        self.last_returns: deque[float] = deque(maxlen=100)

    def update(self, rewards: np.ndarray, dones: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take a rollout's raw rewards (T, N) and dones (T, N), True where the step ended an episode; give the
        returns and lengths of the episodes that finished in it, in order of time."""
        returns, lengths = [], []
        for reward, done in zip(rewards, dones, strict=True):
            self.returns += reward
            self.lengths += 1
            if done.any():
                returns.append(self.returns[done])
                lengths.append(self.lengths[done])
                self.returns[done] = 0
                self.lengths[done] = 0
        finished = np.concatenate(returns) if returns else np.zeros(0)
        self.num_episodes += len(finished)
        self.last_returns.extend(finished.tolist())
        return finished, np.concatenate(lengths) if lengths else np.zeros(0, np.int64)

    def state_dict(self) -> dict:
        return {
            "returns": torch.from_numpy(self.returns.copy()),
            "lengths": torch.from_numpy(self.lengths.copy()),
            "num_episodes": self.num_episodes,
            "last_returns": list(self.last_returns),
        }

    def load_state_dict(self, state: dict) -> None:
        self.returns, self.lengths = state["returns"].numpy().copy(), state["lengths"].numpy().copy()
        self.num_episodes = state["num_episodes"]
        self.last_returns = deque(state["last_returns"], maxlen=100)


class RewardNormalizer:
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1}, over all environments."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def __call__(self, rewards: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Normalise a rollout's rewards (T, N), after its R_t have entered the statistics; firsts (T, N) says that
        the step's observation began an episode. float32, clipped to [-10, 10]."""
        returns = np.empty(rewards.shape)
        for t, (reward, first) in enumerate(zip(rewards, firsts, strict=True)):
            returns[t] = self.returns = reward + self.gamma * (1 - first) * self.returns
        # the parallel variance formula of Chan et al.
        delta, total = returns.mean() - self.mean, self.count + returns.size
        m2 = self.var * self.count + returns.var() * returns.size + delta**2 * self.count * returns.size / total
        self.mean, self.var, self.count = self.mean + delta * returns.size / total, m2 / total, total
        return np.clip(rewards / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)

    def state_dict(self) -> dict:
        moments = {name: float(getattr(self, name)) for name in ("mean", "var", "count")}
        return moments | {"returns": torch.from_numpy(self.returns.copy())}

    def load_state_dict(self, state: dict) -> None:
        self.mean, self.var, self.count = state["mean"], state["var"], state["count"]
        self.returns = state["returns"].numpy().copy()


# ---------------------------------------------------------------------------------------------------------------------
# Networks


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ConvSequence(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.blocks = nn.Sequential(ResidualBlock(out_channels), ResidualBlock(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(F.max_pool2d(self.conv(x), 3, stride=2, padding=1))


class ImpalaCNN(nn.Module):
    """uint8 images (B, 64, 64, 3) to features (B, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.Sequential(ConvSequence(3, 16), ConvSequence(16, 32), ConvSequence(32, 32))
        self.dense = nn.Linear(32 * 8 * 8, 256)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = self.stacks(obs.permute(0, 3, 1, 2) / 255.0)  # NHWC in memory, so channels_last costs no copy
        return F.relu(self.dense(F.relu(x).flatten(1)))


class Agent(nn.Module):
    """Policy head and value head on one encoder, initialised as openai/train-procgen did."""

    def __init__(self, num_actions: int = 15) -> None:
        super().__init__()
        self.encoder = ImpalaCNN()
        self.policy_head = nn.Linear(256, num_actions)
        self.value_head = nn.Linear(256, 1)

        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.policy_head.weight, 0.01)
        nn.init.orthogonal_(self.value_head.weight, 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (B, 64, 64, 3) to logits (B, A) and values (B,)."""
        features = self.encoder(obs)
        return self.policy_head(features), self.value_head(features).squeeze(-1)


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm as functions of tensors


def sample_action(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions (B,) drawn from softmax(logits) and their log-probabilities (B,). An exponential race: unlike
    torch's Categorical it validates nothing and so never waits for the GPU."""
    logprobs = logits.log_softmax(-1)
    actions = (logprobs - torch.empty_like(logprobs).exponential_().log()).argmax(-1)
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Advantages (T, N) by generalised advantage estimation (Schulman et al., 2016).

    rewards (T, N); values (T + 1, N), the last row the bootstrap; dones (T, N), 1 where the step ended an episode.
    """
    advantages = torch.empty_like(rewards)
    continues = 1 - dones
    deltas = rewards + gamma * values[1:] * continues - values[:-1]
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + gamma * gae_lambda * continues[t] * advantage
        advantages[t] = advantage
    return advantages


def ppo_loss(
    logits: torch.Tensor,  # (B, A)
    actions: torch.Tensor,  # (B,)
    old_logprobs: torch.Tensor,  # (B,)
    advantages: torch.Tensor,  # (B,)
    clip_coef: float,
) -> tuple[torch.Tensor, ...]:
    """PPO's policy loss without the entropy bonus; then entropy, the k1 and k3 estimates of KL[pi_old, pi]
    (http://joschu.net/blog/kl-approx.html) and the share of clipped samples, for the records."""
    logprobs = logits.log_softmax(-1)
    logratio = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) if clip_coef > 0 else ratio
    pg_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    with torch.no_grad():
        old_approx_kl, approx_kl = -logratio.mean(), (ratio - 1 - logratio).mean()
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean() if clip_coef > 0 else torch.zeros_like(approx_kl)
    return pg_loss, entropy, old_approx_kl, approx_kl, clipfrac


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, old_values: torch.Tensor, clip_coef: float | None
) -> torch.Tensor:
    """Mean squared error of values (B,) against returns (B,); with clip_coef the greater of it and the error of the
    values kept within clip_coef of old_values (B,)."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return errors.mean()


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """1 - Var[returns - values] / Var[returns]; nan where the returns do not vary."""
    variance = returns.var()
    return torch.where(variance > 0, 1 - (returns - values).var() / variance, torch.nan)


def minibatch_loss(
    agent: Agent, args: Args, obs, actions, old_logprobs, advantages, returns, values
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's loss on a minibatch, and what of it goes into the records. values: of old."""
    logits, new_values = agent(obs)
    pg_loss, entropy, old_approx_kl, approx_kl, clipfrac = ppo_loss(
        logits, actions, old_logprobs, advantages, args.clip_coef
    )
    v_loss = 0.5 * value_loss(new_values, returns, values, args.clip_coef if args.clip_vloss else None)
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    stats = {"policy_loss": pg_loss, "entropy": entropy, "old_approx_kl": old_approx_kl, "approx_kl": approx_kl}
    return loss, stats | {"clipfrac": clipfrac, "value_loss": v_loss}


def update(
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    minibatch: dict[str, torch.Tensor],
    num_parts: int,
    max_grad_norm: float,
) -> dict[str, torch.Tensor]:
    """One optimizer step on the mean of loss_fn over a minibatch, run in num_parts equal parts of which only one at
    a time holds activations. The statistics that it gives stay on the device: no sync."""
    optimizer.zero_grad()
    parts = zip(*(tensor.chunk(num_parts) for tensor in minibatch.values()), strict=True)
    totals: dict[str, torch.Tensor] = {}
    for part in parts:
        loss, stats = loss_fn(**dict(zip(minibatch, part, strict=True)))
        (loss / num_parts).backward()
        totals = {name: totals.get(name, 0) + value.detach() / num_parts for name, value in stats.items()}
    params = optimizer.param_groups[0]["params"]
    grad_norm = nn.utils.clip_grad_norm_(params, max_grad_norm or math.inf)
    optimizer.step()
    return totals | {"grad_norm": grad_norm, "weight_norm": nn.utils.get_total_norm(params).detach()}


def select_samples(batch: dict[str, torch.Tensor], inds: torch.Tensor) -> dict[str, torch.Tensor]:
    """Samples inds (B,) of tensors (T * N, ...)."""
    return {name: tensor[inds] for name, tensor in batch.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Records

COLUMNS = (
    "iteration,global_step,episodes,wall_time,charts/episodic_return,charts/episodic_length,charts/mean_return_100,"
    "charts/SPS,charts/learning_rate,losses/value_loss,losses/policy_loss,losses/entropy,losses/old_approx_kl,"
    "losses/approx_kl,losses/clipfrac,losses/explained_variance,losses/grad_norm,losses/weight_norm,"
    "time/rollout,time/policy_phase"
).split(",")


class UsageError(Exception):
    """The command asks for what cannot be done; ends in one line and exit code 2."""


class Records:
    """A row an iteration to metrics.csv, TensorBoard and, if asked, Weights & Biases; progress to the console."""

    def __init__(self, args: Args, run_dir: Path, state: dict | None) -> None:
        global_step = state["global_step"] if state else 0
        self.csv = open(run_dir / "metrics.csv", "r+" if state else "x", newline="")
        try:
            fcntl.flock(self.csv, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the kernel, however this process ends
        except BlockingIOError:
            raise UsageError(f"another process is writing to {run_dir}") from None
        if state:  # rows after the checkpoint will come again
            self.csv.seek(state["csv_bytes"])
            self.csv.truncate()
        else:
            self.csv.write(",".join(COLUMNS) + "\n")
        self.tensorboard = SummaryWriter(run_dir, purge_step=global_step + 1 if state else None)
        self.wandb = None
        if args.track:
            import wandb

            self.wandb = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                dir=run_dir,
                name=run_dir.name,
                id=run_dir.name,
                resume="allow",
                config=asdict(args),
                save_code=True,
            )
        total = args.num_iterations * args.batch_size
        self.bar = tqdm(
            total=total,
            initial=global_step,
            unit="step",
            unit_scale=True,
            smoothing=0,  # the auxiliary phase belongs to the rate and the ETA
            dynamic_ncols=True,
            file=sys.stdout,
            disable=not sys.stdout.isatty(),
        )
        self.total, self.global_step = total, global_step

    def write(self, row: dict[str, float]) -> None:
        """Record one iteration: column to number; what is absent or nan stays blank."""
        row = {name: value for name, value in row.items() if not math.isnan(value)}
        self.csv.write(",".join(str(row.get(name, "")) for name in COLUMNS) + "\n")
        self.csv.flush()
        self.global_step = row["global_step"]
        for name, value in row.items():
            if name not in ("iteration", "global_step"):
                self.tensorboard.add_scalar(name, value, self.global_step)
        if self.wandb:
            self.wandb.log(row, step=self.global_step)

        mean_return, sps = row.get("charts/mean_return_100", math.nan), row["charts/SPS"]
        times = ", ".join(f"{name[5:].replace('_', ' ')} {row[name]:.1f}s" for name in row if name.startswith("time/"))
        self.bar.set_postfix_str(f"return {mean_return:.2f}, {times}")
        if self.bar.disable:
            eta = tqdm.format_interval((self.total - self.global_step) / sps)
            print(
                f"step {self.global_step:>11,} {self.global_step / self.total:6.1%} | return {mean_return:7.2f} | "
                f"{sps:8,.0f} steps/s | ETA {eta:>8} | {times}",
                flush=True,
            )

    def state_dict(self) -> dict:
        """What a resumed run cuts the records back to; they are on the disk when this returns."""
        self.tensorboard.flush()
        self.csv.flush()
        os.fsync(self.csv.fileno())
        return {"csv_bytes": self.csv.tell(), "global_step": self.global_step}

    def close(self, exit_code: int = 0) -> None:
        self.bar.close()
        self.csv.close()
        self.tensorboard.close()
        if self.wandb:
            self.wandb.finish(exit_code)


class RandomState:
    """The states of all random generators in the process, for a checkpoint."""

    def state_dict(self) -> dict:
        name, keys, *rest = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": (name, keys.tolist(), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        }

    def load_state_dict(self, state: dict) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash or a full disk at any moment leaves the whole old one or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def serialize(state: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def save_checkpoint(path: Path, state: dict) -> None:
    """A SHA-256 digest and then what torch.save writes: a file damaged anywhere is recognised."""
    data = serialize(state)
    write_atomically(path, hashlib.sha256(data).digest() + data)


def load_checkpoint(path: Path) -> dict:
    """The state that save_checkpoint wrote, on the CPU; runs no pickled code. UsageError if it is not whole."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"no checkpoint to resume from: {error.strerror}: {path}") from None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise UsageError(f"{path} is damaged, or no checkpoint of this script")
    return torch.load(io.BytesIO(data[32:]), map_location="cpu", weights_only=True)


def describe(args: Args) -> dict:
    """What is needed to know what a run was: arguments, command, commit, versions, hardware."""

    def git(*command: str) -> str:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True).stdout.strip()

    cuda = torch.cuda.is_available()
    return {
        "algorithm": "ppo",
        "args": asdict(args),
        "command": shlex.join(["python", *sys.argv]),
        "commit": (git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")) or None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "hardware": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if cuda else None,
        },
    }


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight became nan or infinite."""


def fetch_stats(updates: list[dict[str, torch.Tensor]], prefix: str) -> dict[str, np.ndarray]:
    """The statistics of an epoch's updates in one copy to the host: prefix + name to one number an update."""
    table = torch.stack([torch.stack(list(update.values())) for update in updates]).cpu().numpy()
    return {prefix + name: column for name, column in zip(updates[0], table.T, strict=True)}


def check_finite(stats: dict[str, np.ndarray], where: str, run_dir: Path, select: Callable, inds: torch.Tensor) -> None:
    """Raise NonFiniteError if a statistic of an update is not finite, and write what there is to know about the
    first such update k, its minibatch select(inds[k]) too, to nonfinite.json."""
    bad = {name: np.flatnonzero(~np.isfinite(values)) for name, values in stats.items()}
    bad = {name: int(updates[0]) for name, updates in bad.items() if len(updates)}
    if not bad:
        return
    name = min(bad, key=bad.get)  # the first update, and in it the first quantity in the order of computation
    k = bad[name]
    message = f"{name} is {stats[name][k]} at update {k + 1} of {len(stats[name])} of the {where}"
    report = {"message": message, "update": {key: float(values[k]) for key, values in stats.items()}, "minibatch": {}}
    for key, tensor in select(inds[k]).items():
        x = tensor.float()
        report["minibatch"][key] = {"shape": list(x.shape), "not_finite": int((~x.isfinite()).sum())}
        report["minibatch"][key] |= {f: getattr(x, f)().item() for f in ("min", "max", "mean", "std")}
    (run_dir / "nonfinite.json").write_text(json.dumps(report, indent=2) + "\n")
    raise NonFiniteError(message)


class StopRequested(Exception):
    """A signal asked the run to end."""


class StopSignals:
    """Turns SIGINT, SIGTERM and SLURM's SIGUSR1 into StopRequested at the next check(); a second one acts at once."""

    def __enter__(self) -> "StopSignals":
        self.received = None
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self.previous = {number: signal.signal(number, self.handle) for number in signals}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame) -> None:
        self.received = number
        self.__exit__()

    def check(self) -> None:
        if self.received:
            raise StopRequested(self.received)


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(args: Args, cleanup: contextlib.ExitStack) -> None:
    """PPO. What must be undone in the end, however it comes, is entered into cleanup."""
    # ---- set-up
    run_dir = Path(args.run_dir)
    checkpoint = load_checkpoint(run_dir / "checkpoint.pt") if args.resume else None
    records = Records(args, run_dir, checkpoint and checkpoint["records"])
    cleanup.callback(records.close)
    stop = cleanup.enter_context(StopSignals())

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    if (
        device.type == "cpu" and sys.platform == "linux"
    ):  # keep freed activations: 1.6 times as fast as mapping them anew
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    T, N, batch_size, num_iterations = args.num_steps, args.num_envs, args.batch_size, args.num_iterations
    env_threads = args.env_threads if args.env_threads is not None else 4 if os.cpu_count() > 2 else 0
    levels = (args.distribution_mode, args.num_levels, args.start_level)
    envs = ProcgenVectorEnv(args.env_id, N, *levels, args.seed, env_threads)
    cleanup.callback(envs.close)
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)

    agent = Agent(num_actions).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    episodes = EpisodeStatistics(N)
    reward_normalizer = RewardNormalizer(N, args.reward_gamma)

    # ---- storage
    obs = torch.empty((T, N, *obs_shape), dtype=torch.uint8, device=device)
    actions = torch.empty((T, N), dtype=torch.int64, device=device)
    logprobs = torch.empty((T, N), device=device)
    values = torch.empty((T + 1, N), device=device)
    rewards = np.empty((T, N), np.float32)
    firsts, dones = np.empty((T, N), bool), np.empty((T, N), bool)  # the step began, ended an episode
    next_done = np.ones(N, bool)  # next_obs begins an episode

    # ---- start, or continue where the checkpoint was written
    stateful = {"agent": agent, "optimizer": optimizer, "envs": envs, "episodes": episodes}
    stateful |= {"reward_normalizer": reward_normalizer, "random": RandomState()}
    start_iteration, start_time = 0, time.perf_counter()
    if checkpoint:
        for name, thing in stateful.items():
            thing.load_state_dict(checkpoint[name])
        start_iteration, next_done = checkpoint["iteration"], checkpoint["next_done"].numpy()
        start_time -= checkpoint["wall_time"]
    next_obs, _ = envs.reset()

    def save(iteration: int) -> None:
        state = {name: thing.state_dict() for name, thing in (stateful | {"records": records}).items()}
        state |= {
            "algorithm": "ppo",
            "args": asdict(args),
            "iteration": iteration,
            "next_done": torch.tensor(next_done),
        }
        save_checkpoint(run_dir / "checkpoint.pt", state | {"wall_time": time.perf_counter() - start_time})

    if not checkpoint:
        save(0)
    print(
        f"{args.env_id} {args.distribution_mode}, {args.num_levels or 'all'} levels, seed {args.seed}: {num_iterations:,} "
        f"iterations of {N} x {T} steps = {num_iterations * batch_size:,} steps\n"
        f"on {device}, records in {run_dir}"
        + (f"\ncontinues from step {start_iteration * batch_size:,}" if checkpoint else ""),
        flush=True,
    )
    session_start = time.perf_counter()
    loss_fn = partial(minibatch_loss, agent, args)

    # ---- the loop
    for iteration in range(start_iteration + 1, num_iterations + 1):
        clock = [time.perf_counter()]
        global_step = iteration * batch_size
        where = f"of iteration {iteration}, step {global_step:,}"
        remaining = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0  # by global progress alone
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        # -- rollout
        for t in range(T):
            stop.check()
            obs[t] = torch.from_numpy(next_obs)
            firsts[t] = next_done
            with torch.no_grad():
                logits, values[t] = agent(obs[t])
                actions[t], logprobs[t] = sample_action(logits)
            envs.step_async(actions[t].cpu().numpy())  # the rollout's only sync
            next_obs, rewards[t], terminated, truncated, _ = envs.step_wait()
            dones[t] = next_done = terminated | truncated
            records.bar.update(N)
        if not np.isfinite(rewards).all():
            raise NonFiniteError(f"a reward is not finite in the rollout {where}")
        episode_returns, episode_lengths = episodes.update(rewards, dones)

        # -- advantages
        with torch.no_grad():
            values[T] = agent(torch.from_numpy(next_obs).to(device))[1]
        normalized_rewards = torch.from_numpy(reward_normalizer(rewards, firsts)).to(device)
        ended = torch.from_numpy(dones).to(device, torch.float32)
        advantages = compute_gae(normalized_rewards, values, ended, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]
        clock.append(time.perf_counter())

        # -- updates
        batch = {"obs": obs.flatten(0, 1), "actions": actions.flatten(), "old_logprobs": logprobs.flatten()}
        batch |= {"advantages": advantages.flatten(), "returns": returns.flatten(), "values": values[:-1].flatten()}
        stats: list[dict[str, np.ndarray]] = []
        for _ in range(args.update_epochs):
            b_inds = torch.randperm(batch_size, device=device).view(args.num_minibatches, -1)
            updates = []
            for mb_inds in b_inds:
                stop.check()
                minibatch = select_samples(batch, mb_inds)
                mb_advantages = minibatch["advantages"]
                minibatch["advantages"] = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                updates.append(update(optimizer, loss_fn, minibatch, args.num_grad_accum, args.max_grad_norm))
            stats.append(fetch_stats(updates, "losses/"))
            check_finite(stats[-1], f"update {where}", run_dir, partial(select_samples, batch), b_inds)
        clock.append(time.perf_counter())

        # -- records
        row = {"iteration": iteration, "global_step": global_step, "episodes": episodes.num_episodes}
        row["wall_time"] = clock[-1] - start_time
        if len(episode_returns) > 0:
            row["charts/episodic_return"] = float(episode_returns.mean())
            row["charts/episodic_length"] = float(episode_lengths.mean())
        if episodes.last_returns:
            row["charts/mean_return_100"] = float(np.mean(episodes.last_returns))
        row["charts/SPS"] = (iteration - start_iteration) * batch_size / (clock[-1] - session_start)
        row["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        for name in dict.fromkeys(name for epoch in stats for name in epoch):
            row[name] = float(np.concatenate([epoch[name] for epoch in stats if name in epoch]).mean())
        row["losses/explained_variance"] = explained_variance(values[:-1], returns).item()
        for name, begin, end in zip(("rollout", "policy_phase"), clock[:-1], clock[1:], strict=True):
            row[f"time/{name}"] = end - begin
        if iteration % args.checkpoint_interval == 0 or iteration == num_iterations:
            write_atomically(run_dir / "agent.pt", serialize({k: v.cpu() for k, v in agent.state_dict().items()}))
        records.write(row)
        if iteration % args.checkpoint_interval == 0 or iteration == num_iterations:
            save(iteration)


def main(args: Args) -> None:
    """Open the run folder, train, and say in one line how a run ended that did not get to its end.

    UsageError if the folder cannot be used. SystemExit with 128 + n after signal n, with 1 after a failure that is
    understood: a number that is not finite, a full disk.
    """
    run_dir = Path(args.run_dir)
    if args.resume:
        rows = (run_dir / "metrics.csv").read_text().split("\n")[:-1]  # what follows the last newline is half a row
        if rows[-1].split(",")[0] == str(args.num_iterations):
            print(f"{run_dir} is finished; a larger --total-timesteps extends it")
            return
    else:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            description = json.dumps(describe(args), indent=2) + "\n"
            with open(run_dir / "args.json", "x") as file:
                file.write(description)
            shutil.copy(__file__, run_dir)
        except FileExistsError:
            raise UsageError(f"{run_dir} holds a run already; --resume {run_dir} continues it") from None
        except OSError as error:
            raise UsageError(f"cannot write the records: {error}") from None
    try:
        with contextlib.ExitStack() as cleanup:
            train(args, cleanup)
        print(f"finished; weights, metrics and checkpoint are in {run_dir}")
        return
    except StopRequested as stop:
        reason, code = f"stopped by {signal.Signals(stop.args[0]).name}", 128 + stop.args[0]
    except NonFiniteError as error:
        reason, code = f"stopped: {error}", 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason, code = f"stopped: {error}", 1
    print(
        f"{reason}\nThe last checkpoint is whole. To continue: python {sys.argv[0]} --resume {run_dir}", file=sys.stderr
    )
    sys.exit(code)


def parse_args() -> Args:
    """Arguments from the command line; with --resume from the checkpoint, which the command line must not contradict."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", default="")
    resume = parser.parse_known_args()[0].resume
    if not resume:
        return tyro.cli(Args, description=__doc__)
    checkpoint = load_checkpoint(Path(resume) / "checkpoint.pt")
    names = [field.name for field in fields(Args) if field.init]
    if checkpoint.get("algorithm") != "ppo" or not set(names) <= set(checkpoint["args"]):
        raise UsageError(f"{resume} is no run of this version of {Path(__file__).name}")
    saved = Args(**{name: checkpoint["args"][name] for name in names} | {"resume": resume, "run_dir": resume})
    args = tyro.cli(Args, default=saved)
    args = Args(**{name: getattr(args, name) for name in names})  # tyro takes the derived fields from its default
    for name in names:
        before, now = getattr(saved, name), getattr(args, name)
        extends = name == "total_timesteps" and now > before and not args.anneal_lr
        if now != before and not extends:
            raise UsageError(f"--{name.replace('_', '-')} {now} contradicts the checkpoint, which has {before}")
    return args


if __name__ == "__main__":
    try:
        main(parse_args())
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # the second Ctrl-C
        sys.exit(130)
