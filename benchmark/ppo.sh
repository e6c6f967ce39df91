#!/usr/bin/env bash
# PPO of the published table: 3 games × 3 seeds, 25M steps, all easy levels. `bash benchmark/ppo.sh all`: all 16 games, in
# the same folder, so that no run is done twice. Flags of sweep.py may follow.
source "$(dirname "$0")/common.sh"
games=$table_games
if [ "$1" = all ]; then
    games=$all_games
    shift
fi
sweep ppo $games --command "python3 ppo_procgen.py $tiny_ppo" "$@"
