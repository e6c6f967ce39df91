"""Whole runs of the scripts on real procgen, in small."""

import ast
import copy
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, fields
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import (
    CHEAP_PPO,
    ROOT,
    TINY,
    as_flags,
    comparable,
    interrupt,
    level_seeds,
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
from ppg_procgen import Args, ProcgenVectorEnv


@pytest.fixture
def updates(monkeypatch):
    """Records (optimizer, names of what was trained, minibatch, statistics) of each optimizer step."""
    recorded = []

    def update(original, agent, args, optimizer, *rest, **minibatch):
        stats = original(agent, args, optimizer, *rest, **minibatch)
        recorded.append((optimizer, set(stats), minibatch, {name: x.item() for name, x in stats.items()}))
        return stats

    for script in (ppg_procgen, ppo_procgen):
        monkeypatch.setattr(script, "update", partial(update, script.update))
    return recorded


# ---- the algorithm as a whole


def test_budget_is_spent_whole_and_phases_fall_where_they_should(run, capsys):
    assert Args(total_timesteps=25_000_000).num_iterations == 1525
    rows = read_rows(run(total_timesteps=5 * 64 + 63))
    assert [int(row["global_step"]) for row in rows] == [64, 128, 192, 256, 320]
    assert [row.get("losses/aux/kl_loss", "") != "" for row in rows] == [False, True, False, True, False]
    output = capsys.readouterr().out
    assert "5 iterations of 1 x 4 environments x 16 steps" in output and "2 auxiliary phases" in output


def test_only_every_kth_auxiliary_phase_with_aux_interval(trained):
    rows = read_rows(trained(aux_interval=2))  # phases would end after iterations 2 and 4
    assert [row.get("losses/aux/kl_loss", "") != "" for row in rows] == [False, False, False, True]


def test_num_aux_minibatches_is_a_number_of_updates_an_epoch(run, updates):
    run(num_aux_minibatches=3, e_auxiliary=2, total_timesteps=128)
    aux = updates[4:]
    assert len(aux) == 2 * 3
    assert not torch.equal(aux[0][2]["returns"], aux[3][2]["returns"])  # drawn anew each epoch


def test_bfloat16_is_for_the_auxiliary_phase_only(trained):
    (rows, _), (other, _) = comparable(trained(aux_dtype="bfloat16")), comparable(trained())
    assert rows[0] == other[0] and rows[1] != other[1]  # the first phase ends iteration 2


@pytest.mark.parametrize("arch", ["dual", "detach", "shared"])
def test_invariants_of_the_phases(run, updates, arch):
    run(arch=arch, e_auxiliary=2, total_timesteps=128)
    policy, aux = updates[:4], updates[4:]
    assert len(aux) == 2 * 4  # epochs * 8 rollouts in minibatches of 2
    for first in (policy[0], policy[2]):  # the policy that is updated first is the one of the rollout
        assert first[3]["approx_kl"] == pytest.approx(0, abs=1e-6) and first[3]["clipfrac"] == 0
    assert policy[1][3]["approx_kl"] > 1e-6  # then it moves: the rollout's policy in place of pi_old would show here
    assert aux[0][3]["kl_loss"] == pytest.approx(0, abs=1e-9)
    assert aux[-1][3]["kl_loss"] > 1e-9
    for epoch, size in ((policy[:2], 64), (policy[2:], 64), (aux[:4], 128), (aux[4:], 128)):
        assert sum(len(minibatch["obs"]) for _, _, minibatch, _ in epoch) == size

    def targets(epoch):
        return torch.cat([minibatch["returns"] for _, _, minibatch, _ in epoch]).sort()[0]

    assert torch.equal(targets(aux[:4]), targets(policy))  # every sample once an epoch, with the policy phase's target
    assert torch.equal(targets(aux[4:]), targets(policy))


def test_the_buffer_holds_full_rollouts_with_the_policy_as_the_phase_begins(run, updates, monkeypatch):
    agents, before, original, recording = [], [], ppg_procgen.Agent, ppg_procgen.update

    def update(*args, **minibatch):
        before.append(copy.deepcopy(agents[0]))
        return recording(*args, **minibatch)

    monkeypatch.setattr(ppg_procgen, "Agent", lambda *args: agents.append(original(*args)) or agents[0])
    monkeypatch.setattr(ppg_procgen, "update", update)
    run(total_timesteps=128, e_auxiliary=2)
    T, policy, aux = 16, updates[:4], updates[4:]

    def samples(epoch):
        """Observation and target of each sample, as bytes."""
        pairs = [zip(mb["obs"], mb["returns"], strict=True) for _, _, mb, _ in epoch]
        return [obs.numpy().tobytes() + target.numpy().tobytes() for pair in pairs for obs, target in pair]

    assert sorted(samples(policy)) == sorted(samples(aux[:4])) == sorted(samples(aux[4:]))
    rollouts = [samples(aux[i : i + 4]) for i in (0, 4)]
    rollouts = [{tuple(epoch[k : k + T]) for k in range(0, len(epoch), T)} for epoch in rollouts]
    assert len(rollouts[0]) == 8 and rollouts[0] == rollouts[1], "full rollouts in order, in both epochs"
    assert samples(aux[:4]) != samples(aux[4:]), "each epoch is shuffled"

    for _, _, minibatch, _ in aux:
        with torch.no_grad():
            expected = before[4](minibatch["obs"]).logits.log_softmax(-1)
        torch.testing.assert_close(minibatch["old_all_logprobs"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dual", "detach", "ppo"])
def test_targets_are_those_of_generalised_advantage_estimation_on_what_was_played(run, updates, monkeypatch, name):
    """From what the environments gave and the network says before any update."""
    script, flags = (ppo_procgen, {}) if name == "ppo" else (ppg_procgen, {"arch": name, "e_auxiliary": 0})
    played, agents, original = [], [], script.Agent

    class Watched(ProcgenVectorEnv):
        def reset(self):
            played.append([*super().reset()[:1], None, None])
            return played[-1][0], {}

        def step(self, actions):
            obs, rewards, terminated, truncated, info = super().step(actions)
            played.append([obs, rewards, terminated])
            return obs, rewards, terminated, truncated, info

    def make_agent(*args):
        agents.extend([agent := original(*args), copy.deepcopy(agent)])
        return agent

    monkeypatch.setattr(script, "ProcgenVectorEnv", Watched)
    monkeypatch.setattr(script, "Agent", make_agent)
    T, N, flags = 128, 4, flags | {"gamma": 0.97, "gae_lambda": 0.8, "reward_gamma": 0.9}
    run(script, env_id="starpilot", num_steps=T, total_timesteps=T * N, num_minibatches=1, **flags)
    agent = agents[1]  # as it was before any update
    obs = torch.from_numpy(np.stack([step[0] for step in played]))  # (T + 1, N, ...)
    rewards, dones = (torch.from_numpy(np.stack([step[i] for step in played[1:]])).float() for i in (1, 2))
    assert dones.sum() > 2 and len(obs) == T + 1
    firsts = torch.cat([torch.ones(1, N), dones])
    with torch.no_grad():
        values = agent(obs.flatten(0, 1)).values.view(T + 1, N)
        logprobs = agent(obs[:-1].flatten(0, 1)).logits.log_softmax(-1)
    normalized = script.RewardNormalizer(N, 0.9)(rewards.numpy(), firsts[:-1].numpy())
    advantages = torch.from_numpy(script.compute_gae(normalized, values.numpy(), firsts.numpy(), 0.97, 0.8))
    (_, _, minibatch, _), *_ = updates
    order = [obs[:-1].flatten(0, 1).flatten(1).tolist().index(x) for x in minibatch["obs"].flatten(1).tolist()[:8]]
    torch.testing.assert_close(minibatch["returns"].sort()[0], (advantages + values[:-1]).flatten().sort()[0])
    scaled = (advantages - advantages.mean()) / advantages.std(correction=0)
    torch.testing.assert_close(minibatch["advantages"].sort()[0], scaled.flatten().sort()[0], atol=1e-4, rtol=1e-4)
    for i, k in enumerate(order):
        expected = values[:-1].flatten()[k], logprobs[k, minibatch["actions"][i]], scaled.flatten()[k]
        found = torch.stack([minibatch[name][i] for name in ("old_values", "old_logprobs", "advantages")])
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_the_auxiliary_phase_trains_the_policy_encoder_but_keeps_the_policy(run):
    flags = {"small": False, "total_timesteps": 128, "env_id": "starpilot"}
    before, after = run(**flags, e_auxiliary=0), run(**flags, e_auxiliary=2)
    agents = []
    for run_dir in (before, after):
        agents.append(ppg_procgen.Agent("dual"))
        agents[-1].load_state_dict(torch.load(run_dir / "agent.pt", weights_only=True))
    obs = torch.from_numpy(ProcgenVectorEnv("starpilot", 64, seed=3).reset()[0])
    with torch.no_grad():
        (logits, values, aux), (new_logits, new_values, new_aux) = (agent(obs, aux=True) for agent in agents)
    moved = {
        name: (x - y).norm() / x.norm()
        for (name, x), y in zip(agents[0].state_dict().items(), agents[1].state_dict().values(), strict=True)
        if "encoder" in name
    }
    assert all(distance > 1e-3 for distance in moved.values()), moved
    probs, new_probs = logits.softmax(-1), new_logits.softmax(-1)
    assert (probs - new_probs).abs().max() < 0.05
    assert (aux - new_aux).abs().mean() > 10 * (probs - new_probs).abs().mean()


def test_advantages_are_normalized_over_the_whole_batch(run, updates):
    run(total_timesteps=64, e_auxiliary=0, num_minibatches=4)
    minibatches = [minibatch["advantages"] for _, _, minibatch, _ in updates]
    assert torch.cat(minibatches).mean().item() == pytest.approx(0, abs=1e-6)
    assert torch.cat(minibatches).std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert any(abs(minibatch.mean().item()) > 1e-3 for minibatch in minibatches)


def test_value_epochs_come_first_with_their_own_optimizer(run, updates):
    run(total_timesteps=64, e_value=2, e_policy=1, e_auxiliary=0)
    trained = [("value_loss" in names, "policy_loss" in names) for _, names, _, _ in updates]
    assert trained == [(True, False)] * 4 + [(False, True)] * 2
    assert updates[0][0] is not updates[4][0]
    updates.clear()
    run(total_timesteps=64, e_value=2, e_policy=2, e_auxiliary=0)
    assert all({"value_loss", "policy_loss"} <= names for _, names, _, _ in updates) and len(updates) == 4
    # each epoch shuffles the samples anew, and has each of them once
    epochs = [torch.cat([minibatch["old_logprobs"] for *_, minibatch, _ in updates[i : i + 2]]) for i in (0, 2)]
    assert not torch.equal(*epochs) and torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])


@pytest.mark.parametrize("single", [False, True])
def test_optimizers_of_the_phases(run, updates, single):
    run(total_timesteps=128, single_optimizer=single)
    assert (updates[0][0] is updates[-1][0]) == single
    assert updates[0][0].defaults["eps"] == 1e-8


def test_annealing_follows_global_progress(run, monkeypatch):
    rates, original = [], ppg_procgen.update

    def update(agent, args, optimizer, *rest, **minibatch):
        rates.append(optimizer.param_groups[0]["lr"].item())
        return original(agent, args, optimizer, *rest, **minibatch)

    monkeypatch.setattr(ppg_procgen, "update", update)
    rows = read_rows(run(anneal_lr=True, learning_rate=1e-3, aux_learning_rate=4e-3))
    assert [float(row["charts/learning_rate"]) for row in rows] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    phases = [2] * 2 + [4]  # updates: two iterations, an auxiliary phase; then the same
    expected = [[rate] * k for rate, k in zip([1e-3, 7.5e-4, 3e-3, 5e-4, 2.5e-4, 1e-3], phases * 2, strict=True)]
    assert rates == pytest.approx(sum(expected, []))


def test_ppo_normalizes_advantages_by_minibatch(run, updates):
    run(ppo_procgen, total_timesteps=64)
    assert len(updates) == 3 * 2  # epochs * minibatches
    for optimizer, _, minibatch, _ in updates:
        assert minibatch["advantages"].mean().item() == pytest.approx(0, abs=1e-6)
        assert minibatch["advantages"].std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert optimizer.defaults["eps"] == 1e-5


def test_each_epoch_of_ppo_shuffles_the_samples_and_has_each_once(run, updates):
    run(ppo_procgen, total_timesteps=64, update_epochs=2)
    epochs = [torch.cat([minibatch["old_logprobs"] for *_, minibatch, _ in updates[i : i + 2]]) for i in (0, 2)]
    assert not torch.equal(*epochs) and torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])
    assert updates[0][2]["old_values"].shape == (32,)


# ---- flags

PUBLISHED = {  # both papers' easy setting
    "total_timesteps": 25_000_000, "distribution_mode": "easy", "num_levels": 0, "start_level": 0, "num_envs": 64,
    "num_steps": 256, "learning_rate": 5e-4, "anneal_lr": False, "gamma": 0.999, "gae_lambda": 0.95,
    "reward_gamma": 0.99, "num_minibatches": 8, "clip_coef": 0.2, "ent_coef": 0.01, "vf_coef": 0.5,
}  # fmt: skip
PUBLISHED_PPG = {
    "e_policy": 1, "e_value": 1, "kl_coef": 0, "clip_vloss": False, "max_grad_norm": 0, "arch": "dual",
    "n_iteration": 32, "e_auxiliary": 6, "aux_learning_rate": 5e-4, "beta_clone": 1, "num_aux_rollouts": 4,
    "num_aux_minibatches": 0, "aux_interval": 1, "single_optimizer": False,
}  # fmt: skip
PUBLISHED_PPO = {"update_epochs": 3, "clip_vloss": True, "max_grad_norm": 0.5}


def test_defaults_are_the_published_settings():
    for args, own in ((Args(), PUBLISHED_PPG), (ppo_procgen.Args(), PUBLISHED_PPO)):
        assert {name: getattr(args, name) for name in PUBLISHED | own} == PUBLISHED | own


FLAGS = {
    "env_id": "bigfish", "total_timesteps": 192, "seed": 2, "distribution_mode": "hard", "num_levels": 1,
    "start_level": 5, "num_envs": 8, "num_steps": 32, "learning_rate": 1e-3, "anneal_lr": True, "gamma": 0.9,
    "gae_lambda": 0.5, "reward_gamma": 0.5, "num_minibatches": 4, "chunk_size": 7, "e_policy": 2, "e_value": 2,
    "clip_coef": 1e-4, "kl_coef": 1.0, "ent_coef": 0.1, "vf_coef": 1.0, "clip_vloss": True, "max_grad_norm": 0.01,
    "arch": "detach", "n_iteration": 1, "e_auxiliary": 2, "aux_learning_rate": 1e-3, "beta_clone": 0.0,
    "num_aux_rollouts": 4, "num_aux_minibatches": 2, "aux_interval": 2, "single_optimizer": True,
    "aux_dtype": "bfloat16",
}  # fmt: skip
PPO_FLAGS = {name: FLAGS[name] for name in FLAGS if name in {field.name for field in fields(ppo_procgen.Args)}}
PPO_FLAGS |= {"update_epochs": 2, "clip_vloss": False}
ELSEWHERE = {  # these change no number of the training; each has a test of its own
    "exp_name", "run_dir", "resume", "checkpoint_interval", "cuda", "track", "wandb_project_name", "wandb_entity",
    "eval_interval", "env_threads", "aux_device", "compile", "cuda_graphs", "tf32",
}  # fmt: skip


def test_every_flag_is_tested():
    assert set(FLAGS) | ELSEWHERE == {field.name for field in fields(Args) if field.init}
    assert set(PPO_FLAGS) | ELSEWHERE - {"aux_device"} == {
        field.name for field in fields(ppo_procgen.Args) if field.init
    }


@pytest.mark.parametrize(
    "script, flag", [*((ppg_procgen, flag) for flag in FLAGS), *((ppo_procgen, flag) for flag in PPO_FLAGS)]
)
def test_flag_changes_the_run(trained, script, flag):
    extra = {"start_level": {"num_levels": 1}, "clip_vloss": {"clip_coef": 1e-3}}.get(flag, {})
    value = FLAGS[flag] if script is ppg_procgen else PPO_FLAGS[flag]
    extra |= {} if script is ppg_procgen or flag == "total_timesteps" else {"total_timesteps": 128}
    changed, reference = trained(script, **{flag: value} | extra), trained(script, **extra)
    rows, weights = comparable(changed)
    reference_rows, reference_weights = comparable(reference)
    if set(weights) == set(reference_weights):
        assert any(not torch.equal(weights[name], reference_weights[name]) for name in weights)
    assert rows != reference_rows


def test_flags_that_must_not_change_the_run_do_not(run, trained):
    assert same(trained(), run(env_threads=2, exp_name="other", checkpoint_interval=1, aux_device="cpu"))


def test_alias_of_cleanrl():
    assert parse(ppg_procgen, "--v-value", "3").e_value == 3


BAD = {
    "--env-id pacman": "pacman",
    "--distribution-mode extreme": "extreme",
    "--no-such-flag": "no-such-flag",
    "--num-minibatches 7": "num_minibatches must divide 16384 samples",
    "--num-aux-rollouts 5": "num_aux_rollouts must divide 2048 rollouts",
    "--num-aux-minibatches 9999": "2048 rollouts",
    "--total-timesteps 16383": "total_timesteps must be at least 16384",
    "--num-envs 0": "num_envs must be at least 1",
    "--e-policy 0": "e_policy must be at least 1",
    "--num-levels -1": "levels cannot be negative",
    "--start-level 5": "start_level needs num_levels",
    "--clip-vloss --clip-coef 0": "clip_vloss",
    "--single-optimizer --aux-learning-rate 1": "single_optimizer has one learning rate",
    "--aux-device cuda --no-cuda": "aux_device cuda needs a GPU",
    "--resume=": "no run folder",
    "--resume nothing": "'nothing' is no run folder",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_end_with_a_message_and_exit_code_2(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        parse(ppg_procgen, *shlex.split(flags))
    errors = capsys.readouterr().err
    assert end.value.code == 2 and BAD[flags] in " ".join(errors.replace("│", "").split())
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_ppo_needs_an_epoch(capsys):
    with pytest.raises(SystemExit):
        parse(ppo_procgen, "--update-epochs", 0)
    assert "update_epochs must be at least 1" in capsys.readouterr().err


def test_a_folder_with_files_is_refused_in_one_line_and_stays_as_it_is(command_line, script, tmp_path):
    (tmp_path / "notes.txt").write_text("not ours")
    result = command_line(script, "--run-dir", tmp_path)
    assert result.returncode == 2 and result.stderr == f"{script.__name__}.py: {tmp_path} is not empty\n"
    assert snapshot(tmp_path) == {"notes.txt": b"not ours"}


def test_import_runs_and_prints_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ppg_procgen, ppo_procgen"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_git(command_line, tmp_path):
    (tmp_path / "sh").symlink_to("/bin/sh")
    result = command_line(ppo_procgen, *as_flags(CHEAP_PPO | {"run_dir": tmp_path / "run"}), PATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "args.json").read_text())["commit"] == ""


def test_a_run_says_where_it_comes_from(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = parse(script, *as_flags(TINY | {"total_timesteps": 64, "seed": 5, "exp_name": "mine"}))
    assert re.fullmatch(r"runs/chaser__mine__5__\d{8}-\d{6}-[0-9a-f]{4}", args.run_dir)
    about = json.loads((train(script, args) / "args.json").read_text())
    assert about["args"] == asdict(args)
    assert about["torch"] == torch.__version__ and about["gpu"] is None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert about["commit"].removesuffix("-dirty") == commit
    assert (tmp_path / args.run_dir / f"{script.__name__}.py").read_text() == (
        ROOT / f"{script.__name__}.py"
    ).read_text()


def test_settings_of_the_readme_are_possible():
    cells = re.findall(r"^\|.*\| `(--[^`]*)` \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(cells) >= 8
    for flags in cells:
        parse(ppg_procgen, *flags.split())


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path):
    """As a person types it, but for --run-dir: the real network in a process of its own. --help shows the same."""

    def flags_in(file):
        text = next(x for x in (ROOT / file).read_text().split("python ppg_procgen.py")[1:] if " 256 " in x)
        return text.partition("#")[0].replace("\\\n", " ").split()

    flags = flags_in("README.md")
    assert flags == flags_in("ppg_procgen.py")
    assert {"--num-envs", "--num-steps", "--num-minibatches", "--n-iteration"} < set(flags)
    command = [sys.executable, "ppg_procgen.py", *flags, "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 4 and sum(row.get("losses/aux/kl_loss", "") != "" for row in rows) == 2
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"args.json", "metrics.csv", "agent.pt", "checkpoint.pt", "ppg_procgen.py"} < files


def test_a_log_file_has_at_most_one_line_a_minute_and_no_control_codes(tmp_path, monkeypatch, capsys):
    """Each step of the environments takes 2 s here: 32 s an iteration of 16 steps."""
    now = [1000.0]
    original = ProcgenVectorEnv.step

    def step(self, actions):
        now[0] += 2
        return original(self, actions)

    monkeypatch.setattr(ppg_procgen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ProcgenVectorEnv, "step", step)
    train(ppg_procgen, make_args(ppg_procgen, tmp_path / "run", total_timesteps=64 * 8, e_auxiliary=0))
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in lines] == ["step 64", "step 192", "step 320", "step 448"]
    assert "\r" not in captured.out and captured.err == ""


# ---- environments and statistics


@pytest.mark.parametrize("env_id", ppg_procgen.Game.__args__)
def test_all_games_step_and_keep_uint8(env_id):
    envs = ProcgenVectorEnv(env_id, 3, seed=1)
    obs, _ = envs.reset()
    for _ in range(20):
        assert obs.dtype == np.uint8 and obs.shape == (3, 64, 64, 3)
        obs, rewards, terminated, truncated, _ = envs.step(np.random.default_rng(0).integers(15, size=3))
        assert rewards.dtype == np.float32 and terminated.dtype == truncated.dtype == bool
    assert obs.std() > 0


def test_levels_are_those_asked_for():
    envs = ProcgenVectorEnv("coinrun", 32, num_levels=3, start_level=7, seed=1)
    seeds = set()
    for _ in range(20):
        envs.step(np.full(32, -1))  # procgen ends a game at action -1
        seeds |= set(level_seeds(envs))
    assert seeds == {7, 8, 9}


def test_every_finished_episode_counts(run, monkeypatch):
    returns, running = [], np.zeros(4)

    class Counting(ProcgenVectorEnv):
        def step(self, actions):
            obs, rewards, terminated, truncated, info = super().step(actions)
            for i in range(4):
                running[i] += rewards[i]
                if terminated[i]:
                    returns.append(running[i])
                    running[i] = 0
            return obs, rewards, terminated, truncated, info

    monkeypatch.setattr(ppg_procgen, "ProcgenVectorEnv", Counting)
    flags = {"env_id": "starpilot", "num_steps": 128, "total_timesteps": 4 * 128 * 3, "e_auxiliary": 0}
    rows = read_rows(run(**flags))
    assert int(rows[-1]["episodes"]) == len(returns) > 8
    assert float(rows[-1]["charts/mean_return_100"]) == pytest.approx(np.mean(returns[-100:]))
    counts = np.diff([0] + [int(row["episodes"]) for row in rows])
    means = [float(row["charts/episodic_return"]) for row in rows]
    assert np.dot(counts, means) == pytest.approx(sum(returns))


@pytest.mark.parametrize("flags", [{}, {"arch": "detach", "aux_dtype": "bfloat16"}])
def test_same_seed_same_bits(run, trained, flags):
    assert same(run(**flags), trained(**flags))


def test_the_seed_chooses_the_levels():
    first, again, other = (ProcgenVectorEnv("starpilot", 4, seed=seed).reset()[0] for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()


def test_ppo_same_seed_same_bits_other_seed_others(run, trained):
    first, again, other = run(ppo_procgen), trained(ppo_procgen), run(ppo_procgen, seed=2)
    assert same(first, again) and not same(first, other)


def test_first_returns_of_ppo_are_as_large_as_in_the_published_runs():
    """Half their mean square is the first value loss of those runs (values are near 0), 0.61 to 0.70: rewards are
    normalized step by step. With the statistics of the whole rollout it would be 0.2."""
    N, T, envs = 64, 256, ProcgenVectorEnv("starpilot", 64, seed=1)
    rng, rewards, dones = np.random.default_rng(1), np.zeros((T, N)), np.ones((T + 1, N))
    for t in range(T):
        _, reward, terminated, truncated, _ = envs.step(rng.integers(15, size=N))
        rewards[t], dones[t + 1] = reward, terminated | truncated
    envs.close()
    losses = {}
    for script in (ppo_procgen, ppg_procgen):
        normalized = script.RewardNormalizer(N, script.Args.reward_gamma)(rewards, dones[:-1])
        values = np.zeros((T + 1, N))
        returns = script.compute_gae(normalized, values, dones, script.Args.gamma, script.Args.gae_lambda)
        losses[script] = np.square(returns).mean() / 2
    assert 0.55 < losses[ppo_procgen] < 0.9
    assert losses[ppg_procgen] < 0.3


# ---- records


def test_tensorboard_shows_what_the_table_holds(trained, script):
    run_dir = trained(script, num_steps=64, total_timesteps=4 * 64 * 4)
    events = EventAccumulator(str(run_dir)).Reload()
    rows = read_rows(run_dir)
    for name in rows[0]:
        expected = {int(row["global_step"]): float(row[name]) for row in rows if row[name] != ""}
        scalars = {event.step: event.value for event in events.Scalars(name)}
        assert scalars == pytest.approx(expected, rel=1e-6)
    (text,) = events.Tensors("hyperparameters/text_summary")
    assert b"|num_envs|4|" in text.tensor_proto.string_val[0]
    wanted = "episodic_return episodic_length SPS learning_rate value_loss policy_loss entropy old_approx_kl approx_kl"
    tags = {tag.split("/")[-1] for tag in events.Tags()["scalars"]}
    assert set(wanted.split()) | {"clipfrac", "explained_variance"} <= tags


def test_recorded_losses_are_means_over_all_updates(run, updates):
    rows = read_rows(run(total_timesteps=64, e_auxiliary=0, num_minibatches=4))
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
        assert float(rows[0][f"losses/{name}"]) == pytest.approx(
            np.mean([stats[name] for *_, stats in updates]), rel=1e-5, abs=1e-7
        )


def test_speed_counts_the_whole_loop(trained):
    rows, total = read_rows(trained()), 0.0
    for row in rows:
        assert float(row["charts/SPS"]) == pytest.approx(float(row["global_step"]) / float(row["wall_time"]))
        phases = [float(x) for name, x in row.items() if name.startswith("time/") and x]
        total += sum(phases)
        assert min(phases) > 0 and total <= float(row["wall_time"])
    assert [row["time/aux_phase"] != "" for row in rows] == [False, True, False, True]


def test_any_number_that_a_user_logs_is_stored_as_a_float_and_does_not_harm_the_checkpoint(tmp_path, monkeypatch):
    numbers = {"a": np.float32(1.5), "b": torch.tensor(2.5), "c": np.int64(3), "d": float("inf"), "e": np.array(4.0)}

    def log(self, row, original=ppg_procgen.Logger.log):
        original(self, row | numbers)

    monkeypatch.setattr(ppg_procgen.Logger, "log", log)
    run_dir = interrupt(ppg_procgen, make_args(ppg_procgen, tmp_path / "run"), 3 * 16)
    resume(ppg_procgen, run_dir)
    rows = read_rows(run_dir)
    assert [[row[name] for name in numbers] for row in rows] == [["1.5", "2.5", "3.0", "", "4.0"]] * 4


def test_weights_and_biases_are_asked_to_continue_the_run_of_the_folder(run, monkeypatch):
    import wandb

    calls = []
    monkeypatch.setattr(wandb, "init", lambda **options: calls.append(options))
    run_dir = run(ppo_procgen, track=True, wandb_project_name="project", wandb_entity="team")
    (options,) = calls
    assert (options["project"], options["entity"], options["name"]) == ("project", "team", run_dir.name)
    assert options["resume"] == "auto" and options["dir"] == str(run_dir) and options["sync_tensorboard"]
    assert options["config"]["total_timesteps"] == 256


def test_weights_and_biases_offline(tmp_path):
    command = [sys.executable, "ppo_procgen.py", *as_flags(CHEAP_PPO), "--track", f"--run-dir={tmp_path / 'run'}"]
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (history,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert history.read_bytes().count(b"losses/policy_loss") >= 4  # a record an iteration


# ---- the two scripts


def test_shared_definitions_are_the_same_word_for_word():
    def definitions(script):
        source = (ROOT / f"{script.__name__}.py").read_text()
        named = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named[node.name] = ast.get_source_segment(source, node)
            elif isinstance(node, ast.Assign):
                name = ast.unparse(node.targets[0])
                named[name] = named.get(name, "") + ast.get_source_segment(source, node)
        return named

    ppg, ppo = definitions(ppg_procgen), definitions(ppo_procgen)
    assert set(ppo) <= set(ppg)
    assert set(ppg) - set(ppo) == set(
        "normalized_init aux_forward auxiliary_phase_loss buffer_path open_buffer".split()
    )
    differ = "Args ResidualBlock ConvSequence ImpalaCNN Outputs Agent RewardNormalizer policy_phase_loss train "
    differ += "join_ranks save_checkpoint check_args MAY_CHANGE main"
    assert {name for name in ppo if ppg[name] != ppo[name]} == set(differ.split())


def test_inline_metadata_is_what_the_project_needs(script):
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    source = (ROOT / f"{script.__name__}.py").read_text()
    header = "\n".join(line[2:] for line in source.split("# ///")[1].splitlines()[1:])
    inline, project = tomllib.loads(header), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(inline["dependencies"]) == sorted(project["dependencies"])
    assert inline["requires-python"] == project["requires-python"]


# ---- learning


class ProbeEnv:
    """Episodes of four steps of reward 1 whose step the observation shows; with choice, a reward only where the action
    tells black from white."""

    obs_shape, num_actions, choice = (64, 64, 3), 2, False

    def __init__(self, env_id, num_envs, mode, seed, **options):
        self.num_envs, self.random, self.t = num_envs, np.random.default_rng(seed), np.arange(num_envs) % 4
        self.draw()

    def draw(self):
        self.shade = self.random.integers(2, size=self.num_envs) if self.choice else self.t / 4
        self.obs = np.broadcast_to(
            (self.shade * 255).astype(np.uint8)[:, None, None, None], (self.num_envs, 64, 64, 3)
        ).copy()

    def reset(self):
        return self.obs, {}

    def step(self, actions):
        rewards = (actions == self.shade if self.choice else np.ones(self.num_envs)).astype(np.float32)
        self.t = (self.t + 1) % 4
        self.draw()
        ended = self.t == 0
        return self.obs, rewards, ended, np.zeros_like(ended), {}

    def close(self):
        pass

    def state_dict(self):
        return {}


PROBE = {"num_envs": 8, "total_timesteps": 8 * 16 * 40, "learning_rate": 5e-3, "aux_learning_rate": 5e-3}
PROBES = {"dual": (ppg_procgen, PROBE), "detach": (ppg_procgen, PROBE | {"arch": "detach"})}
PROBES["ppo"] = ppo_procgen, {name: x for name, x in PROBE.items() if name != "aux_learning_rate"}


def test_probe_the_value_function_learns_what_is_to_come(run, monkeypatch):
    monkeypatch.setattr(ppg_procgen, "ProcgenVectorEnv", ProbeEnv)
    rows = read_rows(run(**PROBE, e_value=2))
    assert float(rows[-1]["charts/mean_return_100"]) == 4
    assert float(rows[-1]["losses/explained_variance"]) > 0.9


@pytest.mark.parametrize("script, flags", PROBES.values(), ids=PROBES)
def test_probe_the_policy_learns_to_look(run, monkeypatch, script, flags):
    monkeypatch.setattr(ProbeEnv, "choice", True)
    monkeypatch.setattr(script, "ProcgenVectorEnv", ProbeEnv)
    rows = read_rows(run(script, **flags, reward_gamma=0.0))
    assert float(rows[0]["charts/mean_return_100"]) < 3
    assert float(rows[-1]["charts/episodic_return"]) > 3.7  # of 4


def final_return(run_dir) -> float:
    return float(read_rows(run_dir)[-1]["charts/mean_return_100"])


def committed_runs(script, name: str) -> tuple[list[float], dict]:
    """Final returns of the five committed runs on one level of starpilot, and their flags."""
    folders = sorted((ROOT / "benchmark" / "results" / "small").glob(f"starpilot__{name}__?"))
    assert len(folders) == 5
    args = json.loads((folders[0] / "args.json").read_text())["args"] | {"cuda": False, "aux_dtype": "auto"}
    names = {field.name for field in fields(script.Args) if field.init} & set(args)
    flags = {name: args[name] for name in names - {"run_dir", "resume"}}
    return [final_return(folder) for folder in folders], flags


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script, name", [(ppg_procgen, "ppg_detach"), (ppo_procgen, "ppo_procgen")])
def test_learns_as_it_did(run, script, name):
    """A run of check_learning.sh again: not below what the five committed seeds predict (95 %) for another."""
    returns, flags = committed_runs(script, name)
    half = scipy.stats.t.ppf(0.975, 4) * np.std(returns, ddof=1) * (1 + 1 / 5) ** 0.5
    learned = final_return(run(script, **flags, small=False))
    print(f"{learned:.2f}, the committed ones {np.mean(returns):.2f} ± {half:.2f}")
    assert learned > np.mean(returns) - half


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_a_real_game(run, seed):
    """Ten times what random actions get in starpilot's first easy level, over the last 100 episodes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count())
    flags = {"env_id": "starpilot", "num_levels": 1, "num_envs": 16, "num_steps": 64, "num_minibatches": 4}
    flags |= {"arch": "detach", "gamma": 0.99, "n_iteration": 16, "num_aux_rollouts": 4, "e_auxiliary": 2}
    run_dir = run(**flags, small=False, aux_dtype="auto", seed=seed, total_timesteps=50_000)
    torch.set_num_threads(threads)
    learned, random = final_return(run_dir), evaluate_random()
    print(f"random {random:.2f}, after 50,000 steps {learned:.2f}")
    assert learned > 10 * random


def evaluate_random():
    envs = ProcgenVectorEnv("starpilot", 256, num_levels=1, seed=5)

    class Uniform(torch.nn.Linear):
        def forward(self, obs, value):
            return ppg_procgen.Outputs(torch.zeros(len(obs), 15), None, None)

    return ppg_procgen.evaluate(Uniform(1, 1), envs, 1).mean()
