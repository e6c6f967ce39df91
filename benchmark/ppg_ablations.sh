#!/usr/bin/env bash
# The paper's ablations, named as in the reference curves: 15 variants × 3 games. ppg_paper.sh has the original.
source "$(dirname "$0")/common.sh"
commands=()
variant() { commands+=("python3 ppg_procgen.py $paper_ppg --exp-name $* $tiny_ppg"); }
for n in 2 3 4 5 6; do variant ppg_e_pi_$n --e-policy $n; done
for n in 1 2 3 9; do variant ppg_e_aux_$n --e-auxiliary $n; done
for n in 2 4 8 16; do variant ppg_n_pi_$n --n-iteration $n; done
variant ppg_kl --clip-coef 0 --kl-coef 1
variant ppg_single --arch detach
sweep ppg_ablations $table_games --seeds 1 --command "${commands[@]}" "$@"
