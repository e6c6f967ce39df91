"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs. What is marked
gpu needs one (pytest -m gpu); on a CPU, the same tests show what they can."""

import contextlib
import gc
from functools import partial
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import worker
from conftest import interrupt, make_args, read_rows, resume
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from ppg_procgen import Agent, Args, CudaGraph

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """In full float32 precision; what speed_up and use_float64 change in this process is restored."""
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
    agent = Agent(arch)
    args = Args(cuda=False, tf32=False, aux_dtype=dtype, max_grad_norm=5.0)
    graphed = ppg_procgen.speed_up(agent, args, device) if fast else lambda function: function
    agent.to(device, memory_format=torch.channels_last if fast else torch.preserve_format)
    for name, module in agent.named_children():
        if fast and device.type == "cpu" and "encoder" in name:
            module.compile(fullgraph=True, dynamic=False, backend="aot_eager")  # needs no C++ compiler
    lr = torch.tensor(5e-4, device=device)
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=lr.is_cuda)
    policy_update = graphed(partial(ppg_procgen.update, agent, args, optimizer, ppg_procgen.policy_phase_loss))
    aux_update = graphed(partial(ppg_procgen.update, agent, args, optimizer, ppg_procgen.auxiliary_phase_loss))

    updates = []
    for _ in range(20):
        obs = torch.randint(0, 256, (6, 64, 64, 3), dtype=torch.uint8).to(device)
        actions = torch.randint(0, 15, (6, 1)).to(device)
        old_values, returns, advantages = torch.randn(3, 6).to(device)
        with torch.no_grad():  # fewer at a time, as in a rollout
            all_logprobs = torch.cat([agent(part).logits for part in obs.split(2)]).log_softmax(-1)
        batch = {"actions": actions.squeeze(1), "old_logprobs": all_logprobs.gather(-1, actions).squeeze(1)}
        stats = policy_update(obs=obs, returns=returns, advantages=advantages, old_values=old_values, **batch)
        aux_stats = aux_update(obs=obs, returns=returns, old_all_logprobs=all_logprobs)
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
            if name in ("aux/aux_value_loss", "aux/real_value_loss", "aux/kl_loss"):
                torch.testing.assert_close(fast[name], plain[name], rtol=0.1, atol=5e-3)
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
    "e_value": (ppg_procgen, {"aux_device": "file", "e_value": 2}, {30, 60}),  # a network each, then both
    "detach": (ppg_procgen, {"arch": "detach"}, {30}),
    "ppo": (ppo_procgen, {}, {30}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_updates_do_not_wait_and_are_in_channels_last(run, monkeypatch, setting):
    def watched(agent, *rest, **minibatch):
        with Watch() as watch:
            result = update(agent, *rest, **minibatch)
        seen.add(watch.convolutions)
        # fused Adam refuses other layouts on a GPU, and takes the weights' for granted on a CPU
        assert all(x.grad is None or x.stride() == x.grad.stride() for x in agent.parameters())
        return result

    script, flags, convolutions = SETTINGS[setting]
    update = script.update
    seen = set()
    monkeypatch.setattr(script, "update", watched)
    run(script, small=False, num_steps=8, total_timesteps=64, **flags)
    assert seen == convolutions
    with pytest.raises(AssertionError, match="waits"), Watch():
        torch.ones(1).item()


def test_cuda_graph_reads_new_inputs_and_gives_outputs_that_stay(monkeypatch):
    """With a stand-in, whose replay reads and writes where the captured call did."""

    class Graph:
        def replay(self):
            torch.add(graphed.inputs["x"], 1, out=graphed.outputs["sum"])

    def function(x):
        calls.append(x)
        return {"sum": x + 1 if len(calls) < 4 else x * 0}  # a capture computes nothing

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    calls, graphed = [], CudaGraph(function)
    inputs = [torch.tensor(k) for k in range(7)]
    sums = [graphed(x=x)["sum"] for x in inputs]
    assert len(calls) == 4
    assert [int(x) for x in inputs] == list(range(7)) and [int(x) for x in sums] == list(range(1, 8))


@pytest.mark.parametrize("device", [GPU], indirect=True)
def test_cuda_graph_draws_new_numbers_at_every_replay(device):
    """It goes on in the generator's sequence: graphs do not change a run."""

    def draw(logits):
        return {"actions": ppg_procgen.sample_action(logits)[0]}

    torch.cuda.set_stream(torch.cuda.Stream())
    logits = torch.randn((64, 15), device=device)
    drawn = []
    for function in (draw, CudaGraph(draw)):
        torch.cuda.manual_seed(5)
        drawn.append([function(logits=logits)["actions"].tolist() for _ in range(10)])
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
    flags = flags | {"cuda": True, "tf32": False, "compile": False, "checkpoint_interval": 2}
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
def test_tf32_compilation_and_graphs_are_choices(script, monkeypatch, on):
    for name in ("cuda.set_device", "cuda.set_stream", "cuda.Stream", "set_num_threads", "nn.Module.to"):
        monkeypatch.setattr(f"torch.{name}", lambda *_, **__: None)
    precision = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    agent = torch.nn.Sequential(script.ImpalaCNN())
    args = script.Args(cuda=False, tf32=on, compile=on, cuda_graphs=on)
    with torch.backends.cudnn.flags(enabled=True):  # restores them
        graphed = script.speed_up(agent, args, torch.device("cuda"))
        assert torch.backends.cudnn.allow_tf32 == on and precision == ["high" if on else "highest"]
    assert isinstance(graphed(print), script.CudaGraph) == on
    assert (agent[0]._compiled_call_impl is not None) == on
    assert script.speed_up(agent, args, torch.device("cpu"))(print) is print


@pytest.mark.parametrize("fast", [True, False])
def test_what_auto_chooses(monkeypatch, fast):
    chosen = attrgetter("device", "chunk_size", "aux_device", "aux_dtype")
    size = 32 * 64 * 256 * 64 * 64 * 3  # of the buffer
    monkeypatch.setattr(Path, "read_text", lambda path: "fma avx512_bf16" if fast else "fma avx512f")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not fast)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size - fast, 10 * size))
    assert chosen(Args(cuda=False)) == ("cpu", 512, "file", "bfloat16" if fast else "float32")
    assert chosen(Args()) == ("cuda:0", 16384, "file" if fast else "cuda", "float32" if fast else "bfloat16")
