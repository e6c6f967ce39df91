"""The authors' PPG, as it is but for MPI, in one process, on easy levels.

    git clone https://github.com/openai/phasic-policy-gradient
    git -C phasic-policy-gradient checkout 7295473
    RCALL_LOGDIR=/tmp OMP_NUM_THREADS=1 PYTHONPATH=phasic-policy-gradient \
        python benchmark/results/late/authors.py bigfish 1 32 31    # game, seed, N_pi, iterations

It writes authors_bigfish_1/progress.csv. It has a single network, but two with "dual" after these; with "level", it
trains on level 0 with the other flags of README's run.
"""

import sys
from types import ModuleType

import numpy as np
import torch


class Alone:
    """What the authors' code asks of mpi4py's communicator, for one process."""

    rank, size = 0, 1

    def Get_rank(self):
        return 0

    def Allreduce(self, sent, received, op=None):
        received[...] = sent

    def allgather(self, sent):
        return [sent]

    gather = allgather


mpi = ModuleType("mpi4py")
mpi.MPI = sys.modules["mpi4py.MPI"] = ModuleType("mpi4py.MPI")
mpi.MPI.COMM_WORLD, mpi.MPI.Comm, mpi.MPI.SUM = Alone(), Alone, None
sys.modules["mpi4py"] = mpi
np.bool = bool  # its name until numpy 1.24

from phasic_policy_gradient import torch_util, train  # noqa: E402

for name in ("setup_dist", "sync_params", "sync_grads", "warn_no_gradient"):  # for other processes; prints
    setattr(torch_util, name, lambda *_, **__: None)
torch_util.DEFAULT_COMM = mpi.MPI.COMM_WORLD

game, seed, n_pi, iterations = sys.argv[1], *map(int, sys.argv[2:5])
level, arch = "level" in sys.argv[5:], "dual" if "dual" in sys.argv[5:] else "detach"
levels = {"num_levels": 1, "start_level": 0} if level else {}
get_venv, learn = train.get_venv, train.ppg.ppo.learn
train.get_venv = lambda **flags: get_venv(**flags, **levels, rand_seed=seed)
torch.manual_seed(seed)
np.random.seed(seed)
flags = {"env_name": game, "distribution_mode": "easy", "arch": arch, "n_pi": n_pi, "comm": mpi.MPI.COMM_WORLD}
batch_size = 16_384
if level:
    train.ppg.ppo.learn = lambda **flags: learn(**flags, nstep=64)
    flags |= {"num_envs": 16, "nminibatch": 4, "gamma": 0.99, "n_aux_epochs": 2}
    batch_size = 16 * 64
train.train_fn(**flags, interacts_total=iterations * batch_size, log_dir=f"authors_{game}_{seed}")
