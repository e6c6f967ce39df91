# What the sweeps share; each of them sources this file. With TINY=1 their runs have 256 steps, in folders of their own.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

all_games="bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot
    heist jumper leaper maze miner ninja plunder starpilot"
table_games="starpilot bossfight bigfish"
paper="--distribution-mode hard --num-envs 256 --num-aux-rollouts 16 --total-timesteps 100_000_000"
sweeps=sweeps
tiny_ppo=
tiny_ppg=
tiny_evaluation=
if [ "$TINY" ]; then
    sweeps=sweeps/tiny
    tiny_ppo="--num-envs 4 --num-steps 16 --num-minibatches 2 --total-timesteps 256"
    tiny_ppg="$tiny_ppo --n-iteration 2 --num-aux-rollouts 2"
    tiny_evaluation="--eval-episodes 2"
fi
