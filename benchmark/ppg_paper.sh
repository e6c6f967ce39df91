#!/usr/bin/env bash
# PPG and PPO in the paper's set-up: 16 games × 3 seeds, 100M steps, all hard levels, 256 environments.
source "$(dirname "$0")/common.sh"
sweep ppg_paper $all_games --command \
    "python3 ppg_procgen.py --exp-name ppg_paper $paper_ppg $tiny_ppg" \
    "python3 ppo_procgen.py --exp-name ppo_paper $paper $tiny_ppo" "$@"
