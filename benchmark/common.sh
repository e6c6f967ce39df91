# What the sweeps share. With TINY=1 their runs have 256 steps, in folders of their own: minutes on a CPU.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
all_games="bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot
    heist jumper leaper maze miner ninja plunder starpilot"
table_games="starpilot bossfight bigfish"
paper="--distribution-mode hard --num-envs 256 --total-timesteps 100_000_000"
paper_ppg="$paper --num-aux-rollouts 16"
sweeps=sweeps tiny_ppo= tiny_ppg=
if [ "$TINY" ]; then
    sweeps=sweeps/tiny
    tiny_ppo="--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 256"
    tiny_ppg="$tiny_ppo --n-iteration 2 --num-aux-rollouts 2"
fi
# sweep NAME GAMES... FLAGS...: run it in its folder
sweep() { exec python3 benchmark/sweep.py --folder "$sweeps/$1" --env-ids "${@:2}"; }
