#!/usr/bin/env bash
# PPG of the published table: 3 games × 3 seeds, 25M steps, all easy levels. Any flag of sweep.py may follow.
source "$(dirname "$0")/common.sh"
sweep ppg $table_games --command "python3 ppg_procgen.py $tiny_ppg" "$@"
