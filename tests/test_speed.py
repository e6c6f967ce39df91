"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs. What is marked
gpu needs one (pytest -m gpu); the same tests stand in for it on a CPU as far as they can."""

import contextlib
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import read_rows, resume, same
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from ppg_procgen import Agent, CudaGraph

COMPILER = {  # as in train() on a GPU; on a CPU what needs no C++ compiler
    "cuda": {"options": {"force_layout_optimization": True}},
    "cpu": {"backend": "aot_eager"},
}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """A device in full float32 precision; on a GPU not the default stream, on which nothing can be recorded."""
    torch._dynamo.reset()
    if request.param != "cuda":
        yield torch.device(request.param)
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
    torch.set_float32_matmul_precision("highest")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield torch.device("cuda")
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[0], before[2]
    torch.set_float32_matmul_precision(before[1])


def build(device, arch, phase, fast, dtype="float32"):
    """The networks and an update of a phase, the way train() puts them together: called directly in torch's default
    layout, or in channels_last, compiled, and on a GPU as a CUDA graph."""
    torch.manual_seed(0)
    agent = network = Agent(arch).to(device, memory_format=torch.channels_last if fast else torch.preserve_format)
    if fast:
        for module in agent.modules():
            if isinstance(module, ppg_procgen.ImpalaCNN):
                module.compile(fullgraph=True, dynamic=False, **COMPILER[device.type])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False)

    def forward(obs, **which):
        with autocast:
            return ppg_procgen.Outputs(
                *(x if x is None else x.to(torch.get_default_dtype()) for x in network(obs, **which))
            )

    args, lr, on_gpu = ppg_procgen.Args(cuda=False), torch.tensor(5e-4, device=device), device.type == "cuda"
    optimizer = torch.optim.Adam(agent.parameters(), lr, eps=1e-8, fused=True, capturable=on_gpu)
    loss_fn = partial(ppg_procgen.auxiliary_phase_loss, forward, args)
    if phase == "policy":
        loss_fn = partial(ppg_procgen.policy_phase_loss, forward, args)
    update = partial(
        ppg_procgen.update, optimizer, list(agent.parameters()), loss_fn, 1, 5.0 if phase == "policy" else 0.0
    )
    return agent, forward, CudaGraph(update) if fast and on_gpu else update


def make_minibatches(device, forward, phase, number, size=6):
    """Minibatches drawn from a batch of four times their size, under the policy of forward."""
    generator = torch.Generator().manual_seed(1)
    obs = torch.randint(0, 256, (4 * size, 64, 64, 3), dtype=torch.uint8, generator=generator)
    values, returns, advantages = torch.randn(3, 4 * size, generator=generator).to(device)
    actions = torch.randint(0, 15, (4 * size,), generator=generator).to(device)
    with torch.no_grad():
        old_logprobs = torch.cat([forward(part.to(device)).logits for part in obs.split(size)]).log_softmax(-1)
    batch = {"obs": obs.to(device), "returns": returns}
    if phase == "policy":
        batch |= {"logprobs": old_logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)}
        batch |= {"actions": actions, "values": values, "advantages": advantages}
    else:
        batch |= {"old_logprobs": old_logprobs}
    for _ in range(number):
        inds = torch.randperm(4 * size, generator=generator)[:size].to(device)
        yield {name: x[inds] for name, x in batch.items()}


def losses(device, arch, phase, fast, dtype="float32", number=20):
    """By name, one number for each of 20 updates."""
    _, forward, update = build(device, arch, phase, fast, dtype)
    updates = [update(**minibatch) for minibatch in make_minibatches(device, forward, phase, number)]
    return {name: torch.stack([stats[name] for stats in updates]).cpu() for name in updates[0]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("phase", ["policy", "auxiliary"])
def test_fast_and_plain_path_agree_over_20_updates(device, arch, phase):
    """On a CPU in float64: Adam makes 1 % of float32's rounding within 20 updates."""
    try:
        torch.set_default_dtype(torch.float64 if device.type == "cpu" else torch.float32)
        plain, fast = (losses(device, arch, phase, fast) for fast in (False, True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(plain) >= 5 and plain["weight_norm"].unique().numel() == 20  # it learns, so that errors would add up
    if device.type == "cpu":
        return torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
    for name in plain:  # another convolution algorithm alone moves the second update by hundreds of times its rounding
        torch.testing.assert_close(fast[name][0], plain[name][0], rtol=1e-4, atol=1e-4)
        tolerance = 0.1 if name == "grad_norm" else 1e-2
        torch.testing.assert_close(fast[name], plain[name], rtol=tolerance, atol=tolerance)


def test_a_policy_update_leaves_the_auxiliary_head_alone(device):
    """Compiled, an unused output would get gradients of zero, and a shared Adam's momentum would move the head."""
    agent, forward, update = build(device, "dual", "policy", fast=True)
    before = agent.aux_value_head.weight.clone()
    for minibatch in make_minibatches(device, forward, "policy", 2):
        update(**minibatch)
        assert agent.aux_value_head.weight.grad is None and torch.equal(agent.aux_value_head.weight, before)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_minibatch_has_the_ratio_1(device, dtype):
    """Other batch sizes use other kernels, and an update is compiled apart from the rollout: actions are drawn for a
    few observations at a time, under no_grad, and seen again in a minibatch."""
    _, forward, _ = build(device, "dual", "policy", fast=True, dtype=dtype)
    obs = torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8).to(device)
    with torch.no_grad():
        samples = [ppg_procgen.sample_action(forward(part, value=False).logits) for part in obs.split(4)]
    actions, old_logprobs = (torch.cat(x) for x in zip(*samples, strict=True))
    logprobs = forward(obs).logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    assert ((logprobs - old_logprobs).exp() - 1).abs().max() < (1e-2 if dtype == "bfloat16" else 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Layout


@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_convolutions_see_channels_last_only(device, arch, dtype):
    agent, seen = Agent(arch).to(device, memory_format=torch.channels_last), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if (name := func.overloadpacket.__name__) in ("convolution", "convolution_backward"):
                tensors = [x for x in [*args, *(result if isinstance(result, tuple) else [result])] if x is not None]
                images = [x for x in tensors if isinstance(x, torch.Tensor) and x.dim() == 4]
                # contiguous in both senses is what has one channel or one pixel
                last = [x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() for x in images]
                seen.append((name, all(last), len(last)))
            return result

    obs = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16", cache_enabled=False), Watch():
        sum(x.float().square().mean() for x in agent(obs, aux=True)).backward()
    number = 15 * (2 if arch == "dual" else 1)
    for name, fewest in (("convolution", 3), ("convolution_backward", 4)):  # inputs, weights, outputs, gradients
        found = [(holds, count) for found_name, holds, count in seen if found_name == name]
        assert len(found) == number and all(holds and count >= fewest for holds, count in found), name


def test_gradients_lie_in_memory_as_the_weights_do(device):
    """Which fused Adam insists upon on a GPU, and takes for granted on a CPU."""
    agent, forward, _ = build(device, "dual", "policy", fast=True)
    obs = torch.zeros((4, 64, 64, 3), dtype=torch.uint8, device=device)
    sum(x.square().mean() for x in forward(obs, aux=True)).backward()
    assert all(x.stride() == x.grad.stride() for x in agent.parameters())
    assert any(x.is_contiguous(memory_format=torch.channels_last) for x in agent.parameters() if x.dim() == 4)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing waits for the device


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
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed(device):
    x = torch.ones(3, device=device)
    for wait in (
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x + 1),
    ):
        with pytest.raises((AssertionError, RuntimeError)), no_sync(device):
            wait(x)


@pytest.mark.parametrize("device", ["cpu", "meta", GPU], indirect=True)
@pytest.mark.parametrize("arch", ["dual", "detach"])
def test_inner_loops_do_not_wait(device, arch):
    """On a GPU with graphs, buffer in pinned memory. A tensor on meta has no values at all that one could wait for."""
    N, T, pinned = 3, 4, device.type == "cuda"
    if device.type == "meta":
        agent = Agent(arch).to(device)
        optimizer, args = torch.optim.SGD(agent.parameters(), 0.1), ppg_procgen.Args(cuda=False)
        loss_fns = {"policy": partial(ppg_procgen.policy_phase_loss, agent, args)}
        loss_fns["auxiliary"] = partial(ppg_procgen.auxiliary_phase_loss, agent, args)
        update = partial(ppg_procgen.update, optimizer, list(agent.parameters()))
        updates = {phase: partial(update, fn, 2, 0.5) for phase, fn in loss_fns.items()}
        forward = agent
    else:
        updates = {
            phase: build(device, arch, phase, fast=device.type == "cuda")[2] for phase in ("policy", "auxiliary")
        }
        _, forward, _ = build(device, arch, "policy", fast=device.type == "cuda")

    @torch.no_grad()
    def act(obs):
        outputs = forward(obs, value=arch != "dual")
        return dict(zip(("actions", "logprobs"), ppg_procgen.sample_action(outputs.logits), strict=True))

    act = CudaGraph(act) if device.type == "cuda" else act
    buffer = {"obs": torch.zeros((2 * N, T, 64, 64, 3), dtype=torch.uint8, pin_memory=pinned)}
    buffer |= {"returns": torch.zeros((2 * N, T), device=device)}
    buffer |= {"old_logprobs": torch.zeros((2 * N, T, 15), device=device)}
    batch = {"obs": torch.zeros((T * N, 64, 64, 3), dtype=torch.uint8, device=device)}
    batch |= {name: torch.zeros(T * N, device=device) for name in ("logprobs", "advantages", "returns", "values")}
    batch["actions"] = torch.zeros(T * N, dtype=torch.int64, device=device)
    b_inds = torch.arange(T * N, device=device).view(2, -1)

    def loops():
        for t in range(T):
            act(obs=batch["obs"][t * N : (t + 1) * N])
        for mb_inds in b_inds:
            updates["policy"](**{name: x[mb_inds] for name, x in batch.items()})
        for mb_inds in [[0, 5], [3, 1]]:
            mb = {name: [x[i].to(device, non_blocking=True) for i in mb_inds] for name, x in buffer.items()}
            updates["auxiliary"](**{name: torch.cat(rollouts) for name, rollouts in mb.items()})

    for _ in range(2 if device.type == "cuda" else 0):  # compile and record
        loops()
    with no_sync(device):
        loops()


def test_training_itself_does_not_wait_and_is_in_channels_last(run, monkeypatch, script):
    calls = set()

    def watch(name):
        original = getattr(script, name)

        def watched(*args, **kwargs):
            calls.add(name)
            with NoSync():
                result = original(*args, **kwargs)
            if name == "update":
                params = args[1]
                assert all(x.is_contiguous(memory_format=torch.channels_last) for x in params if x.dim() == 4)
                assert all(x.grad is None or x.stride() == x.grad.stride() for x in params)
            return result

        monkeypatch.setattr(script, name, watched)

    names = {"sample_action", "update"}
    for name in names:
        watch(name)
    run(script, small=False, num_envs=2, num_steps=8, total_timesteps=32)
    assert calls == names


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs


def test_cuda_graph_calls_three_times_records_once_and_replays(monkeypatch):
    """With a stand-in for what torch does on a GPU: while it records nothing is computed, and a replay reads and writes
    where the recording read and wrote."""
    stream, recording, events = object(), False, []

    def compute(x, y):
        return {"sum": x + y, "product": (x * y).sum()}

    def function(x, y):
        events.append("recorded" if recording else "called")
        return {name: z * math.nan for name, z in compute(x, y).items()} if recording else compute(x, y)

    class Graph:
        def replay(self):
            assert self is graphed.graph and not recording
            events.append("replayed")
            for name, x in compute(**graphed.inputs).items():
                graphed.outputs[name].copy_(x)

    @contextlib.contextmanager
    def graph(cuda_graph, stream, capture_error_mode):
        nonlocal recording
        assert isinstance(cuda_graph, Graph) and stream is torch.cuda.current_stream()
        assert capture_error_mode == "thread_local"
        recording = True
        yield
        recording = False

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    graphed, results = CudaGraph(function), []
    for k in range(1, 8):
        x, y = torch.full((2, 3), float(k)), torch.arange(3.0)
        results.append(graphed(x=x, y=y))
        assert torch.equal(x, torch.full((2, 3), float(k))) and torch.equal(y, torch.arange(3.0))
        if k >= 4:  # the caller's tensors may be gone by the next call
            mine = {tensor.untyped_storage().data_ptr() for tensor in graphed.inputs.values()}
            assert not mine & {x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()}
    assert events == ["called"] * 3 + ["recorded"] + ["replayed"] * 4
    for k, result in enumerate(results, 1):  # none has been overwritten by a later call
        assert result.keys() == {"sum", "product"}
        assert torch.equal(result["sum"], torch.arange(3.0).expand(2, 3) + k) and result["product"] == 2 * 3 * k


@pytest.mark.gpu
def test_cuda_graph_draws_new_numbers_at_every_replay():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")

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
    for result in fast:
        expected = logits.log_softmax(-1).gather(-1, result["actions"].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(result["logprobs"], expected)
    # the graph goes on in the generator's sequence: switching it on does not change a run
    assert all(torch.equal(a["actions"], b["actions"]) for a, b in zip(plain, fast, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs

ON_GPU = {"cuda": True, "tf32": False}
SETTINGS = {"ppg": (ppg_procgen, {"aux_device": "cuda"}), "pinned": (ppg_procgen, {"aux_device": "cpu"})}
SETTINGS |= {"detach": (ppg_procgen, {"arch": "detach", "aux_device": "cuda"}), "ppo": (ppo_procgen, {})}


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch._dynamo.reset()
    yield
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_stream(torch.cuda.default_stream())


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


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_a_choice(script, monkeypatch, tf32):
    for module, name in ((torch.cuda, "set_device"), (torch.cuda, "set_stream"), (torch.cuda, "Stream")):
        monkeypatch.setattr(module, name, lambda *_: None)
    precision = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precision.append)
    args = SimpleNamespace(tf32=tf32, compile=False, cuda_graphs=False, aux_dtype="float32")
    with torch.backends.cudnn.flags():  # restores them
        script.speed_up(SimpleNamespace(to=lambda *_, **__: None), args, torch.device("cuda"))
        assert torch.backends.cudnn.allow_tf32 == tf32 and precision == ["high" if tf32 else "highest"]


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_combination_of_speedups_trains_the_same(run, gpu, setting):
    script, flags = SETTINGS[setting]
    plain = run(script, small=False, **ON_GPU, **flags, compile=False, cuda_graphs=False)
    combinations = [(False, True)] + [(True, True)] * (setting in ("ppg", "ppo"))  # a compilation takes a minute
    for compiled, graphs in combinations:
        torch._dynamo.reset()
        agree = run(script, small=False, **ON_GPU, **flags, compile=compiled, cuda_graphs=graphs)
        check_agreement(plain, agree)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_resumed_on_a_gpu(run, gpu, monkeypatch, setting):
    """At iteration 2: one whose checkpoint is of a GPU, and one that began where there was none."""
    script, flags = SETTINGS[setting]
    flags = ON_GPU | flags | {"compile": False} | ({"checkpoint_interval": 2} if script is ppo_procgen else {})
    whole = run(script, small=False, **flags)
    half = run(script, small=False, **flags, total_timesteps=128)
    resume(script, half, "--total-timesteps", 256, small=False)
    check_agreement(whole, half)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        anywhere = flags | ({"aux_device": "auto"} if "aux_device" in flags else {})
        moved = run(script, small=False, **anywhere, total_timesteps=128)
    resume(script, moved, "--total-timesteps", 512, small=False)  # its random numbers are others
    assert len(read_rows(moved)) == 8


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_as_many_variants_of_the_network_are_compiled_as_there_are(run, gpu):
    """12 of them, more than torch.compile lets pass unasked: phases, precisions, heads, uneven parts of minibatches."""
    uneven = {"e_value": 2, "num_grad_accum": 3, "num_aux_grad_accum": 3, "aux_dtype": "bfloat16"}
    run(small=False, **ON_GPU, **uneven)


def test_a_checkpoint_moves_between_gpu_and_cpu(run, trained, script):
    """Adam loads all it was built with, so capturable too: without it, one from a CPU cannot be recorded on a GPU. The
    other way round it can be seen on a CPU: a run on a GPU leaves it True."""
    interval = {"checkpoint_interval": 2} if script is ppo_procgen else {}
    whole, half = trained(script, **interval), run(script, **interval, total_timesteps=128)

    def groups():
        checkpoint = script.load_checkpoint(half / "checkpoint.pt")
        return checkpoint, [x["param_groups"][0] for name, x in checkpoint.items() if "optimizer" in name]

    checkpoint, param_groups = groups()
    for group in param_groups:
        group["capturable"] = True
    script.save_atomically(half / "checkpoint.pt", checkpoint)
    resume(script, half, "--total-timesteps", 256)
    assert same(whole, half)
    assert [group["capturable"] for group in groups()[1]] == [False] * len(param_groups)


def test_a_full_memory_ends_the_run_with_advice(run, monkeypatch, capsys, script):
    def update(*args, **minibatch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 1 GiB.")

    monkeypatch.setattr(script, "update", update)
    with pytest.raises(SystemExit) as error:
        run(script)
    assert error.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "--num-grad-accum" in line]
    assert line.startswith("stopped: ") and "memory" in line and ("--aux" in line) == (script is ppg_procgen)
    assert "Traceback" not in "".join(lines) and sum(line.startswith("stopped") for line in lines) == 1


@pytest.mark.parametrize("flags, expected", [("fma avx512_bf16 amx", "bfloat16"), ("fma avx512f avx512bw", "float32")])
def test_auxiliary_precision_by_processor(monkeypatch, flags, expected):
    read = Path.read_text
    replaced = {Path("/proc/cpuinfo"): f"flags : {flags}\n"}
    monkeypatch.setattr(Path, "read_text", lambda path, *args: replaced.get(path) or read(path, *args))
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert ppg_procgen.choose_auto(ppg_procgen.Args(cuda=False))["aux_dtype"] == expected
    assert ppg_procgen.choose_auto(ppg_procgen.Args(cuda=False, aux_dtype="float32"))["aux_dtype"] == "float32"
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert ppg_procgen.choose_auto(ppg_procgen.Args(cuda=False))["aux_dtype"] == "float32"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_auxiliary_precision_of_this_processor():
    expected = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    assert ppg_procgen.choose_auto(ppg_procgen.Args(cuda=False))["aux_dtype"] == expected


@pytest.mark.gpu
def test_auxiliary_precision_of_a_gpu(gpu):
    fast = torch.cuda.get_device_capability() >= (8, 0)
    assert ppg_procgen.choose_auto(ppg_procgen.Args())["aux_dtype"] == ("bfloat16" if fast else "float32")
