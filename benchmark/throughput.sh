#!/usr/bin/env bash
# Training speed on a GPU in one run of at most ten minutes: every variant, then dual with one optimisation after another
# taken away, and with two other settings. What has been measured when it is cut stands in the JSON. Any flag of
# throughput.py may follow, such as another script to compare with, its path from the repository:
#   bash benchmark/throughput.sh --baseline "path/to/cleanrl/ppg_procgen.py"
cd "$(dirname "$0")/.." || exit
exec python benchmark/throughput.py --repeats 1 --n-iteration 4 --out report/throughput.json "$@" --variants \
    dual detach ppo shared \
    "ppg_procgen.py --no-compile" \
    "ppg_procgen.py --no-compile --no-cuda-graphs" \
    "ppg_procgen.py --no-compile --no-cuda-graphs --aux-dtype float32" \
    "ppg_procgen.py --no-compile --no-cuda-graphs --aux-dtype float32 --no-tf32" \
    "ppg_procgen.py --aux-device cpu"
