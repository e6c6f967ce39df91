#!/usr/bin/env bash
# PPG of the published table: 3 games × 3 seeds, 25M steps on all easy levels.
#     bash benchmark/ppg.sh --gpus 0 1       any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg.sh           the same sweep in a few minutes on a CPU, in its own folder
source "$(dirname "$0")/common.sh" || exit

exec python3 benchmark/sweep.py --folder "$sweeps/ppg" --num-seeds 3 \
    --env-ids $table_games \
    --command "python3 ppg_procgen.py $tiny_ppg" "$@"
