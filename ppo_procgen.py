# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6,<2.14", "numpy", "tyro>=0.9", "tensorboard>=2.14", "wandb>=0.18",
#   "gym==0.26.2; python_version < '3.13'", "gym-notices<0.1; python_version < '3.13'",
#   "setuptools<81; python_version < '3.13'",
#   "procgen==0.10.7; python_version < '3.11'", "procgen-gym==0.1.1; python_version >= '3.13'",
#   "procgen-mirror==0.10.7; python_version >= '3.11' and python_version < '3.13'",
# ]
# ///
"""Proximal Policy Optimization as in the Procgen paper (https://arxiv.org/abs/1912.01588).

    python ppo_procgen.py --env-id starpilot

Sections 2 to 4 are the algorithm, as in ppg_procgen.py where both agree. M: samples of a
minibatch, A: actions. Departures from openai/train-procgen: torch's Adam and pooling; TF32 where
possible (off: --no-tf32); rewards are normalized over all ranks.
"""

import argparse
import contextlib
import csv
import ctypes
import fcntl
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Literal, NamedTuple, TextIO

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter

# torchrun starts several ranks, each with its own environments and GPU
RANK = int(os.environ.get("RANK", 0))
NUM_RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))


def require(condition: bool, message: str) -> None:
    if not condition:
        print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        sys.exit(2)


# ---- 1 Arguments ----
Game = Literal[
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
]  # fmt: skip
NUM_LEVELS = 2**31 - 1  # Procgen draws level seeds from 0 to 2**31 - 2


@dataclass(eq=False)  # by identity, as keys of CUDA graphs
class Args:
    env_id: Game = "starpilot"  # Procgen game
    total_timesteps: int = 25_000_000  # environment steps of all ranks
    seed: int = 1  # random seed; on a CPU, seed and number of threads fix all bits
    exp_name: str = Path(__file__).stem  # name of the experiment
    run_dir: str = ""  # run folder; empty: runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # run folder of an interrupted run, to continue it
    checkpoint_interval: int = 4  # iterations between checkpoints
    eval_interval: int = 0  # iterations between evaluations, on levels above the training's
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # on a GPU: torch.compile the networks
    cuda_graphs: bool = True  # on a GPU: run updates and rollout steps as CUDA graphs
    tf32: bool = True  # on a GPU: use TensorFloat-32
    chunk_size: int = 0  # observations in a pass; 0: 512 on CPUs, 16384 on GPUs
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "ppg-procgen"  # W&B project
    wandb_entity: str | None = None  # W&B team
    # environments
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0: all
    start_level: int = 0  # first training level, with --num-levels
    num_envs: int = 64  # N: parallel environments of each rank
    env_threads: int = -1  # Procgen's threads; 0: the main thread; -1: by cores
    # optimization
    num_steps: int = 256  # T: steps of each environment in a rollout
    learning_rate: float = 5e-4  # Adam's learning rate
    anneal_lr: bool = False  # anneal learning rates linearly to zero
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    reward_gamma: float = 0.99  # discount in the normalization of rewards
    num_minibatches: int = 8  # minibatches of an epoch over each rank's N * T samples
    update_epochs: int = 3  # epochs over the N * T samples
    clip_coef: float = 0.2  # epsilon of the clipped objective; 0: no clipping
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of half the mean squared error of the values
    clip_vloss: bool = True  # clip the change of the value by --clip-coef
    max_grad_norm: float = 0.5  # clip the norm of the gradient; 0: no clipping

    def __post_init__(self) -> None:
        settle(self)  # adds device, batch_size, num_iterations and others


# ---- 2 Networks ----
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
    """uint8 images (M, height, width, channels) to features (M, 256)."""

    num_features = 256

    def __init__(self, obs_shape: tuple[int, int, int] = (64, 64, 3)) -> None:
        super().__init__()
        height, width, channels = obs_shape
        size = 32 * math.ceil(height / 8) * math.ceil(width / 8)  # each stack halves the image
        stacks = ConvSequence(channels, 16), ConvSequence(16, 32), ConvSequence(32, 32)
        self.stacks = nn.Sequential(*stacks)
        self.dense = nn.Linear(size, self.num_features)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = obs.permute(0, 3, 1, 2) / 255.0  # NHWC in memory: channels_last costs no copy
        x = F.relu(self.stacks(x)).flatten(1)
        return F.relu(self.dense(x))


class Outputs(NamedTuple):  # None: not computed
    logits: torch.Tensor  # (M, A)
    values: torch.Tensor | None  # (M,)


class Agent(nn.Module):
    """Policy and value head on one encoder, initialized as openai/train-procgen does."""

    def __init__(self, args: Args, envs: "ProcgenVectorEnv") -> None:
        super().__init__()
        self.encoder = ImpalaCNN(envs.obs_shape)
        self.policy_head = nn.Linear(self.encoder.num_features, envs.num_actions)
        self.value_head = nn.Linear(self.encoder.num_features, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.orthogonal_(self.policy_head.weight, 0.01)
        nn.init.orthogonal_(self.value_head.weight, 1.0)

    def forward(self, obs: torch.Tensor, value: bool = True) -> Outputs:
        """obs: uint8 (M, height, width, channels). Without value, values is None."""
        features = self.encoder(obs)
        logits = self.policy_head(features)
        values = None
        if value:
            values = self.value_head(features).squeeze(-1)
        return Outputs(logits, values)


class Policy:
    """pi(.|o) at M observations: a categorical distribution, from logits (M, A)."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logprobs = logits.log_softmax(-1)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Actions (M,). Gumbel-max: torch's Categorical waits for the GPU."""
        noise = torch.empty_like(self.logprobs).exponential_(generator=generator).log()
        return (self.logprobs - noise).argmax(-1)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:  # (M,), like all below
        return self.logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


# ---- 3 Estimates, losses, gradient step ----
def compute_gae(rewards, values, firsts, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages (T, N) by generalized advantage estimation (Schulman et al., 2016), in numpy.
    rewards: (T, N). values, firsts: (T + 1, N); firsts[t] is 1 where o_t begins an episode."""
    nonterminal = 1 - firsts[1:]
    deltas = rewards + gamma * values[1:] * nonterminal - values[:-1]
    advantages = np.empty_like(deltas)
    last_gae = 0.0
    for t in reversed(range(len(rewards))):
        last_gae = deltas[t] + gamma * gae_lambda * nonterminal[t] * last_gae
        advantages[t] = last_gae
    return advantages


def cuda_graph(function: Callable) -> Callable:
    """On a GPU, a CUDA graph for each set of positional arguments. Tensors are passed by name."""
    get_graph = functools.cache(lambda *fixed: CudaGraph(function, fixed))

    @functools.wraps(function)
    def call(agent, args, *others, **tensors):
        if args.device == "cpu" or not args.cuda_graphs:
            return function(agent, args, *others, **tensors)
        return get_graph(agent, args, *others)(**tensors)

    return call


# In a CUDA graph, Python code runs in the first four calls only. Then print() stops, .item() fails,
# and numbers keep their value; a flag that changes ends the run. To debug: --no-cuda-graphs.
@cuda_graph
@torch.no_grad()
def act(agent, args, *, obs) -> dict:
    """A step of the policy. The loop stores all that it returns, each (N, ...)."""
    out = agent(obs)
    pi = Policy(out.logits)
    actions = pi.sample()
    return {"actions": actions, "logprobs": pi.log_prob(actions), "values": out.values}


# A loss sees a chunk of a minibatch: it must be a mean over samples, without batch statistics
def policy_and_value_loss(agent, args, obs, actions, old_logprobs, advantages, targets, old_values):
    """-L_clip - c S[pi] + vf_coef * value loss, and statistics to log. obs: (M, height, width,
    channels), all others: (M,)."""
    out = agent(obs)
    pi = Policy(out.logits)
    logratio = pi.log_prob(actions) - old_logprobs
    ratio = logratio.exp()
    clipped_ratio = ratio
    if args.clip_coef > 0:
        clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    entropy = pi.entropy().mean()

    squared_errors = (out.values - targets).square()
    if args.clip_vloss and args.clip_coef > 0:
        change = (out.values - old_values).clamp(-args.clip_coef, args.clip_coef)
        squared_errors = torch.max(squared_errors, (old_values + change - targets).square())
    value_loss = 0.5 * squared_errors.mean()

    stats = {"policy_loss": policy_loss, "entropy": entropy, "value_loss": value_loss}
    stats["old_approx_kl"] = -logratio.mean()  # k1 of http://joschu.net/blog/kl-approx.html
    stats["approx_kl"] = (ratio - 1 - logratio).mean()  # k3
    stats["approx_kl_k2"] = 0.5 * logratio.square().mean()  # baselines' approxkl
    stats["clipfrac"] = (clipped_ratio != ratio).float().mean()
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, stats


@cuda_graph
def gradient_step(agent, args, optimizer, loss_fn: Callable, **minibatch) -> dict:
    """One optimizer step on loss_fn's mean over the minibatches of all ranks, in chunks to save
    memory. Returns means of its statistics on the device, so it does not wait for the GPU."""
    optimizer.zero_grad()  # else the last phase's gradients would be part of this step
    stats = {}
    mb_size = len(minibatch["obs"])
    for start in range(0, mb_size, args.max_chunk):
        chunk = {name: x[start : start + args.max_chunk] for name, x in minibatch.items()}
        share = len(chunk["obs"]) / mb_size
        loss, chunk_stats = loss_fn(agent, args, **chunk)
        (loss * share).backward()
        for name, x in chunk_stats.items():
            stats[name] = stats.get(name, 0) + x.detach() * share
    params = [x for x in agent.parameters() if x.grad is not None]
    average_grads(params)
    stats["grad_norm"] = nn.utils.get_total_norm([x.grad for x in params])
    if args.max_grad_norm > 0:
        nn.utils.clip_grads_with_norm_(params, args.max_grad_norm, stats["grad_norm"])
    optimizer.step()
    return stats


# ---- 4 Training loop ----
def train(args: Args, state: dict) -> None:
    """Proximal Policy Optimization. state: a checkpoint, or iteration 0."""
    T = args.num_steps
    N = args.num_envs
    device = torch.device(args.device)
    set_up_device(args)
    if NUM_RANKS > 1:
        dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    torch.manual_seed(args.seed)  # all ranks make the same networks
    rank_seed = args.seed * NUM_RANKS + RANK  # differs by rank
    envs = make_envs(args, rank_seed, args.start_level, args.num_levels)
    agent = Agent(args, envs).to(device, memory_format=torch.channels_last)
    compile_encoders(agent, args)

    lr = torch.tensor(args.learning_rate, device=device)  # a CUDA graph keeps numbers
    params = agent.parameters()  # after all networks
    optimizer = torch.optim.Adam(params, lr, eps=1e-5, fused=True, capturable=lr.is_cuda)

    # Storage, time first; what act returns is stored in the loop
    obs = torch.empty((T, N, *envs.obs_shape), dtype=envs.obs_dtype, device=device)
    pinned_obs = torch.empty(obs.shape[1:], dtype=obs.dtype, pin_memory=device.type == "cuda")
    rewards = np.empty((T, N), np.float32)
    # 1 where o_t begins an episode, as in a run's first step; row T is row 0 of the next iteration
    firsts = np.ones((T + 1, N), np.float32)
    episodes = EpisodeStatistics(NUM_RANKS * N)
    reward_normalizer = RewardNormalizer(NUM_RANKS * N, args.reward_gamma)

    # Start, or continue: what is not in shared or rank_state begins anew
    if NUM_RANKS > 1:
        torch.manual_seed(rank_seed)  # from here on, draws differ by rank
    shared = {"agent": agent, "episodes": episodes, "reward_normalizer": reward_normalizer}
    shared["optimizer"] = optimizer
    if state["iteration"] > 0:
        rank_state = restore_checkpoint(args, state, shared)
        envs.load_state_dict(rank_state["envs"])
        firsts[T] = rank_state["firsts"]
    logger = Logger(args, state["rows"]) if RANK == 0 else None
    eval_envs = None
    if args.eval_interval > 0 and RANK == 0:
        above = args.start_level + args.num_levels  # the first level not in training
        eval_envs = make_envs(args, NUM_LEVELS - args.seed, above, NUM_LEVELS - above)
    next_obs, _ = envs.reset()  # Procgen: present observations, restored or new

    for iteration in range(state["iteration"] + 1, args.num_iterations + 1):
        row = {"iteration": iteration, "global_step": iteration * args.batch_size * NUM_RANKS}
        lr_fraction = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"].fill_(lr_fraction * args.learning_rate)
        row["charts/learning_rate"] = lr_fraction * args.learning_rate

        # ==== Perform rollouts under current policy pi ====
        rollout_start = time.monotonic()
        firsts[0] = firsts[T]
        steps = []
        for t in range(T):
            np.copyto(pinned_obs.numpy(), next_obs, casting="no")  # fails if the dtypes differ
            obs[t].copy_(pinned_obs, non_blocking=True)
            steps.append(act(agent, args, obs=obs[t]))
            actions = steps[t]["actions"].cpu().numpy()  # waits for the GPU
            next_obs, rewards[t], terminated, truncated, _ = envs.step(actions)
            firsts[t + 1] = terminated | truncated
        all_rewards = np.hstack(all_ranks(rewards))
        all_firsts = np.hstack(all_ranks(firsts))
        row.update(episodes.update(all_rewards, all_firsts))

        # ==== Optimization ====
        policy_start = time.monotonic()
        row["time/rollout"] = policy_start - rollout_start
        # Compute value function target V_targ for each state s_t
        rollout = {name: torch.stack([x[name] for x in steps]) for name in steps[0]}  # (T, N)
        with torch.no_grad():
            last_values = agent(torch.from_numpy(next_obs).to(device)).values
        values = torch.cat([rollout["values"], last_values.unsqueeze(0)]).cpu().numpy()
        scaled_rewards = reward_normalizer(rewards, all_rewards, all_firsts)
        advantages = compute_gae(scaled_rewards, values, firsts, args.gamma, args.gae_lambda)
        targets = advantages + values[:-1]
        all_advantages = np.concatenate(all_ranks(advantages))  # V_targ - V
        all_targets = np.concatenate(all_ranks(targets))
        row["losses/explained_variance"] = 1 - all_advantages.var() / all_targets.var()
        batch = {
            "obs": obs.flatten(0, 1),  # (T * N, ...), like all below
            "actions": rollout["actions"].flatten(0, 1),
            "old_logprobs": rollout["logprobs"].flatten(),
            "advantages": torch.from_numpy(advantages).flatten().to(device),
            "targets": torch.from_numpy(targets).flatten().to(device),
            "old_values": rollout["values"].flatten(),
        }

        # Optimize L_clip + c S[pi] and the value loss
        stats = []
        for _ in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size, device=device)
            for mb_inds in b_inds.view(args.num_minibatches, -1):
                minibatch = {name: x[mb_inds] for name, x in batch.items()}
                std, mean = torch.std_mean(minibatch["advantages"], correction=0)
                minibatch["advantages"] = (minibatch["advantages"] - mean) / (std + 1e-8)
                mb_stats = gradient_step(agent, args, optimizer, policy_and_value_loss, **minibatch)
                stats.append(mb_stats)
        row.update(mean_stats(stats, "losses/"))
        row["time/policy_phase"] = time.monotonic() - policy_start

        # ==== Evaluate, log, save ====
        is_last = iteration == args.num_iterations
        if eval_envs and (is_last or iteration % args.eval_interval == 0):
            row["eval/test_return"] = evaluate(agent, eval_envs, args.seed).mean()
        if RANK == 0:
            logger.log(row)
        if is_last or iteration % args.checkpoint_interval == 0:
            state["iteration"] = iteration
            rank_state = {"envs": envs.state_dict(), "firsts": firsts[T].tolist()}
            save_checkpoint(args, state, shared, rank_state)


# ---- 5 Environment, episodes, evaluation ----
class ProcgenVectorEnv:
    """Another environment must offer the same: the last step of an episode gives the observation
    of the next. Procgen's time limits count as terminations, as in all published results."""

    obs_shape = (64, 64, 3)
    obs_dtype = torch.uint8
    num_actions = 15

    def __init__(self, env_id: str, num_envs: int, mode: str = "easy", seed: int = 0, **options):
        options.update(distribution_mode=mode, rand_seed=seed)
        if sys.version_info < (3, 13):
            from procgen import ProcgenGym3Env as Games

            assets = Path(sys.modules["procgen"].__file__).parent / "data" / "assets"
            options["resource_root"] = os.fsencode(assets) + b"/"  # gym3: a str must be ASCII
        else:  # gym3 has no wheels; the same games, in six a few pixels differ
            from procgen_gym.env import ProcgenVecEnv as Games
        self.games = Games(num_envs, env_id, **options)
        self.num_envs = num_envs

    def reset(self) -> tuple[np.ndarray, dict]:
        """The present observations, uint8 (N, 64, 64, 3): Procgen cannot restart an episode."""
        if sys.version_info >= (3, 13):
            return self.games.reset()
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions: np.ndarray) -> tuple:
        """Take actions (N,). Returns gymnasium's five values; rewards are raw, float32 (N,)."""
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
    options = {"mode": args.distribution_mode, "num_threads": args.num_env_threads}
    return ProcgenVectorEnv(args.env_id, args.num_envs, seed=seed, **levels, **options)


class RewardNormalizer(nn.Module):  # for its state_dict; stays on the CPU
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1}, step
    by step as baselines' VecNormalize: the first rewards count for more."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("sums", torch.zeros(num_envs, dtype=torch.float64))  # R_t
        # number, sum and sum of squares of all R_t; begins as a weak prior of variance 1
        self.register_buffer("moments", torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64))

    def forward(self, rewards, all_rewards, all_firsts) -> np.ndarray:
        """This rank's rewards (T, N), each step normalized by all ranks' R_t until then."""
        sums = self.sums.numpy()  # views: in-place changes reach the buffers
        moments = self.moments.numpy()
        deviations = np.empty((len(rewards), 1), rewards.dtype)
        for t, (reward, first) in enumerate(zip(all_rewards, all_firsts[:-1], strict=True)):
            sums *= self.gamma
            sums *= 1 - first
            sums += reward
            moments += [sums.size, sums.sum(), np.square(sums).sum()]
            number, total, squares = moments
            deviations[t] = math.sqrt(squares / number - (total / number) ** 2 + 1e-8)
        return np.clip(rewards / deviations, -10, 10)


class EpisodeStatistics(nn.Module):  # for its state_dict; stays on the CPU
    """Raw returns and lengths of the episodes of all ranks."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.register_buffer("last_returns", torch.full((100,), math.nan, dtype=torch.float64))
        self.register_buffer("totals", torch.zeros((2, num_envs), dtype=torch.float64))

    def update(self, rewards: np.ndarray, firsts: np.ndarray) -> dict:
        """Means over the episodes that end in these steps, and over the last 100, or nan."""
        totals = self.totals.numpy()  # a view
        finished = [np.empty((2, 0))]
        for t, reward in enumerate(rewards):
            totals *= 1 - firsts[t]
            totals += np.stack([reward, np.ones_like(reward)])
            finished.append(totals[:, firsts[t + 1] > 0])
        returns, lengths = torch.from_numpy(np.concatenate(finished, 1))
        self.last_returns.copy_(torch.cat([self.last_returns, returns])[-100:])
        return {
            "charts/episodic_return": returns.mean().item(),
            "charts/episodic_length": lengths.mean().item(),
            "charts/mean_return_100": self.last_returns.nanmean().item(),
        }


@torch.no_grad()
def evaluate(agent: Agent, envs: ProcgenVectorEnv, seed: int) -> np.ndarray:
    """The raw return of one episode in each environment, (num_envs,): counting all would favor
    short ones. Leaves envs as they were."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    start = envs.state_dict()
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset()
    while playing.any():
        out = agent(torch.from_numpy(obs).to(device), value=False)
        actions = Policy(out.logits).sample(generator)
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    envs.load_state_dict(start)
    return returns


# ---- 6 Speed and ranks ----
def set_up_device(args: Args) -> None:
    if args.device != "cpu":
        torch.cuda.set_device(args.device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        torch.set_num_threads(1)  # others would spin on the environments' cores
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    elif sys.platform == "linux":  # keep freed memory: mapping it again costs up to 40 %
        libc = ctypes.CDLL(None)
        if libc.mallopt(-3, 2**30):  # M_MMAP_THRESHOLD, which an old glibc refuses
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def compile_encoders(agent: Agent, args: Args) -> None:
    """On a GPU, compile all parts of the agent but its heads, which are linear layers."""
    torch._dynamo.config.cache_size_limit = 64  # a variant for each phase and batch size
    if torch.__version__ < (2, 13):  # else it can hang at exit (pytorch #162199)
        torch._inductor.config.compile_threads = 1
    options = {"force_layout_optimization": True}  # else Inductor gives up channels_last
    for module in agent.children():
        if args.device != "cpu" and args.compile and not isinstance(module, nn.Linear):
            module.compile(fullgraph=True, dynamic=False, options=options)


class CudaGraph:
    """function(*fixed, **inputs): 3 calls warm up, the fourth is captured, others replay it."""

    def __init__(self, function: Callable, fixed: tuple) -> None:
        self.function = functools.partial(function, *fixed)
        self.args = fixed[1]
        self.num_calls = 0

    def __call__(self, **inputs: torch.Tensor) -> dict:
        self.num_calls += 1
        if self.num_calls < 4:
            return self.function(**inputs)
        if self.num_calls == 4:
            self.flags = dict(vars(self.args))
            self.graph = torch.cuda.CUDAGraph()
            self.inputs = {name: x.clone() for name, x in inputs.items()}
            stream = torch.cuda.current_stream()
            # thread_local: NCCL's watchdog may make CUDA calls meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = self.function(**self.inputs)
        for name, old in self.flags.items():
            if (new := getattr(self.args, name)) != old:
                change = f"{name} changed from {old} to {new} after a CUDA graph was captured"
                raise RuntimeError(f"{change}: pass it in the minibatch, or --no-cuda-graphs")
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.outputs.items()}  # a replay overwrites them


def average_grads(params: list[nn.Parameter]) -> None:
    if NUM_RANKS > 1:
        mean = torch.cat([x.grad.flatten() for x in params])
        dist.all_reduce(mean)
        mean /= NUM_RANKS
        for x, part in zip(params, mean.split([x.numel() for x in params]), strict=True):
            x.grad.copy_(part.view_as(x))


def all_ranks(x) -> list:
    """Every rank's x, on every rank."""
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(everyone, x)
    return everyone


def mean_stats(updates: list[dict], prefix: str) -> dict:
    """Means over updates and ranks. One that is not finite ends the run."""
    means = {}
    for name in dict.fromkeys(name for stats in updates for name in stats):
        mean = torch.stack([stats[name] for stats in updates if name in stats]).mean()
        means[prefix + name] = float(np.mean(all_ranks(mean.item())))  # waits for the GPU
        if not math.isfinite(means[prefix + name]):
            sys.exit(f"{prefix}{name} is {means[prefix + name]}: the run ends")
    return means


# ---- 7 Records, checkpoints, command line ----
class Logger:
    def __init__(self, args: Args, rows: list[dict]) -> None:
        self.rows = rows
        last = rows[-1] if rows else {"global_step": 0, "wall_time": 0.0}
        self.start = time.monotonic() - last["wall_time"]
        self.wandb = None
        if args.track:
            import wandb

            signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # W&B sends its last rows
            where = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            where.update(name=Path(args.run_dir).name, dir=args.run_dir)
            self.wandb = wandb.init(resume="auto", config=vars(args), **where)
        self.tensorboard = SummaryWriter(args.run_dir, purge_step=last["global_step"] + 1)

    def log(self, row: dict) -> None:
        """row: numbers by name, which are left out if not finite."""
        step = row["global_step"]
        row["wall_time"] = time.monotonic() - self.start
        row["charts/SPS"] = step / row["wall_time"]
        progress = f"return {row['charts/mean_return_100']:.2f}, SPS {row['charts/SPS']:.0f}"
        print(f"step {step:,}: {progress}", flush=True)
        row = {name: x for name, x in row.items() if math.isfinite(x)}
        row = {name: x if isinstance(x, int) else float(x) for name, x in row.items()}
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, step)
        self.tensorboard.flush()
        if self.wandb:
            self.wandb.log(row, step=step)
        self.rows.append(row)


@contextlib.contextmanager
def whole_file(path: Path, mode: str = "w+b") -> Iterator[IO]:
    """A file to write, which gets its name when it is complete."""
    with open(path.with_name(f"{path.name}.tmp"), mode) as file:
        yield file
        file.flush()
        os.fsync(file)
    os.replace(file.name, path)


def save_checkpoint(args: Args, state: dict, shared: dict, rank_state: dict) -> None:
    """On a CPU, a resumed run continues bit for bit. state: iteration and rows. shared: objects
    with a state_dict, the same on all ranks. rank_state: what differs by rank."""
    rank_state["rng"] = torch.get_rng_state()
    rank_state["cuda_rng"] = torch.cuda.get_rng_state() if args.device != "cpu" else None
    state["ranks"] = all_ranks(rank_state)
    if RANK > 0:
        return
    state.update({name: part.state_dict() for name, part in shared.items()})
    folder = Path(args.run_dir)
    with whole_file(folder / "metrics.csv", "w") as file:
        columns = list(dict.fromkeys(name for row in state["rows"] for name in row))
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(state["rows"])
    with whole_file(folder / "agent.pt") as file:
        torch.save({name: x.cpu() for name, x in state["agent"].items()}, file)
    with whole_file(folder / "checkpoint.pt") as file:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)  # else only --resume would fail


def restore_checkpoint(args: Args, state: dict, shared: dict) -> dict:
    """Restore all but rank_state, and return it."""
    for name, part in shared.items():
        if isinstance(part, torch.optim.Optimizer):  # lr and capturable belong to this device
            state[name]["param_groups"] = part.state_dict()["param_groups"]
        part.load_state_dict(state[name])
    rank_state = state["ranks"][RANK]
    torch.set_rng_state(rank_state["rng"])
    if args.device != "cpu" and rank_state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(rank_state["cuda_rng"])
    return rank_state


def settle(args: Args) -> None:
    """Check the arguments, derive others."""
    counts = ["num_envs", "num_steps", "num_minibatches", "update_epochs"]
    for name in [*counts, "checkpoint_interval"]:
        require(getattr(args, name) > 0, f"{name} must be at least 1")
    for name in ["start_level", "num_levels", "chunk_size"]:
        require(getattr(args, name) >= 0, f"{name} cannot be negative")
    end = NUM_LEVELS // NUM_RANKS
    require(0 <= args.seed < end, f"seed must be from 0 to {end - 1}")
    require(args.num_levels > 0 or args.start_level == 0, "start_level needs num_levels")
    require(args.start_level + args.num_levels <= NUM_LEVELS, f"levels end at {NUM_LEVELS}")
    on_gpu = args.cuda and torch.cuda.is_available()
    args.device = f"cuda:{LOCAL_RANK}" if on_gpu else "cpu"
    args.num_ranks = NUM_RANKS
    args.batch_size = args.num_envs * args.num_steps
    samples = args.batch_size * NUM_RANKS
    args.num_iterations = args.total_timesteps // samples
    require(args.num_iterations > 0, f"total_timesteps must be at least {samples}")
    remainder = args.batch_size % args.num_minibatches
    require(remainder == 0, f"num_minibatches must divide {args.batch_size} samples")
    name = f"{args.env_id}__{args.exp_name}__{args.seed}"
    args.run_dir = args.run_dir or time.strftime(f"runs/{name}__%Y%m%d-%H%M%S")
    args.max_chunk = args.chunk_size or (16_384 if on_gpu else 512)
    args.num_env_threads = args.env_threads
    if args.env_threads < 0:
        num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        num_cores //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        args.num_env_threads = 0 if num_cores <= 2 else min(12, num_cores * 3 // 4)


MAY_CHANGE = {  # what --resume may change
    "cuda", "compile", "cuda_graphs", "tf32", "env_threads", "chunk_size", "track",
    "checkpoint_interval", "eval_interval", "wandb_project_name", "wandb_entity",
}  # fmt: skip


def parse_args() -> Args:
    """The command line's arguments, or those of the resumed run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    run_dir = parser.parse_known_args()[0].resume
    if run_dir is None:
        return tyro.cli(Args, description=__doc__.split("\n")[0])
    record = Path(run_dir, "args.json")
    require(record.exists(), f"--resume: {run_dir!r} is not a run folder")
    script = Path(run_dir, Path(__file__).name)
    is_same = script.exists() and script.read_bytes() == Path(__file__).read_bytes()
    require(is_same, f"not the script of {run_dir}: run the one in it, or put yours in its place")
    saved = json.loads(record.read_text())["args"] | {"resume": run_dir, "run_dir": run_dir}
    flags = {x.name: saved[x.name] for x in fields(Args) if x.name in saved}
    args = tyro.cli(Args, default=Args(**flags))
    changed = {x for x in [*flags, "num_ranks"] if getattr(args, x) != saved[x]} - MAY_CHANGE
    require(not changed, f"these settings of the run cannot change: {', '.join(sorted(changed))}")
    return args


def open_run(args: Args) -> TextIO:
    """Make or reopen the run folder. Returns a file that locks it while open."""
    folder = Path(args.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{folder} is in use by another process")
    except OSError as error:
        sys.exit(f"{folder}: {error}: try another --run-dir or the mount option flock")
    if args.resume is None:
        leftovers = {"lock", Path(__file__).name, "args.json.tmp"}  # of a start that was killed
        require({x.name for x in folder.iterdir()} <= leftovers, f"{folder} is not empty")
        (folder / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
        git = "git -c 'safe.directory=*' describe --always --dirty --abbrev=40 '--exclude=*'"
        where = Path(__file__).resolve().parent
        result = subprocess.run(git, shell=True, cwd=where, capture_output=True, text=True)
        about = {"args": vars(args), "command": shlex.join(sys.orig_argv)}
        about.update(commit=result.stdout.strip(), date=time.strftime("%FT%T%z"))
        about.update(python=sys.version, torch=torch.__version__)
        about["gpu"] = torch.cuda.get_device_name() if args.device != "cpu" else None
        with whole_file(folder / "args.json", "w") as file:
            json.dump(about, file, indent=2)
    return lock


def main(args: Args) -> None:
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # rank 0 speaks for all
    with open_run(args) if RANK == 0 else contextlib.nullcontext():
        state = {"iteration": 0, "rows": []}
        if (checkpoint := Path(args.run_dir, "checkpoint.pt")).exists():
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        print(f"{args.run_dir}: {args.num_iterations} iterations, on {args.device}")
        command = shlex.join([sys.argv[0], "--resume", args.run_dir])
        print("To resume:", "python" if NUM_RANKS == 1 else "torchrun ...", command, flush=True)
        if state["iteration"] < args.num_iterations:
            train(args, state)
    print(f"{args.run_dir} is finished")


if __name__ == "__main__":
    main(parse_args())
