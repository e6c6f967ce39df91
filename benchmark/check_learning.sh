#!/usr/bin/env bash
# Does it still learn? Three games on one level each, five seeds: PPG with two networks, with one, and PPO, each run on
# one thread of the CPU and as many at a time as there are cores. The same call again continues.
#     bash benchmark/check_learning.sh                                flags of sweep.py may follow
#     python benchmark/report.py sweeps/check_learning --out report   the page
#     TINY=1 bash benchmark/check_learning.sh                         the same runs with 256 steps, in another folder
source "$(dirname "$0")/common.sh"
workers=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
ppo_flags="--num-envs 16 --num-steps 64 --num-minibatches 4 --gamma 0.99 --total-timesteps 32768"
ppg_flags="$ppo_flags --n-iteration 8 --num-aux-rollouts 4 --e-auxiliary 2"
if [ "$TINY" ]; then
    ppo_flags=$tiny_ppo ppg_flags=$tiny_ppg
fi

failed=0
for game in starpilot:0 dodgeball:0 ninja:10; do  # game:level
    level="--num-levels 1 --start-level ${game#*:} --env-threads 0"
    # in parentheses: sweep ends its shell
    (sweep "check_learning/${game%:*}" "${game%:*}" --seeds 1 2 3 4 5 --workers "$workers" --command \
        "python3 ppg_procgen.py $level $ppg_flags" \
        "python3 ppg_procgen.py $level $ppg_flags --arch detach --exp-name ppg_detach" \
        "python3 ppo_procgen.py $level $ppo_flags" "$@")
    code=$?
    [ $code -le 1 ] || exit $code  # stopped, or bad flags; after failed runs, go on with the next game
    [ $code = 0 ] || failed=1
done
exit $failed
