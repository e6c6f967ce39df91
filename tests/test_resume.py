"""Killed, stopped and resumed runs: real processes, real signals, real files."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    TINY_PPG,
    as_flags,
    comparable,
    interrupt,
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


@pytest.fixture
def killed(start):
    """killed(script, flags, target, k) starts a run that the signal reaches at the k-th call of target."""

    def killed(script, flags: dict, target: str = "update", k: int = 0, number: int = signal.SIGKILL):
        kill = {"target": target, "k": k, "number": int(number)}
        return start(script, {"kill": kill}, *as_flags(flags)).end()

    return killed


@pytest.fixture
def stopped(tmp_path):
    """stopped(script, **flags): a run that Ctrl-C has ended in its third iteration, with a checkpoint of the second."""
    return lambda script=ppg_procgen, **flags: interrupt(
        script, make_args(script, tmp_path / "stopped", checkpoint_interval=2, **flags), 2 * 16 + 5
    )


def saved_iteration(run_dir) -> int:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]


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


def refusal(capsys, script, *flags) -> str:
    """The one line with which flags are refused."""
    with pytest.raises(SystemExit) as end:
        resume(script, *flags)
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count("\n") == 1
    return errors


# ---- killed

VARIANTS = {
    "dual": (ppg_procgen, {"e_value": 2, "e_auxiliary": 2, "checkpoint_interval": 1}),
    "detach": (ppg_procgen, {"arch": "detach", "eval_interval": 1, "env_id": "bossfight"}),
    "shared": (ppg_procgen, {"arch": "shared", "e_auxiliary": 0, "checkpoint_interval": 1, "num_minibatches": 8}),
    "in memory": (ppg_procgen, {"aux_device": "cpu", "checkpoint_interval": 1}),
    "ppo": (ppo_procgen, {"checkpoint_interval": 1}),
}
# before a checkpoint, inside a rollout, an update, an auxiliary phase; in the writing of a checkpoint and of a row
POINTS = [("ProcgenVectorEnv.step", 20), ("update", 9), ("os.fsync", 1), ("torch.save", 2), ("os.replace", 2)]
POINTS += [("SummaryWriter.add_scalar", 29), ("ProcgenVectorEnv.step", 40)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_run_resumes_to_the_bits_of_one_never_killed(tmp_path, trained, killed, variant):
    script, flags = VARIANTS[variant]
    run_dir, whole = tmp_path / "killed", trained(script, **flags)
    flags = (TINY_PPG if script is ppg_procgen else TINY) | flags
    codes = []
    for i, (target, k) in enumerate(POINTS):
        result = killed(script, {"resume": run_dir} if i else flags | {"run_dir": run_dir}, target, k)
        codes.append(result.returncode)
        assert codes[-1] in (0, -signal.SIGKILL), (target, result.stderr)
        age(run_dir)
    assert codes.count(-signal.SIGKILL) >= 4
    resume(script, run_dir)
    assert same(run_dir, whole)
    assert scalars(run_dir) == scalars(whole)
    assert [int(row["iteration"]) for row in read_rows(run_dir)] == [1, 2, 3, 4]
    assert not list(run_dir.glob("buffer*"))


@pytest.mark.parametrize(
    "num_iterations, target, k", [(4, "torch.save", 3), (4, "os.replace", 5), (5, "os.replace", 6)]
)
def test_a_run_killed_between_its_last_row_and_its_last_save_has_all_records(
    tmp_path, trained, killed, num_iterations, target, k
):
    """The last iteration ends an auxiliary phase or, with 5 iterations, does not."""
    run_dir, steps = tmp_path / "killed", {"total_timesteps": 64 * num_iterations}
    whole = trained(**steps)
    assert killed(ppg_procgen, TINY_PPG | steps | {"run_dir": run_dir}, target, k).returncode == -signal.SIGKILL
    assert len(read_rows(run_dir)) == num_iterations and saved_iteration(run_dir) < num_iterations
    age(run_dir)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, whole) and scalars(run_dir) == scalars(whole)
    assert saved_iteration(run_dir) == num_iterations


def test_a_run_without_a_checkpoint_starts_over_with_resume(tmp_path, trained, killed):
    run_dir = tmp_path / "run"
    assert killed(ppg_procgen, TINY_PPG | {"run_dir": run_dir}, "update", 1).returncode == -signal.SIGKILL
    assert not (run_dir / "checkpoint.pt").exists()
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


KILLED = {"dual": {}, "detach": {"arch": "detach"}, "separate": {"e_policy": 2, "e_value": 3}}


@pytest.mark.learning
@pytest.mark.parametrize("variant", KILLED)
def test_thirty_kills_at_random_moments(tmp_path, run, start, variant):
    """Runs of three phases, killed and resumed until they end: the same bits, and little is lost."""
    flags = TINY_PPG | {"total_timesteps": 64 * 12, "n_iteration": 4, "e_auxiliary": 3, "checkpoint_interval": 2}
    flags |= KILLED[variant]
    whole, rng, kills, lost = run(**flags), random.Random(variant), 0, set()
    for number in range(1000):
        run_dir = tmp_path / f"killed{number}"
        again = flags | {"run_dir": run_dir}
        while True:
            process = start(ppg_procgen, {}, *as_flags(again))
            process.process.join(rng.uniform(0.1, 3))
            process.process.kill()  # nothing, if it has ended
            result = process.end()
            if result.returncode == 0:
                break
            assert result.returncode == -signal.SIGKILL, result.stderr
            kills += 1
            if (run_dir / "args.json").exists():
                again = {"resume": run_dir}
                age(run_dir)
            else:
                shutil.rmtree(run_dir, ignore_errors=True)
            if (run_dir / "checkpoint.pt").exists():
                lost.add(len(read_rows(run_dir)) - saved_iteration(run_dir))
        assert same(run_dir, whole) and scalars(run_dir) == scalars(whole)
        assert not list(run_dir.glob("buffer*"))
        if kills >= 30:
            break
    assert lost == {0, 1} or lost == {0, 1, 2}, "rows that are done again"
    print(f"{kills} kills of {number + 1} runs, the same weights and metrics")


# ---- stopped


def test_ctrl_c_ends_with_the_command_that_resumes(tmp_path, trained, killed, command_line):
    run_dir = tmp_path / "a run"
    result = killed(ppg_procgen, TINY_PPG | {"run_dir": run_dir}, "update", 12, signal.SIGINT)
    assert result.returncode == 130 and result.stderr == ""
    line = result.stdout.splitlines()[-1]
    assert line == f"To resume: python ppg_procgen.py --resume '{run_dir}'"
    resume(ppg_procgen, shlex.split(line)[-1])
    assert same(run_dir, trained())


def test_a_finished_run_says_so_and_does_nothing(trained, tmp_path, capsys):
    run_dir = shutil.copytree(trained(), tmp_path / "finished")
    before = snapshot(run_dir)
    resume(ppg_procgen, run_dir)
    assert capsys.readouterr().out.splitlines()[-1] == f"{run_dir} is finished"
    assert snapshot(run_dir) == before


# ---- resumed with other flags


def test_what_only_changes_the_speed_may_change(stopped, trained):
    run_dir = stopped()
    resume(ppg_procgen, run_dir, "--env-threads", 2, "--checkpoint-interval", 1, "--aux-device", "cpu", "--no-compile")
    assert same(run_dir, trained())


@pytest.mark.parametrize(
    "flags",
    ["--seed 2", "--total-timesteps 640", "--arch detach", "--learning-rate 1", "--run-dir elsewhere"]
    + ["--num-minibatches 4", "--anneal-lr"],
)
def test_what_makes_another_run_is_refused_by_name(stopped, capsys, flags):
    name = flags.split()[0].strip("-").replace("-", "_")
    assert name in refusal(capsys, ppg_procgen, stopped(), *flags.split())


def test_a_run_of_a_machine_with_a_gpu_goes_on_with_flags_for_what_this_one_lacks(stopped, capsys):
    run_dir = stopped()
    about = json.loads((run_dir / "args.json").read_text())
    about["args"]["aux_device"] = "cuda"
    (run_dir / "args.json").write_text(json.dumps(about))
    assert "aux_device cuda needs a GPU" in refusal(capsys, ppg_procgen, run_dir)
    assert len(read_rows(resume(ppg_procgen, run_dir, "--aux-device", "cpu"))) == 4


def test_a_buffer_with_rollouts_stays_in_its_file(tmp_path, capsys, trained):
    """The checkpoint is of iteration 3, with a rollout in the buffer that the auxiliary phase will need."""
    args = make_args(ppg_procgen, tmp_path / "run", checkpoint_interval=1)
    run_dir = interrupt(ppg_procgen, args, 3 * 16 + 1)
    (path,) = run_dir.glob("buffer_*.bin")
    assert saved_iteration(run_dir) == 3
    assert "needs --aux-device file" in refusal(capsys, ppg_procgen, run_dir, "--aux-device", "cpu")
    path.rename(tmp_path / "elsewhere")
    assert str(path) in refusal(capsys, ppg_procgen, run_dir)
    assert not path.exists(), "a refusal leaves no file that the next attempt would take"
    (tmp_path / "elsewhere").rename(path)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


# ---- refused


def test_a_run_of_another_script_is_refused_in_one_line(stopped, capsys):
    run_dir = stopped(ppo_procgen)
    assert "another script" in refusal(capsys, ppg_procgen, run_dir)
    about = json.loads((run_dir / "args.json").read_text())
    about["args"]["env_id"] = "MiniGrid-Empty-5x5-v0"
    (run_dir / "args.json").write_text(json.dumps(about))
    assert "does not know MiniGrid" in refusal(capsys, ppo_procgen, run_dir)


def test_a_run_in_use_is_refused(stopped, capsys):
    run_dir = stopped()
    with ppg_procgen.open_run(parse(ppg_procgen, "--resume", run_dir)):
        before = snapshot(run_dir)
        assert "another process" in refusal(capsys, ppg_procgen, run_dir)
        assert snapshot(run_dir) == before
    resume(ppg_procgen, run_dir)


# ---- files


def test_a_checkpoint_is_a_plain_file_of_torch_and_runs_no_pickled_code(trained, stopped, tmp_path):
    state = torch.load(trained() / "checkpoint.pt", weights_only=True)
    weights = torch.load(trained() / "agent.pt", weights_only=True)
    assert state["iteration"] == 4 and all(torch.equal(state["agent"][name], x) for name, x in weights.items())

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    run_dir = stopped()
    torch.save({"iteration": Evil()}, run_dir / "checkpoint.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        resume(ppg_procgen, run_dir)
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
    run_dir = small_disk / "run"

    class Filling(ppg_procgen.ProcgenVectorEnv):
        calls = 0

        def step(self, actions):
            Filling.calls += 1
            if Filling.calls == 2 * 16 + 1:  # after the first phase
                (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
            return super().step(actions)

    with monkeypatch.context() as patch, pytest.raises((OSError, RuntimeError)):
        patch.setattr(ppg_procgen, "ProcgenVectorEnv", Filling)
        train(ppg_procgen, make_args(ppg_procgen, run_dir))
    assert saved_iteration(run_dir) == 2
    (small_disk / "filler").unlink()
    age(run_dir)
    resume(ppg_procgen, run_dir)
    assert same(run_dir, trained())


def test_a_disk_too_small_for_the_buffer_ends_the_run_by_an_error_and_not_by_sigbus(small_disk):
    flags = {"num_envs": 16, "num_steps": 64, "total_timesteps": 4096}
    with pytest.raises(OSError, match="No space left on device"):
        train(ppg_procgen, make_args(ppg_procgen, small_disk / "run", **flags))


def test_a_resumed_table_is_written_in_little_time(tmp_path):
    """1,500 rows, and a row more at each iteration."""
    args = make_args(ppg_procgen, tmp_path / "run")
    (tmp_path / "run").mkdir()
    names = [f"losses/{number}" for number in range(25)] + ["charts/mean_return_100"]
    numbers = dict.fromkeys(names, 1 / 3)
    rows = [{"iteration": k, "global_step": k, "wall_time": float(k)} | numbers for k in range(1, 1501)]
    logger = ppg_procgen.Logger(args, rows)
    logger.table.writerow(rows[-1])
    table = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(table) == 1502 and len(list((tmp_path / "run").glob("metrics*"))) == 1


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


@pytest.mark.parametrize(
    "poison, message",
    [(poison_reward, "losses/policy_loss is nan"), (poison_loss, "losses/aux/kl_loss is ")],
)
def test_a_loss_that_is_not_finite_ends_the_run_with_a_line_that_names_it(tmp_path, monkeypatch, poison, message):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=message):
        poison(patch.setattr)
        train(ppg_procgen, make_args(ppg_procgen, run_dir, checkpoint_interval=1))
    weights = torch.load(run_dir / "agent.pt", weights_only=True)
    assert all(x.isfinite().all() for x in weights.values())


def test_comparable_means_something(trained):
    rows, weights = comparable(trained())
    assert {"losses/policy_loss", "global_step"} < set(rows[0]) and len(weights) >= 10
    assert not same(trained(), trained(seed=2))


def test_the_script_in_a_folder_is_the_one_that_ran(stopped):
    assert (stopped() / "ppg_procgen.py").read_text() == (ROOT / "ppg_procgen.py").read_text()
