#!/usr/bin/env bash
# PPG on all 16 games × 3 seeds, 25M steps, all easy levels. It shares the folder of ppg.sh: no run is done twice.
source "$(dirname "$0")/common.sh"
sweep ppg $all_games --command "python3 ppg_procgen.py $tiny_ppg" "$@"
