"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs. What is marked
gpu needs one (pytest -m gpu); on a CPU, the same tests show what they can."""

import contextlib
import gc
import os
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import worker
from conftest import interrupt, make_agent, make_args, read_rows, resume
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from ppg_procgen import Args

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """In full float32 precision; what set_up_device and use_float64 change in this process is restored."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch._dynamo.reset()
    gc.disable()  # an earlier run's graph, collected during a capture, would invalidate it
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        yield torch.device("cuda:0" if request.param == "cuda" else "cpu")  # set_device needs the index
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    gc.enable()
    if request.param == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream())


def losses(device, arch, fast, dtype="float32"):
    """By name, one number for each of 20 updates of either phase: plain, or as train does them."""
    torch.manual_seed(0)
    args = Args(arch=arch, cuda=False, cuda_graphs=fast, tf32=False, aux_dtype=dtype, max_grad_norm=5.0)
    args.device = str(device)
    agent = ppg_procgen.Agent(args, ppg_procgen.ProcgenVectorEnv)
    agent.to(device, memory_format=torch.channels_last if fast else torch.preserve_format)
    if fast:
        ppg_procgen.set_up_device(args)
        ppg_procgen.compile_encoders(agent, args)
    for name, module in agent.named_children():
        if fast and device.type == "cpu" and "encoder" in name:
            module.compile(fullgraph=True, dynamic=False, backend="aot_eager")  # needs no C++ compiler
    optimizer = ppg_procgen.make_optimizer(agent, 5e-4)

    updates = []
    for _ in range(20):
        obs = torch.randint(0, 256, (6, 64, 64, 3), dtype=torch.uint8).to(device)
        actions = torch.randint(0, 15, (6, 1)).to(device)
        old_values, targets, advantages = torch.randn(3, 6).to(device)
        with torch.no_grad():  # fewer at a time, as in a rollout
            pi_old = torch.cat([agent(part).logits for part in obs.split(2)])
        logprobs = pi_old.log_softmax(-1).gather(-1, actions).squeeze(1)
        batch = {"actions": actions.squeeze(1), "old_logprobs": logprobs, "advantages": advantages}
        batch.update(obs=obs, targets=targets, old_values=old_values)
        stats = ppg_procgen.gradient_step(agent, args, optimizer, ppg_procgen.policy_and_value_loss, **batch)
        batch = {"obs": obs, "targets": targets, "pi_old": pi_old}
        aux_stats = ppg_procgen.gradient_step(agent, args, optimizer, ppg_procgen.aux_loss, **batch)
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
    fast = losses(device, arch, fast=True, dtype=dtype)
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
    "dual": (ppg_procgen, {"aux_device": "cpu", "aux_dtype": "bfloat16"}, {60}),
    "e_value": (ppg_procgen, {"e_value": 2}, {30, 60}),  # a network each, then both
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
    """With a stand-in, whose replay reads and writes where the captured call did. A graph for each set of the arguments
    before the tensors; what a graph froze cannot change unseen."""

    class Graph:
        def replay(self):
            torch.add(graph.inputs["x"], 1, out=graph.outputs["sum"])

    class CudaGraph(ppg_procgen.CudaGraph):
        def __call__(self, **inputs):
            nonlocal graph
            graph = self
            return super().__call__(**inputs)

    @ppg_procgen.cuda_graph
    def function(agent, args, name, *, x):
        calls.append(name)
        return {"sum": x + 1 if len(calls) < 7 else x * 0}  # a capture computes nothing

    monkeypatch.setattr(ppg_procgen, "CudaGraph", CudaGraph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    args, calls, graph = Args(cuda=False), [], None
    function("agent", args, "on a CPU", x=torch.tensor(0))
    args.device = "cuda:0"
    inputs = [torch.tensor(k) for k in range(7)]
    for x in inputs[:2]:
        assert function("agent", args, "another", x=x)["sum"] == x + 1
    sums = [function("agent", args, "a", x=x)["sum"] for x in inputs]
    assert calls == ["on a CPU", "another", "another", *"aaaa"]
    assert [int(x) for x in inputs] == list(range(7)) and [int(x) for x in sums] == list(range(1, 8))
    args.ent_coef = 0.005
    with pytest.raises(RuntimeError, match="ent_coef changed from 0.01 to 0.005 after a CUDA graph was captured"):
        function("agent", args, "a", x=inputs[0])
    args.cuda_graphs = False
    assert function("agent", args, "a", x=inputs[0])["sum"] == 0 and calls[-1] == "a" and len(calls) == 8


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_cuda_graph_draws_new_numbers_at_every_replay(device):
    """It goes on in the generator's sequence: graphs do not change a run."""

    def draw(agent, args, logits):
        return {"actions": ppg_procgen.Policy(logits).sample()}

    torch.cuda.set_stream(torch.cuda.Stream())
    logits = torch.randn((64, 15), device=device)
    args, drawn = Args(), []
    for function in (draw, ppg_procgen.cuda_graph(draw)):
        torch.cuda.manual_seed(5)
        drawn.append([function(None, args, logits=logits)["actions"].tolist() for _ in range(10)])
    assert drawn[0] == drawn[1] and all(actions != drawn[0][0] for actions in drawn[0][1:])


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
    flags = flags | {"cuda": True, "tf32": False, "compile": False}
    if script is ppo_procgen:
        flags["checkpoint_interval"] = 2
    plain = run(script, small=False, **flags, cuda_graphs=False)
    check_agreement(plain, run(script, small=False, **flags))
    check_agreement(plain, resume(script, interrupted("stopped"), small=False))
    check_agreement(plain, run(script, small=False, **flags | {"compile": True, "chunk_size": 13}))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        run_dir = interrupted("from_cpu")
    assert len(read_rows(resume(script, run_dir, small=False))) == 4


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu(script):
    """Adam loads all it was built with, so capturable too: on a GPU, what a CPU has saved could not be captured."""
    optimizer = torch.optim.Adam([torch.zeros(1)], torch.tensor(0.5), fused=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(capturable=True, lr=torch.tensor(5.0))
    rank = {"rng": torch.get_rng_state(), "cuda_rng": torch.zeros(16, dtype=torch.uint8)}
    script.restore_checkpoint(script.Args(cuda=False), {"o": saved, "ranks": [rank]}, {"o": optimizer})
    group = optimizer.param_groups[0]
    assert not group["capturable"] and group["fused"] and torch.equal(group["lr"], torch.tensor(0.5))


@pytest.mark.parametrize("on", [True, False])
def test_tf32_and_compilation_are_choices(script, monkeypatch, on):
    for name in ("cuda.set_device", "cuda.set_stream", "cuda.Stream", "set_num_threads"):
        monkeypatch.setattr(f"torch.{name}", lambda *_, **__: None)
    precision = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    agent, args = make_agent(script), script.Args(cuda=False, tf32=on, compile=on)
    script.compile_encoders(agent, args)  # nothing on a CPU
    assert all(module._compiled_call_impl is None for module in agent.children())
    args.device = "cuda:0"
    with torch.backends.cudnn.flags(enabled=True):  # restores them
        script.set_up_device(args)
        assert torch.backends.cudnn.allow_tf32 == on and precision == ["high" if on else "highest"]
    script.compile_encoders(agent, args)
    compiled = {name for name, module in agent.named_children() if module._compiled_call_impl is not None}
    encoders = {name for name, _ in agent.named_children() if name.endswith("encoder")}
    assert compiled == (encoders if on else set())


@pytest.mark.parametrize("fast", [True, False])
def test_what_auto_chooses(monkeypatch, fast):
    chosen = attrgetter("device", "max_chunk", "aux_dtype")
    monkeypatch.setattr(Path, "read_text", lambda path: "fma avx512_bf16" if fast else "fma avx512f")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not fast)
    assert chosen(Args(cuda=False)) == ("cpu", 512, "bfloat16" if fast else "float32")
    assert chosen(Args()) == ("cuda:0", 16384, "float32" if fast else "bfloat16")
    assert chosen(Args(chunk_size=7, aux_dtype="float32")) == ("cuda:0", 7, "float32")
    monkeypatch.setattr(ppg_procgen, "LOCAL_RANK", 1)
    assert Args().device == "cuda:1"
    for cores, threads in ((2, 0), (4, 3), (16, 12), (64, 12)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        assert Args().num_env_threads == threads
        assert Args(env_threads=5).num_env_threads == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of 64 cores, 8 for each
    assert Args().num_env_threads == 6
