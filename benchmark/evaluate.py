"""Returns of trained policies on chosen levels: a table, CSV files, and videos.

    python benchmark/evaluate.py runs/RUN                                          # training and unseen levels
    python benchmark/evaluate.py runs/RUN runs/OTHER                               # and differences on the same levels
    python benchmark/evaluate.py runs/RUN --levels 0:50 --greedy --video           # each of the levels 0 to 49 once
    python benchmark/evaluate.py agent.pt --env-id starpilot --mode hard           # weights on their own

The script in the run folder plays, by its evaluate(); other weights are played by the repository's scripts.
Mean, standard error and 95 % interval are over the means of levels, because episodes of one level are alike; with a
single level, they are over its episodes. Agents with the same game and sets play the same levels; the difference from
the first of them is taken level by level. In other environments than Procgen, a level is a seed.
"""

import importlib.util
import json
import math
import random
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pandas as pd
import torch
import tyro
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
RANGES = pd.read_csv(ROOT / "benchmark" / "reference" / "ranges.csv", index_col=["env_id", "distribution_mode"])
Game = Literal[tuple(RANGES.index.unique("env_id"))]
NUM_LEVELS = 2**31 - 1  # Procgen's, from 0
BATCH_SIZE = 64  # environments at a time; no flag, because the random numbers of an episode depend on it


@dataclass(frozen=True)
class Args:
    paths: tyro.conf.Positional[tuple[Path, ...]]  # run folders, agent.pt or checkpoint.pt, of scripts or copies
    levels: tuple[str, ...] = ()  # sets: train, test (unseen), all, A:B (A to B - 1); default: train test, or all
    mode: Literal["easy", "hard"] | None = None  # difficulty of the levels; default: the run's
    env_id: Game | None = None  # game; default: the run's
    episodes: int = 128  # of each set of levels; too few levels are repeated, but not with --greedy
    greedy: bool = False  # take the most probable actions; default: sample them
    seed: int = 1  # draws levels and actions; on a CPU the same seed gives the same numbers
    video: bool = False  # also record four episodes of each set
    out: Path | None = None  # folder to write to, new or empty; default: evaluation/TIME, of one run beside its weights
    cuda: bool = True  # use the GPU if there is one


def require(condition: bool, message: str):
    if not condition:
        print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        sys.exit(2)


def load_script(folder: Path, weights: dict):
    """The training script of a run folder: files are read, not run, to find it. For weights alone the repository's."""
    path = ROOT / ("ppo_procgen.py" if "encoder.dense.weight" in weights else "ppg_procgen.py")
    files = sorted(folder.glob("*.py")) if (folder / "args.json").exists() else []
    if files:
        scripts = [x for x in files if "\nclass Agent(" in x.read_text("utf-8", "replace")]
        require(len(scripts) == 1, f"exactly one file of {folder} must define Agent")
        path = scripts[0]
    sys.path.append("")  # a copy may import a module of the folder where it was started
    spec = importlib.util.spec_from_file_location("evaluated_script", path)
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look there for annotations that are strings
    spec.loader.exec_module(script)
    return script


def level_range(name: str, run: dict) -> range:
    """The levels of a set. run: the arguments of the training."""
    start = run.get("start_level", 0)
    train = range(start, start + (run.get("num_levels") or NUM_LEVELS))
    sets = {"train": train, "test": range(train.stop, NUM_LEVELS), "all": range(NUM_LEVELS)}
    bounds = re.fullmatch(r"(\d+):(\d+)", name)
    levels = range(int(bounds[1]), int(bounds[2])) if bounds else sets.get(name, range(0))
    require(levels.start < levels.stop <= NUM_LEVELS, f"--levels {name}: no such levels, or none are unseen")
    return levels


class LevelEnvs:
    """An environment for each level, which plays this level only. Notes where episodes end."""

    def __init__(self, script, config, levels: list[int], **options):
        config = replace(config, num_envs=1)
        self.levels = levels
        self.envs = [script.make_envs(config, level, level, 1, **options) for level in levels]
        self.num_envs = len(levels)
        self.ends = []
        self.video = None

    def reset(self, seed=None):
        pairs = zip(self.envs, self.levels, strict=True)
        return np.concatenate([env.reset(seed=level)[0] for env, level in pairs]), {}

    def step(self, actions):
        results = [env.step(actions[[i]])[:4] for i, env in enumerate(self.envs)]
        obs, rewards, terminated, truncated = map(np.concatenate, zip(*results, strict=True))
        self.ends.append(terminated | truncated)
        if self.video:
            self.video.send(self.draw(obs))
        return obs, rewards, terminated, truncated, {}

    def draw(self, obs):
        if hasattr(self.envs[0], "games"):  # Procgen's own images, with 512 x 512 pixels
            images = [env.games.get_info()[0]["rgb"] for env in self.envs]
        elif getattr(self.envs[0], "render_mode", None):  # from Python 3.13 on
            images = [env.render()[0] for env in self.envs]
        else:
            images = obs[..., -3:].repeat(8, 1).repeat(8, 2)  # of stacked images, the last
        over = np.broadcast_to(np.any(self.ends, axis=0), self.num_envs)  # these are black
        return np.hstack([image * ~is_over for image, is_over in zip(images, over, strict=True)])

    def close(self):
        for env in self.envs:
            getattr(env, "games", env).close()


def play(script, agent, config, args: Args, levels: range, title: str) -> pd.DataFrame:
    """A row for each episode. length: its steps, up to the first end."""
    rng = random.Random(args.seed)  # a new one for each set, so that its numbers do not depend on the other sets
    plan = rng.sample(levels, min(args.episodes, len(levels)))
    if not args.greedy:  # a greedy repeat of a level would be the same episode
        plan = np.resize(plan, args.episodes)
    batches = []
    for batch in tqdm(np.array_split(plan, math.ceil(len(plan) / BATCH_SIZE)), title):
        envs = LevelEnvs(script, config, batch.tolist())
        returns = script.evaluate(agent, envs, rng.getrandbits(31))
        envs.close()
        batches.append(pd.DataFrame({"level": batch, "return": returns, "length": 1 + np.argmax(envs.ends, axis=0)}))
    return pd.concat(batches)


def record_video(script, agent, config, levels: list[int], seed: int, path: Path):
    """Episodes side by side, until each has ended once. An absolute path, as 12 would be a protocol in 12:30/x.mp4."""
    import imageio_ffmpeg

    options = {"render_mode": "rgb_array"} if config.env_id in RANGES.index else {}
    envs = LevelEnvs(script, config, levels, **options)
    size = envs.draw(envs.reset()[0]).shape[1::-1]
    envs.video = imageio_ffmpeg.write_frames(str(path.resolve()), size, fps=15, ffmpeg_timeout=0)
    envs.video.send(None)  # starts ffmpeg
    script.evaluate(agent, envs, seed)
    envs.video.close()
    envs.close()


def interval(sample: pd.Series) -> tuple[float, float, float, float]:
    """Mean, standard error, and Student's 95 % interval of the mean."""
    mean, stderr = sample.mean(), sample.sem()
    margin = stats.t.ppf(0.975, len(sample) - 1) * stderr
    return mean, stderr, mean - margin, mean + margin


def summarize(rows: pd.DataFrame, r_min: float, r_max: float) -> dict:
    """Mean, standard error, Student's 95 % interval, normalized score (nan without a published range)."""
    level_means = rows.groupby("level")["return"].mean()
    mean, stderr, low, high = interval(level_means if len(level_means) > 1 else rows["return"])
    summary = {"episodes": len(rows), "num_levels": len(level_means), "mean": mean, "stderr": stderr}
    return summary | {"low": low, "high": high, "score": (mean - r_min) / (r_max - r_min)}


def load_agent(args: Args, path: Path) -> SimpleNamespace:
    """An agent, its script, and what is known of its training and its levels."""
    if path.is_dir():  # a checkpoint tells the iteration
        path /= "checkpoint.pt" if (path / "checkpoint.pt").exists() else "agent.pt"
    require(path.is_file(), f"there is no file {path}")
    record = path.with_name("args.json")
    run = json.loads(record.read_text())["args"] if record.exists() else {}
    env_id = args.env_id or run.get("env_id")
    require(env_id is not None, f"{path} has no args.json beside it, which names its game: add --env-id")
    names = args.levels or (["train", "test"] if run.get("num_levels") else ["all"])
    sets = {name: level_range(name, run) for name in names}
    mode = args.mode or run.get("distribution_mode", "easy")

    saved = torch.load(path, map_location="cpu", weights_only=True)
    weights = saved["shared"]["agent"] if "shared" in saved else saved
    script = load_script(path.parent, weights)
    if args.greedy:
        script.Policy.sample = lambda pi, generator=None: pi.mode
    arch = "dual" if "value_encoder.dense.weight" in weights else "shared"  # or detach: the same policy
    flags = {"arch": arch, **run, "env_id": env_id, "distribution_mode": mode, "cuda": args.cuda, "env_threads": 0}
    config = script.Args(**{x.name: flags[x.name] for x in fields(script.Args) if x.name in flags})
    envs = LevelEnvs(script, config, [0])
    agent = script.Agent(config, envs.envs[0]).to(config.device, memory_format=torch.channels_last)
    envs.close()
    agent.load_state_dict(weights)
    label = {"weights": path, "iteration": saved.get("iteration", "unknown"), "env_id": env_id, "mode": mode}
    return SimpleNamespace(agent=agent, script=script, config=config, sets=sets, label=label)


def main(args: Args):
    require(args.paths and args.episodes > 0, "needs a run folder or weights, and --episodes of at least 1")
    require(not args.out or not args.out.exists() or not any(args.out.iterdir()), f"--out {args.out} is not empty")
    agents = [load_agent(args, path) for path in args.paths]
    folder = agents[0].label["weights"].parent if len(agents) == 1 else Path()
    out = args.out or folder / "evaluation" / time.strftime("%Y%m%d-%H%M%S")
    summaries, first_of = [], {}
    for number, x in enumerate(agents):
        text = "{weights}, iteration {iteration}, in {env_id}".format(**x.label)
        print(f"{text}, by {x.script.__file__}, files in {out}")
        for name, levels in x.sets.items():
            title = f"{x.label['mode']} {name}"
            rows = play(x.script, x.agent, x.config, args, levels, title)
            label = x.label | {"levels": name, "greedy": args.greedy, "seed": args.seed}
            summary = label | summarize(rows, *RANGES.reindex([(label["env_id"], label["mode"])]).iloc[0])
            text = "{mean:.2f} ± {stderr:.2f}, 95 %: {low:.2f} to {high:.2f}, score {score:.3f}".format(**summary)
            print(f"{title}, {len(rows)} episodes: {text}", flush=True)
            means = rows.groupby("level")["return"].mean()
            first, first_means = first_of.setdefault((label["env_id"], title, *means.index), (label["weights"], means))
            if first_means is not means and len(means) > 1:
                difference, stderr, low, high = interval(means - first_means)
                print(f"minus {first}: {difference:+.2f} ± {stderr:.2f}, 95 %: {low:+.2f} to {high:+.2f}", flush=True)
                summary |= {"other": first, "difference": difference, "difference_low": low, "difference_high": high}
            summaries.append(summary)
            out.mkdir(parents=True, exist_ok=True)
            episodes = out / "episodes.csv"
            rows.assign(**label).to_csv(episodes, mode="a", header=not episodes.exists(), index=False)
            pd.DataFrame(summaries).to_csv(out / "summary.csv", index=False)
            if args.video:
                video = out / f"{number}_{title.replace(' ', '_').replace(':', '-')}.mp4"
                record_video(x.script, x.agent, x.config, np.resize(rows["level"], 4).tolist(), args.seed, video)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
