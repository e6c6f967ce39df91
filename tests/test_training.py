"""Whole runs of the scripts on real procgen, in small."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, TINY_PPG, comparable, read_rows, same
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppg_procgen
import ppo_procgen
from ppg_procgen import Args, ProcgenVectorEnv

ROOT = Path(__file__).resolve().parents[1]


def command_line(script, *flags, **options):
    return subprocess.run(
        [sys.executable, f"{script.__name__}.py", *flags], cwd=ROOT, capture_output=True, text=True, **options
    )


@pytest.fixture
def updates(monkeypatch):
    """Records (optimizer, names of what was trained, minibatch, statistics) of each optimizer step."""
    recorded, original = [], ppg_procgen.update

    def update(optimizer, *rest, **minibatch):
        stats = original(optimizer, *rest, **minibatch)
        recorded.append((optimizer, set(stats), minibatch, {name: x.item() for name, x in stats.items()}))
        return stats

    monkeypatch.setattr(ppg_procgen, "update", update)
    return recorded


# ---- the algorithm as a whole


def test_budget_is_spent_whole_and_phases_fall_where_they_should(run, capsys):
    assert Args(total_timesteps=25_000_000).num_iterations == 1525
    rows = read_rows(run(total_timesteps=5 * 64 + 63))
    assert [int(row["global_step"]) for row in rows] == [64, 128, 192, 256, 320]
    assert [row["losses/aux/kl_loss"] != "" for row in rows] == [False, True, False, True, False]
    assert "5 iterations of 4 x 16 = 320 steps" in capsys.readouterr().out


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


def test_the_auxiliary_phase_trains_the_policy_encoder_but_keeps_the_policy(run):
    before, after = run(total_timesteps=128, e_auxiliary=0), run(total_timesteps=128, e_auxiliary=2)
    agents = []
    for run_dir in (before, after):
        agents.append(ppg_procgen.Agent("dual"))
        agents[-1].load_state_dict(torch.load(run_dir / "agent.pt", weights_only=True))
    obs = torch.from_numpy(ProcgenVectorEnv("starpilot", 64, seed=3).reset()[0])
    with torch.no_grad():
        (logits, values, aux), (new_logits, new_values, new_aux) = (agent(obs) for agent in agents)
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


@pytest.mark.parametrize("single", [False, True])
def test_optimizers_of_the_phases(run, updates, single):
    run(total_timesteps=128, single_optimizer=single)
    assert (updates[0][0] is updates[-1][0]) == single
    assert updates[0][0].defaults["eps"] == 1e-8


def test_annealing_follows_global_progress(run):
    rows = read_rows(run(anneal_lr=True, learning_rate=1e-3))
    assert [float(row["charts/learning_rate"]) for row in rows] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_ppo_normalizes_advantages_by_minibatch(run, monkeypatch):
    seen, original = [], ppo_procgen.update

    def update(optimizer, loss_fn, num_parts, max_grad_norm, **minibatch):
        seen.append((optimizer, minibatch["advantages"], max_grad_norm))
        return original(optimizer, loss_fn, num_parts, max_grad_norm, **minibatch)

    monkeypatch.setattr(ppo_procgen, "update", update)
    run(ppo_procgen, total_timesteps=64)
    assert len(seen) == 3 * 2  # epochs * minibatches
    for optimizer, advantages, max_grad_norm in seen:
        assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert advantages.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        assert optimizer.defaults["eps"] == 1e-5 and max_grad_norm == 0.5


# ---- flags

FLAGS = {
    "env_id": "bigfish", "total_timesteps": 192, "seed": 2, "distribution_mode": "hard", "num_levels": 1,
    "start_level": 5, "num_envs": 8, "num_steps": 32, "learning_rate": 1e-3, "anneal_lr": True, "gamma": 0.9,
    "gae_lambda": 0.5, "reward_gamma": 0.5, "num_minibatches": 4, "num_grad_accum": 3, "e_policy": 2, "e_value": 2,
    "clip_coef": 1e-4, "kl_coef": 1.0, "ent_coef": 0.1, "vf_coef": 1.0, "clip_vloss": True, "max_grad_norm": 0.01,
    "arch": "detach", "n_iteration": 1, "e_auxiliary": 2, "aux_learning_rate": 1e-3, "beta_clone": 0.0,
    "num_aux_rollouts": 4, "num_aux_minibatches": 2, "num_aux_grad_accum": 3, "aux_interval": 2,
    "single_optimizer": True, "policy_dtype": "bfloat16", "aux_dtype": "bfloat16",
}  # fmt: skip
ELSEWHERE = {  # these change no number of the training; each has a test of its own
    "exp_name", "run_dir", "resume", "checkpoint_interval", "cuda", "track", "wandb_project_name", "wandb_entity",
    "eval_interval", "eval_episodes", "eval_greedy", "capture_video", "env_threads", "aux_device",
    "compile", "cuda_graphs", "tf32",
}  # fmt: skip


def test_every_flag_is_tested():
    assert set(FLAGS) | ELSEWHERE == {field.name for field in fields(Args) if field.init}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("baseline") / "run"
    ppg_procgen.main(Args(**TINY_PPG | {"run_dir": str(run_dir)}))
    return run_dir


@pytest.mark.parametrize("flag", FLAGS)
def test_flag_changes_the_run(run, baseline, flag):
    extra = {"num_levels": 1} if flag == "start_level" else {}
    changed = run(**{flag: FLAGS[flag]} | extra)
    reference = run(**extra) if extra else baseline
    rows, weights = comparable(changed)
    reference_rows, reference_weights = comparable(reference)
    if set(weights) == set(reference_weights):
        assert any(not torch.equal(weights[name], reference_weights[name]) for name in weights)
    assert rows != reference_rows


def test_flags_that_must_not_change_the_run_do_not(run, baseline):
    assert same(baseline, run(env_threads=2, exp_name="other", checkpoint_interval=1, aux_device="cpu"))


def test_v_value_is_an_alias(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppg_procgen.py", "--v-value", "3", "--n-aux-grad-accum", "2"])
    args = ppg_procgen.parse_args()
    assert (args.e_value, args.num_aux_grad_accum) == (3, 2)


BAD = {
    "--env-id pacman": "pacman",
    "--arch x": "arch",
    "--no-such-flag": "no-such-flag",
    "--distribution-mode extreme --env-id bigfish": "bigfish has no extreme mode",
    "--distribution-mode exploration --env-id maze --num-levels 5": "single level",
    "--num-minibatches 7": "must divide",
    "--num-aux-rollouts 5": "must divide",
    "--num-aux-minibatches 9999": "buffer",
    "--total-timesteps 16383": "less than an iteration",
    "--gamma 1.5": "gamma",
    "--num-envs 0": "num_envs must be positive",
    "--learning-rate nan": "learning_rate",
    "--e-policy -1": "e_policy",
    "--seed 9999999999": "seed",
    "--start-level 2147483647 --num-levels 1": "levels",
    "--start-level 5": "start_level",
    "--clip-vloss --clip-coef 0": "clip_vloss",
    "--single-optimizer --aux-learning-rate 1": "single_optimizer",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_end_with_a_message_and_exit_code_2(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["ppg_procgen.py", *flags.split()])
    with pytest.raises(SystemExit) as exit:
        ppg_procgen.parse_args()
    assert exit.value.code == 2
    assert BAD[flags] in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_what_cannot_be_written_ends_with_one_line_and_exit_code_2(script, tmp_path, baseline):
    (tmp_path / "file").touch()
    for folder, message in ((tmp_path / "file" / "run", "Not a directory"), (baseline, "holds a run")):
        result = command_line(script, "--run-dir", str(folder))
        assert result.returncode == 2 and message in result.stderr
        assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_import_runs_and_prints_nothing(script, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script.__name__}"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_command_of_the_readme(tmp_path):
    flags = "--env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2"
    result = command_line(ppg_procgen, *flags.split(), "--total-timesteps", "256", "--run-dir", str(tmp_path / "run"))
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["64", "128", "192", "256"]
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 4 and sum(row["losses/aux/kl_loss"] != "" for row in rows) == 2
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"args.json", "metrics.csv", "agent.pt", "checkpoint.pt", "ppg_procgen.py"} < files


# ---- environments and statistics


@pytest.mark.parametrize("env_id", ppg_procgen.Game.__args__)
def test_all_games_step_and_keep_uint8(env_id):
    envs = ProcgenVectorEnv(env_id, 3, seed=1)
    obs, _ = envs.reset()
    for _ in range(20):
        assert obs.dtype == np.uint8 and obs.shape == (3, 64, 64, 3)
        envs.step_async(np.random.default_rng(0).integers(15, size=3))
        obs, rewards, terminated, truncated, _ = envs.step_wait()
        assert rewards.dtype == np.float32 and terminated.dtype == truncated.dtype == bool
    assert obs.std() > 0


def test_all_modes_step():
    for mode, games in ppg_procgen.GAMES_WITH_MODE.items():
        for env_id in games:
            Args(env_id=env_id, distribution_mode=mode)
            assert ProcgenVectorEnv(env_id, 1, mode).reset()[0].std() > 0


def test_levels_are_those_asked_for():
    envs = ProcgenVectorEnv("coinrun", 32, num_levels=3, start_level=7, seed=1)
    seeds = set()
    for _ in range(20):
        envs.step_async(np.full(32, -1))  # procgen ends a game at action -1
        envs.step_wait()
        seeds |= {int(info["level_seed"]) for info in envs.games.get_info()}
    assert seeds == {7, 8, 9}


def test_every_finished_episode_counts(run, monkeypatch):
    returns, running = [], np.zeros(4)

    class Counting(ProcgenVectorEnv):
        def step_wait(self):
            obs, rewards, terminated, truncated, info = super().step_wait()
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
def test_same_seed_same_bits(run, flags):
    assert same(run(**flags), run(**flags))


def test_ppo_same_seed_same_bits_other_seed_others(run):
    first, again, other = run(ppo_procgen), run(ppo_procgen), run(ppo_procgen, seed=2)
    assert same(first, again) and not same(first, other)


# ---- records


def test_tensorboard_shows_what_the_table_holds(run, script):
    run_dir = run(script, num_steps=64, total_timesteps=4 * 64 * 4)
    events = EventAccumulator(str(run_dir)).Reload()
    rows = read_rows(run_dir)
    assert list(rows[0]) == script.COLUMNS
    for name in script.COLUMNS[2:]:
        expected = {int(row["global_step"]): float(row[name]) for row in rows if row[name] != ""}
        if expected:
            scalars = {event.step: event.value for event in events.Scalars(name)}
            assert scalars == pytest.approx(expected, rel=1e-6)
    wanted = "episodic_return episodic_length SPS learning_rate value_loss policy_loss entropy old_approx_kl approx_kl"
    tags = {tag.split("/")[-1] for tag in events.Tags()["scalars"]}
    assert set(wanted.split()) | {"clipfrac", "explained_variance"} <= tags


def test_recorded_losses_are_means_over_all_updates(run, updates):
    rows = read_rows(run(total_timesteps=64, e_auxiliary=0, num_minibatches=4))
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm"):
        assert float(rows[0][f"losses/{name}"]) == pytest.approx(
            np.mean([stats[name] for *_, stats in updates]), rel=1e-5
        )


def test_speed_counts_the_whole_loop(run):
    row = read_rows(run())[-1]
    phases = sum(sum(float(row[f"time/{name}"]) for name in ppg_procgen.PHASES) for row in read_rows(run()))
    assert phases > 0 and float(row["charts/SPS"]) == pytest.approx(256 / float(row["wall_time"]), rel=0.5)
    assert float(row["wall_time"]) >= sum(float(row[f"time/{name}"]) for name in ppg_procgen.PHASES)


def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb")
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in TINY.items() if name != "cuda")
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    result = command_line(ppo_procgen, *flags.split(), "--track", "--run-dir", str(tmp_path / "run"), env=env)
    assert result.returncode == 0, result.stderr
    (history,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert history.read_bytes().count(b"losses/policy_loss") >= 4  # a record an iteration


# ---- the two scripts


def test_shared_definitions_are_the_same_word_for_word():
    import ast

    def definitions(script):
        source = (ROOT / f"{script.__name__}.py").read_text()
        nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        return {n.name: ast.get_source_segment(source, n) for n in nodes}

    ppg, ppo = definitions(ppg_procgen), definitions(ppo_procgen)
    differ = {"Args", "Agent", "ppo_loss", "policy_phase_loss", "train"}
    assert set(ppo) <= set(ppg)
    assert set(ppg) - set(ppo) == {"normalized_init", "aux_loss", "auxiliary_phase_loss", "select_rollouts"}
    assert {name for name in set(ppg) & set(ppo) if ppg[name] != ppo[name]} == differ


def test_inline_metadata_names_the_dependencies_of_the_project(script):
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

    choice = False

    def __init__(self, env_id, num_envs, mode="easy", num_levels=0, start_level=0, seed=0, num_threads=0, render=False):
        self.num_envs, self.random, self.t = num_envs, np.random.default_rng(seed), np.arange(num_envs) % 4
        self.single_observation_space = ppg_procgen.gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = ppg_procgen.gym.spaces.Discrete(2)
        self.draw()

    def draw(self):
        self.shade = self.random.integers(2, size=self.num_envs) if self.choice else self.t / 4
        self.obs = np.broadcast_to(
            (self.shade * 255).astype(np.uint8)[:, None, None, None], (self.num_envs, 64, 64, 3)
        ).copy()

    def reset(self):
        return self.obs, {}

    def step_async(self, actions):
        self.rewards = (actions == self.shade if self.choice else np.ones(self.num_envs)).astype(np.float32)

    def step_wait(self):
        self.t = (self.t + 1) % 4
        self.draw()
        ended = self.t == 0
        return self.obs, self.rewards, ended, np.zeros_like(ended), {}

    def close(self):
        pass

    def state_dict(self):
        return {}


def test_probe_the_value_function_learns_what_is_to_come(run, monkeypatch):
    monkeypatch.setattr(ppg_procgen, "ProcgenVectorEnv", ProbeEnv)
    rows = read_rows(run(num_envs=8, total_timesteps=8 * 16 * 20, e_value=2, arch="dual"))
    assert float(rows[-1]["charts/mean_return_100"]) == 4
    assert float(rows[-1]["losses/explained_variance"]) > 0.8


@pytest.mark.parametrize("arch", ["dual", "detach"])
def test_probe_the_policy_learns_to_look(run, monkeypatch, arch):
    monkeypatch.setattr(ProbeEnv, "choice", True)
    monkeypatch.setattr(ppg_procgen, "ProcgenVectorEnv", ProbeEnv)
    rows = read_rows(run(num_envs=8, total_timesteps=8 * 16 * 20, arch=arch, reward_gamma=0.0))
    assert float(rows[0]["charts/mean_return_100"]) < 3
    assert float(rows[-1]["charts/episodic_return"]) > 3.7  # of 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_a_real_game(run, seed):
    """Ten times what random actions get in starpilot's first easy level, over the last 100 episodes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count())
    flags = {"env_id": "starpilot", "num_levels": 1, "num_envs": 16, "num_steps": 64, "num_minibatches": 4}
    flags |= {"arch": "detach", "gamma": 0.99, "n_iteration": 16, "num_aux_rollouts": 4, "e_auxiliary": 2}
    run_dir = run(**flags, aux_dtype="auto", seed=seed, total_timesteps=50_000)
    torch.set_num_threads(threads)
    learned, random = float(read_rows(run_dir)[-1]["charts/mean_return_100"]), evaluate_random()
    print(f"random {random:.2f}, after 50,000 steps {learned:.2f}")
    assert learned > 10 * random


def evaluate_random():
    envs = ProcgenVectorEnv("starpilot", 256, num_levels=1, seed=5)

    class Uniform(torch.nn.Linear):
        def forward(self, obs, value):
            return (torch.zeros(len(obs), 15),)

    return ppg_procgen.evaluate(Uniform(1, 1), envs, 1, 0, False).mean()
