#!/usr/bin/env bash
# The paper's ablations in the paper's set-up, under the names that the reference curves have: 15 variants × 3 games,
# 100M steps each. What they are compared with (E_pi 1, E_aux 6, N_pi 32) comes from ppg_paper.sh.
#     bash benchmark/ppg_ablations.sh --slurm    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_ablations.sh     the same sweep in a few minutes on a CPU, in its own folder
cd "$(dirname "$0")/.." || exit
paper="--distribution-mode hard --num-envs 256 --num-aux-rollouts 16 --total-timesteps 100_000_000"
tiny=${TINY:+--num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2 --total-timesteps 256}

commands=()
variant() { commands+=("python3 ppg_procgen.py $paper --exp-name $* $tiny"); }
for n in 2 3 4 5 6; do variant ppg_e_pi_$n --e-policy $n; done
for n in 1 2 3 9; do variant ppg_e_aux_$n --e-auxiliary $n; done
for n in 2 4 8 16; do variant ppg_n_pi_$n --n-iteration $n; done
variant ppg_kl --clip-coef 0 --kl-coef 1
variant ppg_single --arch detach

exec python3 benchmark/sweep.py --folder "sweeps/${TINY:+tiny/}ppg_ablations" --num-seeds 1 \
    --env-ids starpilot bossfight bigfish \
    --command "${commands[@]}" "$@"
