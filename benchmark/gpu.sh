#!/usr/bin/env bash
# The first half hour with a new GPU: does a run work, does the fast code compute what the plain code computes, how fast
# is it? Stops at the first failure. Takes the flags of throughput.sh.
#     bash benchmark/gpu.sh
TINY=1 source "$(dirname "$0")/common.sh"
set -e
python3 -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.cuda.get_device_name())'
python3 ppg_procgen.py $tiny_ppg --no-compile
python3 ppg_procgen.py $tiny_ppg
python3 -m pytest -q -m gpu
bash benchmark/throughput.sh "$@"
