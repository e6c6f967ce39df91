"""Several ranks, real processes that talk by gloo: the same algorithm as in one process, the same bits on every rank,
lost ranks, torchrun, and the SLURM job of such a run."""

import contextlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, TINY_PPG, Process, as_flags, read_rows, same, train
from worker import install_recording, install_scripted

import ppg_procgen
import ppo_procgen

WORKER = ROOT / "tests" / "worker.py"
FLAGS = TINY_PPG | {"total_timesteps": 4 * 2 * 4 * 16}  # 4 iterations of 2 ranks x 4 x 16, two phases


@pytest.fixture(scope="session")
def start_ranks(start):
    """start_ranks(script, options, *flags) starts two ranks: what torchrun starts, without torchrun."""
    # below the ports that the system gives out, a range for each process of pytest-xdist
    ports = itertools.count(20_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")))

    def start_ranks(script, options: dict, *flags, number: int = 2) -> list[Process]:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(ports))}
        processes = []
        for rank in map(str, range(number)):
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(number)}
            processes.append(start(script, options, *flags, **environment))
        return processes

    return start_ranks


@pytest.fixture(scope="session")
def ranks(start_ranks):
    """ranks(script, options, *flags): the results of two ranks that run to their end."""

    def ranks(script, options: dict, *flags, number: int = 2) -> list[subprocess.CompletedProcess]:
        return [process.end() for process in start_ranks(script, options, *flags, number=number)]

    return ranks


def find_marked(mark: str) -> list[int]:
    """The processes that a launch has started, by their environment: torchrun gives each rank a session of its own."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:  # it has ended, or is not ours
            pass
    return found


def launch(*command, timeout: float = 150, **environment: str) -> subprocess.CompletedProcess:
    """Run to the end, and leave no process behind whatever happens."""
    environment |= {"RANKS_OF_TEST": (mark := uuid.uuid4().hex)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=os.environ | environment, **pipes)
    try:
        output, errors = process.communicate(timeout=timeout)
        deadline = time.monotonic() + 30
        while find_marked(mark) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        left = find_marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert not left, f"processes were left behind: {errors}"
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


# ---- the same algorithm as in one process

# 2 ranks x 2 games x 8 steps, two phases; a rank's minibatches have 8 samples, the 2 auxiliary ones 2 rollouts
SMALL = {"env_id": "chaser", "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 4 * 32}
SMALL_PPG = SMALL | {"n_iteration": 2, "num_aux_rollouts": 2, "e_auxiliary": 1, "aux_dtype": "float32"}
VARIANTS = {
    "dual": (ppg_procgen, SMALL_PPG, 4 * 2 + 2 * 2),
    "detach": (ppg_procgen, SMALL_PPG | {"arch": "detach", "e_value": 2}, 4 * 2 * 3 + 2 * 2),
    "ppo": (ppo_procgen, SMALL | {"update_epochs": 2}, 4 * 2 * 2),
}
EXACT = "iteration,global_step,charts/episodic_return,charts/episodic_length,charts/mean_return_100".split(",")


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_do_what_one_process_of_all_environments_does(tmp_path, ranks, variant):
    script, flags, num_updates = VARIANTS[variant]
    scripted = {"num_ranks": 2, "num_envs": 2, "rows": {"16": 2, "4": 2}}  # T * N samples, N_pi * N rollouts
    options = {"scripted": scripted, "record": f"{tmp_path}/rank"}
    for result in ranks(script, options, *as_flags(flags | {"run_dir": tmp_path / "ranks"})):
        assert result.returncode == 0, result.stderr

    one_flags = flags | {"num_envs": 4, "cuda": False, "run_dir": str(tmp_path / "one")}
    if "num_aux_rollouts" in flags:
        one_flags["num_aux_rollouts"] *= 2
    try:
        with pytest.MonkeyPatch.context() as patch:
            install_scripted(script, patch.setattr, **scripted)
            one = install_recording(script, patch.setattr, grads=True)
            train(script, script.Args(**one_flags))
    finally:
        torch.set_default_dtype(torch.float32)

    two = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert two[0]["hashes"] == two[1]["hashes"]
    assert len(one["grads"]) == len(two[0]["grads"]) == num_updates == len(set(one["hashes"]))
    for grads in zip(one["grads"], two[0]["grads"], two[1]["grads"], strict=True):
        assert torch.equal(grads[1], grads[2])
        assert (grads[1] - grads[0]).norm() < 1e-7 * grads[0].norm()
    weights = [torch.load(tmp_path / name / "agent.pt", weights_only=True) for name in ("one", "ranks")]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-7, atol=1e-7)

    rows, one_rows = read_rows(tmp_path / "ranks"), read_rows(tmp_path / "one")
    assert [{name: row[name] for name in EXACT} for row in rows] == [
        {name: row[name] for name in EXACT} for row in one_rows
    ]
    assert sum(bool(row["charts/episodic_return"]) for row in rows) > 2
    losses = [name for name in rows[0] if name.startswith("losses/")]
    for row, one_row in zip(rows, one_rows, strict=True):
        assert [bool(row[name]) for name in losses] == [bool(one_row[name]) for name in losses]
        for name in losses:
            if row[name]:
                assert float(row[name]) == pytest.approx(float(one_row[name]), rel=1e-6, abs=1e-9), name


# ---- real games


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks) -> SimpleNamespace:
    """A run of two ranks that nothing has disturbed, and what its ranks have recorded."""
    folder = tmp_path_factory.mktemp("whole")
    results = ranks(ppg_procgen, {"record": f"{folder}/rank"}, *as_flags(FLAGS | {"run_dir": folder / "run"}))
    assert [result.returncode for result in results] == [0, 0], results
    hashes = [torch.load(folder / f"rank{rank}.pt")["hashes"] for rank in range(2)]
    return SimpleNamespace(run_dir=folder / "run", outputs=[result.stdout for result in results], hashes=hashes)


def test_parameters_are_the_same_bits_on_every_rank(whole):
    assert whole.hashes[0] == whole.hashes[1]
    assert len(set(whole.hashes[0])) == 4 * 2 + 2 * 4  # updates, each of which has changed them


def test_rank_0_speaks_and_the_budget_is_of_all(whole):
    assert "4 iterations, 2 aux phases" in whole.outputs[0]
    assert whole.outputs[0].endswith("is finished\n") and whole.outputs[1] == "", "rank 0 alone speaks"
    assert [int(row["global_step"]) for row in read_rows(whole.run_dir)] == [128, 256, 384, 512]


def test_ranks_differ_in_games_and_random_numbers(whole):
    states = torch.load(whole.run_dir / "checkpoint.pt", weights_only=True)["ranks"]
    assert len(states) == 2
    games = [game for rank in states for game in rank["envs"]["games"]]
    assert len(games) == len(set(games)) == 8
    assert not torch.equal(states[0]["rng"], states[1]["rng"])


def test_the_same_seed_gives_the_same_bits_again(whole, ranks, tmp_path):
    results = ranks(ppg_procgen, {}, *as_flags(FLAGS | {"run_dir": tmp_path / "again"}))
    assert [result.returncode for result in results] == [0, 0], results
    assert same(tmp_path / "again", whole.run_dir)


def test_one_rank_is_a_plain_run(ranks, trained, tmp_path):
    (result,) = ranks(ppg_procgen, {}, *as_flags(TINY_PPG | {"run_dir": tmp_path / "rank"}), number=1)
    assert result.returncode == 0, result.stderr
    assert same(tmp_path / "rank", trained())


# ---- torchrun


@pytest.mark.slow
def test_a_lost_rank_ends_a_torchrun_and_it_resumes_to_the_bits_of_one_never_killed(whole, tmp_path):
    """Rank 1 is killed in the second phase."""
    run_dir, options = tmp_path / "a run", {"kill": {"rank": 1, "target": "update", "k": 14}}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = as_flags(FLAGS | {"run_dir": run_dir})
    result = launch(*launcher, WORKER, "ppg_procgen", json.dumps(options), *flags)
    assert result.returncode == 1 and re.search(r"exitcode +: -9", result.stderr), result.stderr
    (line,) = re.findall("^To resume: (.*)$", result.stdout, re.M)
    assert shlex.split(line)[1:] == [str(WORKER), "--resume", str(run_dir)]
    result = launch(*launcher, WORKER, "ppg_procgen", "{}", *shlex.split(line)[2:])
    assert result.returncode == 0, result.stderr
    assert same(run_dir, whole.run_dir)


@pytest.mark.slow
def test_the_scripts_by_torchrun(tmp_path, script):
    """The files themselves with the real network: twice, and to the same bits."""
    defaults = FLAGS | {"arch": "detach"} if script is ppg_procgen else TINY | {"total_timesteps": 512}
    for name in "ab":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        result = launch(*command, f"{script.__name__}.py", *as_flags(defaults | {"run_dir": tmp_path / name}))
        assert result.returncode == 0, result.stderr
    assert same(tmp_path / "a", tmp_path / "b")


# ---- what goes wrong


@pytest.mark.parametrize("rank, target, k", [(0, "ProcgenVectorEnv.step", 40), (1, "update", 6)])
def test_a_lost_rank_ends_the_others(ranks, tmp_path, rank, target, k):
    """In iteration 3, and in the auxiliary phase: with a traceback and exit code 1."""
    run_dir = tmp_path / "run"
    options = {"kill": {"rank": rank, "target": target, "k": k}}
    results = ranks(ppg_procgen, options, *as_flags(FLAGS | {"run_dir": run_dir}))
    lost, other = results[rank], results[1 - rank]
    assert (lost.returncode, other.returncode) == (-signal.SIGKILL, 1)
    assert "Traceback" in other.stderr
    assert (run_dir / "checkpoint.pt").exists() == (rank == 0)


@pytest.mark.learning
def test_thirty_kills_of_a_rank_at_random_moments(ranks, start_ranks, tmp_path):
    """One of two ranks is killed, the other ends by itself; both resume until they end: the same bits."""
    flags = FLAGS | {"total_timesteps": 128 * 12, "n_iteration": 4, "e_auxiliary": 3, "checkpoint_interval": 2}
    assert [
        result.returncode for result in ranks(ppg_procgen, {}, *as_flags(flags | {"run_dir": tmp_path / "whole"}))
    ] == [0, 0]
    rng, kills = random.Random(1), 0
    for number in range(1000):
        run_dir = tmp_path / f"killed{number}"
        again = flags | {"run_dir": run_dir}
        while True:
            processes = start_ranks(ppg_procgen, {}, *as_flags(again))
            processes[0].process.join(rng.uniform(0.5, 6))
            rng.choice(processes).process.kill()  # nothing, if it has ended
            results = [process.end() for process in processes]
            if [result.returncode for result in results] == [0, 0]:
                break
            assert {result.returncode for result in results} <= {0, 1, -signal.SIGKILL}, results
            kills += 1
            if not (run_dir / "args.json").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                continue
            again = {"resume": run_dir}
            if (run_dir / "checkpoint.pt").exists():
                iteration = torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]
                assert len(read_rows(run_dir)) - iteration <= 2
        assert same(run_dir, tmp_path / "whole") and not list(run_dir.glob("buffer*"))
        if kills >= 30:
            break
    print(f"{kills} kills in {number + 1} runs of two ranks, the same weights and metrics")


def test_a_rank_keeps_its_buffer_until_the_last_checkpoint_is_saved(ranks, whole, tmp_path):
    """Rank 0 is killed as it writes the last one: the one before, in the middle of a phase, needs both buffers."""
    run_dir = tmp_path / "run"
    options = {"kill": {"rank": 0, "target": "os.fsync", "k": 8}}
    results = ranks(ppg_procgen, options, *as_flags(FLAGS | {"run_dir": run_dir, "checkpoint_interval": 1}))
    assert [result.returncode for result in results] == [-signal.SIGKILL, 1]
    assert len(read_rows(run_dir)) == 4 and len(list(run_dir.glob("buffer_*.bin"))) == 2
    assert [result.returncode for result in ranks(ppg_procgen, {}, "--resume", run_dir)] == [0, 0]
    assert same(run_dir, whole.run_dir) and not list(run_dir.glob("buffer_*.bin"))


def test_another_number_of_ranks_is_refused_in_one_line(whole, ranks, trained, command_line):
    results = ranks(ppg_procgen, {}, "--resume", trained())
    results += [command_line(ppg_procgen, "--resume", whole.run_dir)]
    for result in results:
        assert result.returncode == 2 and result.stdout == ""
        assert re.fullmatch(r"ppg_procgen.py: these flags of the run cannot change: .*num_ranks\n", result.stderr)


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(ranks, tmp_path):
    flags = as_flags(FLAGS | {"run_dir": tmp_path / "run"})
    results = ranks(ppg_procgen, {"poison": {"rank": 1, "k": 2}}, *flags)
    for result in results:
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert result.stderr == "losses/policy_loss is nan: the run ends\n"


# ---- the SLURM job

# stand-ins for SLURM's programs, and a torchrun that makes a checkpoint and then waits, ends or fails
PROGRAMS = {
    "torchrun": """
with open(home / "calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
mode = (home / "mode").read_text()
run_dir = pathlib.Path(sys.argv[sys.argv.index("ppg_procgen.py") + 2])
run_dir.mkdir(exist_ok=True)
(run_dir / "args.json").touch()
(home / "ready").touch()
if mode == "waits":
    time.sleep(1)
sys.exit(mode == "fails")
""",
    "srun": """
assert sys.argv[1:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=32"]
sys.exit(subprocess.call(sys.argv[3:]))
""",
    "scontrol": """
if sys.argv[1] == "requeue":
    assert sys.argv[2:] == ["123456"]
    (home / "requeued").touch()
elif sys.argv[1:] == ["show", "job", "123456"]:
    print("JobId=123456\\n PreemptTime=" + (home / "preempted").read_text())
else:
    assert sys.argv[1:] == ["show", "hostnames", "node[3-4]"]
    print("node3\\nnode4")
""",
    "sleep": '(home / "slept").write_text(sys.argv[1])',
}
SLURM = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_GPUS_ON_NODE": "4"}
SLURM |= {"SLURM_CPUS_PER_TASK": "32"}


def test_slurm_job_starts_resumes_and_asks_for_a_requeue(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, source in PROGRAMS.items():
        head = f"#!{sys.executable}\nimport json, os, pathlib, signal, subprocess, sys, time\n"
        head += f"home = pathlib.Path({str(tmp_path)!r})\n"
        (tmp_path / "bin" / name).write_text(head + source)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"} | SLURM
    run_dir, flags, outcomes = tmp_path / "run", ["--distribution-mode", "hard"], ("requeued", "slept", "ready")
    (tmp_path / "preempted").write_text("None")

    def job(mode: str, usr1: bool = False) -> tuple[set, list]:
        """What came of it, and what torchrun was called with."""
        (tmp_path / "mode").write_text(mode)
        for name in outcomes:
            (tmp_path / name).unlink(missing_ok=True)
        command = ["bash", ROOT / "benchmark" / "slurm_ranks.sbatch", run_dir, *flags]
        if usr1:
            waits = 'until [ -e "$0/ready" ]; do /bin/sleep 0.05; done; kill -USR1 $job; wait $job'
            command = ["bash", "-c", f'"$@" & job=$!; {waits}', tmp_path, *command]
        launch(*command, timeout=30, **environment)
        calls = (tmp_path / "calls").read_text().splitlines()
        return {name for name in outcomes[:2] if (tmp_path / name).exists()}, json.loads(calls[-1])

    meet = ["--rdzv-id", "123456", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node3:23456", "ppg_procgen.py"]
    begin = ["--nnodes", "2", "--nproc-per-node", "4", *meet]
    start, resume = [*begin, "--run-dir", str(run_dir), *flags], [*begin, "--resume", str(run_dir), *flags]
    assert job("fails") == (set(), start), "what fails by itself is not requeued"
    assert job("waits", usr1=True) == ({"requeued"}, resume)
    assert job("ends") == (set(), resume)
    (tmp_path / "preempted").write_text("2024-01-01T00:00:00")
    assert job("fails") == ({"slept"}, resume)
