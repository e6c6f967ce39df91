"""Do the tests notice faults? Puts one at a time into a copy of the project and runs the test file that should notice.
Prints which faults it notices; exit code 1 if one survives.

    python tests/mutants.py kl_loss      # those whose text has one of the words; without words: all, in 30 minutes
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# test file that should notice: (text of a script, which occurs once, and the fault in its place)
PPG = {
    "algorithm": [
        ("gamma * values[1:] * nonterminal - values[:-1]", "gamma * values[1:] - values[:-1]"),
        ("nonterminal = 1 - firsts[1:]", "nonterminal = 1 - firsts[:-1]"),
        ("gae_lambda * nonterminal[t] * last_gae", "gae_lambda * last_gae"),
        ("ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)", "ratio.clamp(1 - args.clip_coef, 1.2)"),
        ("kl_k2 = 0.5 * logratio", "kl_k2 = logratio"),
        ("pg_loss + args.kl_coef * kl_k2", "pg_loss - args.kl_coef * kl_k2"),
        ("pi_loss - args.ent_coef * entropy", "pi_loss + args.ent_coef * entropy"),
        ("torch.max(squared_errors,", "torch.min(squared_errors,"),
        ("(self.logprobs.exp() * (self.logprobs - other", "(other.logprobs.exp() * (self.logprobs - other"),
        ("Policy(pi_old).kl_to(Policy(out.logits))", "Policy(out.logits).kl_to(Policy(pi_old))"),
        ("aux_value_loss + args.beta_clone * kl_loss", "aux_value_loss + kl_loss"),
        ("0.5 * (out.aux_values", "0.5 * (out.values"),
        ("optimizer.zero_grad()  #", "#"),
        ("(loss * share).backward()", "loss.backward()"),
        ("features = features.detach()", "features = features"),
        (".exponential_(generator=generator).log()", ".exponential_(generator=generator)"),
        ("sums *= 1 - first", "pass"),
        ("-10, 10)", "-100, 100)"),
        ("totals *= 1 - firsts[t]", "totals[0] *= 1 - firsts[t]"),
        ("torch.cat([self.last_returns, returns])[-100:]", "torch.cat([returns, self.last_returns])[:100]"),
        ("layer.weight *= scale /", "layer.weight *= scale + 0 *"),
        ("args.clip_vloss and args.clip_coef > 0:", "args.clip_vloss:"),
        ("v_loss = 0.5 * (out.values", "v_loss = args.vf_coef * (out.values"),
        ("x.detach() * share", "x.detach()"),
        ("self.last_returns.nanmean()", "self.last_returns.mean()"),
    ],
    "training": [
        ("firsts[0] = firsts[T]", "pass"),
        ("firsts[t + 1] = terminated | truncated", "firsts[t + 1] = terminated"),
        ("value_optimizer = make_optimizer(agent, args.l", "value_optimizer = make_optimizer(agent, args.aux_l"),
        ("if not args.single_optimizer:", "if True:"),
        ("logits = [aux_forward(agent, args, x.to(device), value=False)", "logits = [agent(x.to(device), value=False)"),
        ("(x if x is None else x.float() for x in out)", "out"),
        ('"e_policy", "n_iteration"]', '"n_iteration"]'),
        ('"num_levels", "chunk_size", "e_value"]', '"num_levels", "e_value"]'),
        ('"cuda_graphs", "tf32", ', '"cuda_graphs", '),
        ("if is_last or iteration % args.n_iteration == 0:", "if iteration % args.n_iteration == 0:"),
        ('rollout["actions"].flatten(0, 1)', 'rollout["actions"].roll(1, 1).flatten(0, 1)'),
        ('rollout["values"].flatten()', 'rollout["values"].roll(1, 0).flatten()'),
        ('MAY_CHANGE = {  # what', 'MAY_CHANGE = {"gamma",  # what'),
        ("if args.e_policy == args.e_value:", "if True:"),
        ("gradient_step(agent, args, aux_optimizer,", "gradient_step(agent, args, optimizer,"),
        ("for opt in (optimizer, value_optimizer, aux_optimizer):", "for opt in (optimizer, value_optimizer):"),
        ("for opt in (optimizer, value_optimizer, aux_optimizer):", "for opt in (optimizer, aux_optimizer):"),
        ("1 - (iteration - 1) / args.num_iterations", "1 - (iteration - 1) % args.n_iteration / args.num_iterations"),
        ("if args.max_grad_norm > 0:", "if False:"),
        ("torch.manual_seed(args.seed)", "torch.manual_seed(0)"),
        ("{x.name for x in folder.iterdir()} <= leftovers", "True"),
        ("require(not changed,", "require(True,"),
    ],
    "published_runs": [
        ("return x + self.conv1(F.relu(self.conv0(F.relu(x))))", "return x + self.conv1(F.relu(self.conv0(x)))"),
        ("obs.permute(0, 3, 1, 2) / 255.0", "obs.permute(0, 3, 2, 1) / 255.0"),
        ("last_values = agent(", "last_values = 0 * agent("),
        ("targets = advantages + values[:-1]", "targets = advantages"),
        ("normalized = (advantages - all_advantages.mean())", "normalized = advantages"),
        ("values, firsts, args.gamma", "values, np.roll(firsts, 1, 0), args.gamma"),
        ("x[start : start + N] = batch", "x[:N] = batch"),
        (".unflatten(0, (T, N)).transpose(0, 1)", ".unflatten(0, (N, T))"),
        ("aux_forward(agent, args, x.to(device),", "aux_forward(agent, args, 0 * x.to(device),"),
        ("b_inds = torch.randperm(args.batch_size, device=device)", "b_inds = torch.arange(args.batch_size)"),
        ("aux_inds = torch.randperm(capacity)", "aux_inds = torch.arange(capacity)"),
        ("zip(all_rewards, all_firsts[:-1], strict", "zip(all_rewards, all_firsts[1:], strict"),
        ("totals[:, firsts[t + 1] > 0]", "totals[:, firsts[t] > 0]"),
        ("epochs += [(policy_loss, optimizer)]", "epochs[:0] = [(policy_loss, optimizer)]"),
        ("[(value_loss, value_optimizer)]", "[(value_loss, optimizer)]"),
        ("(all_advantages.std() + 1e-8)", "(all_advantages.std(ddof=1) + 1e-8)"),
        ('mean_stats(stats, "losses/"))', 'mean_stats(stats[-1:], "losses/"))'),
        ('mean_stats(stats, "losses/aux/"))', 'mean_stats(stats[-1:], "losses/aux/"))'),
        ("(iteration - 1) % args.n_iteration) * N", "iteration % args.n_iteration) * N"),
    ],
    "resume": [
        ('torch.set_rng_state(rank_state["rng"])', "pass"),
        ("part.load_state_dict(state[name])", "pass"),
        ('envs.load_state_dict(rank_state["envs"])', "pass"),
        ('firsts[T] = rank_state["firsts"]', "pass"),
        ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("require(is_same,", "require(True,"),
        ("weights_only=True)  # else", "weights_only=False)  # else"),
        ('x if isinstance(x, int) else float(x) for', 'x for'),
        ("purge_step=last", "purge_step=0 * last"),
        ('last["global_step"] + 1)', 'last["global_step"])'),
        ('time.monotonic() - last["wall_time"]', "time.monotonic()"),
        ('{"resume": run_dir, "run_dir": run_dir}', '{"resume": run_dir}'),
        ("optimizer=optimizer, value_optimizer=value_optimizer,", "optimizer=optimizer,"),
        ("value_optimizer=value_optimizer, aux_optimizer=aux_optimizer)", "value_optimizer=value_optimizer)"),
        ('open(path.with_name(f"{path.name}.tmp"), mode)', "open(path, mode)"),
        ('if args.aux_dtype == "bfloat16" and not', "if not"),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL)", "pass"),
        ("if not math.isfinite(means[prefix + name]):", "if False:"),
    ],
    "evaluation": [
        ("above = args.start_level + args.num_levels", "above = args.num_levels"),
        ("returns += rewards * playing", "returns += rewards"),
        ("envs.load_state_dict(start)", "pass"),
        ("NUM_LEVELS - args.seed, above", "args.seed, above"),
        ("torch.Generator(device).manual_seed(seed)", "torch.Generator(device).manual_seed(0)"),
    ],
    "distributed": [
        ("mean /= NUM_RANKS", "pass"),
        ("        dist.all_gather_object(everyone, x)", "        pass"),
        ("        torch.manual_seed(rank_seed)", "        pass"),
        ("args.seed * NUM_RANKS + RANK", "args.seed"),
        ("args.seed * NUM_RANKS + RANK", "args.seed + RANK"),
        ("normalized = (advantages - all_advantages.mean())", "normalized = (advantages - advantages.mean())"),
        ("reward_normalizer(rewards, all_rewards,", "reward_normalizer(rewards, np.hstack([rewards] * NUM_RANKS),"),
        ('state["ranks"][RANK]', 'state["ranks"][0]'),
        ("float(np.mean(all_ranks(mean.item())))", "mean.item()"),
        ('"python" if NUM_RANKS == 1 else "torchrun ..."', '"python"'),
        ("end = NUM_LEVELS // NUM_RANKS", "end = NUM_LEVELS"),
    ],
    "speed": [
        ('f"cuda:{LOCAL_RANK}" if on_gpu', '"cuda:0" if on_gpu'),
        ('int(os.environ.get("LOCAL_WORLD_SIZE", 1))', "1"),
        ("return get_graph(agent, args, *others)(**tensors)", "return get_graph(agent, args)(**tensors)"),
        ("if self.num_calls < 4:", "if self.num_calls < 3:"),
        ("obs.permute(0, 3, 1, 2) / 255.0", "obs.permute(0, 3, 1, 2).contiguous() / 255.0"),
    ],
    "recipes": [
        ("torch.full((capacity, T), math.nan, device", "torch.zeros((capacity, T), device"),
        ("assert x.dtype == batch[name].dtype", "assert True"),
        ("assert out.aux_values.shape == targets.shape", "pass"),
    ],
}  # fmt: skip

PPO = {
    "algorithm": [
        ("np.clip(rewards / deviations", "np.clip(rewards / deviations[-1]"),
        ("orthogonal_(self.policy_head.weight, 0.01)", "orthogonal_(self.policy_head.weight, 1.0)"),
        ("value_loss = 0.5 * squared_errors", "value_loss = squared_errors"),
    ],
    "training": [
        ("1 - (iteration - 1) / args.num_iterations", "1 - iteration / args.num_iterations"),
        ('wandb.init(resume="auto", ', "wandb.init("),
        ("signal.signal(signal.SIGINT, lambda *_: sys.exit(130))", "pass"),
    ],
    "resume": [
        ("iteration % args.checkpoint_interval == 0", "(iteration + 1) % args.checkpoint_interval == 0"),
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
