"""Training on several ranks, optimizers on tensors sharded every way, saving and loading, and a rank that is killed.

The ranks are started twice, two and four of them; each runs everything and leaves its results for the tests to read.
"""

import copy
import dataclasses
import hashlib
import multiprocessing
import os
import pickle
import random as random_module
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import HYPER, parameter, random, take
from torch import nn

from merit_lab import Recipe, checkpoint, distributed, runs, text, train
from merit_lab.distributed import count_collectives, load_sharded, save_sharded
from merit_lab.errors import InputError, RankError
from merit_lab.optim import build, fast
from merit_lab.optim.ratios import l2_norm, max_norm
from merit_lab.optim.sharded import leaves_a_shard_empty, whole_norms

# -- what the ranks do: optimizers ---------------------------------------------------------------------------------

SHAPES = [(5, 4), (1, 4), (3, 1), (4, 3, 2), (5,), (0, 3)]  # uneven and empty shards among them
PLACEMENTS = {  # ranks: name -> mesh and, for each of its dimensions, the tensor's dimension that is cut there
    2: {"rows": ((2,), (0,)), "columns": ((2,), (1,))},
    4: {
        "rows": ((4,), (0,)),
        "rows and columns": ((2, 2), (0, 1)),
        "rows twice": ((2, 2), (0, 0)),
        "columns, replicated": ((2, 2), (None, 1)),
    },
}
FUSED = "fused "
NAMES = {4: ["MERIT", "LAMB", "AdamW", "fused MERIT", "fused LAMB"]}
NAMES[2] = [*NAMES[4], "MERIT paper variant", "MERIT l2", "fused MERIT paper variant"]
LONG = [
    (size, place, name)
    for size, place in ((2, "rows"), (4, "rows and columns"))
    for name in ("MERIT", "LAMB", "fused MERIT", "fused LAMB")
]
BY_SUM = ("LAMB", "MERIT l2", "fused LAMB")  # sums of squares depend on their order


def build_named(name, parameters):
    """The optimizer of this name, its fused step if the name says so."""
    if name == "AdamW":
        return build(name, parameters, **HYPER)
    return build(name.removeprefix(FUSED), parameters, **HYPER, fused=name.startswith(FUSED))


def trajectory(name, steps, spread=lambda x: x, whole=lambda x: x):
    """Weights after each of these steps. `spread` shards a tensor, `whole` undoes it."""
    parameters = [parameter(spread(random(*s, seed=i, dtype=torch.float32))) for i, s in enumerate(SHAPES)]
    optimizer = build_named(name, parameters)
    after = []
    for t in range(1, steps + 1):
        take(optimizer, [[spread(random(*s, seed=100 * t + i, dtype=torch.float32)) for i, s in enumerate(SHAPES)]])
        after.append([whole(p.detach()).clone() for p in parameters])
    return after


def after_a_nan(name, spread=lambda x: x, whole=lambda x: x):
    """Weights after a step with a NaN in each gradient: its first element, on the first rank, or its last."""
    cases = [(shape, at) for shape in SHAPES if 0 not in shape for at in (0, -1)]
    parameters = [parameter(spread(random(*shape, seed=i, dtype=torch.float32))) for i, (shape, _) in enumerate(cases)]
    grads = [random(*shape, seed=100 + i, dtype=torch.float32) for i, (shape, _) in enumerate(cases)]
    for grad, (_, at) in zip(grads, cases, strict=True):
        grad.view(-1)[at] = torch.nan
    take(build_named(name, parameters), [[spread(grad) for grad in grads]])
    return [whole(p.detach()).clone() for p in parameters]


def n_steps(*case):
    return 20 if case in LONG else 2


def spreading(mesh, dims):
    """A function that shards a tensor so; along a dimension that it does not have it is replicated."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def spread(x):
        return distribute_tensor(x, mesh, [Replicate() if d is None or d >= x.ndim else Shard(d) for d in dims])

    return spread


def whole(x):
    return x.full_tensor()


def norms_of(spread):
    """Norms that a shard alone would get wrong."""
    names = {"l2": l2_norm, "max": max_norm}
    values = {
        "l2 of [[3], [4]]": ("l2", [[3.0], [4.0]], None),
        "max of [[1], [3]]": ("max", [[1.0], [3.0]], None),
        "max of (1, 4)": ("max", [[1.0, -4.0, 2.0, 3.0]], None),
        "rows of (1, 4)": ("max", [[1.0, -4.0, 2.0, 3.0]], 1),
        "columns of (1, 4)": ("max", [[1.0, -4.0, 2.0, 3.0]], 0),
    }
    found = {key: whole(names[name](spread(torch.tensor(x)), dim)).tolist() for key, (name, x, dim) in values.items()}
    three = [spread(torch.tensor([[3.0], [4.0]])), torch.tensor([6.0, 8.0]), spread(torch.tensor([[0.0, 2.0]]))]
    return found | {"together": torch.stack(whole_norms(three)).tolist()}


def collectives_of(spread):
    """What one step of a (6, 4) weight costs, by optimizer (of two where fused), and one plain all-reduce."""
    costs = {}
    for name in ("AdamW", "LAMB", "MERIT", "fused LAMB", "fused MERIT"):
        parameters = [parameter(spread(random(6, 4, dtype=torch.float32))) for _ in range(1 + name.startswith(FUSED))]
        for p in parameters:
            p.grad = spread(random(6, 4, seed=1, dtype=torch.float32))
        optimizer = build_named(name, parameters)
        with count_collectives() as counted:
            optimizer.step()
        costs[name] = dict(counted.by_operation), counted.numbers
    with count_collectives() as counted:
        dist.all_reduce(torch.zeros(3, 5))
    costs["plain"] = dict(counted.by_operation), counted.numbers
    return costs


# -- what the ranks do: training -----------------------------------------------------------------------------------

MODEL = {"named": "nano", "n_layer": 1, "n_embd": 16, "block_size": 8}
BASE = {"model": MODEL, "text": "synthetic", "lr": 2e-2, "device": "cpu", "eval_sequences": 8}
FUSE = {"optimizer_args": {"fused": True}, "probe_every": 3}  # steps that are probed are not fused
RECIPES = {
    "MERIT": Recipe(**BASE, batch_size=16, micro_batch_size=2, tokens=16 * 8 * 2, qk_clip=0.02, noise_every=4),
    "uneven": Recipe(
        **BASE, batch_size=5, micro_batch_size=2, tokens=5 * 8 * 3, grad_clip=0.1, optimizer="LAMB", **FUSE
    ),
    "untied": Recipe(
        **BASE | {"model": MODEL | {"tie_weights": False, "fused_qkv": True}},
        batch_size=3,
        micro_batch_size=1,
        tokens=3 * 8 * 2,
        optimizer="AdamW",
    ),
    "fused": Recipe(**BASE, batch_size=4, tokens=4 * 8 * 3, **FUSE),
}


def training_of(recipe, mode):
    """Records, final weights, the first batch's gradients, and what reducing them cost."""
    training = train(recipe, parallel=mode)
    first = [whole_or_plain(p).clone() for p in training.model.parameters()]
    pieces = []
    hook = training.model.register_forward_pre_hook(lambda module, args: pieces.append(len(args[0])))
    with count_collectives() as counted:
        training._accumulate_gradients(1)
    hook.remove()
    records, fused = [], set()
    with pytest.MonkeyPatch.context() as patch:
        start = fast.start
        patch.setattr(fast, "start", lambda *args: (fused.add(len(records) + 1), start(*args))[1])
        for record in training:
            records.append(record)
    grads = [whole_or_plain(p.grad).clone() for p in training.model.parameters()]
    return {
        "first": first,
        "pieces": pieces,
        "collectives": dict(counted.by_operation),
        "grads": grads,
        "fused": fused,
        "records": [dataclasses.replace(record, seconds=0.0) for record in records],
        "weights": [whole_or_plain(p) for p in training.model.parameters()],
        "sharded": any(hasattr(p, "placements") for p in training.model.parameters()),
        "units": 1 + len(training.model.blocks),
    }


def whole_or_plain(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def skipped_step(mode):
    """A step with an infinity in the gradient, under "fsdp" in one rank's shard alone: is anything changed?"""
    training = train(RECIPES["MERIT"], parallel=mode)
    accumulate = training._accumulate_gradients

    def with_infinity(step):
        loss = accumulate(step)
        grad = training.model.blocks[0].mlp.expand.weight.grad
        if mode == "ddp" or dist.get_rank() == 1:
            (grad.to_local() if mode == "fsdp" else grad)[-1, -1] = torch.inf
        return loss

    training._accumulate_gradients = with_infinity
    before = [whole_or_plain(p).clone() for p in training.model.parameters()]
    record = next(training)
    after = [whole_or_plain(p) for p in training.model.parameters()]
    return record.grad_norm, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


KEPT = RECIPES["fused"].replace(tokens=4 * 8 * 6)


def at_end(training):
    """Records and state of a run when it has come to its end."""
    return [dataclasses.replace(record, seconds=0.0) for record in training], checkpoint.state_of(training)


def cut_and_resumed(mode, folder):
    """A run in one go; one that is broken off after step 5 and goes on from step 4: its state there, and its end."""
    whole = at_end(train(KEPT, parallel=mode))
    kept = {"parallel": mode, "checkpoint": folder, "checkpoint_every": 2}
    list(islice(train(KEPT, **kept), 5))
    training = train(KEPT, **kept)
    assert training.resumed == 4
    return whole, copy.deepcopy(checkpoint.state_of(training)), at_end(training)


def refused(call, *arguments, **named):
    with pytest.raises(InputError) as error:
        call(*arguments, **named)
    return str(error.value)


def own_folders(folder, rank):
    """What each rank is told where its folder is its own: rank 1's is empty; then its checkpoints are damaged."""
    mine = Path(folder, f"mine {rank}")
    if rank == 0:
        shutil.copytree(f"{folder}/ddp", mine)
    said = [refused(train, KEPT, parallel="ddp", checkpoint=mine)]
    if rank == 1:
        (mine / "step-000006.checkpoint").write_bytes(b"?")
    return [*said, refused(train, KEPT, parallel="ddp", checkpoint=mine)]


# -- what the ranks do: saving and loading -------------------------------------------------------------------------


class Weights(nn.Module):
    """Two parameters, one of them in half precision."""

    def __init__(self, spread=lambda x: x):
        super().__init__()
        self.single = parameter(spread(random(7, 3, dtype=torch.float32)))
        self.brief = parameter(spread(random(3, 5, seed=1, dtype=torch.float32).bfloat16()))


def resumable(name, spread=lambda x: x):
    model = Weights(spread)
    return model, build(name, model.parameters(), **HYPER, skip_nonfinite=True)


def go_on(model, optimizer, steps, spread=lambda x: x):
    """Take these steps (number 2 has a NaN and is skipped); the weights in the end, whole."""
    for t in steps:
        grads = [random(*p.shape, seed=50 * t, dtype=torch.float32).to(p.dtype) for p in model.parameters()]
        if t == 2:
            grads[0][-1, -1] = torch.nan
        take(optimizer, [[spread(g) for g in grads]])
    return [whole_or_plain(p).clone() for p in model.parameters()], optimizer.skipped_steps


def saved(name, folder, spread=lambda x: x):
    """Save after three steps, twice in the same place; the weights after two more."""
    model, optimizer = resumable(name, spread)
    go_on(model, optimizer, range(1, 2), spread)
    save_sharded(folder, model, optimizer, step=1)
    go_on(model, optimizer, range(2, 4), spread)
    save_sharded(folder, model, optimizer, step=3)
    return go_on(model, optimizer, range(4, 6), spread)


def loaded(name, folder, spread=lambda x: x):
    """Load into others' weights, which have been stepped already; the weights after two more steps."""
    model, optimizer = resumable(name, spread)
    go_on(model, optimizer, range(7, 8), spread)
    assert load_sharded(folder, model, optimizer) == 3
    return go_on(model, optimizer, range(4, 6), spread)


def damaged_on_two(folder, rank):
    """What each of two ranks is told about a folder in which a bit of the second's file has changed."""
    damaged = Path(folder, "damaged")
    if rank == 0:
        shutil.copytree(f"{folder}/2 MERIT", damaged)
        flip(damaged / "__1_0.distcp", 999)
    dist.barrier()
    return refused(load_sharded, damaged, *resumable("MERIT"))


def flip(path, at, bit=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


PARTS = ("checkpoint", "fsdp", "tensor")


# -- the ranks -----------------------------------------------------------------------------------------------------


def on_a_rank(rank, size, folder):
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    store = f"file://{folder}/store{size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=90))
    meshes = {shape: init_device_mesh("cpu", shape) for shape, _ in PLACEMENTS[size].values()}
    found = {}
    for place, (mesh, dims) in PLACEMENTS[size].items():
        spread = spreading(meshes[mesh], dims)
        for name in NAMES[size]:
            found["steps", place, name] = trajectory(name, n_steps(size, place, name), spread, whole)
            found["NaN", place, name] = after_a_nan(name, spread, whole)
        found["norms", place] = norms_of(spread)
        found["collectives", place] = collectives_of(spread)
    rows = spreading(meshes[size,], (0,))
    for name in ("MERIT", "AdamW"):
        if size == 2:
            found["loaded", 1, name] = loaded(name, f"{folder}/1 {name}", rows)
            found["saved", name] = saved(name, f"{folder}/2 {name}", rows)
        else:
            found["loaded", 2, name] = loaded(name, f"{folder}/2 {name}", rows)
    if size == 2:
        for mode in distributed.MODES:
            for name, recipe in RECIPES.items():
                found["training", mode, name] = training_of(recipe, mode)
            found["skipped", mode] = skipped_step(mode)
            found["resumed", mode] = cut_and_resumed(mode, f"{folder}/{mode}")
        found["own folders"] = own_folders(folder, rank)
        found["damaged"] = damaged_on_two(folder, rank)
        found["unasked"] = train(RECIPES["MERIT"]).ranks.mode
        with pytest.raises(InputError, match="batch_size: got 1 for 2 ranks.*at least 2"):
            train(RECIPES["MERIT"].replace(batch_size=1, micro_batch_size=None))
    torch.save(found, f"{folder}/{size}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def one(folder):
    """What one process finds, and leaves for two to load."""
    return {name: saved(name, folder / f"1 {name}") for name in ("MERIT", "AdamW")}


@pytest.fixture(scope="module")
def two(folder, one):
    text.load("synthetic")  # prepared before two want it
    return start_ranks(2, folder)


@pytest.fixture(scope="module")
def four(folder, two):
    return start_ranks(4, folder)


def start_ranks(size, folder):
    # From a process that has imported it all: six imports of torch at a time take minutes on a busy machine.
    multiprocessing.set_forkserver_preload(["merit_lab.training", *(f"torch.distributed.{name}" for name in PARTS)])
    mp.start_processes(on_a_rank, (size, str(folder)), nprocs=size, start_method="forkserver")
    return [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def ranks(two, four):
    return {2: two, 4: four}


# -- optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, place, name",
    [(size, place, name) for size in (2, 4) for place in PLACEMENTS[size] for name in NAMES[size]],
)
def test_sharded_steps_are_those_of_one_process(ranks, size, place, name):
    expected = trajectory(name, n_steps(size, place, name))
    for rank in ranks[size]:
        for step, there in zip(expected, rank["steps", place, name], strict=True):
            for a, b in zip(step, there, strict=True):
                if name in BY_SUM and a.numel():
                    assert (b - a).abs().max() <= 1e-6 * a.abs().max()
                else:
                    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "size, place, name",
    [(size, place, name) for size in (2, 4) for place in PLACEMENTS[size] for name in NAMES[size]],
)
def test_a_nan_on_one_rank_goes_as_far_as_in_one_process(ranks, size, place, name):
    expected = after_a_nan(name)
    assert all(a.isnan().any() for a in expected)
    for rank in ranks[size]:
        for a, b in zip(expected, rank["NaN", place, name], strict=True):
            tolerance = 1e-6 if name in BY_SUM else 0
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("size, place", [(size, place) for size in (2, 4) for place in PLACEMENTS[size]])
def test_a_norm_of_a_shard_is_not_a_norm(ranks, size, place):
    for rank in ranks[size]:
        assert rank["norms", place] == {
            "l2 of [[3], [4]]": 5.0,
            "max of [[1], [3]]": 3.0,
            "max of (1, 4)": 4.0,
            "rows of (1, 4)": [[4.0]],
            "columns of (1, 4)": [[1.0, 4.0, 2.0, 3.0]],
            "together": [5.0, 10.0, 2.0],
        }


@pytest.mark.parametrize(
    "shape, mesh, dims, empty",
    [
        ((4, 4), (2,), (0,), False),
        ((1, 4), (2,), (0,), True),
        ((1, 4), (2,), (1,), False),
        ((5, 4), (4,), (0,), True),  # 2, 2, 1, 0
        ((9, 4), (2, 4), (0, 0), True),  # 5 and 4; the 5 are 2, 2, 1, 0 though the 4 are 1, 1, 1, 1
        ((4, 1), (2, 2), (0, 1), True),
        ((4, 1), (2, 2), (0, None), False),
        ((), (2,), (None,), False),
    ],
)
def test_whether_a_shard_is_empty(shape, mesh, dims, empty):
    from torch.distributed.tensor import Replicate, Shard

    placements = tuple(Replicate() if d is None else Shard(d) for d in dims)
    assert leaves_a_shard_empty(shape, mesh, placements) is empty


@pytest.mark.parametrize("size, place", [(size, place) for size in (2, 4) for place in PLACEMENTS[size]])
def test_what_a_step_costs(ranks, size, place):
    _, dims = PLACEMENTS[size][place]
    cuts = sum(dim is not None for dim in dims)  # dimensions of the mesh to reduce over
    for rank in ranks[size]:
        found = rank["collectives", place]
        assert found["plain"] == ({"all_reduce": 1}, 15)
        assert found["AdamW"] == ({}, 0)  # it looks at each element for itself
        assert found["LAMB"] == ({"all_reduce": 2 * cuts}, 2 * cuts)  # two norms
        assert found["MERIT"] == MERIT_COSTS[size, place]
        # All norms of all weights in one message a dimension that is cut: of each weight its own two, and MERIT's lines
        assert found["fused LAMB"] == ({"all_reduce": cuts}, 2 * 2 * cuts)
        assert found["fused MERIT"] == ({"all_reduce": cuts}, 2 * (2 * cuts + FUSED_LINES[size, place]))


FUSED_LINES = {  # of a (6, 4) weight and its direction, on the first rank
    (2, "rows"): 2 * 4,
    (2, "columns"): 2 * 6,
    (4, "rows"): 2 * 4,
    (4, "rows and columns"): 2 * (4 // 2 + 6 // 2),
    (4, "rows twice"): 2 * 2 * 4,
    (4, "columns, replicated"): 2 * 6,
}

MERIT_COSTS = {  # of a (6, 4) weight. Of its rows four ranks have 2, 2, 2 and none: they are gathered
    (4, "rows"): ({"all_gather": 6}, 48),
    (2, "rows"): ({"all_reduce": 4}, 2 + 2 * 4),
    (2, "columns"): ({"all_reduce": 4}, 2 + 2 * 6),
    (4, "rows and columns"): ({"all_reduce": 8}, 2 * 2 + 2 * (4 // 2 + 6 // 2)),
    (4, "rows twice"): ({"all_reduce": 8}, 2 * (2 + 2 * 4)),
    (4, "columns, replicated"): ({"all_reduce": 4}, 2 + 2 * 6),
}


# -- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    return {name: training_of(recipe, None) for name, recipe in RECIPES.items()}


@pytest.fixture(params=distributed.MODES)
def mode(request):
    return request.param


@pytest.mark.parametrize("name", RECIPES)
def test_first_weights_are_those_of_one_process(two, alone, mode, name):
    for rank in two:
        assert all(map(torch.equal, rank["training", mode, name]["first"], alone[name]["first"]))


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_the_whole_batch(two, alone, mode, name):
    for rank in two:
        found = rank["training", mode, name]
        assert found["sharded"] is (mode == "fsdp")
        for a, b in zip(alone[name]["grads"], found["grads"], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


def test_each_rank_takes_its_slice_in_micro_batches(two, alone, mode):
    assert alone["MERIT"]["pieces"] == [2] * 8
    assert [rank["training", mode, "MERIT"]["pieces"] for rank in two] == [[2] * 4] * 2
    # The ranks do not divide the batch. As many on each; the second of rank 0's counts for nothing where it has no more
    assert [rank["training", mode, "uneven"]["pieces"] for rank in two] == [[2, 1], [2, 1]]
    assert [rank["training", mode, "untied"]["pieces"] for rank in two] == [[1, 1], [1, 1]]


def test_gradients_are_reduced_once(two, alone, mode):
    for rank in two:
        found = rank["training", mode, "MERIT"]
        if mode == "ddp":  # one bucket, and the loss
            assert found["collectives"] == {"all_reduce": 2}
        else:
            assert found["collectives"]["reduce_scatter"] == found["units"]
            assert found["collectives"]["all_reduce"] == 1
    assert alone["MERIT"]["collectives"] == {}


@pytest.mark.parametrize("name", RECIPES)
def test_records_are_the_same_on_every_rank_and_as_those_of_one_process(two, alone, mode, name):
    found = [rank["training", mode, name]["records"] for rank in two]
    assert found[0] == found[1]
    assert len(found[0]) == RECIPES[name].n_steps
    for here, there in zip(alone[name]["records"], found[0], strict=True):
        assert here.to_dict().keys() == there.to_dict().keys()
        assert (here.tokens, here.lr, here.clipped_heads) == (there.tokens, there.lr, there.clipped_heads)
        assert there.train_loss == pytest.approx(here.train_loss, rel=1e-4)
        assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-3)
        assert there.val_loss == pytest.approx(here.val_loss, rel=1e-4)
        if here.peak_logit is not None:
            assert there.peak_logit == pytest.approx(here.peak_logit, rel=1e-2)
        assert (there.ratios or {}).keys() == (here.ratios or {}).keys()
    last = alone[name]["records"][-1]
    if name == "MERIT":
        assert last.clipped_heads > 0
        assert found[0][-1].noise_scale == pytest.approx(last.noise_scale, rel=0.1)
        for key, summary in last.ratios.items():
            assert found[0][-1].ratios[key]["quantiles"] == pytest.approx(summary["quantiles"], rel=0.1, abs=1e-3)


def test_weights_end_as_those_of_one_process(two, alone, mode):
    for name in RECIPES:
        for rank in two:
            for a, b in zip(alone[name]["weights"], rank["training", mode, name]["weights"], strict=True):
                assert (a - b).abs().max() < 0.02 * a.abs().max() + 1e-4
        first, second = (rank["training", mode, name]["weights"] for rank in two)
        assert all(map(torch.equal, first, second))


FUSED_STEPS = {"MERIT": set(), "uneven": {2}, "untied": set(), "fused": {2}}


def test_steps_are_fused(two, alone, mode):
    for found in (alone, *({name: rank["training", mode, name] for name in RECIPES} for rank in two)):
        assert {name: found[name]["fused"] for name in RECIPES} == FUSED_STEPS


def test_all_ranks_leave_out_a_step_that_one_finds_infinite(two, mode):
    assert [rank["skipped", mode] for rank in two] == [(float("inf"), True)] * 2


def test_several_ranks_are_ddp_unless_asked(two):
    assert [rank["unasked"] for rank in two] == ["ddp", "ddp"]


# -- checkpoints ---------------------------------------------------------------------------------------------------


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_run_that_was_cut_ends_as_one_in_one_go(two, mode):
    for rank in two:
        whole, _, resumed = rank["resumed", mode]
        assert len(whole[0]) == KEPT.n_steps and resumed[0] == whole[0]
        assert same(resumed[1], whole[1])


def test_what_two_ranks_kept_one_process_goes_on_with(two, mode, folder, tmp_path):
    shutil.copy(folder / mode / "step-000004.checkpoint", tmp_path)
    training = train(KEPT, checkpoint=tmp_path)
    assert training.resumed == 4
    (whole, end), there, _ = two[0]["resumed", mode]
    assert same(checkpoint.state_of(training), there)
    records, here = at_end(training)
    assert records[:4] == whole[:4]
    assert [r.train_loss for r in records] == pytest.approx([r.train_loss for r in whole], rel=1e-4)
    for name, weight in end["model"].items():
        torch.testing.assert_close(here["model"][name], weight, rtol=1e-2, atol=1e-4)


def test_ranks_with_folders_of_their_own_are_refused(two):
    for rank, (empty, damaged) in enumerate(each["own folders"] for each in two):
        assert f"mine {rank}, where the ranks find different checkpoints (rank 0 step 6, rank 1 none); give" in empty
        assert "mine 1, where no checkpoint can be used (step-000006.checkpoint: it is not a checkpoint" in damaged
        assert damaged.startswith("checkpoint: " if rank == 1 else "rank 1: checkpoint: ")


# -- saving and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MERIT", "AdamW"])
def test_saved_on_some_ranks_loads_on_others(folder, one, ranks, name):
    expected, skipped = one[name]
    assert skipped == 1
    found = [loaded(name, folder / f"2 {name}"), loaded(name, folder / f"1 {name}")]
    found += [rank[key] for rank in ranks[2] for key in (("saved", name), ("loaded", 1, name))]
    found += [rank["loaded", 2, name] for rank in ranks[4]]
    for weights, there in found:
        assert there == skipped
        assert all(map(torch.equal, weights, expected))


def test_what_cannot_be_loaded(tmp_path):
    model, optimizer = resumable("MERIT")
    with pytest.raises(InputError, match="checkpoint: cannot read .*nowhere"):
        load_sharded(tmp_path / "nowhere", model, optimizer)
    save_sharded(tmp_path / "saved", model, optimizer)
    other = nn.Linear(2, 2)
    with pytest.raises(InputError, match="is of another model or optimizer; weight.bias differs"):
        load_sharded(tmp_path / "saved", other, build("MERIT", other.parameters(), **HYPER))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.fixture
def kept(tmp_path):
    """A saved folder, and a call that loads it: what it is told, the weights being left alone."""
    model, optimizer = resumable("MERIT")
    go_on(model, optimizer, range(1, 2))
    save_sharded(tmp_path / "kept", model, optimizer, step=1)
    assert load_sharded(tmp_path / "kept", model, optimizer) == 1
    before = [p.detach().clone() for p in model.parameters()]

    def load():
        said = refused(load_sharded, tmp_path / "kept", model, optimizer)
        assert said.startswith("checkpoint: ") and str(tmp_path / "kept") in said
        assert all(map(torch.equal, model.parameters(), before))
        return said

    return tmp_path / "kept", load


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "SHA256SUMS"])
def test_a_saved_folder_after_accidents(kept, name):
    folder, load = kept
    path, chance = folder / name, random_module.Random(name)
    content = path.read_bytes()
    for _ in range(30):
        path.write_bytes(content[: chance.randrange(len(content) - 1)])
        cut = load()
        path.write_bytes(content)
        flip(path, chance.randrange(len(content)), chance.randrange(8))
        flipped = load()
        if name != "SHA256SUMS":
            assert cut == flipped
            assert f"{path} was cut short or changed, for its checksum is wrong; take an older one" in cut
    path.unlink()
    assert f"cannot read {path} (No such file or directory); give a folder that save_sharded wrote" in load()


class Touch:
    """What unpickles to a file that is made."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_loading_a_folder_runs_no_code_that_is_in_it(kept, tmp_path):
    folder, load = kept
    touched = tmp_path / "touched"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Touch(touched)
    for content in (Touch(touched), metadata):
        (folder / ".metadata").write_bytes(pickle.dumps(content))
        with_right_sums(folder)
        assert f"{folder / '.metadata'} is not what save_sharded writes" in load()
        assert not touched.exists()
        pickle.loads(pickle.dumps(content))  # so it would be done
        touched.unlink()


def with_right_sums(folder):
    names = [".metadata", "__0_0.distcp"]
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))


def test_what_is_behind_right_checksums_may_be_anything(kept):
    folder, load = kept
    metadata, part = ((folder / name).read_bytes() for name in (".metadata", "__0_0.distcp"))
    for content in (b"", b"\x80\x04.", pickle.dumps({}), pickle.dumps([torch.Size([1])]), metadata[:-20]):
        (folder / ".metadata").write_bytes(content)
        with_right_sums(folder)
        assert f"{folder / '.metadata'} is not what save_sharded writes" in load()
    (folder / ".metadata").write_bytes(metadata)
    (folder / "__0_0.distcp").write_bytes(part[:100])
    with_right_sums(folder)
    assert "cannot be read" in load()
    (folder / "__0_0.distcp").write_bytes(part)
    with_right_sums(folder)
    (folder / "SHA256SUMS").write_text((folder / "SHA256SUMS").read_text().splitlines(keepends=True)[0])
    assert "SHA256SUMS has no checksum of __0_0.distcp" in load()


def test_all_ranks_refuse_what_one_finds_changed(two):
    for rank in two:
        assert re.fullmatch("checkpoint: .*damaged/__1_0.distcp was cut short or changed.*", rank["damaged"])


# -- in one process ------------------------------------------------------------------------------------------------


def test_what_is_refused_in_one_process():
    recipe = RECIPES["MERIT"]
    assert train(recipe).ranks.mode is None
    with pytest.raises(InputError, match="parallel: got 'ddp' in a process of its own; start the ranks with torchrun"):
        train(recipe, parallel="ddp")
    with pytest.raises(InputError, match="parallel: got 'zero', expected ddp, fsdp or None"):
        train(recipe, parallel="zero")


def test_a_timeout_that_is_no_number(monkeypatch):
    monkeypatch.setenv("MERIT_LAB_RANK_TIMEOUT", "soon")
    with pytest.raises(InputError, match="MERIT_LAB_RANK_TIMEOUT: got 'soon', expected a whole number of seconds"):
        distributed._timeout()


def test_only_an_error_about_another_rank_is_named_so():
    ranks = distributed.Replicated(torch.device("cpu"), 1, 4)
    lost = "[/torch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234. More"
    says = r"rank 1 of 4: another rank .* \(Connection closed by peer \[10.0.0.2\]:1234\); look"
    with pytest.raises(RankError, match=says), ranks.naming_failures():
        raise RuntimeError(lost)
    with pytest.raises(RuntimeError, match="^shapes$") as caught, ranks.naming_failures():
        raise RuntimeError("shapes")
    assert not isinstance(caught.value, RankError)


# -- the command line ----------------------------------------------------------------------------------------------

COMMAND = ["-m", "merit_lab", "train", "--recipe", "tiny", "--text", "synthetic", "--device", "cpu"]
SMALL = [f"--set=model.{name}={value}" for name, value in (("n_layer", 1), ("n_embd", 16), ("block_size", 8))]


def test_torchrun(tmp_path):
    out = tmp_path / "run.jsonl"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    arguments = ["--parallel", "fsdp", "--tokens", "256", "--out", str(out), "--keep-weights", "--sample", "5"]
    command = [sys.executable, *torchrun, *COMMAND, *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Validation loss") == done.stdout.count("Written") == 1
    assert done.stderr.count("step 2/2") == 1
    run = runs.read(out)
    assert run.complete
    assert run.header["ranks"] == {"size": 2, "parallel": "fsdp"}
    assert run.weights()["blocks.0.attention.query.weight"].shape == (16, 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl", "run.npz"]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_two(folder, *arguments):
    """Two ranks of the command line, as torchrun would start them; what rank 0 says goes to a file."""
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    said = folder / "said.txt"
    with open(said, "w") as file:
        processes = [
            subprocess.Popen(
                [sys.executable, *COMMAND, *SMALL, "--set=probe_every=100000", *arguments],
                stderr=file if rank == 0 else subprocess.DEVNULL,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
    return said, processes


def test_a_killed_rank_ends_the_others_with_one_line_and_a_restart_resumes(tmp_path):
    kept, out = tmp_path / "kept", tmp_path / "run.jsonl"
    steps = ["--tokens", str(128 * 300), "--checkpoint", str(kept), "--checkpoint-every", "10", "--out", str(out)]
    said, processes = start_two(tmp_path, *steps)
    try:
        wait_for(lambda: any(kept.glob("step-*.checkpoint")), processes)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[0].wait(timeout=60) == 1
    finally:
        end(processes)
    *_, last = said.read_text().splitlines()
    assert re.match(r"error: rank 0 of 2: another rank has ended or does not answer \(.+\); look for", last)
    assert not out.exists()

    said, processes = start_two(tmp_path, *steps)
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0], said.read_text()
    finally:
        end(processes)
    assert re.search(r"going on after step \d+ of 300", said.read_text())
    assert [record.step for record in runs.read(out)] == list(range(1, 301))


def end(processes):
    for process in processes:
        process.kill()
        process.wait()


def wait_for(condition, processes, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.1)
