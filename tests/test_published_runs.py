"""Our scripts against whole training runs of openai/phasic-policy-gradient and openai/baselines (published_runs.py):
the real main, network and games, with the same first weights, levels, noise and order of samples."""

import numpy as np
import pytest
import tensorflow_habits
import torch
from conftest import read_rows, train
from published_code import weights
from published_runs import PPG_COLUMNS, PPG_RUNS, PPO_COLUMNS, PPO_RUNS, RESULTS, Draws, N, Projections, T
from worker import use_float64

import ppg_procgen
import ppo_procgen

RUNS = {name: (ppg_procgen, args, PPG_COLUMNS) for name, args in PPG_RUNS.items()}
RUNS |= {name: (ppo_procgen, args, PPO_COLUMNS) for name, args in PPO_RUNS.items()}


@pytest.fixture(scope="module")
def published():
    with np.load(RESULTS) as arrays:
        return dict(arrays)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(name) trains with the draws of the published run, and gives what it did."""

    def run(name: str, **flags) -> dict[str, np.ndarray]:
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
                rollouts = draws.permutation(N).reshape(args["num_minibatches"], 1, -1)
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

        if script is ppo_procgen:
            tensorflow_habits.install(monkeypatch.setattr)
        monkeypatch.setattr(script, "Agent", FixedAgent)
        monkeypatch.setattr(script, "sample_action", sample_action)
        monkeypatch.setattr(script.Logger, "log", log)
        monkeypatch.setattr(torch, "randperm", randperm)
        flags = args | {"cuda": False, "env_threads": 0, "run_dir": str(tmp_path / "run")} | flags
        if script is ppg_procgen:
            flags["aux_dtype"] = "float32"
        rows = read_rows(train(script, script.Args(**flags), small=False))
        losses = [[float(row.get(column) or "nan") for column in columns] for row in rows]
        return {"actions": np.array(actions), "losses": np.array(losses), "projections": np.array(projections)}

    return run


def assert_same(trace: dict[str, np.ndarray], published: dict[str, np.ndarray], name: str, **tolerances: float) -> None:
    """The trace may be shorter than the published one."""
    for key, tolerance in tolerances.items():
        theirs = published[f"{name}/{key}"][: len(trace[key])]
        np.testing.assert_allclose(trace[key], theirs, rtol=tolerance, atol=tolerance, err_msg=f"{name}: {key}")


SLOW = ("shared", "separate", "clipping", "kl")  # with these, the default tests would take over four minutes


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in RUNS])
def test_whole_run(name, run, published, monkeypatch):
    """In float64 what differs is rounding alone."""
    use_float64(RUNS[name][0], monkeypatch.setattr)
    try:
        trace = run(name)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(trace["actions"]) == len(published[f"{name}/actions"])
    assert_same(trace, published, name, actions=0, losses=1e-9, projections=1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_first_iteration_in_float32(name, run, published):
    """The precision of real runs; later, rounding grows until actions differ. An update moves a projection by up to 0.4
    (learning rate times the root of the parameter's size)."""
    trace = run(name, total_timesteps=N * T)
    assert_same(trace, published, name, actions=0)
    is_early = ["aux" not in column for column in RUNS[name][2]]  # the auxiliary phase comes after many updates
    theirs = published[f"{name}/losses"][:1]
    np.testing.assert_allclose(trace["losses"][:, is_early], theirs[:, is_early], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(trace["losses"], theirs, rtol=3e-2, atol=3e-2)
    assert_same(trace, published, name, projections=3e-2)


@pytest.mark.parametrize("name", RUNS)
def test_published_run_has_all_that_matters(name, published):
    """Ends of episodes, two auxiliary phases, and where it is meant to clip, clipped ratios in each iteration."""
    losses = dict(zip(RUNS[name][2], published[f"{name}/losses"].T, strict=True))
    assert np.isfinite(losses["charts/mean_return_100"][-1])
    if name != "ppo":
        assert np.isfinite(losses["losses/aux/kl_loss"]).sum() == 2
    if name == "clipping":
        assert min(losses["losses/clipfrac"]) > 0.3
