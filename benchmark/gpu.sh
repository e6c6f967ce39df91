#!/usr/bin/env bash
# The first half hour with a new GPU: does a run work, does the fast code compute what the plain code computes, how fast
# is it? Stops at the first failure. Takes the flags of throughput.sh.
#     bash benchmark/gpu.sh
set -e
cd "$(dirname "$0")/.."
python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.cuda.get_device_name())'
small="--num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 512"
python3 ppg_procgen.py $small --no-compile
python3 ppg_procgen.py $small
python3 -m pytest -q -m gpu
bash benchmark/throughput.sh "$@"
