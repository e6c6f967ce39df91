#!/usr/bin/env bash
# PPO on all 16 games × 3 seeds, 25M steps, all easy levels. It shares the folder of ppo.sh: no run is done twice.
source "$(dirname "$0")/common.sh"
sweep ppo $all_games --command "python3 ppo_procgen.py $tiny_ppo" "$@"
