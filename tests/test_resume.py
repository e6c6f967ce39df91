"""Killed, stopped and resumed runs: real processes, real signals, real files."""

import itertools
import os
import random
import shlex
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import TINY, TINY_PPG, as_flags, interrupt, make_args, parse, read_rows, resume, same, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen


@pytest.fixture
def stopped(tmp_path):
    """A run that Ctrl-C has ended in its third iteration, with a checkpoint of the second."""
    args = make_args(ppg_procgen, tmp_path / "stopped", checkpoint_interval=2)
    return interrupt(ppg_procgen, args, 2 * 16 + 5)


def saved_iteration(run_dir) -> int:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]


def check_same(run_dir, whole) -> None:
    """The same weights and numbers, in metrics.csv and in TensorBoard; no row twice, none missing."""
    assert same(run_dir, whole) and scalars(run_dir) == scalars(whole)
    iterations = [int(row["iteration"]) for row in read_rows(run_dir)]
    assert iterations == list(range(1, saved_iteration(run_dir) + 1))
    assert not list(run_dir.glob("buffer*")) and not list(run_dir.glob("*.tmp"))


def scalars(run_dir):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(("time/", "wall_time", "charts/SPS"))
    }


def age(run_dir):
    """Its event files are read in the order of their names, which hold the second: resume as if much later."""
    for path in run_dir.glob("events.out.*"):
        *prefix, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*prefix, str(int(second) - 1000), rest])))


# ---- killed

VARIANTS = {
    "dual": (ppg_procgen, {"e_value": 2, "e_auxiliary": 2, "checkpoint_interval": 1}),
    "detach": (ppg_procgen, {"arch": "detach", "eval_interval": 1, "env_id": "bossfight"}),
    "shared": (ppg_procgen, {"arch": "shared", "e_auxiliary": 0, "checkpoint_interval": 1, "num_minibatches": 8}),
    "in memory": (ppg_procgen, {"aux_device": "cpu", "checkpoint_interval": 1}),
    "ppo": (ppo_procgen, {"checkpoint_interval": 1}),
}
# inside a rollout, an update, an auxiliary phase; in the writing of a checkpoint and of a row: the last call to kill at
TARGETS = {"ProcgenVectorEnv.step": 30, "update": 9, "os.fsync": 2, "torch.save": 4, "os.replace": 3}
TARGETS |= {"SummaryWriter.add_scalar": 40}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_random_moments_resumes_to_the_bits_of_one_never_killed(tmp_path, trained, start, variant):
    (script, flags), rng = VARIANTS[variant], random.Random(variant)
    run_dir, whole = tmp_path / "killed", trained(script, **flags)
    again = (TINY_PPG if script is ppg_procgen else TINY) | flags | {"run_dir": run_dir}
    codes = []
    for target in ["update", *rng.sample(list(TARGETS), len(TARGETS))]:
        kill = {"target": target, "k": rng.randint(1, TARGETS[target]) if codes else 1}
        result = start(script, {"kill": kill}, *as_flags(again)).end()
        codes.append(result.returncode)
        assert codes[-1] in (0, -signal.SIGKILL), (target, result.stderr)
        again = {"resume": run_dir}
        age(run_dir)
    assert codes.count(-signal.SIGKILL) >= 4
    resume(script, run_dir)
    check_same(run_dir, whole)


@pytest.mark.learning
@pytest.mark.parametrize("num_ranks, seconds", [(1, (0.1, 3)), (2, (0.5, 4))])  # two ranks first find each other
def test_thirty_kills_at_random_moments(tmp_path, start_ranks, num_ranks, seconds):
    """A rank is killed, another ends by itself; they resume until they end: the same bits, and little is lost."""
    flags = TINY_PPG | {"total_timesteps": num_ranks * 64 * 12, "n_iteration": 4, "e_auxiliary": 3}
    flags |= {"e_policy": 2, "e_value": 3, "checkpoint_interval": 2}
    whole, rng, kills, number = tmp_path / "whole", random.Random(1), 0, 0
    processes = start_ranks(ppg_procgen, {}, *as_flags(flags | {"run_dir": whole}), num_ranks=num_ranks)
    assert not any(process.end().returncode for process in processes)
    while kills < 30:
        run_dir, number, codes = tmp_path / f"killed{number}", number + 1, [None]
        while any(code != 0 for code in codes):
            again = {"resume": run_dir} if (run_dir / "args.json").exists() else flags | {"run_dir": run_dir}
            processes = start_ranks(ppg_procgen, {}, *as_flags(again), num_ranks=num_ranks)
            processes[0].process.join(rng.uniform(*seconds))
            rng.choice(processes).process.kill()  # nothing, if it has ended
            results = [process.end() for process in processes]
            codes = [result.returncode for result in results]
            assert set(codes) <= {0, -signal.SIGKILL, num_ranks - 1}, results  # 1: the other rank is lost
            kills += any(codes)
            age(run_dir)
            if (run_dir / "checkpoint.pt").exists():
                assert len(read_rows(run_dir)) - saved_iteration(run_dir) in (0, 1, 2), "rows that are done again"
        check_same(run_dir, whole)
    print(f"{kills} kills of {number} runs, the same weights and metrics")


# ---- stopped


def test_ctrl_c_and_the_command_that_resumes(tmp_path, trained, start):
    run_dir, kill = tmp_path / "a run", {"target": "update", "k": 12, "number": signal.SIGINT}
    result = start(ppg_procgen, {"kill": kill}, *as_flags(TINY_PPG | {"run_dir": run_dir})).end()
    assert result.returncode == 130 and result.stderr == ""
    [line] = [line for line in result.stdout.splitlines() if line.startswith("To resume")]
    assert line == f"To resume: python ppg_procgen.py --resume '{run_dir}'"
    age(run_dir)
    resume(ppg_procgen, shlex.split(line)[-1])
    check_same(run_dir, trained())


def test_a_finished_run_says_so_and_does_nothing(trained, capsys):
    before = {path: path.stat().st_mtime_ns for path in trained().iterdir()}
    resume(ppg_procgen, trained())
    assert capsys.readouterr().out.splitlines()[-1] == f"{trained()} is finished"
    assert {path: path.stat().st_mtime_ns for path in trained().iterdir()} == before


def test_what_only_changes_the_speed_may_change(stopped, trained):
    resume(ppg_procgen, stopped, "--env-threads", 2, "--checkpoint-interval", 1, "--aux-device", "cpu", "--no-compile")
    assert same(stopped, trained())


def test_a_buffer_with_rollouts_stays_in_its_file(tmp_path, capsys, trained):
    """The checkpoint is of iteration 3, with a rollout in the buffer that the auxiliary phase will need."""
    args = make_args(ppg_procgen, tmp_path / "run", checkpoint_interval=1)
    run_dir = interrupt(ppg_procgen, args, 3 * 16 + 1)
    (path,) = run_dir.glob("buffer_*.bin")
    assert saved_iteration(run_dir) == 3

    def check_refused(*flags):
        with pytest.raises(SystemExit, match="2"):
            resume(ppg_procgen, run_dir, *flags)
        assert f"needs --aux-device file and {path}" in capsys.readouterr().err

    check_refused("--aux-device", "cpu")
    path.rename(tmp_path / "elsewhere")
    check_refused()
    assert not path.exists(), "a refusal leaves no file that the next attempt would take"
    (tmp_path / "elsewhere").rename(path)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


def test_a_run_in_use_is_refused(stopped):
    with ppg_procgen.open_run(parse(ppg_procgen, "--resume", stopped)), pytest.raises(BlockingIOError):
        resume(ppg_procgen, stopped)
    resume(ppg_procgen, stopped)


# ---- files


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 10 MB: two checkpoints and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=10m none {folder} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system takes root")
    yield folder
    os.system(f"umount -l {folder}")


def test_a_full_disk_stops_the_run_and_harms_nothing(small_disk, trained, monkeypatch):
    run_dir, original = small_disk / "run", ppg_procgen.Logger.log

    def log(self, row):
        original(self, row)
        if row["iteration"] == 3:  # after the first phase
            (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))

    with monkeypatch.context() as patch, pytest.raises((OSError, RuntimeError)):
        patch.setattr(ppg_procgen.Logger, "log", log)
        train(ppg_procgen, make_args(ppg_procgen, run_dir, checkpoint_interval=1))
    assert saved_iteration(run_dir) == 2
    (small_disk / "filler").unlink()
    age(run_dir)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


def test_a_disk_too_small_for_the_buffer_ends_the_run_by_an_error_and_not_by_sigbus(small_disk):
    with pytest.raises(OSError, match="No space left on device"):
        train(ppg_procgen, make_args(ppg_procgen, small_disk / "run", num_envs=16, num_steps=64, total_timesteps=4096))


def test_a_loss_that_is_not_finite_ends_the_run_with_a_line_that_names_it(tmp_path, monkeypatch):
    calls, original = itertools.count(), ppg_procgen.ProcgenVectorEnv.step

    def step(self, actions):
        obs, rewards, *rest = original(self, actions)
        return obs, rewards * np.float32(np.nan if next(calls) == 40 else 1), *rest

    run_dir = tmp_path / "run"
    monkeypatch.setattr(ppg_procgen.ProcgenVectorEnv, "step", step)
    with pytest.raises(SystemExit, match="losses/policy_loss is nan"):
        train(ppg_procgen, make_args(ppg_procgen, run_dir, checkpoint_interval=1))
    assert saved_iteration(run_dir) == 2
    assert all(x.isfinite().all() for x in torch.load(run_dir / "agent.pt", weights_only=True).values())
