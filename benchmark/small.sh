#!/usr/bin/env bash
# Does it still learn? Three games on one level each, five seeds: PPG with two networks, with one, and PPO, each run
# on one thread and as many at a time as there are cores. The same call again continues.
#     bash benchmark/small.sh                                  any flag of benchmark/sweep.py may follow
#     bash benchmark/small.sh --baseline path/to/cleanrl       CleanRL's PPG as well, from its checkout, unchanged; run by
#                                                              path/to/cleanrl/.venv/bin/python, if there is one
#     python benchmark/report.py sweeps/small --out report     the page
#     TINY=1 bash benchmark/small.sh                           the same sweep in a minute, in its own folder
baseline=
if [ "$1" = --baseline ]; then
    baseline=$(realpath -e "$2") || exit 2
    shift 2
fi
cd "$(dirname "$0")/.." || exit
cores=$(nproc)
export OMP_NUM_THREADS=1
games="starpilot:0 dodgeball:0 ninja:10"  # game:level
sizes="--num-levels 1 --num-envs 16 --num-steps 64 --num-minibatches 4 --gamma 0.99 --total-timesteps 32768"
phases="--n-iteration 8 --num-aux-rollouts 4 --e-auxiliary 2"
if [ "$TINY" ]; then
    sizes="--num-levels 1 --num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 256"
    phases="--n-iteration 2 --num-aux-rollouts 2"
fi
if [ "$baseline" ]; then
    baseline=$(realpath --relative-to=. "$baseline")
    python=$baseline/.venv/bin/python
    [ -x "$python" ] || python=python3
fi

for game in $games; do
    flags="--start-level ${game#*:} $sizes"
    commands=("python3 ppg_procgen.py $flags $phases")
    commands+=("python3 ppg_procgen.py $flags $phases --arch detach --exp-name ppg_detach")
    commands+=("python3 ppo_procgen.py $flags")
    if [ "$baseline" ]; then
        commands+=("'$python' benchmark/cleanrl.py '$baseline/cleanrl/ppg_procgen.py' $flags $phases --exp-name cleanrl_ppg")
    fi
    python3 benchmark/sweep.py --folder "sweeps/${TINY:+tiny/}small/${game%:*}" --num-seeds 5 --workers "$cores" \
        --env-ids "${game%:*}" --command "${commands[@]}" "$@" || exit
done
