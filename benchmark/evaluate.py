"""Returns of a trained policy on chosen levels: a table, CSV files, and videos.

    python benchmark/evaluate.py runs/RUN                                          # training and unseen levels
    python benchmark/evaluate.py runs/RUN --levels 0:50 --episodes 50 --video      # each of the levels 0 to 49 once
    python benchmark/evaluate.py agent.pt --env-id starpilot --modes easy hard     # weights on their own

The seed draws levels without repetition. A set with fewer levels than --episodes is played again from its beginning.
"""

import json
import math
import random
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder, with nothing installed
import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402
from benchmark.ranges import RANGES  # noqa: E402
from ppg_procgen import NUM_LEVELS, Game, ProcgenVectorEnv  # noqa: E402

BATCH_SIZE = 64  # environments at a time; no flag, because the random numbers of an episode depend on it


@dataclass
class Args:
    path: tyro.conf.Positional[Path]  # run folder, agent.pt or checkpoint.pt, of ppg_procgen.py or ppo_procgen.py
    # sets of levels: train (those of the training), test (all above them), all, A:B (from A to B - 1); default: train
    # test, or all if the run was trained on all levels
    levels: tuple[str, ...] = ()
    modes: tuple[Literal["easy", "hard"], ...] = ()  # difficulty of the levels; default: the run's
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
    else:  # shared and detach have the same weights and the same policy
        agent = ppg_procgen.Agent("dual" if "value_encoder.dense.weight" in weights else "shared")
    agent.load_state_dict(weights)
    return agent


def level_range(name: str, run: dict) -> range:
    """The levels of a set. run: the arguments of the training."""
    start_level = run.get("start_level", 0)
    end_level = start_level + run.get("num_levels", 0) or NUM_LEVELS  # num_levels 0: trained on all levels
    sets = {"train": range(start_level, end_level), "test": range(end_level, NUM_LEVELS), "all": range(NUM_LEVELS)}
    if bounds := re.fullmatch(r"(\d+):(\d+)", name):
        sets[name] = range(int(bounds[1]), int(bounds[2]))
    levels = sets.get(name, range(0))
    hint = f"use train, test (if there are unseen levels), all, or A:B with A < B <= {NUM_LEVELS}"
    require(levels.start < levels.stop <= NUM_LEVELS, f"--levels {name}: no such levels; {hint}")
    return levels


def level_states(game: str, mode: str, levels: list[int]) -> dict:
    """States of environments at the beginnings of these levels: procgen takes no list of levels, but an environment can
    continue from the state of another. Each level costs about 10 ms, and 50 kB that procgen never frees."""
    states = []
    for level in levels:
        envs = ProcgenVectorEnv(game, 1, mode, num_threads=0, num_levels=1, start_level=level)
        states += envs.state_dict()["games"]
    return {"games": states}


@torch.no_grad()
def play(agent, envs, seed: int, greedy: bool, on_step=lambda: None) -> tuple:
    """Raw returns and lengths, (num_envs,) each, of one episode in each environment, as evaluate() of the scripts plays
    them. Calls on_step() after each step."""
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros(envs.num_envs, int)
    playing = np.ones(envs.num_envs, bool)
    obs, _ = envs.reset()
    while playing.any():
        logits = agent(torch.from_numpy(obs).to(device), value=False).logits
        actions = logits.argmax(-1) if greedy else ppg_procgen.sample_action(logits, generator)[0]
        obs, rewards, terminated, truncated, _ = envs.step(actions.cpu().numpy())
        returns += rewards * playing
        lengths += playing
        playing &= ~(terminated | truncated)
        on_step()
    return returns, lengths


def play_set(agent, args: Args, mode: str, levels: range, title: str) -> pd.DataFrame:
    """A row for each of args.episodes episodes. Batches have one size, so the last may play some episodes too many."""
    rng = random.Random(args.seed)  # a new one for each set, so that its numbers do not depend on the other sets
    num_batches = math.ceil(args.episodes / BATCH_SIZE)
    batch_size = math.ceil(args.episodes / num_batches)
    chosen = rng.sample(levels, min(args.episodes, len(levels)))
    plan = np.resize(chosen, (num_batches, batch_size)).tolist()  # too few levels are repeated
    envs = ProcgenVectorEnv(args.env_id, batch_size, mode, num_threads=0)
    batches = []
    for batch in tqdm(plan, title):
        envs.load_state_dict(level_states(args.env_id, mode, batch))
        returns, lengths = play(agent, envs, rng.getrandbits(31), args.greedy)
        batches.append(pd.DataFrame({"level": batch, "return": returns, "length": lengths}))
    return pd.concat(batches)[: args.episodes]


def record_video(agent, args: Args, mode: str, levels: list[int], path: Path) -> None:
    """Four episodes side by side, until each has ended once."""
    warnings.filterwarnings("ignore", "pkg_resources")
    import imageio_ffmpeg  # which imports it

    envs = ProcgenVectorEnv(args.env_id, 4, mode, num_threads=0, render_mode="rgb_array")
    envs.load_state_dict(level_states(args.env_id, mode, levels))
    size = 1024, 1024
    video = imageio_ffmpeg.write_frames(str(path), size, fps=15, ffmpeg_timeout=0)
    video.send(None)  # starts ffmpeg

    def add_frame() -> None:
        if sys.version_info < (3, 13):
            images = [info["rgb"] for info in envs.games.get_info()]
        else:
            images = envs.games.render()
        rows = np.hstack(images[:2]), np.hstack(images[2:])
        video.send(np.vstack(rows))

    play(agent, envs, args.seed, args.greedy, add_frame)
    video.close()


def summarize(returns: pd.Series, r_min: float, r_max: float) -> dict:
    """Mean, standard deviation and error, Student's 95 % interval; mean and interval as normalized scores too."""
    summary = {"episodes": len(returns), "std": returns.std(), "stderr": returns.sem()}
    mean = returns.mean()
    margin = stats.t.ppf(0.975, len(returns) - 1) * summary["stderr"]
    for name, x in {"mean": mean, "low": mean - margin, "high": mean + margin}.items():
        summary[name] = x
        summary[f"score_{name}"] = (x - r_min) / (r_max - r_min)
    return summary


def main(args: Args) -> None:
    path = args.path / "agent.pt" if args.path.is_dir() else args.path
    require(path.is_file(), f"there is no file {path}")
    require(args.episodes >= 2, "a standard error needs two episodes")
    record = path.with_name("args.json")
    run = json.loads(record.read_text())["args"] if record.exists() else {}
    args.env_id = args.env_id or run.get("env_id")
    require(args.env_id is not None, f"{path} has no args.json beside it, which names its game: add --env-id")
    modes = args.modes or [run.get("distribution_mode", "easy")]
    names = args.levels or (["train", "test"] if run.get("num_levels") else ["all"])
    sets = {name: level_range(name, run) for name in names}

    device = "cuda" if args.cuda and torch.cuda.is_available() else "cpu"
    agent = load_agent(path).to(device, memory_format=torch.channels_last)
    out = args.out or path.parent / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    label = {"env_id": args.env_id, "greedy": args.greedy, "seed": args.seed}
    episodes = []
    summaries = []
    print(f"{path} in {args.env_id}, files in {out}: return ± standard error, 95 % interval, normalized score")
    for mode, name in [(mode, name) for mode in modes for name in names]:
        label.update(mode=mode, levels=name)
        rows = play_set(agent, args, mode, sets[name], f"{mode} {name}")
        episodes.append(rows.assign(**label))
        summary = summarize(rows["return"], *RANGES[args.env_id][mode])
        summaries.append({**label, **summary})
        text = "{mean:.2f} ± {stderr:.2f}, {low:.2f} to {high:.2f}, {score_mean:.3f}".format(**summary)
        print(f"{mode} {name}, {args.episodes} episodes: {text}", flush=True)
        if args.video:
            video = out / f"{mode}_{name.replace(':', '-')}.mp4"
            four_levels = np.resize(rows["level"], 4).tolist()
            record_video(agent, args, mode, four_levels, video)
    pd.concat(episodes).to_csv(out / "episodes.csv", index=False)
    pd.DataFrame(summaries).to_csv(out / "summary.csv", index=False)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
