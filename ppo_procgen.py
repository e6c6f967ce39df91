# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6,<2.14", "numpy", "tyro>=0.9", "tqdm>=4.64", "tensorboard>=2.14", "wandb>=0.18",
#   "imageio-ffmpeg", "gym==0.26.2; python_version < '3.13'", "setuptools<81; python_version < '3.13'",
#   "procgen==0.10.7; python_version < '3.11'",
#   "procgen-mirror==0.10.7; python_version >= '3.11' and python_version < '3.13'",
#   "procgen-gym==0.1.1; python_version >= '3.13'",
# ]
# ///
"""Proximal Policy Optimization on Procgen as the Procgen paper ran it (https://arxiv.org/abs/1912.01588), in one file.

    python ppo_procgen.py --env-id starpilot                        # the published setting, 25M steps
    python ppo_procgen.py --env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 \
        --total-timesteps 256                                       # seconds on a CPU: does everything work?

Sections 1 to 4 are the algorithm (arguments, networks, losses, training loop). Look things up in 5 to 9.
Letters: T = num_steps, N = num_envs, B = samples in a minibatch, A = actions. The baseline of ppg_procgen.py, and the
same file where the two agree.
Departures from openai/train-procgen: TF32, where hardware has it (not with --no-tf32); with several ranks, rewards and
advantages are normalised over all of them, not in each.
"""

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import io
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- 1 Arguments -----------------------------------------------------------------------------------------------------
LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of this job on this machine
NUM_CORES = len(os.sched_getaffinity(0)) // LOCAL_WORLD_SIZE  # for each rank
_games = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja"
Game = Literal[tuple(f"{_games} plunder starpilot".split())]


@dataclass
class Args:
    env_id: Game = "starpilot"  # Procgen game
    total_timesteps: int = 25_000_000  # environment steps of the whole run, over all ranks
    seed: int = 1  # seeds torch and procgen; on a CPU, same seed and number of threads: same bits
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    run_dir: str = ""  # run folder (default: runs/{env_id}__{exp_name}__{seed}__{time})
    resume: str = ""  # run folder to continue, with its arguments; total_timesteps may grow, but not with anneal_lr
    checkpoint_interval: int = 32  # iterations between checkpoints
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # on a GPU: compile the networks with torch.compile
    cuda_graphs: bool = True  # on a GPU: run each update and each rollout step as one CUDA graph
    tf32: bool = True  # on a GPU: use TensorFloat-32 for float32 products
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "ppg-procgen"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # evaluation
    eval_interval: int = 0  # iterations between evaluations, on unseen levels if there are any; one at the end; 0: none
    eval_episodes: int = 128  # episodes of an evaluation, one in each of as many environments
    capture_video: bool = False  # record four episodes with each evaluation, or at the end if there is none

    # environment
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"  # kind of levels
    num_levels: int = 0  # number of training levels; 0: all
    start_level: int = 0  # first training level
    num_envs: int = 64  # N: parallel environments, of each rank
    env_threads: int = 0 if NUM_CORES <= 2 else min(12, NUM_CORES * 3 // 4)  # procgen's threads; 0: step in main thread

    # optimisation
    num_steps: int = 256  # T: steps of each environment in a rollout
    learning_rate: float = 5e-4  # Adam's learning rate
    anneal_lr: bool = False  # anneal the learning rate linearly to zero over the whole run
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    reward_gamma: float = 0.99  # discount of the returns whose standard deviation scales the rewards
    num_minibatches: int = 8  # minibatches of an epoch over the N * T samples
    num_grad_accum: int = 0  # chunks per minibatch: same step, less memory; 0: of 512 samples on a CPU, one on a GPU
    update_epochs: int = 3  # epochs over the N * T samples
    clip_coef: float = 0.2  # epsilon of the clipped surrogate objective; 0: no clipping
    ent_coef: float = 0.01  # c: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, half a mean squared error
    clip_vloss: bool = True  # clip the value loss with clip_coef
    max_grad_norm: float = 0.5  # clip the norm of the gradient; 0: no clipping

    # derived
    device: str = field(init=False)
    num_ranks: int = field(init=False)
    batch_size: int = field(init=False)
    num_iterations: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive sizes. UsageError for what cannot run."""
        self.device = f"cuda:{LOCAL_RANK}" if self.cuda and torch.cuda.is_available() else "cpu"
        self.num_ranks, self.batch_size = NUM_RANKS, self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // max(self.batch_size * NUM_RANKS, 1)
        check_args(self)
        unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self.run_dir = self.run_dir or f"runs/{self.env_id}__{self.exp_name}__{self.seed}__{unique}"


# ---- 2 Networks ------------------------------------------------------------------------------------------------------
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
        # max-pooling commutes with adding a bias (to the bit in float32); a compiled backward need not keep conv + bias
        x = F.max_pool2d(F.conv2d(x, self.conv.weight, padding=1), 3, stride=2, ceil_mode=True)  # TensorFlow's padding
        return self.blocks(x + self.conv.bias.to(x.dtype).view(-1, 1, 1))


class ImpalaCNN(nn.Module):
    """uint8 images (B, 64, 64, 3) to features (B, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.Sequential(ConvSequence(3, 16), ConvSequence(16, 32), ConvSequence(32, 32))
        self.dense = nn.Linear(32 * 8 * 8, 256)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = self.stacks(obs.permute(0, 3, 1, 2) / 255.0)  # NHWC in memory, so channels_last costs no copy
        return F.relu(self.dense(F.relu(x).flatten(1)))


class Outputs(NamedTuple):
    """What the agent computes from observations; None for what is not computed."""

    logits: torch.Tensor | None  # (B, A)
    values: torch.Tensor | None  # (B,)


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

    def forward(self, obs: torch.Tensor, value: bool = True) -> Outputs:
        """obs: uint8 (B, 64, 64, 3). Without value, values is None."""
        features = self.encoder(obs)
        return Outputs(self.policy_head(features), self.value_head(features).squeeze(-1) if value else None)


# ---- 3 Losses --------------------------------------------------------------------------------------------------------
def compute_gae(rewards, values, dones, gamma: float, gae_lambda: float) -> torch.Tensor:
    """Advantages (T, N) by generalised advantage estimation (Schulman et al., 2016). rewards: (T, N). values:
    (T + 1, N), the last row is the bootstrap. dones: (T + 1, N), dones[t] is 1 where o_t begins a new episode."""
    advantages, last_gae, nonterminal = torch.empty_like(rewards), torch.zeros_like(rewards[0]), 1 - dones[1:]
    deltas = rewards + gamma * values[1:] * nonterminal - values[:-1]
    for t in reversed(range(len(rewards))):
        advantages[t] = last_gae = deltas[t] + gamma * gae_lambda * nonterminal[t] * last_gae
    return advantages


def policy_phase_loss(agent, args, obs, actions, logprobs, advantages, returns, values):
    """-L_clip - c S[pi] + vf_coef * value loss over a minibatch, and statistics to log. All but agent and args are
    tensors (B, ...): logprobs is log pi_old(a|o), values are the old V(o)."""
    new = agent(obs)
    new_logprobs = new.logits.log_softmax(-1)
    logratio = new_logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - logprobs
    ratio = logratio.exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef) if args.clip_coef > 0 else ratio
    pg_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    stats = {"policy_loss": pg_loss}
    kl_k2 = 0.5 * logratio.square().mean()  # estimate k2 of KL[pi_old, pi], as in the reference code; below: k1, k3
    stats["old_approx_kl"], stats["approx_kl"] = -logratio.mean(), (ratio - 1 - logratio).mean()
    stats["approx_kl_k2"], stats["clipfrac"] = kl_k2, (clipped != ratio).float().mean()
    stats["entropy"] = -(new_logprobs.exp() * new_logprobs).sum(-1).mean()
    loss = stats["policy_loss"] - args.ent_coef * stats["entropy"]
    errors = (new.values - returns).square()
    if args.clip_vloss:
        clipped_values = values + (new.values - values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (clipped_values - returns).square())
    stats["value_loss"] = 0.5 * errors.mean()
    return loss + args.vf_coef * stats["value_loss"], stats


def update(optimizer, loss_fn: Callable, num_chunks: int, max_grad_norm: float, **minibatch: torch.Tensor) -> dict:
    """One optimizer step on loss_fn's mean over the minibatches of all ranks. Runs num_chunks chunks one by one to save
    memory. Returns scalar tensors by name; they stay on the device, so the host need not wait."""
    optimizer.zero_grad()  # (critical!) gradients of an earlier step must not leak into this one
    params, batch_size = optimizer.param_groups[0]["params"], len(minibatch["returns"])
    totals: dict[str, torch.Tensor] = {}
    for chunk in zip(*(tensor.chunk(num_chunks) for tensor in minibatch.values()), strict=True):
        loss, stats = loss_fn(**dict(zip(minibatch, chunk, strict=True)))
        share = len(chunk[0]) / batch_size
        (loss * share).backward()
        totals = {name: totals.get(name, 0) + value.detach() * share for name, value in stats.items()}
    average_grads(params)
    totals["grad_norm"] = nn.utils.clip_grad_norm_(params, max_grad_norm or math.inf)
    optimizer.step()
    return totals | {"weight_norm": nn.utils.get_total_norm([param.detach() for param in params])}


# ---- 4 Training loop -------------------------------------------------------------------------------------------------
def train(args: Args, about: dict, metrics_file, cleanup: contextlib.ExitStack) -> None:
    """The training loop. cleanup: what must be closed when the run ends, however it ends."""
    T, N, num_iterations = args.num_steps, args.num_envs, args.num_iterations
    own = slice(RANK * N, (RANK + 1) * N)  # this rank's columns in arrays of all ranks
    device = torch.device(args.device)
    torch.manual_seed(args.seed)  # all ranks begin with the same weights, then draw their own levels and actions
    rank_seed = int(np.random.SeedSequence([args.seed, RANK]).generate_state(1)[0]) % NUM_LEVELS if RANK else args.seed

    def make_envs(num_envs: int, **options) -> ProcgenVectorEnv:
        levels = {"num_levels": args.num_levels, "start_level": args.start_level, "num_threads": args.env_threads}
        envs = ProcgenVectorEnv(args.env_id, num_envs, args.distribution_mode, **(levels | options))
        return cleanup.enter_context(contextlib.closing(envs))

    def to_device(x: torch.Tensor) -> torch.Tensor:  # from pinned memory: the copy does not wait for the GPU
        return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x

    envs = make_envs(N, seed=rank_seed)
    agent = Agent(envs.num_actions)
    policy_agent, graphed = speed_up(agent, args, device)
    if RANK > 0:
        torch.manual_seed(rank_seed)

    lr = torch.tensor(args.learning_rate, device=device)  # a tensor: a CUDA graph would freeze a Python float
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-5, fused=True, capturable=device.type == "cuda")
    # TensorFlow's Adam: epsilon before the bias correction, so up to 32 times torch's. The learning rate holds the
    # correction, and a step count as after a million steps keeps torch from correcting too
    for param in agent.parameters():
        moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        optimizer.state[param] = {"step": torch.tensor(1e6, device=device)} | moments
    start_ranks(device, cleanup)

    @graphed
    @torch.no_grad()
    def act(obs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = policy_agent(obs)
        actions, logprobs = sample_action(outputs.logits)
        return {"actions": actions, "logprobs": logprobs, "values": outputs.values}

    # The update is one optimizer step on a minibatch, and on a GPU one CUDA graph
    chunk_size = 2**31 if device.type == "cuda" else 512  # larger chunks on a CPU take gigabytes and are no faster
    num_chunks = args.num_grad_accum or math.ceil(args.batch_size / args.num_minibatches / chunk_size)
    joint_loss = partial(policy_phase_loss, policy_agent, args)
    mb_update = graphed(partial(update, optimizer, joint_loss, num_chunks, args.max_grad_norm))

    # Storage, time first
    obs = torch.empty((T, N, *envs.obs_shape), dtype=torch.uint8, device=device)
    actions = torch.empty((T, N), dtype=torch.int64, device=device)
    logprobs, values = torch.empty((T, N), device=device), torch.empty((T + 1, N), device=device)
    rewards, dones = torch.empty((T, N)), torch.empty((T + 1, N))  # on the host; dones[t]: 1 where an episode begins

    # Start, or continue from the checkpoint
    episodes, reward_normalizer = EpisodeStatistics(NUM_RANKS * N), RewardNormalizer(NUM_RANKS * N, args.reward_gamma)
    state = load_checkpoint(Path(args.run_dir) / "checkpoint.pt") if args.resume else None
    start_iteration = state["iteration"] if state else 0
    steps, sizes = NUM_RANKS * args.batch_size, f"{NUM_RANKS} ranks x {N} environments x {T} steps"
    levels = f"{args.env_id} {args.distribution_mode}, {args.num_levels or 'all'} levels"
    say(f"{args.run_dir}: {levels}, seed {args.seed}, on {device}")
    say(f"iterations {start_iteration + 1:,} to {num_iterations:,} of {sizes} = {num_iterations * steps:,} steps")
    logger = Logger(args, metrics_file, state and state["logger"], cleanup)
    parts = {"agent": agent, "episodes": episodes, "rewards": reward_normalizer, "optimizer": optimizer}
    checkpoint = Checkpoint(args, about, device, envs, logger, parts)
    if state:
        checkpoint.restore(state)
    checkpoint.save(start_iteration)  # a run can be resumed from its first second
    evaluator = Evaluator(args, make_envs)
    next_obs, _ = envs.reset()
    next_done = episodes.totals[1, own] == 0  # length 0: an episode begins
    num_updates = start_iteration * args.update_epochs * args.num_minibatches

    for iteration in range(start_iteration + 1, num_iterations + 1):
        clock, stats = [time.time()], {}
        global_step = iteration * steps
        where = f"of iteration {iteration}, step {global_step:,}"
        remaining = 1 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0  # of the whole run

        # Perform rollouts under current policy pi
        for t in range(T):
            obs[t], dones[t] = to_device(torch.from_numpy(next_obs)), next_done
            step = act(obs=obs[t])
            actions[t], logprobs[t], values[t] = step["actions"], step["logprobs"], step["values"]
            next_obs, reward, terminated, truncated, _ = envs.step(actions[t].cpu().numpy())  # waits for the GPU
            rewards[t], next_done = torch.from_numpy(reward), torch.from_numpy(terminated | truncated)
            logger.bar.update(NUM_RANKS * N)
        dones[T] = next_done
        all_rewards, all_dones = torch.cat(gather(rewards), 1), torch.cat(gather(dones), 1)  # of all ranks

        # Compute value function target V_targ for each state s_t
        with torch.no_grad():
            values[T] = policy_agent(to_device(torch.from_numpy(next_obs))).values
        normalized_rewards = to_device(reward_normalizer(all_rewards, all_dones[:-1])[:, own].contiguous())
        advantages = compute_gae(normalized_rewards, values, to_device(dones), args.gamma, args.gae_lambda)
        returns = advantages + values[:-1]
        clock.append(time.time())

        # Optimize L_clip + c S[pi] and the value loss for update_epochs epochs
        batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "advantages": torch.empty_like(advantages)}
        batch = {name: x.flatten(0, 1) for name, x in (batch | {"returns": returns, "values": values[:-1]}).items()}
        for _ in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size, device=device).view(args.num_minibatches, -1)
            # normalise advantages in each minibatch, over all ranks
            mb_advantages = advantages.flatten()[b_inds]  # (num_minibatches, B)
            std, mean = torch.std_mean(torch.cat(gather(mb_advantages.cpu()), 1), 1, correction=0, keepdim=True)
            batch["advantages"][b_inds] = (mb_advantages - mean.to(device)) / (std.to(device) + 1e-8)
            update_stats = []
            for mb_inds in b_inds:
                num_updates += 1
                correction = math.sqrt(1 - 0.999**num_updates) / (1 - 0.9**num_updates)
                optimizer.param_groups[0]["lr"].fill_(remaining * args.learning_rate * correction)
                update_stats.append(mb_update(**{name: x[mb_inds] for name, x in batch.items()}))
            fetch_stats(update_stats, "losses/", f"epoch {where}", stats)
        clock.append(time.time())

        # Log, evaluate, save
        row = {"iteration": iteration, "global_step": global_step}
        row["charts/learning_rate"] = remaining * args.learning_rate
        row |= episodes.update(all_rewards, all_dones[1:]) | {name: float(np.mean(x)) for name, x in stats.items()}
        all_values, all_returns = (torch.cat(gather(x.cpu())) for x in (values[:-1], returns))
        row["losses/explained_variance"] = 1 - ((all_returns - all_values).var() / all_returns.var()).item()
        row |= evaluator(agent, iteration, global_step)
        logger.log(row, [*clock, time.time()])
        finished = iteration == num_iterations
        if finished or iteration % args.checkpoint_interval == 0:
            checkpoint.save(iteration, finished)


# ---- 5 Environment and statistics ------------------------------------------------------------------------------------
NUM_LEVELS = 2**31 - 1  # procgen draws level seeds from 0 to 2**31 - 2
GAMES_WITH_MODE = {  # all games have easy and hard; if a game lacks a mode, procgen ends the process
    "extreme": "chaser dodgeball leaper starpilot".split(),
    "memory": "caveflyer dodgeball heist jumper maze miner".split(),
    "exploration": "caveflyer climber coinrun heist jumper leaper maze ninja".split(),
}


class ProcgenVectorEnv:
    """num_envs environments of one Procgen game: the only part of this file that knows Procgen. Another environment
    must offer the same: uint8 images, discrete actions; same-step autoreset, so the observation after an episode's end
    begins the next one; no final observation, so time limits count as terminations, as in all published results."""

    obs_shape, num_actions = (64, 64, 3), 15

    def __init__(self, env_id, num_envs, mode="easy", num_levels=0, start_level=0, seed=0, num_threads=0, render=False):
        options = {"num_levels": num_levels, "start_level": start_level} if mode != "exploration" else {}
        options |= {"distribution_mode": mode, "rand_seed": seed, "num_threads": num_threads}  # no rand_seed: random
        self.has_gym3 = sys.version_info < (3, 13)  # procgen and its gym3 have no wheels for later Pythons
        with contextlib.redirect_stderr(io.StringIO()):  # procgen imports gym, which prints a notice
            procgen = importlib.import_module("procgen" if self.has_gym3 else "procgen_gym.env")
        make = procgen.ProcgenGym3Env if self.has_gym3 else procgen.ProcgenVecEnv
        self.games = make(num_envs, env_id, render_mode="rgb_array" if render else None, **options)
        self.num_envs, self.close = num_envs, self.games.close

    def reset(self) -> tuple[np.ndarray, dict]:
        """Observations as they are now, uint8 (N, 64, 64, 3): Procgen cannot restart an episode."""
        return (self.games.observe()[1]["rgb"], {}) if self.has_gym3 else self.games.reset()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """Actions (N,) to observations, raw rewards float32 (N,), terminated bool (N,), truncated bool (N,), infos."""
        if not self.has_gym3:
            return self.games.step(actions)
        self.games.act(actions)
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}

    def render(self) -> list[np.ndarray]:
        """uint8 (512, 512, 3) for each environment, as a person would see it."""
        return [info["rgb"] for info in self.games.get_info()] if self.has_gym3 else self.games.render()

    def state_dict(self) -> dict:
        return {"games": [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in self.games.get_state()]}

    def load_state_dict(self, state: dict) -> None:
        self.games.set_state([game.numpy().tobytes() for game in state["games"]])


class EpisodeStatistics(nn.Module):
    """Raw returns and lengths of all finished episodes. A module for its state_dict."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.register_buffer("num_episodes", torch.tensor(0))
        self.register_buffer("last_returns", torch.full((100,), math.nan, dtype=torch.float64))
        self.register_buffer("totals", torch.zeros((2, num_envs), dtype=torch.float64))  # returns, lengths so far

    def update(self, rewards: torch.Tensor, dones: torch.Tensor) -> dict[str, float]:
        """Add a rollout's raw rewards (T, N) and dones (T, N), 1 where the step ended an episode. Return means over the
        episodes that ended in it, and over the last 100; nan if there are none."""
        finished = [torch.empty((2, 0), dtype=torch.float64)]
        for reward, done in zip(rewards, dones.bool(), strict=True):
            self.totals += torch.stack([reward, torch.ones_like(reward)])
            finished.append(self.totals[:, done])
            self.totals[:, done] = 0
        returns, lengths = torch.cat(finished, 1)
        self.num_episodes += len(returns)
        self.last_returns.copy_(torch.cat([self.last_returns, returns])[-100:])
        charts = {"episodic_return": returns, "episodic_length": lengths, "mean_return_100": self.last_returns}
        return {"episodes": self.num_episodes.item()} | {f"charts/{k}": x.nanmean().item() for k, x in charts.items()}


class RewardNormalizer(nn.Module):
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1} over all environments. Step
    by step, as baselines' VecNormalize: it starts small, so the first rewards count for more."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        # number, sum and sum of squares of all R_t, with a prior of variance 1 that counts little
        self.register_buffer("moments", torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64))

    def forward(self, rewards: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Normalise the rewards (T, N) of a rollout, each step by the R_t seen so far; clipped to [-10, 10]. firsts
        (T, N): 1 where o_t begins an episode."""
        normalized = torch.empty_like(rewards)
        for t, (reward, first) in enumerate(zip(rewards, firsts, strict=True)):
            self.returns.mul_(self.gamma).mul_(1 - first).add_(reward)
            self.moments += torch.stack([self.returns**k for k in range(3)]).sum(1)
            number, total, squares = self.moments
            normalized[t] = (reward / (squares / number - (total / number) ** 2 + 1e-8).sqrt()).clamp(-10, 10)
        return normalized


# ---- 6 Speed and ranks -----------------------------------------------------------------------------------------------
# torchrun starts several ranks, each with its own environments and GPU; without it there is rank 0 of 1
_ranks = os.environ.get("RANK", "" if "WORLD_SIZE" in os.environ else "0"), os.environ.get("LOCAL_RANK", "0")
RANK, LOCAL_RANK, NUM_RANKS = (int(x) if x.isdigit() else -1 for x in (*_ranks, os.environ.get("WORLD_SIZE", "1")))


def speed_up(agent: nn.Module, args: Args, device: torch.device) -> tuple[Callable, Callable]:
    """Move the agent to the device, and choose what is fast there; up to rounding nothing else changes. Returns the
    agent, and a decorator that makes a CUDA graph of a function."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        torch.set_num_threads(1)  # OpenMP threads that copy observations would spin on the environments' cores
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    elif platform.libc_ver()[0] == "glibc":  # keep freed memory: mapping it anew costs up to 40 % of the time
        if ctypes.CDLL(None).mallopt(-3, 2**30):  # M_MMAP_THRESHOLD, which old glibc refuses: then leave both alone
            ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    agent.to(device, memory_format=torch.channels_last)
    if device.type == "cuda" and args.compile:
        torch._dynamo.config.cache_size_limit = 64  # one compilation per batch size
        # else Inductor gives up channels_last, because no convolution has more than 64 channels
        agent = torch.compile(agent, fullgraph=True, dynamic=False, options={"force_layout_optimization": True})
    return agent, CudaGraph if device.type == "cuda" and args.cuda_graphs else lambda function: function


class CudaGraph:
    """A CUDA graph of a function of named tensors: captured at call 4, then replayed. Calls 1 to 3 warm up on real
    work, so there is nothing to undo. Shapes, and the tensors that the function changes, must stay the same."""

    def __init__(self, function: Callable) -> None:
        self.function, self.num_calls = function, 0

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls < 4:
            return self.function(**inputs)
        if self.num_calls == 4:
            self.graph, self.inputs = torch.cuda.CUDAGraph(), {name: x.clone() for name, x in inputs.items()}
            # thread_local: NCCL's watchdog thread may make CUDA calls meanwhile
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self.outputs = self.function(**self.inputs)
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.outputs.items()}  # the next replay overwrites them


def sample_action(logits: torch.Tensor, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions (B,) and log-probabilities (B,), by the Gumbel-max trick: torch's Categorical waits for the GPU."""
    logprobs = logits.log_softmax(-1)
    actions = (logprobs - torch.empty_like(logprobs).exponential_(generator=generator).log()).argmax(-1)
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def start_ranks(device: torch.device, cleanup: contextlib.ExitStack) -> None:
    """Join the other ranks. Then SIGINT, SIGTERM and SLURM's SIGUSR1 stop the run, wherever it is: files stay whole."""

    def stop(number: int, _) -> None:
        raise Stopped(f"by {signal.Signals(number).name}", 128 + number)

    def release(error, *_) -> None:  # after an error ignore signals: one would cut off the advice to resume
        for number, handler in old.items():
            signal.signal(number, signal.SIG_IGN if error else handler)

    if NUM_RANKS > 1:  # after Adam: its import of torch._dynamo would keep the group's threads, which abort at exit
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with torchrun, even if that is killed
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # an evaluation keeps the other ranks waiting
        # after an error the traceback still holds CUDA graphs, and destroy_process_group would wait for them
        cleanup.push(lambda error, *_: None if error and device.type == "cuda" else dist.destroy_process_group())
    # after init: rendezvous blocks Python's handlers
    old = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    cleanup.push(release)


def average_grads(params: list[nn.Parameter]) -> None:
    """Average the gradients over all ranks, in one message; every rank gets the same bits."""
    if NUM_RANKS > 1:
        grads = [param.grad for param in params if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        means = (flat / NUM_RANKS).split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [mean.view_as(grad) for mean, grad in zip(means, grads, strict=True)])


def gather(x) -> list:
    """List of all ranks' x, on every rank; pickled, so for small data."""
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(everyone, x)
    return everyone


# ---- 7 Records and checkpoints ---------------------------------------------------------------------------------------
PHASES = ["rollout", "policy_phase", "evaluation"]
COLUMNS = """iteration global_step episodes wall_time
charts/episodic_return charts/episodic_length charts/mean_return_100 charts/SPS charts/learning_rate
losses/value_loss losses/policy_loss losses/entropy losses/old_approx_kl losses/approx_kl losses/approx_kl_k2
losses/clipfrac losses/explained_variance losses/grad_norm losses/weight_norm
time/rollout time/policy_phase time/evaluation
eval/train_return eval/train_stderr eval/test_return eval/test_stderr eval/generalization_gap""".split()


class UsageError(BaseException):  # like Stopped a BaseException: library code may catch and swallow an Exception
    """The request cannot be served: one line, exit code 2."""


class Stopped(BaseException):
    """The run ended early: a reason and an exit code."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def say(text: str, file=None) -> None:
    """Print a line on rank 0. If its reader has gone (| head, a killed tee), go on: the records are in files."""
    try:
        print(text, file=file or sys.stdout, flush=True) if RANK == 0 or file else None
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())


def fetch_stats(updates: list[dict], prefix: str, where: str, stats: dict[str, list]) -> None:
    """Append an epoch's statistics, means over ranks, to stats[prefix + name]. Stopped if one is not finite."""
    table = torch.stack([torch.stack(list(update.values())) for update in updates]).cpu().numpy()  # waits for the GPU
    tables = np.stack(gather(table), -1)  # (num_updates, num_stats, num_ranks)
    for k, column, rank in np.argwhere(~np.isfinite(tables)):
        what = f"{list(updates[k])[column]} is {tables[k, column, rank]} on rank {rank}"
        raise Stopped(f"{what} at update {k + 1} of {len(table)} of the {where}", 1)
    for name, column in zip(updates[0], tables.mean(-1).T, strict=True):
        stats.setdefault(prefix + name, []).extend(column)


class Logger:
    """A row an iteration to metrics.csv, TensorBoard and Weights & Biases; progress to the console. file is None on
    ranks other than 0, which log nothing. state: where a resumed run continues."""

    def __init__(self, args: Args, file, state: dict | None, cleanup: contextlib.ExitStack) -> None:
        new = {"step": 0, "wall_time": 0.0, "wandb_id": os.urandom(8).hex(), "csv": ",".join(COLUMNS) + "\n"}
        self.file, self.state = file, state or new
        self.start_time, step = time.time() - self.state["wall_time"], self.state["step"]
        # disable None: no bar unless stdout is a terminal; smoothing 0: the time left follows the mean speed
        options = {"file": sys.stdout, "smoothing": 0, "unit": "step", "unit_scale": True, "dynamic_ncols": True}
        options |= {"total": args.num_iterations * NUM_RANKS * args.batch_size, "disable": None if file else True}
        self.bar = cleanup.enter_context(tqdm(initial=step, **options))
        if not file:
            return
        if args.track:
            wandb = importlib.import_module("wandb")
            options = {"project": args.wandb_project_name, "entity": args.wandb_entity, "config": asdict(args)}
            options |= {"id": self.state["wandb_id"], "name": Path(args.run_dir).name, "dir": args.run_dir}
            wandb.init(sync_tensorboard=True, save_code=True, resume="allow", **options)
            cleanup.push(lambda error, *_: wandb.finish(exit_code=int(error is not None)))
        file.truncate(0)  # rows after the checkpoint are redone
        file.write(self.state["csv"])
        self.tensorboard = cleanup.enter_context(SummaryWriter(args.run_dir, purge_step=step + 1))

    def log(self, row: dict[str, float], clock: list[float]) -> None:
        """Record an iteration. row: numbers by column, blank if absent or not finite. clock: start, ends of phases."""
        if not self.file:
            return
        step, seconds = row["global_step"], dict(zip(PHASES, np.diff(clock), strict=True))
        row |= {f"time/{name}": x for name, x in seconds.items()} | {"wall_time": clock[-1] - self.start_time}
        row["charts/SPS"] = speed = step / row["wall_time"]
        row = {name: x for name, x in row.items() if math.isfinite(x)}
        line = ",".join(str(row.get(name, "")) for name in COLUMNS) + "\n"
        self.file.write(line)
        self.state |= {"step": step, "wall_time": row["wall_time"], "csv": self.state["csv"] + line}
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, step)
        self.tensorboard.flush()
        text = f"return {row.get('charts/mean_return_100', math.nan):6.2f} | "
        text += ", ".join(f"{name.replace('_', ' ')} {x:.1f}s" for name, x in seconds.items() if x >= 0.05)
        self.bar.set_postfix_str(text)
        if self.bar.disable:
            eta = tqdm.format_interval((self.bar.total - step) / speed)
            say(f"step {step:>11,} {step / self.bar.total:6.1%} | {speed:7,.0f} steps/s | ETA {eta:>8} | {text}")


class Checkpoint:
    """The state of the whole run: a run resumed from it on a CPU gives the bits of one that was never stopped. parts:
    objects with state_dict(), the same on all ranks; environments and random numbers are each rank's own."""

    def __init__(self, args: Args, about: dict, device: torch.device, envs, logger: Logger, parts: dict) -> None:
        self.path, self.about, self.parts = Path(args.run_dir) / "checkpoint.pt", about, parts
        self.envs, self.logger, self.cuda = envs, logger, device if device.type == "cuda" else None

    def save(self, iteration: int, finished: bool = False) -> None:
        rank_state = {"envs": self.envs.state_dict(), "rng": torch.get_rng_state()}
        rank_state["cuda_rng"] = torch.cuda.get_rng_state(self.cuda) if self.cuda else None
        state = {"about": self.about, "iteration": iteration, "finished": finished, "ranks": gather(rank_state)}
        if RANK == 0:
            state |= {name: part.state_dict() for name, part in self.parts.items()} | {"logger": self.logger.state}
            save_atomically(self.path.with_name("agent.pt"), {name: x.cpu() for name, x in state["agent"].items()})
            save_atomically(self.path, state)

    def restore(self, state: dict) -> None:
        """Restore what load_checkpoint() returned."""
        for name, part in self.parts.items():
            if isinstance(part, torch.optim.Optimizer):  # keep lr and capturable, which belong to the device
                state[name]["param_groups"] = part.state_dict()["param_groups"]
            part.load_state_dict(state[name])
        self.envs.load_state_dict(state["ranks"][RANK]["envs"])
        torch.set_rng_state(state["ranks"][RANK]["rng"])
        if self.cuda and (cuda_rng := state["ranks"][RANK]["cuda_rng"]) is not None:
            torch.cuda.set_rng_state(cuda_rng, self.cuda)


def save_atomically(path: Path, state: dict) -> None:
    """torch.save such that a crash or a full disk leaves the whole old file or the whole new one."""
    buffer, temporary = io.BytesIO(), path.with_name(path.name + ".tmp")
    torch.save(state, buffer)  # to a full disk it raises RuntimeError
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict:
    """A checkpoint, on the CPU, without running pickled code. UsageError if it is missing or damaged."""
    try:
        require(path.exists(), f"no checkpoint to resume from: {path}; start the run again, without --resume")
        with zipfile.ZipFile(path) as file:
            require(not file.testzip(), f"{path} is damaged (wrong CRC)")  # torch.load does not compare CRCs
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise almost anything
        raise UsageError(f"{path} is damaged, or no checkpoint ({type(error).__name__})") from None


def open_run(args: Args, about: dict, cleanup: contextlib.ExitStack):
    """Open and lock metrics.csv. UsageError, with nothing written, if it is in use, or a new run's folder not empty."""
    run_dir = Path(args.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        is_usable = args.resume or not any(run_dir.iterdir())
        require(is_usable, f"{run_dir} is not empty: --resume the run in it, remove it, or choose another --run-dir")
        file = cleanup.enter_context(open(run_dir / "metrics.csv", "a", buffering=1, newline=""))  # flushes each line
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it, however the process ends
        if not args.resume:
            (run_dir / Path(__file__).name).write_bytes(Path(__file__).read_bytes())
        (run_dir / "args.json").write_text(json.dumps(about, indent=2) + "\n")
    except OSError as error:
        reason = "another process is writing to it" if isinstance(error, BlockingIOError) else error
        raise UsageError(f"{run_dir} cannot be used: {reason}") from None
    return file


# ---- 8 Evaluation and video ------------------------------------------------------------------------------------------
@torch.no_grad()
def evaluate(agent, envs, seed: int, greedy: bool = False, on_step: Callable = lambda _: None) -> np.ndarray:
    """One raw return per environment, (num_envs,): counting all episodes would favour short ones. Uses its own
    generator. Calls on_step(playing) after each step; playing (num_envs,) is True where the episode goes on."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    returns, playing, (obs, _) = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool), envs.reset()
    while playing.any():
        logits = agent(torch.from_numpy(obs).to(device), value=False).logits
        actions = logits.argmax(-1) if greedy else sample_action(logits, generator)[0]
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        on_step(playing)
    return returns


def record_video(agent: nn.Module, envs, path: Path, seed: int, greedy: bool = False) -> None:
    """Write an mp4 of four rendered envs until each has ended an episode."""

    def add_frame(_) -> None:
        frames = np.stack(envs.render()).reshape(2, 2, 512, 512, 3)
        mp4.send(np.ascontiguousarray(frames.swapaxes(1, 2)))  # (row, y, column, x, RGB)

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # gym3 pins a version whose import warns
            ffmpeg = importlib.import_module("imageio_ffmpeg")
        mp4 = ffmpeg.write_frames(str(path), (1024, 1024), fps=15, ffmpeg_timeout=0)  # 15: as a person plays
        with contextlib.closing(mp4):
            mp4.send(None)
            evaluate(agent, envs, seed, greedy, add_frame)
    except (OSError, ImportError, RuntimeError) as error:  # such as no ffmpeg: must not end the training
        path.unlink(missing_ok=True)
        say(f"no {path}: {error}", sys.stderr)


class Evaluator:
    """Evaluates on the levels above the training levels, or on all; and on the training levels, if these are
    restricted. Its environments last the whole run, because procgen leaks memory when they are closed."""

    def __init__(self, args: Args, make_envs: Callable) -> None:
        self.args, self.envs, seed = args, {}, NUM_LEVELS - args.seed  # other random numbers than in training
        end_level = args.start_level + args.num_levels  # 0: all levels are for training, evaluate on all too
        unseen = {"start_level": end_level, "num_levels": NUM_LEVELS - end_level, "seed": seed}
        if RANK == 0 and args.eval_interval > 0:
            self.envs["test"] = make_envs(args.eval_episodes, **unseen)
            self.envs |= {"train": make_envs(args.eval_episodes, seed=seed)} if args.num_levels > 0 else {}
        if RANK == 0 and args.capture_video:
            self.envs["video"] = make_envs(4, **unseen, render=True)
        self.starts = {split: envs.state_dict() for split, envs in self.envs.items()}

    def __call__(self, agent: nn.Module, iteration: int, step: int) -> dict[str, float]:
        """If an evaluation is due, mean return and standard error of an episode in each environment, by column."""
        row, args = {}, self.args
        due = iteration == args.num_iterations or (args.eval_interval > 0 and iteration % args.eval_interval == 0)
        for split, envs in self.envs.items() if due else ():
            envs.load_state_dict(self.starts[split])  # the same levels every time
            if split == "video":
                record_video(agent, envs, Path(args.run_dir) / f"{step}.mp4", args.seed)
            else:
                returns = evaluate(agent, envs, args.seed)
                row[f"eval/{split}_return"] = returns.mean()
                row[f"eval/{split}_stderr"] = returns.std(ddof=1) / math.sqrt(returns.size)
        if "train" in self.envs and due:
            row["eval/generalization_gap"] = row["eval/train_return"] - row["eval/test_return"]
        return row


# ---- 9 Command line --------------------------------------------------------------------------------------------------
ALGORITHM = "ppo"
MAY_CHANGE = {"cuda", "compile", "cuda_graphs", "env_threads", "num_grad_accum"}
_starter = os.getppid() if dist.is_torchelastic_launched() else "self"  # torchrun, or the Python of this process
LAUNCHER = Path(f"/proc/{_starter}/cmdline").read_text().split("\0")  # below: its words before the script
LAUNCHER = LAUNCHER[: LAUNCHER.index(sys.argv[0])] if sys.argv[0] in LAUNCHER else LAUNCHER[:1]


def check_args(args: Args) -> None:
    """UsageError for what cannot run, before any environment is made."""
    require(0 <= RANK < NUM_RANKS and LOCAL_RANK >= 0, "RANK, LOCAL_RANK and WORLD_SIZE must be as torchrun sets them")
    positive = "total_timesteps checkpoint_interval num_envs num_steps learning_rate num_minibatches update_epochs "
    positive += "eval_episodes"
    limits = {"gamma": 1, "gae_lambda": 1, "reward_gamma": 1, "env_threads": 1024, "total_timesteps": 10**15}
    for name, value in vars(args).items():
        if isinstance(value, float | int):
            low, high = 1e-30 if name in positive.split() else 0, limits.get(name, 2**31 - 1)
            least = "positive" if low else "zero or positive"
            require(low <= value <= high, f"{name} must be {least} and at most {high}, not {value}")
    require(Path(args.exp_name).name == args.exp_name, f"exp_name must be a plain name, not {args.exp_name!r}")
    require(args.start_level + args.num_levels < NUM_LEVELS, f"levels must stay below {NUM_LEVELS}")
    require(args.start_level == 0 or args.num_levels > 0, "start_level needs num_levels: 0 levels are all of them")
    require(args.clip_coef > 0 or not args.clip_vloss, "clip_vloss needs a clip_coef")
    mode, games = args.distribution_mode, GAMES_WITH_MODE.get(args.distribution_mode, [args.env_id])
    require(args.env_id in games, f"{args.env_id} has no {mode} mode; {', '.join(games)} have")
    require(mode != "exploration" or args.num_levels == 0, "exploration mode has a single level of its own")
    size, parts = args.batch_size, args.num_minibatches
    require(size % parts == 0, f"num_minibatches ({parts}) must divide num_envs * num_steps ({size})")
    on_gpu = args.device != "cpu"
    require(not on_gpu or LOCAL_RANK < torch.cuda.device_count(), "there are more ranks than GPUs on this machine")
    require(args.num_iterations > 0, f"total_timesteps is less than an iteration of {size * NUM_RANKS} steps")
    needed = (size * 12288 + args.num_envs * 1e6) / 1e9  # rollouts, environments
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 / LOCAL_WORLD_SIZE
    memory += torch.cuda.get_device_properties(LOCAL_RANK).total_memory / 1e9 if on_gpu else 0
    require(needed < memory, f"rollouts and environments need {needed:,.0f} GB of {memory:,.0f} GB of memory a rank")


def describe(args: Args) -> dict:
    """What one must know about a run: arguments; command, commit, versions and hardware that began it."""
    if args.resume:
        return load_checkpoint(Path(args.run_dir) / "checkpoint.pt")["about"] | {"args": asdict(args)}
    git = "git describe --always --dirty --abbrev=40 '--exclude=*'"
    git = subprocess.run(git, shell=True, cwd=Path(__file__).resolve().parent, capture_output=True, text=True)
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
    gpu = torch.cuda.get_device_name() if args.device != "cpu" else None
    about = {"algorithm": ALGORITHM, "args": asdict(args), "commit": git.stdout.strip(), "versions": versions}
    about |= {"hardware": {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu}}
    return about | {"command": shlex.join([*LAUNCHER, *sys.argv]), "date": time.strftime("%FT%T%z")}


def main(args: Args) -> None:
    """Train. If the run does not finish, say why and how to continue it; exit code 128 + n after signal n, else 1."""
    try:
        with contextlib.ExitStack() as cleanup:
            about = describe(args)
            train(args, about, open_run(args, about, cleanup) if RANK == 0 else None, cleanup)
        return say(f"finished; weights, metrics and checkpoint are in {args.run_dir}")
    except Stopped as stopped:
        reason, code = stopped.args
    except Exception as error:
        reason, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, torch.OutOfMemoryError):
            reason += "; --num-grad-accum 2 (or more) saves GPU memory"
        elif not isinstance(error, OSError):  # such as a full disk, which the message explains
            traceback.print_exc()
    say(f"stopped: {reason}", sys.stderr)
    if RANK == 0 and (Path(args.run_dir) / "checkpoint.pt").exists():
        command = shlex.join([*LAUNCHER, sys.argv[0], "--resume", args.run_dir])
        say(f"the last checkpoint is whole, to continue: {command}", sys.stderr)
    sys.exit(code)


def parse_args() -> Args:
    """Arguments from the command line, or with --resume from the checkpoint, which the flags must not contradict."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    if (resume := parser.parse_known_args()[0].resume) is None:
        return tyro.cli(Args, description=__doc__.split("\n")[0])
    require(resume, "--resume is empty: it needs a run folder")  # such as an unset shell variable
    state, names = load_checkpoint(Path(resume) / "checkpoint.pt"), {x.name for x in fields(Args) if x.init}
    about = state.get("about", {"args": {}})
    is_ours = about.get("algorithm") == ALGORITHM and names <= set(about["args"])
    require(is_ours, f"{resume!r} is no run of this version of {Path(__file__).name}")
    saved, default = about["args"] | {"resume": resume, "run_dir": resume}, Args.__new__(Args)
    vars(default).update(saved)  # unchecked: a flag may replace what this machine lacks
    args = replace(tyro.cli(Args, default=default))  # tyro took the derived fields from its default
    if args.total_timesteps > default.total_timesteps and not args.anneal_lr:
        names.remove("total_timesteps")
    for name in names - MAY_CHANGE | {"num_ranks"}:
        require(getattr(args, name) == saved[name], f"{name} contradicts the checkpoint, which has {saved[name]}")
    if state["finished"] and args.num_iterations == default.num_iterations:
        sys.exit(say(f"{resume} is finished; a larger --total-timesteps extends it"))
    return args


if __name__ == "__main__":
    try:
        main(parse_args())
    except UsageError as error:
        say(f"{Path(__file__).name}: {error}", sys.stderr)
        sys.exit(2)
