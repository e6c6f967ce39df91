"""Several ranks, real processes that talk by gloo: the same algorithm as in one process, the same bits on every rank,
lost ranks, torchrun, and the SLURM job of such a run."""

import contextlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, TINY_PPG, Process, as_flags, read_rows, same, train, wait_for
from worker import install_recording, install_scripted

import ppg_procgen
import ppo_procgen

WORKER = ROOT / "tests" / "worker.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FLAGS = TINY_PPG | {"total_timesteps": 4 * 2 * 4 * 16}  # 4 iterations of 2 ranks x 4 x 16, two phases


@pytest.fixture(scope="session")
def start_ranks(start):
    """start_ranks(script, options, *flags) starts two ranks: what torchrun starts, without torchrun."""
    # below the ports that the system gives out, a range for each process of pytest-xdist
    ports = itertools.count(20_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))

    def start_ranks(script, options: dict, *flags) -> list[Process]:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(ports)), "WORLD_SIZE": "2"}
        return [start(script, options, *flags, RANK=rank, LOCAL_RANK=rank, **environment) for rank in "01"]

    return start_ranks


@pytest.fixture(scope="session")
def ranks(start_ranks):
    """ranks(script, options, *flags): the results of two ranks that run to their end."""
    return lambda *task: [process.end() for process in start_ranks(*task)]


def runs_with(mark: str) -> bool:
    """Whether a process with this mark in its environment runs: torchrun gives each rank a session of its own."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if mark.encode() in environment.read_bytes():
                return True
    return False


def launch(*command) -> subprocess.CompletedProcess:
    """Run to the end; no process may be left behind."""
    environment = os.environ | {"RANKS_OF_TEST": (mark := uuid.uuid4().hex)}
    pipes = {"capture_output": True, "text": True, "timeout": 150}
    result = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, **pipes)
    wait_for(lambda: not runs_with(mark), 30)
    return result


# ---- the same algorithm as in one process

# 2 ranks x 2 games x 8 steps, two phases; a rank's minibatches have 8 samples, the 2 auxiliary ones 2 rollouts
SMALL = {"env_id": "chaser", "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 4 * 32}
SMALL_PPG = SMALL | {"n_iteration": 2, "num_aux_rollouts": 2, "e_auxiliary": 1, "aux_dtype": "float32"}
VARIANTS = {
    "dual": (ppg_procgen, SMALL_PPG, 4 * 2 + 2 * 2),
    "detach": (ppg_procgen, SMALL_PPG | {"arch": "detach", "e_value": 2}, 4 * 2 * 3 + 2 * 2),
    "ppo": (ppo_procgen, SMALL | {"update_epochs": 2}, 4 * 2 * 2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_do_what_one_process_of_all_environments_does(tmp_path, ranks, variant):
    script, flags, num_updates = VARIANTS[variant]
    options = {"scripted": True, "record": f"{tmp_path}/rank"}
    for result in ranks(script, options, *as_flags(flags | {"run_dir": tmp_path / "ranks"})):
        assert result.returncode == 0, result.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))

    one_flags = flags | {"num_envs": 4, "cuda": False, "run_dir": str(tmp_path / "one")}
    if "num_aux_rollouts" in flags:
        one_flags["num_aux_rollouts"] *= 2
    try:
        with pytest.MonkeyPatch.context() as patch:
            install_scripted(script, patch.setattr)
            one = install_recording(script, patch.setattr)
            train(script, script.Args(**one_flags))
    finally:
        torch.set_default_dtype(torch.float32)

    assert len(one) == len(first) == num_updates
    for (grads, params), ours, theirs in zip(one, first, second, strict=True):
        assert all(map(torch.equal, ours, theirs)), "averaged gradients, the same bits on every rank"
        assert (ours[0] - grads).norm() < 1e-7 * grads.norm()
        torch.testing.assert_close(ours[1], params, rtol=1e-7, atol=1e-7)
    rows, one_rows = read_rows(tmp_path / "ranks"), read_rows(tmp_path / "one")
    assert sum(bool(row["charts/episodic_return"]) for row in rows) > 2
    for row, one_row in zip(rows, one_rows, strict=True):
        for name in row:
            if not name.startswith(("time/", "wall_time", "charts/SPS")):
                expected = pytest.approx(float(one_row[name] or -1), rel=1e-6, abs=1e-9)
                assert float(row[name] or -1) == expected, name


# ---- real games


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks) -> Path:
    """A run of two ranks that nothing has disturbed."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    first, second = ranks(ppg_procgen, {}, *as_flags(FLAGS | {"run_dir": run_dir}))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.endswith("is finished\n") and second.stdout == "", "rank 0 alone speaks"
    return run_dir


def test_the_budget_is_of_all_ranks_which_differ_in_games_and_random_numbers(whole):
    assert [int(row["global_step"]) for row in read_rows(whole)] == [128, 256, 384, 512]
    states = torch.load(whole / "checkpoint.pt", weights_only=True)["ranks"]
    games = [game for rank in states for game in rank["envs"]["games"]]
    assert len(games) == len(set(games)) == 8
    assert not torch.equal(states[0]["rng"], states[1]["rng"])


def test_the_same_seed_gives_the_same_bits_again(whole, ranks, tmp_path):
    results = ranks(ppg_procgen, {}, *as_flags(FLAGS | {"run_dir": tmp_path / "again"}))
    assert [result.returncode for result in results] == [0, 0], results
    assert same(tmp_path / "again", whole)


# ---- torchrun


@pytest.mark.slow
def test_a_lost_rank_ends_a_torchrun_and_it_resumes_to_the_bits_of_one_never_killed(whole, tmp_path):
    """Rank 1 is killed in the second phase."""
    run_dir, options = tmp_path / "a run", {"kill": {"rank": 1, "target": "update", "k": 14}}
    flags = as_flags(FLAGS | {"run_dir": run_dir})
    result = launch(*TORCHRUN, WORKER, "ppg_procgen", json.dumps(options), *flags)
    assert result.returncode == 1 and re.search(r"exitcode +: -9", result.stderr), result.stderr
    (line,) = re.findall("^To resume: (.*)$", result.stdout, re.M)
    assert shlex.split(line)[1:] == [str(WORKER), "--resume", str(run_dir)]
    result = launch(*TORCHRUN, WORKER, "ppg_procgen", "{}", *shlex.split(line)[2:])
    assert result.returncode == 0, result.stderr
    assert same(run_dir, whole)


@pytest.mark.slow
def test_the_scripts_by_torchrun(tmp_path, script):
    """The files themselves with the real network: twice, and to the same bits."""
    flags = TINY_PPG | {"arch": "detach"} if script is ppg_procgen else TINY
    for name in "ab":
        result = launch(*TORCHRUN, f"{script.__name__}.py", *as_flags(flags | {"run_dir": tmp_path / name}))
        assert result.returncode == 0, result.stderr
    assert same(tmp_path / "a", tmp_path / "b")


# ---- what goes wrong


@pytest.mark.parametrize("rank, target, k", [(0, "ProcgenVectorEnv.step", 40), (1, "update", 6)])
def test_a_lost_rank_ends_the_others(ranks, tmp_path, rank, target, k):
    """In iteration 3, and in the auxiliary phase: with a traceback and exit code 1."""
    run_dir = tmp_path / "run"
    options = {"kill": {"rank": rank, "target": target, "k": k}}
    results = ranks(ppg_procgen, options, *as_flags(FLAGS | {"run_dir": run_dir}))
    assert (results[rank].returncode, results[1 - rank].returncode) == (-signal.SIGKILL, 1)
    assert "Traceback" in results[1 - rank].stderr
    assert (run_dir / "checkpoint.pt").exists() == (rank == 0)


@pytest.mark.learning
def test_thirty_kills_of_a_rank_at_random_moments(ranks, start_ranks, tmp_path):
    """One of two ranks is killed, the other ends by itself; both resume until they end: the same bits."""
    flags = FLAGS | {"total_timesteps": 128 * 12, "n_iteration": 4, "e_auxiliary": 3, "checkpoint_interval": 2}
    results = ranks(ppg_procgen, {}, *as_flags(flags | {"run_dir": tmp_path / "whole"}))
    assert [result.returncode for result in results] == [0, 0], results
    rng, kills, number = random.Random(1), 0, 0
    while kills < 30:
        run_dir, number, codes = tmp_path / f"killed{number}", number + 1, []
        while codes != [0, 0]:
            begin, again = as_flags(flags | {"run_dir": run_dir}), ["--resume", run_dir]
            processes = start_ranks(ppg_procgen, {}, *(again if (run_dir / "args.json").exists() else begin))
            processes[0].process.join(rng.uniform(0.5, 6))
            rng.choice(processes).process.kill()  # nothing, if it has ended
            codes = [process.end().returncode for process in processes]
            assert set(codes) <= {0, 1, -signal.SIGKILL}, codes
            kills += codes != [0, 0]
        assert same(run_dir, tmp_path / "whole") and not list(run_dir.glob("buffer*"))
    print(f"{kills} kills in {number} runs of two ranks, the same weights and metrics")


def test_a_rank_keeps_its_buffer_until_the_last_checkpoint_is_saved(ranks, whole, tmp_path):
    """Rank 0 is killed as it writes the last one: the one before, in the middle of a phase, needs both buffers."""
    run_dir = tmp_path / "run"
    options = {"kill": {"rank": 0, "target": "save_checkpoint", "k": 4}}
    results = ranks(ppg_procgen, options, *as_flags(FLAGS | {"run_dir": run_dir, "checkpoint_interval": 1}))
    assert [result.returncode for result in results] == [-signal.SIGKILL, 1]
    assert len(read_rows(run_dir)) == 4 and len(list(run_dir.glob("buffer_*.bin"))) == 2
    assert [result.returncode for result in ranks(ppg_procgen, {}, "--resume", run_dir)] == [0, 0]
    assert same(run_dir, whole) and not list(run_dir.glob("buffer_*.bin"))


def test_another_number_of_ranks_is_refused_in_one_line(ranks, trained):
    for result in ranks(ppg_procgen, {}, "--resume", trained()):
        assert result.returncode == 2 and result.stdout == ""
        assert re.fullmatch(r"ppg_procgen.py: these flags of the run cannot change: .*num_ranks\n", result.stderr)


# ---- the SLURM job

# stand-ins for SLURM's programs, and a torchrun that makes a checkpoint and then does what the file mode says
PROGRAMS = {
    "torchrun": 'echo "$@" >calls; mkdir -p run; touch run/args.json ready; . ./mode',
    "srun": '[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=32" ] && shift 2 && "$@"',
    "scontrol": """case $* in
        "requeue 123456") touch requeued ;;
        "show job 123456") echo "JobId=123456 PreemptTime=$(cat preempted)" ;;
        "show hostnames node[3-4]") printf 'node3\nnode4\n' ;;
    esac""",
    "sleep": "touch slept",
}
SLURM = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_CPUS_PER_TASK": "32"}


def test_slurm_job_starts_resumes_and_asks_for_a_requeue(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, source in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{source}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | SLURM | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = ["bash", ROOT / "benchmark" / "slurm_ranks.sbatch", "run", "--seed", "2"]
    meet = "--nnodes 2 --nproc-per-node 4 --rdzv-id 123456 --rdzv-backend c10d --rdzv-endpoint node3:23456"

    def job(flag: str, mode: str, usr1: bool = False, preempted: str = "None") -> set[str]:
        """What came of it. flag: how torchrun must have been called."""
        for name in ("requeued", "slept", "ready"):
            (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "mode").write_text(mode)
        (tmp_path / "preempted").write_text(preempted)
        process = subprocess.Popen(command, cwd=tmp_path, env=environment)
        if usr1:
            wait_for((tmp_path / "ready").exists)
            process.send_signal(signal.SIGUSR1)
        process.wait(30)
        assert (tmp_path / "calls").read_text() == f"{meet} ppg_procgen.py {flag} run --seed 2\n"
        return {name for name in ("requeued", "slept") if (tmp_path / name).exists()}

    assert job("--run-dir", "exit 1") == set(), "what fails by itself is not requeued"
    assert job("--resume", "/bin/sleep 1", usr1=True) == {"requeued"}
    assert job("--resume", "exit 0") == set()
    assert job("--resume", "exit 1", preempted="2024-01-01T00:00:00") == {"slept"}
