"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs. What is marked
gpu needs one (pytest -m gpu); the same tests stand in for it on a CPU as far as they can."""

import contextlib
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import interrupt, make_args, read_rows, resume, same
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from ppg_procgen import Agent, Args, CudaGraph

COMPILER = {  # as speed_up does on a GPU; on a CPU what needs no C++ compiler
    "cuda": {"options": {"force_layout_optimization": True}},
    "cpu": {"backend": "aot_eager"},
}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    with torch.backends.cudnn.flags(benchmark=True, allow_tf32=False):  # restores them, as runs change them
        torch.set_float32_matmul_precision("highest")
        yield
    torch.set_float32_matmul_precision(precision)
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """A device in full float32 precision; on a GPU not the default stream, which cannot be captured."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
        torch.cuda.set_stream(torch.cuda.Stream())
    torch._dynamo.reset()
    return torch.device(request.param)


def build(device, arch, phase, fast, dtype="float32"):
    """The agent and a phase's update, as train puts them together: plain, or in channels_last, compiled, graphed."""
    torch.manual_seed(0)
    agent = Agent(arch).to(device, memory_format=torch.channels_last if fast else torch.preserve_format)
    if fast:
        for module in agent.modules():
            if isinstance(module, ppg_procgen.ImpalaCNN):
                module.compile(fullgraph=True, dynamic=False, **COMPILER[device.type])
    args = Args(cuda=False, aux_dtype=dtype, max_grad_norm=5.0 if phase == "policy" else 0.0)
    lr = torch.tensor(5e-4, device=device)
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=lr.is_cuda)
    loss_fn = ppg_procgen.policy_phase_loss if phase == "policy" else ppg_procgen.auxiliary_phase_loss
    update = partial(ppg_procgen.update, agent, args, optimizer, loss_fn)
    return agent, CudaGraph(update) if fast and lr.is_cuda else update


def make_minibatches(device, agent, phase, number, size=6):
    """Minibatches drawn from a batch of four times their size, under the agent's policy."""
    generator = torch.Generator().manual_seed(1)
    obs = torch.randint(0, 256, (4 * size, 64, 64, 3), dtype=torch.uint8, generator=generator).to(device)
    old_values, returns, advantages = torch.randn(3, 4 * size, generator=generator).to(device)
    actions = torch.randint(0, 15, (4 * size,), generator=generator).to(device)
    with torch.no_grad():
        old_all_logprobs = torch.cat([agent(part).logits for part in obs.split(size)]).log_softmax(-1)
    batch = {"obs": obs, "returns": returns, "old_all_logprobs": old_all_logprobs}
    if phase == "policy":
        old_logprobs = batch.pop("old_all_logprobs").gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        batch.update(old_logprobs=old_logprobs, actions=actions, advantages=advantages, old_values=old_values)
    for _ in range(number):
        inds = torch.randperm(4 * size, generator=generator)[:size].to(device)
        yield {name: x[inds] for name, x in batch.items()}


def losses(device, arch, phase, fast, dtype="float32"):
    """By name, one number for each of 20 updates."""
    agent, update = build(device, arch, phase, fast, dtype)
    updates = [update(**minibatch) for minibatch in make_minibatches(device, agent, phase, 20)]
    return {name: torch.stack([stats[name] for stats in updates]).cpu() for name in updates[0]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("phase", ["policy", "auxiliary"])
def test_fast_and_plain_path_agree_over_20_updates(device, monkeypatch, arch, phase):
    """On a CPU in float64: Adam makes 1 % of float32's rounding within 20 updates."""
    try:
        if device.type == "cpu":
            monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
            torch.set_default_dtype(torch.float64)
        plain = losses(device, arch, phase, fast=False)
        fast = losses(device, arch, phase, fast=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(plain) >= 4 and plain["grad_norm"].unique().numel() == 20  # it learns, so that errors would add up
    if device.type == "cpu":
        return torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    for name in plain:  # another convolution algorithm alone moves the second update by hundreds of times its rounding
        torch.testing.assert_close(fast[name][0], plain[name][0], rtol=1e-4, atol=1e-4)
        tolerance = 0.1 if name == "grad_norm" else 1e-2
        torch.testing.assert_close(fast[name], plain[name], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dual", "detach"])
def test_auxiliary_phase_in_bfloat16_stays_close(device, arch):
    """bfloat16 keeps 8 bits. Without its rounding the paths agree to 1e-5, so what is left is its rounding."""
    plain = losses(device, arch, "auxiliary", fast=False)
    fast = losses(device, arch, "auxiliary", fast=True, dtype="bfloat16")
    for name in ("aux_value_loss", "real_value_loss"):
        torch.testing.assert_close(fast[name][:5], plain[name][:5], rtol=0.02, atol=2e-3)
        torch.testing.assert_close(fast[name], plain[name], rtol=0.1, atol=5e-3)
        assert not torch.equal(fast[name], plain[name])  # it was bfloat16
    torch.testing.assert_close(fast["kl_loss"], plain["kl_loss"], rtol=0.1, atol=5e-3)


def test_a_compiled_policy_update_leaves_the_auxiliary_head_alone(device):
    """An unused output could get gradients of zero, and a shared Adam's momentum would move the head."""
    agent, update = build(device, "dual", "policy", fast=True)
    before = agent.aux_value_head.weight.clone()
    for minibatch in make_minibatches(device, agent, "policy", 2):
        update(**minibatch)
        assert agent.aux_value_head.weight.grad is None and torch.equal(agent.aux_value_head.weight, before)
        # fused Adam refuses other layouts on a GPU, and takes the weights' for granted on a CPU
        assert all(x.grad is None or x.stride() == x.grad.stride() for x in agent.parameters())


def test_the_first_minibatch_has_the_ratio_1(device):
    """Actions are drawn for a few observations at a time, under no_grad, and seen again in a compiled update."""
    agent, _ = build(device, "dual", "policy", fast=True)
    obs = torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8).to(device)
    with torch.no_grad():
        samples = [ppg_procgen.sample_action(agent(part, value=False).logits) for part in obs.split(4)]
    actions, old_logprobs = (torch.cat(x) for x in zip(*samples, strict=True))
    logprobs = agent(obs).logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    assert ((logprobs - old_logprobs).exp() - 1).abs().max() < 1e-5


@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_see_channels_last_only(device, arch, dtype):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            name = func.overloadpacket.__name__
            if name in ("convolution", "convolution_backward"):
                tensors = [*args, *(result if isinstance(result, tuple) else [result])]
                images = [x for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 4]
                # contiguous in both senses is what has one channel or one pixel
                last = [x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in images]
                seen.append((name, all(last), len(last)))
            return result

    seen = []
    agent = Agent(arch).to(device, memory_format=torch.channels_last)
    obs = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, device=device)
    with Watch():
        outputs = ppg_procgen.aux_forward(agent, Args(cuda=False, aux_dtype=dtype), obs, aux=True)
        sum(x.square().mean() for x in outputs).backward()
    number = 15 * (2 if arch == "dual" else 1)
    for name, fewest in (("convolution", 3), ("convolution_backward", 4)):  # inputs, weights, outputs, gradients
        found = [(holds, count) for found_name, holds, count in seen if found_name == name]
        assert len(found) == number and all(holds and count >= fewest for holds, count in found), name


# ---- nothing waits for the device


class NoSync(TorchDispatchMode):
    """On a CPU: fail where a program on a GPU would wait for a result."""

    WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique2", "_unique2"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])
        if name in self.WAITS or masked:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def no_sync(device):
    if device.type != "cuda":
        with NoSync():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed(device):
    waits = [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.equal(x, x + 1)]
    for wait in waits:
        with pytest.raises((AssertionError, RuntimeError)), no_sync(device):
            wait(torch.ones(3, device=device))


def test_updates_and_actions_do_not_wait_and_gradients_lie_as_the_weights_do(run, monkeypatch, device, script):
    def watch(name):
        original = getattr(script, name)

        def watched(*args, **kwargs):
            calls.add(name)
            with no_sync(device):
                result = original(*args, **kwargs)
            if name == "update":
                params = list(args[0].parameters())
                assert all(x.is_contiguous(memory_format=torch.channels_last) for x in params if x.dim() == 4)
                assert all(x.grad is None or x.stride() == x.grad.stride() for x in params)
            return result

        monkeypatch.setattr(script, name, watched)

    calls = set()
    for name in ("sample_action", "update"):
        watch(name)
    run(script, small=False, num_steps=8, total_timesteps=64, cuda=device.type == "cuda", compile=False)
    assert calls == {"sample_action", "update"}


# ---- CUDA graphs


def test_cuda_graph_calls_three_times_records_once_and_replays(monkeypatch):
    """With a stand-in for what torch does on a GPU: while it records nothing is computed, and a replay reads and writes
    where the recording read and wrote."""
    recording = False
    events = []

    def compute(x, y):
        return {"sum": x + y, "product": (x * y).sum()}

    def function(x, y):
        events.append("recorded" if recording else "called")
        return {name: z * math.nan for name, z in compute(x, y).items()} if recording else compute(x, y)

    class Graph:
        def replay(self):
            events.append("replayed")
            for name, x in compute(**graphed.inputs).items():
                graphed.outputs[name].copy_(x)

    @contextlib.contextmanager
    def graph(cuda_graph, stream, capture_error_mode):
        nonlocal recording
        assert stream == "the stream" and capture_error_mode == "thread_local"
        recording = True
        yield
        recording = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    graphed = CudaGraph(function)
    results = []
    for k in range(1, 8):
        x, y = torch.full((2, 3), float(k)), torch.arange(3.0)
        results.append(graphed(x=x, y=y))
        assert torch.equal(x, torch.full((2, 3), float(k))) and torch.equal(y, torch.arange(3.0))
        x.fill_(math.nan)  # the caller's tensors may be gone by the next call
    assert events == ["called"] * 3 + ["recorded"] + ["replayed"] * 4
    for k, result in enumerate(results, 1):  # none has been overwritten by a later call
        assert result.keys() == {"sum", "product"}
        if k >= 4:
            assert torch.equal(result["sum"], torch.arange(3.0).expand(2, 3) + k) and result["product"] == 2 * 3 * k


@pytest.mark.gpu
def test_cuda_graph_draws_new_numbers_at_every_replay(gpu):
    def function(logits):
        counter.add_(1)
        actions, logprobs = ppg_procgen.sample_action(logits)
        return {"actions": actions, "logprobs": logprobs, "count": counter.clone()}

    with torch.cuda.stream(torch.cuda.Stream()):
        counter, logits = torch.zeros((), device="cuda"), torch.randn((64, 15), device="cuda")
        torch.cuda.manual_seed(5)
        plain = [function(logits) for _ in range(10)]
        counter.zero_()
        torch.cuda.manual_seed(5)
        graphed = CudaGraph(function)
        fast = [graphed(logits=logits) for _ in range(10)]
        torch.cuda.synchronize()
    assert [int(result["count"]) for result in fast] == list(range(1, 11))
    assert len({tuple(result["actions"].tolist()) for result in fast}) == 10
    # the graph goes on in the generator's sequence: switching it on does not change a run
    for expected, result in zip(plain, fast, strict=True):
        assert torch.equal(result["actions"], expected["actions"])
        torch.testing.assert_close(result["logprobs"], expected["logprobs"])


# ---- whole runs

ON_GPU = {"cuda": True, "tf32": False}
SETTINGS = {"dual": (ppg_procgen, {"aux_device": "cuda"}), "file": (ppg_procgen, {"aux_device": "file"})}
SETTINGS |= {"detach": (ppg_procgen, {"arch": "detach", "aux_device": "cuda"}), "ppo": (ppo_procgen, {})}
gpu_run = [pytest.mark.gpu, pytest.mark.timeout(1800)]


def check_agreement(run_dir: Path, other: Path) -> None:
    """Of the first iteration, whose actions come from the same weights: later ones play other episodes."""
    (row, *rest), (other_row, *other_rest) = read_rows(run_dir), read_rows(other)
    assert len(rest) == len(other_rest) == 3
    names = [name for name in row if name.startswith("losses/") and row[name]]
    assert len(names) >= 8
    for name in names:
        tolerance = 0.1 if name.endswith("grad_norm") else 1e-2
        assert float(other_row[name]) == pytest.approx(float(row[name]), rel=tolerance, abs=tolerance), name
    assert row["charts/episodic_return"] == other_row["charts/episodic_return"]


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_combination_of_speedups_trains_the_same(run, gpu, setting):
    script, flags = SETTINGS[setting]
    plain = run(script, small=False, **ON_GPU, **flags, compile=False, cuda_graphs=False)
    check_agreement(plain, run(script, small=False, **ON_GPU, **flags, compile=False))
    if setting in ("dual", "ppo"):  # a compilation takes a minute
        check_agreement(plain, run(script, small=False, **ON_GPU, **flags))


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("begins_on_gpu", [True, False])
def test_a_run_resumed_on_a_gpu(run, gpu, tmp_path, monkeypatch, setting, begins_on_gpu):
    """At iteration 2 of 4: one whose checkpoint is of a GPU, and one that began where there was none."""
    script, flags = SETTINGS[setting]
    flags = ON_GPU | flags | {"compile": False, "checkpoint_interval": 2}
    with monkeypatch.context() as patch:
        if not begins_on_gpu:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            flags |= {"aux_device": "file"} if script is ppg_procgen else {}
        run_dir = interrupt(script, make_args(script, tmp_path / "stopped", **flags), 2 * 16 + 5, small=False)
    resume(script, run_dir, small=False)
    assert len(read_rows(run_dir)) == 4
    if begins_on_gpu:
        check_agreement(run(script, small=False, **flags), run_dir)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_as_many_variants_of_the_network_are_compiled_as_there_are(run, gpu):
    """12 of them, more than torch.compile lets pass unasked: phases, precisions, heads, uneven parts of minibatches."""
    run(small=False, **ON_GPU, e_value=2, chunk_size=13, aux_dtype="bfloat16")


def test_a_checkpoint_moves_between_gpu_and_cpu(tmp_path, trained, script):
    """Adam loads all it was built with, so capturable too: without it, one from a CPU cannot be captured on a GPU. The
    other way round it can be seen on a CPU: a run on a GPU leaves it True."""

    def load():
        checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        return checkpoint, [x["param_groups"][0] for name, x in checkpoint.items() if "optimizer" in name]

    args = make_args(script, tmp_path / "stopped", checkpoint_interval=2)
    run_dir = interrupt(script, args, 2 * 16 + 5)
    checkpoint, groups = load()
    for group in groups:
        group["capturable"] = True
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    resume(script, run_dir)
    assert same(trained(script, checkpoint_interval=2), run_dir)
    assert not any(group["capturable"] for group in load()[1])


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_a_choice(script, monkeypatch, tf32):
    for module, name in ((torch.cuda, "set_device"), (torch.cuda, "set_stream"), (torch.cuda, "Stream")):
        monkeypatch.setattr(module, name, lambda *_: None)
    precision = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    args = SimpleNamespace(tf32=tf32, compile=False, cuda_graphs=False)
    with torch.backends.cudnn.flags():  # restores them
        script.speed_up(torch.nn.Identity().cpu(), args, torch.device("cuda"))
        assert torch.backends.cudnn.allow_tf32 == tf32 and precision == ["high" if tf32 else "highest"]


@pytest.mark.parametrize("flags, expected", [("fma avx512_bf16 amx", "bfloat16"), ("fma avx512f avx512bw", "float32")])
def test_auxiliary_precision_by_processor(monkeypatch, flags, expected):
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
    assert Args(cuda=False).aux_dtype == expected
    assert Args(cuda=False, aux_dtype="float32").aux_dtype == "float32"


@pytest.mark.gpu
def test_auxiliary_precision_of_a_gpu(gpu):
    assert Args().aux_dtype == ("bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float32")
