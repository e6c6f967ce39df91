"""Run the published codes on fixed inputs and write their numbers to published_code.json, for test_published_code.py.

    git clone https://github.com/openai/phasic-policy-gradient ppg && git -C ppg checkout 7295473
    git clone https://github.com/openai/baselines && git -C baselines checkout 9ee399f
    pip install tensorflow-cpu==2.15.1 "numpy<2" gym==0.26.2 procgen-mirror torch tyro scipy joblib cloudpickle tqdm
    python tests/published_code.py ppg baselines

in an environment of its own with Python 3.11. TensorFlow 2.15 stands in for 1.15, and one process for MPI.
"""

import json
import math
import sys
import types
from pathlib import Path

import numpy as np

T, N, GAMMA, GAE_LAMBDA = 16, 8, 0.999, 0.95
LEARNING_RATE = 5e-5  # a tenth of theirs: these weights are no trained network's, and larger steps would overshoot
RESULTS = Path(__file__).with_name("published_code.json")


def weights(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Parameters of our shapes, float32: large enough for values and probabilities to differ between observations."""
    rng = np.random.RandomState(0)  # NumPy keeps its numbers for ever
    scales = [0.8 / math.prod(x[1:]) ** 0.5 if len(x) > 1 else 0.02 for x in shapes]
    return [(scale * rng.normal(size=x)).astype(np.float32) for scale, x in zip(scales, shapes, strict=True)]


def inputs() -> dict[str, np.ndarray]:
    """A rollout, time first; firsts and values have a row more, firsts[t] is 1 where an episode begins."""
    rng = np.random.RandomState(1)
    blocks = rng.randint(0, 256, (T, N, 8, 8, 3))
    noise = rng.randint(0, 64, (T, N, 64, 64, 3))
    data = {"obs": (blocks.repeat(8, 2).repeat(8, 3) // 4 * 3 + noise).astype(np.uint8)}
    data["actions"] = rng.randint(0, 15, (T, N))
    data["logprobs"] = (np.log(1 / 15) + 0.2 * rng.normal(size=(T, N))).astype(np.float32)
    data["values"] = rng.normal(size=(T + 1, N)).astype(np.float32)
    data["rewards"] = (rng.randint(-1, 3, (T, N)) * 5 * (rng.random_sample((T, N)) < 0.3)).astype(np.float32)
    data["firsts"] = rng.random_sample((T + 1, N)) < 0.1
    data["firsts"][0] = True
    return data


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
    """What the parameters of our PPG are called in theirs."""
    modules = {"policy_encoder": "pi_enc.cnn", "value_encoder": "vf_enc.cnn", "policy_head": "pi_head"}
    modules |= {"aux_value_head": "aux_vf_head", "value_head": "vf_vhead" if arch == "dual" else "pi_vhead"}
    split = [name.split(".", 1) for name in names]
    return [f"{modules[module]}.{rest}".replace(".conv.", ".firstconv.") for module, rest in split]


def to_tensorflow(x: np.ndarray) -> np.ndarray:
    """A parameter of our PPO with TensorFlow's axes."""
    if x.ndim == 4:
        return x.transpose(2, 3, 1, 0)
    if x.shape == (256, 2048):  # they flatten (8, 8, 32), we (32, 8, 8)
        return x.reshape(256, 32, 8, 8).transpose(2, 3, 1, 0).reshape(2048, 256)
    return x.T


def run_ppg(folder: str, arch: str, shapes: dict[str, tuple[int, ...]], kl_penalty: float, clip_param: float) -> dict:
    """Two updates of the policy phase on half of the rollouts each, two of the auxiliary phase on all of them. The old
    policy is that of the beginning: were it the present one, the gradient of the KL would be rounding errors, and Adam
    would make them large. shapes: of our parameters."""
    sys.path.insert(0, folder)
    import torch
    from gym3.types import Discrete, TensorType, discrete_scalar
    from phasic_policy_gradient import logger, ppg, ppo, reward_normalizer, torch_util
    from phasic_policy_gradient.impala_cnn import ImpalaEncoder

    torch_util.register_distributions_for_tree_util()
    obtype = TensorType(Discrete(256, dtype_name="uint8"), (64, 64, 3))
    model = ppg.PhasicValueModel(obtype, discrete_scalar(15), lambda x: ImpalaEncoder(x.shape), arch=arch)
    initial = zip(their_names(list(shapes), arch), weights(list(shapes.values())), strict=True)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in initial})

    data = {name: torch.from_numpy(x).transpose(0, 1) for name, x in inputs().items()}  # their axes are (N, T)
    logged = {}
    logger.logkv = logger.logkv_mean = logged.__setitem__
    normalizer = reward_normalizer.RewardNormalizer(N)
    rewards = normalizer(data["rewards"], data["firsts"][:, :-1])
    seg = {"ob": data["obs"], "ac": data["actions"], "first": data["firsts"][:, :-1], "logp": data["logprobs"]}
    seg |= {"vpred": data["values"][:, :-1], "reward": rewards, "state_in": model.initial_state(N)}
    seg |= {"finalob": data["obs"][:, -1], "finalfirst": data["firsts"][:, -1], "finalstate": None}
    model.v = lambda *args: data["values"][:, -1]
    ppo.compute_advantage(model, seg, GAMMA, GAE_LAMBDA)
    ppg.compute_presleep_outputs(model=model, segs=[seg], mbsize=N)
    numbers = {"advantages": seg["adv"].T, "returns": seg["vtarg"].T, "updates": [], "aux_updates": []}
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    hyperparameters = {"clip_param": clip_param, "vfcoef": 0.5, "entcoef": 0.01, "kl_penalty": kl_penalty}
    for rows in torch.arange(N).split(N // 2):  # minibatches of whole rollouts
        arrays = {x: seg[x][rows] for x in ppo.INPUT_KEYS - {"state_in"}} | {"state_in": model.initial_state(len(rows))}
        losses, stats = ppo.compute_losses(model, **arrays, **hyperparameters)
        optimizer.zero_grad()
        (losses["pi"] + losses["vf"]).backward()
        optimizer.step()
        numbers["updates"].append(stats | losses)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        ppg.aux_train(model=model, segs=[seg], opt=optimizer, mbsize=N, name2coef={"pol_distance": 1.0})
        numbers["aux_updates"].append({x: logged[f"unscaled/{x}"] for x in ("pol_distance", "vf_aux", "vf_true")})
    with torch.no_grad():
        pd, values, aux, _ = model(data["obs"][:, :1], None, model.initial_state(N))
    return numbers | {"logits": pd.logits[:, 0], "values": values[:, 0], "aux_values": aux["vpredaux"][:, 0]}


def run_ppo(folder: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """Rewards, advantages and three updates. shapes: of our parameters."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    sys.modules["tensorflow"] = tf
    sys.path.insert(0, folder)
    np.bool = bool
    import gym
    from baselines.common.models import build_impala_cnn
    from baselines.common.policies import build_policy
    from baselines.common.vec_env import VecNormalize
    from baselines.ppo2.model import Model
    from baselines.ppo2.runner import Runner

    data = inputs()

    # a game and a model that play our rollout; nobody looks at the observation after the last step
    steps = zip(np.roll(data["obs"], -1, 0), data["rewards"], data["firsts"][1:], [[{}] * N] * T, strict=True)
    game = types.SimpleNamespace(num_envs=N, action_space=gym.spaces.Discrete(15))
    game.observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    game.reset = lambda: data["obs"][0]
    game.step_async = lambda actions: None
    game.step_wait = lambda: next(steps)
    outputs = zip(data["actions"], data["values"][:T], [None] * T, -data["logprobs"], strict=True)
    player = types.SimpleNamespace(initial_state=None)
    player.step = lambda obs, **_: next(outputs)
    player.value = lambda obs, **_: data["values"][T]

    env = VecNormalize(game, ob=False)
    runner = Runner(env=env, model=player, nsteps=T, gamma=GAMMA, lam=GAE_LAMBDA)
    obs, returns, masks, actions, values, neglogpacs, _, _ = runner.run()  # (N * T,)
    numbers = {"returns": returns.reshape(N, T).T, "updates": []}
    sess = tf.Session(config=tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1))
    sess.__enter__()
    policy = build_policy(env, lambda x: build_impala_cnn(x, depths=[16, 32, 32], emb_size=256))
    options = {"nbatch_act": N, "nbatch_train": N * T // 4, "nsteps": T, "ent_coef": 0.01, "vf_coef": 0.5}
    spaces = {"ob_space": env.observation_space, "ac_space": env.action_space}
    model = Model(policy=policy, max_grad_norm=0.5, **options, **spaces)
    for variable, x in zip(tf.trainable_variables("ppo2_model"), weights(list(shapes.values())), strict=True):
        variable.load(to_tensorflow(x), sess)
    for rows in np.arange(N * T).reshape(4, -1)[:3]:
        batch = (x[rows] for x in (obs, returns, masks, actions, values, neglogpacs))
        stats = model.train(LEARNING_RATE, 0.2, *batch)
        numbers["updates"].append(dict(zip(model.loss_names, stats, strict=True)))
    outputs = [model.act_model.pd.logits, model.act_model.vf]
    numbers["logits"], numbers["values"] = sess.run(outputs, {model.act_model.X: data["obs"][0]})
    return numbers


def shapes_of(script, **flags) -> dict[str, tuple[int, ...]]:
    agent = script.Agent(script.Args(**flags), script.ProcgenVectorEnv)
    return {name: tuple(x.shape) for name, x in agent.named_parameters()}


def as_lists(x):
    if isinstance(x, dict | list):
        return {k: as_lists(y) for k, y in x.items()} if isinstance(x, dict) else [as_lists(y) for y in x]
    return np.asarray(x.detach() if hasattr(x, "detach") else x, dtype=np.float64).round(8).tolist()


VARIANTS = {"dual": ("dual", 0, 0.2), "detach": ("detach", 0, 0.2), "shared": ("shared", 0, 0.2), "kl": ("dual", 1, 0)}


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    stand_in_for_mpi()
    import ppg_procgen
    import ppo_procgen

    results = {}
    for name, (arch, kl_penalty, clip_param) in VARIANTS.items():
        results[name] = run_ppg(sys.argv[1], arch, shapes_of(ppg_procgen, arch=arch), kl_penalty, clip_param)
    results["ppo"] = run_ppo(sys.argv[2], shapes_of(ppo_procgen))
    RESULTS.write_text(json.dumps(as_lists(results)) + "\n")


if __name__ == "__main__":
    main()
