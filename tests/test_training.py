"""Whole runs of the scripts on real procgen, in small."""

import ast
import json
import re
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, as_flags, comparable, interrupt, make_args, parse, read_rows, resume, same, train
from gymnasium.spaces import Box, Discrete
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen
from ppg_procgen import Args


def test_budget_phases_and_learning_rates(run, script, monkeypatch):
    def gradient_step(agent, args, optimizer, *rest, original=script.gradient_step, **minibatch):
        rates.append(optimizer.param_groups[0]["lr"])
        return original(agent, args, optimizer, *rest, **minibatch)

    rates = []
    monkeypatch.setattr(script, "gradient_step", gradient_step)
    own = {"aux_learning_rate": 4e-3, "e_value": 2} if script is ppg_procgen else {}
    rows = read_rows(run(script, total_timesteps=4 * 64 + 63, learning_rate=1e-3, **own))
    assert [int(row["global_step"]) for row in rows] == [64, 128, 192, 256]
    expected = [1e-3] * 6 * 4  # 3 epochs of 2 minibatches
    if script is ppg_procgen:  # an auxiliary phase of 4 updates after iterations 2 and 4
        assert [row["losses/aux/kl_loss"] != "" for row in rows] == [False, True, False, True]
        expected = ([1e-3] * 6 * 2 + [4e-3] * 4) * 2
    assert rates == expected


def test_bfloat16_is_for_the_auxiliary_phase_only(trained):
    rows, other = (comparable(trained(aux_dtype=dtype))[0] for dtype in ("bfloat16", "float32"))
    assert rows[0] == other[0] and rows[1] != other[1]  # the first phase ends iteration 2


def test_the_first_update_of_an_iteration_sees_what_acted(run, script, monkeypatch):
    """Values, probabilities, KL are of a sample's own observation and action; advantage: normalized target - value."""

    def gradient_step(agent, args, optimizer, losses, *rest, original=script.gradient_step, **minibatch):
        if "advantages" in minibatch:
            out = agent(minibatch["obs"])
            logprobs = out.pi.log_prob(minibatch["actions"])
            errors = [out.values - minibatch["values"], logprobs - minibatch["logprobs"]]
            pairs = torch.stack([minibatch["targets"] - minibatch["values"], minibatch["advantages"]])
            seen.append([error.abs().max().item() for error in errors] + [pairs.corrcoef()[0, 1].item()])
        return original(agent, args, optimizer, losses, *rest, **minibatch)

    seen = []
    monkeypatch.setattr(script, "gradient_step", gradient_step)
    rows = read_rows(run(script, small=False, env_id="bossfight", num_steps=8, total_timesteps=2 * 32))
    updates = seen[:: len(seen) // 2]  # the first of two iterations
    assert np.allclose(updates, [0, 0, 1], atol=1e-5) and not np.allclose(seen, [0, 0, 1], atol=1e-5)
    assert all(abs(float(row["losses/first_approx_kl"])) < 1e-6 < float(row["losses/approx_kl"]) for row in rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_is_its_own_clone_as_the_auxiliary_phase_begins(run, monkeypatch, dtype):
    """pi_old is the policy of then, in the phase's precision; logits are float32 for the losses."""

    def joint_loss(agent, args, out, mb, original=ppg_procgen.joint_loss):
        assert mb["old_logits"].dtype == out.pi.logits.dtype == torch.float32
        loss, stats = original(agent, args, out, mb)
        seen.append(stats["kl_loss"].item())
        return loss, stats

    seen = []
    monkeypatch.setattr(ppg_procgen, "joint_loss", joint_loss)
    rows = read_rows(run(small=False, env_id="bossfight", aux_dtype=dtype, num_envs=2, num_steps=4, total_timesteps=16))
    assert abs(seen[0]) < 1e-6 < 1e-4 < min(seen[1:]) and float(rows[-1]["losses/aux/first_kl_loss"]) == seen[0]


SEEDED = {"dual": {}, "detach": {"arch": "detach", "aux_dtype": "bfloat16"}, "ppo": {"script": ppo_procgen}}


@pytest.mark.parametrize("flags", SEEDED.values(), ids=SEEDED)
def test_same_seed_same_bits_other_seed_others(run, trained, flags):
    flags = flags | {"num_levels": 1}  # the games are the same with any seed
    assert same(run(**flags), trained(**flags)) and not same(trained(seed=2, **flags), trained(**flags))


def test_numpy_draws_are_seeded_and_differ_by_iteration(run, script, monkeypatch, tmp_path):
    def gradient_step(*inputs, original=script.gradient_step, **minibatch):
        draws.append(np.random.random())
        return original(*inputs, **minibatch)

    draws = []
    monkeypatch.setattr(script, "gradient_step", gradient_step)
    run(script)
    whole = draws.copy()
    draws.clear()
    resume(script, interrupt(script, make_args(script, tmp_path / "run"), 2 * 16 + 5))
    assert len(set(whole)) == len(whole) and set(draws) == set(whole)


def test_defaults_that_no_published_run_takes():
    args = Args()
    assert (args.n_iteration, args.e_auxiliary, args.num_aux_rollouts, args.aux_dtype) == (32, 6, 4, "float32")
    assert (args.arch, args.e_policy, args.e_value, args.clip_coef, args.kl_coef) == ("dual", 1, 1, 0.2, 0)
    for x in (args, ppo_procgen.Args()):
        assert (x.num_iterations, x.num_envs, x.num_minibatches) == (1525, 64, 8)
        assert (x.distribution_mode, x.num_levels) == ("easy", 0)


FLAGS = {
    "env_id": "bigfish", "total_timesteps": 192, "seed": 2, "distribution_mode": "hard", "num_levels": 1,
    "start_level": 5, "num_envs": 8, "num_steps": 32, "learning_rate": 1e-3, "gamma": 0.9,
    "gae_lambda": 0.5, "reward_gamma": 0.5, "num_minibatches": 4, "chunk_size": 7, "e_policy": 2, "e_value": 2,
    "clip_coef": 1e-4, "kl_coef": 1.0, "ent_coef": 0.1, "vf_coef": 2.0, "max_grad_norm": 0.01,
    "arch": "detach", "n_iteration": 1, "e_auxiliary": 2, "aux_learning_rate": 1e-3, "beta_clone": 0.0,
    "num_aux_rollouts": 4, "aux_dtype": "bfloat16",
}  # fmt: skip
PPO_FLAGS = {name: FLAGS[name] for name in FLAGS if name in {field.name for field in fields(ppo_procgen.Args)}}
PPO_FLAGS |= {"update_epochs": 2, "clip_vloss": False}
# the rest change no number of the training; each has a test of its own
REST = {*"exp_name run_dir resume checkpoint_interval cuda track eval_interval env_threads compile cuda_graphs".split()}


def test_every_flag_is_tested():
    for script, flags in ((ppg_procgen, FLAGS), (ppo_procgen, PPO_FLAGS)):
        names = {field.name for field in fields(script.Args)}
        assert set(flags) <= names <= set(flags) | REST
        # --resume may change what changes no number, or only by rounding
        free = (REST | {"chunk_size"}) - {"exp_name", "run_dir", "resume"}
        assert set(script.Args.may_vary.split()) == (free & names) | {"run_dir", "resume"}


@pytest.mark.parametrize("script, flag", [(ppg_procgen, x) for x in FLAGS] + [(ppo_procgen, x) for x in PPO_FLAGS])
def test_flag_changes_the_run(trained, script, flag):
    extra = {"start_level": {"num_levels": 1}, "clip_vloss": {"clip_coef": 1e-3}}.get(flag, {})
    value = FLAGS[flag] if script is ppg_procgen else PPO_FLAGS[flag]
    extra |= {} if script is ppg_procgen or flag == "total_timesteps" else {"total_timesteps": 128}
    rows, weights = comparable(trained(script, **{flag: value} | extra))
    reference_rows, reference_weights = comparable(trained(script, **extra))
    if set(weights) == set(reference_weights):
        assert any(not torch.equal(weights[name], reference_weights[name]) for name in weights)
    assert rows != reference_rows


BAD = {  # {} is the folder of a run of PPG
    "ppg --num-minibatches 7": "num_minibatches must divide 16384 samples",
    "ppg --num-aux-rollouts -4": "num_aux_rollouts must be from 1 to inf",
    "ppg --e-policy 0 --e-value 0": "e_policy must be from 1",
    "ppg --chunk-size 0": "chunk_size must be from 1",
    "ppo --update-epochs 0": "update_epochs must be from 1",
    "ppg --max-grad-norm -1": "max_grad_norm must be from 0 to inf",
    "ppg --gamma 1.5": "gamma must be from 0 to 1",
    "ppg --gae-lambda 2": "gae_lambda must be from 0 to 1",
    "ppg --reward-gamma 1.5": "reward_gamma must be from 0 to 1",
    "ppo --learning-rate -1e-4": "learning_rate must be from 0 to inf",
    "ppg --vf-coef inf": "vf_coef must be from 0 to inf",
    "ppg --num-aux-rollouts 3": "num_aux_rollouts must divide 2048",
    "ppg --total-timesteps 16383": "total_timesteps must be at least 16384",
    "ppg --seed -1": "seed must be from 0",
    "ppo --start-level 7": "start_level needs num_levels",
    "ppo --compile --no-cuda": "no GPU: see README, or --no-cuda --no-compile --no-cuda-graphs",
    "ppg --run-dir {}": "when the run began: it cannot change",
    "ppg --resume nothing": "'nothing' is not a run folder",
    "ppo --resume {}": " has another script: run that, ",
    "ppg --run-dir {}/mine": " has another script: run that, ",
    "ppg --resume {} --total-timesteps 512": "total_timesteps was 256 when the run began: it cannot change",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_flags_end_with_a_message_and_exit_code_2(trained, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (trained() / "mine").mkdir(exist_ok=True)
    (trained() / "mine" / "ppg_procgen.py").write_text("# a copy of mine, which a run must not replace")
    name, *flags = command.format(trained()).split()
    script = ppo_procgen if name == "ppo" else ppg_procgen
    with pytest.raises(SystemExit) as end:
        script.main(parse(script, *flags))
    assert end.value.code == 2 and BAD[command] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_mistakes_in_a_notebook_are_refused(tmp_path, script, capsys):
    with pytest.raises(SystemExit):
        script.main(script.Args(run_dir=str(tmp_path / "run"), env_id="starpilt"))
    assert "env_id must be one of ['bigfish'," in capsys.readouterr().err and not (tmp_path / "run").exists()
    if script is ppg_procgen:
        with pytest.raises(UnboundLocalError):
            conftest.make_agent(script, arch="duall")(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))


def test_arguments_are_frozen_and_those_of_the_paper_and_without_an_auxiliary_phase_are_possible():
    flags = re.search(r"`(--distribution-mode hard[^`]*)`", (ROOT / "README.md").read_text())[1]
    ppg_procgen.check(parse(ppg_procgen, *flags.split()))
    ppg_procgen.check(args := Args(run_dir="run", num_aux_rollouts=3, e_auxiliary=0))
    with pytest.raises(FrozenInstanceError):
        args.ent_coef = 0.0


def test_a_run_says_where_it_comes_from(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train(script, args := parse(script, *as_flags(TINY | {"total_timesteps": 64, "seed": 5, "exp_name": "50%drop"})))
    [run_dir] = Path("runs").iterdir()
    assert re.fullmatch(r"chaser__50%drop__5__\d{8}-\d{6}", run_dir.name)
    about = json.loads((run_dir / "args.json").read_text())
    assert about["args"] == asdict(args) | {"num_ranks": 1, "run_dir": str(run_dir)}
    assert torch.__version__.startswith(about["packages"]["torch"]) and "numpy" in about["packages"]
    assert (about["device"], about["threads"], about["python"]) == ("cpu", torch.get_num_threads(), sys.version)
    assert (run_dir / f"{script.__name__}.py").read_text() == Path(script.__file__).read_text()


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path):
    text = next(x for x in (ROOT / "README.md").read_text().split("python ppg_procgen.py")[1:] if " 256 " in x)
    flags = text.partition("#")[0].replace("\\\n", " ").split()
    command = [sys.executable, "ppg_procgen.py", *flags, "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 4 and sum(row.get("losses/aux/kl_loss", "") != "" for row in rows) == 2


def test_a_gpu_that_torch_cannot_use_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(ppo_procgen.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(ppo_procgen, total_timesteps=64, cuda=False)
    with pytest.raises(SystemExit, match="2"):
        run(ppo_procgen, total_timesteps=64, cuda=True)
    assert "no GPU: see README" in capsys.readouterr().err


def test_tensorboard_shows_what_the_table_holds(trained, script):
    run_dir = trained(script, num_steps=64, total_timesteps=4 * 64 * 4)
    events, rows = EventAccumulator(str(run_dir / "tensorboard")).Reload(), read_rows(run_dir)
    for name in rows[0]:
        expected = {int(row["global_step"]): float(row[name]) for row in rows if row[name] != ""}
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx(expected, rel=1e-6, nan_ok=True)
    wanted = "episodic_return episodic_length SPS value_loss policy_loss entropy approx_kl clipfrac"
    assert {*wanted.split(), "explained_variance"} <= {name.split("/")[-1] for name in rows[0]}


@pytest.mark.slow
def test_a_tracked_run(run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (history,) = run(ppg_procgen, track=True).glob("wandb/offline-run-*/run-*.wandb")
    conftest.wait_for(lambda: b"losses/policy_loss" in history.read_bytes())
    (events,) = history.parents[2].glob("tensorboard/*")  # W&B's links here would be logged again and again


@pytest.mark.slow
def test_weights_and_biases_go_on_in_the_same_run_after_a_kill(tmp_path, start):
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_SERVICE": ""}  # not that of another test
    kill, run_dir = {"target": "gradient_step", "k": 20}, tmp_path / "run"
    start(ppo_procgen, {"kill": kill}, *as_flags(TINY | {"run_dir": run_dir}), "--track", **environment).end()
    time.sleep(1)  # W&B names its folders by the second
    result = start(ppo_procgen, {}, "--resume", run_dir, **environment).end()
    assert result.returncode == 0, result.stderr
    first, second = (path.name.split("-")[-1] for path in run_dir.glob("wandb/offline-run-*"))
    assert first == second


def test_any_number_that_a_user_logs_is_stored_as_a_float_and_survives_a_resume(tmp_path, monkeypatch):
    numbers = {"a": np.float32(1.5), "b": torch.tensor(2.5), "c": np.int64(3), "d": float("inf"), "e": np.array(4.0)}

    def log(self, row, original=ppg_procgen.Run.log):
        original(self, row | numbers)

    monkeypatch.setattr(ppg_procgen.Run, "log", log)
    rows = read_rows(resume(ppg_procgen, interrupt(ppg_procgen, make_args(ppg_procgen, tmp_path / "run"), 3 * 16)))
    assert [[row.get(name) for name in numbers] for row in rows] == [["1.5", "2.5", "3.0", "inf", "4.0"]] * 4


def test_shared_definitions_are_the_same_word_for_word():
    def definitions(script):
        source = (ROOT / f"{script.__name__}.py").read_text()
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        return {node.name: ast.get_source_segment(source, node) for node in nodes}

    ppg, ppo = definitions(ppg_procgen), definitions(ppo_procgen)
    differ = "Args ResidualBlock ImpalaCNN Outputs Agent RewardNormalizer policy_loss value_loss gradient_step "
    differ += "make_optimizer train compile_encoders mean_stats check parse_args main"
    assert {name for name in ppo if ppg.get(name) != ppo[name]} <= set(differ.split())


def test_inline_metadata_is_what_the_project_needs(script):
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    source = (ROOT / f"{script.__name__}.py").read_text()
    header = "\n".join(line[2:] for line in source.split("# ///")[1].splitlines()[1:])
    inline, project = tomllib.loads(header), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(inline["dependencies"]) == sorted(project["dependencies"])
    assert inline["requires-python"] == project["requires-python"]


class ProbeEnv:
    """Four steps of reward 1 (with choice: for the shown shade), which the observation shows; half have a limit."""

    single_observation_space, single_action_space, choice = Box(0, 255, (64, 64, 3), np.uint8), Discrete(2), False

    def __init__(self, args, seed, *_):
        self.num_envs, self.random, self.t = args.num_envs, np.random.default_rng(seed), np.arange(args.num_envs) % 4

    def reset(self, seed=None):
        self.shade = self.random.integers(2, size=self.num_envs) if self.choice else self.t / 4
        return np.full((64, 64, 3, self.num_envs), self.shade * 255, np.uint8).transpose(3, 0, 1, 2).copy(), {}

    def step(self, actions):
        rewards = (actions == self.shade if self.choice else np.ones(self.num_envs)).astype(np.float32)
        self.t = (self.t + 1) % 4
        ended, limited = self.t == 0, np.arange(self.num_envs) % 2 == 1
        return self.reset()[0], rewards, ended & ~limited, ended & limited, {}

    def state_dict(self):
        return {}


PROBE = {"num_envs": 8, "total_timesteps": 8 * 16 * 40, "learning_rate": 5e-3}
PROBES = {"dual": (ppg_procgen, {}), "detach": (ppg_procgen, {"arch": "detach"}), "ppo": (ppo_procgen, {})}


def test_probe_the_value_function_learns_what_is_to_come(run, monkeypatch):
    monkeypatch.setattr(ppg_procgen, "make_envs", ProbeEnv)
    rows = read_rows(run(**PROBE, aux_learning_rate=5e-3, e_value=2))
    assert float(rows[-1]["charts/mean_return_100"]) == 4
    assert float(rows[-1]["losses/explained_variance"]) > 0.9


@pytest.mark.parametrize("script, flags", PROBES.values(), ids=PROBES)
def test_probe_the_policy_learns_to_look(run, monkeypatch, script, flags):
    monkeypatch.setattr(ProbeEnv, "choice", True)
    monkeypatch.setattr(script, "make_envs", ProbeEnv)
    rows = read_rows(run(script, **PROBE | flags, reward_gamma=0.0))
    assert float(rows[0]["charts/mean_return_100"]) < 3
    assert float(rows[-1]["charts/episodic_return"]) > 3.7  # of 4
