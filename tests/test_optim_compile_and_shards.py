"""The step functions under torch.compile, and the optimizers on tensors sharded over two ranks."""

import multiprocessing
import os
import shutil
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import HYPER, parameter, random, take
from torch._dynamo.testing import CompileCounter

from merit_lab.optim import ABLATIONS, LADDER, build, step_function

NAMES = list(ABLATIONS | LADDER)

# -- torch.compile -------------------------------------------------------------------------------------------------


def step_arguments(*shape, dtype=torch.float64, lr=0.01):
    tensors = [random(*shape, seed=i, dtype=dtype) for i in range(3)]
    hyper = HYPER | {"lr": torch.tensor(lr), "step": torch.tensor(3.0, dtype=torch.float64)}
    return (*tensors, tensors[2].square()), hyper


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name, shape",
    [(name, (5, 4)) for name in NAMES]
    + [(name, shape) for name in ("MERIT", "MERIT paper variant") for shape in ((3,), (4, 3, 2))],
    ids=str,
)
def test_step_functions_are_one_graph(name, shape):
    function = step_function(name)
    arguments, hyper = step_arguments(*shape)
    expected = function(*arguments, **hyper)
    compiled = torch.compile(function, fullgraph=True, backend="eager")(*arguments, **hyper)
    for field, a, b in zip(expected._fields, compiled, expected, strict=True):
        assert (a is b is None) or torch.equal(a, b), field


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="inductor needs a C++ compiler, and there is none here",
)
def test_inductor_computes_the_same(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)  # saves 15 s on a first run
    function = step_function("MERIT")
    arguments, hyper = step_arguments(5, 4)
    compiled = torch.compile(function, fullgraph=True)(*arguments, **hyper)
    for a, b in zip(compiled, function(*arguments, **hyper), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["AdamW", "LAMB", "MERIT"])
def test_a_new_rate_in_a_tensor_does_not_recompile(name):
    def compilations(as_rate):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(step_function(name), fullgraph=True, backend=counter)
        for lr in (0.01, 0.02, 0.03):
            arguments, hyper = step_arguments(5, 4, lr=lr)
            step = compiled(*arguments, **hyper | {"lr": as_rate(lr)})
            torch.testing.assert_close(step.weight, arguments[0] - lr * step.update, rtol=0, atol=1e-8)
        return counter.frame_count

    assert compilations(torch.tensor) == 1
    assert compilations(float) > 1  # a float is a constant of the graph: the count can tell


# -- two ranks -----------------------------------------------------------------------------------------------------

UNEVEN = [(5, 4), (3,), (7, 2)]
SMALL = [(1, 4), (1,), (1, 2, 3), (2, 2), (0, 3), ()]  # fewer rows than ranks: a rank is left with nothing
STEPS = 4
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}  # where the norms are sums

SCENARIOS = {  # name: (optimizer, arguments, shapes, dtype)
    "MERIT": ("MERIT", {}, UNEVEN, torch.float32),
    "paper variant": ("MERIT paper variant", {}, UNEVEN, torch.float32),
    "convolution": ("MERIT", {}, [(4, 3, 2, 2), (3, 2, 2)], torch.float32),
    "empty shards": ("MERIT", {}, SMALL, torch.float32),
    "empty shards, paper variant": ("MERIT paper variant", {}, SMALL, torch.float32),
    "empty shards, l2": ("MERIT l2", {}, SMALL, torch.float32),
    "NaN on one rank": ("MERIT", {"skip_nonfinite": True}, UNEVEN, torch.float32),
    "paper variant, fused": ("MERIT paper variant", {"fused": True}, [*UNEVEN, *SMALL, (4, 3, 2, 2)], torch.float32),
    "row only, fused": ("MERIT row only", {"fused": True}, UNEVEN, torch.float32),
}
SCENARIOS |= {  # AdamW has no fused step
    f"{name}{', fused' * len(fused)}, {dtype}": (name, fused, UNEVEN + SMALL, dtype)
    for name, fused in [
        ("AdamW", {}),
        *((name, fused) for name in ("LAMB", "MERIT") for fused in ({}, {"fused": True})),
    ]
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
}


def weights_and_gradients(scenario):
    _, _, shapes, dtype = SCENARIOS[scenario]
    weights = [random(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    grads = [[random(*s, seed=100 * t + i).to(dtype) for i, s in enumerate(shapes)] for t in range(1, STEPS + 1)]
    if scenario == "NaN on one rank":
        grads[2][0][-1, -1] = torch.nan  # the last row lies on rank 1
    return weights, grads


def run(scenario, spread, whole):
    """Weights after each step, and the count of skipped steps. `spread` shards a tensor, `whole` undoes it."""
    name, arguments, _, _ = SCENARIOS[scenario]
    weights, grads = weights_and_gradients(scenario)
    parameters = [parameter(spread(w)) for w in weights]
    optimizer = build(name, parameters, **{k: v for k, v in HYPER.items()}, **arguments)
    after = []
    for step_grads in grads:
        take(optimizer, [[spread(g) for g in step_grads]])
        after.append([whole(p.detach()).clone() for p in parameters])
    return after, optimizer.skipped_steps


def on_a_rank(rank, folder):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=90))
    mesh = init_device_mesh("cpu", (2,))

    def spread(x):
        return distribute_tensor(x, mesh, [Shard(0) if x.ndim else Replicate()])

    results = {scenario: run(scenario, spread, lambda x: x.full_tensor()) for scenario in SCENARIOS}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What each of two ranks ends up with, for every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    # From a process that has imported it all: two imports of torch at a time take long on a busy machine.
    multiprocessing.set_forkserver_preload(["merit_lab.optim", "torch.distributed.tensor"])
    mp.start_processes(on_a_rank, (str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sharded_equals_whole(sharded, scenario):
    expected, skipped = run(scenario, lambda x: x, lambda x: x)
    assert skipped == (scenario == "NaN on one rank")
    for after, skipped_there in (rank[scenario] for rank in sharded):
        assert skipped_there == skipped
        for step, step_there in zip(expected, after, strict=True):
            for a, b in zip(step, step_there, strict=True):
                assert a.isfinite().all() and a.dtype == b.dtype
                if "LAMB" in scenario or "l2" in scenario:  # sums of squares depend on their order
                    tolerance = TOLERANCE[a.dtype]
                    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
                else:
                    assert torch.equal(a, b)
