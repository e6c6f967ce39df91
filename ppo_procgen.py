# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = [
#   "torch>=2.6,<2.14", "numpy<2", "tyro>=0.9", "tqdm>=4.64", "tensorboard>=2.14", "pillow>=10.1", "imageio-ffmpeg",
#   "procgen==0.10.7; python_version < '3.11'", "procgen-mirror==0.10.7; python_version >= '3.11'", "setuptools<81",
# ]
# ///
"""Proximal Policy Optimization on Procgen as the Procgen paper ran it (Cobbe et al., 2020,
https://arxiv.org/abs/1912.01588), in one file: the baseline of ppg_procgen.py, and the same file where the two agree.

    python ppo_procgen.py --env-id starpilot                        # the published setting, 25M steps
    python ppo_procgen.py --env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 \
        --total-timesteps 256                                       # seconds on a CPU: is everything in place?

Letters: T = num_steps, N = num_envs, B = samples in a minibatch, A = actions.

Departures from openai/train-procgen, with the flag that takes each back:
- rewards are normalised with the algorithm's discount, not 0.99          --reward-gamma 0.99
- TF32, where hardware has it                                             --no-tf32
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.util
import io
import itertools
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
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from PIL import Image, ImageDraw
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

with contextlib.redirect_stderr(io.StringIO()):  # procgen imports gym, which prints a notice about its own retirement
    import gym
    from procgen import ProcgenGym3Env

ALGORITHM = "ppo"
MAY_CHANGE = ("num_grad_accum", "env_threads")  # when a run is resumed
SAVES_MEMORY = "--num-grad-accum 2 (or more)"
# torchrun starts several ranks, each with environments of its own, and tells them so; alone there is rank 0 of 1
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", 1))
LAUNCHER = "python" if NUM_RANKS == 1 else f"torchrun ({NUM_RANKS} ranks)"
# fmt: off
Game = Literal["bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
               "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"]
GAMES_WITH_MODE = {  # all have easy and hard; asked for another mode that a game lacks, procgen aborts the process
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": ["caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"],
}
NUM_LEVELS = 2**31 - 1  # procgen's level seeds are the non-negative int32
# fmt: on


# ---- Arguments -------------------------------------------------------------------------------------------------------


@dataclass
class Args:
    # ---- the run
    env_id: Game = "starpilot"  # procgen game
    total_timesteps: int = 25_000_000  # environment steps of the whole run, of all ranks
    seed: int = 1  # seeds Python, numpy, torch and procgen; on a CPU the same seed gives the same bits
    exp_name: str = "ppo_procgen"  # name of the experiment, part of the run folder's name
    run_dir: str = ""  # folder for the records (default: runs/{env_id}__{exp_name}__{seed}__{time})
    resume: str = ""  # run folder to continue, its arguments included; a larger total_timesteps extends it
    checkpoint_interval: int = 32  # iterations between checkpoints where no auxiliary phase ends with one
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # on a GPU: compile the networks with torch.compile
    cuda_graphs: bool = True  # on a GPU: launch an update, or a step's actions, as one CUDA graph
    tf32: bool = True  # on a GPU: multiply float32 numbers in TensorFloat-32
    track: bool = False  # also send the records to Weights & Biases (pip install wandb)
    wandb_project_name: str = "ppg-procgen"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # ---- evaluation
    eval_interval: int = 0  # iterations between evaluations, and one at the end; 0: none
    eval_episodes: int = 128  # episodes of an evaluation, one in each of as many games: short ones count no more
    eval_greedy: bool = False  # evaluate the most probable actions instead of sampled ones
    capture_video: bool = False  # record four episodes with each evaluation, or at the end if there is none

    # ---- environment
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"  # kind of levels
    num_levels: int = 0  # number of training levels; 0: all
    start_level: int = 0  # first training level
    num_envs: int = 64  # N: parallel environments, of each rank
    env_threads: int = 0 if (os.cpu_count() or 1) <= 2 else 4  # procgen's threads; 0: step in the main thread

    # ---- optimisation
    num_steps: int = 256  # T: steps of each environment in a rollout
    learning_rate: float = 5e-4  # Adam's step size
    anneal_lr: bool = False  # anneal the step size linearly to zero over the whole run
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    reward_gamma: float | None = None  # discount of the reward normalisation (default: gamma; reference code: 0.99)
    num_minibatches: int = 8  # minibatches of an epoch over the N * T samples
    policy_dtype: Literal["float32", "bfloat16"] = "float32"  # precision of the networks in rollout and policy phase
    num_grad_accum: int = (
        0  # parts, at most, to run a minibatch in: same step, less memory; 0: one, on a CPU of 512 samples
    )
    update_epochs: int = 3  # epochs over the N * T samples
    clip_coef: float = 0.2  # epsilon of the clipped surrogate objective; 0: not clipped
    ent_coef: float = 0.01  # c: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, half a mean squared error
    clip_vloss: bool = True  # clip the value loss with clip_coef
    max_grad_norm: float = 0.5  # clip the gradient to this norm; 0: not clipped

    # ---- derived
    num_ranks: int = field(init=False)
    batch_size: int = field(init=False)
    minibatch_size: int = field(init=False)
    num_iterations: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive sizes. ValueError for what cannot run: tyro makes one message of it and exits with 2."""

        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ValueError(message)

        if self.reward_gamma is None:
            self.reward_gamma = self.gamma
        positive = "total_timesteps checkpoint_interval eval_episodes num_envs num_steps learning_rate num_minibatches"
        for name, value in vars(self).items():
            if isinstance(value, float | int):
                require(0 <= value < math.inf, f"{name} must be zero or positive, not {value}")
                require(value > 0 or name not in positive.split(), f"{name} must be positive, not {value}")
        for name in ("gamma", "gae_lambda", "reward_gamma"):
            require(getattr(self, name) <= 1, f"{name} must be at most 1, not {getattr(self, name)}")
        require(self.seed <= NUM_LEVELS, f"seed must be at most {NUM_LEVELS}")
        require(self.start_level + self.num_levels < NUM_LEVELS, f"levels must stay below {NUM_LEVELS}")
        require(self.start_level == 0 or self.num_levels > 0, "start_level needs num_levels: 0 levels are all of them")
        require(self.eval_episodes > 1, "eval_episodes must be 2 at least, for a standard error")
        require(self.clip_coef > 0 or not self.clip_vloss, "clip_vloss needs a clip_coef")
        games = GAMES_WITH_MODE.get(self.distribution_mode, [self.env_id])
        require(self.env_id in games, f"{self.env_id} has no {self.distribution_mode} mode; {', '.join(games)} have")
        if self.distribution_mode == "exploration":
            require(self.num_levels == self.start_level == 0, "exploration mode has a single level of its own")

        size = self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size, remainder = divmod(size, self.num_minibatches)
        require(remainder == 0, f"num_minibatches ({self.num_minibatches}) must divide num_envs * num_steps ({size})")
        self.num_ranks = NUM_RANKS
        self.num_iterations = self.total_timesteps // (size * NUM_RANKS)
        require(self.num_iterations > 0, f"total_timesteps is less than an iteration of {size * NUM_RANKS} steps")
        gpu = self.cuda and torch.cuda.is_available()
        require(not gpu or torch.cuda.device_count() > LOCAL_RANK, "there are more ranks than GPUs on this machine")
        unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        self.run_dir = self.run_dir or f"runs/{self.env_id}__{self.exp_name}__{self.seed}__{unique}"


# ---- Environments ----------------------------------------------------------------------------------------------------


class ProcgenVectorEnv:
    """num_envs games of procgen behind gym's vector API: uint8 observations (N, 64, 64, 3), integer actions (N,), raw
    float32 rewards (N,). Games reset themselves, and procgen's own time-outs count as endings."""

    def __init__(self, env_id, num_envs, mode="easy", num_levels=0, start_level=0, seed=0, num_threads=0, render=False):
        options = {"num_levels": num_levels, "start_level": start_level} if mode != "exploration" else {}
        options |= {"distribution_mode": mode, "rand_seed": seed, "num_threads": num_threads}  # without: a random seed
        options |= {"render_mode": "rgb_array"} if render else {}
        self.games = ProcgenGym3Env(num_envs, env_id, **options)
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(15)

    def reset(self) -> tuple[np.ndarray, dict]:
        """The current observations: a game cannot be cut short."""
        return self.games.observe()[1]["rgb"], {}

    def step_async(self, actions: np.ndarray) -> None:
        self.games.act(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}

    def render(self) -> list[np.ndarray]:
        """uint8 (512, 512, 3) of each game, as a person would see it."""
        return [info["rgb"] for info in self.games.get_info()]

    def close(self) -> None:
        self.games.close()

    def state_dict(self) -> dict:
        return {"games": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self.games.get_state()]}

    def load_state_dict(self, state: dict) -> None:
        self.games.set_state([game.numpy().tobytes() for game in state["games"]])


class Statistics:
    """Fields are numbers and numpy arrays; a checkpoint holds the arrays as tensors, which need no pickled code."""

    def state_dict(self) -> dict:
        return {k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update({k: v.numpy().copy() if isinstance(v, torch.Tensor) else v for k, v in state.items()})


class EpisodeStatistics(Statistics):
    """Raw returns and lengths of all finished episodes, and the returns of the last 100."""

    def __init__(self, num_envs: int) -> None:
        self.num_episodes = 0
        self.last_returns = np.zeros(0)
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs)

    def update(self, rewards: np.ndarray, dones: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take a rollout's raw rewards (T, N) and dones (T, N), True where the step ended an episode; give returns and
        lengths of the episodes that ended in it, in order of time."""
        returns, lengths = [np.zeros(0)], [np.zeros(0)]
        for reward, done in zip(rewards, dones, strict=True):
            self.returns += reward
            self.lengths += 1
            returns.append(self.returns[done])
            lengths.append(self.lengths[done])
            self.returns[done] = self.lengths[done] = 0
        finished = np.concatenate(returns)
        self.num_episodes += len(finished)
        self.last_returns = np.concatenate([self.last_returns, finished])[-100:]
        return finished, np.concatenate(lengths)


class RewardNormalizer(Statistics):
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1} over all environments."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.returns = np.zeros(num_envs)
        self.mean, self.var, self.count = 0.0, 1.0, 1e-4

    def __call__(self, rewards: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Normalise a rollout's rewards (T, N) once its R_t are in the statistics; firsts (T, N) says that the step's
        observation began an episode. float32, clipped to [-10, 10]."""
        returns = np.empty(rewards.shape)
        for t, (reward, first) in enumerate(zip(rewards, firsts, strict=True)):
            returns[t] = self.returns = reward + self.gamma * (1 - first) * self.returns
        # parallel variance, Chan et al. (1979)
        delta, count = float(returns.mean()) - self.mean, self.count + returns.size
        squares = self.var * self.count + float(returns.var()) * returns.size
        self.var = (squares + delta**2 * self.count * returns.size / count) / count
        self.mean, self.count = self.mean + delta * returns.size / count, count
        return np.clip(rewards / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)


# ---- Networks --------------------------------------------------------------------------------------------------------


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
    """Policy head and value head on one encoder, initialised as openai/train-procgen does."""

    def __init__(self, num_actions: int = 15) -> None:
        super().__init__()
        self.encoder = ImpalaCNN()
        self.policy_head, self.value_head = nn.Linear(256, num_actions), nn.Linear(256, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.policy_head.weight, 0.01)
        nn.init.orthogonal_(self.value_head.weight, 1.0)

    def forward(self, obs: torch.Tensor, value: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """uint8 (B, 64, 64, 3) to logits (B, A) and values (B,); None for what is not asked."""
        features = self.encoder(obs)
        return self.policy_head(features), self.value_head(features).squeeze(-1) if value else None


# ---- Speed, and several processes ------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Have glibc keep freed activations: to map them anew at each update costs up to 40 % of the time on a CPU."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class CudaGraph:
    """A function from tensors by name to tensors by name, recorded at its fourth call and from then on launched as a
    whole. The calls before warm it up on real work, so that no state needs to be put
    back. Shapes and the tensors that the function changes must stay the same."""

    def __init__(self, function: Callable) -> None:
        self.function, self.num_calls = function, 0

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls < 4:
            return self.function(**inputs)
        if self.num_calls == 4:
            self.graph, self.inputs = torch.cuda.CUDAGraph(), {name: x.clone() for name, x in inputs.items()}
            # thread_local: NCCL's own thread may go on meanwhile
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.outputs = self.function(**self.inputs)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.outputs.items()}  # the next call overwrites them


def collective(operation: Callable, *tensors) -> None:
    """What all ranks do together. Without one of them it fails: not this one's fault, and nothing for a traceback."""
    try:
        operation(*tensors)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise Stopped(f"rank {RANK} has lost another rank ({reason})", 1) from None


def sync_grads(params: list[nn.Parameter]) -> None:
    """Average the gradients over all ranks, in one message. Deterministic, and the same bits on every rank."""
    if NUM_RANKS > 1:
        grads = [param.grad for param in params if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        collective(dist.all_reduce, flat)
        for grad, mean in zip(grads, (flat / NUM_RANKS).split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def all_gather(x) -> list:
    """x of every rank, on every rank, in the ranks' order. For what is not large: it goes through pickle."""
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        collective(dist.all_gather_object, everyone, x)
    return everyone


# ---- The algorithm as functions of tensors ---------------------------------------------------------------------------


def sample_action(logits: torch.Tensor, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions (B,) from softmax(logits) and their log-probabilities (B,). An exponential race: torch's Categorical
    validates its arguments, which waits for the GPU."""
    logprobs = logits.log_softmax(-1)
    actions = (logprobs - torch.empty_like(logprobs).exponential_(generator=generator).log()).argmax(-1)
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def compute_gae(rewards, values, dones, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Advantages (T, N) by generalised advantage estimation (Schulman et al., 2016) of rewards (T, N), values
    (T + 1, N), the last row being the bootstrap, and dones (T, N), 1 where the step ended an episode."""
    advantages, last, continues = torch.empty_like(rewards), torch.zeros_like(rewards[0]), 1 - dones
    deltas = rewards + gamma * values[1:] * continues - values[:-1]
    for t in reversed(range(len(rewards))):
        advantages[t] = last = deltas[t] + gamma * gae_lambda * continues[t] * last
    return advantages


def ppo_loss(logits, actions, old_logprobs, advantages, clip_coef: float) -> tuple[torch.Tensor, ...]:
    """PPO's policy loss without the entropy bonus, from logits (B, A) and actions, log pi_old, advantages (B,); then
    entropy, estimates k1 and k3 of KL[pi_old, pi] (http://joschu.net/blog/kl-approx.html), share of clipped samples."""
    logprobs = logits.log_softmax(-1)
    logratio = logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - old_logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef) if clip_coef > 0 else ratio
    pg_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    clipfrac = (clipped != ratio).float().mean()
    return pg_loss, entropy, -logratio.mean(), (ratio - 1 - logratio).mean(), clipfrac


def value_loss(values, returns, old_values, clip_coef: float | None) -> torch.Tensor:
    """Mean squared error of values (B,) against returns (B,); with clip_coef the greater of it and of the error of the
    values kept within clip_coef of old_values (B,)."""
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped - returns).square())
    return errors.mean()


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """1 - Var[returns - values] / Var[returns]; nan where the returns do not vary."""
    return torch.where(returns.var() > 0, 1 - (returns - values).var() / returns.var(), torch.nan)


def policy_phase_loss(agent, args, obs, actions, old_logprobs, advantages, returns, values):
    """PPO's loss on a minibatch, and what of it is recorded. values: those of the rollout."""
    logits, new_values = agent(obs)
    names = ("policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    terms = ppo_loss(logits, actions, old_logprobs, advantages, args.clip_coef)
    stats = dict(zip(names, terms, strict=True))
    loss = stats["policy_loss"] - args.ent_coef * stats["entropy"]
    v_loss = 0.5 * value_loss(new_values, returns, values, args.clip_coef if args.clip_vloss else None)
    loss, stats["value_loss"] = loss + args.vf_coef * v_loss, v_loss
    return loss, stats


def update(optimizer, loss_fn: Callable, num_parts: int, max_grad_norm: float, **minibatch: torch.Tensor) -> dict:
    """One optimizer step on the mean of loss_fn over a minibatch (of each rank), run in num_parts parts of which only
    one at a time holds activations. Gives scalar tensors by name: they stay on the device, nothing waits for it."""
    optimizer.zero_grad()  # (critical!) or the gradients of another phase leak into this step
    totals: dict[str, torch.Tensor] = {}
    batch_size, params = len(minibatch["returns"]), optimizer.param_groups[0]["params"]
    for part in zip(*(tensor.chunk(num_parts) for tensor in minibatch.values()), strict=True):
        loss, stats = loss_fn(**dict(zip(minibatch, part, strict=True)))
        share = len(part[0]) / batch_size
        (loss * share).backward()
        totals = {name: totals.get(name, 0) + value.detach() * share for name, value in stats.items()}
    sync_grads(params)
    totals["grad_norm"] = nn.utils.clip_grad_norm_(params, max_grad_norm or math.inf)
    optimizer.step()
    return totals | {"weight_norm": nn.utils.get_total_norm([param.detach() for param in params])}


def select_samples(inds: torch.Tensor, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Samples inds (B,) of tensors (T * N, ...)."""
    return {name: tensor[inds] for name, tensor in batch.items()}


# ---- Records ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    "iteration,global_step,episodes,wall_time,charts/episodic_return,charts/episodic_length,charts/mean_return_100,"
    "charts/SPS,charts/learning_rate,losses/value_loss,losses/policy_loss,losses/entropy,losses/old_approx_kl,"
    "losses/approx_kl,losses/clipfrac,losses/explained_variance,losses/grad_norm,losses/weight_norm,"
    "time/rollout,time/policy_phase,"
    "time/evaluation,eval/train_return,eval/train_stderr,eval/test_return,"
    "eval/test_stderr,eval/generalization_gap"
).split(",")
PHASES = [name.removeprefix("time/") for name in COLUMNS if name.startswith("time/")]


class UsageError(Exception):
    """What was asked for cannot be done: one line, exit code 2."""


class Stopped(BaseException):  # no Exception, which code that it is raised in might catch
    """The run ended early, for a reason and with an exit code."""


def stop(number: int, _) -> None:
    """SIGINT, SIGTERM and SLURM's SIGUSR1 end a run wherever it is: what is on the disk bears a kill at any moment."""
    raise Stopped(f"by {signal.Signals(number).name}", 128 + number)


class Records:
    """A row an iteration to metrics.csv, TensorBoard and, if asked, Weights & Biases; progress to the console."""

    def __init__(self, args: Args, run_dir: Path, state: dict | None) -> None:
        self.step, self.total = state["step"] if state else 0, args.num_iterations * NUM_RANKS * args.batch_size
        try:
            self.csv = open(run_dir / "metrics.csv", "r+" if state else "x", newline="")
            fcntl.flock(self.csv, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it, however the process ends
        except BlockingIOError:
            raise UsageError(f"another process is writing to {run_dir}") from None
        except OSError as error:
            raise UsageError(str(error)) from None
        if state is None:
            self.csv.write(",".join(COLUMNS) + "\n")
        elif os.fstat(self.csv.fileno()).st_size < state["csv_bytes"]:
            raise UsageError(f"{run_dir}/metrics.csv has lost rows that its checkpoint counts on")
        else:  # the rows after the checkpoint will come again
            self.csv.seek(state["csv_bytes"])
            self.csv.truncate()
        self.tensorboard = SummaryWriter(run_dir, purge_step=self.step + 1 if state else None)
        self.wandb, self.wandb_id = None, state["wandb_id"] if state else uuid.uuid4().hex
        if args.track:
            import wandb

            options = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": run_dir}
            options |= {"id": self.wandb_id, "name": run_dir.name, "resume": "allow", "config": asdict(args)}
            wandb.init(save_code=True, **options)
            self.wandb = wandb
        # smoothing 0: an ETA by the mean rate, so that auxiliary phases are in it
        options = {"unit": "step", "unit_scale": True, "smoothing": 0, "dynamic_ncols": True, "file": sys.stdout}
        self.bar = tqdm(total=self.total, initial=self.step, disable=not sys.stdout.isatty(), **options)

    def write(self, row: dict[str, float]) -> None:
        """Record an iteration, numbers by column; what is absent or nan stays blank."""
        row = {name: value for name, value in row.items() if not math.isnan(value)}
        self.csv.write(",".join(str(row.get(name, "")) for name in COLUMNS) + "\n")
        self.csv.flush()
        self.step = row["global_step"]
        for name in row:
            self.tensorboard.add_scalar(name, row[name], self.step)
        if self.wandb:
            self.wandb.log(row, step=self.step)
        times = {name[5:].replace("_", " "): row[name] for name in row if name.startswith("time/")}
        times = ", ".join(f"{name} {seconds:.1f}s" for name, seconds in times.items() if seconds >= 0.05)
        mean_return = row.get("charts/mean_return_100", math.nan)
        self.bar.set_postfix_str(f"return {mean_return:.2f}, {times}")
        if self.bar.disable:  # not a terminal
            eta = tqdm.format_interval((self.total - self.step) / row["charts/SPS"])
            done = f"step {self.step:>11,} {self.step / self.total:6.1%} | return {mean_return:6.2f}"
            print(f"{done} | {row['charts/SPS']:7,.0f} steps/s | ETA {eta:>8} | {times}", flush=True)

    def video(self, path: Path, gif: bytes, step: int) -> None:
        image = Summary.Image(height=256, width=256, colorspace=3, encoded_image_string=gif)
        self.tensorboard.file_writer.add_summary(Summary(value=[Summary.Value(tag="video", image=image)]), step)
        if self.wandb:
            self.wandb.log({"video": self.wandb.Video(str(path))}, step=step)

    def state_dict(self) -> dict:
        """Where a resumed run cuts the records; all before it is on the disk when this returns."""
        self.tensorboard.flush()
        self.csv.flush()
        os.fsync(self.csv.fileno())
        return {"csv_bytes": self.csv.tell(), "step": self.step, "wandb_id": self.wandb_id}

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, error: type | None, *_) -> None:
        self.bar.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(error is not None))
        self.tensorboard.close()
        self.csv.close()


class NoRecords(contextlib.nullcontext):
    """Of a rank that is not the first."""

    bar = tqdm(disable=True)

    def write(self, row: dict[str, float]) -> None:
        pass


class RandomState:
    """The states of all random generators, for a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None

    def state_dict(self) -> dict:
        name, keys, *rest = np.random.get_state()
        state = {"python": random.getstate(), "numpy": (name, keys.tolist(), *rest), "torch": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state(self.cuda)} if self.cuda else {})

    def load_state_dict(self, state: dict) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self.cuda and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.cuda)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file such that a crash or a full disk leaves the whole old one or the whole new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def serialize(state: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_checkpoint(path: Path) -> dict:
    """A checkpoint's state, on the CPU, without running pickled code. UsageError if it is not whole."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"no checkpoint to resume from: {error.strerror}: {path}") from None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise UsageError(f"{path} is damaged, or no checkpoint")
    return torch.load(io.BytesIO(data[32:]), map_location="cpu", weights_only=True)


def describe(args: Args) -> dict:
    """What one needs to know of a run: arguments, command, commit, versions, hardware."""
    commit = ""
    if shutil.which("git"):
        git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        commit = subprocess.run(git, cwd=Path(__file__).resolve().parent, capture_output=True, text=True).stdout.strip()
    gpu = torch.cuda.get_device_name() if args.cuda and torch.cuda.is_available() else None
    about = {"algorithm": ALGORITHM, "args": asdict(args), "commit": commit}
    about["command"] = f"{LAUNCHER} {shlex.join(sys.argv)}"
    about["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    about["hardware"] = {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu}
    return about | {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def fetch_stats(updates: list[dict], prefix: str, where: str, run_dir: Path, select: Callable, inds) -> dict:
    """The statistics of an epoch's updates, means over all ranks, in one copy to the host: prefix + name to an array,
    one number an update.

    Stopped for the first update k in which one is not finite, once all that is known of it, its minibatch
    select(inds[k]) too, is in nonfinite.json.
    """
    table = torch.stack([torch.stack(list(stats.values())) for stats in updates]).cpu().numpy()
    tables = np.stack(all_gather(table), -1)
    if not np.isfinite(tables).all():
        k, column, rank = np.argwhere(~np.isfinite(tables))[0]  # of that update the quantity that is computed first
        name = list(updates[k])[column]
        message = f"{name} is {tables[k, column, rank]} at update {k + 1} of {len(table)} of the {where}"
        message += f", rank {rank}" if NUM_RANKS > 1 else ""
        report = {"message": message, "update": dict(zip(updates[k], table[k].tolist(), strict=True)), "minibatch": {}}
        for name, tensor in select(inds[k]).items():
            x = tensor.float()
            report["minibatch"][name] = {"shape": list(x.shape), "not_finite": int((~x.isfinite()).sum())}
            report["minibatch"][name] |= {f: getattr(x, f)().item() for f in ("min", "max", "mean", "std")}
        report = all_gather(report)[rank]
        if RANK == 0:
            (run_dir / "nonfinite.json").write_text(json.dumps(report, indent=2) + "\n")
        raise Stopped(message, 1)
    table = tables.mean(-1)
    return {prefix + name: column for name, column in zip(updates[0], table.T, strict=True)}


# ---- Evaluation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(agent, envs, episodes_per_env: int, seed: int, greedy: bool, on_step=lambda *_: None) -> np.ndarray:
    """Raw returns (num_envs, episodes_per_env) of the first episodes from where envs stands. As many in each: were the
    first to end taken from wherever, short episodes would be favoured. Draws from a generator of its own, and calls
    on_step(indices of the environments still playing, returns so far) after each step."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    obs, _ = envs.reset()
    returns, num_ended = np.zeros((envs.num_envs, episodes_per_env)), np.zeros(envs.num_envs, int)
    while len(active := np.flatnonzero(num_ended < episodes_per_env)):
        seen = active if device.type == "cpu" else np.arange(envs.num_envs)  # for each size cuDNN would search anew
        logits, *_ = agent(torch.from_numpy(obs[seen]).to(device), value=False)
        actions = np.zeros(envs.num_envs, np.int64)
        actions[seen] = (logits.argmax(-1) if greedy else sample_action(logits, generator)[0]).cpu().numpy()
        envs.step_async(actions)
        obs, rewards, terminated, truncated, _ = envs.step_wait()
        returns[active, num_ended[active]] += rewards[active]
        num_ended[active] += (terminated | truncated)[active]
        on_step(np.flatnonzero(num_ended < episodes_per_env), returns)
    return returns


def record_video(agent: Agent, envs, path: Path, seed: int, greedy: bool) -> bytes:
    """Write an mp4 of an episode in each of four rendered envs with its return; give it as a small GIF too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the version that gym3 asks for imports setuptools' deprecated pkg_resources
        from imageio_ffmpeg import write_frames

    grid, gif, tiles, frames = Image.new("RGB", (1024, 1024)), [], envs.render(), itertools.count()
    text = partial(ImageDraw.Draw(grid).text, fill="white", stroke_width=2, stroke_fill="black", font_size=32)
    temporary = path.with_suffix(".tmp.mp4")
    mp4 = write_frames(str(temporary), grid.size, fps=15, ffmpeg_timeout=0)  # 15: what procgen gives a human player
    mp4.send(None)

    def add_frame(playing: np.ndarray, returns: np.ndarray) -> None:
        for i, frame in enumerate(envs.render()):
            tiles[i] = frame if i in playing else tiles[i]  # a game that has ended stands still
            x, y = i % 2 * 512, i // 2 * 512
            grid.paste(Image.fromarray(tiles[i]), (x, y))
            text((x + 12, y + 8), f"{returns[i, 0]:g}")
        mp4.send(grid.tobytes())
        if next(frames) % 4 == 0:
            gif.append(grid.resize((256, 256)).quantize(64))

    try:
        evaluate(agent, envs, 1, seed, greedy, add_frame)
        mp4.close()
        os.replace(temporary, path)
    finally:
        mp4.close()
        temporary.unlink(missing_ok=True)
    buffer = io.BytesIO()
    gif[0].save(buffer, "GIF", save_all=True, append_images=gif[1:], duration=267, loop=0)
    return buffer.getvalue()


# ---- Training --------------------------------------------------------------------------------------------------------


def train(args: Args, cleanup: contextlib.ExitStack) -> None:
    """The whole algorithm. What must be undone in the end, however it comes, is entered into cleanup."""
    # ---- set-up
    run_dir = Path(args.run_dir)
    device = torch.device(f"cuda:{LOCAL_RANK}" if args.cuda and torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # on the default one no graph can be recorded
    checkpoint = load_checkpoint(run_dir / "checkpoint.pt") if args.resume else None
    records = Records(args, run_dir, checkpoint and checkpoint["records"]) if RANK == 0 else NoRecords()
    cleanup.enter_context(records)
    T, N, batch_size, num_iterations = args.num_steps, args.num_envs, args.batch_size, args.num_iterations
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    # what a rank draws is its own; what all begin with, the weights, comes from args.seed itself
    rank_seed = int(np.random.SeedSequence([args.seed, RANK]).generate_state(1)[0]) % NUM_LEVELS if RANK else args.seed

    def make_envs(num_envs: int, **options) -> ProcgenVectorEnv:
        defaults = {"num_levels": args.num_levels, "start_level": args.start_level, "num_threads": args.env_threads}
        envs = ProcgenVectorEnv(args.env_id, num_envs, args.distribution_mode, **(defaults | options))
        cleanup.callback(envs.close)
        return envs

    envs = make_envs(N, seed=rank_seed)
    obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
    # of all ranks, and the same on each
    episodes = EpisodeStatistics(NUM_RANKS * N)
    reward_normalizer = RewardNormalizer(NUM_RANKS * N, args.reward_gamma)
    agent = Agent(num_actions).to(device, memory_format=torch.channels_last)
    if RANK > 0:
        torch.manual_seed(rank_seed)

    def make_optimizer(lr: float) -> torch.optim.Adam:
        # the lr in use is a tensor: a CUDA graph would keep the value of a number
        group = {"params": agent.parameters(), "lr": torch.tensor(lr, device=device), "initial_lr": lr}
        return torch.optim.Adam([group], eps=1e-5, fused=True, capturable=on_gpu)

    optimizer = make_optimizer(args.learning_rate)
    optimizers = {"optimizer": optimizer}
    if NUM_RANKS > 1:  # not before Adam imports torch._dynamo: that would keep gloo's threads, which abort at exit
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(hours=2))
        # after an error NCCL would wait for CUDA graphs that are still held
        cleanup.push(lambda error, *_: None if error and on_gpu else dist.destroy_process_group())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # no sooner: who waits for others hears none
        signal.signal(number, stop)

    # ---- speed: the loop is the same whatever is chosen here
    part_size = 2**31 if on_gpu else 512  # more does not pay on a CPU, and takes gigabytes
    num_parts = args.num_grad_accum or math.ceil(args.minibatch_size / part_size)
    fast_agent, graphed = agent, CudaGraph if on_gpu and args.cuda_graphs else lambda function: function
    if on_gpu:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
        if args.compile:  # force: else it gives up channels_last, as no convolution has more than 64 channels
            torch._dynamo.config.cache_size_limit = 64  # heads, phases and batch sizes are compiled apart: up to 12
            options = {"force_layout_optimization": True, "coordinate_descent_tuning": True}
            fast_agent = torch.compile(agent, fullgraph=True, dynamic=False, options=options)
    else:
        keep_freed_memory()

    def in_precision(dtype: str) -> Callable:
        # a weight's cast, kept, would be that of old weights in a CUDA graph
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)

        def forward(obs: torch.Tensor, **which: bool) -> list[torch.Tensor | None]:
            with autocast:
                return [x if x is None else x.float() for x in fast_agent(obs, **which)]

        return forward

    policy_agent = in_precision(args.policy_dtype)

    def upload(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor

    @graphed
    @torch.no_grad()
    def act(obs: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, values = policy_agent(obs)
        actions, logprobs = sample_action(logits)
        return {"actions": actions, "logprobs": logprobs, "values": values}

    def make_update(opt: torch.optim.Optimizer, loss_fn: Callable, parts: int) -> Callable:
        return graphed(partial(update, opt, loss_fn, parts, args.max_grad_norm))

    loss_fn = partial(policy_phase_loss, policy_agent, args)
    epochs = [make_update(optimizer, loss_fn, num_parts)] * args.update_epochs

    # ---- storage
    obs = torch.empty((T, N, *obs_shape), dtype=torch.uint8, device=device)
    rollout = {"actions": torch.empty((T, N), dtype=torch.int64, device=device)}
    rollout |= {name: torch.empty((T, N), device=device) for name in ("logprobs", "values")}
    rewards = np.empty((T, N), np.float32)
    firsts, dones = np.empty((T, N), bool), np.empty((T, N), bool)  # the step began, ended an episode
    next_done = np.ones(N, bool)  # next_obs begins an episode

    # ---- start, or continue from a checkpoint
    stateful = {"agent": agent, "episodes": episodes, "rewards": reward_normalizer} | optimizers
    stateful_by_rank = {"envs": envs, "random": RandomState(device)}
    start_iteration, start_time = 0, time.perf_counter()
    if checkpoint:
        for name, thing in stateful.items():
            thing.load_state_dict(checkpoint[name])
        for opt in optimizers.values():  # Adam leaves both as they were saved, perhaps on another device
            opt.param_groups[0] |= {"lr": opt.param_groups[0]["lr"].to(device), "capturable": on_gpu}
        own = checkpoint["ranks"][RANK]
        for name, thing in stateful_by_rank.items():
            thing.load_state_dict(own[name])
        start_iteration, next_done = checkpoint["iteration"], own["next_done"].numpy()
        start_time -= checkpoint["wall_time"]
    next_obs, _ = envs.reset()

    def save(iteration: int) -> None:
        own = {name: thing.state_dict() for name, thing in stateful_by_rank.items()}
        ranks = all_gather(own | {"next_done": torch.tensor(next_done)})
        if RANK > 0:
            return
        state = {"algorithm": ALGORITHM, "args": asdict(args), "iteration": iteration, "ranks": ranks}
        state |= {name: thing.state_dict() for name, thing in (stateful | {"records": records}).items()}
        data = serialize(state | {"wall_time": time.perf_counter() - start_time})
        write_atomically(run_dir / "checkpoint.pt", hashlib.sha256(data).digest() + data)

    save(start_iteration)  # a new run can be resumed from its first moment, an extended one stays extended
    size, ranks = NUM_RANKS * batch_size, f"{NUM_RANKS} ranks x " if NUM_RANKS > 1 else ""
    steps, start = num_iterations * size, start_iteration * size
    print(f"{run_dir}: {args.env_id} {args.distribution_mode}, {args.num_levels or 'all'} levels, seed {args.seed}")
    print(f"{num_iterations:,} iterations of {ranks}{N} x {T} = {steps:,} steps, from step {start:,}")
    print(f"on {device}")

    # ---- evaluation: on levels outside of the training range and, where training is restricted to some, on those. The
    # games last the whole run, since procgen leaks memory when they are destroyed
    eval_envs = {}
    if RANK == 0 and (args.eval_interval > 0 or args.capture_video):
        end_level = args.start_level + args.num_levels if args.num_levels > 0 else 0
        unseen = {"start_level": end_level, "num_levels": NUM_LEVELS - end_level, "seed": NUM_LEVELS - args.seed}
        eval_envs["test"] = make_envs(args.eval_episodes, **unseen)
        if args.num_levels > 0:
            eval_envs["train"] = make_envs(args.eval_episodes, seed=NUM_LEVELS - args.seed)
        if args.capture_video:
            eval_envs["video"] = make_envs(4, **unseen, render=True)
    eval_starts = {split: test_envs.state_dict() for split, test_envs in eval_envs.items()}
    session_start = time.perf_counter()

    # ---- the loop
    for iteration in range(start_iteration + 1, num_iterations + 1):
        clock = [time.perf_counter()]
        global_step = iteration * NUM_RANKS * batch_size
        where = f"of iteration {iteration}, step {global_step:,}"
        remaining = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0  # by global progress alone
        for opt in optimizers.values():
            opt.param_groups[0]["lr"].fill_(remaining * opt.param_groups[0]["initial_lr"])

        # -- rollout
        for t in range(T):
            obs[t] = upload(next_obs)
            firsts[t] = next_done
            for name, x in act(obs=obs[t]).items():
                rollout[name][t] = x
            envs.step_async(rollout["actions"][t].cpu().numpy())  # waits for the GPU
            next_obs, rewards[t], terminated, truncated, _ = envs.step_wait()
            dones[t] = next_done = terminated | truncated
            records.bar.update(NUM_RANKS * N)
        all_rewards, all_firsts, all_dones = (np.concatenate(all_gather(x), 1) for x in (rewards, firsts, dones))
        if not np.isfinite(all_rewards).all():
            raise Stopped(f"a reward is not finite in the rollout {where}", 1)
        episode_returns, episode_lengths = episodes.update(all_rewards, all_dones)

        # -- values and advantages; rewards are normalised over all ranks
        with torch.no_grad():
            next_values = policy_agent(upload(next_obs))[1]
        values = torch.cat([rollout["values"], next_values.unsqueeze(0)])
        normalized_rewards = reward_normalizer(all_rewards, all_firsts)[:, RANK * N : (RANK + 1) * N]
        ended = upload(dones.astype(np.float32))
        advantages = compute_gae(upload(normalized_rewards), values, ended, args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]
        clock.append(time.perf_counter())

        # -- policy phase
        actions, logprobs = rollout["actions"], rollout["logprobs"]
        batch = {"obs": obs.flatten(0, 1), "actions": actions.flatten(), "old_logprobs": logprobs.flatten()}
        batch |= {"advantages": advantages.flatten(), "returns": returns.flatten(), "values": values[:-1].flatten()}
        stats: list[dict[str, np.ndarray]] = []
        select = partial(select_samples, **batch)
        for step in epochs:
            b_inds = torch.randperm(batch_size, device=device).view(args.num_minibatches, -1)
            mb_advantages = torch.cat(all_gather(advantages.flatten()[b_inds].cpu()), 1)  # of all ranks
            stds, means = torch.std_mean(mb_advantages, 1, correction=0)
            updates = []
            for mb_inds, std, mean in zip(b_inds, stds.tolist(), means.tolist(), strict=True):
                minibatch = select(mb_inds)
                minibatch["advantages"] = (minibatch["advantages"] - mean) / (std + 1e-8)
                updates.append(step(**minibatch))
            stats.append(fetch_stats(updates, "losses/", f"policy phase {where}", run_dir, select, b_inds))
        clock.append(time.perf_counter())

        # -- records
        row = {"iteration": iteration, "global_step": global_step, "episodes": episodes.num_episodes}
        if len(episode_returns) > 0:
            row["charts/episodic_return"] = float(episode_returns.mean())
            row["charts/episodic_length"] = float(episode_lengths.mean())
        if len(episodes.last_returns) > 0:
            row["charts/mean_return_100"] = float(episodes.last_returns.mean())
        row["charts/learning_rate"] = remaining * args.learning_rate
        for name in dict.fromkeys(name for epoch in stats for name in epoch):  # means over all updates of the iteration
            row[name] = float(np.concatenate([epoch[name] for epoch in stats if name in epoch]).mean())
        all_values, all_returns = (torch.cat(all_gather(x.cpu())) for x in (values[:-1], returns))
        row["losses/explained_variance"] = explained_variance(all_values, all_returns).item()
        is_last = iteration == num_iterations
        if eval_envs and (is_last or (args.eval_interval > 0 and iteration % args.eval_interval == 0)):
            for split, test_envs in eval_envs.items():
                test_envs.load_state_dict(eval_starts[split])  # the same levels every time, whatever was played before
                if split == "video":
                    path = run_dir / f"{global_step}.mp4"
                    try:
                        gif = record_video(agent, test_envs, path, args.seed, args.eval_greedy)
                        records.video(path, gif, global_step)
                    except OSError as error:  # ffmpeg's trouble must not cost the training
                        print(f"no video at step {global_step:,}: {error}", file=sys.stderr)
                    continue
                scores = evaluate(agent, test_envs, 1, args.seed, args.eval_greedy)
                row[f"eval/{split}_return"] = scores.mean()
                row[f"eval/{split}_stderr"] = scores.std(ddof=1) / math.sqrt(scores.size)
            if "train" in eval_envs:
                row["eval/generalization_gap"] = row["eval/train_return"] - row["eval/test_return"]
        clock.append(time.perf_counter())
        for name, begin, end in zip(PHASES, clock[:-1], clock[1:], strict=True):
            row[f"time/{name}"] = end - begin
        row["wall_time"] = clock[-1] - start_time
        row["charts/SPS"] = (iteration - start_iteration) * NUM_RANKS * batch_size / (clock[-1] - session_start)
        checkpoint_due = is_last or iteration % args.checkpoint_interval == 0
        if RANK == 0 and (checkpoint_due or is_last):
            write_atomically(run_dir / "agent.pt", serialize({k: x.cpu() for k, x in agent.state_dict().items()}))
        records.write(row)
        if checkpoint_due:
            save(iteration)


def main(args: Args) -> None:
    """Open the run folder, train, and say in one line how a run ended that did not get to its end: UsageError if it
    cannot begin, else SystemExit with 128 + n after signal n, with 1 where a number is not finite, a disk or the GPU's
    memory is full, or another rank is lost."""
    run_dir, about = Path(args.run_dir), describe(args)
    for module, needed in {"wandb": args.track, "imageio_ffmpeg": args.capture_video}.items():
        if needed and not importlib.util.find_spec(module):
            raise UsageError(f"{module} is not installed")
    try:
        if args.resume:
            about = json.loads((run_dir / "args.json").read_text()) | {"args": asdict(args)}
            rows = (run_dir / "metrics.csv").read_text().split("\n")[:-1]  # after the last newline stands half a row
            if rows and rows[-1].split(",")[0] == str(args.num_iterations):
                return print(f"{run_dir} is finished; a larger --total-timesteps extends it") if RANK == 0 else None
        elif RANK == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "args.json").touch(exist_ok=False)
            shutil.copy(__file__, run_dir)
        if RANK == 0:
            write_atomically(run_dir / "args.json", (json.dumps(about, indent=2) + "\n").encode())
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{run_dir} cannot be used, or holds a run to --resume: {error}") from None
    with contextlib.ExitStack() as restore:
        if RANK > 0:  # the first one speaks for all
            devnull = restore.enter_context(open(os.devnull, "w"))
            restore.enter_context(contextlib.redirect_stdout(devnull))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # train() sets them; back when all is said
            restore.callback(signal.signal, number, signal.getsignal(number))
        try:
            with contextlib.ExitStack() as cleanup:
                try:
                    train(args, cleanup)
                finally:  # torchrun and SLURM may signal a rank that is ending; but a second Ctrl-C does not wait
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
            return print(f"finished; weights, metrics and checkpoint are in {run_dir}")
        except Stopped as stopped:
            reason, code = stopped.args
        except torch.OutOfMemoryError as error:
            reason, code = f"out of GPU memory; {SAVES_MEMORY} saves some ({error})", 1
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            reason, code = error, 1
        print(f"stopped: {reason}", file=sys.stderr)
        if RANK == 0 and (run_dir / "checkpoint.pt").exists():
            command = shlex.join([sys.argv[0], "--resume", str(run_dir)])
            print(f"the last checkpoint is whole, to continue: {LAUNCHER} {command}", file=sys.stderr)
        sys.exit(code)


def parse_args() -> Args:
    """Arguments from the command line, or with --resume from the checkpoint, which it must not contradict."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", default="")
    resume = parser.parse_known_args()[0].resume
    if not resume:
        return tyro.cli(Args, description=__doc__.split("\n")[0])
    checkpoint = load_checkpoint(Path(resume) / "checkpoint.pt")
    names = [field.name for field in fields(Args) if field.init]
    if checkpoint.get("algorithm") != ALGORITHM or not set(names) <= set(checkpoint["args"]):
        raise UsageError(f"{resume} is no run of this version of {Path(__file__).name}")
    if (num_ranks := checkpoint["args"]["num_ranks"]) != NUM_RANKS:
        raise UsageError(f"{resume} is a run of {num_ranks} rank(s), not {NUM_RANKS}: torchrun sets their number")
    values = {name: checkpoint["args"][name] for name in names} | {"resume": resume, "run_dir": resume}
    try:
        saved = Args(**values)
    except ValueError as error:  # the machine lacks what the run needs
        raise UsageError(str(error)) from None
    args = tyro.cli(Args, default=saved)
    for name in names:
        before, now = getattr(saved, name), getattr(args, name)
        longer = name == "total_timesteps" and now > before and not args.anneal_lr
        if now != before and not longer and name not in MAY_CHANGE:
            raise UsageError(f"--{name.replace('_', '-')} {now} contradicts the checkpoint, which has {before}")
    return Args(**{name: getattr(args, name) for name in names})  # tyro took the derived fields from its default


if __name__ == "__main__":
    try:
        main(parse_args())
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # one before training has begun, or a second one
        sys.exit(130)
