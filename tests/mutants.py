"""Do the tests notice faults? Puts one at a time into a copy of ppg_procgen.py, or what PPO has of its own into one of
ppo_procgen.py, and runs the tests on it: first the file that should notice, then all the others. Prints the faults that
no test notices; exit code 1 if there are any.

    python tests/mutants.py                # all, an hour on 2 cores
    python tests/mutants.py kl gae --first # those whose text has one of the words; only the file that should notice
    python tests/mutants.py ppo --first    # those in ppo_procgen.py
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import procgen  # noqa: F401
import pytest
import torch
import torch.utils.tensorboard  # noqa: F401
import tyro  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]

# the file that should notice: (text of the script, the fault in its place). A text must occur once.
MUTANTS = {
    "published_code": [
        ("return x + self.conv1(F.relu(self.conv0(F.relu(x))))", "return x + self.conv1(F.relu(self.conv0(x)))"),
        (".permute(0, 3, 1, 2) / 255.0", ".permute(0, 3, 2, 1) / 255.0"),
        ("self.conv.bias.to(x.dtype)", "0 * self.conv.bias.to(x.dtype)"),
    ],
    "algorithm": [
        ("gamma * values[1:] * nonterminal - values[:-1]", "gamma * values[1:] - values[:-1]"),
        ("gamma * values[1:] * nonterminal - values[:-1]", "gamma * values[1:] * nonterminal + values[:-1]"),
        ("nonterminal = 1 - dones[1:]", "nonterminal = 1 - dones[:-1]"),
        ("gamma * gae_lambda * nonterminal[t] * last_gae", "gamma * gae_lambda * last_gae"),
        ("gamma * gae_lambda * nonterminal[t] * last_gae", "gae_lambda * nonterminal[t] * last_gae"),
        ("pg_loss = -torch.min(", "pg_loss = torch.min("),
        ("pg_loss = -torch.min(", "pg_loss = -torch.max("),
        ("ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)", "ratio.clamp(1 - args.clip_coef, 1.2)"),
        ("kl_k2 = 0.5 * logratio.square().mean()", "kl_k2 = logratio.square().mean()"),
        ("= -logratio.mean()", "= logratio.mean()"),
        ("(ratio - 1 - logratio).mean()", "(logratio.exp() - 1).mean()"),
        ("pg_loss + args.kl_coef * kl_k2", "pg_loss - args.kl_coef * kl_k2"),
        ('- args.ent_coef * stats["entropy"]', '+ args.ent_coef * stats["entropy"]'),
        ('= -(all_logprobs.exp() * all_logprobs).sum(-1).mean()', '= -(all_logprobs.exp() * all_logprobs).mean()'),
        ("args.vf_coef * errors.mean()", "0.5 * args.vf_coef * errors.mean()"),
        ("errors = torch.max(errors,", "errors = torch.min(errors,"),
        ("values + (new.values - values).clamp", "values.mean() + (new.values - values).clamp"),
        ("F.kl_div(logprobs, old_logprobs,", "F.kl_div(old_logprobs, logprobs,"),
        ('reduction="batchmean"', 'reduction="mean"'),
        ("aux_loss + args.beta_clone * kl_loss + value_loss", "aux_loss + kl_loss + value_loss"),
        ("aux_loss = 0.5 * (new.aux_values", "aux_loss = 0.5 * (new.values"),
        ("    value_loss = 0.5 * (new.values", "    value_loss = 0.5 * (new.aux_values"),
        ("    optimizer.zero_grad()", "    pass"),
        ("(loss * share).backward()", "loss.backward()"),
        ("value.detach() * share", "value.detach()"),
        ("features = features.detach()", "features = features"),
        ("logprobs = logits.log_softmax(-1)\n    noise", "logprobs = logits.log_softmax(0)\n    noise"),
        (".exponential_(generator=generator).log()", ".exponential_(generator=generator)"),
        ("returns *= 1 - first", "pass"),
        ("returns *= self.gamma", "pass"),
        (", -10, 10)", ", -100, 100)"),
        ("totals[:, done] = 0", "totals[0, done] = 0"),
        ("torch.cat([self.last_returns, returns])[-100:]", "torch.cat([returns, self.last_returns])[:100]"),
        ("self.num_episodes += len(returns)", "self.num_episodes += min(len(returns), 1)"),
        ("layer.weight *= scale / torch", "layer.weight *= scale + 0 * torch"),
        ("self.num_features), 1.4)", "self.num_features), 1.0)"),
    ],
    "training": [
        ("values[T] = agent(", "values[T] = 0 * agent("),
        ("returns = advantages + old_values[:-1]", "returns = advantages"),
        ("returns = advantages + old_values[:-1]", "returns = advantages + old_values[1:]"),
        ("(advantages - mean.item()) / (std.item() + 1e-8)", "advantages / (std.item() + 1e-8)"),
        ("if args.e_policy != args.e_value:  # value", "if False:  # value"),
        ("if epoch < args.e_value else", "if epoch < args.e_policy else"),
        ("        self.num_stored = rows.stop", "        pass"),
        ("            buffer.num_stored = 0", "            pass"),
        ("buffer.add(obs.transpose(0, 1),", "buffer.add(obs.reshape(N, T, 64, 64, 3),"),
        ("b_returns.view(T, N).T)", "b_returns.view(N, T))"),
        ("aux_agent(x.to(device), value", "aux_agent(x.to(device) * 0, value"),
        ("aux_inds = torch.randperm(num_rows)", "aux_inds = torch.arange(num_rows)"),
        ("b_inds = torch.randperm(args.batch_size, device=device)", "b_inds = torch.arange(args.batch_size)"),
        ("aux_update = make_update(aux_optimizer,", "aux_update = make_update(optimizer,"),
        ("value_update = make_update(value_optimizer,", "value_update = make_update(optimizer,"),
        (' aux_optimizer.param_groups[0]["lr"].fill_(remaining *', ' aux_optimizer.param_groups[0]["lr"].fill_('),
        ("1 - (iteration - 1) / args.num_iterations", "1 - (iteration - 1) % args.n_iteration / args.num_iterations"),
        ("dones[T] = next_done", "dones[T] = 0"),
        ("reward_normalizer(rewards, dones[:-1])", "reward_normalizer(rewards, dones[1:])"),
        ("episodes.update(rewards, dones[1:])", "episodes.update(rewards, dones[:-1])"),
        ("return 1 - (errors.var()", "return (errors.var()"),
        ("cleanup, N, rank_seed(args.seed))", "cleanup, N, 0)"),
        ("np.random.SeedSequence([seed, RANK])", "np.random.SeedSequence([seed])"),
        ("rand_seed=seed", "rand_seed=0"),
        ("    torch.manual_seed(args.seed)", "    torch.manual_seed(0)"),
        ("iteration % (args.n_iteration * args.aux_interval) == 0", "True"),
        ("aux_inds[: args.num_aux_minibatches]", "aux_inds[:None]"),
        (" step = iteration * self.args.batch_size", " step = 1 + iteration * self.args.batch_size"),
        ("float(np.mean(x.numpy()))", "float(x[-1])"),
        ("        self.row = {}\n        self.stats = {}\n", "        self.row = {}\n"),
        ("nn.utils.clip_grad_norm_(params, max_grad_norm or math.inf)", "nn.utils.clip_grad_norm_(params, math.inf)"),
        ("(self.batch_size * NUM_RANKS, 1)", "(self.batch_size * NUM_RANKS * 2, 1)"),
        ('used["num_grad_accum"] = args.num_grad_accum or', 'used["num_grad_accum"] ='),
        ("is_free = args.resume or not names or died_early", "is_free = True"),
        ("        sys.exit(2)\n", "        sys.exit(1)\n"),
    ],
    "published_runs": [
        ("old_values, dones, args.gamma", "old_values, np.roll(dones, 1, 0), args.gamma"),
        ("agent(torch.from_numpy(next_obs).to(device), policy", "agent(obs[-1], policy"),
        ("self.returns[rows].copy_(returns)", "self.returns[: len(obs)].copy_(returns)"),
        ("if phase_ends and iteration % (args.n_iteration * args.aux_interval) == 0:",
         "if iteration > 1 and iteration % args.n_iteration == 1:"),
        ("value_update if epoch < args.e_value else policy_update",
         "policy_update if epoch < args.e_policy else value_update"),
        ("value_update if epoch < args.e_value else policy_update",
         "value_update if epoch < args.e_policy else policy_update"),
        ("advantages = standardize(advantages)  # [PPG-4]", "pass"),
    ],
    "resume": [
        ('torch.set_rng_state(own["rng"])', "pass"),
        ("                part.load_state_dict(own[name])", "                pass"),
        ("purge_step=step + 1", "purge_step=None"),
        ("file.truncate(0)", "pass"),
        ("temporary.unlink(missing_ok=True)\n\n\ndef load", "pass\n\n\ndef load"),
        ("os.replace(temporary, path)\n    finally:\n        temporary.unlink(missing_ok=True)\n\n\ndef load",
         "path.write_bytes(buffer.getvalue())\n    finally:\n        temporary.unlink(missing_ok=True)\n\n\ndef load"),
        ("require(is_whole, f\"{path} is", "require(True, f\"{path} is"),
        ("weights_only=True)", "weights_only=False)"),
        ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ("    sys.exit(code)", "    sys.exit(1)"),
        ('128 + number)', '0)'),
        ("handle_signals(signal.SIG_IGN)", "pass"),
        ('"episodes": episodes, "rewards"', '"rewards"'),
        ('"rewards": reward_normalizer, ', ""),
        ("(optimizer=optimizer, value", "(value"),
        (", value=value_optimizer", ""),
        (", aux=aux_optimizer)", ")"),
        ('self.row = state["row"]', "pass"),
        ('self.stats = state["stats"]', "pass"),
        ("bad = (~tables.isfinite()).nonzero().tolist()", "bad = []"),
        ("(more > 0 and not args.anneal_lr)", "more > 0"),
        ("is_same = value == saved[name] or name in MAY_CHANGE", "is_same = True"),
    ],
    "evaluation": [
        ("returns += rewards * playing", "returns += rewards"),
        ("playing &= ~(terminated | truncated)", "playing = ~(terminated | truncated)"),
        ('envs.load_state_dict(self.starts[split])', "pass"),
        ("logits.argmax(-1) if greedy", "logits.argmin(-1) if greedy"),
        ("end_level = args.start_level + args.num_levels", "end_level = args.start_level"),
        ("generator = torch.Generator(device).manual_seed(seed)", "generator = None"),
        ("deviation / math.sqrt(len(returns))", "deviation"),
    ],
    "distributed": [
        ("        mean /= NUM_RANKS", "        pass"),
        ("    average_grads(params)", "    pass"),
        ("return np.concatenate(gather_objects(array), axis)", "return np.concatenate([array] * NUM_RANKS, axis)"),
        ("        torch.manual_seed(rank_seed(args.seed))", "        pass"),
    ],
}  # fmt: skip

PPO_MUTANTS = {
    "published_runs": [("torch.std_mean(mb_advantages, correction=0)", "torch.std_mean(b_advantages, correction=0)")],
    "published_code": [
        ("3, stride=2, ceil_mode=True)", "3, stride=2, padding=1)"),
    ],
    "algorithm": [
        ('stats["value_loss"] = 0.5 * errors.mean()', 'stats["value_loss"] = errors.mean()'),
        ('loss + args.vf_coef * stats["value_loss"]', 'loss + stats["value_loss"]'),
        ("orthogonal_(self.policy_head.weight, 0.01)", "orthogonal_(self.policy_head.weight, 1.0)"),
        ("orthogonal_(self.value_head.weight, 1.0)", "orthogonal_(self.value_head.weight, 0.01)"),
        ("nn.init.xavier_uniform_(module.weight)", "nn.init.xavier_normal_(module.weight)"),
        ("nn.init.zeros_(module.bias)", "pass"),
        ("np.clip(rewards / deviations", "np.clip(rewards / deviations[-1]"),
        ("            moments += [", "            moments[:] = ["),
        (", -10, 10)", ", -100, 100)"),
    ],
    "training": [
        ("torch.std_mean(mb_advantages, correction=0)", "torch.std_mean(mb_advantages, correction=1)"),
        ("(mb_advantages - mean)", "mb_advantages"),
        ("/ (std + 1e-8)", "/ 1"),
        ("num_updates = start_iteration * args.update_epochs * args.num_minibatches", "num_updates = 0"),
        ("correction = math.sqrt(1 - 0.999**num_updates) / (1 - 0.9**num_updates)", "correction = 1.0"),
        ("torch.tensor(1e6, device=device)", "torch.tensor(0.0, device=device)"),
        ("eps=1e-5, fused", "eps=1e-8, fused"),
        ("(optimizer, remaining * args.learning_rate, num_updates)", "(optimizer, args.learning_rate, num_updates)"),
        ("b_inds = torch.randperm(args.batch_size, device=device)", "b_inds = torch.arange(args.batch_size)"),
        ("in range(args.update_epochs):", "in range(1):"),
        ("values[T] = agent(", "values[T] = 0 * agent("),
        ("clip_vloss: bool = True", "clip_vloss: bool = False"),
        ("max_grad_norm: float = 0.5", "max_grad_norm: float = 0.0"),
    ],
    "resume": [
        ('shared["optimizer"] = optimizer', "pass"),
        ("if iteration % args.checkpoint_interval == 0 or iteration", "if iteration"),
    ],
}  # fmt: skip


def notices(script: str, source: str, files: list[str]) -> bool:
    """Whether a test in these files fails on a copy of the repository with this source of the script. Left out is the
    test that compares the two scripts word for word: it would notice anything."""
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(".git", "runs", "sweeps")
        copy = Path(shutil.copytree(ROOT, Path(folder) / "copy", ignore=ignored))
        (copy / f"{script}.py").write_text(source)
        if (pid := os.fork()) == 0:  # it has imported torch, but none of our files
            os.chdir(copy)
            sys.path.insert(0, str(copy))
            output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            os._exit(pytest.main(["-x", "-q", "-k", "not word_for_word", *files]))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, 1):
            raise RuntimeError((copy / "output").read_text()[-2000:])
        return code == 1


def main(words: list[str], first_only: bool) -> int:
    survivors, number, scripts = [], 0, {"ppg_procgen": MUTANTS, "ppo_procgen": PPO_MUTANTS}
    chosen = [(script, name, *x) for script, groups in scripts.items() for name, group in groups.items() for x in group]
    for script, name, old, new in chosen:
        if words and not any(word in f"{script} {name} {old} {new}" for word in words):
            continue
        source = (ROOT / f"{script}.py").read_text()
        number, files = number + 1, [f"tests/test_{name}.py"]
        others = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))
        others = [] if first_only else [file for file in others if file not in files]
        if source.count(old) != 1:
            outcome = f"occurs {source.count(old)} times"
        elif notices(script, mutated := source.replace(old, new), files) or (
            others and notices(script, mutated, others)
        ):
            outcome = ""
        else:
            outcome = "survives"
        print(f"{outcome or 'noticed':9} | {script} | {name:11} | {old!r} -> {new!r}", flush=True)
        survivors += [(outcome, old, new)] if outcome else []
    print(f"{len(survivors)} of {number} faults were not noticed")
    for outcome, old, new in survivors:
        print(f"  {outcome}: {old!r} -> {new!r}")
    return 1 if survivors else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # as conftest.py does for processes that import torch later
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports what Adam needs
    sys.exit(main([word for word in sys.argv[1:] if word != "--first"], "--first" in sys.argv))
