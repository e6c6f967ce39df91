"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs. What is marked
gpu needs one (pytest -m gpu); on a CPU, the same tests show what they can."""

import contextlib
import gc
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import worker
from conftest import ROOT, as_flags, interrupt, make_agent, make_args, parse, read_rows, resume, train
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from ppg_procgen import Args

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
FAST = {"compile": True, "cuda_graphs": True}


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """In full float32 precision; what set_up_device and use_float64 change in this process is restored."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch._dynamo.reset()
    gc.disable()  # an earlier run's graph, collected during a capture, would invalidate it
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        yield torch.device("cuda:0" if request.param == "cuda" else "cpu")  # set_device needs the index
    torch.set_default_dtype(torch.float32)
    gc.enable()
    if request.param == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream())


def losses(device, arch, fast, bf16=False):
    """By name, one number for each of 20 updates of either phase: plain, or as train does them."""
    torch.manual_seed(0)
    args = Args(arch=arch, cuda=device.type == "cuda", cuda_graphs=fast, max_grad_norm=5.0)
    agent = make_agent(ppg_procgen, arch=arch)
    agent.to(device, memory_format=torch.channels_last if fast else torch.preserve_format)
    step = ppg_procgen.gradient_step
    if fast and device.type == "cuda":
        ppg_procgen.set_up_device(args)
        ppg_procgen.compile_encoders(agent)
        step = ppg_procgen.CudaGraphs(step)
    for name, module in agent.named_children():
        if fast and device.type == "cpu" and "encoder" in name:
            module.compile(fullgraph=True, dynamic=False, backend="aot_eager")  # needs no C++ compiler
    optimizer = ppg_procgen.make_optimizer(agent, 5e-4)

    updates = []
    for _ in range(20):
        obs = torch.randint(0, 256, (6, 64, 64, 3), dtype=torch.uint8).to(device)
        actions = torch.randint(0, 15, (6, 1)).to(device)
        targets, advantages = torch.randn(2, 6).to(device)
        with torch.no_grad():  # fewer at a time, as in a rollout
            old_logits = torch.cat([agent(part).logits for part in obs.split(2)])
        logprobs = old_logits.log_softmax(-1).gather(-1, actions).squeeze(1)
        batch = {"actions": actions.squeeze(1), "logprobs": logprobs, "advantages": advantages}
        batch.update(obs=obs, targets=targets)
        stats = step(agent, args, optimizer, (ppg_procgen.policy_loss, ppg_procgen.value_loss), **batch)
        batch = {"obs": obs, "targets": targets, "old_logits": old_logits}
        aux_stats = step(agent, args, optimizer, (ppg_procgen.aux_loss,), bf16, **batch)
        updates.append(stats | {f"aux/{name}": x for name, x in aux_stats.items()})
    return {name: torch.stack([stats[name] for stats in updates]).cpu() for name in updates[0]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fast_and_plain_path_agree_over_20_updates(device, monkeypatch, arch, dtype):
    """On a CPU in float64: Adam makes 1 % of float32's rounding within 20 updates."""
    if device.type == "cpu" and dtype == "float32":
        worker.use_float64(ppg_procgen, monkeypatch.setattr)
    plain = losses(device, arch, fast=False)
    fast = losses(device, arch, fast=True, bf16=dtype == "bfloat16")
    assert plain["grad_norm"].unique().numel() == 20 and plain["aux/kl_loss"].min() > 1e-6  # errors would add up
    assert fast["approx_kl_k2"].max() < 1e-8 and not fast["clipfrac"].any()  # updates see the rollout's policy
    for name in plain:
        if dtype == "bfloat16":  # it keeps 8 bits
            if name in ("aux/aux_value_loss", "aux/real_value_loss", "aux/kl_loss"):  # later ones: by the seed's luck
                torch.testing.assert_close(fast[name][:5], plain[name][:5], rtol=0.1, atol=5e-3)
                assert not torch.equal(fast[name], plain[name])
        elif device.type == "cpu":
            torch.testing.assert_close(fast[name], plain[name], rtol=1e-5, atol=1e-5)
        else:  # another convolution algorithm alone moves the second update by hundreds of times its rounding
            torch.testing.assert_close(fast[name][0], plain[name][0], rtol=1e-4, atol=1e-4)
            tolerance = 0.1 if name.endswith("grad_norm") else 1e-2
            torch.testing.assert_close(fast[name], plain[name], rtol=tolerance, atol=tolerance)


class Watch(TorchDispatchMode):
    """Fails where a program on a GPU would wait for it, and where a convolution does not get and give channels_last."""

    WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique2", "_unique2"}
    convolutions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        assert name not in self.WAITS and not masked, f"{func} waits for the device"
        result = func(*args, **kwargs or {})
        if name in ("convolution", "convolution_backward"):
            self.convolutions += 1
            tensors = [*args, *(result if isinstance(result, tuple) else [result])]
            images = [x for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 4]
            assert all(x.is_contiguous(memory_format=torch.channels_last) for x in images), name
        return result


SETTINGS = {  # name: (script, flags, convolutions of an update, forward and backward)
    "dual": (ppg_procgen, {"buffer_on_cpu": True, "aux_dtype": "bfloat16"}, {60}),
    "e_value": (ppg_procgen, {"e_value": 2}, {45, 60}),  # backward through a network each, then both
    "detach": (ppg_procgen, {"arch": "detach"}, {30}),
    "ppo": (ppo_procgen, {}, {30}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_updates_do_not_wait_and_are_in_channels_last(run, monkeypatch, setting):
    def watched(agent, *rest, **minibatch):
        with Watch() as watch:
            result = step(agent, *rest, **minibatch)
        seen.add(watch.convolutions)
        # fused Adam refuses other layouts on a GPU, and takes the weights' for granted on a CPU
        assert all(x.grad is None or x.stride() == x.grad.stride() for x in agent.parameters())
        return result

    script, flags, convolutions = SETTINGS[setting]
    step = script.gradient_step
    seen = set()
    monkeypatch.setattr(script, "gradient_step", watched)
    run(script, small=False, num_steps=8, total_timesteps=64, **flags)
    assert seen == convolutions
    with pytest.raises(AssertionError, match="waits"), Watch():
        torch.ones(1).item()


def test_cuda_graphs_read_new_inputs_and_give_outputs_that_stay(monkeypatch):
    """With a stand-in, whose replay reads and writes where the captured call did."""

    class Graph:
        def replay(self):
            stored, outputs = recorded[self]
            outputs["sum"].copy_(stored["x"].sum())

    @contextlib.contextmanager
    def capture(graph, *_):
        yield
        recorded[graph] = calls[-1]

    def function(agent, name, *, x):
        calls.append(({"x": x}, {"sum": x.sum()}))
        return calls[-1][1]

    calls, recorded, agent = [], {}, object()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    graphs = ppg_procgen.CudaGraphs(function)
    sums = []
    for k in range(7):
        inputs = torch.full((3,), k)
        sums.append(graphs(agent, "a", x=inputs)["sum"])
        assert (inputs == k).all()
    assert [int(x) for x in sums] == [3 * k for k in range(7)] and len(calls) == 4  # three plain calls and the capture
    graphs(agent, "b", x=torch.ones(3))  # other arguments, another shape, another dtype: other graphs
    graphs(agent, "a", x=torch.ones(4, dtype=torch.int64))
    graphs(agent, "a", x=torch.ones(3, dtype=torch.int32))
    assert len(calls) == 7 and int(graphs(agent, "a", x=torch.tensor([1, 1, 2]))["sum"]) == 4 and len(calls) == 7
    with pytest.raises(AssertionError, match="by name"):
        graphs(torch.ones(3), "a", x=torch.ones(3))


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_cuda_graph_draws_new_numbers_at_every_replay(device):
    """It goes on in the generator's sequence, and from a new seed: graphs do not change a run."""

    def draw(*, logits):
        return {"actions": ppg_procgen.Policy(logits).sample()}

    torch.cuda.set_stream(torch.cuda.Stream())
    logits = torch.randn((64, 15), device=device)
    graphs, drawn = ppg_procgen.CudaGraphs(draw), []
    for function in (draw, graphs, graphs):
        torch.manual_seed(5)
        drawn.append([function(logits=logits)["actions"].tolist() for _ in range(10)])
    assert drawn[0] == drawn[1] == drawn[2] and all(actions != drawn[0][0] for actions in drawn[0][1:])


@pytest.mark.parametrize("device", [GPU], indirect=True)
@pytest.mark.parametrize("phase", ["policy", "auxiliary"])
def test_gradients_of_a_minibatch_agree_with_a_cpu_in_float64(device, phase):
    def gradients(device, dtype):
        torch.manual_seed(0)
        agent = make_agent(ppg_procgen).to(device, dtype, memory_format=torch.channels_last)
        batch = {"obs": torch.randint(0, 256, (64, 64, 64, 3), dtype=torch.uint8), "targets": torch.randn(64)}
        batch |= {"actions": torch.randint(0, 15, (64,)), "logprobs": torch.full((64,), -2.7)}
        batch |= {"advantages": torch.randn(64), "old_logits": torch.randn(64, 15)}
        batch = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in batch.items()}
        terms = {"policy": (ppg_procgen.policy_loss, ppg_procgen.value_loss), "auxiliary": (ppg_procgen.aux_loss,)}
        out = agent(batch["obs"])
        sum(loss(Args(), out, batch)[0] for loss in terms[phase]).backward()
        return {name: x.grad.double().cpu() for name, x in agent.named_parameters() if x.grad is not None}

    with pytest.MonkeyPatch.context() as patch:
        worker.use_float64(ppg_procgen, patch.setattr)
        expected = gradients(torch.device("cpu"), torch.float64)
    torch.set_default_dtype(torch.float32)
    for name, x in gradients(device, torch.float32).items():
        assert (x - expected[name]).norm() < 1e-3 * expected[name].norm(), name


@pytest.mark.gpu
def test_memory_of_the_default_setting(tmp_path):
    """With two auxiliary minibatches, of a buffer as large as the default's: at most 11.5 GB, no more than in a policy
    phase."""
    flags = {"n_iteration": 1, "num_aux_rollouts": 4, "total_timesteps": 2 * 16384, "e_auxiliary": 1}
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        ballast = torch.empty(int(6.24e9), dtype=torch.uint8, device="cuda")  # of B, all but one iteration

        def log(self, row, original=ppg_procgen.Run.log):
            original(self, row)
            peaks.append(torch.cuda.max_memory_reserved())

        patch.setattr(ppg_procgen.Run, "log", log)
        train(ppg_procgen, Args(run_dir=str(tmp_path / "run"), **flags), small=False)
    assert max(peaks) < 11.5e9 and ballast.nbytes > 6e9


@pytest.mark.gpu
def test_two_ranks_on_gpus_end(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("there are not two GPUs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [x for x in as_flags(vars(make_args(ppg_procgen, tmp_path / "run")) | {"resume": None}) if "None" not in x]
    command = [*torchrun, "ppg_procgen.py", *flags[1:], "--cuda-graphs"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while "is finished" not in process.stdout.readline():
        assert process.poll() is None
    start = time.monotonic()
    assert process.wait(60) == 0 and time.monotonic() - start < 60


def check_agreement(run_dir: Path, other: Path) -> None:
    """Of the first iteration, whose actions come from the same weights: later ones play other episodes."""
    rows, other_rows = read_rows(run_dir), read_rows(other)
    assert len(rows) == len(other_rows) == 4
    names = [name for name, x in rows[0].items() if x and name.startswith(("losses/", "charts/ep"))]
    assert len(names) >= 8
    for name in names:
        tolerance = 0.1 if name.endswith("grad_norm") else 1e-2
        assert float(other_rows[0][name]) == pytest.approx(float(rows[0][name]), rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("device", [GPU], indirect=True)
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ways_to_run_on_a_gpu_train_the_same(run, device, tmp_path, monkeypatch, setting):
    """In chunks, e_value compiles more variants of the networks than torch.compile lets pass unasked."""

    def interrupted(name):
        return interrupt(script, make_args(script, tmp_path / name, **flags), 2 * 16 + 5, small=False)

    script, flags, _ = SETTINGS[setting]
    flags = flags | {"cuda": True}
    if script is ppo_procgen:
        flags["checkpoint_interval"] = 2
    plain = run(script, small=False, **flags)
    check_agreement(plain, run(script, small=False, **flags, cuda_graphs=True))
    check_agreement(plain, resume(script, interrupted("stopped"), "--cuda-graphs", small=False))
    check_agreement(plain, run(script, small=False, **flags | FAST | {"chunk_size": 13}))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        run_dir = interrupted("from_cpu")
    assert len(read_rows(resume(script, run_dir, small=False))) == 4


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu(script, tmp_path):
    """Adam loads all it was built with, so capturable too: on a GPU, what a CPU has saved could not be captured."""
    optimizer = torch.optim.Adam([torch.zeros(1)], torch.tensor(0.5), fused=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(capturable=True, lr=torch.tensor(5.0))
    script.set_state(optimizer, saved)
    group = optimizer.param_groups[0]
    assert not group["capturable"] and group["fused"] and torch.equal(group["lr"], torch.tensor(0.5))


def test_a_run_that_began_with_the_flags_of_a_gpu_goes_on_without_them(script, tmp_path, monkeypatch):
    run_dir = train(script, make_args(script, tmp_path / "run"))
    record = run_dir / "args.json"
    record.write_text(record.read_text().replace('"cuda_graphs": false', '"cuda_graphs": true'))
    args = parse(script, "--resume", run_dir)
    assert not args.cuda_graphs and not args.compile
    script.check(args)


def test_plain_is_plain_and_the_flags_act(script, monkeypatch):
    """What train does with a GPU: streams, compilation and graphs only if they are asked for."""
    seen = []
    for name in ("set_device", "set_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: seen.append(name))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(script, "LOCAL_RANK", 1)
    args = script.Args()
    assert args.device == "cuda:1" and script.Args(cuda=False).device == "cpu"
    with torch.backends.cudnn.flags(enabled=True):  # restores them
        script.set_up_device(args)
        assert seen == ["set_device"]
        script.set_up_device(replace(args, cuda_graphs=True))
    assert seen[1:] == ["set_device", "Stream", "set_stream"]
    agent = make_agent(script)
    script.compile_encoders(agent)
    compiled = {name for name, module in agent.named_children() if module._compiled_call_impl is not None}
    assert compiled == {name for name, _ in agent.named_children() if name.endswith("encoder")}
    script.check(args)
    if script is ppg_procgen:  # bfloat16 begins with compute capability 8.0
        with pytest.raises(SystemExit, match="2"):
            script.check(replace(args, aux_dtype="bfloat16"))


@pytest.mark.parametrize("cores, threads", [(2, 0), (4, 3), (16, 12), (64, 12)])
def test_threads_of_the_environments(monkeypatch, script, cores, threads):
    class Games:
        def __init__(self, num_envs, env_id, **options):
            self.threads = options["num_threads"]

    monkeypatch.setattr(script.sys, "version_info", (3, 12))
    monkeypatch.setattr(script, "ProcgenVectorEnv", Games)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    assert script.make_envs(script.Args(), 0, 0, 0).threads == threads
    assert script.make_envs(script.Args(env_threads=5), 0, 0, 0).threads == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert script.make_envs(script.Args(), 0, 0, 0).threads == {2: 0, 4: 0, 16: 6, 64: 12}[cores]


def test_the_buffer_goes_to_the_host_where_it_would_fill_the_gpu(monkeypatch, capsys):
    """With meta tensors, which take no memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype, device: (shape, dtype, device))
    obs, targets = torch.empty((256, 64, 64, 64, 3), dtype=torch.uint8, device="meta"), torch.empty(256, 64)
    for total, flags, expected in ((10.5e9, {}, "cpu"), (11.5e9, {}, "cuda:0"), (80e9, {"buffer_on_cpu": True}, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda total=total: (0, int(total)))
        buffer = ppg_procgen.make_buffer(Args(**flags), obs=obs, targets=targets)
        assert buffer["obs"] == ((256, 32 * 64, 64, 64, 3), torch.uint8, expected)
        assert buffer["targets"] == ((256, 32 * 64), torch.float32, expected)
        assert f"6.4 GB on {expected}" in capsys.readouterr().out
    assert ppg_procgen.make_buffer(Args(e_auxiliary=0), obs=obs, targets=targets) == {}
