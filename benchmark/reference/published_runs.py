"""Train with the published codes, whole runs on real Procgen, and write what they did to published_runs.npz, for
tests/test_published_runs.py:

    git clone https://github.com/openai/phasic-policy-gradient ppg && git -C ppg checkout 7295473
    git clone https://github.com/openai/baselines && git -C baselines checkout 9ee399f
    pip install tensorflow-cpu==2.15.1 "numpy<2" gym==0.26.2 procgen-mirror torch tyro scipy joblib cloudpickle
    python benchmark/reference/published_runs.py ppg baselines

in an environment of its own with Python 3.11. TensorFlow 2.15 stands in for 1.15, and one process for MPI.

They run as they are, but for this. What is random, apart from the levels, comes from Draws, so that our scripts can
draw the same. The precision is float64, in a copy of the codes: in float32, rounding grows until actions differ.
Where PPO clips the gradient, its norm gets 1e-6 more, as in torch.
"""

import functools
import math
import os
import shutil
import sys
import tempfile
import types
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np

RESULTS = Path(__file__).with_name("published_runs.npz")
T, N = 8, 4
SIZES = {"num_envs": N, "num_steps": T, "num_minibatches": 2}
LEVELS = {"distribution_mode": "easy", "num_levels": 0, "start_level": 0, "num_threads": 0}

# Arguments of our scripts. Together the runs take each branch of the training loop. The seeds of the levels are such
# that some episodes end early, and some have rewards. "clipping" clips in every minibatch but an iteration's first
PUBLISHED = SIZES | {"arch": "dual", "num_aux_rollouts": 2, "n_iteration": 1, "e_auxiliary": 1, "aux_dtype": "float32"}
PUBLISHED |= {"e_policy": 1, "e_value": 1, "clip_coef": 0.2, "kl_coef": 0.0, "learning_rate": 5e-4}
PUBLISHED |= {"total_timesteps": 2 * T * N}
SHARED = PUBLISHED | {"env_id": "miner", "seed": 55, "arch": "shared"}
PPG_RUNS = {
    "dual": PUBLISHED | {"env_id": "dodgeball", "seed": 47, "total_timesteps": 4 * T * N, "n_iteration": 2},
    "detach": PUBLISHED | {"env_id": "jumper", "seed": 25, "total_timesteps": 5 * T * N, "n_iteration": 2},
    "shared": SHARED | {"e_policy": 3, "e_value": 3, "e_auxiliary": 2},
    "kl": PUBLISHED | {"env_id": "maze", "seed": 12, "e_policy": 2, "e_value": 3, "clip_coef": 0.0, "kl_coef": 1.0},
    "clipping": PUBLISHED | {"env_id": "jumper", "seed": 18, "e_policy": 2, "e_value": 2, "learning_rate": 7e-4},
    "separate": SHARED | {"e_value": 2},  # the two optimizers of the policy phase share parameters
}
PPG_RUNS["detach"] |= {"arch": "detach"}
PPO_RUNS = {"ppo": SIZES | {"env_id": "jumper", "seed": 18, "total_timesteps": 3 * T * N}}

COLUMNS = {  # a column of our metrics.csv: what PPG and PPO log
    "losses/value_loss": ("vf", "loss/value_loss"),
    "losses/policy_loss": ("pg_and_kl", "loss/policy_loss"),
    "losses/entropy": ("entropy", "loss/policy_entropy"),
    "losses/approx_kl_k2": ("approxkl", "loss/approxkl"),
    "losses/clipfrac": ("clipfrac", "loss/clipfrac"),
    "losses/explained_variance": ("VFStats/EV", "misc/explained_variance"),
    "losses/aux/kl_loss": ("unscaled/pol_distance", None),
    "losses/aux/aux_value_loss": ("unscaled/vf_aux", None),
    "losses/aux/value_loss": ("unscaled/vf_true", None),
    "charts/mean_return_100": ("EpRewMean", "eprewmean"),
}
PPG_COLUMNS = {column: ppg for column, (ppg, _) in COLUMNS.items()}
PPO_COLUMNS = {column: ppo for column, (_, ppo) in COLUMNS.items() if ppo}


def weights(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Parameters of our shapes, float32: large enough for values and probabilities to differ between observations."""
    rng = np.random.RandomState(0)  # NumPy keeps its numbers for ever
    scales = [0.8 / math.prod(x[1:]) ** 0.5 if len(x) > 1 else 0.02 for x in shapes]
    return [(scale * rng.normal(size=x)).astype(np.float32) for scale, x in zip(scales, shapes, strict=True)]


def stand_in_for_mpi() -> None:
    class Comm:
        size, rank = 1, 0
        Get_size, Get_rank = lambda self: 1, lambda self: 0
        Bcast = Barrier = lambda self, *args, **kwargs: None
        allgather = gather = lambda self, x, root=0: [x]

        def Allreduce(self, x, out, op=None):
            out[...] = x

    mpi = types.SimpleNamespace(COMM_WORLD=Comm(), Comm=Comm, SUM=None)
    sys.modules["mpi4py"] = types.ModuleType("mpi4py")
    sys.modules["mpi4py"].MPI = sys.modules["mpi4py.MPI"] = mpi


def their_names(names: list[str], arch: str) -> list[str]:
    """What the parameters of our PPG are called in theirs. A stack is four of our layers: convolution, pool, blocks."""
    modules = {"policy_encoder": "pi_enc.cnn", "value_encoder": "vf_enc.cnn", "policy_head": "pi_head"}
    modules |= {"aux_value_head": "aux_vf_head", "value_head": "vf_vhead" if arch == "dual" else "pi_vhead"}

    def their_name(name: str) -> str:
        module, *rest = name.split(".")
        if rest[0] == "stacks":
            stack, layer = divmod(int(rest[1]), 4)
            rest[1] = f"{stack}.firstconv" if layer == 0 else f"{stack}.blocks.{layer - 2}"
        return ".".join([modules[module], *rest])

    return [their_name(name) for name in names]


def to_tensorflow(x: np.ndarray) -> np.ndarray:
    """A parameter of our PPO with TensorFlow's axes."""
    if x.ndim == 4:
        return x.transpose(2, 3, 1, 0)
    if x.shape == (256, 2048):  # they flatten (8, 8, 32), we (32, 8, 8)
        return x.reshape(256, 32, 8, 8).transpose(2, 3, 1, 0).reshape(2048, 256)
    return x.T


def shapes_of(script, **flags) -> dict[str, tuple[int, ...]]:
    agent = script.Agent(script.Args(**flags), script.ProcgenVectorEnv(1, "coinrun"))
    return {name: tuple(x.shape) for name, x in agent.named_parameters()}


class Draws:
    """The random numbers of a run, apart from the levels."""

    def __init__(self) -> None:
        self.uniform = np.random.RandomState(2).uniform  # action: argmax of log pi - log(-log(uniform))
        self.permutation = np.random.RandomState(3).permutation  # order of samples or rollouts in an epoch


def project(parameters: list[np.ndarray], shapes: list[tuple[int, ...]], turn=np.asarray) -> list[float]:
    """Products of parameters with random directions of our shapes, turned to their axes: one number each tells whether
    they are the same."""
    rng = np.random.RandomState(4)
    return [float((x * turn(rng.normal(size=shape))).sum()) for x, shape in zip(parameters, shapes, strict=True)]


def as_arrays(trace: dict[str, list], args: dict, columns: dict[str, str]) -> dict[str, np.ndarray]:
    """What a run has done: the actions of each step; losses, by their names, and projections of each iteration."""
    k = args["total_timesteps"] // (T * N)  # theirs may have an iteration more
    losses = [[row.get(name, np.nan) for name in columns.values()] for row in trace["losses"][:k]]
    actions = np.array(trace["actions"][: k * T], dtype=np.uint8)
    return {"actions": actions, "losses": np.array(losses), "projections": np.array(trace["projections"][:k])}


def copy_in_float64(folder: str, copy: Path) -> None:
    """Put a copy of Python packages on the path."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git", "results", "data"))
    for path in copy.rglob("*.py"):
        source = path.read_text().replace("float32", "float64")
        path.write_text(source.replace(", 'f')", ", 'd')").replace(', "f")', ', "d")'))  # sums of rewards
    sys.path.insert(0, str(copy))


def run_ppg(args: dict, shapes: dict[str, tuple[int, ...]]) -> dict[str, list]:
    """shapes: of our parameters."""
    import gym3
    import torch
    from phasic_policy_gradient import envs, logger, ppg, ppo
    from phasic_policy_gradient.impala_cnn import ImpalaEncoder

    trace, draws = defaultdict(list), Draws()
    names, sizes = their_names(list(shapes), args["arch"]), list(shapes.values())
    minibatches, epochs = [], []  # statistics of the present iteration, of the present auxiliary phase

    class Environments(gym3.Wrapper):
        def act(self, actions):
            trace["actions"].append(actions)
            super().act(actions)

        def observe(self):
            reward, obs, first = super().observe()
            return reward.astype(np.float64), obs, first  # else their normaliser would work in float32

    def sample(categorical):
        noise = -np.log(-np.log(draws.uniform(size=categorical.logits.shape)))
        return (categorical.logits + torch.from_numpy(noise)).argmax(-1)

    def compute_losses(*inputs, original=ppo.compute_losses, **options):
        losses, stats = original(*inputs, **options)
        minibatches.append({name: x.item() for name, x in (losses | stats).items()})
        return losses, stats

    def dumpkvs(original=logger.dumpkvs):
        """They log after each iteration, and after each epoch of an auxiliary phase."""
        logged = {name: float(x) for name, x in logger.getkvs().items()}
        state = model.state_dict()
        projections = project([state[name].numpy() for name in names], sizes)
        if "Iter" in logged:
            # of separate epochs, those of the value function come first
            value_updates = minibatches[: args["e_value"] * args["num_minibatches"]]
            policy_updates = minibatches[-args["e_policy"] * args["num_minibatches"] :]
            means = {name: np.mean([stats[name] for stats in policy_updates]) for name in policy_updates[0]}
            means["vf"] = np.mean([stats["vf"] for stats in value_updates])
            means["pg_and_kl"] = means["pg"] + means["pi_kl"]
            if args["clip_coef"] == 0:
                means["clipfrac"] = 0.0  # they count every ratio that is not 1
            trace["losses"].append(logged | means)
            trace["projections"].append(projections)
            minibatches.clear()
        else:
            epochs.append(logged)
            trace["losses"][-1] |= {name: np.mean([epoch[name] for epoch in epochs]) for name in logged}
            trace["projections"][-1] = projections
            if len(epochs) == args["e_auxiliary"]:
                epochs.clear()
        original()

    levels = LEVELS | {"rand_seed": args["seed"]}
    venv = Environments(envs.get_venv(num_envs=N, env_name=args["env_id"], **levels))
    model = ppg.PhasicValueModel(venv.ob_space, venv.ac_space, lambda x: ImpalaEncoder(x.shape), arch=args["arch"])
    model.load_state_dict({name: torch.from_numpy(x) for name, x in zip(names, weights(sizes), strict=True)})
    options = {"nstep": T, "γ": 0.999, "λ": 0.95, "nminibatch": args["num_minibatches"], "verbose": False}
    options |= {"n_epoch_pi": args["e_policy"], "n_epoch_vf": args["e_value"], "lr": args["learning_rate"]}
    options |= {"clip_param": args["clip_coef"], "kl_penalty": args["kl_coef"]}
    phase = {"n_pi": args["n_iteration"], "n_aux_epochs": args["e_auxiliary"], "aux_mbsize": args["num_aux_rollouts"]}
    with (
        mock.patch.object(torch.distributions.Categorical, "sample", sample),
        mock.patch.object(torch, "randperm", lambda n: torch.from_numpy(draws.permutation(n))),
        mock.patch.object(ppo, "compute_losses", compute_losses),
        mock.patch.object(logger, "dumpkvs", dumpkvs),
    ):
        # an iteration more than ours: theirs ends without the auxiliary phase that follows the last one
        phase["interacts_total"] = args["total_timesteps"] + 1
        ppg.learn(model=model, venv=venv, ppo_hps=options, aux_lr=5e-4, **phase)
    return trace


def run_ppo(args: dict, shapes: dict[str, tuple[int, ...]]) -> dict[str, list]:
    """shapes: of our parameters."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    sys.modules["tensorflow"] = tf
    from baselines import logger
    from baselines.common.models import build_impala_cnn
    from baselines.common.vec_env import VecEnvWrapper, VecExtractDictObs, VecMonitor, VecNormalize
    from baselines.ppo2 import ppo2
    from procgen import ProcgenEnv

    trace, draws, logged, sizes = defaultdict(list), Draws(), {}, list(shapes.values())

    class Environments(VecEnvWrapper):
        def reset(self):
            return self.venv.reset()

        def step_async(self, actions):
            trace["actions"].append(actions)
            self.venv.step_async(actions)

        def step_wait(self):
            obs, reward, done, infos = self.venv.step_wait()
            return obs, reward.astype(np.float64), done, infos

    class Adam(tf.train.AdamOptimizer):
        """TensorFlow keeps Adam's numbers in float32 if they are Python's."""

        def __init__(self, learning_rate, epsilon):
            super().__init__(learning_rate, np.float64(0.9), np.float64(0.999), np.float64(epsilon))

    def clip_by_global_norm(grads, max_norm, original=tf.clip_by_global_norm):
        return original(grads, max_norm, use_norm=tf.global_norm(grads) + 1e-6)

    def random_uniform(shape, dtype):
        return tf.reshape(tf.py_func(lambda shape: draws.uniform(size=shape), [shape], dtype), shape)

    def shuffle(indices):
        indices[:] = draws.permutation(len(indices))

    def load_weights():
        for variable, x in zip(tf.trainable_variables("ppo2_model"), weights(sizes), strict=True):
            variable.load(to_tensorflow(x), sess)

    def dumpkvs():
        trace["losses"].append(dict(logged))
        parameters = sess.run(tf.trainable_variables("ppo2_model"))
        trace["projections"].append(project(parameters, sizes, to_tensorflow))

    levels = LEVELS | {"rand_seed": args["seed"]}
    venv = Environments(VecExtractDictObs(ProcgenEnv(num_envs=N, env_name=args["env_id"], **levels), "rgb"))
    venv = VecNormalize(VecMonitor(venv, keep_buf=100), ob=False)
    options = {"nsteps": T, "nminibatches": args["num_minibatches"], "noptepochs": 3, "gamma": 0.999, "lam": 0.95}
    options |= {"ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "cliprange": 0.2, "lr": 5e-4}
    options |= {"total_timesteps": args["total_timesteps"], "log_interval": 1, "init_fn": load_weights}
    with (
        tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)) as sess,
        mock.patch.multiple(tf, random_uniform=random_uniform, clip_by_global_norm=clip_by_global_norm),
        mock.patch.object(tf, "get_variable", functools.partial(tf.get_variable, dtype=tf.float64)),
        mock.patch.object(tf.train, "AdamOptimizer", Adam),
        mock.patch.object(np.random, "shuffle", shuffle),
        mock.patch.multiple(logger, logkv=logged.__setitem__, dumpkvs=dumpkvs),
    ):
        ppo2.learn(network=lambda x: build_impala_cnn(x, depths=[16, 32, 32], emb_size=256), env=venv, **options)
    return trace


def main(ppg_folder: str, baselines_folder: str) -> None:
    import torch

    sys.path.append(str(Path(__file__).resolve().parents[2]))
    import ppg_procgen
    import ppo_procgen

    stand_in_for_mpi()
    np.bool = bool  # they need an older NumPy
    torch.set_default_dtype(torch.float64)
    traces = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RCALL_LOGDIR"] = os.environ["OPENAI_LOGDIR"] = folder
        copy_in_float64(ppg_folder, Path(folder) / "ppg")
        copy_in_float64(baselines_folder, Path(folder) / "baselines")
        from phasic_policy_gradient import logger, torch_util

        torch_util.register_distributions_for_tree_util()
        logger.configure(dir=folder, format_strs=["log"])
        for name, args in PPG_RUNS.items():
            trace = run_ppg(args, shapes_of(ppg_procgen, arch=args["arch"]))
            traces[name] = as_arrays(trace, args, PPG_COLUMNS)
        [(name, args)] = PPO_RUNS.items()
        traces[name] = as_arrays(run_ppo(args, shapes_of(ppo_procgen)), args, PPO_COLUMNS)
    arrays = {f"{name}/{key}": x for name, trace in traces.items() for key, x in trace.items()}
    np.savez_compressed(RESULTS, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
