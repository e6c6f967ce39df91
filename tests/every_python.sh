#!/usr/bin/env bash
# For each Python found: a fresh environment, the README's installation, the tiny training, its resume, a few fast tests.
#     bash tests/every_python.sh                all of 3.10 to 3.13 that are on the PATH or in ~/.pyenv/versions
#     bash tests/every_python.sh 3.13           only these
# A line for each at the end; exit code 1 if one failed. Outside of some platforms torch brings CUDA along: 3 GB each.
set -u
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tiny="--env-id starpilot --num-envs 4 --num-steps 16 --num-minibatches 2 --n-iteration 2 --num-aux-rollouts 2"
summary=()

check() { # with the interpreter $1, in the folder $2
  "$1" -m venv "$2/venv" && . "$2/venv/bin/activate" && pip install -q -e ".[test]" || return
  python ppg_procgen.py $tiny --aux-dtype float32 --total-timesteps 256 --run-dir "$2/run" &&
    python ppg_procgen.py --resume "$2/run" --total-timesteps 384 &&
    python ppo_procgen.py --num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 128 --run-dir "$2/ppo" &&
    pytest -q tests/test_algorithm.py tests/test_resume.py tests/test_evaluation.py || return
  cut -d, -f10 "$2/run/metrics.csv" | head -5 | tr '\n' ' ' # the value losses, to compare Pythons
}

for version in "${@:-3.10 3.11 3.12 3.13}"; do
  for v in $version; do
    python=$(ls -d ~/.pyenv/versions/"$v"*/bin/python 2>/dev/null | tail -1)
    python=${python:-$(command -v "python$v")} || { summary+=("$v: not found"); continue; }
    mkdir "$work/$v"
    (check "$python" "$work/$v") >"$work/$v/log" 2>&1 && result=passed || result=FAILED
    [ $result = passed ] || tail -n 30 "$work/$v/log"
    summary+=("$("$python" -V), $("$work/$v/venv/bin/pip" freeze 2>/dev/null | grep -iE '^(torch|procgen)' | tr '\n' ' '): $result. $(tail -n 1 "$work/$v/log")")
    rm -rf "$work/$v/venv"
  done
done
printf '%s\n' "${summary[@]}"
[[ "${summary[*]}" != *FAILED* ]]
