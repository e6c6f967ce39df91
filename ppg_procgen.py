# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6,<2.14", "numpy", "tyro>=0.9", "tqdm>=4.64", "tensorboard>=2.14", "wandb>=0.18",
#   "imageio-ffmpeg", "gym==0.26.2; python_version < '3.13'",
#   "setuptools<81; python_version < '3.13'", "procgen==0.10.7; python_version < '3.11'",
#   "procgen-mirror==0.10.7; python_version >= '3.11' and python_version < '3.13'",
#   "procgen-gym==0.1.1; python_version >= '3.13'",
# ]
# ///
"""Phasic Policy Gradient (Cobbe et al., 2021, https://arxiv.org/abs/2009.04416) on Procgen.

    python ppg_procgen.py --env-id starpilot                 # the published setting, 25M steps
    python ppg_procgen.py --env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 \
        --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 256    # smoke test: half a minute

Read sections 1 to 4, the algorithm: arguments, networks, losses, training loop. Sections 5 to 9
are for reference. Letters: T = num_steps, N = num_envs, B = samples in a batch, A = actions.
[PPG-k] marks what PPG does and PPO does not; benchmark/GUIDE.md explains each and names its source.
Departures from openai/phasic-policy-gradient: the auxiliary phase in bfloat16 and the rest in TF32
where the hardware has them (off: --aux-dtype float32 --no-tf32); minibatches of single steps in
the policy phase, not of whole rollouts; 64 environments on easy levels, not 4 x 64 on hard ones.
"""

import contextlib
import csv
import ctypes
import gc
import importlib
import io
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ---- 1 Arguments ---------------------------------------------------------------------------------
Game = Literal[
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
]  # fmt: skip


@dataclass
class Args:
    env_id: Game = "starpilot"  # Procgen game
    total_timesteps: int = 25_000_000  # environment steps of the whole run, over all ranks
    seed: int = 1  # random seed; on a CPU, equal seeds and threads give bit-identical results
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    run_dir: str = ""  # run folder; empty: runs/{env_id}__{exp_name}__{seed}__{time}
    resume: str | None = None  # run folder to resume with its flags; total_timesteps may grow
    checkpoint_interval: int = 4  # iterations between checkpoints
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # on a GPU: compile the networks with torch.compile
    cuda_graphs: bool = True  # on a GPU: run each update and each rollout step as a CUDA graph
    tf32: bool = True  # on a GPU: use TensorFloat-32 for float32 products
    track: bool = False  # also log to Weights & Biases
    wandb_project_name: str = "ppg-procgen"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # evaluation
    eval_interval: int = 0  # iterations between evaluations, plus one at the end; 0: none
    eval_episodes: int = 128  # episodes per evaluation, one per environment
    capture_video: bool = False  # record four episodes at each evaluation and at the end

    # Procgen's difficulty; the last three exist for some games only
    distribution_mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "easy"
    num_levels: int = 0  # number of training levels; 0: all
    start_level: int = 0  # first training level
    num_envs: int = 64  # N: parallel environments of each rank
    env_threads: int = -1  # Procgen's threads; 0: step in the main thread; -1: by cores

    # policy phase
    num_steps: int = 256  # T: steps of each environment in a rollout
    learning_rate: float = 5e-4  # Adam's learning rate
    anneal_lr: bool = False  # anneal the learning rate linearly to zero over the whole run
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    reward_gamma: float = 0.99  # discount of the returns whose deviation scales the rewards
    num_minibatches: int = 8  # minibatches of an epoch over the N * T samples
    num_grad_accum: int = 0  # split minibatches into chunks: same step, less memory; 0: auto
    e_policy: int = 1  # E_pi: policy epochs of an iteration
    e_value: Annotated[int, tyro.conf.arg(aliases=["--v-value"])] = 1  # E_V: value epochs
    clip_coef: float = 0.2  # epsilon of the clipped surrogate objective; 0: no clipping
    kl_coef: float = 0.0  # beta_pi of the paper's KL variant: --clip-coef 0 --kl-coef 1
    ent_coef: float = 0.01  # c: weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the mean squared error (ppo_procgen: of half this error)
    clip_vloss: bool = False  # clip the value loss with clip_coef
    max_grad_norm: float = 0.0  # clip the norm of the gradient; 0: no clipping
    # dual: a network for the policy and one for the value; detach: one network, whose value head
    # reads detached features; shared: one network, nothing detached
    arch: Literal["dual", "detach", "shared"] = "dual"

    # auxiliary phase
    n_iteration: int = 32  # N_pi: policy iterations before an auxiliary phase
    e_auxiliary: int = 6  # E_aux: epochs over the N_pi * N stored rollouts; 0: no auxiliary phase
    aux_learning_rate: float = 5e-4  # Adam's learning rate in the auxiliary phase
    beta_clone: float = 1.0  # weight of the behavioural cloning term KL[pi_old, pi]
    num_aux_rollouts: int = 4  # full rollouts in an auxiliary minibatch of each rank
    num_aux_minibatches: int = 0  # minibatches of an auxiliary epoch; 0: the whole buffer
    # chunks of an auxiliary minibatch, as num_grad_accum
    num_aux_grad_accum: Annotated[int, tyro.conf.arg(aliases=["--n-aux-grad-accum"])] = 0
    aux_interval: int = 1  # run only every k-th auxiliary phase
    single_optimizer: bool = False  # one Adam for both phases, as in CleanRL
    # where the buffer's observations are; auto: on the GPU if they take at most half of its free
    # memory, else in a file in the run folder, which survives a kill
    aux_device: Literal["auto", "cuda", "cpu", "file"] = "auto"
    aux_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 where it is fast

    # derived
    device: str = field(init=False)
    num_ranks: int = field(init=False)
    batch_size: int = field(init=False)
    num_iterations: int = field(init=False)
    num_epochs: int = field(init=False)  # of a policy phase
    num_phases: int = field(init=False)  # auxiliary phases of the whole run

    def __post_init__(self) -> None:
        has_gpu = self.cuda and torch.cuda.is_available()
        self.device = f"cuda:{LOCAL_RANK}" if has_gpu else "cpu"
        self.num_ranks = NUM_RANKS
        self.batch_size = self.num_envs * self.num_steps
        self.num_iterations = self.total_timesteps // max(self.batch_size * NUM_RANKS, 1)
        is_joint = self.e_policy == self.e_value
        self.num_epochs = self.e_policy if is_joint else self.e_policy + self.e_value
        self.num_phases = self.num_iterations // max(self.n_iteration * self.aux_interval, 1)
        if self.e_auxiliary == 0:
            self.num_phases = 0


# ---- 2 Networks ----------------------------------------------------------------------------------
@torch.no_grad()
def normalized_init(layer: nn.Conv2d | nn.Linear, scale: float) -> nn.Conv2d | nn.Linear:  # [PPG-3]
    """Rescale torch's weights: those of each output unit get the L2 norm scale. Zero the biases."""
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
        # Pool before adding the bias: the same result (in float32 to the bit), and a compiled
        # backward pass need not store conv + bias.
        x = F.max_pool2d(F.conv2d(x, self.conv.weight, padding=1), 3, stride=2, padding=1)
        return self.blocks(x + self.conv.bias.to(x.dtype).view(-1, 1, 1))


class ImpalaCNN(nn.Module):
    """uint8 images (B, height, width, channels) to features (B, 256)."""

    num_features = 256

    def __init__(self, obs_shape: tuple[int, int, int] = (64, 64, 3)) -> None:
        super().__init__()
        height, width, channels = obs_shape
        size = 32 * math.ceil(height / 8) * math.ceil(width / 8)  # each stack halves the image
        stacks = (ConvSequence(channels, 16), ConvSequence(16, 32), ConvSequence(32, 32))
        self.stacks = nn.Sequential(*stacks)
        self.dense = normalized_init(nn.Linear(size, self.num_features), 1.4)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = obs.permute(0, 3, 1, 2) / 255.0  # NHWC in memory, so channels_last costs no copy
        x = F.relu(self.stacks(x)).flatten(1)
        return F.relu(self.dense(x))


class Outputs(NamedTuple):
    """The agent's outputs; None for those that were not requested."""

    logits: torch.Tensor | None  # (B, A)
    values: torch.Tensor | None  # (B,)
    aux_values: torch.Tensor | None  # (B,)


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
        """obs: uint8 (B, height, width, channels). policy, value and aux select what is computed:
        logits, values, auxiliary values."""
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
                # (critical!) in both phases: the value loss must never train the shared encoder
                features = features.detach()
            values = self.value_head(features).squeeze(-1)
        return Outputs(logits, values, aux_values)


# ---- 3 Losses ------------------------------------------------------------------------------------
def compute_gae(rewards, values, dones, gamma: float, gae_lambda: float) -> np.ndarray:
    """Advantages (T, N) by generalised advantage estimation (Schulman et al., 2016), in numpy.
    rewards: (T, N). values: (T + 1, N), the last row is the bootstrap. dones: (T + 1, N), dones[t]
    is 1 where o_t begins a new episode."""
    nonterminal = 1 - dones[1:]
    deltas = rewards + gamma * values[1:] * nonterminal - values[:-1]
    advantages = np.empty_like(deltas)
    last_gae = 0.0
    for t in reversed(range(len(rewards))):
        last_gae = deltas[t] + gamma * gae_lambda * nonterminal[t] * last_gae
        advantages[t] = last_gae
    return advantages


# On a GPU the losses run in a CUDA graph, which is captured at call 4: after that, Python code in
# them (print, a counter) does not run, and .item() fails. To debug: --no-cuda-graphs.
def policy_phase_loss(
    agent, args, obs, actions, logprobs, advantages, returns, values, policy=True, value=True
):
    """-L_clip + beta_pi KL - c S[pi] (policy), L_value (value), or their sum over a minibatch, and
    statistics to log. obs to values are tensors (B, ...): logprobs is log pi_old(a|o), values are
    the old V(o)."""
    new = agent(obs, policy=policy, value=value)
    loss = 0.0
    stats = {}
    if policy:
        all_logprobs = new.logits.log_softmax(-1)  # (B, A)
        new_logprobs = all_logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        logratio = new_logprobs - logprobs
        ratio = logratio.exp()
        clipped = ratio
        if args.clip_coef > 0:
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        kl_k2 = 0.5 * logratio.square().mean()  # the reference code's estimate of KL[pi_old, pi]
        stats["policy_loss"] = pg_loss + args.kl_coef * kl_k2
        stats["entropy"] = -(all_logprobs.exp() * all_logprobs).sum(-1).mean()
        stats["old_approx_kl"] = -logratio.mean()  # estimator k1
        stats["approx_kl"] = (ratio - 1 - logratio).mean()  # estimator k3
        stats["approx_kl_k2"] = kl_k2
        stats["clipfrac"] = (clipped != ratio).float().mean()
        loss = stats["policy_loss"] - args.ent_coef * stats["entropy"]
    if value:
        errors = (new.values - returns).square()
        if args.clip_vloss:
            clipped_values = values + (new.values - values).clamp(-args.clip_coef, args.clip_coef)
            errors = torch.max(errors, (clipped_values - returns).square())
        stats["value_loss"] = args.vf_coef * errors.mean()
        loss = loss + stats["value_loss"]
    return loss, stats


def auxiliary_phase_loss(agent, args, obs, old_logprobs, returns):
    """L_joint + L_value over a minibatch of full rollouts, and statistics to log. old_logprobs:
    (B, A), log pi_old(.|o) as the phase began. returns: (B,), the targets of the policy phase."""
    new = agent(obs, aux=True)
    logprobs = new.logits.log_softmax(-1)
    kl_loss = F.kl_div(logprobs, old_logprobs, log_target=True, reduction="batchmean")
    aux_loss = 0.5 * (new.aux_values - returns).square().mean()
    value_loss = 0.5 * (new.values - returns).square().mean()
    loss = aux_loss + args.beta_clone * kl_loss + value_loss
    stats = {"kl_loss": kl_loss, "aux_value_loss": aux_loss, "real_value_loss": value_loss}
    return loss, stats


def update(optimizer, params, loss_fn, num_chunks: int, max_grad_norm: float, **minibatch) -> dict:
    """One optimizer step on loss_fn's mean over the minibatches of all ranks. A minibatch's tensors
    go to loss_fn by name, in num_chunks chunks one after the other to save memory. Returns scalar
    tensors by name, still on the device, so that the host need not wait for them."""
    optimizer.zero_grad()  # (critical!) gradients of an earlier step must not leak into this one
    totals: dict[str, torch.Tensor] = {}
    mb_size = len(minibatch["obs"])
    chunk_size = math.ceil(mb_size / num_chunks)
    for start in range(0, mb_size, chunk_size):
        chunk = {name: x[start : start + chunk_size] for name, x in minibatch.items()}
        loss, stats = loss_fn(**chunk)
        share = len(chunk["obs"]) / mb_size
        (loss * share).backward()
        for name, value in stats.items():
            totals[name] = totals.get(name, 0) + value.detach() * share
    average_grads(params)
    totals["grad_norm"] = nn.utils.clip_grad_norm_(params, max_grad_norm or math.inf)
    optimizer.step()
    totals["weight_norm"] = nn.utils.get_total_norm([param.detach() for param in params])
    return totals


# ---- 4 Training loop -----------------------------------------------------------------------------
def train(args: Args, about: dict, cleanup: contextlib.ExitStack) -> None:
    """Algorithm 1 of the paper. about: what args.json says of the run. cleanup closes what the run
    opens, however it ends."""
    T = args.num_steps
    N = args.num_envs
    device = torch.device(args.device)
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    envs = make_envs(args, cleanup, N, rank_seed(args.seed))
    agent = Agent(args.arch, envs.num_actions, envs.obs_shape)
    aux_agent, graphed = speed_up(agent, args, device)
    params = list(agent.parameters())

    def make_optimizer(learning_rate: float) -> torch.optim.Adam:
        lr = torch.tensor(learning_rate, device=device)  # a CUDA graph would freeze a Python float
        return torch.optim.Adam(params, lr, eps=1e-8, fused=True, capturable=lr.is_cuda)  # [PPG-6]

    optimizer = make_optimizer(args.learning_rate)
    value_optimizer = optimizer
    aux_optimizer = optimizer
    if not args.single_optimizer:
        value_optimizer = make_optimizer(args.learning_rate)  # for E_V != E_pi
        aux_optimizer = make_optimizer(args.aux_learning_rate)  # [PPG-5]
    start_ranks(args, cleanup)
    about = gather_objects(about)[0]  # all ranks use rank 0's run folder

    @graphed  # as the losses: on a GPU, Python code in act soon does not run any more
    @torch.no_grad()
    def act(*, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = agent(obs, value=args.arch != "dual")
        actions, logprobs = sample_action(outputs.logits)
        step = {"actions": actions, "logprobs": logprobs}
        if args.arch != "dual":
            step["values"] = outputs.values  # of the same network: they cost nothing
        return step

    def make_update(opt, loss_fn: Callable, num_chunks: int = args.num_grad_accum) -> Callable:
        return graphed(partial(update, opt, params, loss_fn, num_chunks, args.max_grad_norm))

    policy_phase = partial(policy_phase_loss, agent, args)
    joint_update = make_update(optimizer, policy_phase)
    value_update = make_update(value_optimizer, partial(policy_phase, policy=False))
    policy_update = make_update(optimizer, partial(policy_phase, value=False))
    auxiliary_phase = partial(auxiliary_phase_loss, aux_agent, args)
    aux_update = make_update(aux_optimizer, auxiliary_phase, args.num_aux_grad_accum)
    pass_size = 512 if device.type == "cpu" else 2048  # observations in a pass without gradient

    # Storage: a rollout, time first; and the paper's buffer B, a row for each environment's rollout
    obs = torch.empty((T, N, *envs.obs_shape), dtype=torch.uint8, device=device)
    actions = torch.empty((T, N), dtype=torch.int64, device=device)
    logprobs = torch.empty((T, N), device=device)
    values = torch.empty((T + 1, N), device=device)
    rewards = torch.empty((T, N)).numpy()  # on the host, in torch's default dtype, as dones
    dones = torch.empty((T + 1, N)).numpy()  # dones[t] is 1 where o_t begins an episode
    pinned_obs = torch.empty(obs.shape[1:], dtype=torch.uint8, pin_memory=device.type == "cuda")
    num_rows = args.n_iteration * N if args.num_phases > 0 else 0
    buffer = Buffer((num_rows, T, *envs.obs_shape), device, about)

    # Start, or continue from the checkpoint
    episodes = EpisodeStatistics(NUM_RANKS * N)
    reward_normalizer = RewardNormalizer(NUM_RANKS * N, args.reward_gamma)
    logger = Logger(args)
    shared = {"agent": agent, "episodes": episodes, "rewards": reward_normalizer, "logger": logger}
    shared.update(optimizer=optimizer, value=value_optimizer, aux=aux_optimizer)
    checkpoint = Checkpoint(about, device, shared, {"envs": envs, "buffer": buffer})
    start_iteration = 0
    next_done = torch.ones(N, dtype=torch.bool)
    aux_phase = None  # progress inside the auxiliary phase, if a run resumes there
    if args.resume:
        start_iteration, next_done, aux_phase = checkpoint.restore(choose_checkpoint(args))
    else:
        checkpoint.save(0, phase_ends=True, next_done=next_done, aux_phase=None)
    logger.open(about, cleanup)
    say(f"auxiliary phases: {args.num_phases:,}, buffer: {buffer.size:,} bytes, {args.aux_device}")
    evaluator = Evaluator(args, cleanup)
    next_obs, _ = envs.reset()

    for iteration in range(start_iteration + 1, args.num_iterations + 1):
        remaining = 1 - (iteration - 1) / args.num_iterations if args.anneal_lr else 1.0
        optimizer.param_groups[0]["lr"].fill_(remaining * args.learning_rate)
        value_optimizer.param_groups[0]["lr"].fill_(remaining * args.learning_rate)
        aux_optimizer.param_groups[0]["lr"].fill_(remaining * args.aux_learning_rate)

        # Policy phase; skipped when a run resumes inside the auxiliary phase that follows
        if aux_phase is None:
            # Perform rollouts under current policy pi
            for t in range(T):
                pinned_obs.copy_(torch.from_numpy(next_obs))
                obs[t].copy_(pinned_obs, non_blocking=True)
                dones[t] = next_done
                step = act(obs=obs[t])
                actions[t] = step["actions"]
                logprobs[t] = step["logprobs"]
                if args.arch != "dual":
                    values[t] = step["values"]
                host_actions = actions[t].cpu().numpy()  # waits for the GPU
                next_obs, rewards[t], terminated, truncated, _ = envs.step(host_actions)
                next_done = torch.from_numpy(terminated | truncated)
                logger.tick("rollout")
            dones[T] = next_done

            # Compute value function target V_targ for each state s_t
            b_obs = obs.flatten(0, 1)  # (T * N, ...)
            with torch.no_grad():
                if args.arch == "dual":  # in large passes, now that the rollout is complete
                    pass_values = [agent(x, policy=False).values for x in b_obs.split(pass_size)]
                    values[:T] = torch.cat(pass_values).view(T, N)
                values[T] = agent(torch.from_numpy(next_obs).to(device), policy=False).values
            old_values = values.cpu().numpy()
            scaled_rewards = reward_normalizer(rewards, dones[:-1])
            advantages = compute_gae(scaled_rewards, old_values, dones, args.gamma, args.gae_lambda)
            returns = advantages + old_values[:-1]
            advantages = standardize(advantages)  # [PPG-4]

            # Optimize L_clip + c S[pi] wrt theta_pi for E_pi epochs, L_value wrt theta_V for E_V
            b_actions = actions.flatten()
            b_logprobs = logprobs.flatten()
            b_advantages = torch.from_numpy(advantages).flatten().to(device)
            b_returns = torch.from_numpy(returns).flatten().to(device)
            b_values = values[:-1].flatten()
            for epoch in range(args.num_epochs):
                mb_update = joint_update
                if args.e_policy != args.e_value:  # value epochs come first
                    mb_update = value_update if epoch < args.e_value else policy_update
                b_inds = torch.randperm(args.batch_size, device=device)
                for mb_inds in b_inds.view(args.num_minibatches, -1):
                    mb_stats = mb_update(
                        obs=b_obs[mb_inds],
                        actions=b_actions[mb_inds],
                        logprobs=b_logprobs[mb_inds],
                        advantages=b_advantages[mb_inds],
                        returns=b_returns[mb_inds],
                        values=b_values[mb_inds],
                    )
                    logger.updates.append(mb_stats)
                logger.fetch_stats("policy_phase", "losses/")
                logger.tick("policy_phase")
            logger.row["charts/learning_rate"] = remaining * args.learning_rate
            logger.row["losses/explained_variance"] = explained_variance(old_values[:-1], returns)
            logger.row.update(episodes.update(rewards, dones[1:]))

            # Add all (s_t, V_targ) to the buffer B
            buffer.add(obs.transpose(0, 1), b_returns.view(T, N).T)

        # Auxiliary phase, after every N_pi iterations [PPG-1]
        phase_ends = args.e_auxiliary > 0 and iteration % args.n_iteration == 0
        if phase_ends and iteration % (args.n_iteration * args.aux_interval) == 0:
            if aux_phase is None:
                # Compute and store current policy pi_old for all states in the buffer (critical!)
                passes = buffer.obs.flatten(0, 1).split(pass_size)
                with torch.no_grad():
                    old_logits = [aux_agent(x.to(device), value=False).logits for x in passes]
                old_logprobs = torch.cat(old_logits).log_softmax(-1).view(num_rows, T, -1)
                aux_phase = {"epoch": 0, "old_logprobs": old_logprobs.cpu()}
            # Optimize L_joint wrt theta_pi and L_value wrt theta_V for E_aux epochs
            old_logprobs = aux_phase["old_logprobs"].to(device)
            for epoch in range(aux_phase["epoch"], args.e_auxiliary):
                aux_phase["epoch"] = epoch
                if buffer.is_file:
                    checkpoint.save(iteration - 1, next_done=next_done, aux_phase=aux_phase)
                aux_inds = torch.randperm(num_rows).view(-1, args.num_aux_rollouts)  # [PPG-2]
                epoch_name = f"auxiliary epoch {epoch + 1} of {args.e_auxiliary}"
                for mb_inds in aux_inds[: args.num_aux_minibatches].tolist():
                    mb_obs = [buffer.obs[i].to(device, non_blocking=True) for i in mb_inds]
                    mb_stats = aux_update(
                        obs=torch.cat(mb_obs),
                        old_logprobs=torch.cat([old_logprobs[i] for i in mb_inds]),
                        returns=torch.cat([buffer.returns[i] for i in mb_inds]),
                    )
                    logger.updates.append(mb_stats)
                    logger.tick("aux_phase", epoch_name, args.num_aux_minibatches)
                logger.fetch_stats("aux_phase", "losses/aux/")
            aux_phase = None
        if phase_ends:
            buffer.num_stored = 0

        # Log, evaluate, save
        logger.row.update(evaluator(agent, iteration))
        logger.log()
        is_due = iteration % args.checkpoint_interval == 0 and buffer.survives_kill()
        if is_due or phase_ends or iteration == args.num_iterations:
            checkpoint.save(iteration, phase_ends, next_done=next_done, aux_phase=None)
    gather_objects(None)  # rank 0 has saved the last checkpoint, so no resume needs the buffer
    buffer.path.unlink(missing_ok=True)


# ---- 5 Environment and statistics ----------------------------------------------------------------
NUM_LEVELS = 2**31 - 1  # procgen draws level seeds from 0 to 2**31 - 2
GAMES_WITH_MODE = {  # all have easy and hard; Procgen aborts the process if a game lacks a mode
    "extreme": ["chaser", "dodgeball", "leaper", "starpilot"],
    "memory": ["caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"],
    "exploration": [
        "caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja",
    ],
}  # fmt: skip


class ProcgenVectorEnv:
    """The only part of this file that knows Procgen. Another environment must offer the same:
    uint8 images, discrete actions, and same-step autoreset (the observation after an episode's end
    begins the next one). Without a final observation, time limits count as terminations, as in all
    published results."""

    obs_shape = (64, 64, 3)
    num_actions = 15

    def __init__(self, env_id: str, num_envs: int, mode: str = "easy", seed: int = 0, **options):
        """options: procgen's num_levels, start_level, num_threads, render_mode."""
        if mode == "exploration":  # has a single level of its own
            options = {name: x for name, x in options.items() if "level" not in name}
        self.has_gym3 = sys.version_info < (3, 13)  # gym3 has no wheels for later Pythons
        with contextlib.redirect_stderr(io.StringIO()):  # importing gym prints a notice
            procgen = importlib.import_module("procgen" if self.has_gym3 else "procgen_gym.env")
        make = procgen.ProcgenGym3Env if self.has_gym3 else procgen.ProcgenVecEnv
        self.games = make(num_envs, env_id, distribution_mode=mode, rand_seed=seed, **options)
        self.num_envs = num_envs
        self.close = self.games.close

    def reset(self) -> tuple[np.ndarray, dict]:
        """The current observations, uint8 (N, 64, 64, 3): Procgen cannot restart an episode."""
        if not self.has_gym3:
            return self.games.reset()
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions: np.ndarray) -> tuple:
        """Actions (N,) to gymnasium's five: observations, raw rewards float32 (N,), terminated bool
        (N,), truncated bool (N,), infos."""
        if not self.has_gym3:
            return self.games.step(actions)
        self.games.act(actions)
        rewards, obs, first = self.games.observe()
        return obs["rgb"], rewards, first, np.zeros_like(first), {}

    def render(self) -> list[np.ndarray]:
        """uint8 (512, 512, 3) for each environment, as a person would see it."""
        if not self.has_gym3:
            return self.games.render()
        return [info["rgb"] for info in self.games.get_info()]

    def state_dict(self) -> dict:
        states = self.games.get_state()
        return {"games": [torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in states]}

    def load_state_dict(self, state: dict) -> None:
        self.games.set_state([game.numpy().tobytes() for game in state["games"]])


def make_envs(args: Args, cleanup, num_envs: int, seed: int, **options) -> ProcgenVectorEnv:
    """Environments as the flags describe them; options override the flags."""
    levels = {"num_levels": args.num_levels, "start_level": args.start_level}
    options = {**levels, "num_threads": args.env_threads, **options}
    envs = ProcgenVectorEnv(args.env_id, num_envs, args.distribution_mode, seed, **options)
    cleanup.callback(envs.close)
    return envs


class EpisodeStatistics(nn.Module):  # a module for its state_dict
    """Raw returns and lengths of all finished episodes of all ranks."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self.register_buffer("num_episodes", torch.tensor(0))
        self.register_buffer("last_returns", torch.full((100,), math.nan, dtype=torch.float64))
        # returns and lengths so far
        self.register_buffer("totals", torch.zeros((2, num_envs), dtype=torch.float64))

    def update(self, rewards: np.ndarray, dones: np.ndarray) -> dict[str, float]:
        """Add a rollout's raw rewards (T, N) and dones (T, N), 1 where the step ended an episode.
        Return means over the episodes that ended in it, and over the last 100; nan if none."""
        totals = self.totals.numpy()  # a view
        finished = [np.empty((2, 0))]
        for reward, done in zip(gather(rewards, 1), gather(dones, 1) > 0, strict=True):
            totals += np.stack([reward, np.ones_like(reward)])
            finished.append(totals[:, done])
            totals[:, done] = 0
        returns, lengths = torch.from_numpy(np.concatenate(finished, 1))
        self.num_episodes += len(returns)
        self.last_returns.copy_(torch.cat([self.last_returns, returns])[-100:])
        return {
            "episodes": self.num_episodes.item(),
            "charts/episodic_return": returns.mean().item(),
            "charts/episodic_length": lengths.mean().item(),
            "charts/mean_return_100": self.last_returns.nanmean().item(),
        }


class RewardNormalizer(nn.Module):
    """Divides rewards by the standard deviation of R_t = r_t + gamma (1 - first_t) R_{t-1} over the
    environments of all ranks."""

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("returns", torch.zeros(num_envs, dtype=torch.float64))
        # number, sum and sum of squares of all R_t; begins as a weak prior of variance 1
        self.register_buffer("moments", torch.tensor([1e-4, 0, 1e-4], dtype=torch.float64))

    def forward(self, rewards: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """Add a rollout's R_t to the statistics, then normalise its rewards (T, N); clipped to
        [-10, 10]. firsts (T, N): 1 where o_t begins an episode."""
        returns = self.returns.numpy()  # a view, as the next
        moments = self.moments.numpy()
        for reward, first in zip(gather(rewards, 1), gather(firsts, 1), strict=True):
            returns *= self.gamma
            returns *= 1 - first
            returns += reward
            moments += [returns.size, returns.sum(), np.square(returns).sum()]
        number, total, squares = moments
        variance = squares / number - (total / number) ** 2
        return np.clip(rewards / math.sqrt(variance + 1e-8), -10, 10)


# ---- 6 Speed and ranks ---------------------------------------------------------------------------
def read_rank(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    return int(value) if value.isdecimal() else -1  # check_args refuses -1


# torchrun starts several ranks, each with its own environments and GPU; else this is rank 0 of 1
NUM_RANKS = read_rank("WORLD_SIZE", 1)
RANK = read_rank("RANK", 0 if NUM_RANKS == 1 else -1)
LOCAL_RANK = read_rank("LOCAL_RANK", 0)
LOCAL_WORLD_SIZE = read_rank("LOCAL_WORLD_SIZE", 1)  # ranks on this machine


def rank_seed(seed: int) -> int:
    """A seed of this rank's own; rank 0 has the run's."""
    if RANK == 0:
        return seed
    return int(np.random.SeedSequence([seed, RANK]).generate_state(1)[0]) % NUM_LEVELS


def speed_up(agent: nn.Module, args: Args, device: torch.device) -> tuple[Callable, Callable]:
    """Move the agent to the device and turn on what is fast there: only rounding changes. Return
    the agent for the auxiliary phase, and a decorator that makes CUDA graphs."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
        torch.set_num_threads(1)  # torch's threads would spin on the environments' cores
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = args.tf32
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    elif platform.libc_ver()[0] == "glibc":  # keep freed memory: mapping it again costs up to 40 %
        libc = ctypes.CDLL(None)
        if libc.mallopt(-3, 2**30):  # M_MMAP_THRESHOLD; old versions refuse, then leave both alone
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    agent.to(device, memory_format=torch.channels_last)
    if on_gpu and args.compile:
        torch._dynamo.config.cache_size_limit = 64  # a variant for each phase and batch size
        if torch.__version__ < "2.13":  # its worker processes can hang at exit (pytorch #162199)
            torch._inductor.config.compile_threads = 1
        # else Inductor gives up channels_last, because no convolution has more than 64 channels
        options = {"force_layout_optimization": True}
        for module in agent.modules():
            if isinstance(module, ImpalaCNN):
                module.compile(fullgraph=True, dynamic=False, options=options)

    def aux_agent(obs: torch.Tensor, **heads: bool) -> Outputs:
        # no cache: a CUDA graph would keep the cast of old weights
        bfloat16 = args.aux_dtype == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            outputs = agent(obs, **heads)
        return Outputs(*(x if x is None else x.float() for x in outputs))

    if on_gpu and args.cuda_graphs:
        return aux_agent, CudaGraph
    return aux_agent, lambda function: function


class CudaGraph:
    """A CUDA graph of a function of named tensors: captured at call 4, then replayed. Calls 1 to 3
    warm up on real work, so there is nothing to undo. Shapes, and the tensors that the function
    changes, must stay the same."""

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
            gc.collect()  # a dead graph that is collected during a capture invalidates it
            gc.disable()
            # thread_local: NCCL's watchdog thread may make CUDA calls meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.outputs = self.function(**self.inputs)
            gc.enable()
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        self.graph.replay()
        return {name: x.clone() for name, x in self.outputs.items()}  # a replay overwrites them


def sample_action(logits: torch.Tensor, generator=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions (B,) and log-probabilities (B,), by the Gumbel-max trick: torch's Categorical waits
    for the GPU."""
    logprobs = logits.log_softmax(-1)
    noise = torch.empty_like(logprobs).exponential_(generator=generator).log()
    actions = (logprobs - noise).argmax(-1)
    return actions, logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def handle_signals(handler) -> None:
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):  # SLURM sends the last one
        signal.signal(getattr(signal, name), handler)


def start_ranks(args: Args, cleanup: contextlib.ExitStack) -> None:
    """Join the other ranks. From now on each draws random numbers of its own, and signals stop the
    run, wherever it is."""

    def stop(number: int, _) -> None:
        raise Stopped(f"by {signal.Signals(number).name}", 128 + number)

    def leave(error, *_) -> None:
        if error is None or args.device == "cpu":  # else it would wait for failed CUDA graphs
            dist.destroy_process_group()

    if RANK > 0:
        torch.manual_seed(rank_seed(args.seed))
    if NUM_RANKS > 1:  # after Adam, which imports torch._dynamo: it would keep the group's threads
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with torchrun
        backend = "gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # evaluations take long
        cleanup.push(leave)
    handle_signals(stop)  # after init, which blocks Python's handlers


def average_grads(params: list[nn.Parameter]) -> None:
    """Average the gradients over all ranks, in one message; every rank gets the same bits."""
    if NUM_RANKS > 1:
        grads = [param.grad for param in params if param.grad is not None]
        mean = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(mean)
        mean /= NUM_RANKS
        for grad, part in zip(grads, mean.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def gather_objects(x) -> list:
    """All ranks' x, on every rank; pickled, so for small data."""
    everyone = [x] * NUM_RANKS
    if NUM_RANKS > 1:
        dist.all_gather_object(everyone, x)
    return everyone


def gather(array: np.ndarray, axis: int = 0) -> np.ndarray:
    return np.concatenate(gather_objects(array), axis)


def standardize(advantages: np.ndarray) -> np.ndarray:
    """Give advantages mean 0 and standard deviation 1 over all ranks."""
    std, mean = torch.std_mean(torch.from_numpy(gather(advantages)), correction=0)
    return (advantages - mean.item()) / (std.item() + 1e-8)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var[returns - values] / Var[returns] over all ranks; 1 is perfect, 0 is a constant."""
    all_returns = torch.from_numpy(gather(returns))
    errors = all_returns - torch.from_numpy(gather(values))
    return 1 - (errors.var() / all_returns.var()).item()


# ---- 7 Records and checkpoints -------------------------------------------------------------------
class UsageError(BaseException):  # not an Exception, which library code may catch and swallow
    """Bad input: one line, exit code 2."""


class Stopped(BaseException):
    """The run ended early: a reason and an exit code."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def say(text: str, file=None) -> None:
    """Print a line on rank 0. A closed pipe (| head) does not stop the run: it has its files."""
    if RANK == 0 or file:
        try:
            print(text, file=file or sys.stdout, flush=True)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())


def count_work(args: Args) -> dict[str, tuple[int, int]]:
    """For each phase: ticks in the whole run, and samples per tick."""
    num_aux_updates = args.num_phases * args.e_auxiliary * args.num_aux_minibatches
    return {
        "rollout": (args.num_iterations * args.num_steps, args.num_envs),
        "policy_phase": (args.num_iterations * args.num_epochs, args.batch_size),
        "aux_phase": (num_aux_updates, args.num_aux_rollouts * args.num_steps),
    }


class Logger:
    """Collects the numbers of an iteration and writes them as one row to metrics.csv, TensorBoard
    and Weights & Biases. Shows progress. Only rank 0 writes."""

    def __init__(self, args: Args) -> None:
        self.args = args
        self.work = count_work(args)
        self.rows: list[dict[str, float]] = []
        self.row: dict[str, float] = {}  # the iteration in progress: a number by column
        self.updates: list[dict] = []  # what update returned for each minibatch of an epoch
        self.stats: dict[str, torch.Tensor] = {}  # of the iteration's updates: (num_updates,) each
        self.ticks = Counter()  # by phase, since the run began
        self.seconds = Counter()
        self.row_seconds = Counter()  # since the last row
        self.past_time = 0.0  # seconds of earlier processes of this run
        self.start = self.last_lap = self.last_show = time.monotonic()

    def state_dict(self) -> dict:
        state = {"rows": self.rows, "row": self.row, "stats": self.stats}
        state.update(ticks=dict(self.ticks), seconds=dict(self.seconds))
        state["past_time"] = self.wall_time()
        return state

    def load_state_dict(self, state: dict) -> None:
        self.rows = state["rows"]
        self.row = state["row"]
        self.stats = state["stats"]
        self.ticks.update(state["ticks"])
        self.seconds.update(state["seconds"])
        self.past_time = state["past_time"]

    def wall_time(self) -> float:
        return self.past_time + time.monotonic() - self.start

    def open(self, about: dict, cleanup: contextlib.ExitStack) -> None:
        """Start logging. Drop the rows after the checkpoint: their iterations are done again."""
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed by the caller
        options = {"disable": RANK > 0 or not is_terminal, "file": sys.stdout}
        self.bar = tqdm(total=100, bar_format="{percentage:3.0f}%|{bar:10}| {desc}", **options)
        cleanup.enter_context(self.bar)
        if RANK > 0:
            return
        args = self.args
        run_dir = args.run_dir
        sizes = f"{NUM_RANKS} x {args.num_envs} environments x {args.num_steps} steps"
        last = args.num_iterations
        total = f"{last * args.batch_size * NUM_RANKS:,} steps in all"
        say(f"{run_dir}: {args.env_id} {args.distribution_mode}, seed {args.seed}, {args.device}")
        say(f"iterations {len(self.rows) + 1:,} to {last:,} of {sizes}; {total}")
        self.path = Path(run_dir) / "metrics.csv"
        self.write_table()
        step = self.rows[-1]["global_step"] if self.rows else 0
        threading.excepthook = ignore_full_disk
        self.tensorboard = cleanup.enter_context(SummaryWriter(run_dir, purge_step=step + 1))
        flags = [f"|{name}|{value}|" for name, value in about["args"].items()]
        self.tensorboard.add_text("hyperparameters", "\n".join(["|flag|value|", "|-|-|", *flags]))
        if args.track:
            self.wandb = importlib.import_module("wandb")
            options = {"project": args.wandb_project_name, "entity": args.wandb_entity}
            options.update(name=Path(run_dir).name, dir=run_dir, config=about["args"])
            self.wandb.init(id=about["run_id"], resume="allow", save_code=True, **options)
            self.wandb.define_metric("*", step_metric="global_step")
            cleanup.push(lambda error, *_: self.wandb.finish(exit_code=int(error is not None)))

    def write_table(self) -> None:
        """Write metrics.csv anew, with every column that a row has had."""
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        file = open(self.path, "w", newline="", buffering=1)  # flushes each line
        self.table = csv.DictWriter(file, columns, lineterminator="\n")
        if self.rows:
            self.table.writeheader()
            self.table.writerows(self.rows)

    def fetch_stats(self, phase: str, prefix: str) -> None:
        """Fetch the updates' statistics from the device; means over ranks. Stopped if a number is
        not finite."""
        names = [prefix + name for name in self.updates[0]]
        table = torch.stack([torch.stack(list(stats.values())) for stats in self.updates])
        self.updates = []
        table = table.cpu()  # waits for the GPU
        tables = torch.stack(gather_objects(table), -1)  # (num_updates, num_stats, num_ranks)
        bad = (~tables.isfinite()).nonzero().tolist()
        if bad:
            k, i, rank = bad[0]
            number = f"{names[i]} is {tables[k, i, rank].item()} on rank {rank}"
            where = f"update {k + 1} of {len(tables)} in iteration {len(self.rows) + 1}"
            raise Stopped(f"{number} at {where}", 1)
        for name, column in zip(names, tables.mean(-1).T, strict=True):
            self.stats[name] = torch.cat([self.stats.get(name, column[:0]), column])
        self.lap(phase)

    def log(self) -> None:
        """End an iteration: write its row. Numbers that are not finite stay blank."""
        if any(name.startswith("eval/") for name in self.row):
            self.lap("evaluation")
        iteration = len(self.rows) + 1
        step = iteration * self.args.batch_size * NUM_RANKS
        wall_time = self.wall_time()
        row = {"iteration": iteration, "global_step": step, "wall_time": wall_time}
        row.update({name: float(np.mean(x.numpy())) for name, x in self.stats.items()})
        row.update(self.row)
        row["charts/SPS"] = step / wall_time
        row.update({f"time/{phase}": seconds for phase, seconds in self.row_seconds.items()})
        row = {name: x if math.isfinite(x) else None for name, x in row.items()}
        self.rows.append(row)
        self.row = {}
        self.stats = {}
        self.row_seconds.clear()
        if RANK > 0:
            return
        if self.path.exists() and row.keys() <= set(self.table.fieldnames):
            self.table.writerow(row)
        else:
            self.write_table()
        scalars = {}
        for name, x in row.items():
            if x is not None:
                tag = name if "/" in name else f"charts/{name}"
                scalars[tag] = x
                self.tensorboard.add_scalar(tag, x, step)
        self.tensorboard.flush()
        if self.args.track:
            video = Path(self.args.run_dir) / f"{step}.mp4"
            if video.exists():
                scalars["video"] = self.wandb.Video(str(video))
            self.wandb.log({**scalars, "global_step": step})
        if iteration == 1:
            total = tqdm.format_interval(wall_time + self.time_left())
            self.bar.clear()
            say(f"at this speed the whole run takes {total}")
        self.show()
        self.last_lap = time.monotonic()  # the time for writing belongs to no phase

    def lap(self, phase: str) -> None:
        """Add the seconds since the last lap to a phase."""
        now = time.monotonic()
        self.seconds[phase] += now - self.last_lap
        self.row_seconds[phase] += now - self.last_lap
        self.last_lap = now

    def tick(self, phase: str, epoch_name: str = "", num_minibatches: int = 0) -> None:
        """Count a rollout step, an epoch of the policy phase, or an auxiliary minibatch."""
        self.lap(phase)
        self.ticks[phase] += 1
        if self.last_lap - self.last_show > (60 if self.bar.disable else 0.1):
            where = f"{epoch_name}, minibatch {len(self.updates)} of {num_minibatches}"
            self.show(where if epoch_name else "")

    def time_left(self) -> float:
        """Seconds until the run ends: each phase by its pace so far."""
        left = 0.0
        for phase, (total, samples) in self.work.items():
            pace = self.seconds[phase] / max(self.ticks[phase], 1)
            if not self.ticks[phase]:  # guess: its samples take as long as in the policy phase
                num_samples = max(self.ticks["policy_phase"], 1) * self.args.batch_size
                pace = samples * self.seconds["policy_phase"] / num_samples
            left += pace * (total - self.ticks[phase])
        return left

    def show(self, detail: str = "") -> None:
        """Show progress in the bar, or as a line."""
        elapsed = self.wall_time()
        step = self.ticks["rollout"] * self.args.num_envs * NUM_RANKS
        text = detail or f"step {step:,} | {step / elapsed:,.0f} steps/s"
        if self.rows:
            left = self.time_left()
            self.bar.n = max(self.bar.n, int(100 * elapsed / (elapsed + left)))  # it never falls
            last_return = self.rows[-1]["charts/mean_return_100"]
            text += f" | {tqdm.format_interval(left)} left"
            text += " | no episode yet" if last_return is None else f" | return {last_return:.2f}"
        self.bar.set_description_str(text)
        if self.bar.disable:
            say(f"{self.bar.n:3d}% | {text}")
        self.last_show = time.monotonic()


def ignore_full_disk(problem) -> None:
    """The main thread reports a full disk; TensorBoard's thread need not print a traceback too."""
    if not issubclass(problem.exc_type, OSError):
        threading.__excepthook__(problem)


def save_atomically(path: Path, state: dict) -> None:
    """torch.save such that a crash or a full disk leaves the whole old or the whole new file."""
    temporary = path.with_name(path.name + ".tmp")
    buffer = io.BytesIO()
    torch.save(state, buffer)  # straight into a file on a full disk it raises RuntimeError
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict:
    """A checkpoint, on the CPU, without running pickled code. UsageError if it is missing or
    damaged."""
    require(path.exists(), f"no checkpoint: {path}; start the run again, without --resume")
    try:
        with zipfile.ZipFile(path) as file:
            is_whole = file.testzip() is None  # torch.load does not compare CRCs
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise almost anything
        raise UsageError(f"{path} is damaged, or no checkpoint ({type(error).__name__})") from None
    require(is_whole, f"{path} is damaged (wrong CRC)")
    return state


class Checkpoint:
    """The state of the whole run: a run resumed from it on a CPU gives the bits of one that was
    never stopped. shared: objects with state_dict(), the same on all ranks; own: this rank's."""

    def __init__(self, about: dict, device: torch.device, shared: dict, own: dict) -> None:
        self.about = about
        self.path = Path(about["args"]["run_dir"]) / "checkpoint.pt"
        self.cuda = device if device.type == "cuda" else None
        self.shared = shared
        self.own = own

    def save(self, iteration: int, phase_ends: bool = False, **loop_state) -> None:
        """loop_state: what the training loop needs to go on after the iteration. phase_ends: write
        phase.pt too."""
        own = {name: part.state_dict() for name, part in self.own.items()}
        own.update(loop_state=loop_state, rng=torch.get_rng_state())
        own["cuda_rng"] = torch.cuda.get_rng_state(self.cuda) if self.cuda else None
        state = {"about": self.about, "iteration": iteration, "ranks": gather_objects(own)}
        if RANK > 0:
            return
        for name, part in self.shared.items():
            state[name] = part.state_dict()
        weights = {name: x.cpu() for name, x in state["agent"].items()}
        save_atomically(self.path.with_name("agent.pt"), weights)
        if phase_ends:
            save_atomically(self.path.with_name("phase.pt"), state)
        save_atomically(self.path, state)

    def restore(self, path: Path) -> tuple:
        """Restore a file that save wrote. Return its iteration and the values of loop_state."""
        state = load_checkpoint(path)
        try:
            own = state["ranks"][RANK]
            for name, part in self.shared.items():
                if isinstance(part, torch.optim.Optimizer):  # lr, capturable belong to the device
                    state[name]["param_groups"] = part.state_dict()["param_groups"]
                part.load_state_dict(state[name])
            for name, part in self.own.items():
                part.load_state_dict(own[name])
            torch.set_rng_state(own["rng"])
            if self.cuda and own["cuda_rng"] is not None:
                torch.cuda.set_rng_state(own["cuda_rng"], self.cuda)
            return state["iteration"], *own["loop_state"].values()
        except Exception as error:  # a file that another script wrote can raise almost anything
            raise UsageError(f"{path} does not fit this script: {error!r:.200}") from None


def choose_checkpoint(args: Args) -> Path:
    """The last checkpoint. If the run ended inside a phase and is extended, its buffer is gone:
    then that of the phase's beginning."""
    path = Path(args.run_dir) / "checkpoint.pt"
    state = load_checkpoint(path)
    is_extended = args.num_iterations > state["about"]["args"]["num_iterations"]
    if is_extended and args.e_auxiliary > 0 and state["iteration"] % args.n_iteration > 0:
        return path.with_name("phase.pt")
    return path


class Buffer:
    """The paper's B: a row for each environment's rollout of T steps, with its targets. In a file,
    the observations survive a kill, and the kernel writes them to the disk if memory is short. The
    next phase overwrites them only after a checkpoint that needs them no longer."""

    def __init__(self, shape: tuple, device: torch.device, about: dict) -> None:
        where = about["used"]["aux_device"]  # rank 0's choice, for all ranks
        self.num_stored = 0
        self.returns = torch.empty(shape[:2], device=device)
        self.is_file = where == "file" and shape[0] > 0
        self.path = Path(about["args"]["run_dir"]) / f"buffer_{about['run_id']}_{RANK}.bin"
        self.size = math.prod(shape)  # bytes
        self.is_old = self.path.exists() and self.path.stat().st_size == self.size
        if not self.is_file:
            place = device if where == "cuda" else "cpu"
            is_pinned = device.type == "cuda" and where == "cpu"
            num_bytes = self.size
            if is_pinned:  # torch rounds it up to a power of two
                num_bytes = 2 ** math.ceil(math.log2(self.size + 1))
            if where == "cpu":
                require_memory(num_bytes, "rollouts")
            self.obs = torch.empty(shape, dtype=torch.uint8, device=place, pin_memory=is_pinned)
            return
        try:
            with open(self.path, "ab") as file:  # without space, writing would kill the process
                os.posix_fallocate(file.fileno(), 0, self.size)
        except OSError as error:
            message = f"the buffer needs {self.size / 1e9:.3g} GB in {self.path}: {error.strerror}"
            raise UsageError(f"{message}; --aux-device cpu keeps it in memory") from None
        self.obs = torch.from_file(str(self.path), True, self.size, dtype=torch.uint8).view(shape)

    def add(self, obs: torch.Tensor, returns: torch.Tensor) -> None:
        """Store rollouts (N, T, ...) and their targets (N, T) in the next N rows."""
        if self.size == 0:  # the run has no auxiliary phase
            return
        rows = slice(self.num_stored, self.num_stored + len(obs))
        self.obs[rows].copy_(obs)
        self.returns[rows].copy_(returns)
        self.num_stored = rows.stop

    def survives_kill(self) -> bool:
        return self.is_file or self.num_stored == 0

    def state_dict(self) -> dict:
        if self.is_file:
            with open(self.path, "rb") as file:
                os.fsync(file)
        return {"returns": self.returns[: self.num_stored].cpu()}

    def load_state_dict(self, state: dict) -> None:
        self.num_stored = len(state["returns"])
        self.returns[: self.num_stored] = state["returns"]
        if self.num_stored > 0 and not (self.is_file and self.is_old):
            if not self.is_old:  # else the next attempt would take the new file for the old one
                self.path.unlink(missing_ok=True)
            raise UsageError(f"to resume, this run needs --aux-device file and {self.path}")


# ---- 8 Evaluation and video ----------------------------------------------------------------------
@torch.no_grad()
def evaluate(agent, envs, seed: int, greedy: bool = False, on_step=lambda playing: None):
    """One raw return per environment, (num_envs,): counting all episodes would favour short ones.
    Draws from its own generator. Calls on_step(playing) after each step; playing (num_envs,) is
    True where the episode goes on."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    returns = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset()
    while playing.any():
        logits = agent(torch.from_numpy(obs).to(device), value=False).logits
        actions = logits.argmax(-1) if greedy else sample_action(logits, generator)[0]
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        playing &= ~(terminated | truncated)
        on_step(playing)
    return returns


def record_video(agent: nn.Module, envs, path: Path, seed: int, greedy: bool = False) -> None:
    """Write an mp4 of four rendered environments until each has ended an episode."""

    def add_frame(_) -> None:
        frames = np.stack(envs.render()).reshape(2, 2, 512, 512, 3)
        mp4.send(np.ascontiguousarray(frames.swapaxes(1, 2)))  # (row, y, column, x, RGB)

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # gym3 pins a version whose import warns
            ffmpeg = importlib.import_module("imageio_ffmpeg")
        mp4 = ffmpeg.write_frames(str(path), (1024, 1024), fps=15, ffmpeg_timeout=0)
        with contextlib.closing(mp4):
            mp4.send(None)
            evaluate(agent, envs, seed, greedy, add_frame)
    except (OSError, ImportError, RuntimeError) as error:  # such as no ffmpeg: the training goes on
        path.unlink(missing_ok=True)
        say(f"no {path}: {error}", sys.stderr)


class Evaluator:
    """Evaluates on the levels above the training levels (on all, if all are trained on) and, if
    they are restricted, on the training levels. Its environments last the whole run, because
    procgen leaks memory when they are closed."""

    def __init__(self, args: Args, cleanup: contextlib.ExitStack) -> None:
        self.args = args
        self.envs = {}
        seed = NUM_LEVELS - args.seed  # other random numbers than in training
        end_level = args.start_level + args.num_levels
        unseen = {"start_level": end_level, "num_levels": NUM_LEVELS - end_level}
        if RANK == 0 and args.eval_interval > 0:
            self.envs["test"] = make_envs(args, cleanup, args.eval_episodes, seed, **unseen)
            if args.num_levels > 0:
                self.envs["train"] = make_envs(args, cleanup, args.eval_episodes, seed)
        if RANK == 0 and args.capture_video:
            unseen["render_mode"] = "rgb_array"
            self.envs["video"] = make_envs(args, cleanup, 4, seed, **unseen)
        self.starts = {split: envs.state_dict() for split, envs in self.envs.items()}

    @torch.compiler.set_stance("force_eager")  # its batch sizes are not worth compiling
    def __call__(self, agent: nn.Module, iteration: int) -> dict[str, float]:
        """If an evaluation is due, mean return and standard error over the episodes, by column."""
        args = self.args
        row = {}
        is_due = args.eval_interval > 0 and iteration % args.eval_interval == 0
        if not is_due and iteration < args.num_iterations:
            return row
        for split, envs in self.envs.items():
            envs.load_state_dict(self.starts[split])  # the same levels every time
            if split == "video":
                step = iteration * args.batch_size * NUM_RANKS
                record_video(agent, envs, Path(args.run_dir) / f"{step}.mp4", args.seed)
            else:
                returns = evaluate(agent, envs, args.seed)
                row[f"eval/{split}_return"] = float(returns.mean())
                if len(returns) > 1:
                    deviation = float(returns.std(ddof=1))
                    row[f"eval/{split}_stderr"] = deviation / math.sqrt(len(returns))
        if "train" in self.envs:
            row["eval/generalization_gap"] = row["eval/train_return"] - row["eval/test_return"]
        return row


# ---- 9 Command line ------------------------------------------------------------------------------
ALGORITHM = "ppg"
MAY_CHANGE = {  # flags of a resumed run, and what is derived from them
    "total_timesteps", "cuda", "compile", "cuda_graphs", "env_threads", "num_grad_accum", "device",
    "num_iterations", "num_phases", "num_aux_grad_accum", "aux_device",
}  # fmt: skip


def check_args(args: Args) -> None:
    """UsageError for settings that would fail late or silently."""
    is_set = 0 <= RANK < NUM_RANKS and LOCAL_RANK >= 0 and LOCAL_WORLD_SIZE > 0
    is_set = is_set and (NUM_RANKS == 1 or "MASTER_ADDR" in os.environ)
    require(is_set, "RANK, WORLD_SIZE, LOCAL_RANK and the like must be as torchrun sets them")
    at_least_1 = [
        "num_envs", "num_steps", "num_minibatches", "e_policy", "n_iteration", "num_aux_rollouts",
        "aux_interval", "eval_episodes", "checkpoint_interval",
    ]  # fmt: skip
    limits = {"total_timesteps": 10**15, "gamma": 1, "gae_lambda": 1, "reward_gamma": 1}
    for name, value in vars(args).items():
        if isinstance(value, int | float) and name != "env_threads":
            smallest = 1 if name in at_least_1 else 0
            is_fine = smallest <= value <= limits.get(name, 2**31 - 1)
            require(is_fine, f"{name} cannot be {value}")
    games = GAMES_WITH_MODE.get(args.distribution_mode, [args.env_id])
    require(args.env_id in games, f"only {games} have {args.distribution_mode} mode")
    require(args.start_level + args.num_levels < NUM_LEVELS, f"levels must be below {NUM_LEVELS}")
    require(args.start_level == 0 or args.num_levels > 0, "start_level needs num_levels")
    has_levels = args.distribution_mode != "exploration" or args.num_levels == 0
    require(has_levels, "exploration mode has a single level of its own")
    require(args.clip_coef > 0 or not args.clip_vloss, "clip_vloss needs a clip_coef")
    size = args.batch_size
    require(size % args.num_minibatches == 0, f"num_minibatches must divide {size} samples")
    iteration = f"an iteration of {size * NUM_RANKS:,} steps"
    require(args.num_iterations > 0, f"total_timesteps is less than {iteration}")
    num_envs = args.num_envs + (2 * args.eval_episodes if args.eval_interval > 0 else 0)
    rollout = size * math.prod(ProcgenVectorEnv.obs_shape)  # bytes
    require_memory(1_000_000 * num_envs + rollout, "environments and a rollout")

    num_rows = args.n_iteration * args.num_envs
    is_even = args.e_auxiliary == 0 or num_rows % args.num_aux_rollouts == 0
    require(is_even, f"num_aux_rollouts must divide n_iteration * num_envs ({num_rows})")
    num_rollouts = args.num_aux_minibatches * args.num_aux_rollouts
    require(num_rollouts <= num_rows, f"num_aux_minibatches: the buffer has {num_rows} rollouts")
    one_rate = args.learning_rate == args.aux_learning_rate
    require(one_rate or not args.single_optimizer, "single_optimizer has one learning rate")
    has_place = args.aux_device != "cuda" or args.device != "cpu"
    require(has_place, "aux_device cuda needs a GPU")


def require_memory(num_bytes: float, what: str) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / LOCAL_WORLD_SIZE
    sizes = f"{num_bytes / 1e9:,.1f} GB, but a rank has {memory / 1e9:,.1f} GB of memory"
    require(num_bytes < memory, f"{what} need {sizes}")


def choose_auto(args: Args) -> dict:
    """What "auto", -1 and 0 stand for in this run."""
    on_gpu = args.device != "cpu"
    used = {name: getattr(args, name) for name in ("env_threads", "aux_dtype", "aux_device")}
    # on a CPU larger chunks take gigabytes, on a GPU larger convolutions in bfloat16 are slow
    max_chunk = 16_384 if on_gpu else 512
    mb_size = args.batch_size // args.num_minibatches
    aux_mb_size = args.num_aux_rollouts * args.num_steps
    used["num_grad_accum"] = args.num_grad_accum or math.ceil(mb_size / max_chunk)
    used["num_aux_grad_accum"] = args.num_aux_grad_accum or math.ceil(aux_mb_size / max_chunk)
    num_rows = args.n_iteration * args.num_envs
    used["num_aux_minibatches"] = args.num_aux_minibatches or num_rows // args.num_aux_rollouts
    if args.env_threads < 0:
        cores = len(os.sched_getaffinity(0)) // LOCAL_WORLD_SIZE
        used["env_threads"] = 0 if cores <= 2 else min(12, cores * 3 // 4)
    if args.aux_dtype == "auto":
        cpu = Path("/proc/cpuinfo")
        is_fast = cpu.exists() and "avx512_bf16" in cpu.read_text()
        if on_gpu:
            is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        used["aux_dtype"] = "bfloat16" if is_fast else "float32"
    if args.aux_device == "auto":
        buffer = args.n_iteration * args.batch_size * math.prod(ProcgenVectorEnv.obs_shape)
        fits = on_gpu and buffer < torch.cuda.mem_get_info(LOCAL_RANK)[0] / 2
        used["aux_device"] = "cuda" if fits else "file"
    return used


def describe(args: Args) -> dict:
    """What is needed to understand a run: arguments, command, commit, versions, hardware."""
    if args.resume:
        about = load_checkpoint(Path(args.run_dir) / "checkpoint.pt")["about"]
    else:
        git = "git describe --always --dirty --abbrev=40 '--exclude=*'"  # empty without git
        folder = Path(__file__).resolve().parent
        result = subprocess.run(git, shell=True, cwd=folder, capture_output=True, text=True)
        commit = result.stdout.strip()
        about = {"algorithm": ALGORITHM, "run_id": os.urandom(8).hex(), "commit": commit}
        about.update(command=shlex.join(sys.orig_argv), date=time.strftime("%FT%T%z"))
    gpu = torch.cuda.get_device_name() if args.device != "cpu" else None
    hardware = {"platform": platform.platform(), "cores": os.cpu_count(), "gpu": gpu}
    driver = Path("/proc/driver/nvidia/version")
    hardware["driver"] = driver.read_text().split("\n")[0] if gpu and driver.exists() else None
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    versions.update(torch=str(torch.__version__), cudnn=torch.backends.cudnn.version())
    about.update(args=asdict(args), used=choose_auto(args), versions=versions, hardware=hardware)
    return about


def open_run(args: Args, about: dict, cleanup: contextlib.ExitStack) -> None:
    """Lock the run folder and write args.json. UsageError if another process has it, or if it is
    not empty and the run is new."""
    import fcntl  # here, so that importing this file works anywhere

    def remove_if_not_begun() -> None:
        if not (run_dir / "checkpoint.pt").exists():
            shutil.rmtree(run_dir)

    run_dir = Path(args.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in run_dir.iterdir()}
        died_early = names == {"args.json", Path(__file__).name}  # before its first checkpoint
        is_free = args.resume or not names or died_early
        require(is_free, f"{run_dir} is not empty: --resume it, or choose another --run-dir")
        file = cleanup.enter_context(open(run_dir / "args.json", "a"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it at any end
        copy = run_dir / Path(__file__).name
        if not args.resume:
            shutil.copy(__file__, copy)
        elif not copy.exists() or copy.read_bytes() != Path(__file__).read_bytes():
            say(f"this run was started by another version of the script: {copy}", sys.stderr)
        cleanup.callback(remove_if_not_begun)
        file.truncate(0)
        json.dump(about, file, indent=2)
        file.flush()
    except BlockingIOError:
        raise UsageError(f"another process is writing to {run_dir}") from None
    except OSError as error:
        raise UsageError(f"{run_dir} cannot be used: {error}") from None


def main(args: Args) -> None:
    """Train. If the run does not finish, say why and how to continue it; exit code 128 + n after
    signal n, else 1."""
    try:
        with contextlib.ExitStack() as cleanup:
            about = describe(args)
            if RANK == 0:
                open_run(args, about, cleanup)
            try:
                train(replace(args, **about["used"]), about, cleanup)
            except BaseException:
                handle_signals(signal.SIG_IGN)  # another signal would cut off the advice
                raise
        say(f"finished; weights, metrics and checkpoint are in {args.run_dir}")
        return
    except Stopped as stopped:
        reason, code = stopped.args
    except Exception as error:
        code = 1
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            reason += "; --num-grad-accum 2, --num-aux-grad-accum 2, --aux-device file save memory"
        elif not isinstance(error, OSError):  # such as a full disk, which the message explains
            sys.excepthook(*sys.exc_info())
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason += "; --no-compile does without torch.compile"
    say(f"stopped: {reason}", sys.stderr)
    path = Path(args.run_dir) / "checkpoint.pt"
    if RANK == 0 and path.exists():
        state = load_checkpoint(path)
        where = f"iteration {state['iteration'] + 1}"
        aux_phase = state["ranks"][0]["loop_state"]["aux_phase"]
        if aux_phase:
            where += f", epoch {aux_phase['epoch'] + 1} of the auxiliary phase"
        num_rows = path.with_name("metrics.csv").read_text().count("\n") - 1
        again = max(num_rows - state["iteration"], 0)
        say(f"it continues at {where}; iterations to be done again: {again}", sys.stderr)
        words = sys.orig_argv
        if not args.resume:
            words = [*words[: len(words) - len(sys.argv) + 1], "--resume", args.run_dir]
        how = "to continue" if NUM_RANKS == 1 else "to continue, with torchrun as before"
        say(f"{how}: {shlex.join(words)}", sys.stderr)
    sys.exit(code)


def parse_args() -> Args:
    """Arguments from the command line; with --resume those of the run, which few flags change."""
    require(sys.platform == "linux", "it runs on Linux only (on Windows: in WSL 2)")
    title = __doc__.split("\n")[0]
    args = tyro.cli(Args, description=title)
    if args.resume is None:
        unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{unique}"
        args.run_dir = args.run_dir or f"runs/{name}"
        check_args(args)
        return args
    require(args.resume, "--resume is empty: it needs a run folder")  # such as an unset variable
    state = load_checkpoint(Path(args.resume) / "checkpoint.pt")
    try:
        about = state["about"] if isinstance(state, dict) else {}
        is_ours = about["algorithm"] == ALGORITHM
        saved = {**about["args"], "resume": args.resume, "run_dir": args.resume}
    except (KeyError, TypeError, IndexError):  # another file of torch
        is_ours = False
    require(is_ours, f"{args.resume} is not a run of {Path(__file__).name}")
    odd = set(saved) ^ {x.name for x in fields(Args)}
    require(not odd, f"this script and that of {args.resume} differ in flags: {odd}")
    default = Args.__new__(Args)  # without __post_init__, which replace calls
    vars(default).update(saved)
    args = replace(tyro.cli(Args, default=default, description=title))
    check_args(args)
    for name, value in vars(args).items():
        is_same = value == saved[name] or name in MAY_CHANGE
        require(is_same, f"{name} cannot change: the checkpoint has {saved[name]}")
    more = args.num_iterations - saved["num_iterations"]
    may_grow = more == 0 or (more > 0 and not args.anneal_lr)
    require(may_grow, "total_timesteps can only grow, and not with anneal_lr")
    if state["iteration"] == args.num_iterations:
        for path in Path(args.resume).glob("buffer_*.bin"):  # if a kill at the very end left it
            path.unlink(missing_ok=True)  # another rank may have been faster
        more = (args.num_iterations + 1) * args.batch_size * NUM_RANKS
        say(f"{args.resume} is finished; to extend it: --total-timesteps {more} or more")
        sys.exit()
    return args


if __name__ == "__main__":
    while os.open(os.devnull, os.O_RDWR) < 3:  # if a daemon closed 0 to 2: no file may become them
        pass
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # for paths that cannot be printed
    try:
        main(parse_args())
    except UsageError as error:
        say(f"{Path(__file__).name}: {error}", sys.stderr)
        sys.exit(2)
