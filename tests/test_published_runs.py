"""Our scripts against recordings of whole runs of the published code (benchmark/reference/published_runs.py)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_habits
import torch
from conftest import SLOW, read_rows, train
from worker import use_float64

import ppg_procgen
import ppo_procgen
from benchmark.reference import published_runs as published

N, T = published.N, published.T
RUNS = {name: (ppg_procgen, args, published.PPG_COLUMNS) for name, args in published.PPG_RUNS.items()}
RUNS |= {name: (ppo_procgen, args, published.PPO_COLUMNS) for name, args in published.PPO_RUNS.items()}
PUBLISHED = np.load(published.RESULTS)


def run(name: str, run_dir: Path, setattr) -> dict[str, np.ndarray]:
    """Train with the first weights and the draws of the published run. Returns what it did."""
    script, args, columns = RUNS[name]
    draws, agents, actions, projections = published.Draws(), [], [], []

    class FixedAgent(script.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            agents.append(self)
            weights = published.weights([x.shape for x in self.parameters()])
            for parameter, x in zip(self.parameters(), weights, strict=True):
                parameter.data.copy_(torch.from_numpy(x))

    def sample(pi, generator=None):
        noise = -np.log(-np.log(draws.uniform(size=pi.logits.shape)))
        chosen = (pi.logits + torch.from_numpy(noise)).argmax(-1)
        actions.append(chosen.numpy())
        return chosen

    def randperm(size, **_):
        """Indices into our arrays of what the published code takes from its own, in which time comes last."""
        if script is ppo_procgen:
            env, t = np.divmod(draws.permutation(N * T), T)
            indices = t * N + env
        elif size == N * T:  # policy phase, whole rollouts
            rollouts = draws.permutation(N).reshape(args["num_minibatches"], 1, -1)
            indices = (np.arange(T).reshape(1, -1, 1) * N + rollouts).ravel()
        else:
            env, iteration = np.divmod(draws.permutation(size), args["n_iteration"])
            indices = iteration * N + env
        assert size == len(indices)
        return torch.from_numpy(indices)

    def log(self, row, original=script.Run.log):
        original(self, row)
        parameters = [x.detach().numpy() for x in agents[0].parameters()]
        projections.append(published.project(parameters, [x.shape for x in parameters]))

    if script is ppo_procgen:
        tensorflow_habits.install(setattr)
    setattr(script, "Agent", FixedAgent)
    setattr(script.Policy, "sample", sample)
    setattr(script.Run, "log", log)
    setattr(torch, "randperm", randperm)
    flags = args | {"cuda": False, "env_threads": 0, "run_dir": str(run_dir)}
    rows = read_rows(train(script, script.Args(**flags), small=False))
    losses = [[float(row.get(column) or "nan") for column in columns] for row in rows]
    return {"actions": np.array(actions), "losses": np.array(losses), "projections": np.array(projections)}


@pytest.mark.parametrize("name", [pytest.param(x, marks=SLOW * (x not in ("dual", "ppo"))) for x in RUNS])
def test_whole_run(name, tmp_path, monkeypatch):
    """In float64, what differs is rounding alone."""
    if name in ("detach", "ppo") and sys.version_info[:2] not in ((3, 11), (3, 12)):
        pytest.skip("procgen-mirror, with which the published runs were made, draws jumper with some other pixels")
    use_float64(RUNS[name][0], monkeypatch.setattr)
    trace = run(name, tmp_path / "run", monkeypatch.setattr)
    for key, tolerance in {"actions": 0, "losses": 1e-9, "projections": 1e-9}.items():
        np.testing.assert_allclose(trace[key], PUBLISHED[f"{name}/{key}"], rtol=tolerance, atol=tolerance, err_msg=key)
