#!/usr/bin/env bash
# Training speed on a GPU in one run of at most ten minutes: the four variants, then dual without CUDA graphs, without
# compilation, and with the buffer on the host. If it is interrupted, the JSON holds what it has measured. Any flag of
# throughput.py may follow, such as another script to compare with, its path from the repository, if the Python of this
# environment can run it:
#   bash benchmark/throughput.sh --baseline path/to/cleanrl/cleanrl/ppg_procgen.py
cd "$(dirname "$0")/.." || exit
exec python3 benchmark/throughput.py --repeats 1 --n-iteration 4 "$@" --variants \
    dual detach ppo shared \
    "ppg_procgen.py --no-cuda-graphs" \
    "ppg_procgen.py --no-compile" \
    "ppg_procgen.py --aux-device cpu"
