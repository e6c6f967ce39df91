#!/usr/bin/env bash
# Does it still learn? Three games on one level each, five seeds: PPG with two networks, with one, and PPO, each run on
# one thread of the CPU and as many at a time as there are cores. The same call again continues.
#     bash benchmark/small.sh                                  flags of sweep.py may follow, but for --folder and its runs
#     bash benchmark/small.sh --baseline path/to/cleanrl       first flag: CleanRL's PPG as well, from its checkout,
#                                                              unchanged, run by path/to/cleanrl/.venv/bin/python, if
#                                                              there is one; its interrupted runs begin again
#     python benchmark/report.py sweeps/small --out report     the page
#     TINY=1 bash benchmark/small.sh                           the same runs with 256 steps each, in their own folder
baseline=
if [ "$1" = --baseline ]; then
    baseline=$(realpath -e "$2") || exit 2
    shift 2
fi
source "$(dirname "$0")/common.sh" || exit
cores=$(env -u OMP_NUM_THREADS nproc)
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
games="starpilot:0 dodgeball:0 ninja:10"  # game:level
sizes="--num-levels 1 --num-envs 16 --num-steps 64 --num-minibatches 4 --gamma 0.99 --total-timesteps 32768"
phases="--n-iteration 8 --num-aux-rollouts 4 --e-auxiliary 2"
if [ "$TINY" ]; then
    sizes="--num-levels 1 $tiny_ppo"
    phases="--n-iteration 2 --num-aux-rollouts 2"
fi
if [ "$baseline" ]; then
    baseline=$(realpath --relative-to=. "$baseline")
    python=$baseline/.venv/bin/python script=$baseline/cleanrl/ppg_procgen.py
    [ -x "$python" ] || python=python3
    [ -f "$script" ] || { echo "small.sh: there is no $script" >&2; exit 2; }
fi

failed=0
for game in $games; do
    flags="--start-level ${game#*:} $sizes"
    commands=("python3 ppg_procgen.py $flags $phases --env-threads 0")
    commands+=("python3 ppg_procgen.py $flags $phases --env-threads 0 --arch detach --exp-name ppg_detach")
    commands+=("python3 ppo_procgen.py $flags --env-threads 0")
    if [ "$baseline" ]; then
        commands+=("${python@Q} benchmark/cleanrl.py ${script@Q} $flags $phases --exp-name cleanrl_ppg")
    fi
    python3 benchmark/sweep.py --folder "$sweeps/small/${game%:*}" --num-seeds 5 --workers "$cores" \
        --env-ids "${game%:*}" --command "${commands[@]}" "$@"
    code=$?
    [ $code -le 1 ] || exit $code  # stopped, or bad flags; if runs have failed, go on with the other games
    [ $code = 0 ] || failed=1
done
exit $failed
