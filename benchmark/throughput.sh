#!/usr/bin/env bash
# Training speed on a GPU in one run of at most ten minutes: the four variants, then dual without CUDA graphs, without
# compilation, and with the buffer on the host. Flags of throughput.py may follow, such as a script to compare with:
#   bash benchmark/throughput.sh --baseline "other_venv/bin/python path/to/cleanrl/cleanrl/ppg_procgen.py"
cd "$(dirname "$0")/.." || exit
exec python3 benchmark/throughput.py --repeats 1 --n-iteration 4 "$@" --variants \
    dual detach ppo shared \
    "ppg_procgen.py --no-cuda-graphs" \
    "ppg_procgen.py --no-compile" \
    "ppg_procgen.py --aux-device cpu"
