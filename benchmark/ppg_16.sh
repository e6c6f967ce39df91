#!/usr/bin/env bash
# PPG on all 16 games × 3 seeds, 25M steps on all easy levels. It shares its folder with ppg.sh: no run is done twice.
#     bash benchmark/ppg_16.sh --gpus 0 1    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_16.sh        the same sweep in a few minutes on a CPU, in its own folder
source "$(dirname "$0")/common.sh" || exit

exec python3 benchmark/sweep.py --folder "$sweeps/ppg" --num-seeds 3 \
    --env-ids $all_games \
    --command "python3 ppg_procgen.py $tiny_ppg" "$@"
