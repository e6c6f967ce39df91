#!/usr/bin/env bash
# First on a new GPU: a short run without and with compilation, the GPU's tests, speeds. Takes flags of throughput.sh.
TINY=1 source "$(dirname "$0")/common.sh"
set -e
python3 -c 'import torch; print(torch.cuda.get_device_name())'
python3 ppg_procgen.py $tiny_ppg --no-compile
python3 ppg_procgen.py $tiny_ppg
python3 -m pytest -q -m gpu
bash benchmark/throughput.sh "$@"
