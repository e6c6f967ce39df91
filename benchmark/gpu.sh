#!/usr/bin/env bash
# For a new GPU: short runs (plain, with CUDA graphs, with all fast flags), the GPU's tests, speeds.
TINY=1 source "$(dirname "$0")/common.sh"
set -e
fast="--compile --cuda-graphs --aux-dtype bfloat16"
python3 -c 'import torch; print(torch.cuda.get_device_name())'
python3 ppg_procgen.py $tiny_ppg
python3 ppg_procgen.py $tiny_ppg --cuda-graphs
python3 ppg_procgen.py $tiny_ppg $fast
python3 -m pytest -q -m gpu
ppg="python3 ppg_procgen.py"
python3 benchmark/throughput.py "$ppg" "$ppg --compile" "$ppg --cuda-graphs" "$ppg --aux-dtype bfloat16" "$ppg $fast" \
    "$ppg $fast --arch detach" "python3 ppo_procgen.py --compile --cuda-graphs"
