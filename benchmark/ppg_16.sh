#!/usr/bin/env bash
# PPG on all 16 games × 3 seeds, 25M steps on all easy levels. It shares its folder with ppg.sh: no run is done twice.
#     bash benchmark/ppg_16.sh --gpus 0 1    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_16.sh        the same sweep in a few minutes on a CPU, in its own folder
cd "$(dirname "$0")/.." || exit
tiny=${TINY:+--num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 256}

exec python3 benchmark/sweep.py --folder "sweeps/${TINY:+tiny/}ppg" --num-seeds 3 \
    --env-ids bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot \
    heist jumper leaper maze miner ninja plunder starpilot \
    --command "python3 ppg_procgen.py $tiny" "$@"
