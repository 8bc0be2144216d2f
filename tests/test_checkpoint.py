"""Checkpoints: a run goes on bit for bit, no file is half written or trusted blindly, and killing does no harm."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import pickle
import random
import shutil
import subprocess
import sys
import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch
from helpers import COMPILER

from merit_lab import Recipe, checkpoint, compare, files, runs, text, train
from merit_lab import training as training_module
from merit_lab.errors import InputError
from merit_lab.optim import fast
from merit_lab.training import Training, build_model

BASE = {
    "model": {"named": "nano", "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8},
    "text": "synthetic",
    "batch_size": 6,
    "eval_sequences": 4,
    "probe_every": 4,
    "eval_every": 6,
    "device": "cpu",
}
STEPS = 12
TINY = Recipe(**BASE, tokens=6 * 8 * STEPS, lr=2e-2)


@pytest.fixture(scope="module")
def corpus():
    return text.load("synthetic")


@pytest.fixture(autouse=True)
def no_warning():
    """A warning of ours that no test asks for is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def numbers(records):
    """Everything but the clock; by repr, so that NaN equals NaN."""
    return [repr(dataclasses.replace(record, seconds=0.0)) for record in records]


def bits(training):
    """The run's state, to the last bit."""
    state = checkpoint.state_of(training)
    raw = {name: (value.dtype, value.numpy().tobytes()) for name, value in state["model"].items()}
    for index, values in state["optimizer"]["state"].items():
        raw |= {(index, name): (value.dtype, value.numpy().tobytes()) for name, value in values.items()}
    return raw, repr(state["optimizer"]["param_groups"]), state["optimizer"]["skipped_steps"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def cut_run(recipe, corpus, folder, cuts, **arguments):
    """Records and training of a run that is broken off after each of these steps, and begun anew."""
    for cut in cuts:
        list(islice(train(recipe, corpus, checkpoint=folder, **arguments), cut))
    training = train(recipe, corpus, checkpoint=folder, **arguments)
    return list(training), training


# -- bit for bit -------------------------------------------------------------------------------------------------

HABITS = [
    {"micro_batch_size": 4, "probe_every": 3, "eval_every": 4},  # micro-batches of 4 and 2 sequences
    {"optimizer": "AdamW", "qk_clip": 0.005, "warmup": 0.5},
    {"optimizer": "LAMB", "noise_every": 5, "optimizer_args": {"skip_nonfinite": True}},
    {"optimizer": "maxLAMB", "precision": "bf16", "grad_clip": None, "seed": 3},
    {
        "model": BASE["model"] | {"fused_qkv": True, "tie_weights": False},
        "optimizer_args": {"variant": "paper", "fused": True},
    },
]


@pytest.mark.parametrize("habits", HABITS, ids=str)
def test_a_run_in_pieces_equals_one_in_one_go(corpus, tmp_path, monkeypatch, habits):
    if not COMPILER:
        monkeypatch.setenv("MERIT_LAB_NO_COMPILER", "1")  # torch does, without a warning
    fused = []
    monkeypatch.setattr(fast, "start", lambda *args, start=fast.start: (fused.append(args), start(*args))[1])
    recipe = TINY.replace(**habits)
    whole = train(recipe, corpus)
    expected = numbers(whole)
    assert len(expected) == STEPS
    assert bool(fused) == ("fused" in recipe.optimizer_args)
    if recipe.qk_clip:
        assert "clipped_heads=2" in "".join(expected)
    chance = random.Random(str(habits))
    for every in (1, 2, 5):
        cuts = sorted(chance.sample(range(1, STEPS), 3))
        records, training = cut_run(recipe, corpus, tmp_path / str(every), cuts, checkpoint_every=every)
        assert training.resumed == (cuts[-1] // every * every or None)
        assert numbers(records) == expected, (every, cuts)
        assert bits(training) == bits(whole), (every, cuts)


def test_every_single_cut(corpus, tmp_path):
    whole = train(TINY, corpus)
    expected = numbers(whole)
    for cut in range(1, STEPS + 1):
        records, training = cut_run(TINY, corpus, tmp_path / str(cut), [cut], checkpoint_every=1, keep=1)
        assert training.resumed == cut
        assert numbers(records) == expected and bits(training) == bits(whole), cut


def test_steps_that_were_left_out_and_counts_are_carried_on(corpus, tmp_path, monkeypatch):
    """After a step that is left out, the optimizer's count of steps is behind the run's."""
    original = Training._accumulate_gradients

    def poisoned(training, step):
        loss = original(training, step)
        if step in (2, 5):
            next(training.model.parameters()).grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(Training, "_accumulate_gradients", poisoned)
    recipe = TINY.replace(optimizer="AdamW")
    whole = train(recipe, corpus)
    expected = numbers(whole)
    records, training = cut_run(recipe, corpus, tmp_path, [3, 7], checkpoint_every=3)
    assert training.resumed == 6 and numbers(records) == expected and bits(training) == bits(whole)
    counts = {state["step"].item() for state in training.optimizer.state.values()}
    assert counts == {STEPS - 2}
    training.optimizer.skipped_steps = 7
    state = checkpoint.state_of(training)
    fresh = train(recipe, corpus)
    checkpoint.restore(fresh, state)
    assert fresh.optimizer.skipped_steps == 7


def test_a_checkpoint_is_there_when_its_record_is(corpus, tmp_path):
    for record in train(TINY, corpus, checkpoint=tmp_path, checkpoint_every=3):
        due = record.step // 3 * 3
        assert names(tmp_path) == [f"step-{step:06d}.checkpoint" for step in (due - 3, due) if step > 0]


def test_without_a_folder_nothing_changes_and_no_file_is_written(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = train(TINY, corpus)
    kept = train(TINY, corpus, checkpoint="there")
    assert numbers(plain) == numbers(kept) and bits(plain) == bits(kept)
    assert names(tmp_path) == ["there"] and plain.resumed is kept.resumed is None


@pytest.fixture
def sharded_models(tmp_path, monkeypatch):
    """Every training's weights are DTensors, here on one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    monkeypatch.setattr(training_module, "build_model", lambda *a: fully_shard(build_model(*a), mesh=mesh))
    for measuring in ("_probe", "val_loss"):  # they read the weights as plain tensors
        monkeypatch.setattr(Training, measuring, lambda *_: None)
    yield
    dist.destroy_process_group()


def test_spread_weights_and_moments_are_kept_whole_and_spread_again(corpus, tmp_path, sharded_models):
    whole = train(TINY, corpus)
    expected = numbers(whole)
    records, training = cut_run(TINY, corpus, tmp_path / "c", [5], checkpoint_every=4)
    assert training.resumed == 4 and numbers(records) == expected and bits(training) == bits(whole)
    for values in training.optimizer.state.values():
        assert values["exp_avg"].placements == next(training.model.parameters()).placements
    state = torch.load(io.BytesIO(parts(tmp_path / "c" / "step-000012.checkpoint")[2]), weights_only=True)
    assert {type(weight) for weight in state["model"].values()} == {torch.Tensor}
    assert {type(values["exp_avg"]) for values in state["optimizer"]["state"].values()} == {torch.Tensor}


# -- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "every, keep, left", [(5, 2, [10, 12]), (5, 1, [12]), (5, 9, [5, 10, 12]), (100, 2, [12]), (None, 3, [10, 11, 12])]
)
def test_the_last_few_are_kept_and_the_end_always(corpus, tmp_path, every, keep, left):
    list(train(TINY, corpus, checkpoint=tmp_path / "a" / "b", checkpoint_every=every, keep=keep))
    assert names(tmp_path / "a" / "b") == [f"step-{step:06d}.checkpoint" for step in left]


def test_a_complete_run_yields_its_records_again_and_computes_nothing(corpus, tmp_path, monkeypatch):
    first = list(train(TINY, corpus, checkpoint=tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(Training, "_accumulate_gradients", None)
    again = train(TINY, corpus, checkpoint=tmp_path)
    assert again.resumed == STEPS and list(again) == first and again.last == first[-1]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_run_that_diverged_is_at_its_end(corpus, tmp_path):
    recipe = TINY.replace(optimizer="AdamW", lr=1e30, grad_clip=None)
    first = list(train(recipe, corpus, checkpoint=tmp_path, checkpoint_every=100))
    assert first[-1].diverged and first[-1].step < STEPS
    again = train(recipe, corpus, checkpoint=tmp_path)
    assert numbers(again) == numbers(first) and again.resumed == first[-1].step


def test_the_clock_goes_on(corpus, tmp_path):
    list(islice(train(TINY, corpus, checkpoint=tmp_path, checkpoint_every=1), 3))
    path = tmp_path / "step-000003.checkpoint"
    later = [record | {"seconds": record["seconds"] + 1000} for record in records_of(path)]
    rewrite(path, records=later)
    records = list(train(TINY, corpus, checkpoint=tmp_path))
    seconds = [record.seconds for record in records]
    assert seconds == sorted(seconds) and 1000 < seconds[3] < 2000


def test_what_a_killed_process_left_is_cleared_and_nothing_else(corpus, tmp_path):
    mine = [".step-000003.checkpoint.0a1b2c3d.tmp", ".step-1000000.checkpoint.00000000.tmp"]
    others = [".run.jsonl.0a1b2c3d.tmp", "notes.txt", "step-3.checkpoint", "step-000099.checkpoint.bak"]
    for name in mine + others:
        (tmp_path / name).write_text("?")
    (tmp_path / "step-000099.checkpoint").mkdir()
    training = train(TINY, corpus, checkpoint=tmp_path)
    assert names(tmp_path) == sorted([*others, "step-000099.checkpoint"])
    list(training)
    assert {*others, "step-000099.checkpoint"} < set(names(tmp_path))


def test_a_process_killed_before_it_deleted_the_older_one(corpus, tmp_path):
    list(train(TINY, corpus, checkpoint=tmp_path, checkpoint_every=4, keep=9))
    assert len(names(tmp_path)) == 3
    train(TINY, corpus, checkpoint=tmp_path, keep=2)
    assert names(tmp_path) == ["step-000008.checkpoint", "step-000012.checkpoint"]


def test_the_older_one_goes_last(corpus, tmp_path, monkeypatch):
    calls = []
    for call in ("fsync", "replace", "unlink"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, call=call, real=real, **k: (calls.append(call), real(*a, **k))[1])
    list(islice(train(TINY, corpus, checkpoint=tmp_path, checkpoint_every=1, keep=1), 2))
    first, second = ["fsync", "replace", "fsync"], ["fsync", "replace", "fsync", "unlink"]
    assert [call for call in calls if call != "unlink"] == (first + second)[:-1]
    assert calls[-4:] == second


# -- the file ----------------------------------------------------------------------------------------------------


def parts(path):
    """The file's three parts: two lines and the state."""
    first, header, state = path.read_bytes().split(b"\n", 2)
    return json.loads(first), json.loads(header), state


def records_of(path):
    state = torch.load(io.BytesIO(parts(path)[2]), weights_only=True)
    return [json.loads(line) for line in state["records"].splitlines()]


def rewrite(path, records=None, state=None, format_=None, **changes):
    """Change what a checkpoint says, with a checksum that is right."""
    first, header, raw = parts(path)
    if records is not None:
        values = torch.load(io.BytesIO(raw), weights_only=True)
        values["records"] = "\n".join(map(json.dumps, records))
        torch.save(values, buffer := io.BytesIO())
        raw = buffer.getvalue()
    rest = json.dumps(header | changes).encode() + b"\n" + (raw if state is None else state)
    first |= {"sha256": hashlib.sha256(rest).hexdigest()}
    if format_ is not None:
        first["merit_lab_checkpoint"] = format_
    path.write_bytes(json.dumps(first).encode() + b"\n" + rest)


@pytest.fixture(scope="module")
def recorded(corpus, tmp_path_factory):
    """A folder with the checkpoints of steps 5 and 10. Not to be changed: copy it."""
    folder = tmp_path_factory.mktemp("recorded")
    list(islice(train(TINY, corpus, checkpoint=folder, checkpoint_every=5), 11))
    assert names(folder) == ["step-000005.checkpoint", "step-000010.checkpoint"]
    return folder


@pytest.fixture
def folder(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "folder")


@pytest.fixture(scope="module")
def in_one_go(corpus):
    training = train(TINY, corpus)
    return numbers(training), bits(training)


def test_a_checkpoint_says_what_it_is(recorded, corpus):
    path = recorded / "step-000010.checkpoint"
    first, header, state = parts(path)
    rest = path.read_bytes().split(b"\n", 1)[1]
    assert first == {"merit_lab_checkpoint": 1, "sha256": hashlib.sha256(rest).hexdigest()}
    assert header["step"] == 10 and Recipe.from_dict(header["recipe"]) == TINY and header["precision"] == "fp32"
    assert header["text"] == {"name": "synthetic", "sha256": corpus.sha256, "synthetic": True}
    assert header["versions"]["torch"] == torch.__version__
    loaded = torch.load(io.BytesIO(state), weights_only=True)
    assert loaded.keys() == {"model", "optimizer", "records"} and len(records_of(path)) == 10


def cut_short(raw):
    return raw[: len(raw) // 2]


def changed(raw):
    return raw[:-3000] + bytes([raw[-3000] ^ 1]) + raw[-2999:]


def state_dict(_):
    torch.save({"model": {"weight": torch.zeros(3)}}, buffer := io.BytesIO())
    return buffer.getvalue()


DAMAGE = [
    (cut_short, "its checksum is wrong: it was cut short or changed"),
    (lambda raw: raw[:-1], "its checksum is wrong"),
    (lambda raw: raw + b"\0", "its checksum is wrong"),
    (changed, "its checksum is wrong"),
    (lambda raw: raw.replace(b'"step": 10', b'"step": 11'), "its checksum is wrong"),
    (lambda raw: raw[:40], "it is not a checkpoint of merit_lab"),
    (lambda raw: b"", "it is not a checkpoint of merit_lab"),
    (lambda raw: b"\x89PNG\r\n\x1a\n" + raw, "it is not a checkpoint of merit_lab"),
    (lambda raw: b"[1]\n", "it is not a checkpoint of merit_lab"),
    (lambda raw: b'{"merit_lab_run":1}\n', "it is not a checkpoint of merit_lab"),
    (state_dict, "it is not a checkpoint of merit_lab"),
]


@pytest.mark.parametrize("damage, says", DAMAGE)
def test_a_damaged_one_is_said_and_the_one_before_is_taken(folder, corpus, in_one_go, damage, says):
    newest = folder / "step-000010.checkpoint"
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.warns(UserWarning, match=f"step-000010.checkpoint cannot be used: {says}.*Step 5's is") as said:
        training = train(TINY, corpus, checkpoint=folder, checkpoint_every=7)
    assert [warning.filename for warning in said] == [__file__]
    assert training.resumed == 5 and newest.exists()
    assert (numbers(training), bits(training)) == in_one_go
    assert names(folder) == ["step-000007.checkpoint", "step-000012.checkpoint"]  # 10 is of no use and gone


def test_a_damaged_one_is_replaced_when_its_step_comes_again(folder, corpus, in_one_go):
    newest = folder / "step-000010.checkpoint"
    whole = newest.read_bytes()
    newest.write_bytes(cut_short(whole))
    with pytest.warns(UserWarning, match="cannot be used"):
        training = train(TINY, corpus, checkpoint=folder, checkpoint_every=10, keep=3)
    assert (numbers(training), bits(training)) == in_one_go
    assert names(folder) == [f"step-{step:06d}.checkpoint" for step in (5, 10, 12)]
    assert parts(newest)[1]["step"] == 10 and len(newest.read_bytes()) > len(whole) // 2


def test_where_none_is_good_it_is_refused_and_nothing_is_touched(folder, corpus):
    for path in folder.iterdir():
        path.write_bytes(cut_short(path.read_bytes()))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    says = r"no checkpoint can be used \(step-000010.*cut short.*; step-000005.*cut short.*\); remove them to train"
    with pytest.raises(InputError, match=says):
        train(TINY, corpus, checkpoint=folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_no_single_bit_can_change_unnoticed(folder, corpus):
    (folder / "step-000005.checkpoint").unlink()
    path = folder / "step-000010.checkpoint"
    raw = path.read_bytes()
    chance = random.Random(0)
    for place in [*range(0, 110), *(chance.randrange(len(raw)) for _ in range(60))]:
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << chance.randrange(8)]) + raw[place + 1 :])
        try:
            training = train(TINY, corpus, checkpoint=folder)
        except InputError:
            continue
        # A space between two words of JSON may become another; then nothing else has changed.
        assert raw[place : place + 1].isspace() and training.resumed == 10, place


def test_a_renamed_one_is_not_taken_for_another_step(folder, corpus):
    (folder / "step-000005.checkpoint").rename(folder / "step-000011.checkpoint")
    with pytest.warns(UserWarning, match="it is step 5's under another name"):
        assert train(TINY, corpus, checkpoint=folder).resumed == 10


def test_one_that_cannot_be_read(folder, corpus, monkeypatch):
    def failing(file, path):
        if path.name == "step-000010.checkpoint":
            raise OSError(errno.EIO, "Input/output error")
        return original(file, path)

    original = checkpoint._read_header
    monkeypatch.setattr(checkpoint, "_read_header", failing)
    with pytest.warns(UserWarning, match=r"it cannot be read \(Input/output error\)"):
        assert train(TINY, corpus, checkpoint=folder).resumed == 5


class Touch:
    """What unpickles to a file made in the current folder."""

    def __reduce__(self):
        return open, ("touched", "w")


def test_loading_runs_no_code(folder, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(pickle.loads(pickle.dumps(Touch()))):  # so it would be done
        Path("touched").unlink()
    torch.save({"records": Touch()}, buffer := io.BytesIO())
    for path in folder.iterdir():
        rewrite(path, state=buffer.getvalue())
    with pytest.raises(InputError, match="it holds something else than the state of this run"):
        train(TINY, corpus, checkpoint=folder)
    assert not Path("touched").exists()


# -- another run's -----------------------------------------------------------------------------------------------

OTHER = {
    "model": (BASE["model"] | {"qk_norm": True}, "model.qk_norm is not set there and True here"),
    "text": ("addresses", "text is 'synthetic' there and 'addresses' here"),
    "optimizer": ("LAMB", "optimizer is 'MERIT' there and 'LAMB' here"),
    "optimizer_args": ({"weight_decay": 0.2}, "optimizer_args.weight_decay is 0.1 there and 0.2 here"),
    "lr": (3e-2, "lr is 0.02 there and 0.03 here"),
    "batch_size": (8, "batch_size is 6 there and 8 here"),
    "micro_batch_size": (3, "micro_batch_size is None there and 3 here"),
    "tokens": (6 * 8 * 20, "tokens is 576 there and 960 here"),
    "warmup": (0.5, "warmup is 0.02 there and 0.5 here"),
    "final_lr": (0.0, "final_lr is 0.1 there and 0.0 here"),
    "grad_clip": (None, "grad_clip is 1.0 there and None here"),
    "qk_clip": (50.0, "qk_clip is None there and 50.0 here"),
    "seed": (1, "seed is 0 there and 1 here"),
    "precision": ("bf16", "precision is 'fp32' there and 'bf16' here"),
    "block_size": (16, "block_size is 8 there and 16 here"),
    "probe_every": (2, "probe_every is 4 there and 2 here"),
    "eval_every": (2, "eval_every is 6 there and 2 here"),
    "noise_every": (6, "noise_every is None there and 6 here"),
    "eval_sequences": (8, "eval_sequences is 4 there and 8 here"),
}


@pytest.mark.parametrize("field", OTHER)
def test_a_checkpoint_of_another_recipe_is_refused(folder, corpus, field):
    value, says = OTHER[field]
    recipe = Recipe(**TINY.to_dict() | {field: value})
    with pytest.raises(InputError) as refused:
        train(recipe, corpus, checkpoint=folder)
    assert f"another recipe: {says}; take the recipe as it was" in str(refused.value)
    assert str(folder) in str(refused.value) and "another folder" in str(refused.value)
    assert len(names(folder)) == 2


def test_every_field_but_the_device_is_tried():
    assert {field.name for field in dataclasses.fields(Recipe)} - {"device"} == OTHER.keys()


def test_several_differences_are_all_named(folder, corpus):
    with pytest.raises(InputError, match="lr is 0.02 there and 0.5 here; seed is 0 there and 4 here; take"):
        train(TINY.replace(lr=0.5, seed=4), corpus, checkpoint=folder)


@pytest.mark.parametrize("changes", [{"device": "auto"}, {"precision": "fp32"}])
def test_what_comes_to_the_same_may_differ(folder, corpus, in_one_go, changes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    training = train(TINY.replace(**changes), corpus, checkpoint=folder)
    assert training.resumed == 10
    assert (numbers(training), bits(training)) == in_one_go


def test_a_checkpoint_of_another_text_is_refused(folder, corpus):
    other = dataclasses.replace(corpus, name="mine", sha256="f" * 64)
    here = r"synthetic \(sha256 [0-9a-f]{12}\) there, mine \(sha256 f{12}\) here; train on the text as it was"
    with pytest.raises(InputError, match=f"another text: {here}"):
        train(TINY, other, checkpoint=folder)


def test_another_format_is_refused_though_an_older_one_would_do(folder, corpus):
    rewrite(folder / "step-000010.checkpoint", format_=2)
    with pytest.raises(InputError, match="step-000010.checkpoint has format 2, and this version reads 1; go on with"):
        train(TINY, corpus, checkpoint=folder)


def test_another_version_of_torch_is_said(folder, corpus):
    rewrite(folder / "step-000010.checkpoint", versions={"torch": "2.0.1"})
    with pytest.warns(UserWarning, match=r"written by torch 2\.0\.1, this is .*last digits") as said:
        assert train(TINY, corpus, checkpoint=folder).resumed == 10
    assert [warning.filename for warning in said] == [__file__]


# -- disks and arguments -----------------------------------------------------------------------------------------


class FullDisk:
    """A file on a disk that is full, or where Ctrl-C is pressed, after so many bytes."""

    def __init__(self, file, room, error):
        self.file, self.room, self.error = file, room, error

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise self.error
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def disk_full_at(monkeypatch, step, room, error):
    """Let the checkpoint of this step find the disk full."""

    @contextlib.contextmanager
    def whole(path):
        with files.whole(path) as file:
            yield FullDisk(file, room, error) if path.name == f"step-{step:06d}.checkpoint" else file

    monkeypatch.setattr(checkpoint, "whole", whole)


@pytest.mark.parametrize("room", [0, 200, 1500, 5000, 20_000])
def test_a_full_disk_ends_the_run_and_what_was_there_is_kept(corpus, tmp_path, monkeypatch, in_one_go, room):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    place, out = tmp_path / "c", tmp_path / "run.jsonl"
    with monkeypatch.context() as patch:
        disk_full_at(patch, 6, room, full)
        recording = runs.record_to(out, train(TINY, corpus, checkpoint=place, checkpoint_every=3))
        says = r"that of step 6 cannot be written to .*/c \(No space left.*make room.*goes on from step 3"
        with pytest.raises(InputError, match=says) as refused:
            list(recording)
    assert refused.value.__cause__ is full
    assert names(place) == ["step-000003.checkpoint"]
    assert numbers(runs.read(tmp_path / "run.jsonl.partial")) == in_one_go[0][:5]
    training = train(TINY, corpus, checkpoint=place)
    assert training.resumed == 3
    assert (numbers(runs.record_to(out, training)), bits(training)) == in_one_go
    assert names(tmp_path) == ["c", "run.jsonl"] and numbers(runs.read(out)) == in_one_go[0]


class LittleRoom(io.FileIO):
    """An unbuffered file on a disk with room for so many bytes more."""

    room = 10**6

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().write(data[: self.room])
        self.room -= done
        return done


@pytest.mark.parametrize("kept, goes_on", [({}, "the beginning"), ({"checkpoint_every": 3}, "step 6")])
def test_a_disk_that_is_full_for_the_records(corpus, tmp_path, monkeypatch, in_one_go, kept, goes_on):
    out, partial = tmp_path / "run.jsonl", tmp_path / "run.jsonl.partial"
    kept = kept and {"checkpoint": tmp_path / "c"} | kept
    file = None

    def opened(path, mode, buffering):
        nonlocal file
        assert (mode, buffering) == ("ab", 0)
        file = LittleRoom(path, mode)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(runs, "open", opened, raising=False)
        recording = runs.record_to(out, train(TINY, corpus, **kept))
        here = list(islice(recording, 6))
        file.room = 50
        says = rf"run: {partial} cannot be written \(No space left.*{goes_on}$"
        with pytest.raises(InputError, match=says) as refused:
            next(recording)
    assert f"the records so far are in {partial}; make room there" in str(refused.value)
    assert len(partial.read_bytes().splitlines()[-1]) == 50  # half of a line more
    assert numbers(here) == numbers(runs.read(partial)) == in_one_go[0][:6]
    training = train(TINY, corpus, **kept)
    assert (numbers(runs.record_to(out, training)), bits(training)) == in_one_go
    assert not partial.exists() and numbers(runs.read(out)) == in_one_go[0]


@pytest.mark.parametrize("name", ["run.jsonl.partial", "run.npz", "run.jsonl"])
def test_a_disk_that_is_full_for_another_file_of_the_run(corpus, tmp_path, monkeypatch, name):
    @contextlib.contextmanager
    def whole(path):
        with files.whole(path) as file:
            yield FullDisk(file, 100, full) if path.name == name else file

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(runs, "whole", whole)
    partial = tmp_path / "run.jsonl.partial"
    with pytest.raises(InputError, match=rf"run: {tmp_path / name} cannot be written \(No space left") as refused:
        list(runs.record_to(tmp_path / "run.jsonl", train(TINY, corpus), keep_weights=True))
    assert (str(partial) + "; make" in str(refused.value)) == partial.exists() == (name != partial.name)
    assert not partial.exists() or len(runs.read(partial)) == STEPS


def test_ctrl_c_in_a_save_is_ctrl_c(corpus, tmp_path, monkeypatch):
    disk_full_at(monkeypatch, 6, 1500, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(train(TINY, corpus, checkpoint=tmp_path, checkpoint_every=3))
    assert names(tmp_path) == ["step-000003.checkpoint"]


def test_a_folder_that_is_gone_is_not_made_again(corpus, tmp_path):
    training = train(TINY, corpus, checkpoint=tmp_path / "c", checkpoint_every=3)
    recording = runs.record_to(tmp_path / "run.jsonl", training)
    records = list(islice(recording, 2))
    (tmp_path / "c").rmdir()
    with pytest.raises(InputError, match=r"step 3 cannot be written to .*/c \(the folder is gone\).*the beginning"):
        next(recording)
    assert names(tmp_path) == ["run.jsonl.partial"]
    assert list(runs.read(tmp_path / "run.jsonl.partial")) == records


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_one_is_refused_before_anything(tmp_path, monkeypatch, place):
    monkeypatch.setattr(text, "load", None)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=rf"checkpoint: got .*{place}, which .*/file is not a folder\); give"):
        train(TINY, checkpoint=tmp_path / place)


def test_a_read_only_folder_is_refused_at_the_start(tmp_path, monkeypatch):
    def read_only(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    with pytest.raises(InputError, match=r"checkpoint: got .*\(Read-only file system\)"):
        train(TINY, checkpoint=tmp_path)


def test_a_folder_that_becomes_read_only_costs_no_records(corpus, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def whole(_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        yield

    training = train(TINY, corpus, checkpoint=tmp_path / "c", checkpoint_every=3)
    recording = runs.record_to(tmp_path / "run.jsonl", training)
    records = list(islice(recording, 5))
    monkeypatch.setattr(checkpoint, "whole", whole)
    says = r"step 6 cannot be written to .*/c \(Read-only file system\).*goes on from step 3"
    with pytest.raises(InputError, match=says):
        next(recording)
    assert list(runs.read(tmp_path / "run.jsonl.partial")) == records
    assert names(tmp_path / "c") == ["step-000003.checkpoint"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"checkpoint_every": 0}, "checkpoint_every: got 0, expected a whole number ≥ 1 or None"),
        ({"checkpoint_every": 2.5}, "checkpoint_every: got 2.5"),
        ({"checkpoint_every": True}, "checkpoint_every: got True"),
        ({"keep": 0}, "keep: got 0, expected a whole number ≥ 1$"),
        ({"keep": None}, "keep: got None"),
        ({"checkpoint": None, "checkpoint_every": 5}, "checkpoint_every: got 5 without a folder.*give `checkpoint`"),
    ],
)
def test_wrong_arguments(corpus, tmp_path, arguments, says):
    with pytest.raises(InputError, match=says):
        train(TINY, corpus, **{"checkpoint": tmp_path / "c"} | arguments)
    assert names(tmp_path) == []


@pytest.mark.gpu
def test_a_run_moves_to_a_gpu_and_back(corpus, tmp_path):
    recipe = TINY.replace(precision="fp32")
    cuda, kept = recipe.replace(device="cuda"), {"checkpoint": tmp_path, "checkpoint_every": 4}
    list(islice(train(recipe, corpus, **kept), 5))
    moved = train(cuda, corpus, **kept)
    assert moved.resumed == 4
    list(islice(moved, 9))
    assert {state["exp_avg"].device.type for state in moved.optimizer.state.values()} == {"cuda"}
    back = train(recipe, corpus, **kept)
    assert back.resumed == 8
    losses = [[record.train_loss for record in run] for run in (back, train(recipe, corpus))]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=0)
    with pytest.raises(InputError, match="precision is 'fp32' there and 'bf16' here"):
        train(cuda.replace(precision="bf16"), corpus, **kept)


# -- recorded runs -----------------------------------------------------------------------------------------------


def lines(path):
    """A recorded run but for what the clock says."""
    header, *records = map(json.loads, Path(path).read_text().splitlines())
    return [header | {"date": None}] + [record | {"seconds": 0.0} for record in records]


def test_a_recorded_run_holds_every_step_once(corpus, tmp_path):
    list(runs.record_to(tmp_path / "whole.jsonl", train(TINY, corpus), keep_weights=True))
    out, kept = tmp_path / "run.jsonl", {"checkpoint": tmp_path / "c", "checkpoint_every": 2}
    partial = tmp_path / "run.jsonl.partial"
    for cut in (3, 7, 1):  # the last one ends while it yields what was kept
        recording = runs.record_to(out, train(TINY, corpus, **kept), keep_weights=True)
        list(islice(recording, cut))
        recording.close()
        assert not out.exists()
        assert len(runs.read(partial)) == {3: 3, 7: 7, 1: 6}[cut]
    for _ in range(2):  # to the end, and then from the end
        list(runs.record_to(out, train(TINY, corpus, **kept), keep_weights=True))
        assert lines(out) == lines(tmp_path / "whole.jsonl")
        run, whole = runs.read(out), runs.read(tmp_path / "whole.jsonl")
        assert run.complete and not partial.exists()
        assert all(torch.equal(a, b) for a, b in zip(run.weights().values(), whole.weights().values(), strict=True))


def test_recording_clears_what_a_killed_process_left(corpus, tmp_path):
    mine = [".run[1].jsonl.0a1b2c3d.tmp", ".run[1].jsonl.partial.0a1b2c3d.tmp", ".run[1].npz.0a1b2c3d.tmp"]
    for name in [*mine, ".run1.jsonl.0a1b2c3d.tmp"]:
        (tmp_path / name).touch()
    list(runs.record_to(tmp_path / "run[1].jsonl", train(TINY, corpus)))
    assert names(tmp_path) == [".run1.jsonl.0a1b2c3d.tmp", "run[1].jsonl"]


def test_a_comparison_goes_on(corpus, tmp_path, monkeypatch):
    recipes = [TINY.replace(optimizer=name) for name in ("AdamW", "+ bound")]
    entries = [compare.Entry(recipe, "given") for recipe in recipes]
    kept = {"checkpoint": tmp_path / "c", "checkpoint_every": 4, "keep": 1}
    list(islice(compare.run(entries, tmp_path, corpus, **kept), STEPS + 5))
    assert names(tmp_path / "c") == ["AdamW", "plus-bound"]
    computed = []
    original = Training._accumulate_gradients
    monkeypatch.setattr(
        Training, "_accumulate_gradients", lambda self, step: (computed.append(step), original(self, step))[1]
    )
    assert len(list(compare.run(entries, tmp_path, corpus, **kept))) == 2 * STEPS
    assert computed == list(range(5, STEPS + 1))
    for recipe, run in zip(recipes, compare.read(entries, tmp_path), strict=True):
        assert numbers(run) == numbers(train(recipe, corpus))


# -- killing -----------------------------------------------------------------------------------------------------


def killed(folder, wanted):
    """What tests/killed.py says. It fails where a run is not what it is undisturbed."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_thousand_steps_are_four_hundred_a_kill_and_six_hundred(tmp_path):
    assert killed(tmp_path, "400+600") == {"steps": 1000, "after the kill": 600}


def test_a_hundred_kills_change_nothing(tmp_path):
    """MERIT_LAB_KILLS sets how many."""
    wanted = int(os.environ.get("MERIT_LAB_KILLS", "100"))
    told = killed(tmp_path, str(wanted))
    assert told["kills"] == wanted and told["runs"] >= 1
    assert wanted < 100 or told["in_save"] > 0  # some of them left a file half written
