#!/usr/bin/env bash
# Generalisation: PPG trained on 200 easy levels, 16 games × 3 seeds, 25M steps, and tested on levels it has not seen.
#     bash benchmark/ppg_generalization.sh --gpus 0 1    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_generalization.sh        the same sweep in a few minutes on a CPU, in its own folder
cd "$(dirname "$0")/.." || exit
tiny=${TINY:+--num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 256}
tiny+=${TINY:+ --eval-episodes 2}

exec python3 benchmark/sweep.py --folder "sweeps/${TINY:+tiny/}ppg_generalization" --num-seeds 3 \
    --env-ids bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot \
    heist jumper leaper maze miner ninja plunder starpilot \
    --command "python3 ppg_procgen.py --exp-name ppg_generalization --num-levels 200 --eval-interval 64 $tiny" "$@"
