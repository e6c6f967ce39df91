"""Killed, stopped and damaged runs: real processes, real signals, real files."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, TINY_PPG, comparable, read_rows, same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen
from ppg_procgen import Args, UsageError

ROOT = Path(__file__).resolve().parents[1]

# Runs a script's main and kills its own process at the k-th call of a function of it: inside the rollout, an update,
# the writing of a checkpoint (before and after the bytes are on the disk), an evaluation.
KILLER = """
import json, os, signal, sys
sys.path.insert(0, {root!r})
import {script} as script
target, k, number = {target!r}, {k}, {number}
owner = os if target == "replace" else script.ProcgenVectorEnv if target == "step_wait" else script
original, calls = getattr(owner, target), 0
def counting(*args, **kwargs):
    global calls
    calls += 1
    if calls == k:
        os.kill(os.getpid(), number)
    return original(*args, **kwargs)
setattr(owner, target, counting)
sys.argv[0] = "{script}.py"
try:
    script.main(script.parse_args())
except script.UsageError as error:
    sys.exit(f"usage: {{error}}")
"""


def launch(script, flags: dict, target="step_wait", k=0, number=signal.SIGKILL, **options):
    code = KILLER.format(root=str(ROOT), script=script.__name__, target=target, k=k, number=int(number))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if name != "cuda"]
    return subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, **options)


def scalars(run_dir):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(("time/", "wall_time", "charts/SPS"))
    }


VARIANTS = {
    "dual": (ppg_procgen, {"e_value": 2}),
    "detach": (ppg_procgen, {"arch": "detach", "eval_interval": 1, "eval_episodes": 2}),
    "shared": (ppg_procgen, {"arch": "shared", "e_auxiliary": 0, "checkpoint_interval": 1}),
    "ppo": (ppo_procgen, {"checkpoint_interval": 2}),
}
POINTS = [("step_wait", 20), ("update", 9), ("replace", 3), ("serialize", 4)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_run_resumes_to_the_bits_of_one_never_killed(tmp_path, run, variant):
    script, flags = VARIANTS[variant]
    flags = (TINY_PPG if script is ppg_procgen else TINY) | flags
    whole = run(script, **flags)
    run_dir = tmp_path / "killed"
    for i, (target, k) in enumerate(POINTS):
        resume = {"resume": run_dir} if i else flags | {"run_dir": run_dir}
        result = launch(script, resume, target, k)
        assert result.returncode in (-signal.SIGKILL, 0), result.stderr
        assert i or result.returncode == -signal.SIGKILL
    script.main(resumed_args(script, run_dir))
    assert same(run_dir, whole)
    assert scalars(run_dir) == scalars(whole)
    assert [int(row["iteration"]) for row in read_rows(run_dir)] == [1, 2, 3, 4]


def resumed_args(script, run_dir, *flags):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", "--resume", str(run_dir), *flags])
        return script.parse_args()


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path, run):
    """The figure in the README."""
    flags = TINY_PPG | {"total_timesteps": 64 * 100, "n_iteration": 1, "num_aux_rollouts": 2}
    whole, run_dir, kills = run(**flags), tmp_path / "killed", 0
    rng = random.Random(0)
    while kills < 50:
        resume = {"resume": run_dir} if run_dir.exists() else flags | {"run_dir": run_dir}
        target, most = rng.choice([("step_wait", 40), ("update", 12), ("replace", 5), ("serialize", 5)])
        result = launch(ppg_procgen, resume, target, rng.randint(1, most))
        assert result.returncode == -signal.SIGKILL, result.stderr
        kills += 1
    ppg_procgen.main(resumed_args(ppg_procgen, run_dir))
    assert same(run_dir, whole)
    print(f"{kills} kills, {len(read_rows(run_dir))} iterations, the same weights and metrics")


def test_extending_a_finished_run_gives_the_longer_run(run, capsys):
    whole, extended = run(total_timesteps=64 * 5), run(total_timesteps=64 * 3)
    ppg_procgen.main(resumed_args(ppg_procgen, extended))
    assert "is finished" in capsys.readouterr().out
    ppg_procgen.main(resumed_args(ppg_procgen, extended, "--total-timesteps", str(64 * 5)))
    assert same(extended, whole)
    assert '"total_timesteps": 320' in (extended / "args.json").read_text()


@pytest.mark.parametrize(
    "flags",
    ["--seed 2", "--total-timesteps 128", "--arch detach", "--learning-rate 1", "--run-dir elsewhere", "--track"],
)
def test_what_contradicts_the_checkpoint_is_refused_by_name(run, flags):
    run_dir = run(total_timesteps=192)
    with pytest.raises(UsageError, match=flags.split()[0]):
        resumed_args(ppg_procgen, run_dir, *flags.split())


def test_what_is_no_checkpoint_is_refused_in_one_line(run, tmp_path):
    ppo_run, good = run(ppo_procgen), run(total_timesteps=128)
    for bad, message in (
        (tmp_path / "nothing", "no checkpoint"),
        (ppo_run, "no run of this version of ppg_procgen.py"),
    ):
        with pytest.raises(UsageError, match=message):
            resumed_args(ppg_procgen, bad)
    (good / "metrics.csv").write_text("iteration\n")
    with pytest.raises(UsageError, match="lost rows"):
        ppg_procgen.main(resumed_args(ppg_procgen, good, "--total-timesteps", "256"))
    (good / "metrics.csv").unlink()
    with pytest.raises(UsageError, match="metrics.csv"):
        ppg_procgen.main(resumed_args(ppg_procgen, good))


def test_a_damaged_checkpoint_is_never_loaded(run):
    path = run(total_timesteps=128, arch="detach") / "checkpoint.pt"
    data, rng = path.read_bytes(), np.random.default_rng(0)
    ppg_procgen.load_checkpoint(path)
    for position in [0, 31, 32, len(data) - 1, *rng.integers(len(data), size=150)]:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged"):
            ppg_procgen.load_checkpoint(path)
    for size in [0, 10, 32, 33, *rng.integers(len(data), size=50)]:
        path.write_bytes(data[:size])
        with pytest.raises(UsageError, match="damaged"):
            ppg_procgen.load_checkpoint(path)


def test_a_checkpoint_runs_no_pickled_code(tmp_path):
    import hashlib
    import io

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    buffer = io.BytesIO()
    torch.save({"algorithm": Evil()}, buffer)
    (tmp_path / "checkpoint.pt").write_bytes(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    with pytest.raises(Exception, match="Weights only load failed"):
        ppg_procgen.load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "evil").exists()


def test_weights_load_into_a_copied_script_and_act_the_same(run, tmp_path):
    run_dir = run(total_timesteps=128)
    shutil.copy(run_dir / "ppg_procgen.py", tmp_path / "my_research.py")
    code = (
        "import torch; from my_research import Agent; agent = Agent('dual');"
        f"agent.load_state_dict(torch.load({str(run_dir / 'agent.pt')!r}, weights_only=True));"
        "torch.manual_seed(0); obs = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8);"
        "print(agent(obs)[0].argmax(-1).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    agent = ppg_procgen.Agent("dual")
    agent.load_state_dict(ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")["agent"])
    torch.manual_seed(0)
    obs = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8)
    assert result.stdout.strip() == str(agent(obs)[0].argmax(-1).tolist())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_run_and_says_how_to_go_on(tmp_path, run, number):
    run_dir = tmp_path / "stopped"
    result = launch(ppg_procgen, TINY_PPG | {"run_dir": run_dir}, "update", 12, number)
    assert result.returncode == 128 + number
    assert result.stderr.splitlines() == [
        f"stopped: by {number.name}",
        f"the last checkpoint is whole, to continue: python ppg_procgen.py --resume {run_dir}",
    ]
    assert not list(run_dir.glob("*.tmp*"))
    ppg_procgen.main(resumed_args(ppg_procgen, run_dir))
    assert same(run_dir, run())


def test_a_second_interrupt_stops_at_once(tmp_path):
    flags = ["--env-id", "chaser", "--num-envs", "64", "--num-minibatches", "1", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "ppo_procgen.py", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()  # it trains
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors


def test_what_saves_memory_may_change_when_a_run_goes_on(run):
    run_dir = run(total_timesteps=128)
    flags = ["--total-timesteps", "256", "--num-grad-accum", "2", "--num-aux-grad-accum", "2", "--aux-device", "cpu"]
    ppg_procgen.main(resumed_args(ppg_procgen, run_dir, *flags))
    assert len(read_rows(run_dir)) == 4
    with pytest.raises(UsageError, match="contradicts"):
        resumed_args(ppg_procgen, run_dir, "--num-minibatches", "4")


def test_a_run_in_use_is_refused(run):
    run_dir = run(total_timesteps=128)
    args = resumed_args(ppg_procgen, run_dir, "--total-timesteps", "256")
    import fcntl

    with open(run_dir / "metrics.csv") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process"):
            ppg_procgen.main(args)


# ---- full disks


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 60 MB: two checkpoints of a dual run and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=60m none {folder} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system takes root")
    yield folder
    os.system(f"umount -l {folder}")


def test_a_full_disk_stops_the_run_and_harms_nothing(small_disk, run):
    run_dir = small_disk / "run"
    with pytest.raises(SystemExit):
        launch_filling(run_dir, small_disk)
    before = ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")
    assert before["iteration"] == 2 and not list(run_dir.glob("*.tmp*"))
    (small_disk / "filler").unlink()
    ppg_procgen.main(resumed_args(ppg_procgen, run_dir))
    assert same(run_dir, run())


def launch_filling(run_dir, disk):
    """Train in this process, and let the disk run full after the first phase."""
    original = ppg_procgen.Records.write

    def write(self, row):
        original(self, row)
        if row["iteration"] == 3:
            free = shutil.disk_usage(disk).free
            (disk / "filler").write_bytes(b"x" * (free - 100_000))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppg_procgen.Records, "write", write)
        ppg_procgen.main(Args(**TINY_PPG | {"run_dir": str(run_dir)}))


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    ppg_procgen.write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        ppg_procgen.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# ---- numbers


def poison_reward(monkeypatch):
    original = ppg_procgen.ProcgenVectorEnv.step_wait

    def step_wait(self):
        obs, rewards, *rest = original(self)
        return obs, rewards * np.float32(np.nan if step_wait.calls == 40 else 1), *rest

    step_wait.calls = 0

    def counting(self):
        step_wait.calls += 1
        return step_wait(self)

    monkeypatch.setattr(ppg_procgen.ProcgenVectorEnv, "step_wait", counting)


def poison_loss(monkeypatch):
    original, calls = ppg_procgen.auxiliary_phase_loss, iter(range(1000))

    def loss(*args, **kwargs):
        value, stats = original(*args, **kwargs)
        return (value, stats) if next(calls) != 2 else (value, stats | {"kl_loss": stats["kl_loss"] * np.inf})

    monkeypatch.setattr(ppg_procgen, "auxiliary_phase_loss", loss)


def poison_weight(monkeypatch):
    original, calls = ppg_procgen.update, iter(range(1000))

    def update(optimizer, *rest, **minibatch):
        if next(calls) == 1:
            optimizer.param_groups[0]["params"][5].data[0] = np.nan
        return original(optimizer, *rest, **minibatch)

    monkeypatch.setattr(ppg_procgen, "update", update)


@pytest.mark.parametrize(
    "poison, message",
    [
        (poison_reward, "reward is not finite in the rollout of iteration 3, step 192"),
        (poison_loss, "kl_loss is .* at update 3 of 4 of the auxiliary phase of iteration 2, step 128"),
        (poison_weight, "policy_loss is nan at update 2 of 2 of the policy phase of iteration 1, step 64"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys, poison, message):
    import json
    import re

    poison(monkeypatch)
    run_dir = tmp_path / "run"
    with pytest.raises(SystemExit) as exit:
        ppg_procgen.main(Args(**TINY_PPG | {"run_dir": str(run_dir)}))
    assert exit.value.code == 1
    assert re.search(message, capsys.readouterr().err)
    state = ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")
    assert all(x.isfinite().all() for x in state["agent"].values())
    if poison is not poison_reward:
        report = json.loads((run_dir / "nonfinite.json").read_text())
        assert re.search(message, report["message"])
        assert report["minibatch"]["obs"]["not_finite"] == 0 and report["minibatch"]["returns"]["std"] > 0


def test_comparable_means_something(run):
    rows, weights = comparable(run(total_timesteps=64))
    assert {"losses/policy_loss", "global_step"} < set(rows[0]) and len(weights) > 60
