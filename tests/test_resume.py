"""Killed, stopped and resumed runs: real processes, real signals, real files."""

import errno
import itertools
import math
import os
import pickle
import random
import shutil
import signal
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import SLOW, TINY, TINY_PPG, as_flags, interrupt, make_args, read_rows, resume, same, train
from filelock import FileLock, Timeout
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen


@pytest.fixture
def stopped(tmp_path):
    """A run that Ctrl-C has ended in its third iteration, with a checkpoint of the second."""
    return interrupt(ppg_procgen, make_args(ppg_procgen, tmp_path / "stopped"), 2 * 16 + 5)


def saved_iteration(run_dir) -> int:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]


def check_same(run_dir, whole) -> None:
    """The same weights and numbers, in metrics.csv (same rows, none twice or missing) and in TensorBoard."""
    assert same(run_dir, whole) and scalars(run_dir) == scalars(whole)
    wall_times = [float(row["wall_time"]) for row in read_rows(run_dir)]
    assert wall_times == sorted(wall_times) and not (run_dir / "tmp").exists()


def scalars(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = set(events.Tags()["scalars"]) - {"wall_time", "charts/SPS"}
    return {tag: [(event.step, str(event.value)) for event in events.Scalars(tag)] for tag in tags}  # nan: as text


def age(run_dir):
    """Its event files are read in the order of their names, which hold the second: resume as if much later."""
    for path in run_dir.glob("tensorboard/events.out.*"):
        *prefix, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*prefix, str(int(second) - 1000), rest])))


VARIANTS = {
    "dual": (ppg_procgen, {"e_value": 2, "e_auxiliary": 2, "n_iteration": 1}),
    "detach": (ppg_procgen, {"arch": "detach", "eval_interval": 1, "env_id": "bossfight"}),
    "shared": (ppg_procgen, {"arch": "shared", "e_auxiliary": 0, "n_iteration": 1, "num_minibatches": 8}),
    "ppo": (ppo_procgen, {"checkpoint_interval": 1}),
}
# inside a rollout, an update, an auxiliary phase; in the writing of a checkpoint and of a row: the last call to kill at
TARGETS = {"step": 30, "gradient_step": 9, "torch.save": 4, "torch.load": 3, "os.replace": 6, "csv.DictWriter": 4}
TARGETS["SummaryWriter.add_scalar"] = 40


@pytest.mark.parametrize("variant", [pytest.param(x, marks=SLOW * (x not in ("dual", "ppo"))) for x in VARIANTS])
def test_a_run_killed_at_random_moments_resumes_to_the_bits_of_one_never_killed(tmp_path, trained, start, variant):
    (script, flags), rng = VARIANTS[variant], random.Random(variant)
    run_dir, codes = tmp_path / "killed", []
    again = (TINY_PPG if script is ppg_procgen else TINY) | flags | {"run_dir": run_dir}  # the same command
    for target in ["os.replace", "os.replace", "gradient_step", *rng.sample(list(TARGETS), len(TARGETS))]:
        kill = {"target": target, "k": rng.randint(1, TARGETS[target]) if len(codes) > 2 else 1 + len(codes) % 2}
        result = start(script, {"kill": kill}, *as_flags(again)).end()
        codes.append(result.returncode)
        assert codes[-1] in (0, -signal.SIGKILL), (target, result.stderr)
        age(run_dir)
    assert codes.count(-signal.SIGKILL) >= 4
    resume(script, run_dir)
    check_same(run_dir, trained(script, **flags))


def test_ppo_saves_at_its_interval(tmp_path):
    args = make_args(ppo_procgen, tmp_path / "run", checkpoint_interval=2)
    assert saved_iteration(interrupt(ppo_procgen, args, 3 * 16 + 5)) == 2


@pytest.mark.learning
@pytest.mark.parametrize("num_ranks, seconds", [(1, (0.1, 3)), (2, (0.5, 4))])  # two ranks first find each other
def test_thirty_kills_at_random_moments(tmp_path, start_ranks, num_ranks, seconds):
    flags = TINY_PPG | {"total_timesteps": num_ranks * 64 * 12, "n_iteration": 4, "e_auxiliary": 3}
    flags |= {"e_policy": 2, "e_value": 3}
    whole, rng, kills, number = tmp_path / "whole", random.Random(1), 0, 0
    processes = start_ranks(ppg_procgen, {}, *as_flags(flags | {"run_dir": whole}), num_ranks=num_ranks)
    assert not any(process.end().returncode for process in processes)
    while kills < 30:
        run_dir, number, codes = tmp_path / f"killed{number}", number + 1, [None]
        while any(code != 0 for code in codes):
            again = as_flags(flags | {"run_dir": run_dir})
            processes = start_ranks(ppg_procgen, {}, *again, num_ranks=num_ranks)
            processes[0].process.join(rng.uniform(*seconds))
            rng.choice(processes).process.kill()  # nothing, if it has ended
            results = [process.end(20) for process in processes]  # a rank that has not met the other waits for it
            codes = [result.returncode for result in results]
            assert set(codes) <= {0, -signal.SIGKILL, num_ranks - 1}, results  # 1: the other rank is lost
            kills += any(codes)
            age(run_dir)
            if (run_dir / "checkpoint.pt").exists() and saved_iteration(run_dir) > 0:
                assert len(read_rows(run_dir)) - saved_iteration(run_dir) in range(5), "more than a phase is done again"
        check_same(run_dir, whole)


def test_ctrl_c_and_a_run_folder_that_moves(tmp_path, trained, start):
    run_dir, kill = tmp_path / "a run", {"target": "gradient_step", "k": 12, "number": signal.SIGINT}
    result = start(ppg_procgen, {"kill": kill}, *as_flags(TINY_PPG | {"run_dir": run_dir})).end()
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    age(run_dir)
    check_same(resume(ppg_procgen, run_dir.rename(tmp_path / "moved")), trained())


def test_a_finished_run_says_so_and_does_nothing(trained, capsys):
    before = {name: (trained() / name).read_bytes() for name in ("checkpoint.pt", "agent.pt", "metrics.csv")}
    resume(ppg_procgen, trained())
    assert capsys.readouterr().out.splitlines()[-1] == f"{trained()} is finished"
    assert {name: (trained() / name).read_bytes() for name in before} == before


def test_rows_are_written_as_they_come_and_what_only_changes_the_speed_may_change(stopped, trained):
    assert len((stopped / "metrics.csv").read_text().splitlines()) == 1 + 2
    with open(stopped / "metrics.csv", "a") as file:
        file.write("3,192,0.5")  # a line that a full disk cut off
    assert same(resume(ppg_procgen, stopped, "--env-threads", 2, "--chunk-size", 999), trained())
    assert sorted(times := [float(row["wall_time"]) for row in read_rows(stopped)]) == times


def test_an_edited_script_is_refused_until_it_is_the_one_in_the_folder(stopped, trained, monkeypatch, capsys, tmp_path):
    mine = tmp_path / "ppg_procgen.py"
    mine.write_text(Path(ppg_procgen.__file__).read_text() + "\n")
    monkeypatch.setattr(ppg_procgen, "__file__", str(mine))
    with pytest.raises(SystemExit, match="2"):
        resume(ppg_procgen, stopped)
    assert f"ppg_procgen.py: {stopped} has another script: run that, or" in capsys.readouterr().err
    shutil.copy(mine, stopped)
    assert same(resume(ppg_procgen, stopped), trained())


def test_what_could_not_be_read_back_ends_the_run_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(ppg_procgen.EpisodeStatistics, "__init__", lambda self, _: setattr(self, "mine", np.zeros(3)))
    with pytest.raises(pickle.UnpicklingError, match="numpy"):
        train(ppg_procgen, make_args(ppg_procgen, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.csv").exists()


def test_a_run_in_use_and_a_file_system_without_locks_are_refused(stopped):
    with FileLock(stopped / "lock0"), pytest.raises(Timeout, match="could not be acquired"):
        resume(ppg_procgen, stopped)
    error = OSError(errno.ENOSYS, "Function not implemented")  # as on Lustre without its option flock
    with mock.patch("fcntl.flock", side_effect=error), pytest.raises(OSError, match="not implemented"):
        resume(ppg_procgen, stopped)
    resume(ppg_procgen, stopped)


def test_a_full_disk_stops_the_run_and_harms_nothing(tmp_path, trained, monkeypatch):
    def save(content, path, original=torch.save):
        original(content, path)
        if isinstance(path, Path) and next(calls) == 6:  # the checkpoint of the second phase
            os.truncate(path, 1000)
            raise OSError("No space left on device")

    calls, run_dir = itertools.count(1), tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(torch, "save", save)
        train(ppg_procgen, make_args(ppg_procgen, run_dir))
    assert saved_iteration(run_dir) == 2 and same(resume(ppg_procgen, run_dir), trained())


@pytest.mark.parametrize("loss", ["policy_loss", "joint_loss"])
def test_a_gradient_that_is_not_finite_ends_the_run_after_its_row(tmp_path, monkeypatch, capsys, loss):
    def broken(agent, args, out, mb):
        result, stats = original(agent, args, out, mb)
        return result * (math.nan if next(calls) >= 4 else 1), stats  # from iteration 3, or the second phase, on

    calls, run_dir, original = itertools.count(), tmp_path / "run", getattr(ppg_procgen, loss)
    monkeypatch.setattr(ppg_procgen, loss, broken)
    with pytest.raises(SystemExit, match="2"):  # a sweep does not try it again
        train(ppg_procgen, make_args(ppg_procgen, run_dir))
    assert "a gradient is not finite" in capsys.readouterr().err
    rows = read_rows(run_dir)
    assert len(rows) == (3 if loss == "policy_loss" else 4)
    assert "nan" in (rows[-1]["losses/grad_norm"], rows[-1]["losses/aux/grad_norm"])
    assert saved_iteration(run_dir) == 2
    assert all(x.isfinite().all() for x in torch.load(run_dir / "agent.pt", weights_only=True).values())
