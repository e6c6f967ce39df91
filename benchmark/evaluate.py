"""Returns of a trained policy on chosen levels: a table, and CSV files down to the single episode.

    python benchmark/evaluate.py runs/RUN                                          # training and unseen levels
    python benchmark/evaluate.py runs/RUN --levels 0:50 --episodes 50 --video      # each of the levels 0 to 49 once
    python benchmark/evaluate.py agent.pt --env-id starpilot --modes easy hard     # weights that lie alone

A set of levels is named by
    train   the levels of the run's training
    test    all levels above them, as in the evaluations during training
    all     all levels
    A:B     the level seeds A, A + 1, ..., B - 1

The seed draws levels without repetition; a set smaller than --episodes is then played through again and again.
"""

import json
import math
import random
import re
import sys
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import tyro
from rich.console import Console
from rich.table import Table
from scipy import stats
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from any folder, nothing installed
import ppg_procgen  # noqa: E402
import ppo_procgen  # noqa: E402
from benchmark.report import RANGES  # noqa: E402
from ppg_procgen import NUM_LEVELS, Game, ProcgenVectorEnv, UsageError, evaluate  # noqa: E402

Mode = ppg_procgen.Args.__annotations__["distribution_mode"]
BATCH_SIZE = 64  # games at a time; no flag, because the random numbers that an episode meets depend on it


@dataclass
class Args:
    path: tyro.conf.Positional[Path]  # run folder, checkpoint.pt or agent.pt, of ppg_procgen.py or ppo_procgen.py
    levels: tuple[str, ...] = ()  # sets of levels (default: train test, or all if the run does not restrict them)
    modes: tuple[Mode, ...] = ()  # distribution modes (default: the run's)
    env_id: Game | None = None  # game (default: the run's)
    episodes: int = 128  # episodes of each set of levels in each mode
    greedy: bool = False  # the most probable actions instead of sampled ones
    seed: int = 1  # draws levels and actions; on a CPU the same seed gives the same numbers
    video: bool = False  # also record four episodes of each set in each mode
    out: Path | None = None  # folder to write to (default: evaluation, beside the weights)
    cuda: bool = True  # use the GPU if there is one

    def __post_init__(self) -> None:
        if self.episodes < 2:
            raise UsageError(f"a standard error needs at least 2 episodes, not {self.episodes}")
        if self.episodes > 100_000:
            raise UsageError(f"--episodes must be at most 100000, not {self.episodes}: procgen leaks 50 kB with each")
        if not 0 <= self.seed < 2**31:
            raise UsageError(f"--seed must be from 0 to {2**31 - 1}, not {self.seed}")


def load_agent(path: Path) -> tuple[torch.nn.Module, dict]:
    """The agent, and the arguments of its run: none for weights without an args.json beside them."""
    weights, record, run = ppg_procgen.load_checkpoint(path), path.with_name("args.json"), {}
    try:
        if isinstance(weights, dict) and "about" in weights:  # a checkpoint
            record = path
            weights, run = weights["agent"], weights["about"]["args"]
        elif record.exists():
            run = json.loads(record.read_text())["args"]
        if not isinstance(run, dict):
            raise TypeError("its args are no dictionary")
        checks = {"env_id": str, "distribution_mode": str, "start_level": int, "num_levels": int}
        run = {name: kind(run[name]) for name, kind in checks.items() if name in run}
        if min(run.get("start_level", 0), run.get("num_levels", 0)) < 0:
            raise ValueError("negative levels")
    except Exception as error:  # a damaged file can raise almost anything
        reason = f"{type(error).__name__}: {error}"
        advice = "" if record == path else "; move it away, and use --env-id"
        raise UsageError(f"{record} is broken: {reason}{advice}") from None
    try:
        if "encoder.dense.weight" in weights:
            agent = ppo_procgen.Agent()
        else:  # detach and shared have the same weights and play alike
            agent = ppg_procgen.Agent("dual" if "value_encoder.dense.weight" in weights else "shared")
        agent.load_state_dict(weights)
    except Exception:  # load_state_dict checks names and shapes, and trusts the rest
        raise UsageError(f"{path} does not hold the weights of a ppg_procgen.py or ppo_procgen.py") from None
    if not all(x.isfinite().all() for x in agent.parameters()):
        raise UsageError(f"{path} holds weights that are not finite")
    return agent, run


def level_range(name: str, start_level: int, num_levels: int) -> range:
    """The level seeds of a set."""
    end_level = start_level + num_levels
    sets = {"all": range(NUM_LEVELS), "train": range(start_level, end_level) if num_levels else range(NUM_LEVELS)}
    if num_levels:
        sets["test"] = range(end_level, NUM_LEVELS)
    named = ", ".join(sets)
    # ten digits: NUM_LEVELS has no more, and int() raises at thousands
    if bounds := re.fullmatch(r"(\d{1,10}):(\d{1,10})", name):
        sets[name] = range(int(bounds[1]), int(bounds[2]))
    if not (levels := sets.get(name)) or levels[-1] >= NUM_LEVELS:
        why = "; no level is known to be unseen" if name == "test" else ""
        raise UsageError(f"--levels {name:.40}: not one of {named}, A:B with A < B <= {NUM_LEVELS}{why}")
    return levels


def level_start(game: str, mode: str, level: int) -> torch.Tensor:
    """The state of a game that begins this level: procgen takes no list of levels, but any game of the same name and
    mode goes on from a state. Costs about 10 ms and 50 kB, which procgen leaks."""
    with closing(ProcgenVectorEnv(game, 1, mode, num_levels=1, start_level=level)) as envs:
        return envs.state_dict()["games"][0]


def play(agent, envs: ProcgenVectorEnv, starts: list[torch.Tensor], seed: int, greedy: bool, bar: tqdm) -> pd.DataFrame:
    """An episode from each of the starts: level, return, length."""
    envs.load_state_dict({"games": starts})
    if envs.has_gym3:  # procgen's word for it, not ours
        levels = [info["level_seed"] for info in envs.games.get_info()]
    else:
        levels = envs.reset()[1]["level_seed"]
    lengths, before = np.ones(envs.num_envs, int), bar.n

    def count(playing: np.ndarray) -> None:
        lengths[playing] += 1
        bar.update(before + envs.num_envs - int(playing.sum()) - bar.n)

    returns = evaluate(agent, envs, seed, greedy, count)
    return pd.DataFrame({"level": levels, "return": returns, "length": lengths})


def play_set(agent, args: Args, game: str, mode: str, name: str, levels: range, out: Path) -> pd.DataFrame:
    """args.episodes episodes on these levels, in batches of one size: the last is filled up and the excess dropped."""
    rng = random.Random(args.seed)  # afresh for each set: its numbers are the same whatever else is asked for
    num_batches = math.ceil(args.episodes / BATCH_SIZE)
    size = math.ceil(args.episodes / num_batches)
    chosen = rng.sample(levels, min(args.episodes, len(levels)))
    todo, results = cycle(chosen), []
    if not sys.stderr.isatty():  # else the bar says it
        print(f"{mode} {name}: {args.episodes} episodes", file=sys.stderr, flush=True)
    progress = tqdm(total=num_batches * size, desc=f"{mode} {name}", unit="episode", disable=None, leave=False)
    with closing(ProcgenVectorEnv(game, size, mode)) as envs, progress as bar:
        for _ in range(num_batches):
            starts = [level_start(game, mode, level) for level in islice(todo, size)]
            results.append(play(agent, envs, starts, rng.getrandbits(31), args.greedy, bar))
    if args.video:
        path = out / f"{mode}_{name.replace(':', '-')}.mp4"
        with closing(ProcgenVectorEnv(game, 4, mode, render_mode="rgb_array")) as envs:
            envs.load_state_dict({"games": [level_start(game, mode, level) for level in islice(cycle(chosen), 4)]})
            ppg_procgen.record_video(agent, envs, path, args.seed, args.greedy)
    return pd.concat(results)[: args.episodes]


def summarise(returns: pd.Series, worst: float, best: float) -> dict[str, float]:
    """Mean, standard deviation and error, Student's 95 % interval; mean and interval as normalised scores too."""
    mean, stderr = returns.mean(), returns.sem()
    low, high = stats.t.interval(0.95, len(returns) - 1)  # of standard error 1: scipy gives nan for 0
    summary = {"mean": mean, "low": mean + low * stderr, "high": mean + high * stderr}
    summary |= {f"score_{name}": (value - worst) / (best - worst) for name, value in summary.items()}
    return {"episodes": len(returns), "std": returns.std(), "stderr": stderr} | summary


def main(args: Args) -> None:
    files = [args.path / name for name in ("agent.pt", "checkpoint.pt")] if args.path.is_dir() else [args.path]
    if not (path := next((file for file in files if file.is_file()), None)):
        raise UsageError(f"no such file: {' or '.join(map(str, files))}")
    agent, run = load_agent(path)
    if not (game := args.env_id or run.get("env_id")):
        raise UsageError(f"{path} does not say its game, and has no args.json beside it: add --env-id")
    if game not in Game.__args__:
        raise UsageError(f"{game!r} is no Procgen game: add --env-id")
    modes = args.modes or (run.get("distribution_mode", "easy"),)
    if unknown := set(modes) - set(Mode.__args__):
        raise UsageError(f"{unknown.pop()!r} is no distribution mode: add --modes")
    start_level, num_levels = run.get("start_level", 0), run.get("num_levels", 0)
    names = args.levels or (("train", "test") if num_levels else ("all",))
    ranges = {name: level_range(name, start_level, num_levels) for name in names}
    for mode in modes:
        if game not in (games := ppg_procgen.GAMES_WITH_MODE.get(mode, [game])):
            raise UsageError(f"{game} has no {mode} mode; {', '.join(games)} have")
        if mode == "exploration" and names != ("all",):
            raise UsageError("exploration mode has a single level of its own: use --levels all")

    agent.to("cuda" if args.cuda and torch.cuda.is_available() else "cpu", memory_format=torch.channels_last)
    out = args.out or path.parent / "evaluation"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in ("episodes.csv", "summary.csv"):
            open(out / name, "a").close()  # touch() accepts a folder
    except OSError as error:
        raise UsageError(f"--out: {error}") from None
    episodes, summary = [], []
    table = Table("mode", "levels", "episodes", "return", "95 % interval", "score", title=game, min_width=60)
    for mode in modes:
        for name, levels in ranges.items():
            label = {"env_id": game, "mode": mode, "levels": name, "greedy": args.greedy, "seed": args.seed}
            episodes.append(play_set(agent, args, game, mode, name, levels, out).assign(**label))
            row = summarise(episodes[-1]["return"], *RANGES[game].get(mode, (math.nan, math.nan)))
            summary.append(label | row)
            score = f"{row['score_mean']:.3f}" if mode in RANGES[game] else "no range published"
            cells = f"{row['mean']:.2f} ± {row['stderr']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", score
            table.add_row(mode, name, str(row["episodes"]), *cells)
    pd.concat(episodes).to_csv(out / "episodes.csv", index=False, columns=[*label, "level", "return", "length"])
    pd.DataFrame(summary).to_csv(out / "summary.csv", index=False)
    Console(highlight=False).print(table, f"{path}; every episode in {out}/episodes.csv", sep="\n")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only
    try:
        main(tyro.cli(Args, description=__doc__))
    except UsageError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
