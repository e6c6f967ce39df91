"""Phasic Policy Gradient (Cobbe et al., 2021, https://arxiv.org/abs/2009.04416) on Procgen.

    python ppg_procgen.py --env-id starpilot

In 20 minutes on a CPU, a single network learns one level: mean return 7.5, 7.8, 6.2 (seeds 1 to 3).
    python ppg_procgen.py --num-levels 1 --arch detach --num-envs 16 --num-steps 64 --gamma 0.99 \
        --num-minibatches 4 --n-iteration 4 --e-auxiliary 2 --total-timesteps 65536

PPG trains two networks, one for the policy and one for values, so that neither disturbs the other.
For N_pi iterations, PPG is PPO. Then comes an auxiliary phase: the policy's network learns the
value targets of all these iterations by a second value head, because features that predict values
help the policy. Advantages never come from this head. The value network learns the targets again.
A KL loss holds the policy to pi_old, the policy as the phase begins, not as it was in rollouts.

Each iteration, the policy phase                              in the code
    a rollout: T steps in each of N environments              act (one step)
    advantages Adv and value targets V_targ                   compute_gae
    E_pi epochs on L_clip + c S[pi], E_V epochs on L_value    policy_loss, value_loss
    add observations and targets to the buffer B              store
After N_pi iterations, the auxiliary phase
    pi_old on all of B; E_aux epochs on L_joint + L_value     joint_loss, value_loss
L_value = (V - V_targ)^2 / 2; L_joint = (V_aux - V_targ)^2 / 2 + beta_clone KL[pi_old, pi]

To learn PPG, read sections 2 to 4. S is entropy; M counts samples, A actions. [PPG-k] marks what is
easily missed. With one process, gather and average_grads do nothing.
"""

# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6", "numpy", "tyro>=0.9", "filelock>=3.30", "tensorboard>=2.14", "wandb>=0.18",
#   "gym==0.26.2; python_version < '3.13'", "gym-notices<0.1; python_version < '3.13'",
#   "setuptools<81; python_version < '3.13'",
#   "procgen==0.10.7; python_version < '3.11'", "procgen-gym==0.1.1; python_version >= '3.13'",
#   "procgen-mirror==0.10.7; python_version >= '3.11' and python_version < '3.13'",
# ]
# ///

import csv
import ctypes
import gc
import io
import json
import math
import os
import shutil
import sys
import time
import zlib
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # if torch imports it later, the process group never ends
import torch.nn as nn
import tyro
from filelock import FileLock
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.utils.tensorboard import SummaryWriter

RANK = int(os.environ.get("RANK", 0))  # torchrun starts a process for each GPU
NUM_RANKS = int(os.environ.get("WORLD_SIZE", 1))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
NUM_LEVELS = 2**31 - 1  # Procgen's, counted from 0


# ---- 1 Arguments ----
GAMES = """bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper
    maze miner ninja plunder starpilot""".split()


@dataclass(frozen=True)
class Args:
    env_id: Literal[tuple(GAMES)] = "starpilot"  # Procgen game
    total_timesteps: int = 25_000_000  # environment steps of all ranks
    seed: int = 1  # on a CPU, the same seed and threads give the same bits
    exp_name: str = Path(__file__).stem  # experiment's name
    run_dir: str = ""  # run folder; empty: runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # run folder of an interrupted run to continue
    eval_interval: int = 0  # iterations between evaluations, on unseen levels if any; 0: none
    cuda: bool = True  # use the GPU if there is one
    track: bool = False  # also log to Weights & Biases; where: WANDB_PROJECT, WANDB_ENTITY
    # environments
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty
    num_levels: int = 0  # training levels; 0: all
    start_level: int = 0  # first training level
    num_envs: int = 64  # N: environments of each rank
    env_threads: int = 16  # Procgen's threads; 16 are fast even on two cores
    # policy phase
    num_steps: int = 256  # T: steps of an environment in a rollout
    learning_rate: float = 5e-4  # Adam's, in the policy phase
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of advantage estimation
    reward_gamma: float = 0.99  # RewardNormalizer's discount, as in the authors' code
    num_minibatches: int = 8  # minibatches of an epoch of T * N samples
    e_policy: int = 1  # E_pi: policy epochs of an iteration
    e_value: int = 1  # E_V: value epochs of an iteration
    clip_coef: float = 0.2  # epsilon of the clipped objective; 0: no clipping
    kl_coef: float = 0.0  # beta_pi of a KL penalty; the paper's variant: --clip-coef 0 --kl-coef 1
    ent_coef: float = 0.01  # c: weight of the entropy bonus
    vf_coef: float = 1.0  # weight of L_value, in both phases
    max_grad_norm: float = 0.0  # clip the norm of all gradients together; 0: no clipping
    # dual: two networks; detach: one, L_value trains its value head only; shared: one
    arch: Literal["dual", "detach", "shared"] = "dual"
    # auxiliary phase
    n_iteration: int = 32  # N_pi: iterations per auxiliary phase; 16 or 8 may learn faster early
    e_auxiliary: int = 6  # E_aux: epochs over the N_pi * N rollouts; 0: no auxiliary phase
    aux_learning_rate: float = 5e-4  # Adam's, in the auxiliary phase
    beta_clone: float = 1.0  # weight of KL[pi_old, pi]
    num_aux_rollouts: int = 4  # rollouts of each rank in an auxiliary minibatch
    aux_dtype: Literal["float32", "bfloat16"] = "float32"  # of the encoders; bfloat16: RTX 30 on
    cuda_graphs: bool = False  # replay whole steps on a GPU; takes more memory
    compile: bool = False  # compile encoders for a GPU: a minute or two; needs gcc, Python.h
    chunk_size: int = 1024  # samples in a pass; larger minibatches accumulate gradients
    # not a flag: what a resumed run may change
    may_vary = "run_dir resume cuda compile cuda_graphs env_threads chunk_size eval_interval track"

    @property
    def device(self) -> str:
        return f"cuda:{LOCAL_RANK}" if self.cuda and torch.cuda.is_available() else "cpu"

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // (NUM_RANKS * self.num_envs * self.num_steps)

    @property
    def num_phases(self) -> int:
        return self.num_iterations // self.n_iteration if self.e_auxiliary > 0 else 0


# ---- 2 Networks ----
@torch.no_grad()
def normalized_init(layer, scale):
    """[PPG-1] Rescale the weights of each output unit to an L2 norm of scale. Biases are 0."""
    units = nn.functional.normalize(layer.weight.flatten(1))
    layer.weight.copy_(scale * units.view_as(layer.weight))
    layer.bias.zero_()
    return layer


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        scale = (3 * 2) ** -0.25  # sqrt(1 / sqrt(3 stacks) / sqrt(2 blocks))
        self.conv0 = normalized_init(nn.Conv2d(channels, channels, 3, padding=1), scale)
        self.conv1 = normalized_init(nn.Conv2d(channels, channels, 3, padding=1), scale)

    def forward(self, x):
        return x + self.conv1(self.conv0(x.relu()).relu())


class ImpalaCNN(nn.Module):
    """uint8 images (M, height, width, channels) to features (M, 256)."""

    num_features = 256

    def __init__(self, obs_shape):
        super().__init__()
        height, width, channels = obs_shape
        layers = []
        for in_channels, out_channels in ((channels, 16), (16, 32), (32, 32)):
            conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
            layers += [normalized_init(conv, 1.0), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(out_channels), ResidualBlock(out_channels)]
        self.stacks = nn.Sequential(*layers)
        size = 32 * math.ceil(height / 8) * math.ceil(width / 8)  # each stack halves the image
        self.dense = normalized_init(nn.Linear(size, self.num_features), 1.4)

    def forward(self, obs, bf16=False):
        with torch.autocast(obs.device.type, torch.bfloat16, bf16):
            x = obs.permute(0, 3, 1, 2) / 255.0  # NHWC in memory: channels_last costs no copy
            x = self.stacks(x).relu().flatten(1)
            x = self.dense(x).relu()
        return x.float()  # bfloat16 is too coarse for the heads


class Policy(Categorical):
    """pi(.|o), from logits (M, A). Categorical's own validation and sampling would sync the GPU."""

    def __init__(self, logits: Tensor):
        super().__init__(logits=logits, validate_args=False)

    def sample(self, generator=None):
        """Actions (M,) by the Gumbel-max trick: -log(Exp(1)) is Gumbel noise."""
        gumbel = -torch.empty_like(self.logits).exponential_(generator=generator).log()
        return (self.logits + gumbel).argmax(-1)


class Outputs(NamedTuple):
    pi: Policy  # of M observations
    aux_values: Tensor  # (M,), learned in the auxiliary phase only
    values: Tensor  # (M,)


class Agent(nn.Module):
    """Policy and auxiliary value heads on one encoder. The value head: see Args.arch."""

    def __init__(self, args: Args, envs):
        super().__init__()
        self.arch = args.arch
        obs_shape = envs.single_observation_space.shape
        num_actions = int(envs.single_action_space.n)
        self.policy_encoder = ImpalaCNN(obs_shape)
        self.policy_head = normalized_init(nn.Linear(ImpalaCNN.num_features, num_actions), 0.1)
        self.aux_value_head = normalized_init(nn.Linear(ImpalaCNN.num_features, 1), 0.1)
        if self.arch == "dual":
            self.value_encoder = ImpalaCNN(obs_shape)
        self.value_head = normalized_init(nn.Linear(ImpalaCNN.num_features, 1), 0.1)

    def forward(self, obs: Tensor, bf16: bool = False) -> Outputs:
        """obs: (M, height, width, channels). bf16: the encoders compute in bfloat16."""
        features = self.policy_encoder(obs, bf16)
        if self.arch == "dual":
            value_features = self.value_encoder(obs, bf16)
        elif self.arch == "detach":
            value_features = features.detach()  # in both phases: the authors' code, not the paper
        elif self.arch == "shared":
            value_features = features
        aux_values = self.aux_value_head(features).squeeze(-1)
        values = self.value_head(value_features).squeeze(-1)
        return Outputs(pi=Policy(self.policy_head(features)), aux_values=aux_values, values=values)


# ---- 3 Estimates, losses, gradient step ----
class RewardNormalizer:
    """Divides rewards by the standard deviation, over all rollouts so far, of discounted sums of
    past rewards, R_t = r_t + gamma R_{t-1} within an episode. Clips to [-10, 10]."""

    def __init__(self, args):
        self.gamma = args.reward_gamma
        self.last = torch.zeros(NUM_RANKS * args.num_envs, dtype=torch.float64)  # R_t
        self.number = 1e-4  # of R_t so far, with a weak prior of variance 1
        self.total = 0.0
        self.squares = 1e-4

    def __call__(self, raw_rewards, firsts):
        """raw_rewards: (T, N), firsts: (T + 1, N). Returns (T, N)."""
        sums = []
        for reward, first in zip(gather(raw_rewards), gather(firsts)[:-1], strict=True):
            self.last = reward + self.gamma * (1 - first) * self.last
            sums.append(self.last)
        sums = torch.stack(sums)  # R_t, (T, N)
        self.number += sums.numel()
        self.total += sums.sum()
        self.squares += sums.square().sum()
        variance = self.squares / self.number - (self.total / self.number) ** 2
        return (raw_rewards / (variance + 1e-8).sqrt()).clamp(-10, 10)


def compute_gae(rewards, values, firsts, gamma, gae_lambda):
    """Advantages (T, N) by generalized advantage estimation (Schulman et al., 2016).
    rewards: (T, N). values, firsts: (T + 1, N); firsts[t] is 1 where o_t begins an episode."""
    nonterminal = 1 - firsts[1:]
    deltas = rewards + gamma * values[1:] * nonterminal - values[:-1]
    advantages = torch.empty_like(deltas)
    last_gae = 0.0
    for t in reversed(range(len(rewards))):
        last_gae = deltas[t] + gamma * gae_lambda * nonterminal[t] * last_gae
        advantages[t] = last_gae
    return advantages


# A loss takes the agent, its outputs for a minibatch, and the minibatch itself, tensors (M, ...):
#     policy phase       obs, actions, logprobs, values, advantages (normalized), targets
#     auxiliary phase    obs, targets, old_logits (M, A)
# It returns (loss, statistics to log), all of them means over samples. These do not need agent.
def policy_loss(agent: Agent, args: Args, out: Outputs, mb: dict):
    """-L_clip + beta_pi KL - c S[pi], L_clip = min(r Adv, clip(r, 1 - eps, 1 + eps) Adv).
    r = pi(a|o) / pi(a|o) of the policy that acted."""
    logratio = out.pi.log_prob(mb["actions"]) - mb["logprobs"]
    ratio = logratio.exp()
    epsilon = args.clip_coef or math.inf
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon)
    pg_loss = -torch.min(ratio * mb["advantages"], clipped_ratio * mb["advantages"]).mean()
    kl_k2 = 0.5 * logratio.square().mean()  # the authors' estimate of KL
    pi_loss = pg_loss + args.kl_coef * kl_k2
    entropy = out.pi.entropy().mean()
    stats = {"policy_loss": pi_loss, "entropy": entropy, "approx_kl_k2": kl_k2}
    stats["approx_kl"] = (ratio - 1 - logratio).mean()  # k3 of joschu.net/blog/kl-approx.html
    stats["clipfrac"] = (clipped_ratio != ratio).float().mean()
    return pi_loss - args.ent_coef * entropy, stats


def value_error(values, targets):
    """Half the mean squared error of values (M,), for all losses."""
    assert values.shape == targets.shape, f"values {values.shape}, targets {targets.shape}"
    return 0.5 * (values - targets).square().mean()


def value_loss(agent: Agent, args: Args, out: Outputs, mb: dict):
    """L_value = (V - V_targ)^2 / 2."""
    v_loss = value_error(out.values, mb["targets"])
    return args.vf_coef * v_loss, {"value_loss": v_loss}


def joint_loss(agent: Agent, args: Args, out: Outputs, mb: dict):
    """L_joint = (V_aux - V_targ)^2 / 2 + beta_clone KL[pi_old, pi]."""
    aux_value_loss = value_error(out.aux_values, mb["targets"])
    kl_loss = kl_divergence(Policy(mb["old_logits"]), out.pi).mean()
    stats = {"kl_loss": kl_loss, "aux_value_loss": aux_value_loss}
    return aux_value_loss + args.beta_clone * kl_loss, stats


@torch.no_grad()
def act(agent, obs):
    """One step of the policy. train stores all that it returns, each (N, ...)."""
    out = agent(obs)
    actions = out.pi.sample()
    return {"actions": actions, "logprobs": out.pi.log_prob(actions), "values": out.values}


def gradient_step(agent, args, optimizer, losses: tuple, bf16=False, **minibatch):
    """One optimizer step on the sum of losses. Returns their statistics. minibatch: (M, ...)."""
    optimizer.zero_grad()  # also the gradients of losses that only the other phase has
    stats = {}
    # To save memory: by default, 2048 samples are two chunks, whose gradients add up.
    for mb, share in chunks(minibatch, args.chunk_size):
        out = agent(mb["obs"], bf16)
        total_loss = 0.0
        for loss_fn in losses:
            loss, loss_stats = loss_fn(agent, args, out, mb)
            total_loss = total_loss + loss
            for name, x in loss_stats.items():
                stats[name] = stats.get(name, 0.0) + share * x.detach()
        (share * total_loss).backward()
        del out  # and the activations of outputs that no loss has used
    average_grads(agent)  # over ranks
    max_norm = args.max_grad_norm or math.inf
    stats["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
    optimizer.step()
    return stats


def make_optimizer(agent, lr):
    """[PPG-2] Epsilon is 1e-8, not PPO's 1e-5. Adam skips weights that no loss has used."""
    return torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=True)


# ---- 4 Training loop ----
def train(args: Args, run: "Run"):
    """Algorithm 1 of the paper."""
    T, N, device = args.num_steps, args.num_envs, args.device
    envs, first_obs = make_train_envs(args)
    torch.manual_seed(args.seed)  # all ranks make the same networks
    agent = Agent(args, envs).to(device, memory_format=torch.channels_last)
    if args.compile:
        compile_encoders(agent)
    optimizer = make_optimizer(agent, args.learning_rate)
    value_optimizer = make_optimizer(agent, args.learning_rate)  # used only if E_V is not E_pi
    aux_optimizer = make_optimizer(agent, args.aux_learning_rate)  # [PPG-3] Adam of its own
    episodes = EpisodeStatistics(args)
    reward_normalizer = RewardNormalizer(args)

    # Storage has time first. The next rollout begins with row T of obs and firsts.
    obs = torch.empty((T + 1, *first_obs.shape), dtype=first_obs.dtype, device=device)
    obs[T] = first_obs
    staging = torch.empty_like(first_obs, pin_memory=device != "cpu")
    firsts = torch.ones((T + 1, N))  # 1: o_t begins an episode; environments reset themselves
    raw_rewards = torch.empty((T, N))
    buffer = make_buffer(args, obs=obs[:T], targets=torch.empty((T, N)))  # B: (T, N_pi * N, ...)
    bf16 = args.aux_dtype == "bfloat16"

    # For --resume alone: a resumed run gets back what changes from iteration to iteration.
    shared = {"agent": agent, "episodes": episodes, "reward_normalizer": reward_normalizer}
    shared |= {"adam": optimizer, "value_adam": value_optimizer, "aux_adam": aux_optimizer}
    per_rank = {"envs": envs, "next_obs": obs[T], "firsts": firsts}
    run.restore(shared, per_rank)

    # By default: rollout (256, 64, ...), batch (16384, ...), mb (2048, ...), B (256, 2048, ...)
    for iteration in range(run.iteration + 1, args.num_iterations + 1):
        row = begin_iteration(args, iteration)  # seeds
        phase_ends = iteration % args.n_iteration == 0

        # ==== Policy phase: rollouts under pi ====
        obs[0] = obs[T]
        firsts[0] = firsts[T]
        steps = []
        for t in range(T):
            steps.append(act(agent, obs=obs[t]))  # actions, logprobs, values
            actions = steps[t]["actions"].cpu().numpy()  # waits for the GPU
            next_obs, rewards, terminated, truncated, _ = envs.step(actions)
            staging.copy_(torch.from_numpy(next_obs))
            obs[t + 1].copy_(staging, non_blocking=True)  # done when the next .cpu() returns
            raw_rewards[t] = torch.from_numpy(rewards)
            firsts[t + 1] = torch.from_numpy(terminated | truncated)  # a time limit is an end
        rollout = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        rollout["obs"] = obs[:T]  # a view, which the next rollout overwrites

        # ==== Policy phase: value targets V_targ ====
        with torch.no_grad():
            last_values = agent(obs[T]).values
        values = torch.cat([rollout["values"], last_values.unsqueeze(0)]).cpu()  # (T + 1, N)
        normalized_rewards = reward_normalizer(raw_rewards, firsts)
        advantages = compute_gae(normalized_rewards, values, firsts, args.gamma, args.gae_lambda)
        targets = advantages + values[:-1]
        # [PPG-4] Advantages are normalized over the whole batch, not in each minibatch.
        std, mean = torch.std_mean(gather(advantages), correction=0)
        rollout["advantages"] = ((advantages - mean) / (std + 1e-8)).to(device)
        rollout["targets"] = targets.to(device)
        # Adv = V_targ - V, so this is 1 - Var[V_targ - V] / Var[V_targ].
        row["losses/explained_variance"] = 1 - (std / gather(targets).std(correction=0)) ** 2

        # ==== Policy phase: E_pi epochs on L_clip + c S[pi], E_V epochs on L_value ====
        batch = {name: x.flatten(0, 1) for name, x in rollout.items()}
        if args.e_policy == args.e_value:  # one step on both losses, which in dual share no weights
            epochs = [(optimizer, (policy_loss, value_loss))] * args.e_policy
        else:  # the authors' order, not the paper's: value epochs first, with their own Adam
            epochs = [(value_optimizer, (value_loss,))] * args.e_value
            epochs += [(optimizer, (policy_loss,))] * args.e_policy
        stats = {}
        for opt, losses in epochs:
            sample_inds = torch.randperm(T * N, device=device)
            for mb_inds in sample_inds.view(args.num_minibatches, -1):
                mb = {name: x[mb_inds] for name, x in batch.items()}
                step_stats = gradient_step(agent, args, opt, losses, **mb)
                add_stats(stats, step_stats)
        row.update(episodes.update(raw_rewards, firsts))  # on the CPU, while a GPU updates
        row.update(mean_stats(stats, "losses/"))

        # ==== Policy phase: add all (o_t, V_targ) to B ====
        store(buffer, rollout, (iteration - 1) % args.n_iteration)

        # ==== Auxiliary phase, after every N_pi iterations ====
        if phase_ends and args.e_auxiliary > 0:
            # [PPG-5] pi_old on all of B is the policy as it is now, not the one that acted.
            with torch.no_grad():
                parts = buffer["obs"].flatten(0, 1).split(args.chunk_size)
                old_logits = torch.cat([agent(x.to(device), bf16).pi.logits for x in parts])
            old_logits = old_logits.view(T, args.n_iteration * N, -1).to(buffer["obs"].device)
            aux_batch = buffer | {"old_logits": old_logits}  # (T, N_pi * N, ...)
            stats = {}
            for epoch in range(args.e_auxiliary):  # on L_joint + L_value
                print(f"auxiliary epoch {epoch + 1} of {args.e_auxiliary}", flush=True)
                # [PPG-6] A minibatch holds whole rollouts, not single samples: the authors' choice.
                rollout_inds = torch.randperm(args.n_iteration * N).to(buffer["obs"].device)
                for inds in rollout_inds.view(-1, args.num_aux_rollouts):
                    mb = {k: x[:, inds].flatten(0, 1).to(device) for k, x in aux_batch.items()}
                    losses = (joint_loss, value_loss)
                    step_stats = gradient_step(agent, args, aux_optimizer, losses, bf16, **mb)
                    add_stats(stats, step_stats)
            row.update(mean_stats(stats, "losses/aux/"))

        # ==== Evaluate, log, save ====
        is_last = iteration == args.num_iterations
        if RANK == 0 and args.eval_interval and (is_last or iteration % args.eval_interval == 0):
            print("evaluating until each environment has ended an episode", flush=True)
            row["eval/test_return"] = evaluate(agent, make_eval_envs(args), args.seed).mean()
        run.log(row)
        if is_last or phase_ends:  # between phases: B need not be saved
            run.save(iteration)


# ---- How to change it ----
# A loss is f(agent, args, out, mb), a mean over samples. Name it in its phase's tuples.
# This one clips values as PPO2 does, only in the policy phase, as B has no values.
#     def clipped_value_loss(agent, args, out, mb):
#         change = (out.values - mb["values"]).clamp(-0.2, 0.2)
#         errors = (out.values - mb["targets"]).square()
#         clipped_errors = (mb["values"] + change - mb["targets"]).square()
#         v_loss = 0.5 * torch.max(errors, clipped_errors).mean()
#         return args.vf_coef * v_loss, {"value_loss": v_loss}
# Make a loss's numbers and draws in train: tensors in mb, (M, ...) or 0-dim, on device.
# Draws in a loss depend on --chunk-size; CUDA graphs freeze numbers, learning rates too. Schedule:
# optimizer.param_groups[0]["lr"] = minibatch["lr"] in gradient_step, with "lr" in both phases' mb.
# To store more of rollout in B: make_buffer(..., values=torch.empty((T, N))).
# The network is ImpalaCNN, with heads in Agent. Continuous actions: change Policy and num_actions.
# An environment of gymnasium: change env_id, make_envs, check. It must reset itself by SAME_STEP,
# not the default, and have state_dict and load_state_dict: if not, per_rank = {}. At a time
# limit, add gamma V(infos["final_obs"]) to normalized_rewards, not to raw_rewards.
# What changes from iteration to iteration belongs in shared, if all ranks have the same, or in
# per_rank. Change it before run.save, tensors in place (c *= 2): else the old one is saved.
# Ranks that decide differently wait for each other: decide by mean_stats of an epoch's stats.


# ---- 5 Environment, episodes, evaluation: from here on, plumbing ----
class ProcgenVectorEnv:
    """Procgen resets itself. Its time limits are terminations, as in all published results."""

    def __init__(self, num_envs, env_id, **options):
        from gym import spaces
        from procgen import ProcgenGym3Env

        self.games = ProcgenGym3Env(num_envs, env_id, **options)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = spaces.Discrete(15)
        self.state_dict = self.games.get_state
        self.load_state_dict = self.games.set_state
        self.pause = 1e-4 if options["num_threads"] > 1 else 0

    def reset(self, seed=None):
        if not self.games.observe()[2].all():  # some episodes have begun: end them
            self.games.act(np.full(self.num_envs, -1, np.int32))
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions):
        self.games.act(actions)
        time.sleep(self.pause)  # else each game that is done wakes this thread, which is slower
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}


def make_envs(args, seed, start_level, num_levels, **options):
    options |= {"rand_seed": seed, "start_level": start_level, "num_levels": num_levels}
    options |= {"distribution_mode": args.distribution_mode, "num_threads": args.env_threads}
    if sys.version_info < (3, 13):
        return ProcgenVectorEnv(args.num_envs, args.env_id, **options)
    from procgen_gym.env import ProcgenVecEnv  # it has gymnasium's interface

    class Envs(ProcgenVecEnv):
        state_dict = ProcgenVecEnv.get_state
        load_state_dict = ProcgenVecEnv.set_state

        def reset(self, seed=None):  # as above
            if not self._clib.observe()[0].all():
                self.step(np.full(self.num_envs, -1))
            return super().reset()

    return Envs(args.num_envs, args.env_id, **options)


class EpisodeStatistics:
    """Raw returns and lengths of all ranks' episodes, across rollouts."""

    def __init__(self, args):
        self.totals = torch.zeros((2, NUM_RANKS * args.num_envs), dtype=torch.float64)
        self.last_returns = torch.full((100,), math.nan, dtype=torch.float64)

    def update(self, raw_rewards, firsts):
        firsts = gather(firsts)
        finished = []
        for t, rewards in enumerate(gather(raw_rewards)):
            self.totals *= 1 - firsts[t]
            self.totals += torch.stack([rewards, torch.ones_like(rewards)])
            finished.append(self.totals[:, firsts[t + 1] > 0])
        returns, lengths = torch.cat(finished, 1)
        self.last_returns = torch.cat([self.last_returns, returns])[-100:]
        row = {"charts/episodic_return": returns.mean(), "charts/episodic_length": lengths.mean()}
        return row | {"charts/mean_return_100": self.last_returns.nanmean()}


def make_train_envs(args):
    seed = (args.seed * NUM_RANKS + RANK) % NUM_LEVELS  # ranks and seeds share no environment
    envs = make_envs(args, seed, args.start_level, args.num_levels)
    obs, _ = envs.reset(seed=seed * args.num_envs)  # in gymnasium, environment i adds i
    return envs, torch.from_numpy(obs)


def make_eval_envs(args):
    unseen = args.start_level + args.num_levels  # the first level after training's
    return make_envs(args, (-1 - args.seed) % NUM_LEVELS, unseen, NUM_LEVELS - unseen)


@torch.no_grad()
def evaluate(agent, envs, seed):
    generator = torch.Generator(next(agent.parameters()).device).manual_seed(seed)
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset(seed=seed)
    while playing.any():
        pi = agent(torch.from_numpy(obs).to(generator.device)).pi
        obs, rewards, terminated, truncated, _ = envs.step(pi.sample(generator).cpu().numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
    return returns  # raw, of one episode each, (num_envs,)


# ---- 6 Speed, memory, ranks ----
def set_up_device(args):
    if args.device != "cpu":
        torch.cuda.set_device(args.device)
        torch.set_num_threads(1)  # more threads would take the environments' cores
        torch.backends.cudnn.benchmark = True
        if args.cuda_graphs:
            torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    elif sys.platform == "linux":  # keep freed memory: to map it again is slow
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def compile_encoders(agent):
    options = {"force_layout_optimization": True}  # else Inductor gives up channels_last
    for module in agent.children():
        if not isinstance(module, nn.Linear):
            module.compile(fullgraph=True, dynamic=False, options=options)


class CudaGraphs:
    """A function as CUDA graphs: one for each set of fixed arguments and of inputs' names, shapes,
    dtypes. Three calls are plain. The fourth is recorded with its Python numbers, then replayed."""

    def __init__(self, function):
        self.function = function
        self.num_calls = {}
        self.graphs = {}

    def __call__(self, *fixed, **inputs):
        assert not any(isinstance(x, Tensor) for x in fixed), "pass tensors by name"
        key = (fixed, tuple((name, x.shape, x.dtype) for name, x in inputs.items()))
        self.num_calls[key] = self.num_calls.get(key, 0) + 1
        if self.num_calls[key] < 4:
            return self.function(*fixed, **inputs)
        if self.num_calls[key] == 4:
            graph = torch.cuda.CUDAGraph()
            stored = {name: x.clone() for name, x in inputs.items()}
            gc.collect()  # not in the capture, where it may fail
            with torch.cuda.graph(graph, None, torch.cuda.current_stream(), "thread_local"):
                outputs = self.function(*fixed, **stored)
            self.graphs[key] = graph, stored, outputs
        graph, stored, outputs = self.graphs[key]
        for name, x in inputs.items():
            stored[name].copy_(x)
        graph.replay()
        return {name: x.clone() for name, x in outputs.items()}  # the next replay overwrites them


def chunks(minibatch, size):
    """Chunks of a minibatch, with their shares of its samples. 0-dim tensors stay whole."""
    mb_size = len(minibatch["obs"])
    for start in range(0, mb_size, size):
        part = slice(start, start + size)
        chunk = {name: x[part] if x.dim() > 0 else x for name, x in minibatch.items()}
        yield chunk, len(chunk["obs"]) / mb_size


def make_buffer(args, **examples):
    """Tensors (T, N_pi * N, ...) for examples (T, N, ...); none without auxiliary phases."""
    buffer = {}
    if args.num_phases > 0:
        size = args.n_iteration * sum(x.nbytes for x in examples.values())
        fits = args.device != "cpu" and size < torch.cuda.mem_get_info()[0] / 2  # what is free
        device = args.device if fits else "cpu"
        print(f"the buffer B: {size / 1e9:.1f} GB on {device}", flush=True)
        for name, x in examples.items():  # written at once: if memory is missing, it fails now
            shape = (len(x), args.n_iteration * args.num_envs, *x.shape[2:])
            buffer[name] = torch.full(shape, 0, dtype=x.dtype, device=device)
    return buffer


def store(buffer, rollout, i):
    """Put parts of iteration i of a phase, (T, N, ...), into B, (T, N_pi * N, ...)."""
    for name, x in buffer.items():
        assert x.dtype == rollout[name].dtype, f"B has {name} as {x.dtype}"
        part = rollout[name].view(len(x), -1, *x.shape[2:])  # no broadcasting
        N = part.shape[1]
        x[:, i * N : (i + 1) * N] = part


def begin_iteration(args, iteration):
    """Seeds the iteration's draws: a resumed run draws the same. Returns the row to log."""
    seed = hash((args.seed, RANK, iteration)) % 2**32  # ranks draw differently
    torch.manual_seed(seed)
    np.random.seed(seed)
    global_step = iteration * NUM_RANKS * args.num_envs * args.num_steps
    return {"iteration": iteration, "global_step": global_step}


def all_ranks(x):
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(everyone, x)
    return everyone


def gather(x):
    return torch.cat(all_ranks(x), 1)  # (T, N) of each, side by side; one rank: x


def require_equal(name, x):
    torch.save(x, file := io.BytesIO())
    require(len(set(all_ranks(zlib.crc32(file.getvalue())))) == 1, f"{name} differs between ranks")


def average_grads(agent):
    if NUM_RANKS > 1:
        grads = [x.grad for x in agent.parameters() if x.grad is not None]
        mean = torch.cat([x.flatten() for x in grads])
        dist.all_reduce(mean)
        for x, part in zip(grads, mean.split([x.numel() for x in grads]), strict=True):
            x.copy_(part.view_as(x) / NUM_RANKS)


def add_stats(stats, step_stats):
    """Number, sum and first value by name. (Lists of small tensors would fragment memory.)"""
    for name, x in step_stats.items():
        number, total, first = stats.get(name, (0, 0.0, x))
        stats[name] = number + 1, total + x, first


def mean_stats(stats, prefix: str):
    """Means over updates and ranks, and this rank's first KL: about 0, before pi has changed."""
    means = {}
    for name, (number, total, first) in stats.items():
        means[prefix + name] = torch.stack(all_ranks(total.cpu() / number)).mean()
        if name in ("approx_kl", "kl_loss"):
            means[f"{prefix}first_{name}"] = first
    return means


# ---- 7 Run folder, command line ----
class Run:
    def __init__(self, args):
        self.folder = Path(args.run_dir)
        self.begin(args)
        self.saved = {"iteration": 0, "rows": []}
        if (self.folder / "checkpoint.pt").exists():
            self.saved = torch.load(self.folder / "checkpoint.pt", "cpu", weights_only=True)
        self.iteration = self.saved["iteration"]
        self.rows = self.saved["rows"]
        self.start = time.monotonic() - (self.rows[-1]["wall_time"] if self.rows else 0)
        self.columns = []
        if RANK == 0 and args.track:
            import wandb

            where = {"name": self.folder.name, "dir": args.run_dir, "resume": "auto"}
            wandb.init(**where, config=asdict(args), sync_tensorboard=True)
        if RANK == 0:
            step = self.rows[-1]["global_step"] + 1 if self.rows else 0
            self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=step)

    def begin(self, args):
        """Record what the run begins with. What it continues with must be the same."""
        script, record = self.folder / Path(__file__).name, self.folder / "args.json"
        gpu = torch.cuda.get_device_name() if args.device != "cpu" else None
        about = {"args": asdict(args) | {"num_ranks": NUM_RANKS}, "device": gpu or "cpu"}
        about |= {"threads": torch.get_num_threads(), "python": sys.version}
        about["packages"] = {x.name: x.version for x in metadata.distributions()}
        about = json.dumps(about, indent=2).encode()
        mine = Path(__file__).read_bytes()
        is_new = not record.exists()  # first: rank 0 writes it last
        is_same = script.read_bytes() == mine if script.exists() else is_new
        require(is_same, f"{self.folder} has another script: run that, or replace it")
        if record.exists():
            now = json.loads(about)["args"]
            for name, x in json.loads(record.read_text())["args"].items():
                is_same = now.get(name) == x or name in args.may_vary.split()
                require(is_same, f"{name} was {x} when the run began: it cannot change")
        elif RANK == 0:
            for path, content in {script: mine, record: about}.items():
                (self.folder / "tmp").write_bytes(content)
                os.replace(self.folder / "tmp", path)

    def restore(self, shared, per_rank):
        """From now on, save these tensors and objects. In a resumed run, first restore them."""
        self.shared = shared
        self.per_rank = per_rank
        if self.iteration == 0:
            return self.save(0)  # if something cannot be saved, it fails now
        saved = self.saved["shared"] | self.saved["ranks"][RANK]
        for name, x in (shared | per_rank).items():
            set_state(x, saved[name])

    def log(self, row):
        row["wall_time"] = time.monotonic() - self.start
        row["charts/SPS"] = row["global_step"] / row["wall_time"]
        if RANK == 0:
            self.write({name: x if isinstance(x, int) else float(x) for name, x in row.items()})
        is_finite = math.isfinite(sum(row[x] for x in row if x.endswith("grad_norm")))
        require(is_finite, "a gradient is not finite")

    def write(self, row):
        self.rows.append(row)
        is_new = not row.keys() <= set(self.columns)  # a column: write the table anew
        if is_new:
            self.columns = list(dict.fromkeys(name for x in self.rows for name in x))
        path = self.folder / ("tmp" if is_new else "metrics.csv")
        with open(path, "w" if is_new else "a") as file:
            table = csv.DictWriter(file, self.columns, lineterminator="\n")
            if is_new:
                table.writeheader()
            table.writerows(self.rows if is_new else [row])
        os.replace(path, self.folder / "metrics.csv")
        for name, x in row.items():
            self.tensorboard.add_scalar(name, x, row["global_step"])
        self.tensorboard.flush()
        progress = f"return {row['charts/mean_return_100']:.2f}, SPS {row['charts/SPS']:.0f}"
        print(f"step {row['global_step']:,}: {progress}", flush=True)

    def save(self, iteration):
        ranks = all_ranks({name: get_state(x) for name, x in self.per_rank.items()})
        shared = {name: get_state(x) for name, x in self.shared.items()}
        for name, x in shared.items():
            require_equal(name, x)
        if RANK == 0:
            state = {"iteration": iteration, "rows": self.rows, "shared": shared, "ranks": ranks}
            for name, content in {"agent.pt": shared["agent"], "checkpoint.pt": state}.items():
                torch.save(content, self.folder / "tmp")
                os.replace(self.folder / "tmp", self.folder / name)


def get_state(x):
    if isinstance(x, Tensor):
        return x.cpu().clone()
    state = x.state_dict() if hasattr(x, "state_dict") else x.__dict__
    torch.save(state, file := io.BytesIO())  # what cannot be saved or loaded fails now
    return torch.load(io.BytesIO(file.getvalue()), "cpu", weights_only=True)


def set_state(x, state):
    if isinstance(x, Tensor):
        x.copy_(state)
    elif hasattr(x, "load_state_dict"):
        x.load_state_dict(state)
    else:
        x.__dict__.update(state)


def require(condition, message):
    if not condition:
        print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        sys.exit(2)


def check(args):
    require(args.env_id in GAMES, f"env_id must be one of {GAMES}")
    counts = "num_envs num_steps num_minibatches e_policy e_value n_iteration num_aux_rollouts"
    counts += " chunk_size"
    for name, x in asdict(args).items():
        if isinstance(x, int | float):
            low = 1 if name in counts.split() else 0
            high = 1 if name in ("gamma", "gae_lambda", "reward_gamma") else math.inf
            require(math.isfinite(x) and low <= x <= high, f"{name} must be from {low} to {high}")
    require(args.num_levels > 0 or args.start_level == 0, "start_level needs num_levels")
    samples = args.num_envs * args.num_steps
    require(args.num_iterations > 0, f"total_timesteps must be at least {NUM_RANKS * samples}")
    require(samples % args.num_minibatches == 0, f"num_minibatches must divide {samples} samples")
    rollouts = args.n_iteration * args.num_envs if args.num_phases > 0 else 0
    require(rollouts % args.num_aux_rollouts == 0, f"num_aux_rollouts must divide {rollouts}")
    on_gpu = args.device != "cpu"
    asked = args.compile or args.cuda_graphs or (args.cuda and shutil.which("nvidia-smi"))
    require(on_gpu or not asked, "no GPU: see README, or --no-cuda --no-compile --no-cuda-graphs")
    is_old = on_gpu and torch.cuda.get_device_capability(args.device) < (8, 0)
    require(not is_old or args.aux_dtype == "float32", "this GPU has no bfloat16")


def parse_args():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.resume is None:
        return args
    record = Path(args.resume, "args.json")
    require(record.exists(), f"--resume: {args.resume!r} is not a run folder")
    saved = json.loads(record.read_text())["args"] | {"resume": args.resume, "run_dir": args.resume}
    return tyro.cli(Args, default=Args(**{x: saved[x] for x in asdict(args) if x in saved}))


def main(args):
    """Begin a run in its folder, or continue it, if it has begun."""
    global act, gradient_step  # with --cuda-graphs, CUDA graphs of them while it trains
    check(args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    args = replace(args, run_dir=args.resume or args.run_dir or f"runs/{name}")
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    with FileLock(Path(args.run_dir, f"lock{RANK}"), timeout=0, fallback_to_soft=False):
        set_up_device(args)
        run = Run(args)
        plan = f"{args.num_iterations} iterations, {args.num_phases or 'no'} auxiliary phases"
        print(f"{run.folder}: {plan}, {run.iteration} done, on {args.device}", flush=True)
        if NUM_RANKS > 1:
            dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
        same = asdict(args) | {"run_dir": ""}, Path(__file__).read_bytes(), run.iteration
        require_equal("flags, script or iteration", same)
        plain = act, gradient_step
        if args.cuda_graphs:
            act, gradient_step = CudaGraphs(act), CudaGraphs(gradient_step)
        train(args, run)
        act, gradient_step = plain
        if NUM_RANKS > 1:
            dist.destroy_process_group()  # after the CUDA graphs are gone, for which NCCL waits
    print(f"{run.folder} is finished")


if __name__ == "__main__":
    main(parse_args())
