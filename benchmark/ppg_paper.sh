#!/usr/bin/env bash
# PPG in the paper's set-up: 16 games × 3 seeds, 100M steps on all hard levels, 256 environments, auxiliary minibatches
# of 16 rollouts.
#     bash benchmark/ppg_paper.sh --slurm    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_paper.sh     the same sweep in a few minutes on a CPU, in its own folder
cd "$(dirname "$0")/.." || exit
paper="--distribution-mode hard --num-envs 256 --num-aux-rollouts 16 --total-timesteps 100_000_000"
tiny=${TINY:+--num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 256}

exec python3 benchmark/sweep.py --folder "sweeps/${TINY:+tiny/}ppg_paper" --num-seeds 3 \
    --env-ids bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot \
    heist jumper leaper maze miner ninja plunder starpilot \
    --command "python3 ppg_procgen.py --exp-name ppg_paper $paper $tiny" "$@"
