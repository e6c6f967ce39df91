#!/usr/bin/env bash
# Generalisation: PPG trained on 200 easy levels, 16 games × 3 seeds, 25M steps, and tested on levels it has not seen.
#     bash benchmark/ppg_generalization.sh --gpus 0 1    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_generalization.sh        the same sweep in a few minutes on a CPU, in its own folder
source "$(dirname "$0")/common.sh" || exit
flags="--exp-name ppg_generalization --num-levels 200 --eval-interval 64"

exec python3 benchmark/sweep.py --folder "$sweeps/ppg_generalization" --num-seeds 3 \
    --env-ids $all_games \
    --command "python3 ppg_procgen.py $flags $tiny_ppg $tiny_evaluation" "$@"
