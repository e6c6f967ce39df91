#!/usr/bin/env bash
# PPG in the paper's set-up: 16 games × 3 seeds, 100M steps on all hard levels, 256 environments, auxiliary minibatches
# of 16 rollouts.
#     bash benchmark/ppg_paper.sh --slurm    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_paper.sh     the same sweep in a few minutes on a CPU, in its own folder
source "$(dirname "$0")/common.sh" || exit

exec python3 benchmark/sweep.py --folder "$sweeps/ppg_paper" --num-seeds 3 \
    --env-ids $all_games \
    --command "python3 ppg_procgen.py --exp-name ppg_paper $paper $tiny_ppg" "$@"
