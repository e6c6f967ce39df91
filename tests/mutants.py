"""Do the tests notice faults? Puts one at a time into a copy of the project and runs the test file that should notice.
Prints which faults it notices; exit code 1 if one survives.

    python tests/mutants.py kl_loss      # those whose text has one of the words; without words: all, in 20 minutes
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# test file that should notice: (text of a script, which occurs once, and the fault in its place)
PPG = {
    "published_code": [
        ("return x + self.conv1(F.relu(self.conv0(F.relu(x))))", "return x + self.conv1(F.relu(self.conv0(x)))"),
        ("obs.permute(0, 3, 1, 2) / 255.0", "obs.permute(0, 3, 2, 1) / 255.0"),
    ],
    "algorithm": [
        ("gamma * values[1:] * nonterminal - values[:-1]", "gamma * values[1:] - values[:-1]"),
        ("nonterminal = 1 - dones[1:]", "nonterminal = 1 - dones[:-1]"),
        ("gae_lambda * nonterminal[t] * last_gae", "gae_lambda * last_gae"),
        ("ratio.clamp(1 - epsilon, 1 + epsilon)", "ratio.clamp(1 - epsilon, 1.2)"),
        ("kl_k2 = 0.5 * logratio", "kl_k2 = logratio"),
        ("pg_loss + args.kl_coef * kl_k2", "pg_loss - args.kl_coef * kl_k2"),
        ("policy_loss - args.ent_coef * entropy", "policy_loss + args.ent_coef * entropy"),
        ("torch.max(squared_errors,", "torch.min(squared_errors,"),
        ("(old_all_logprobs.exp() * (old", "(all_logprobs.exp() * (old"),
        ("aux_value_loss + args.beta_clone * kl_loss", "aux_value_loss + kl_loss"),
        ("0.5 * (new.aux_values", "0.5 * (new.values"),
        ("optimizer.zero_grad()  #", "#"),
        ("(loss * share).backward()", "loss.backward()"),
        ("features = features.detach()", "features = features"),
        (".exponential_(generator=generator).log()", ".exponential_(generator=generator)"),
        ("returns *= 1 - first", "pass"),
        ("-10, 10)", "-100, 100)"),
        ("totals[:, done] = 0", "totals[0, done] = 0"),
        ("torch.cat([self.last_returns, returns])[-100:]", "torch.cat([returns, self.last_returns])[:100]"),
        ("layer.weight *= scale /", "layer.weight *= scale + 0 *"),
    ],
    "training": [
        ("if args.e_policy == args.e_value:", "if True:"),
        ("aux_update = make_update(aux_optimizer,", "aux_update = make_update(optimizer,"),
        ('aux_optimizer.param_groups[0]["lr"].fill_(lr_fraction *', 'aux_optimizer.param_groups[0]["lr"].fill_('),
        ("1 - (iteration - 1) / args.num_iterations", "1 - (iteration - 1) % args.n_iteration / args.num_iterations"),
        ("(args.n_iteration * args.aux_interval) == 0", "args.n_iteration == 0"),
        ("aux_inds[: args.num_aux_minibatches or None]", "aux_inds[:None]"),
        ("params, args.max_grad_norm or math.inf", "params, math.inf"),
        ("torch.manual_seed(args.seed)", "torch.manual_seed(0)"),
        ("not any(path.parent.iterdir())", "True"),
        ("require(not changed,", "require(True,"),
    ],
    "published_runs": [
        ("values[T] = agent(", "values[T] = 0 * agent("),
        ("returns = advantages + old_values[:-1]", "returns = advantages"),
        ("(advantages - all_advantages.mean())", "advantages"),
        ("old_values, dones, args.gamma", "old_values, np.roll(dones, 1, 0), args.gamma"),
        ("aux_obs[start : start + N]", "aux_obs[:N]"),
        ("torch.from_numpy(returns).T", "torch.from_numpy(returns).reshape(N, T)"),
        ("aux_forward(agent, args, x.to(device),", "aux_forward(agent, args, 0 * x.to(device),"),
        ("b_inds = torch.randperm(args.batch_size, device=device)", "b_inds = torch.arange(args.batch_size)"),
        ("aux_inds = torch.randperm(num_rollouts,", "aux_inds = torch.arange(num_rollouts,"),
        ("reward_normalizer(rewards, dones[:-1])", "reward_normalizer(rewards, dones[1:])"),
        ("episodes.update(rewards, dones[1:])", "episodes.update(rewards, dones[:-1])"),
        ("[value_update] * args.e_value + [policy_update] * args.e_policy", "[policy_update, value_update] * 2"),
        ("value_update = make_update(value_optimizer,", "value_update = make_update(optimizer,"),
    ],
    "resume": [
        ('torch.set_rng_state(own["rng"])', "pass"),
        ("part.load_state_dict(state[name])", "pass"),
        ('envs.load_state_dict(own["envs"])', "pass"),
        ('dones[T] = own["dones"]', "pass"),
        ('aux_returns.copy_(own["aux_returns"])', "pass"),
        ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("    if is_empty:", "    if True:"),
        ("is_empty or is_stored, f", "True, f"),
        ('x if isinstance(x, int) else float(x) for', 'x for'),
        ("purge_step=last", "purge_step=0 * last"),
        ("if not math.isfinite(means[prefix + name]):", "if False:"),
    ],
    "evaluation": [
        ("returns += rewards * playing", "returns += rewards"),
        ("envs.load_state_dict(start)", "pass"),
    ],
    "distributed": [
        ("mean /= NUM_RANKS", "pass"),
        ("return np.concatenate(gather_objects(array), axis)", "return np.concatenate([array] * NUM_RANKS, axis)"),
        ("        torch.manual_seed(rank_seed)", "        pass"),
        ("args.seed * NUM_RANKS + RANK", "args.seed"),
    ],
}  # fmt: skip

PPO = {
    "algorithm": [
        ("np.clip(rewards / deviations", "np.clip(rewards / deviations[-1]"),
        ("orthogonal_(self.policy_head.weight, 0.01)", "orthogonal_(self.policy_head.weight, 1.0)"),
        ("value_loss = 0.5 * squared_errors", "value_loss = squared_errors"),
    ],
    "published_runs": [
        ('torch.std_mean(minibatch["advantages"]', 'torch.std_mean(batch["advantages"]'),
        ("in range(args.update_epochs):", "in range(1):"),
        ("eps=1e-5, fused", "eps=1e-8, fused"),
    ],
}  # fmt: skip


def notices(name: str, script: str, source: str) -> bool:
    """Whether a test of the file fails on a copy of the project with this source of the script. Left out is what would
    notice anything: the comparison of the two scripts word for word."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".*", "runs", "sweeps", "*.egg-info")
        copy = Path(shutil.copytree(ROOT, Path(folder, "copy"), ignore=ignored))
        (copy / f"{script}.py").write_text(source)
        argv = [sys.executable, "-m", "pytest", "-x", "-q", "-k", "not word_for_word", f"tests/test_{name}.py"]
        result = subprocess.run(argv, cwd=copy, capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise RuntimeError(result.stdout[-2000:])
        return result.returncode == 1


def main(words: list[str]) -> int:
    chosen = [("ppg_procgen", name, *fault) for name, faults in PPG.items() for fault in faults]
    chosen += [("ppo_procgen", name, *fault) for name, faults in PPO.items() for fault in faults]
    chosen = [fault for fault in chosen if not words or any(word in " ".join(fault) for word in words)]
    survivors = 0
    for script, name, old, new in chosen:
        source = (ROOT / f"{script}.py").read_text()
        assert source.count(old) == 1, f"{script}: {source.count(old)} times: {old}"
        is_noticed = notices(name, script, source.replace(old, new))
        survivors += not is_noticed
        print(f"{'noticed' if is_noticed else 'SURVIVES'} | {script} | {name} | {old!r} -> {new!r}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
