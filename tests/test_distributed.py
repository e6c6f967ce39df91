"""Several ranks by torchrun, real processes that talk by gloo: the same algorithm as in one process, the same bits on
every rank, lost ranks, and the SLURM job of such a run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_PPG, read_rows, same
from rank_worker import install_recording, install_scripted

import ppg_procgen
import ppo_procgen

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "rank_worker.py"
# 4 iterations of 2 ranks x 4 x 16, two phases; detach: the cheapest networks
FLAGS = TINY_PPG | {"arch": "detach", "total_timesteps": 4 * 2 * 4 * 16}


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


def launch(*command, timeout: float = 150, **environment: str) -> SimpleNamespace:
    """Run to the end, and leave no process behind whatever happens."""
    environment |= {"RANKS_OF_TEST": (mark := uuid.uuid4().hex)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=os.environ | environment, **pipes)
    try:
        output, errors = process.communicate(timeout=timeout)
        ended = time.time()
        while find_marked(mark) and time.time() < ended + 5:
            time.sleep(0.1)
    finally:
        left = find_marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert not left, f"processes were left behind: {errors}"
    return SimpleNamespace(code=process.returncode, output=output, errors=errors, ended=ended)


def torchrun(*command, ranks: int = 2, **options) -> SimpleNamespace:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return launch(*launcher, *command, **options)


def as_flags(flags: dict) -> list[str]:
    return ["--no-cuda", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if name != "cuda")]


def worker(script, options: dict, flags: dict, **more) -> SimpleNamespace:
    return torchrun(WORKER, script.__name__, json.dumps(options), *as_flags(flags), **more)


def exit_codes(result: SimpleNamespace) -> list[str]:
    """Of the ranks that failed, as torchrun reports them; the last was the first to fail."""
    return re.findall(r"exitcode +: (-?\d+)", result.errors)


def assert_no_traceback_of_ours(result: SimpleNamespace) -> None:
    """torchrun shows one of its own when a rank fails."""
    assert not re.search(r'File ".*(ppg_procgen|ppo_procgen|rank_worker)\.py"', result.errors), result.errors


# ---- the same algorithm as in one process

# 2 ranks x 2 games x 8 steps, two phases; a rank's minibatches have 8 samples, the 2 auxiliary ones 2 rollouts
SMALL = {"env_id": "chaser", "num_envs": 2, "num_steps": 8, "num_minibatches": 2, "total_timesteps": 4 * 32}
SMALL_PPG = SMALL | {"n_iteration": 2, "num_aux_rollouts": 2, "e_auxiliary": 1, "aux_dtype": "float32"}
VARIANTS = {
    "dual": (ppg_procgen, SMALL_PPG, 4 * 2 + 2 * 2),
    "detach": (ppg_procgen, SMALL_PPG | {"arch": "detach", "e_value": 2}, 4 * 2 * 3 + 2 * 2),
    "ppo": (ppo_procgen, SMALL | {"update_epochs": 2}, 4 * 2 * 2),
}
EXACT = "iteration,global_step,episodes,charts/episodic_return,charts/episodic_length,charts/mean_return_100".split(",")


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_do_what_one_process_of_all_environments_does(tmp_path, variant):
    script, flags, num_updates = VARIANTS[variant]
    scripted = {"num_ranks": 2, "num_envs": 2, "rows": {"16": 2, "4": 2}}  # T * N samples, N_pi * N rollouts
    options = {"scripted": scripted, "record": f"{tmp_path}/rank"}
    result = worker(script, options, flags | {"run_dir": tmp_path / "ranks"})
    assert result.code == 0, result.errors

    one_flags = flags | {"num_envs": 4, "cuda": False, "run_dir": str(tmp_path / "one")}
    if "num_aux_rollouts" in flags:
        one_flags["num_aux_rollouts"] *= 2
    try:
        with pytest.MonkeyPatch.context() as patch:
            install_scripted(script, patch.setattr, **scripted)
            one = install_recording(script, patch.setattr, grads=True)
            script.main(script.Args(**one_flags))
    finally:
        torch.set_default_dtype(torch.float32)

    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert ranks[0]["hashes"] == ranks[1]["hashes"]
    assert len(one["grads"]) == len(ranks[0]["grads"]) == num_updates == len(set(one["hashes"]))
    for grads in zip(one["grads"], ranks[0]["grads"], ranks[1]["grads"], strict=True):
        assert torch.equal(grads[1], grads[2])
        assert (grads[1] - grads[0]).norm() < 1e-7 * grads[0].norm()
    weights = [torch.load(tmp_path / name / "agent.pt", weights_only=True) for name in ("one", "ranks")]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-7, atol=1e-7)

    rows, one_rows = read_rows(tmp_path / "ranks"), read_rows(tmp_path / "one")
    assert [{name: row[name] for name in EXACT} for row in rows] == [
        {name: row[name] for name in EXACT} for row in one_rows
    ]
    assert int(rows[-1]["episodes"]) > 8
    losses = [name for name in rows[0] if name.startswith("losses/")]
    for row, one_row in zip(rows, one_rows, strict=True):
        assert [bool(row[name]) for name in losses] == [bool(one_row[name]) for name in losses]
        for name in losses:
            if row[name]:
                assert float(row[name]) == pytest.approx(float(one_row[name]), rel=1e-6, abs=1e-9), name


# ---- real games


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SimpleNamespace:
    """A run of two ranks that nothing has disturbed, and what its ranks have recorded."""
    folder = tmp_path_factory.mktemp("whole")
    result = worker(ppg_procgen, {"record": f"{folder}/rank"}, FLAGS | {"run_dir": folder / "run"})
    assert result.code == 0, result.errors
    hashes = [torch.load(folder / f"rank{rank}.pt")["hashes"] for rank in range(2)]
    return SimpleNamespace(run_dir=folder / "run", output=result.output, hashes=hashes)


def test_parameters_are_the_same_bits_on_every_rank(whole):
    assert whole.hashes[0] == whole.hashes[1]
    assert len(set(whole.hashes[0])) == 4 * 2 + 2 * 4  # updates, each of which has changed them


def test_sizes_are_said_per_rank_and_the_budget_is_of_all(whole):
    assert "4 iterations of 2 ranks x 4 x 16 = 512 steps, from step 0\n" in whole.output
    assert whole.output.count("finished;") == 1, "rank 0 alone speaks"
    assert [int(row["global_step"]) for row in read_rows(whole.run_dir)] == [128, 256, 384, 512]


def test_ranks_differ_in_games_and_random_numbers(whole):
    ranks = ppg_procgen.load_checkpoint(whole.run_dir / "checkpoint.pt")["ranks"]
    assert len(ranks) == 2
    games = [bytes(game.numpy()) for rank in ranks for game in rank["envs"]["games"]]
    assert len(games) == len(set(games)) == 8
    assert not torch.equal(ranks[0]["random"]["torch"], ranks[1]["random"]["torch"])


def test_the_same_seed_gives_the_same_bits_again(whole, tmp_path):
    result = torchrun(ROOT / "ppg_procgen.py", *as_flags(FLAGS | {"run_dir": tmp_path / "again"}))
    assert result.code == 0, result.errors
    assert same(tmp_path / "again", whole.run_dir)


def test_one_rank_by_torchrun_is_plain_python(tmp_path, run):
    flags = FLAGS | {"total_timesteps": 2 * 64}
    result = torchrun(ROOT / "ppg_procgen.py", *as_flags(flags | {"run_dir": tmp_path / "rank"}), ranks=1)
    assert result.code == 0 and "2 iterations of 4 x 16 = 128 steps" in result.output, result.errors
    assert same(tmp_path / "rank", run(**flags))


# ---- what goes wrong


@pytest.mark.parametrize("rank, target, k", [(0, "step_wait", 40), (1, "update", 6)])  # in iteration 3, auxiliary phase
def test_a_lost_rank_ends_the_run_and_it_resumes_to_the_bits_of_one_never_killed(whole, tmp_path, rank, target, k):
    run_dir, note = tmp_path / "run", tmp_path / "killed"
    options = {"kill": {"rank": rank, "target": target, "k": k, "note": str(note)}}
    result = worker(ppg_procgen, options, FLAGS | {"run_dir": run_dir})
    assert result.code == 1 and "-9" in exit_codes(result), result.errors
    assert result.ended - note.stat().st_mtime < 60
    assert re.findall("^stopped: .*", result.errors, re.M) in (
        ["stopped: by SIGTERM"],
        re.findall(rf"^stopped: rank {1 - rank} has lost another rank \(.+\)$", result.errors, re.M)[:1],
    ), result.errors
    assert_no_traceback_of_ours(result)
    command = f"to continue: torchrun (2 ranks) ppg_procgen.py --resume {run_dir}\n"
    assert (command in result.errors) == (rank == 1), "rank 0 says how to go on"

    result = torchrun(ROOT / "ppg_procgen.py", "--resume", run_dir)
    assert result.code == 0, result.errors
    assert f"from step {256 if rank == 0 else 0}\n" in result.output
    assert same(run_dir, whole.run_dir)


def test_another_number_of_ranks_is_refused_in_one_line(whole, run):
    result = launch(sys.executable, ROOT / "ppg_procgen.py", "--resume", whole.run_dir)
    assert result.code == 2
    assert re.fullmatch(r"ppg_procgen.py: .* 2 rank\(s\), not 1: .*\n", result.errors)
    result = torchrun(ROOT / "ppg_procgen.py", "--resume", run(total_timesteps=128, arch="detach"))
    assert result.code == 1 and exit_codes(result)[-1] == "2", result.errors
    assert re.search(r"^ppg_procgen.py: .* 1 rank\(s\), not 2: .*$", result.errors, re.M)
    assert_no_traceback_of_ours(result)


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(tmp_path):
    result = worker(ppg_procgen, {"poison": {"rank": 1, "k": 2}}, FLAGS | {"run_dir": tmp_path / "run"})
    message = "stopped: policy_loss is nan at update 2 of 2 of the policy phase of iteration 1, step 128, rank 1"
    assert result.errors.splitlines().count(message) == 2, result.errors
    codes = exit_codes(result)  # -15: it had said why, and torchrun was faster than the end of its interpreter
    assert result.code == 1 and codes[-1] == "1" and set(codes) <= {"1", "-15"}, result.errors
    assert_no_traceback_of_ours(result)
    assert message.endswith(json.loads((tmp_path / "run" / "nonfinite.json").read_text())["message"])


# ---- the SLURM job

# stand-ins for SLURM's programs, and a torchrun that makes a checkpoint and then waits, ends or fails
PROGRAMS = {
    "torchrun": """
with open(home / "calls", "a") as calls:
    print(json.dumps(sys.argv[1:]), file=calls)
mode = (home / "mode").read_text()
run_dir = pathlib.Path(sys.argv[sys.argv.index("ppg_procgen.py") + 2])
if mode == "early":
    run_dir.mkdir()
    sys.exit(1)
run_dir.mkdir(exist_ok=True)
(run_dir / "checkpoint.pt").touch()
if mode == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped in order"))
    (home / "pid").write_text(str(os.getpid()))
    (home / "ready").touch()
    time.sleep(60)
sys.exit(mode == "fails")
""",
    "srun": """
assert sys.argv[1:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=32"]
task = subprocess.Popen(sys.argv[3:])
signal.signal(signal.SIGTERM, lambda *_: task.kill())
sys.exit(task.wait())
""",
    "scancel": """
assert sys.argv[1:] == ["--signal=TERM", "123456"]
os.kill(int((home / "pid").read_text()), signal.SIGTERM)
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
    run_dir, flags, outcomes = tmp_path / "runs", ["--distribution-mode", "hard"], ("requeued", "slept", "ready")
    (tmp_path / "preempted").write_text("None")

    def job(mode: str, usr1: bool = False, **more: str) -> tuple[int, set, list]:
        """Exit code, what came of it, and what torchrun was called with."""
        (tmp_path / "mode").write_text(mode)
        for name in outcomes:
            (tmp_path / name).unlink(missing_ok=True)
        command = ["bash", ROOT / "benchmark" / "slurm_ranks.sbatch", run_dir, *flags]
        if usr1:
            waits = 'until [ -e "$0/ready" ]; do /bin/sleep 0.05; done; kill -USR1 $job; wait $job'
            command = ["bash", "-c", f'"$@" & job=$!; {waits}', tmp_path, *command]
        result = launch(*command, timeout=30, **environment, **more)
        assert ("stopped in order" in result.errors) == usr1, result.errors
        calls = (tmp_path / "calls").read_text().splitlines()
        return result.code, {name for name in outcomes[:2] if (tmp_path / name).exists()}, json.loads(calls[-1])

    meet = ["--rdzv-id", "123456", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node3:23456", "ppg_procgen.py"]
    begin = ["--nnodes", "2", "--nproc-per-node", "4", *meet]
    start, resume = [*begin, "--run-dir", str(run_dir), *flags], [*begin, "--resume", str(run_dir), *flags]
    assert job("early") == (1, set(), start)
    assert job("waits", usr1=True, SLURM_RESTART_COUNT="1") == (1, {"requeued"}, start), "moved out of the way"
    assert len(list(tmp_path.glob("runs.*"))) == 1
    assert job("waits", usr1=True, SLURM_RESTART_COUNT="2") == (1, {"requeued"}, resume)
    assert job("fails") == (1, set(), resume), "what fails by itself is not requeued"
    (tmp_path / "preempted").write_text("2024-01-01T00:00:00")
    assert job("fails") == (1, {"slept"}, resume)
    assert job("ends") == (0, set(), resume)
