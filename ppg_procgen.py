# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6,<2.14", "numpy", "tyro>=0.9", "tqdm>=4.64", "tensorboard>=2.14", "wandb>=0.18",
#   "gym==0.26.2; python_version < '3.13'", "gym-notices<0.1; python_version < '3.13'",
#   "setuptools<81; python_version < '3.13'",
#   "procgen==0.10.7; python_version < '3.11'", "procgen-gym==0.1.1; python_version >= '3.13'",
#   "procgen-mirror==0.10.7; python_version >= '3.11' and python_version < '3.13'",
# ]
# ///
"""Phasic Policy Gradient (Cobbe et al., 2021, https://arxiv.org/abs/2009.04416) on Procgen.

    python ppg_procgen.py --env-id starpilot

Sections 1 to 4 are the algorithm, the rest is for reference. T = num_steps, N = num_envs,
M = samples of a minibatch, A = actions, B = the paper's buffer. [PPG-k]: see benchmark/GUIDE.md.
Departures from openai/phasic-policy-gradient: the auxiliary phase in bfloat16 and the rest in TF32
where the hardware has them (off: --aux-dtype float32 --no-tf32); minibatches of single steps in
the policy phase, not of whole rollouts; 64 environments on easy levels, not 4 x 64 on hard ones.
"""

import contextlib
import csv
import ctypes
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TextIO, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# torchrun starts several ranks, each with its own environments and GPU; else this is rank 0 of 1
RANK = int(os.environ.get("RANK", 0))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))

# ---- 1 Arguments ---------------------------------------------------------------------------------
Game = Literal[
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
]  # fmt: skip
NUM_LEVELS = 2**31 - 1  # Procgen draws level seeds from 0 to 2**31 - 2


@dataclass
class Args:
    env_id: Game = "starpilot"  # Procgen game
    total_timesteps: int = 25_000_000  # environment steps of all ranks
    seed: int = 1  # random seed; on a CPU, it gives the same bits with the same number of threads
    exp_name: str = Path(__file__).stem  # name of the experiment
    run_dir: str = ""  # run folder; empty: runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # run folder of an interrupted run, to continue with its flags
    checkpoint_interval: int = 4  # iterations between checkpoints; buffer in memory: --n-iteration
    eval_interval: int = 0  # iterations between evaluations on unseen levels; 0: never
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # on a GPU: compile the networks with torch.compile
    cuda_graphs: bool = True  # on a GPU: run updates and rollout steps as CUDA graphs
    tf32: bool = True  # on a GPU: use TensorFloat-32
    chunk_size: int = 0  # observations per pass; 0: 512 on CPUs, 16384 on GPUs (out of memory: 512)
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "ppg-procgen"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    # environments
    distribution_mode: Literal["easy", "hard"] = "easy"  # Procgen's difficulty
    num_levels: int = 0  # training levels; 0: all
    start_level: int = 0  # first training level, with --num-levels
    num_envs: int = 64  # N: parallel environments of each rank
    env_threads: int = -1  # Procgen's threads; 0: the main thread; -1: by cores
    # policy phase
    num_steps: int = 256  # T: steps of each environment in a rollout
    learning_rate: float = 5e-4  # Adam's learning rate
    anneal_lr: bool = False  # anneal the learning rate linearly to zero
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    reward_gamma: float = 0.99  # discount in the normalization of rewards
    num_minibatches: int = 8  # minibatches of an epoch over each rank's N * T samples
    e_policy: int = 1  # E_pi: policy epochs of an iteration
    e_value: Annotated[int, tyro.conf.arg(aliases=["--v-value"])] = 1  # E_V: value epochs
    clip_coef: float = 0.2  # epsilon of the clipped objective; 0: no clipping
    kl_coef: float = 0.0  # beta_pi of the paper's KL variant: --clip-coef 0 --kl-coef 1
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the mean squared error (ppo_procgen: of half this error)
    clip_vloss: bool = False  # clip the change of the value by --clip-coef
    max_grad_norm: float = 0.0  # clip the norm of the gradient; 0: no clipping
    # dual: two networks; detach: one, its value head reads detached features; shared: one
    arch: Literal["dual", "detach", "shared"] = "dual"
    # auxiliary phase
    n_iteration: int = 32  # N_pi: policy iterations before an auxiliary phase
    e_auxiliary: int = 6  # E_aux: epochs over the N_pi * N rollouts; 0: no auxiliary phase
    aux_learning_rate: float = 5e-4  # Adam's learning rate in the auxiliary phase
    beta_clone: float = 1.0  # weight of KL[pi_old, pi], the behavioral cloning loss
    num_aux_rollouts: int = 4  # full rollouts of each rank in an auxiliary minibatch
    num_aux_minibatches: int = 0  # minibatches of an auxiliary epoch; 0: all
    aux_interval: int = 1  # run only every k-th auxiliary phase
    single_optimizer: bool = False  # one Adam with --learning-rate, as in CleanRL
    aux_device: Literal["auto", "cuda", "cpu", "file"] = "auto"  # of the buffer; auto: GPU or file
    aux_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast
    # derived
    device: str = field(init=False)
    num_ranks: int = field(init=False)
    batch_size: int = field(init=False)  # samples of one rank's rollout
    num_iterations: int = field(init=False)
    num_phases: int = field(init=False)  # auxiliary phases of the whole run

    def __post_init__(self) -> None:
        """Check the arguments, derive sizes, resolve automatic choices."""
        counts = ["num_envs", "num_steps", "num_minibatches", "e_policy", "checkpoint_interval"]
        for name in [*counts, "n_iteration", "num_aux_rollouts", "aux_interval"]:
            require(getattr(self, name) > 0, f"{name} must be at least 1")
        on_gpu = self.cuda and torch.cuda.is_available()
        self.device = f"cuda:{LOCAL_RANK}" if on_gpu else "cpu"
        self.num_ranks = NUM_RANKS
        self.batch_size = size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // (size * NUM_RANKS)
        require(self.num_iterations > 0, f"total_timesteps must be at least {size * NUM_RANKS}")
        require(size % self.num_minibatches == 0, f"num_minibatches must divide {size} samples")
        for name in ["start_level", "num_levels", "chunk_size", "e_value", "num_aux_minibatches"]:
            require(getattr(self, name) >= 0, f"{name} cannot be negative")
        rollouts = self.n_iteration * self.num_envs
        require(rollouts % self.num_aux_rollouts == 0, f"num_aux_rollouts must divide {rollouts}")
        iterations_per_phase = self.n_iteration * self.aux_interval
        self.num_phases = self.num_iterations // iterations_per_phase if self.e_auxiliary > 0 else 0
        if not self.run_dir:
            name = f"{self.env_id}__{self.exp_name}__{self.seed}"
            self.run_dir = f"runs/{name}__{time.strftime('%Y%m%d-%H%M%S')}"
        if self.env_threads < 0:
            cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.env_threads = 0 if cores <= 2 else min(12, cores * 3 // 4)
        if self.chunk_size == 0:
            self.chunk_size = 16_384 if on_gpu else 512
        if self.aux_dtype == "auto":
            is_fast = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
            if on_gpu:
                is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
            self.aux_dtype = "bfloat16" if is_fast else "float32"
        if self.aux_device == "auto":
            num_bytes = self.n_iteration * size * math.prod(ProcgenVectorEnv.obs_shape)
            fits = on_gpu and num_bytes <= torch.cuda.mem_get_info(LOCAL_RANK)[0] / 2
            self.aux_device = "cuda" if fits and self.num_phases > 0 else "file"


# ---- 2 Networks ----------------------------------------------------------------------------------
@torch.no_grad()
def normalized_init(layer: nn.Conv2d | nn.Linear, scale: float) -> nn.Conv2d | nn.Linear:
    """[PPG-3] normalized initialization: the weights of each output unit get the L2 norm scale."""
    dims = tuple(range(1, layer.weight.dim()))
    layer.weight *= scale / torch.linalg.vector_norm(layer.weight, dim=dims, keepdim=True)
    layer.bias.zero_()
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        scale = (3 * 2) ** -0.25  # sqrt(1 / sqrt(3 stacks) / sqrt(2 blocks))
        self.conv0 = normalized_init(nn.Conv2d(channels, channels, 3, padding=1), scale)
        self.conv1 = normalized_init(nn.Conv2d(channels, channels, 3, padding=1), scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(F.relu(self.conv0(F.relu(x))))


class ConvSequence(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = normalized_init(nn.Conv2d(in_channels, out_channels, 3, padding=1), 1.0)
        self.blocks = nn.Sequential(ResidualBlock(out_channels), ResidualBlock(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # pool before adding the bias: equal in float32; a compiled backward pass stores less
        x = F.max_pool2d(F.conv2d(x, self.conv.weight, padding=1), 3, stride=2, padding=1)
        return self.blocks(x + self.conv.bias.to(x.dtype).view(-1, 1, 1))


class ImpalaCNN(nn.Module):
    """uint8 images (M, height, width, channels) to features (M, 256)."""

    num_features = 256

    def __init__(self, obs_shape: tuple[int, int, int] = (64, 64, 3)) -> None:
        super().__init__()
        height, width, channels = obs_shape
        size = 32 * math.ceil(height / 8) * math.ceil(width / 8)  # each stack halves the image
        stacks = ConvSequence(channels, 16), ConvSequence(16, 32), ConvSequence(32, 32)
        self.stacks = nn.Sequential(*stacks)
        self.dense = normalized_init(nn.Linear(size, self.num_features), 1.4)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = obs.permute(0, 3, 1, 2) / 255.0  # NHWC in memory, so channels_last costs no copy
        x = F.relu(self.stacks(x)).flatten(1)
        return F.relu(self.dense(x))


class Outputs(NamedTuple):  # None: not requested
    logits: torch.Tensor | None  # (M, A)
    values: torch.Tensor | None  # (M,)
    aux_values: torch.Tensor | None  # (M,)


class Agent(nn.Module):
    """dual: policy and auxiliary value heads on one encoder, value head on another.
    detach, shared: all three heads on one encoder."""

    def __init__(self, arch: str = "dual", num_actions: int = 15, obs_shape=(64, 64, 3)) -> None:
        super().__init__()
        self.arch = arch
        self.policy_encoder = ImpalaCNN(obs_shape)
        num_features = self.policy_encoder.num_features
        self.policy_head = normalized_init(nn.Linear(num_features, num_actions), 0.1)
        self.aux_value_head = normalized_init(nn.Linear(num_features, 1), 0.1)
        if arch == "dual":
            self.value_encoder = ImpalaCNN(obs_shape)
        self.value_head = normalized_init(nn.Linear(num_features, 1), 0.1)

    def forward(self, obs, policy: bool = True, value: bool = True, aux: bool = False) -> Outputs:
        """obs: uint8 (M, height, width, channels). policy, value and aux select the outputs."""
        logits = values = aux_values = None
        if policy or aux or self.arch != "dual":
            features = self.policy_encoder(obs)
        if policy:
            logits = self.policy_head(features)
        if aux:
            aux_values = self.aux_value_head(features).squeeze(-1)
        if value:
            if self.arch == "dual":
                features = self.value_encoder(obs)
            elif self.arch == "detach":
                features = features.detach()  # (critical!) L_value must not train the encoder
            values = self.value_head(features).squeeze(-1)
        return Outputs(logits, values, aux_values)


# ---- 3 Losses ------------------------------------------------------------------------------------
class RewardNormalizer(nn.Module):  # for its state_dict; stays on the CPU
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1}."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        # number, sum and sum of squares of all R_t; begins as a weak prior of variance 1
        self.register_buffer("moments", torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64))

    def forward(self, rewards: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Add a rollout's R_t to the statistics, then normalize its rewards (T, N); clipped to
        [-10, 10]. firsts (T, N): 1 where o_t begins an episode."""
        returns = self.returns.numpy()  # views: in-place changes reach the buffers
        moments = self.moments.numpy()
        for reward, first in zip(gather(rewards, 1), gather(firsts, 1), strict=True):
            returns *= self.gamma
            returns *= 1 - first
            returns += reward
            moments += [returns.size, returns.sum(), np.square(returns).sum()]
        number, total, squares = moments
        variance = squares / number - (total / number) ** 2
        return np.clip(rewards / math.sqrt(variance + 1e-8), -10, 10)


def compute_gae(rewards, values, dones, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages (T, N) by generalized advantage estimation (Schulman et al., 2016), in numpy.
    rewards: (T, N). values, dones: (T + 1, N); dones[t] is 1 where o_t begins an episode."""
    nonterminal = 1 - dones[1:]
    deltas = rewards + gamma * values[1:] * nonterminal - values[:-1]
    advantages = np.empty_like(deltas)
    last_gae = 0.0
    for t in reversed(range(len(rewards))):
        last_gae = deltas[t] + gamma * gae_lambda * nonterminal[t] * last_gae
        advantages[t] = last_gae
    return advantages


def sample_action(logits: torch.Tensor, generator=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions (M,), log-probabilities (M,). Gumbel-max: torch's Categorical waits for the GPU."""
    logprobs = logits.log_softmax(-1)
    noise = torch.empty_like(logprobs).exponential_(generator=generator).log()
    actions = (logprobs - noise).argmax(-1)
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


# On a GPU, the losses and act run in CUDA graphs: their Python code runs in the first four calls
# only, and .item() fails in the fourth, the capture. To debug: --no-cuda-graphs.
def policy_phase_loss(
    agent, args, obs, actions, old_logprobs, advantages, returns, old_values,
    policy=True, value=True,
):  # fmt: skip
    """The loss of a minibatch: policy: -L_clip + beta_pi KL - c S[pi], value: L_value, both: their
    sum; and statistics to log. obs: uint8 (M, height, width, channels); all others: (M,)."""
    new = agent(obs, policy=policy, value=value)
    epsilon = args.clip_coef or math.inf
    loss = 0.0
    stats = {}

    # Policy loss
    if policy:
        all_logprobs = new.logits.log_softmax(-1)  # (M, A)
        logprobs = all_logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        logratio = logprobs - old_logprobs
        ratio = logratio.exp()
        clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon)
        pg_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
        kl_k2 = 0.5 * logratio.square().mean()  # the reference code's estimate of KL[pi_old, pi]
        policy_loss = pg_loss + args.kl_coef * kl_k2
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1).mean()
        loss = policy_loss - args.ent_coef * entropy
        stats["policy_loss"] = policy_loss
        stats["entropy"] = entropy
        stats["old_approx_kl"] = -logratio.mean()  # estimator k1
        stats["approx_kl"] = (ratio - 1 - logratio).mean()  # estimator k3
        stats["approx_kl_k2"] = kl_k2
        stats["clipfrac"] = (clipped_ratio != ratio).float().mean()

    # Value loss
    if value:
        squared_errors = (new.values - returns).square()
        if args.clip_vloss:
            change = (new.values - old_values).clamp(-epsilon, epsilon)
            squared_errors = torch.max(squared_errors, (old_values + change - returns).square())
        value_loss = args.vf_coef * squared_errors.mean()
        loss = loss + value_loss
        stats["value_loss"] = value_loss
    return loss, stats


def aux_forward(agent, args, obs: torch.Tensor, **heads: bool) -> Outputs:
    """The agent in the auxiliary phase's precision, its outputs in float32."""
    is_bfloat16 = args.aux_dtype == "bfloat16"
    # no cache: a CUDA graph would keep the cast of old weights
    with torch.autocast(obs.device.type, torch.bfloat16, enabled=is_bfloat16, cache_enabled=False):
        outputs = agent(obs, **heads)
    return Outputs(*(x if x is None else x.float() for x in outputs))


def auxiliary_phase_loss(agent, args, obs, old_all_logprobs, returns):
    """L_joint + L_value over a minibatch of full rollouts, and statistics to log. old_all_logprobs:
    (M, A), log pi_old(.|o) as the phase began. returns: (M,), the targets of the policy phase."""
    new = aux_forward(agent, args, obs, aux=True)
    all_logprobs = new.logits.log_softmax(-1)
    kl_loss = (old_all_logprobs.exp() * (old_all_logprobs - all_logprobs)).sum(-1).mean()
    aux_value_loss = 0.5 * (new.aux_values - returns).square().mean()
    value_loss = 0.5 * (new.values - returns).square().mean()
    loss = aux_value_loss + args.beta_clone * kl_loss + value_loss
    stats = {"kl_loss": kl_loss, "aux_value_loss": aux_value_loss, "real_value_loss": value_loss}
    return loss, stats


def update(agent, args, optimizer, loss_fn: Callable, **minibatch: torch.Tensor) -> dict:
    """One optimizer step on loss_fn's mean over the minibatches of all ranks, in chunks to save
    memory. Returns means of its statistics, still on the device: the host need not wait."""
    optimizer.zero_grad()  # (critical!) another phase's gradients must not leak into this step
    stats = {}
    mb_size = len(minibatch["obs"])
    for start in range(0, mb_size, args.chunk_size):
        chunk = {name: x[start : start + args.chunk_size] for name, x in minibatch.items()}
        share = len(chunk["obs"]) / mb_size
        loss, chunk_stats = loss_fn(agent, args, **chunk)
        (loss * share).backward()
        for name, x in chunk_stats.items():
            stats[name] = stats.get(name, 0) + x.detach() * share
    params = list(agent.parameters())
    average_grads(params)
    stats["grad_norm"] = nn.utils.clip_grad_norm_(params, args.max_grad_norm or math.inf)
    optimizer.step()
    return stats


# ---- 4 Training loop -----------------------------------------------------------------------------
def train(args: Args, state: dict) -> None:
    """Algorithm 1 of the paper. state: a checkpoint, or iteration 0."""
    T = args.num_steps
    N = args.num_envs
    device = torch.device(args.device)
    torch.manual_seed(args.seed)  # the same weights on all ranks: make networks before rank_seed
    rank_seed = args.seed * NUM_RANKS + RANK  # differs by rank
    envs = make_envs(args, rank_seed, args.start_level, args.num_levels)
    agent = Agent(args.arch, envs.num_actions, envs.obs_shape)
    graphed = speed_up(agent, args, device)
    agent.to(device, memory_format=torch.channels_last)
    if NUM_RANKS > 1:
        join_ranks(args)
        torch.manual_seed(rank_seed)

    def make_optimizer(learning_rate: float) -> torch.optim.Adam:  # [PPG-6] Adam's epsilon
        lr = torch.tensor(learning_rate, device=device)  # a CUDA graph freezes numbers
        return torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=lr.is_cuda)

    optimizer = make_optimizer(args.learning_rate)
    if args.single_optimizer:
        value_optimizer = aux_optimizer = optimizer
    else:
        value_optimizer = make_optimizer(args.learning_rate)  # for E_V != E_pi
        aux_optimizer = make_optimizer(args.aux_learning_rate)  # [PPG-5] auxiliary optimizer

    @graphed
    @torch.no_grad()
    def act(obs: torch.Tensor) -> dict[str, torch.Tensor]:
        new = agent(obs)
        actions, logprobs = sample_action(new.logits)
        return {"actions": actions, "logprobs": logprobs, "values": new.values}

    def make_update(opt: torch.optim.Adam, loss_fn: Callable) -> Callable:
        return graphed(partial(update, agent, args, opt, loss_fn))

    if args.e_policy == args.e_value:
        epoch_updates = [make_update(optimizer, policy_phase_loss)] * args.e_policy  # one an epoch
    else:  # value epochs come first
        value_update = make_update(value_optimizer, partial(policy_phase_loss, policy=False))
        policy_update = make_update(optimizer, partial(policy_phase_loss, value=False))
        epoch_updates = [value_update] * args.e_value + [policy_update] * args.e_policy
    aux_update = make_update(aux_optimizer, auxiliary_phase_loss)

    # Storage: a rollout, time first
    obs = torch.empty((T, N, *envs.obs_shape), dtype=torch.uint8, device=device)
    actions = torch.empty((T, N), dtype=torch.int64, device=device)
    logprobs = torch.empty((T, N), device=device)
    values = torch.empty((T + 1, N), device=device)
    rewards = np.empty((T, N), np.float32)
    dones = np.ones((T + 1, N), np.float32)  # dones[t] is 1 where o_t begins an episode
    pinned_obs = torch.empty(obs.shape[1:], dtype=torch.uint8, pin_memory=device.type == "cuda")
    episodes = EpisodeStatistics(NUM_RANKS * N)
    reward_normalizer = RewardNormalizer(NUM_RANKS * N, args.reward_gamma)

    # The paper's buffer B: rollouts and targets. To store more, do as for aux_returns everywhere
    num_rollouts = args.n_iteration * N if args.num_phases > 0 else 0
    aux_obs = open_buffer(args, (num_rollouts, T, *envs.obs_shape), state["iteration"])
    aux_returns = torch.zeros((num_rollouts, T), device=aux_obs.device)

    # Start, or continue from the checkpoint
    common = {"agent": agent, "episodes": episodes, "reward_normalizer": reward_normalizer}
    common.update(optimizer=optimizer, value_optimizer=value_optimizer, aux_optimizer=aux_optimizer)
    if state["iteration"] > 0:
        own = restore_checkpoint(args, state, common)
        envs.load_state_dict(own["envs"])
        dones[T] = own["dones"]
        aux_returns.copy_(own["aux_returns"])
    logger = Logger(args, state["rows"])
    eval_envs = None
    if args.eval_interval > 0 and RANK == 0:
        unseen = args.start_level + args.num_levels  # the first level that is not for training
        eval_seed = NUM_LEVELS - args.seed  # far from the seeds of training
        eval_envs = make_envs(args, eval_seed, unseen, NUM_LEVELS - unseen)
    next_obs, _ = envs.reset()

    for iteration in range(state["iteration"] + 1, args.num_iterations + 1):
        global_step = iteration * args.batch_size * NUM_RANKS
        row = {"iteration": iteration, "global_step": global_step}
        lr_fraction = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
        aux_optimizer.param_groups[0]["lr"].fill_(lr_fraction * args.aux_learning_rate)
        value_optimizer.param_groups[0]["lr"].fill_(lr_fraction * args.learning_rate)
        # last, because with --single-optimizer all three are one
        optimizer.param_groups[0]["lr"].fill_(lr_fraction * args.learning_rate)
        row["charts/learning_rate"] = lr_fraction * args.learning_rate

        # ==== Rollout: perform rollouts under current policy pi ===================================
        rollout_start = time.monotonic()
        dones[0] = dones[T]
        for t in range(T):
            pinned_obs.copy_(torch.from_numpy(next_obs))
            obs[t].copy_(pinned_obs, non_blocking=True)
            out = act(obs=obs[t])
            actions[t] = out["actions"]
            logprobs[t] = out["logprobs"]
            values[t] = out["values"]
            host_actions = actions[t].cpu().numpy()  # waits for the GPU
            next_obs, rewards[t], terminated, truncated, _ = envs.step(host_actions)
            dones[t + 1] = terminated | truncated
            logger.bar.update(N * NUM_RANKS)
        row.update(episodes.update(rewards, dones[1:]))

        # ==== Policy phase ========================================================================
        policy_start = time.monotonic()
        row["time/rollout"] = policy_start - rollout_start
        # Compute value function target V_targ for each state s_t
        with torch.no_grad():
            values[T] = agent(torch.from_numpy(next_obs).to(device), policy=False).values
        old_values = values.cpu().numpy()
        scaled_rewards = reward_normalizer(rewards, dones[:-1])
        advantages = compute_gae(scaled_rewards, old_values, dones, args.gamma, args.gae_lambda)
        returns = advantages + old_values[:-1]
        all_advantages = gather(advantages)  # V_targ - V; [PPG-4] normalized batch-wide
        row["losses/explained_variance"] = 1 - all_advantages.var() / gather(returns).var()
        advantages = (advantages - all_advantages.mean()) / (all_advantages.std() + 1e-8)

        # Optimize L_clip + c S[pi] wrt theta_pi for E_pi epochs, L_value wrt theta_V for E_V epochs
        batch = {
            "obs": obs.flatten(0, 1),  # (T * N, ...), like all below
            "actions": actions.flatten(),
            "old_logprobs": logprobs.flatten(),
            "advantages": torch.from_numpy(advantages).flatten().to(device),
            "returns": torch.from_numpy(returns).flatten().to(device),
            "old_values": values[:-1].flatten(),
        }
        stats = []
        for mb_update in epoch_updates:
            b_inds = torch.randperm(args.batch_size, device=device)
            for mb_inds in b_inds.view(args.num_minibatches, -1):
                stats.append(mb_update(**{name: x[mb_inds] for name, x in batch.items()}))
        row.update(mean_stats(stats, "losses/"))
        row["time/policy_phase"] = time.monotonic() - policy_start

        # Add all (s_t, V_targ) to the buffer B
        if num_rollouts > 0:
            start = (iteration - 1) % args.n_iteration * N
            aux_obs[start : start + N] = obs.transpose(0, 1)
            aux_returns[start : start + N] = torch.from_numpy(returns).T

        # ==== Auxiliary phase [PPG-1], after every N_pi iterations ================================
        if num_rollouts > 0 and iteration % (args.n_iteration * args.aux_interval) == 0:
            aux_start = time.monotonic()
            # Compute and store current policy pi_old, not the rollouts' (critical!), for all of B
            chunks = aux_obs.flatten(0, 1).split(args.chunk_size)
            with torch.no_grad():
                old = [aux_forward(agent, args, x.to(device), value=False).logits for x in chunks]
            aux_logprobs = torch.cat(old).log_softmax(-1).unflatten(0, (-1, T)).to(aux_obs.device)

            # Optimize L_joint wrt theta_pi and L_value wrt theta_V for E_aux epochs
            stats = []
            for epoch in range(args.e_auxiliary):
                aux_inds = torch.randperm(num_rollouts, device=aux_obs.device)
                aux_inds = aux_inds.view(-1, args.num_aux_rollouts)  # [PPG-2] full rollouts
                aux_inds = aux_inds[: args.num_aux_minibatches or None]
                title = f"auxiliary epoch {epoch + 1} of {args.e_auxiliary}"
                for mb_inds in tqdm(aux_inds, title, leave=False, disable=logger.bar.disable):
                    logger.print_each_minute(title)
                    mb_stats = aux_update(
                        obs=aux_obs[mb_inds].flatten(0, 1).to(device),
                        old_all_logprobs=aux_logprobs[mb_inds].flatten(0, 1).to(device),
                        returns=aux_returns[mb_inds].flatten().to(device),
                    )
                    stats.append(mb_stats)
            row.update(mean_stats(stats, "losses/aux/"))
            row["time/aux_phase"] = time.monotonic() - aux_start

        # ==== Evaluate, log, save =================================================================
        is_last = iteration == args.num_iterations
        if eval_envs is not None and (is_last or iteration % args.eval_interval == 0):
            row["eval/test_return"] = evaluate(agent, eval_envs, args.seed).mean()
        logger.log(row)
        # B dies with the process, or is overwritten in its file: always save where it begins anew
        is_due = iteration % args.checkpoint_interval == 0 and args.aux_device == "file"
        if is_due or is_last or iteration % args.n_iteration == 0:
            own = {"envs": envs.state_dict(), "dones": dones[T].tolist()}
            own["aux_returns"] = aux_returns.cpu()
            save_checkpoint(args, iteration, logger.rows, common, own)

    gather_objects(None)  # a barrier: until rank 0 has saved, a resume needs every rank's buffer


# ---- 5 Environment, episodes, evaluation ---------------------------------------------------------
class ProcgenVectorEnv:
    """Another environment must offer the same: uint8 images, discrete actions, same-step autoreset.
    Procgen's time limits count as terminations, as in all published results."""

    obs_shape = (64, 64, 3)
    num_actions = 15

    def __init__(self, env_id: str, num_envs: int, mode: str = "easy", seed: int = 0, **options):
        """options: procgen's num_levels, start_level, num_threads, render_mode."""
        options.update(distribution_mode=mode, rand_seed=seed)
        if sys.version_info < (3, 13):
            from procgen import ProcgenGym3Env as Games
        else:  # gym3 has no wheels; the same games, six with a few other pixels
            from procgen_gym.env import ProcgenVecEnv as Games
        self.games = Games(num_envs, env_id, **options)
        self.num_envs = num_envs

    def reset(self) -> tuple[np.ndarray, dict]:
        """The current observations, uint8 (N, 64, 64, 3): Procgen cannot restart an episode."""
        if sys.version_info >= (3, 13):
            return self.games.reset()
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N,) to gymnasium's five; rewards are raw, float32 (N,)."""
        if sys.version_info >= (3, 13):
            return self.games.step(actions)
        self.games.act(actions)
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}

    def state_dict(self) -> dict:
        return {"games": self.games.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.games.set_state(state["games"])


def make_envs(args: Args, seed: int, start_level: int, num_levels: int) -> ProcgenVectorEnv:
    levels = {"start_level": start_level, "num_levels": num_levels}
    options = {"mode": args.distribution_mode, "num_threads": args.env_threads}
    return ProcgenVectorEnv(args.env_id, args.num_envs, seed=seed, **levels, **options)


class EpisodeStatistics(nn.Module):  # for its state_dict; stays on the CPU
    """Raw returns and lengths of the episodes of all ranks."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.register_buffer("last_returns", torch.full((100,), math.nan, dtype=torch.float64))
        self.register_buffer("totals", torch.zeros((2, num_envs), dtype=torch.float64))

    def update(self, rewards: np.ndarray, dones: np.ndarray) -> dict[str, float]:
        """Means over the episodes that end in a rollout (T, N), and over the last 100, or nan."""
        totals = self.totals.numpy()  # a view
        finished = [np.empty((2, 0))]
        for reward, done in zip(gather(rewards, 1), gather(dones, 1) > 0, strict=True):
            totals += np.stack([reward, np.ones_like(reward)])
            finished.append(totals[:, done])
            totals[:, done] = 0
        returns, lengths = torch.from_numpy(np.concatenate(finished, 1))
        self.last_returns.copy_(torch.cat([self.last_returns, returns])[-100:])
        return {
            "charts/episodic_return": returns.mean().item(),
            "charts/episodic_length": lengths.mean().item(),
            "charts/mean_return_100": self.last_returns.nanmean().item(),
        }


@torch.no_grad()
def evaluate(agent: nn.Module, envs: ProcgenVectorEnv, seed: int) -> np.ndarray:
    """The raw return of one episode in each environment, (num_envs,); counting all episodes would
    favor short ones. Leaves envs and torch's random numbers as they were."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    start = envs.state_dict()
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset()
    while playing.any():
        logits = agent(torch.from_numpy(obs).to(device), value=False).logits
        actions, _ = sample_action(logits, generator)
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    envs.load_state_dict(start)
    return returns


# ---- 6 Speed and ranks ---------------------------------------------------------------------------
def speed_up(agent: nn.Module, args: Args, device: torch.device) -> Callable:
    """Choose the device, compile the agent. Returns a decorator that makes CUDA graphs."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        torch.set_num_threads(1)  # torch's threads would spin on the environments' cores
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    else:  # keep freed memory: mapping it again costs up to 40 %
        libc = ctypes.CDLL(None)
        if libc.mallopt(-3, 2**30):  # M_MMAP_THRESHOLD, which an old glibc refuses
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if on_gpu and args.compile:
        torch._dynamo.config.cache_size_limit = 64  # a variant for each phase and batch size
        if torch.__version__ < "2.13":  # its worker processes can hang at exit (pytorch #162199)
            torch._inductor.config.compile_threads = 1
        options = {"force_layout_optimization": True}  # else Inductor gives up channels_last
        for module in agent.modules():
            if isinstance(module, ImpalaCNN):
                module.compile(fullgraph=True, dynamic=False, options=options)
    return CudaGraph if on_gpu and args.cuda_graphs else lambda function: function


class CudaGraph:
    """A CUDA graph of a function of named tensors: 3 calls warm up, the fourth is captured. From
    then on, shapes and numbers are fixed, other tensors stay in place."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.num_calls = 0

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls < 4:
            return self.function(**inputs)
        if self.num_calls == 4:
            self.graph = torch.cuda.CUDAGraph()
            self.inputs = {name: x.clone() for name, x in inputs.items()}
            stream = torch.cuda.current_stream()
            # thread_local: NCCL's watchdog thread may make CUDA calls meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = self.function(**self.inputs)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.outputs.items()}  # a replay overwrites them


def join_ranks(args: Args) -> None:
    """Join the other ranks; take the run folder and the place of B from rank 0."""
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: end with torchrun
    backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(hours=2))  # evaluations take long
    args.run_dir, args.aux_device = gather_objects((args.run_dir, args.aux_device))[0]


def average_grads(params: list[nn.Parameter]) -> None:
    """Average the gradients over all ranks; every rank gets the same bits."""
    if NUM_RANKS > 1:
        grads = [param.grad for param in params if param.grad is not None]
        mean = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(mean)
        mean /= NUM_RANKS
        for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def gather_objects(x) -> list:
    """All ranks' x, on every rank."""
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(everyone, x)
    return everyone


def gather(array: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.concatenate(gather_objects(array), axis)


def mean_stats(updates: list[dict], prefix: str) -> dict[str, float]:
    """Means over the updates of a phase and over the ranks. One that is not finite ends the run."""
    means = {}
    for name in dict.fromkeys(name for stats in updates for name in stats):
        mean = torch.stack([stats[name] for stats in updates if name in stats]).mean()
        means[prefix + name] = float(np.mean(gather_objects(mean.item())))  # waits for the GPU
        if not math.isfinite(means[prefix + name]):
            sys.exit(f"{prefix}{name} is {means[prefix + name]}: the run ends")
    return means


# ---- 7 Records, checkpoints, command line --------------------------------------------------------
class Logger:
    """metrics.csv, TensorBoard, and progress: a bar, or in a log file at most a line a minute."""

    def __init__(self, args: Args, rows: list[dict]) -> None:
        self.rows = rows
        last = rows[-1] if rows else {"global_step": 0, "wall_time": 0.0}
        self.start = time.monotonic() - last["wall_time"]
        self.last_line = -math.inf
        total = args.num_iterations * args.batch_size * NUM_RANKS
        self.bar = tqdm(total=total, initial=last["global_step"], disable=not sys.stdout.isatty())
        if RANK > 0:
            return
        self.path = Path(args.run_dir, "metrics.csv")
        self.write_table()
        self.wandb = None
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            names.update(name=Path(args.run_dir).name, dir=args.run_dir)
            self.wandb = wandb.init(resume="auto", config=vars(args), **names)
        self.tensorboard = SummaryWriter(args.run_dir, purge_step=last["global_step"] + 1)

    def write_table(self) -> None:
        """Rewrite metrics.csv with all columns."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        file = open(self.path.with_suffix(".tmp"), "w", newline="", buffering=1)  # flushes lines
        self.table = csv.DictWriter(file, columns, lineterminator="\n")
        self.table.writeheader()
        self.table.writerows(self.rows)
        os.replace(file.name, self.path)  # the file stays open

    def log(self, row: dict) -> None:
        """End an iteration. row: rank 0's numbers by name, blank if not finite."""
        if RANK > 0:
            return
        row["wall_time"] = time.monotonic() - self.start
        row["charts/SPS"] = row["global_step"] / row["wall_time"]
        progress = f"return {row['charts/mean_return_100']:.2f}, SPS {row['charts/SPS']:.0f}"
        self.bar.set_postfix_str(progress)
        self.print_each_minute(f"step {row['global_step']:,}, {progress}")
        row = {name: x for name, x in row.items() if math.isfinite(x)}
        row = {name: x if isinstance(x, int) else float(x) for name, x in row.items()}
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, row["global_step"])
        self.tensorboard.flush()
        if self.wandb:
            self.wandb.log(row, step=row["global_step"])
        self.rows.append(row)
        if row.keys() <= set(self.table.fieldnames):
            self.table.writerow(row)
        else:
            self.write_table()

    def print_each_minute(self, text: str) -> None:
        if self.bar.disable and time.monotonic() > self.last_line + 60:
            print(text, flush=True)
            self.last_line = time.monotonic()


def save_checkpoint(args: Args, iteration: int, rows: list, common: dict, own: dict) -> None:
    """Save the whole run: on a CPU, a resumed run has the bits of one never stopped. common:
    objects with a state_dict, the same on all ranks. own: this rank's state."""
    if buffer_path(args).exists():
        with open(buffer_path(args), "rb") as file:
            os.fsync(file)  # on each rank, because rank 0 may be on another machine
    own["rng"] = torch.get_rng_state()
    own["cuda_rng"] = torch.cuda.get_rng_state() if args.device != "cpu" else None
    state = {"iteration": iteration, "rows": rows, "ranks": gather_objects(own)}
    if RANK > 0:
        return
    state.update({name: part.state_dict() for name, part in common.items()})
    path = Path(args.run_dir, "checkpoint.pt")
    torch.save({name: x.cpu() for name, x in state["agent"].items()}, path.with_name("agent.pt"))
    with open(path.with_suffix(".tmp"), "wb") as file:  # a crash leaves the old file or the new one
        torch.save(state, file)
        file.flush()
        os.fsync(file)
    os.replace(file.name, path)


def restore_checkpoint(args: Args, state: dict, common: dict) -> dict:
    """Restore common and the random numbers. Returns this rank's own state."""
    for name, part in common.items():
        if isinstance(part, torch.optim.Optimizer):  # lr and capturable belong to this device
            state[name]["param_groups"] = part.state_dict()["param_groups"]
        part.load_state_dict(state[name])
    own = state["ranks"][RANK]
    torch.set_rng_state(own["rng"])
    if args.device != "cpu" and own["cuda_rng"] is not None:
        torch.cuda.set_rng_state(own["cuda_rng"])
    return own


def buffer_path(args: Args) -> Path:
    return Path(args.run_dir, f"buffer_{RANK}.bin")


def open_buffer(args: Args, shape: tuple, iteration: int) -> torch.Tensor:
    """The observations of B, uint8, after this iteration: new where B is empty, else its file."""
    size = math.prod(shape)
    path = buffer_path(args)
    is_empty = iteration % args.n_iteration == 0 or size == 0
    is_stored = args.aux_device == "file" and path.exists()
    require(is_empty or is_stored, f"to resume, this run needs --aux-device file and {path}")
    if args.aux_device != "file" or size == 0:
        place = args.device if args.aux_device == "cuda" else "cpu"
        return torch.empty(shape, dtype=torch.uint8, device=place)
    if is_empty:
        with open(path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # or a full disk ends the run with SIGBUS
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(shape)


def require(condition: bool, message: str) -> None:
    if not condition:
        print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        sys.exit(2)


MAY_CHANGE = {  # what --resume may change
    "cuda", "compile", "cuda_graphs", "tf32", "aux_dtype", "aux_device", "env_threads", "device",
    "chunk_size", "checkpoint_interval", "eval_interval", "track", "wandb_project_name",
    "wandb_entity",
}  # fmt: skip


def parse_args() -> Args:
    """Arguments of the command line, or of the run that --resume continues."""
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.resume is not None:
        path = Path(args.resume, "args.json")
        require(path.exists(), f"--resume: {args.resume!r} is not a run folder")
        saved = json.loads(path.read_text())["args"]
        other = ", ".join(sorted(saved.keys() ^ vars(args).keys()))
        require(not other, f"{args.resume} is a run of another script, whose flags differ: {other}")
        require(saved["env_id"] in get_args(Game), f"this script does not know {saved['env_id']}")
        saved.update(resume=args.resume, run_dir=args.resume)
        flags = {flag.name: saved[flag.name] for flag in fields(Args) if flag.init}
        args = tyro.cli(Args, default=Args(**flags))
        changed = {name for name in saved if getattr(args, name) != saved[name]} - MAY_CHANGE
        require(not changed, f"these flags of the run cannot change: {', '.join(sorted(changed))}")
    can_hold_buffer = args.device != "cpu" or args.aux_device != "cuda"
    require(can_hold_buffer, "aux_device cuda needs a GPU")
    return args


def open_run(args: Args) -> TextIO:
    """Make the run folder, or open it again. Returns a file that keeps it locked while open."""
    path = Path(args.run_dir, "args.json")
    if args.resume is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        require(not any(path.parent.iterdir()), f"{path.parent} is not empty")
        git = "git describe --always --dirty --abbrev=40 '--exclude=*'"  # empty without git
        folder = Path(__file__).resolve().parent
        result = subprocess.run(git, shell=True, cwd=folder, capture_output=True, text=True)
        about = {"args": asdict(args), "command": " ".join(sys.orig_argv)}
        about.update(commit=result.stdout.strip(), date=time.strftime("%FT%T%z"))
        about.update(python=sys.version.split()[0], torch=torch.__version__)
        about["gpu"] = torch.cuda.get_device_name() if args.device != "cpu" else None
        path.write_text(json.dumps(about, indent=2))
        shutil.copy(__file__, path.parent)
    lock = open(path, "a")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another process trains here
    return lock


def main(args: Args) -> None:
    """Train, from the checkpoint if there is one."""
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all
    with open_run(args) if RANK == 0 else contextlib.nullcontext():
        state = {"iteration": 0, "rows": []}
        if (checkpoint := Path(args.run_dir, "checkpoint.pt")).exists():
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        print(f"{args.run_dir}: {args.num_iterations} iterations, {args.num_phases} aux phases")
        if args.cuda and args.device == "cpu":
            print("no GPU: training on the CPU")
        starter = "python" if NUM_RANKS == 1 else "torchrun ..."
        print(f"To resume: {starter} {sys.argv[0]} --resume {args.run_dir!r}", flush=True)
        try:
            if state["iteration"] < args.num_iterations:
                train(args, state)
        except KeyboardInterrupt:
            sys.exit(130)
        buffer_path(args).unlink(missing_ok=True)
    print(f"{args.run_dir} is finished")


if __name__ == "__main__":
    main(parse_args())
