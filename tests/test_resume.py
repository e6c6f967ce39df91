"""Killed, stopped and damaged runs: real processes, real signals, real files."""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from conftest import (
    CHEAP_PPG,
    CHEAP_PPO,
    ROOT,
    TINY,
    TINY_PPG,
    as_flags,
    comparable,
    make_args,
    parse,
    read_rows,
    resume,
    same,
    snapshot,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen
from ppg_procgen import UsageError


@pytest.fixture
def killed(start):
    """killed(script, flags, target, k) starts a run that the signal reaches at the k-th call of target."""

    def killed(script, flags: dict, target: str = "update", k: int = 0, number: int = signal.SIGKILL):
        kill = {"target": target, "k": k, "number": int(number)}
        return start(script, {"kill": kill}, *as_flags(flags)).end()

    return killed


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of a finished run of two iterations, to do harm to."""
    return lambda script=ppg_procgen: shutil.copytree(trained(script, total_timesteps=128), tmp_path / "finished")


def scalars(run_dir):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if not tag.startswith(("time/", "charts/wall_time", "charts/SPS"))
    }


def age(run_dir):
    """Its event files are read in the order of their names, which hold the second: resume as if much later."""
    for path in run_dir.glob("events.out.*"):
        *prefix, second, rest = path.name.split(".", 4)
        path.rename(path.with_name(".".join([*prefix, str(int(second) - 1000), rest])))


# ---- killed

VARIANTS = {
    "dual": (ppg_procgen, {"e_value": 2, "e_auxiliary": 2, "checkpoint_interval": 1}),
    "detach": (ppg_procgen, {"arch": "detach", "eval_interval": 1, "eval_episodes": 2, "env_id": "bossfight"}),
    "shared": (ppg_procgen, {"arch": "shared", "e_auxiliary": 0, "checkpoint_interval": 1, "num_minibatches": 8}),
    "ppo": (ppo_procgen, {"checkpoint_interval": 1}),
}
# inside the rollout, an update, the writing of a checkpoint (before and after the bytes are on the disk), of a row
POINTS = [("ProcgenVectorEnv.step", 20), ("update", 9), ("os.replace", 3), ("torch.save", 2)]
POINTS += [("SummaryWriter.add_scalar", 9), ("ProcgenVectorEnv.step", 40)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_run_resumes_to_the_bits_of_one_never_killed(tmp_path, trained, killed, variant):
    script, flags = VARIANTS[variant]
    run_dir, whole = tmp_path / "killed", trained(script, **flags)
    flags = (TINY_PPG if script is ppg_procgen else TINY) | flags
    for i, (target, k) in enumerate(POINTS):
        result = killed(script, {"resume": run_dir} if i else flags | {"run_dir": run_dir}, target, k)
        ended = result.returncode == 0 and i == len(POINTS) - 1  # some never come to the last point
        assert ended or result.returncode == -signal.SIGKILL, (target, result.stderr)
        age(run_dir)
    assert script.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] >= 2
    if result.returncode != 0:
        resume(script, run_dir)
    assert same(run_dir, whole)
    assert scalars(run_dir) == scalars(whole)
    assert [int(row["iteration"]) for row in read_rows(run_dir)] == [1, 2, 3, 4]
    assert not list(run_dir.glob("*.tmp*"))


# agent.pt, phase.pt or checkpoint.pt after the last iteration, which ends a phase or, with 5 iterations, does not
@pytest.mark.parametrize("num_iterations, k", [(4, 11), (4, 12), (4, 13), (5, 14), (5, 15)])
def test_a_run_killed_between_its_last_row_and_its_last_save_has_all_records(
    tmp_path, trained, killed, num_iterations, k
):
    run_dir, steps = tmp_path / "killed", {"total_timesteps": 64 * num_iterations}
    whole = trained(**steps)
    assert killed(ppg_procgen, TINY_PPG | steps | {"run_dir": run_dir}, "os.replace", k).returncode == -signal.SIGKILL
    assert len(read_rows(run_dir)) == num_iterations
    assert ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] < num_iterations
    age(run_dir)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, whole) and scalars(run_dir) == scalars(whole)
    assert ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == num_iterations


def test_a_run_killed_before_its_first_checkpoint_is_begun_anew_elsewhere(tmp_path, killed):
    flags = TINY_PPG | {"run_dir": tmp_path / "run"}
    assert killed(ppg_procgen, flags, "os.replace", 2).returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    before = snapshot(tmp_path)
    for again, words in (({"resume": tmp_path / "run"}, "start the run again, without --resume"), (flags, "not empty")):
        result = killed(ppg_procgen, again)
        assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1
        assert snapshot(tmp_path) == before


KILLED = {"dual": {}, "detach": {"arch": "detach"}, "separate": {"e_policy": 2, "e_value": 3}}


@pytest.mark.learning
@pytest.mark.parametrize("variant", KILLED)
def test_thirty_kills_at_random_moments(tmp_path, run, start, variant):
    """Runs of three phases, killed and resumed until they end: the same bits, and little is lost."""
    flags = TINY_PPG | {"total_timesteps": 64 * 12, "n_iteration": 4, "e_auxiliary": 3, "checkpoint_interval": 2}
    flags |= KILLED[variant]
    whole, rng, kills, epochs = run(**flags), random.Random(variant), 0, set()
    for number in range(1000):
        run_dir = tmp_path / f"killed{number}"
        again = flags | {"run_dir": run_dir}
        while True:
            process = start(ppg_procgen, {}, *as_flags(again))
            process.process.join(rng.uniform(0.1, 3))
            process.process.kill()  # nothing, if it has ended
            if process.end().returncode == 0:
                break
            kills += 1
            num_rows = len(read_rows(run_dir)) if (run_dir / "metrics.csv").exists() else 0
            if not (run_dir / "checkpoint.pt").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                continue
            state = ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")
            aux_phase = state["ranks"][0]["loop_state"]["aux_phase"]
            epochs.add(aux_phase and aux_phase["epoch"])
            assert num_rows - state["iteration"] <= 2
            again = {"resume": run_dir}
            age(run_dir)
        assert same(run_dir, whole) and not list(run_dir.glob("buffer*"))
        if kills >= 30:
            break
    assert epochs == {None, 0, 1, 2}, "some were inside the auxiliary phase"
    print(f"{kills} kills of {number + 1} runs, the same weights and metrics")


# ---- stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_run_and_says_how_to_go_on(tmp_path, trained, killed, number):
    run_dir = tmp_path / "a run"
    result = killed(ppg_procgen, TINY_PPG | {"run_dir": run_dir}, "update", 12, number)
    assert result.returncode == 128 + number
    stopped, where, command = result.stderr.splitlines()
    assert stopped == f"stopped: by {number.name}"
    assert where == "it continues at iteration 3; iterations to be done again: 1"
    assert re.fullmatch(rf"to continue: python ppg_procgen.py --resume '{run_dir}'", command)
    assert not list(run_dir.glob("*.tmp*"))
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_run_that_has_failed_does_not_cut_its_last_words(start, tmp_path, number):
    """As when torchrun, having lost a rank, ends another that has just failed because of it."""
    options = {"poison": {"k": 5}, "kill": {"target": "shlex.join", "k": 2, "number": int(number)}}
    result = start(ppg_procgen, options, *as_flags(TINY_PPG | {"run_dir": tmp_path / "run"})).end()
    assert result.returncode == 1
    assert re.search("^stopped: .*nan.*\n.*\nto continue: .*--resume", result.stderr), result.stderr


# ---- resumed with other flags


def test_extending_a_finished_run_gives_the_longer_run(run, trained, capsys):
    whole, extended = trained(total_timesteps=64 * 5), run(total_timesteps=64 * 3)
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            resume(ppg_procgen, extended)
        assert end.value.code in (None, 0) and "is finished" in capsys.readouterr().out
    age(extended)
    resume(ppg_procgen, extended, "--total-timesteps", 64 * 5)
    assert same(extended, whole) and scalars(extended) == scalars(whole)
    assert '"total_timesteps": 320' in (extended / "args.json").read_text()


@pytest.mark.parametrize(
    "flags",
    ["--seed 2", "--total-timesteps 64", "--arch detach", "--learning-rate 1", "--run-dir elsewhere", "--track"]
    + ["--num-minibatches 4", "--anneal-lr"],
)
def test_what_contradicts_the_checkpoint_is_refused_by_name(trained, flags):
    name = flags.split()[0].strip("-").replace("-", "_")
    with pytest.raises(UsageError, match=f"{name} can(not change: the checkpoint has| only grow)"):
        parse(ppg_procgen, "--resume", trained(total_timesteps=128), *flags.split())


def test_a_run_with_annealing_cannot_be_extended(trained):
    """Its schedule would have been another from the start."""
    run_dir = trained(total_timesteps=128, anneal_lr=True)
    with pytest.raises(UsageError, match="total_timesteps can only grow"):
        parse(ppg_procgen, "--resume", run_dir, "--total-timesteps", 256)


def test_what_saves_memory_may_change_when_a_run_goes_on(finished):
    flags = ["--total-timesteps", "256", "--num-grad-accum", "2", "--num-aux-grad-accum", "2", "--aux-device", "cpu"]
    assert len(read_rows(resume(ppg_procgen, finished(), *flags))) == 4


def test_a_run_of_another_machine_goes_on_with_flags_for_what_this_one_lacks(finished):
    """Such as its GPU, or the compiler that torch.compile calls."""
    run_dir = finished()
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    state["about"]["args"]["aux_device"] = "cuda"
    torch.save(state, run_dir / "checkpoint.pt")
    with pytest.raises(UsageError, match="aux_device cuda needs a GPU"):
        parse(ppg_procgen, "--resume", run_dir, "--total-timesteps", 256)
    flags = ["--total-timesteps", "256", "--aux-device", "cpu", "--no-compile", "--no-cuda-graphs"]
    assert len(read_rows(resume(ppg_procgen, run_dir, *flags))) == 4


# ---- refused


def test_what_is_no_checkpoint_is_refused_in_one_line(trained, tmp_path):
    ppo_run, weights = trained(ppo_procgen), tmp_path / "weights"
    weights.mkdir()
    shutil.copy(ppo_run / "agent.pt", weights / "checkpoint.pt")
    for bad, message in (
        (tmp_path / "nothing", "no checkpoint"),
        (ppo_run, "not a run of ppg_procgen.py"),
        (weights, "not a run of ppg_procgen.py"),
    ):
        with pytest.raises(UsageError, match=message):
            parse(ppg_procgen, "--resume", bad)


def test_a_run_in_use_is_refused_and_stays_as_it_is(finished):
    run_dir = finished()
    args = parse(ppg_procgen, "--resume", run_dir, "--total-timesteps", 256)
    with contextlib.ExitStack() as other:
        ppg_procgen.open_run(args, ppg_procgen.describe(args), other)
        before = snapshot(run_dir)
        with pytest.raises(UsageError, match="another process"):
            train(ppg_procgen, args)
        assert snapshot(run_dir) == before
    train(ppg_procgen, args)


HARM = {
    "half a row": lambda path: (path / "metrics.csv").write_text((path / "metrics.csv").read_text()[:-30]),
    "no rows": lambda path: (path / "metrics.csv").write_text(""),
    "no metrics": lambda path: (path / "metrics.csv").unlink(),
    "Windows": lambda path: (path / "metrics.csv").write_bytes(
        (path / "metrics.csv").read_bytes().replace(b"\n", b"\r\n")
    ),
    "a comment": lambda path: (path / "metrics.csv").write_text("# mine\n" + (path / "metrics.csv").read_text()),
    "no arguments": lambda path: (path / "args.json").unlink(),
    "broken arguments": lambda path: (path / "args.json").write_text('{"args": {'),
    "no script, no weights": lambda path: [(path / name).unlink() for name in ("ppg_procgen.py", "agent.pt")],
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_lost_beside_the_checkpoint_is_healed(finished, trained, harm):
    run_dir = finished()
    HARM[harm](run_dir)
    resume(ppg_procgen, run_dir, "--total-timesteps", 256)
    assert same(run_dir, trained()) and len(read_rows(run_dir)) == 4
    saved = json.loads((run_dir / "args.json").read_text())
    assert saved["args"]["total_timesteps"] == 256
    assert set(saved) == set(json.loads((trained() / "args.json").read_text()))


# ---- checkpoints


def equal(x, y) -> bool:
    """Whether two nested states are the same bits."""
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(equal(x[name], y[name]) for name in x)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(equal, x, y))
    if isinstance(x, torch.Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()
    return type(x) is type(y) and (x == y or x != x)


@pytest.mark.parametrize("rounds", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_refused_or_harmless(finished, rounds):
    path = finished() / "checkpoint.pt"
    data, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    intact = ppg_procgen.load_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        entries = [info.header_offset for info in archive.infolist()]
    places = [0, 8, len(data) - 1, len(data) - 10, entries[-1] + 26, *rng.integers(len(data), size=rounds)]
    for position in places:
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            assert equal(ppg_procgen.load_checkpoint(path), intact)
        except UsageError as error:
            assert "is damaged" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > rounds / 2
    for size in [0, 10, 32, 33, *rng.integers(len(data), size=rounds // 4)]:
        path.write_bytes(data[:size])
        with pytest.raises(UsageError, match="damaged"):
            ppg_procgen.load_checkpoint(path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_killed_before_it_has_made_an_agent_is_begun_anew_in_its_folder(tmp_path, trained, killed, number):
    flags = TINY_PPG | {"run_dir": tmp_path / "run"}
    assert killed(ppg_procgen, flags, "Agent", 1, number).returncode in (-signal.SIGKILL, -signal.SIGTERM)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"args.json", "ppg_procgen.py"}
    assert killed(ppg_procgen, flags).returncode == 0
    assert same(tmp_path / "run", trained())


def test_an_extension_that_is_stopped_at_once_is_continued_by_its_last_line(finished, killed, command_line):
    """Before its first checkpoint; the line has to repeat the flags."""
    run_dir = finished()
    again = {"resume": run_dir, "total_timesteps": 256}
    result = killed(ppg_procgen, again, "ProcgenVectorEnv.step", 1, signal.SIGTERM)
    assert result.returncode == 128 + signal.SIGTERM
    flags = re.search(r"^to continue: python ppg_procgen.py (.*)$", result.stderr, re.M)[1]
    assert shlex.split(flags) == as_flags(again)
    assert ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 2


def test_a_resume_by_an_edited_script_says_so(finished, capsys):
    run_dir = finished()
    resume(ppg_procgen, run_dir, "--total-timesteps", 192)
    assert capsys.readouterr().err == ""
    copy = run_dir / "ppg_procgen.py"
    copy.write_text(copy.read_text() + "# edited")
    resume(ppg_procgen, run_dir, "--total-timesteps", 256)
    assert capsys.readouterr().err == f"this run was started by another version of the script: {copy}\n"


def test_a_checkpoint_is_a_plain_file_of_torch_and_runs_no_pickled_code(trained, tmp_path):
    state = torch.load(trained() / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == 4 and state["about"]["algorithm"] == "ppg"
    assert equal(state["agent"], torch.load(trained() / "agent.pt", weights_only=True))

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"about": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="damaged, or no checkpoint"):
        ppg_procgen.load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "evil").exists()


def test_weights_load_into_a_copied_script_and_act_the_same(run, tmp_path):
    run_dir = run(small=False, num_envs=2, num_steps=8, total_timesteps=32)
    shutil.copy(run_dir / "ppg_procgen.py", tmp_path / "my_research.py")
    code = (
        "import torch; from my_research import Agent; agent = Agent('dual');"
        f"agent.load_state_dict(torch.load({str(run_dir / 'agent.pt')!r}, weights_only=True));"
        "torch.manual_seed(0); obs = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8);"
        "print(agent(obs).logits.argmax(-1).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    agent = ppg_procgen.Agent("dual")
    agent.load_state_dict(torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"])
    torch.manual_seed(0)
    obs = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8)
    assert result.stdout.strip() == str(agent(obs).logits.argmax(-1).tolist())


# ---- full disks


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 10 MB: two checkpoints and little more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=10m none {folder} 2>/dev/null") != 0:
        pytest.skip("mounting a small file system takes root")
    yield folder
    os.system(f"umount -l {folder}")


def test_a_full_disk_stops_the_run_and_harms_nothing(small_disk, trained, capsys, monkeypatch):
    run_dir = small_disk / "run"

    class Filling(ppg_procgen.ProcgenVectorEnv):
        calls = 0

        def step(self, actions):
            Filling.calls += 1
            if Filling.calls == 2 * 16 + 1:  # after the first phase
                (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
            return super().step(actions)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(ppg_procgen, "ProcgenVectorEnv", Filling)
        train(ppg_procgen, make_args(ppg_procgen, run_dir))
    errors = capsys.readouterr().err
    assert end.value.code == 1 and "No space left on device" in errors and "Traceback" not in errors
    assert ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")["iteration"] == 2
    assert not list(run_dir.glob("*.tmp*"))
    (small_disk / "filler").unlink()
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.pt"
    ppg_procgen.save_atomically(path, {"old": 1})
    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError):
        ppg_procgen.save_atomically(path, {"new": 2})
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


# ---- numbers


def poison_reward(setattr):
    original, calls = ppg_procgen.ProcgenVectorEnv.step, iter(range(1000))

    def step(self, actions):
        obs, rewards, *rest = original(self, actions)
        return obs, rewards * np.float32(np.nan if next(calls) == 40 else 1), *rest

    setattr(ppg_procgen.ProcgenVectorEnv, "step", step)


def poison_loss(setattr):
    original, calls = ppg_procgen.auxiliary_phase_loss, iter(range(1000))

    def loss(*args, **kwargs):
        value, stats = original(*args, **kwargs)
        return (value, stats) if next(calls) != 2 else (value, stats | {"kl_loss": stats["kl_loss"] * np.inf})

    setattr(ppg_procgen, "auxiliary_phase_loss", loss)


def poison_weight(setattr):
    original, calls = ppg_procgen.update, iter(range(1000))

    def update(optimizer, params, *rest, **minibatch):
        if next(calls) == 1:
            params[1].data[0] = np.nan
        return original(optimizer, params, *rest, **minibatch)

    setattr(ppg_procgen, "update", update)


@pytest.mark.parametrize(
    "poison, message",
    [
        (poison_reward, "losses/policy_loss is nan on rank 0 at update 1 of 2 in iteration 3"),
        (poison_loss, "losses/aux/kl_loss is .* on rank 0 at update 3 of 4 in iteration 2"),
        (poison_weight, "losses/policy_loss is nan on rank 0 at update 2 of 2 in iteration 1"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, capsys, poison, message):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        poison(patch.setattr)
        train(ppg_procgen, make_args(ppg_procgen, run_dir))
    errors = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" not in errors
    assert re.search(message.replace("policy_loss is", r"\w+ is"), errors)
    state = ppg_procgen.load_checkpoint(run_dir / "checkpoint.pt")
    assert all(x.isfinite().all() for x in state["agent"].values())


def test_an_error_of_the_code_shows_its_traceback_and_how_to_go_on(tmp_path, monkeypatch, capsys, script):
    def update(*args, **minibatch):
        raise RuntimeError("a bug of mine")

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(script, "update", update)
        train(script, make_args(script, tmp_path / "run"))
    errors = capsys.readouterr().err
    assert end.value.code == 1 and "Traceback" in errors
    assert "stopped: RuntimeError: a bug of mine\n" in errors and "--resume" in errors.splitlines()[-1]


def test_comparable_means_something(trained):
    rows, weights = comparable(trained())
    assert {"losses/policy_loss", "global_step"} < set(rows[0]) and len(weights) >= 10
    assert not same(trained(), trained(seed=2))


# ---- odd files, odd shells


def change(*keys):
    """A function that changes an entry of a checkpoint, or removes it if the last key is None."""

    def change(state):
        for key in keys[:-2]:
            state = state[key]
        if keys[-1] is None:
            del state[keys[-2]]
        else:
            state[keys[-2]] = keys[-1]

    return change


@pytest.mark.parametrize(
    "harm, message",
    [
        (change("about", "args", "my_coef", 1.0), "differ in flags: {'my_coef'}"),
        (change("about", "args", "gamma", None), "differ in flags: {'gamma'}"),
        (change("about", 7), "not a run of ppg_procgen.py"),
        (change("about", "args", None), "not a run of ppg_procgen.py"),
        (change("ranks", None), "does not fit this script: KeyError"),
        (change("about", "args", "arch", "detach"), "does not fit this script: RuntimeError"),
    ],
)
def test_a_checkpoint_of_another_script_is_refused_in_one_line(finished, harm, message):
    run_dir = finished()
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    harm(state)
    torch.save(state, run_dir / "checkpoint.pt")
    with pytest.raises(UsageError) as error:
        resume(ppg_procgen, run_dir, "--total-timesteps", 256)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_torch_that_is_no_checkpoint_is_refused(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "checkpoint.pt")
    with pytest.raises(UsageError, match="not a run of ppg_procgen.py"):
        parse(ppg_procgen, "--resume", tmp_path)


def test_a_buffer_of_another_size_or_none_is_refused(tmp_path, killed):
    """The checkpoint is inside the auxiliary phase, whose observations are in the file."""
    run_dir = tmp_path / "run"
    assert killed(ppg_procgen, TINY_PPG | {"run_dir": run_dir}, "update", 6).returncode == -signal.SIGKILL
    (path,) = run_dir.glob("buffer_*.bin")
    os.truncate(path, 1000)
    for _ in range(2):  # a refusal leaves no file that the next attempt would take
        with pytest.raises(UsageError, match="needs --aux-device file and .*buffer_"):
            resume(ppg_procgen, run_dir)
        assert not path.exists()


def test_a_resume_on_a_full_disk_stops_in_three_lines(small_disk, start):
    script, run_dir = ppo_procgen, small_disk / "run"
    assert start(script, {}, *as_flags(TINY | {"run_dir": run_dir, "total_timesteps": 128})).end().returncode == 0
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
    result = start(script, {}, *as_flags({"resume": run_dir, "total_timesteps": 256})).end()
    assert result.returncode == 1 and result.stderr.count("\n") == 3, result.stderr
    assert "No space left on device" in result.stderr
    (small_disk / "filler").unlink()
    assert start(script, {}, *as_flags({"resume": run_dir, "total_timesteps": 256})).end().returncode == 0


def test_a_new_run_on_a_full_disk_leaves_nothing(small_disk, capsys):
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 200_000))
    with pytest.raises(SystemExit) as end:
        train(ppo_procgen, make_args(ppo_procgen, small_disk / "run"))
    assert end.value.code == 1 and "No space left on device" in capsys.readouterr().err
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    flags = {"num_envs": 16, "num_steps": 64, "total_timesteps": 4096}
    (small_disk / "filler").unlink()
    with pytest.raises(UsageError, match="the buffer needs .*No space left on device; --aux-device cpu"):
        train(ppg_procgen, make_args(ppg_procgen, small_disk / "run", **flags))
    assert list(small_disk.iterdir()) == []


def test_a_deleted_table_is_written_again(run, trained, monkeypatch):
    original = ppg_procgen.Logger.log

    def log(self):
        if len(self.rows) == 2:
            self.path.unlink()
        original(self)

    monkeypatch.setattr(ppg_procgen.Logger, "log", log)
    assert same(run(), trained())


@pytest.mark.slow
def test_a_run_trains_without_standard_streams(tmp_path, script):
    """As a daemon may start it."""
    flags = as_flags((CHEAP_PPG if script is ppg_procgen else CHEAP_PPO) | {"run_dir": tmp_path / "run"})
    command = shlex.join([sys.executable, f"{script.__name__}.py", *flags])
    assert subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], cwd=ROOT).returncode == 0
    assert len(read_rows(tmp_path / "run")) == 4


def test_an_import_never_fails(tmp_path):
    code = "import sys; sys.argv = []; "
    code += "import ppg_procgen, ppo_procgen; print(ppg_procgen.RANK, ppo_procgen.LOCAL_WORLD_SIZE)"
    environment = os.environ | {"RANK": "²", "LOCAL_WORLD_SIZE": "", "WORLD_SIZE": "x", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "-1 -1\n"), result.stderr


def test_another_system_is_refused_in_one_line(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "sysconf")  # Windows has none
    with pytest.raises(script.UsageError, match="it runs on Linux only"):
        parse(script)
