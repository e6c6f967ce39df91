#!/usr/bin/env bash
# Generalization: PPG on 200 easy levels, 16 games × 3 seeds, 25M steps, evaluated on unseen levels.
source "$(dirname "$0")/common.sh"
flags="--exp-name ppg_generalization --num-levels 200 --eval-interval 64"
sweep ppg_generalization $all_games --command "python3 ppg_procgen.py $flags $tiny_ppg" "$@"
