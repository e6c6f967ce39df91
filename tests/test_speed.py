"""The fast path against the plain one: the same losses, layouts, no waiting for the device, CUDA graphs."""

import contextlib
import copy
import gc
import inspect
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
import worker
from conftest import ROOT, TORCHRUN, interrupt, make_agent, make_args, parse, read_rows, resume, train
from torch.utils._python_dispatch import TorchDispatchMode

import ppg_procgen
import ppo_procgen
from benchmark import throughput
from ppg_procgen import Args

LOSSES = (ppg_procgen.policy_loss, ppg_procgen.value_loss)
AUX_LOSSES = (ppg_procgen.joint_loss, ppg_procgen.value_loss)


@pytest.fixture
def gpu():
    """In full float32 precision; what set_up_device changes in this process is restored."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch._dynamo.reset()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        yield torch.device("cuda:0")  # set_device needs the index
    torch.cuda.set_stream(torch.cuda.default_stream())


def draw_minibatch(agent, device, M) -> dict[str, torch.Tensor]:
    obs = torch.randint(0, 256, (M, 64, 64, 3), dtype=torch.uint8).to(device)
    actions = torch.randint(0, 15, (M,)).to(device)
    targets, advantages = torch.randn(2, M).to(device)
    with torch.no_grad():  # fewer at a time, as in a rollout
        old_logits = torch.cat([agent(part).pi.logits for part in obs.split(2)])
    logprobs = ppg_procgen.Policy(old_logits).log_prob(actions)
    minibatch = {"obs": obs, "actions": actions, "logprobs": logprobs, "advantages": advantages}
    return minibatch | {"targets": targets, "old_logits": old_logits}


@pytest.mark.gpu
@pytest.mark.parametrize("arch", ["dual", "detach"])
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_fast_and_plain_path_agree_over_20_updates(gpu, monkeypatch, arch, precision):
    """In float32, a rounding of the first weights alone moves later losses by up to 0.12; in float64, by 1e-12."""

    def losses(fast):
        """By name, one number for each of 20 updates of either phase."""
        torch.manual_seed(0)
        args = Args(arch=arch, cuda_graphs=fast, max_grad_norm=5.0)
        agent = make_agent(ppg_procgen, arch=arch)
        agent.to(gpu, memory_format=torch.channels_last if fast else torch.preserve_format)
        step = ppg_procgen.gradient_step
        if fast:
            ppg_procgen.set_up_device(args)
            ppg_procgen.compile_encoders(agent)
            step = ppg_procgen.CudaGraphs(step)
        optimizer = ppg_procgen.make_optimizer(agent, 5e-4)
        updates = []
        for _ in range(20):
            minibatch = draw_minibatch(agent, gpu, 6)
            stats = step(agent, args, optimizer, LOSSES, **minibatch)
            aux_stats = step(agent, args, optimizer, AUX_LOSSES, fast and precision == "bfloat16", **minibatch)
            updates.append(stats | {f"aux/{name}": x for name, x in aux_stats.items()})
        return {name: torch.stack([stats[name] for stats in updates]).cpu() for name in updates[0]}

    if precision == "float64":  # also where the network is compiled
        source = inspect.getsource(ppg_procgen.ImpalaCNN).replace(".float()", ".double()")
        exec(source, scope := vars(ppg_procgen).copy())
        monkeypatch.setattr(ppg_procgen, "ImpalaCNN", scope["ImpalaCNN"])
        torch.set_default_dtype(torch.float64)
    plain, fast = losses(False), losses(True)
    assert plain["grad_norm"].unique().numel() == 20 and plain["aux/kl_loss"].min() > 1e-6  # errors would add up
    assert fast["approx_kl_k2"].max() < 1e-8 and not fast["clipfrac"].any()  # updates see the rollout's policy
    updates, tolerance = {"float64": (20, 1e-7), "float32": (2, 2e-3), "bfloat16": (5, 0.1)}[precision]
    for name in ("aux/aux_value_loss", "aux/value_loss", "aux/kl_loss") if precision == "bfloat16" else plain:
        actual, expected = fast[name][:updates], plain[name][:updates]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=min(tolerance, 5e-3))
        assert precision != "bfloat16" or not torch.equal(fast[name], plain[name])


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
    "dual": (ppg_procgen, {}, {60}),
    "e_value": (ppg_procgen, {"e_value": 2}, {45, 60}),  # backward through a network each, then both
    "detach": (ppg_procgen, {"arch": "detach", "aux_dtype": "bfloat16"}, {30}),
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
    step, seen = script.gradient_step, set()
    monkeypatch.setattr(script, "gradient_step", watched)
    run(script, small=False, num_steps=8, num_envs=2, total_timesteps=32, **flags)
    assert seen == convolutions
    with pytest.raises(AssertionError, match="waits"), Watch():
        torch.ones(1).item()


def test_cuda_graphs_read_new_inputs_and_give_outputs_that_stay(monkeypatch):
    """With a stand-in, whose replay reads and writes where the captured call did."""

    class Graph:
        def replay(self):
            inputs, outputs = self.call
            outputs["sum"].copy_(inputs.sum())

    @contextlib.contextmanager
    def capture(graph, *_):
        yield
        graph.call = calls[-1]

    def function(name, *, x):
        calls.append((x, {"sum": x.sum()}))
        return calls[-1][1]

    calls = []
    for name, stand_in in {"CUDAGraph": Graph, "graph": capture, "current_stream": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs = ppg_procgen.CudaGraphs(function)
    # each other argument, shape or dtype has a graph of its own, after three plain calls
    for name, size, number in (("a", 3, int), ("b", 3, int), ("a", 4, int), ("a", 3, float)):
        calls.clear()
        inputs = [torch.full((size,), number(k)) for k in range(7)]
        sums = [graphs(name, x=x)["sum"] for x in inputs]
        assert sums == [size * k for k in range(7)] == [int(x.sum()) for x in inputs] and len(calls) == 4
    with pytest.raises(AssertionError, match="by name"):
        graphs(torch.ones(3), x=torch.ones(3))


@pytest.mark.gpu
def test_gradients_of_all_losses_agree_with_a_cpu_in_float64(gpu, monkeypatch):
    def gradients(device, dtype):
        copied = copy.deepcopy(agent).to(device, dtype, memory_format=torch.channels_last)
        batch = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in minibatch.items()}
        out = copied(batch["obs"])
        sum(loss(copied, Args(), out, batch)[0] for loss in (*LOSSES, ppg_procgen.joint_loss)).backward()
        return {name: x.grad.double().cpu() for name, x in copied.named_parameters()}

    agent = make_agent(ppg_procgen)
    minibatch = draw_minibatch(agent, "cpu", 64)
    minibatch["old_logits"] = torch.randn(64, 15)
    actual = gradients(gpu, torch.float32)
    worker.use_float64(ppg_procgen, monkeypatch.setattr)
    expected = gradients("cpu", torch.float64)
    for name, x in actual.items():
        assert (x - expected[name]).norm() < 1e-2 * expected[name].norm(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_memory_of_the_default_setting(tmp_path, monkeypatch):
    """With two auxiliary minibatches: it fits the smallest GPU that a buffer as large as the default's goes to."""

    def log(self, row, original=ppg_procgen.Run.log):
        original(self, row)
        peaks.append(torch.cuda.max_memory_reserved())

    peaks = []
    torch.cuda.empty_cache()  # what earlier tests have reserved
    torch.cuda.reset_peak_memory_stats()
    ballast = torch.empty(int(6.24e9), dtype=torch.uint8, device="cuda")  # of B, all but one iteration
    monkeypatch.setattr(ppg_procgen.Run, "log", log)
    flags = {"n_iteration": 1, "num_aux_rollouts": 4, "total_timesteps": 2 * 16384, "e_auxiliary": 1}
    train(ppg_procgen, Args(run_dir=str(tmp_path / "run"), **flags), small=False)
    assert max(peaks) < 2 * 32 * 16384 * (64 * 64 * 3 + 4) and ballast.nbytes > 6e9


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_two_ranks_on_gpus_end(tmp_path):
    flags = "--cuda-graphs --num-envs=4 --num-steps=16 --num-minibatches=2 --total-timesteps=512 --n-iteration=2"
    subprocess.run([*TORCHRUN, "ppg_procgen.py", *flags.split(), f"--run-dir={tmp_path}"], cwd=ROOT, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_ways_to_run_on_a_gpu_train_the_same(run, gpu, tmp_path, monkeypatch, setting):
    """In the first iteration: later ones play other episodes. e_value compiles the most variants of the networks."""

    def interrupted(name):
        return interrupt(script, make_args(script, tmp_path / name, **flags), 2 * 16 + 5, small=False)

    script, flags, _ = SETTINGS[setting]
    flags = flags | {"cuda": True} | ({"checkpoint_interval": 2} if script is ppo_procgen else {})
    plain = read_rows(run(script, small=False, **flags))
    names = [name for name, x in plain[0].items() if x and name.startswith(("losses/", "charts/ep"))]
    assert len(names) >= 8 and len(plain) == 4
    for run_dir in (
        run(script, small=False, **flags, cuda_graphs=True),
        resume(script, interrupted("stopped"), "--cuda-graphs", small=False),
        run(script, small=False, **flags | {"compile": True, "cuda_graphs": True, "chunk_size": 13}),
    ):
        rows = read_rows(run_dir)
        for name in names:
            tolerance = 0.1 if name.endswith("grad_norm") else 1e-2
            assert float(rows[0][name]) == pytest.approx(float(plain[0][name]), tolerance, tolerance, nan_ok=True), name
        assert len(rows) == 4
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        run_dir = interrupted("from_cpu")
    assert len(read_rows(resume(script, run_dir, small=False))) == 4


def test_a_run_of_a_gpu_continues_on_a_cpu(script, tmp_path, capsys):
    run_dir = train(script, make_args(script, tmp_path / "run"))
    record = run_dir / "args.json"
    record.write_text(record.read_text().replace('"cuda_graphs": false', '"cuda_graphs": true'))
    with pytest.raises(SystemExit):
        script.check(parse(script, "--resume", run_dir))
    assert "no GPU: see README, or --no-cuda --no-compile --no-cuda-graphs" in capsys.readouterr().err
    script.check(parse(script, "--resume", run_dir, "--no-cuda-graphs"))


def test_devices_and_what_is_compiled(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(script, "LOCAL_RANK", 1)
    args = script.Args(run_dir="run")
    assert args.device == "cuda:1" and script.Args(cuda=False).device == "cpu"
    script.check(args)
    if script is ppg_procgen:  # bfloat16 begins with compute capability 8.0
        with pytest.raises(SystemExit, match="2"):
            script.check(replace(args, aux_dtype="bfloat16"))
    agent = make_agent(script)
    script.compile_encoders(agent)
    compiled = {name for name, module in agent.named_children() if module._compiled_call_impl is not None}
    assert compiled == {name for name, _ in agent.named_children() if name.endswith("encoder")}


def test_threads_of_the_environments(monkeypatch, script):
    monkeypatch.setattr(script.sys, "version_info", (3, 12))
    monkeypatch.setattr(script, "ProcgenVectorEnv", lambda *_, num_threads, **options: num_threads)
    assert [script.make_envs(script.Args(env_threads=n), 0, 0, 0) for n in (5, 0)] == [5, 0]


def test_the_buffer_goes_to_the_host_where_it_would_fill_the_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype, device: (shape, dtype, device))
    obs, targets = torch.empty((256, 64, 64, 64, 3), dtype=torch.uint8, device="meta"), torch.empty(256, 64)
    for free, expected in ((12.5e9, "cpu"), (13.5e9, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (int(free), int(80e9)))
        buffer = ppg_procgen.make_buffer(Args(), obs=obs, targets=targets)
        assert buffer["obs"] == ((256, 32 * 64, 64, 64, 3), torch.uint8, expected)
        assert buffer["targets"] == ((256, 32 * 64), torch.float32, expected)
        assert f"6.4 GB on {expected}" in capsys.readouterr().out
    assert ppg_procgen.make_buffer(Args(e_auxiliary=0), obs=obs, targets=targets) == {}


def test_no_tensor_outlives_its_update(script, monkeypatch, run):
    """Small tensors that are kept leave gaps in a CPU's memory: a run grew by 2 MB with each update."""

    def counted(*inputs, original=script.gradient_step, **minibatch):
        gc.collect()
        alive.append(sum(type(x) is torch.Tensor for x in gc.get_objects()))
        return original(*inputs, **minibatch)

    alive, flags = [], {"n_iteration": 1, "e_auxiliary": 4} if script is ppg_procgen else {}
    monkeypatch.setattr(script, "gradient_step", counted)
    run(script, num_minibatches=8, total_timesteps=64, **flags)
    assert [len(set(alive[2:8])), len(set(alive[10:16]))] == [1, 1], alive  # after Adam made its state


def test_short_runs_and_their_speed(tmp_path):
    for name, flags in (("ppg_procgen", ["--n-iteration", "4"]), ("ppo_procgen", [])):  # copies may have any name
        script = str(shutil.copy(ROOT / f"{name}.py", tmp_path / "my copy.py"))
        short_run = throughput.short_run(f"python '{script}' --compile")
        assert short_run == ["python", script, "--total-timesteps", "131072", *flags, "--compile"]
    (tmp_path / "metrics.csv").write_text("global_step,wall_time\n100,50\n200,60\n300,70\n")  # the first warms up
    assert throughput.steps_per_second(tmp_path) == 10
