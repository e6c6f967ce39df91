"""Our scripts against whole training runs of openai/phasic-policy-gradient and openai/baselines (published_runs.py):
the real main, network and games, with the same first weights, levels, noise and order of samples."""

import numpy as np
import pytest
import torch
from conftest import read_rows, train
from published_code import weights
from published_runs import NUM_AUX_ROLLOUTS, NUM_ITERATIONS, NUM_MINIBATCHES, PPG_COLUMNS, PPG_RUNS, PPO_COLUMNS
from published_runs import PPO_RUN, RESULTS, SEED, Draws, N, Projections, T

import ppg_procgen
import ppo_procgen

RUNS = {name: (ppg_procgen, args, PPG_COLUMNS) for name, args in PPG_RUNS.items()}
RUNS["ppo"] = (ppo_procgen, PPO_RUN, PPO_COLUMNS)


@pytest.fixture(scope="module")
def published():
    with np.load(RESULTS) as arrays:
        return dict(arrays)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name, num_iterations) trains with the draws of the published run, and gives what it did."""

    def run(name: str, num_iterations: int) -> dict[str, np.ndarray]:
        script, args, columns = RUNS[name]
        draws, agents, actions, projections = Draws(), [], [], []

        class FixedAgent(script.Agent):
            """Begins with the published run's weights."""

            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                agents.append(self)
                for parameter, x in zip(self.parameters(), weights([x.shape for x in self.parameters()]), strict=True):
                    parameter.data.copy_(torch.from_numpy(x))

        def sample_action(logits, generator=None):
            logprobs = logits.log_softmax(-1)
            noise = -np.log(-np.log(draws.uniform(size=logits.shape)))
            chosen = (logprobs + torch.from_numpy(noise)).argmax(-1)
            actions.append(chosen.numpy())
            return chosen, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

        def randperm(size, **_):
            """Indices into our arrays of what the published code takes from its own, in which time comes last."""
            if script is ppo_procgen:
                env, t = np.divmod(draws.permutation(N * T), T)
                indices = t * N + env
            elif size == N * T:  # policy phase, whole rollouts
                rollouts = draws.permutation(N).reshape(NUM_MINIBATCHES, 1, -1)
                indices = (np.arange(T).reshape(1, -1, 1) * N + rollouts).ravel()
            else:
                env, iteration = np.divmod(draws.permutation(size), args["n_iteration"])
                indices = iteration * N + env
            assert size == len(indices)
            return torch.from_numpy(indices)

        def log(self, *row, original=script.Logger.log):
            original(self, *row)
            project = Projections({name: x.shape for name, x in agents[0].named_parameters()})
            projections.append(project([x.detach().numpy() for x in agents[0].parameters()]))

        monkeypatch.setattr(script, "Agent", FixedAgent)
        monkeypatch.setattr(script, "sample_action", sample_action)
        monkeypatch.setattr(script.Logger, "log", log)
        monkeypatch.setattr(torch, "randperm", randperm)
        flags = {"num_envs": N, "num_steps": T, "num_minibatches": NUM_MINIBATCHES, "seed": SEED, "cuda": False}
        if script is ppg_procgen:
            flags |= {"num_aux_rollouts": NUM_AUX_ROLLOUTS, "aux_dtype": "float32"}
        flags |= {"total_timesteps": num_iterations * N * T, "env_threads": 0, "run_dir": str(tmp_path / "run")}
        rows = read_rows(train(script, script.Args(**args, **flags), small=False))
        losses = [[float(row[column] or "nan") for column in columns] for row in rows]
        return {"actions": np.array(actions), "losses": np.array(losses), "projections": np.array(projections)}

    return run


def assert_same(trace, published, name, num_iterations, tolerance):
    np.testing.assert_array_equal(trace["actions"], published[f"{name}/actions"][: num_iterations * T])
    for key in ("losses", "projections"):
        expected = published[f"{name}/{key}"][:num_iterations].copy()
        if key == "losses" and name == "kl":  # they count changed ratios, we clipped ones: there is no clipping
            expected[:, list(PPG_COLUMNS).index("losses/clipfrac")] = 0
        np.testing.assert_allclose(trace[key], expected, rtol=tolerance, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", RUNS)
def test_whole_run(name, run, published, monkeypatch):
    """In float64, what both compute differs by rounding alone, and every later number tells whether it does."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    try:
        trace = run(name, NUM_ITERATIONS[name])
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(trace, published, name, NUM_ITERATIONS[name], 1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_first_iteration_in_float32(name, run, published):
    """As the script computes by default; later, rounding grows."""
    assert_same(run(name, 1), published, name, 1, 1e-3)
