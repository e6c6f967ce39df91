"""Returns of a trained policy on chosen levels: a table, CSV files, and videos.

    python benchmark/evaluate.py runs/RUN                                          # training and unseen levels
    python benchmark/evaluate.py runs/RUN --levels 0:50 --episodes 50 --video      # each of the levels 0 to 49 once
    python benchmark/evaluate.py agent.pt --env-id starpilot --modes easy hard     # weights on their own

A set of levels is named by
    train   the levels of the run's training
    test    all levels above them, as in the evaluations during training
    all     all levels
    A:B     the levels A, A + 1, ..., B - 1

The seed draws levels without repetition. A set with fewer levels than --episodes is played again from its beginning.
"""

import contextlib
import io
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats
from tqdm import trange

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder, with nothing installed
import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402
from benchmark.ranges import RANGES  # noqa: E402
from ppg_procgen import NUM_LEVELS, Game, ProcgenVectorEnv  # noqa: E402

Mode = Literal["easy", "hard"]
MAX_BATCH_SIZE = 64  # environments at a time; no flag, because the random numbers of an episode depend on it


@dataclass
class Args:
    path: tyro.conf.Positional[Path]  # run folder, agent.pt or checkpoint.pt, of ppg_procgen.py or ppo_procgen.py
    levels: tuple[str, ...] = ()  # sets of levels; default: train test, or all if the run was trained on all levels
    modes: tuple[Mode, ...] = ()  # difficulty of the levels; default: the run's
    env_id: Game | None = None  # game; default: the run's
    episodes: int = 128  # episodes of each set of levels in each mode
    greedy: bool = False  # take the most probable actions; default: sample them
    seed: int = 1  # draws levels and actions; on a CPU the same seed gives the same numbers
    video: bool = False  # also record four episodes of each set in each mode
    out: Path | None = None  # folder to write to; default: evaluation, beside the weights
    cuda: bool = True  # use the GPU if there is one


def require(condition: bool, message: str) -> None:
    if not condition:
        print(f"evaluate.py: {message}", file=sys.stderr)
        sys.exit(2)


def load_agent(path: Path) -> torch.nn.Module:
    """The agent of an agent.pt, or of a checkpoint.pt, which holds the same weights under "agent"."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    weights = weights.get("agent", weights)
    if "encoder.dense.weight" in weights:
        agent = ppo_procgen.Agent()
    elif "value_encoder.dense.weight" in weights:
        agent = ppg_procgen.Agent("dual")
    else:
        agent = ppg_procgen.Agent("shared")  # the weights of detach have the same names, and the policy is the same
    agent.load_state_dict(weights)
    return agent


def level_range(name: str, start_level: int, num_levels: int) -> range:
    """The levels of a set. num_levels: those of the training, 0 for all."""
    end_level = start_level + num_levels if num_levels > 0 else NUM_LEVELS
    sets = {
        "train": range(start_level, end_level),
        "test": range(end_level, NUM_LEVELS),
        "all": range(NUM_LEVELS),
    }
    levels = sets.get(name, range(0))
    if bounds := re.fullmatch(r"(\d+):(\d+)", name):
        levels = range(int(bounds[1]), int(bounds[2]))
    hint = f"use train, test (if there are unseen levels), all, or A:B with A < B <= {NUM_LEVELS}"
    require(levels.start < levels.stop <= NUM_LEVELS, f"--levels {name}: no such levels; {hint}")
    return levels


def make_envs(game: str, mode: str, levels: list[int], **options) -> ProcgenVectorEnv:
    """An environment at the beginning of each level. procgen takes no list of levels, but an environment continues from
    the state of any other. Each level costs about 10 ms, and 50 kB that procgen never frees."""
    envs = ProcgenVectorEnv(game, len(levels), mode, **options)
    states = []
    for level in levels:
        single = ProcgenVectorEnv(game, 1, mode, num_levels=1, start_level=level)
        states += single.state_dict()["games"]
        single.close()
    envs.load_state_dict({"games": states})
    return envs


@torch.no_grad()
def play(agent, envs: ProcgenVectorEnv, seed: int, greedy: bool, on_step: Callable = lambda: None) -> tuple:
    """Raw returns and lengths of one episode in each environment, (num_envs,) each: if all episodes that end counted,
    short ones would have too much weight. Calls on_step() after each step."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros(envs.num_envs, int)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset()
    while playing.any():
        logits = agent(torch.from_numpy(obs).to(device), value=False).logits
        if greedy:
            actions = logits.argmax(-1)
        else:
            actions, _ = ppg_procgen.sample_action(logits, generator)
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        lengths += playing
        playing &= ~(terminated | truncated)
        on_step()
    return returns, lengths


def play_set(agent, args: Args, game: str, mode: str, levels: list[int], title: str) -> pd.DataFrame:
    """args.episodes episodes, in batches of one size: the last one is filled up, and the excess is dropped."""
    rng = random.Random(args.seed)
    rng.sample(levels, 0)
    num_batches = math.ceil(args.episodes / MAX_BATCH_SIZE)
    size = math.ceil(args.episodes / num_batches)
    return num_batches, size


