"""Returns of a trained policy on chosen levels: a table, CSV files, and videos.

    python benchmark/evaluate.py runs/RUN                                          # training and unseen levels
    python benchmark/evaluate.py runs/RUN --levels 0:50 --episodes 50 --video      # each of the levels 0 to 49 once
    python benchmark/evaluate.py agent.pt --env-id starpilot --modes easy hard     # weights on their own

This runs the code of the script in the run folder, and plays as its evaluate() does. Weights on their own are played by
the repository's scripts. The seed draws levels without repetition; too few levels for --episodes are played again.
"""

import inspect
import json
import math
import pickle
import random
import re
import sys
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # it runs from any folder, with nothing installed
from benchmark import require  # noqa: E402
from benchmark.ranges import RANGES  # noqa: E402
from ppg_procgen import NUM_LEVELS, Game  # noqa: E402

BATCH_SIZE = 64  # environments at a time; no flag, because the random numbers of an episode depend on it


@dataclass
class Args:
    path: tyro.conf.Positional[Path]  # run folder, agent.pt or checkpoint.pt, of either script or a changed copy
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


def load_script(path: Path) -> ModuleType:
    """Run a script, as a module of its own, which can be changed freely."""
    script = ModuleType("evaluated_script")
    script.__file__ = str(path)
    sys.modules[script.__name__] = script  # dataclasses look there
    exec(compile(path.read_text(), path, "exec"), vars(script))
    hint = "it is of an older version; with agent.pt and args.json alone in a folder, the repository's network plays"
    require("args" in inspect.signature(script.Agent).parameters, f"{path} has no Agent(args, envs): {hint}")
    return script


def level_range(name: str, run: dict) -> range:
    """The levels of a set. run: the arguments of the training."""
    train = range(NUM_LEVELS)
    if run.get("num_levels"):  # without it, procgen ignores start_level, which older versions accepted
        train = range(run["start_level"], run["start_level"] + run["num_levels"])
    sets = {"train": train, "test": range(train.stop, NUM_LEVELS), "all": range(NUM_LEVELS)}
    if bounds := re.fullmatch(r"(\d+):(\d+)", name):
        sets[name] = range(int(bounds[1]), int(bounds[2]))
    levels = sets.get(name, range(0))
    hint = f"no such levels; use train, test (if there are unseen levels), all, or A:B with A < B <= {NUM_LEVELS}"
    require(levels.start < levels.stop <= NUM_LEVELS, f"--levels {name}: {hint}")
    return levels


def merge(states: list):
    """The state of several environments from the states of single ones."""
    if isinstance(states[0], dict):
        return {name: merge([state[name] for state in states]) for name in states[0]}
    return torch.cat(states) if isinstance(states[0], torch.Tensor) else sum(states, [])


def start_envs(script: ModuleType, config, levels: list, seed: int):
    """Environments that begin these levels (None: drawn by the seed). They continue from the states of others, each
    made for one level, which costs about 10 ms, and 50 kB that procgen never frees."""
    config.num_envs = 1
    states = [script.make_envs(config, 0, level, 1).state_dict() for level in levels if level is not None]
    config.num_envs = len(levels)
    envs = script.make_envs(config, seed, 0, 0)
    if states:
        envs.load_state_dict(merge(states))
    return envs


def play(script: ModuleType, agent, envs, seed: int, on_step=lambda obs: None) -> tuple:
    """Raw returns and lengths (N,) of one episode in each environment. on_step is called after each step."""
    step = envs.step
    ends = []

    def watched_step(actions):
        result = step(actions)
        ends.append(result[2] | result[3])
        on_step(result[0])
        return result

    envs.step = watched_step
    returns = script.evaluate(agent, envs, seed)
    del envs.step  # a cycle of references, in which Python would free Procgen's memory in a wrong order
    return returns, 1 + np.argmax(ends, axis=0)  # the first end of each


def play_set(script: ModuleType, agent, config, args: Args, levels: range, title: str) -> pd.DataFrame:
    """A row for each of args.episodes episodes."""
    rng = random.Random(args.seed)  # a new one for each set, so that its numbers do not depend on the other sets
    chosen = rng.sample(levels, min(args.episodes, len(levels))) or [None]
    plan = np.resize(chosen, args.episodes)  # too few levels are repeated
    batches = []
    for batch in tqdm(np.array_split(plan, math.ceil(args.episodes / BATCH_SIZE)), title):
        seed = rng.getrandbits(31)
        envs = start_envs(script, config, batch.tolist(), seed)
        returns, lengths = play(script, agent, envs, seed)
        batches.append(pd.DataFrame({"level": batch, "return": returns, "length": lengths}))
    return pd.concat(batches)


def record_video(script: ModuleType, agent, config, seed: int, levels: list, path: Path) -> None:
    """Four episodes side by side, until each has ended once."""
    warnings.filterwarnings("ignore", "pkg_resources")
    import imageio_ffmpeg  # which imports it

    def draw(obs):
        if hasattr(envs, "games"):  # Procgen's own images, with 512 x 512 pixels
            images = envs.games.render() if sys.version_info >= (3, 13) else [x["rgb"] for x in envs.games.get_info()]
        else:
            num_channels = 3 if obs.shape[3] % 3 == 0 else 1  # of stacked images, the last
            images = np.broadcast_to(obs[..., -num_channels:], (*obs.shape[:3], 3)).repeat(8, 1).repeat(8, 2)
        return np.vstack([np.hstack(images[:2]), np.hstack(images[2:])])

    envs = start_envs(script, config, levels, seed)
    size = draw(envs.reset()[0]).shape[1::-1]
    file = str(path.resolve())  # absolute: in 12:30/x.mp4, 12 would be a protocol
    video = imageio_ffmpeg.write_frames(file, size, fps=15, ffmpeg_timeout=0)
    video.send(None)  # starts ffmpeg
    play(script, agent, envs, seed, lambda obs: video.send(draw(obs)))
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
    require(args.episodes >= 1, "--episodes must be at least 1")
    record = path.with_name("args.json")
    run = json.loads(record.read_text())["args"] if record.exists() else {}
    run["env_id"] = args.env_id or run.get("env_id")
    require(run["env_id"] is not None, f"{path} has no args.json beside it, which names its game: add --env-id")
    weights = torch.load(path, map_location="cpu", weights_only=True)
    weights = weights.get("agent", weights)  # a checkpoint.pt holds the same weights
    source = next(path.parent.glob("*.py"), None) if record.exists() else None
    if source is None:
        source = ROOT / ("ppo_procgen.py" if "encoder.dense.weight" in weights else "ppg_procgen.py")
        run["arch"] = "dual" if "value_encoder.dense.weight" in weights else "shared"  # or detach: the same policy
    script = load_script(source)
    if args.greedy:
        is_discrete = hasattr(script.Policy(torch.zeros(1, 2)), "logprobs")
        require(is_discrete, "--greedy: the script's Policy has no probabilities of actions")
        script.Policy.sample = lambda pi, generator=None: pi.logprobs.argmax(-1)
    flags = run | {"cuda": args.cuda, "env_threads": 0, "start_level": 0}
    config = script.Args(**{x.name: flags[x.name] for x in fields(script.Args) if x.name in flags})
    two_envs = [start_envs(script, config, [level], 0) for level in range(2)]
    has_levels = len({pickle.dumps(envs.state_dict()) for envs in two_envs}) == 2  # gymnasium's have an empty state
    require(has_levels or not (args.levels or args.modes), f"{config.env_id} has no levels: no --levels, no --modes")
    require(not args.video or len(two_envs[0].obs_shape) == 3, "no --video: the observations are no images")
    modes = args.modes or [run.get("distribution_mode", "easy")]
    names = args.levels or (["train", "test"] if has_levels and run.get("num_levels") else ["all"])
    sets = {name: level_range(name, run) if has_levels else range(0) for name in names}

    agent = script.Agent(config, two_envs[0]).to(config.device, memory_format=torch.channels_last)
    agent.load_state_dict(weights)
    out = args.out or path.parent / "evaluation"
    out.mkdir(parents=True, exist_ok=True)
    episodes = []
    summaries = []
    print(f"{path} in {config.env_id}, by {source}, files in {out}: return ± standard error, 95 % interval, score")
    for mode, name in [(mode, name) for mode in modes for name in names]:
        label = {"env_id": config.env_id, "greedy": args.greedy, "seed": args.seed, "mode": mode, "levels": name}
        config.distribution_mode = mode
        rows = play_set(script, agent, config, args, sets[name], f"{mode} {name}")
        episodes.append(rows.assign(**label))
        summary = summarize(rows["return"], *RANGES.get(config.env_id, {}).get(mode, (math.nan, math.nan)))
        summaries.append({**label, **summary})
        text = "{mean:.2f} ± {stderr:.2f}, {low:.2f} to {high:.2f}, {score_mean:.3f}".format(**summary)
        print(f"{mode} {name}, {args.episodes} episodes: {text}", flush=True)
    pd.concat(episodes).to_csv(out / "episodes.csv", index=False)
    pd.DataFrame(summaries).to_csv(out / "summary.csv", index=False)

    if args.video:
        init = script.ProcgenVectorEnv.__init__
        script.ProcgenVectorEnv.__init__ = lambda *x, **options: init(*x, **options, render_mode="rgb_array")
        for rows in episodes:
            config.distribution_mode, name = rows.iloc[0][["mode", "levels"]]
            video = out / f"{config.distribution_mode}_{name.replace(':', '-')}.mp4"
            record_video(script, agent, config, args.seed, np.resize(rows["level"], 4).tolist(), video)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
