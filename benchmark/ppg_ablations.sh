#!/usr/bin/env bash
# The paper's ablations in the paper's set-up, under the names that the reference curves have: 15 variants × 3 games,
# 100M steps each. What they are compared with (E_pi 1, E_aux 6, N_pi 32) comes from ppg_paper.sh.
#     bash benchmark/ppg_ablations.sh --slurm    any flag of benchmark/sweep.py; the same call again continues
#     TINY=1 bash benchmark/ppg_ablations.sh     the same sweep in a few minutes on a CPU, in its own folder
source "$(dirname "$0")/common.sh" || exit

commands=()
variant() { commands+=("python3 ppg_procgen.py $paper --exp-name $* $tiny_ppg"); }
for n in 2 3 4 5 6; do variant ppg_e_pi_$n --e-policy $n; done
for n in 1 2 3 9; do variant ppg_e_aux_$n --e-auxiliary $n; done
for n in 2 4 8 16; do variant ppg_n_pi_$n --n-iteration $n; done
variant ppg_kl --clip-coef 0 --kl-coef 1
variant ppg_single --arch detach

exec python3 benchmark/sweep.py --folder "$sweeps/ppg_ablations" --num-seeds 1 \
    --env-ids $table_games \
    --command "${commands[@]}" "$@"
