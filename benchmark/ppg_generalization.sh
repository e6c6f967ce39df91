#!/usr/bin/env bash
# Generalization of PPG and PPO: 200 easy levels, 16 games × 3 seeds, 25M steps, evaluated on unseen levels.
source "$(dirname "$0")/common.sh"
flags="--num-levels 200 --eval-interval 64"
sweep ppg_generalization $all_games --command \
    "python3 ppg_procgen.py --exp-name ppg_generalization $flags $tiny_ppg" \
    "python3 ppo_procgen.py --exp-name ppo_generalization $flags $tiny_ppo" "$@"
