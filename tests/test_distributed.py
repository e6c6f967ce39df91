"""Several ranks, real processes, by gloo: the algorithm of one process, the same bits, lost ranks, torchrun."""

import itertools
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, TINY_PPG, TORCHRUN, as_flags, comparable, read_rows, same, train
from worker import install_recording, install_scripted

import ppg_procgen
import ppo_procgen

FLAGS = TINY_PPG | {"total_timesteps": 4 * 2 * 4 * 16}  # 4 iterations of 2 ranks x 4 x 16, two phases
SMALL = {"num_envs": 2, "num_steps": 8, "total_timesteps": 4 * 32}  # a rank's minibatch: 8 samples, or 2 rollouts
VARIANTS = {
    "dual": (ppg_procgen, TINY_PPG | SMALL, 4 * 2 + 2 * 2),
    "detach": (ppg_procgen, TINY_PPG | SMALL | {"arch": "detach", "e_value": 2}, 4 * 2 * 3 + 2 * 2),
    "ppo": (ppo_procgen, TINY | SMALL | {"update_epochs": 2}, 4 * 2 * 2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_do_what_one_process_of_all_environments_does(tmp_path, ranks, variant):
    script, flags, num_updates = VARIANTS[variant]
    options = {"scripted": True, "record": f"{tmp_path}/rank"}
    for result in ranks(script, options, *as_flags(flags | {"run_dir": tmp_path / "ranks"})):
        assert result.returncode == 0, result.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    one_flags = flags | {"num_envs": 4, "run_dir": str(tmp_path / "one")}
    if "num_aux_rollouts" in flags:
        one_flags["num_aux_rollouts"] *= 2
    with pytest.MonkeyPatch.context() as patch:
        install_scripted(script, patch.setattr)
        one = install_recording(script, patch.setattr)
        train(script, script.Args(**one_flags))
    assert len(one) == len(first) == num_updates
    assert {seed for *_, seed in first}.isdisjoint(seed for *_, seed in second), "ranks draw differently"
    assert len({seed for *_, seed in first}) == 4, "so do iterations"
    for (grads, params, _), ours, theirs in zip(one, first, second, strict=True):
        assert all(map(torch.equal, ours[:2], theirs[:2])), "averaged gradients, the same bits on every rank"
        assert (ours[0] - grads).norm() < 1e-7 * grads.norm()
        torch.testing.assert_close(ours[1], params, rtol=1e-7, atol=1e-7)
    tables = [comparable(tmp_path / name)[0] for name in ("ranks", "one")]
    numbers, one_numbers = ([{name: float(x or -1) for name, x in row.items()} for row in rows] for rows in tables)
    assert sum(row["charts/episodic_return"] != -1 for row in numbers) > 2
    for row, one_row in zip(numbers, one_numbers, strict=True):
        assert row == pytest.approx(one_row, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    first, second = ranks(ppg_procgen, {}, *as_flags(FLAGS | {"run_dir": run_dir}))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.endswith("is finished\n") and second.stdout == "", "rank 0 alone speaks"
    assert first.stdout.count(", SPS ") == 4, "a line an iteration"
    return run_dir


def test_the_budget_is_of_all_ranks_which_differ_in_games(whole):
    assert [int(row["global_step"]) for row in read_rows(whole)] == [128, 256, 384, 512]
    checkpoint = torch.load(whole / "checkpoint.pt", weights_only=True)
    games = [game for rank in checkpoint["ranks"] for game in rank["envs"]]
    assert len(games) == len(set(games)) == 8


def test_no_two_ranks_of_any_seeds_play_the_same(monkeypatch, script):
    """Procgen's environments have one seed. Those of gymnasium count on from that of their reset."""

    def make_envs(args, seed, *_):
        seeds.append(seed)
        return SimpleNamespace(reset=lambda seed: (np.zeros(1), firsts.append(seed)))

    monkeypatch.setattr(script, "make_envs", make_envs)
    monkeypatch.setattr(script, "NUM_RANKS", 3)
    seeds, firsts = [], []
    for seed, rank in itertools.product((0, 1, 2**40), range(3)):  # Procgen takes an int32
        monkeypatch.setattr(script, "RANK", rank)
        script.make_train_envs(script.Args(seed=seed, num_envs=5))
    assert len(set(seeds)) == 9 and max(seeds) < 2**31
    assert len({first + i for first in firsts for i in range(5)}) == 9 * 5


@pytest.mark.slow
def test_torchrun_trains_twice_to_the_same_bits_and_leaves_no_thread_of_gloo_that_may_abort(tmp_path, script):
    path = tmp_path / f"{script.__name__}.py"
    end = '    assert not any("gloo" in x.read_text() for x in Path("/proc/self/task").glob("*/comm"))\n'
    path.write_text(Path(script.__file__).read_text() + end)
    flags = TINY_PPG | {"arch": "detach"} if script is ppg_procgen else TINY
    for name in "ab":
        subprocess.run([*TORCHRUN, path, *as_flags(flags | {"run_dir": tmp_path / name})], check=True)
    assert same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("rank, target, k", [(0, "step", 40), (1, "gradient_step", 6), (0, "Run.save", 3)])
def test_a_lost_rank_ends_the_others_and_nothing_that_was_saved_is_lost(ranks, whole, tmp_path, rank, target, k):
    """In iteration 3, in the first auxiliary phase, and at the last checkpoint: with a traceback and exit code 1."""
    run_dir = tmp_path / "run"
    options = {"kill": {"rank": rank, "target": target, "k": k}}
    results = ranks(ppg_procgen, options, *as_flags(FLAGS | {"run_dir": run_dir}))
    assert (results[rank].returncode, results[1 - rank].returncode) == (-signal.SIGKILL, 1)
    assert "Traceback" in results[1 - rank].stderr
    assert torch.load(run_dir / "checkpoint.pt")["iteration"] == (2 if rank == 0 else 0)
    assert [result.returncode for result in ranks(ppg_procgen, {}, "--resume", run_dir)] == [0, 0]
    assert same(run_dir, whole)


@pytest.mark.parametrize("option, name", [("lonely", "agent"), ("uneven", "reward_normalizer")])
def test_ranks_that_differ_in_what_they_share_end_at_the_checkpoint(tmp_path, ranks, option, name):
    """As when a loss of one's own has its own backward, without the average over ranks, or a rank has its own state."""
    for result in ranks(ppg_procgen, {option: True}, *as_flags(FLAGS | {"run_dir": tmp_path / "run"})):
        assert result.returncode == 2 and f"{name} differs between ranks" in result.stderr
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["iteration"] == 0


def test_ranks_that_do_not_begin_alike_end_at_once(tmp_path, ranks, whole):
    """Other flags, or another checkpoint, where ranks do not share a file system."""
    new, other = (["--run-dir", tmp_path / name] for name in ("new", "other"))
    old = ["--run-dir", shutil.copytree(whole, tmp_path / "old")]
    for own in ([new, [*other, "--gamma=0.9"]], [new, old]):
        for result in ranks(ppg_procgen, {}, *as_flags(FLAGS), own=own):
            assert result.returncode == 2 and "flags, script or iteration differs between ranks" in result.stderr


def test_another_number_of_ranks_is_refused_in_one_line(ranks, trained):
    for result in ranks(ppg_procgen, {}, "--resume", trained()):
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr == "ppg_procgen.py: num_ranks was 1 when the run began: it cannot change\n"
