"""Garbage in: recipes, recorded runs, texts, sweeps and checkpoints that are broken in every way we can think of.

Whatever comes, there are two right answers: an InputError in words, or a value that can be worked with. Never another
exception, never a file that is lost or altered. Each input that once broke this stands here as an example.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import pickle
import random
import shutil
import warnings
from collections import Counter
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from merit_lab import Recipe, figures, runs, text, train
from merit_lab import sweep as sweeps
from merit_lab.corpora import _hash_of_files
from merit_lab.errors import InputError, shown
from merit_lab.figures.curves import curves
from merit_lab.models import GPT2Config
from merit_lab.models.gpt2 import LARGEST, LARGEST_MODEL
from merit_lab.sweep import Pool, Sweep
from merit_lab.training import StepRecord

fed = Counter()  # how many inputs of each kind were tried
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def quick():
    """No waiting for the disk: what is tested is what is written, not whether a power cut spares it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("MERIT_LAB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An empty folder for each call."""
    counter, root = itertools.count(), tmp_path_factory.mktemp("garbage")

    def new():
        folder = root / str(next(counter))
        folder.mkdir()
        return folder

    return new


def tried(kind, call, *arguments):
    """What the call returns, or its message if that is an InputError; any other exception is a failure."""
    fed[kind] += 1
    try:
        return call(*arguments), None
    except InputError as error:
        message = str(error)
        assert message.strip() and len(message) < 3000
        return None, message


HUGE = [10**400, -(10**400), 2**63, 2**53 + 1, 10**15 + 1, 1e308, 5e-324]
PLAIN = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2, 3, 0.5, -0.0, math.nan, math.inf, -math.inf, *HUGE]),
    st.sampled_from(["", "nano", "MERIT", "\ud800", "\0", "é\u2028", "file:\ud800", "x" * 5000, "1e-3", "~nobody"]),
    st.sampled_from([[], [[]], [0.9], [0.9, 0.95], [0.9, 10**400], {}, {"named": "nano"}, {"": 1}, {"a": {"b": {}}}]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)
HOSTILE = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.text(max_size=3), PLAIN, max_size=2),
    st.builds(  # made anew each time, since some can be changed
        lambda make: make(),
        st.sampled_from([
            lambda: np.int64(3), lambda: np.float32(0.5), lambda: np.bool_(True), lambda: np.array([1, 2]),
            lambda: torch.tensor(0.25), lambda: torch.ones(2), lambda: Decimal(1), lambda: Fraction(1, 3),
            lambda: Fraction(10**400), lambda: date(1979, 5, 27), lambda: b"x", object, lambda: 1j, lambda: {1: 2},
            lambda: 10**5000, lambda: (0.9, np.float32(0.95)), lambda: {"n_layer": np.int64(2)}, lambda: {1, 2},
        ]),
    ),
)  # fmt: skip


@st.composite
def damaged(draw, content: bytes, tokens: tuple[bytes, ...]):
    """The content after one to three accidents: cut, flipped, repeated, with something put in or taken out."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        to = min(len(content), at + draw(st.integers(0, 12)))
        accident = draw(st.integers(0, 6))
        lines = content.split(b"\n")
        line = min(content.count(b"\n", 0, at), len(lines) - 1)
        if accident == 0:
            content = content[:at]
        elif accident == 1 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
        elif accident == 2:
            content = content[:at] + content[to:]
        elif accident == 3:
            content = content[:at] + draw(st.sampled_from(tokens) | st.binary(max_size=4)) + content[to:]
        elif accident == 4:
            content = b"\n".join([*lines[:line], *lines[line + 1 :]])
        elif accident == 5:
            content = b"\n".join([*lines[: line + 1], *lines[line:]])
        else:
            content = b"\n".join([*lines[:line], *lines[line + 1 :], lines[line]])
    return content


def test_a_value_is_shown_whatever_it_is():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(10**5000) == "a int too large to be shown" and shown(nested) == "a list too large to be shown"
    assert shown("x" * 1000) == "'" + "x" * 199 + "…" and shown({"a": 1}) == "{'a': 1}"
    while nested:  # taken apart by hand: Python would do it level by level, on its stack
        nested = nested.pop()


# -- recipes -----------------------------------------------------------------------------------------------------

BASE = {"model": {"named": "nano", "n_layer": 1}, "text": "synthetic", "batch_size": 4, "tokens": 10_000}
FIELDS = [f.name for f in dataclasses.fields(Recipe)]
SIZES = [f.name for f in dataclasses.fields(GPT2Config)]
NAMED_AS = {"model": SIZES, "block_size": ["tokens", "batch_size"], "batch_size": ["tokens"], "text": ["text"]}
ARGUMENTS = ["betas", "eps", "weight_decay", "clip", "bound", "norm", "ratio", "variant", "maximize", "skip_nonfinite"]
TOML = b"""model = {named = "nano", n_layer = 1}
text = "synthetic"
optimizer = "LAMB"
batch_size = 4
tokens = 10_000
lr = 1e-2
warmup = 0.1
seed = 3
[optimizer_args]
betas = [0.9, 0.95]
max_weight_norm = 10.0
"""
TOML_TOKENS = (
    b"nan", b"inf", b"-", b"1e999", b"9" * 5000, b"[" * 3000, b"{a=" * 3000, b"1979-05-27", b"'''", b'"', b"\\ud800",
    b"= =", b"true", b"[]", b"{}", b"\x00", b"\xff", b"\r", b"[model]\n", b"0x", b"a.b.c=1\n", b"\xef\xbb\xbf",
)  # fmt: skip


def sound(recipe):
    """A recipe that came through is one: it survives JSON, and what it asks for has a limit."""
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    config = recipe.model_config()
    assert all(getattr(config, name) <= most for name, most in LARGEST.items())
    assert 12 * config.n_layer * config.n_embd**2 + config.vocab_size * config.n_embd <= LARGEST_MODEL
    assert 1 <= recipe.n_steps <= 10**15 and recipe.tokens_per_step <= 2**28
    assert sweeps.run_name(recipe)


@settings(max_examples=1200)
@given(field=st.sampled_from(FIELDS), value=HOSTILE)
@example("lr", 10**400)
@example("tokens", 10**5000)
@example("tokens", 10**400)
@example("batch_size", 10**12)
@example("device", np.array([1, 2]))
@example("optimizer", ["MERIT"])
@example("model", {"named": "nano", "n_layer": 10**9})
@example("model", {"named": "nano", "n_embd": 2**16})
@example("model", {"n_layer": np.int64(2)})
@example("model", {"vocab_size": 10**5000})
@example("block_size", 10**9)
def test_a_field_that_is_garbage_is_named(field, value):
    recipe, message = tried("recipes", Recipe.from_dict, BASE | {field: value})
    if recipe is None:
        assert any(name in message for name in [field, *NAMED_AS.get(field, [])]), message
    else:
        sound(recipe)


@settings(max_examples=500)
@given(name=st.sampled_from([*SIZES, "named", "size"]), value=HOSTILE, other=st.sampled_from(SIZES), large=PLAIN)
def test_a_size_of_the_model_that_is_garbage_is_named(name, value, other, large):
    recipe, message = tried("recipes", Recipe.from_dict, BASE | {"model": {"named": "nano", other: large, name: value}})
    if recipe is None:
        assert any(word in message for word in [name, other, "model", "qk_clip", "tokens"]), message
    else:
        sound(recipe)


@settings(max_examples=500)
@given(
    optimizer=st.sampled_from(["AdamW", "LAMB", "MERIT", "+ bound", "MERIT l2"]),
    name=st.sampled_from([*ARGUMENTS, "max_weight_norm", "momentum"]),
    value=HOSTILE,
)
@example("MERIT l2", "norm", np.array(["l2", "max"]))
@example("MERIT", "norm", np.array(["l2", "max"]))
@example("LAMB", "max_weight_norm", 10**400)
@example("AdamW", "eps", 10**400)
@example("AdamW", "eps", np.float32(1e-8))
@example("AdamW", "weight_decay", Fraction(1, 3))
@example("AdamW", "betas", (0.9, np.float32(0.95)))
@example("AdamW", "eps", torch.tensor(1e-8))
def test_an_argument_of_the_optimizer_that_is_garbage_is_named(optimizer, name, value):
    values = BASE | {"optimizer": optimizer, "optimizer_args": {name: value}}
    recipe, message = tried("recipes", Recipe.from_dict, values)
    if recipe is None:
        assert name in message, message
    else:
        sound(recipe)


@settings(max_examples=500)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5) | st.integers(), HOSTILE, max_size=8) | HOSTILE)
def test_a_table_of_garbage_is_no_recipe(values):
    recipe, message = tried("recipes", Recipe.from_dict, values)
    if recipe is not None:
        sound(recipe)
    elif isinstance(values, dict):
        assert any(name in message for name in [*FIELDS, *SIZES, "field"])


@settings(max_examples=700)
@given(damaged(TOML, TOML_TOKENS) | st.binary(max_size=40))
@example(b"seed = " + b"9" * 5000)
@example(b"lr = " + b"[" * 5000)
@example(b"lr = " + b"{a=" * 5000)
def test_a_recipe_file_that_is_garbage_is_refused_and_left_alone(place, content):
    path = place() / "recipe.toml"
    path.write_bytes(content)
    recipe, message = tried("recipes", Recipe.read, path)
    assert path.read_bytes() == content
    if recipe is not None:
        sound(recipe)
    else:
        assert "not TOML" in message or any(name in message for name in [*FIELDS, *SIZES, *ARGUMENTS, "field"])


# -- recorded runs -----------------------------------------------------------------------------------------------

TINY = {"n_layer": 2, "n_head": 1, "n_embd": 2, "block_size": 4, "vocab_size": 8}
OF_TINY = Recipe(model=TINY, text="file:é\u2028.txt", batch_size=1, tokens=12, device="cpu")
JSON_TOKENS = (
    b"NaN", b"Infinity", b"null", b"true", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b'"', b"\\ud800",
    b"\xff", b"\x00", b"\r", b",", b"}", b"-", b"\xe2\x80\xa8", b"\n", b"0",
)  # fmt: skip


def record(step):
    """A step at which everything is measured."""
    return StepRecord(
        step=step, tokens=4 * step, lr=0.01, train_loss=2.0, grad_norm=1.0, seconds=0.1, val_loss=2.1,
        max_attention_logit=[[3.0], [4.0]], max_attention_logit_signed=[[3.0], [-4.0]],
        attention_entropy=[[0.5], [0.6]],
        largest_logit={"layer": 1, "head": 0, "sequence": 0, "query": 1, "key": 0, "logit": 3.0, "softmax": [0.9, 0.1]},
        ratios={"head.weight": {"quantiles": [0.1] * 5, "weight_ratio": 0.1, "won_row": 0.5, "won_column": 0.5,
                                "won_bound": 0.0, "guarded": 0.0, "clipped": 0.0,
                                "row_quantiles": [0.1] * 5, "column_quantiles": None}},
        clipped_heads=0, noise_scale={"gradient_sq": -0.1, "trace": 2.0},
    )  # fmt: skip


HEADER = {"merit_lab_run": 1, "recipe": {"model": TINY, "text": OF_TINY.text, "batch_size": 1, "tokens": 12}}
HEADER["recipe"] |= {"device": "cpu"}
RECORDS = [record(step) for step in (1, 2)]
LINES = [HEADER, *(r.to_dict() for r in RECORDS)]


@functools.cache
def recorded() -> bytes:
    return b"".join(runs._line(line) for line in LINES)


def is_real(value):
    return type(value) in (int, float) and (math.isnan(value) or float(value) == value)


def usable(run):
    """The records hold what StepRecord says, and figures and comparisons can ask them everything."""
    assert isinstance(run.recipe, Recipe) and repr(run) and run.name
    assert run.complete in (True, False) and is_real(run.final_val_loss) and is_real(run.peak_logit)
    steps = [r.step for r in run]
    assert steps == sorted(set(steps)) and all(type(step) is int for step in steps)
    for r in run:
        assert all(map(is_real, (r.lr, r.train_loss, r.grad_norm, r.seconds))) and type(r.tokens) is int
        assert type(r.diverged) is bool and (r.val_loss is None or is_real(r.val_loss))
        for table in (r.max_attention_logit, r.max_attention_logit_signed, r.attention_entropy):
            assert table is None or (np.array(table).dtype.kind in "fi" and np.array(table).ndim == 2)
        assert StepRecord.from_dict(json.loads(json.dumps(r.to_dict()))).step == r.step
    (curve,) = curves(run)
    for quantity in ("train_loss", "val_loss", "peak_logit", "attention_entropy"):
        measured, values = curve.series(quantity)
        assert len(measured) == len(values)


def read_garbage(path, content, kind="runs"):
    path.write_bytes(content)
    run, message = tried(kind, runs.read, path)
    assert path.read_bytes() == content
    if run is None:
        assert str(path) in message
    else:
        usable(run)
    return run, message


def test_a_run_reads_as_it_was_written_whatever_its_text_is_called(place):
    run, _ = read_garbage(place() / "r.jsonl", recorded())
    assert list(run) == RECORDS and run.recipe == OF_TINY
    recipe = OF_TINY.replace(text="file:\udcff.txt")  # a name that is not UTF-8, as Linux allows
    path = place() / "r.jsonl"
    runs.write(path, HEADER | {"recipe": recipe.to_dict()}, RECORDS)
    assert runs.read(path).recipe == recipe


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.partial"])
def test_a_run_cut_at_any_byte(place, name):
    path, content = place() / name, recorded()
    ends = [at for at in range(len(content)) if content[at : at + 1] == b"\n"]
    for at in range(len(content)):
        run, message = read_garbage(path, content[:at])
        whole = sum(end <= at for end in ends)  # lines, the header among them
        if name.endswith(".partial") and whole:
            assert list(run) == RECORDS[: whole - 1], at  # up to the last whole line, wherever it was cut
        elif at in ends or at - 1 in ends:
            assert list(run) == RECORDS[: whole - 1]
        else:
            assert run is None and f"line {min(whole, len(ends)) + 1}" in message


def test_a_run_with_a_bit_flipped_at_any_byte(place):
    path, content, bit = place() / "r.jsonl", recorded(), random.Random(0)
    for at in range(len(content)):
        read_garbage(path, content[:at] + bytes([content[at] ^ 1 << bit.randrange(8)]) + content[at + 1 :])


@settings(max_examples=600)
@given(damaged(recorded(), JSON_TOKENS) | st.binary(max_size=60))
@example(b"[" * 100_000)
@example(recorded() + b"[" * 100_000)
@example(recorded() + b"\xff\n")
@example(recorded() + recorded().split(b"\n")[3] + b"\n")
@example(b'{"merit_lab_run": ' + b"9" * 5000 + b"}")
def test_a_run_after_accidents(place, content):
    read_garbage(place() / "r.jsonl", content)


def places_in(value, path=()):
    """The paths to everything inside nested dicts and lists."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places_in(inner, (*path, key))


@functools.cache
def all_places():
    return [(number, path) for number, line in enumerate(LINES[:2]) for path in places_in(line)]


REMOVED = object()


def with_value(line, path, value):
    """A copy of nested dicts and lists in which one place holds something else, or nothing."""
    copied = json.loads(json.dumps(line))
    inner = functools.reduce(lambda table, key: table[key], path[:-1], copied)
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


@settings(max_examples=1200)
@given(st.sampled_from(all_places()), PLAIN | st.just(REMOVED))
@example((1, ("train_loss",)), "2.0")
@example((1, ("step",)), True)
@example((1, ("max_attention_logit",)), [[]])
@example((1, ("max_attention_logit",)), [[1.0, 2.0], [3.0]])
@example((1, ("max_attention_logit",)), [[1.0]])
@example((1, ("grad_norm",)), 10**400)
@example((1, ("ratios", "head.weight", "quantiles")), [0.1])
@example((1, ("ratios", "head.weight", "row_quantiles")), [0.1])
@example((1, ("largest_logit", "softmax")), [])
@example((1, ("seconds",)), REMOVED)
@example((0, ("recipe", "model", "n_head")), 2)
@example((1, ("diverged",)), True)
def test_a_run_with_a_value_that_is_garbage(place, where, value):
    number, path = where
    lines = [with_value(line, path, value) if i == number else line for i, line in enumerate(LINES)]
    written = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    run, message = read_garbage(place() / "r.jsonl", written)
    if run is None and number:  # a step that is too large, or an end that comes early, shows in the line after it
        assert "line 2" in message or "line 3: step 2 comes after" in message


@settings(max_examples=25)
@given(st.sampled_from(all_places()), st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 0, 1e308, -5, 3, REMOVED]))
def test_what_can_be_read_can_be_drawn(place, where, value):
    number, path = where
    lines = [with_value(line, path, value) if i == number else line for i, line in enumerate(LINES)]
    run, _ = read_garbage(place() / "r.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    if run is not None:
        for draw in (figures.loss_and_logit, figures.logit_by_layer):
            tried("figures", draw, run)


def test_folders_pipes_and_names_that_no_file_can_have(place):
    folder = place()
    os.mkfifo(folder / "pipe")  # whoever opens it waits for a writer
    (folder / "folder.jsonl").mkdir()
    for reader in (runs.read, Recipe.read, Sweep.read, sweeps.read_rows):
        for name in ("pipe", "folder.jsonl", "no\0name", "\ud800", "x" * 300):
            _, message = tried("paths", reader, folder / name)
            assert "cannot" in message
    _, message = tried("paths", runs.read_many, folder)
    assert "folder.jsonl" in message
    for spec in ("pipe", "folder.jsonl", "no\0name", "\ud800", "x" * 300):
        for kind in ("file", "folder", "hf"):
            loaded, _ = tried("paths", lambda spec=f"{kind}:{folder}/{spec}": text.load(spec, cache=folder / "cache"))
            assert loaded is None


def test_one_bad_run_of_a_folder_is_named(place):
    folder = place()
    (folder / "a.jsonl").write_bytes(recorded())
    for bad in (b"", b"\xff", recorded()[:-5], b"[]"):
        (folder / "b.jsonl").write_bytes(bad)
        found, message = tried("runs", runs.read_many, folder)
        assert found is None and "b.jsonl" in message
    (folder / "b.jsonl").write_bytes(recorded())
    assert len(runs.read_many(folder)) == 2


@functools.cache
def kept_weights() -> bytes:
    import io

    file = io.BytesIO()
    np.savez_compressed(file, **{"blocks.0.attention.query.weight": np.ones((4, 4), np.float16)})
    return file.getvalue()


@functools.cache
def pickled_weights() -> bytes:
    import io

    file = io.BytesIO()
    np.savez(file, w=np.array([{1, 2}], dtype=object))
    return file.getvalue()


@settings(max_examples=300)
@given(damaged(kept_weights(), (b"PK", b"\x93NUMPY", b"\x80\x04.")) | st.binary(max_size=20))
@example(pickled_weights())
@example(pickle.dumps({"w": 1}))
@example(b"\x93NUMPY")
def test_weights_that_are_garbage(place, content):
    path = place() / "r.npz"
    path.write_bytes(content)
    run = runs.Run(HEADER, [], path.with_name("r.jsonl"))
    found, message = tried("weights", run.weights)
    assert path.read_bytes() == content
    if found is None:
        assert str(path) in message and "record the run again" in message
    else:
        assert all(weight.dtype == torch.float32 for weight in found.values())


# -- texts -------------------------------------------------------------------------------------------------------

STORY = ("It was a dark and stormy night; " * 12).encode()
TEXT_TOKENS = (
    b"\xed\xa0\x80", b"\xff", b"\x00", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\xc3\xa9", b"\x0c", b"\xe2\x80\xa8",
)  # fmt: skip
CONTENTS = st.one_of(
    damaged(STORY, TEXT_TOKENS),
    st.binary(max_size=30),
    st.text(max_size=30).map(lambda s: s.encode(errors="surrogatepass")),
    st.tuples(st.sampled_from([b"\n", b"a", b"ab", *TEXT_TOKENS]), st.integers(0, 400)).map(lambda x: x[0] * x[1]),
)


def tokens_of(corpus):
    told = corpus.alphabet, corpus.vocab_size, corpus.sha256, corpus.tokenizer
    return corpus.train.tolist(), corpus.val.tolist(), *told


@settings(max_examples=700)
@given(CONTENTS, st.sampled_from([1, 4, 64]))
@example(b"", 4)
@example(b"\xed\xa0\x80", 4)
@example(b"a" * 300_000, 4)
def test_a_text_that_is_garbage_is_refused_or_kept_to_the_letter(place, content, block_size):
    folder = place()
    path = folder / "text.txt"
    path.write_bytes(content)
    corpus, message = tried(
        "texts", lambda: text.load(f"file:{path}", cache=folder / "cache", block_size=block_size)
    )
    assert path.read_bytes() == content
    if corpus is None:
        assert str(path) in message or path.name in message
    else:
        expected = content.decode().removeprefix("\ufeff").replace("\r\n", "\n")
        assert corpus.decode(corpus.train) + corpus.decode(corpus.val) == expected
        assert min(len(corpus.train), len(corpus.val)) > block_size


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from([b"a.txt", b"b.md", b"c.TXT", b"d.png", b".e.txt", b"sub/f.txt", b"\xff.txt", b"g\n.txt"]),
        CONTENTS, max_size=4,
    )
)  # fmt: skip
@example({b"\xff.txt": STORY})
def test_a_folder_of_garbage_is_refused_or_kept_to_the_letter(place, contents):
    folder = place()
    (folder / "texts" / "sub").mkdir(parents=True)
    paths = {Path(os.fsdecode(os.path.join(os.fsencode(folder / "texts"), name))): c for name, c in contents.items()}
    for path, content in paths.items():
        path.write_bytes(content)
    corpus, _ = tried("texts", lambda: text.load(f"folder:{folder / 'texts'}", cache=folder / "cache"))
    assert all(path.read_bytes() == content for path, content in paths.items())
    if corpus is not None:
        meant = [path for path in sorted(paths) if path.suffix.lower() in (".txt", ".md") and path.name[0] != "."]
        meant = [paths[path].decode().removeprefix("\ufeff").replace("\r\n", "\n") for path in meant]
        between = len("\n\n") * (sum(len(t) > 1 for t in meant) - 1 + sum(len(t) > 0 for t in meant) - 1)
        assert len(corpus.train) + len(corpus.val) == sum(map(len, meant)) + between


def test_the_hash_of_a_folder_tells_names_apart_that_are_not_utf8(place):
    folder = place()
    for name in (b"\xff.txt", b"\xfe.txt"):
        (folder / os.fsdecode(name)).write_bytes(b"")
    one, other = (_hash_of_files(folder, [folder / os.fsdecode(name)]) for name in (b"\xff.txt", b"\xfe.txt"))
    assert one != other


@settings(max_examples=600)
@given(
    st.one_of(
        st.text(max_size=20),
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["file", "folder", "hf", "shakespeare", "synthetic", "File", ""]),
            st.sampled_from([":", "", "@"]),
            st.text(max_size=12), st.sampled_from(["@gpt2", "@chars", "@", "@bpe", ""]),
        ),
        HOSTILE,
    )
)  # fmt: skip
@example("file:~nobody-at-all/x")
@example("folder:~nobody-at-all")
@example("hf:~nobody-at-all")
@example("file:\0")
@example("folder:\0")
@example("hf:\0")
@example("file:" + "x" * 300)
@example("folder:" + "x" * 300)
@example("hf:" + "x" * 300)
@example("x" * 300)
@example("\0")
@example("~nobody-at-all")
def test_a_name_of_a_text_that_is_garbage(place, spec):
    _, message = tried("names", text.check_spec, spec)
    # What could be a text of this machine, or is one that is there or fetched, is not looked for.
    there = ("synthetic", "synthetic@chars")
    if isinstance(spec, str) and not any(sign in spec for sign in "/\\.") and spec not in there:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            folder = place()
            patch.chdir(folder)
            warnings.simplefilter("ignore")  # that Shakespeare is not there
            corpus, refused = tried("names", lambda: text.load(spec, cache=folder / "cache", offline=True))
        assert refused or corpus.synthetic
        assert not message or refused


@pytest.fixture(scope="module")
def prepared(place):
    """A prepared text: its source, its cache, its files' contents and its tokens."""
    folder = place()
    source = folder / "story.txt"
    source.write_bytes(STORY)
    corpus = text.load(f"file:{source}", cache=folder / "cache")
    (kept,) = (folder / "cache" / "tokens").iterdir()
    return source, folder / "cache", {path: path.read_bytes() for path in kept.iterdir()}, tokens_of(corpus)


def load_damaged(prepared):
    """Load after some damage: the same tokens, and every file as before or a warning; nothing else altered."""
    source, cache, contents, tokens = prepared
    fed["prepared"] += 1
    changed = [path for path, content in contents.items() if not path.is_file() or path.read_bytes() != content]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        corpus = text.load(f"file:{source}", cache=cache)
    assert tokens_of(corpus) == tokens and source.read_bytes() == STORY
    assert (corpus.name, corpus.synthetic, corpus.licence) == ("story.txt", False, "the user's own text")
    if said:
        assert changed and "cannot be used" in str(said[0].message) and "Preparing it again" in str(said[0].message)
        assert all(path.read_bytes() == content for path, content in contents.items())
    else:  # not a token nor a letter differs: a blank between two values of meta.json at most
        assert all(path.name == "meta.json" for path in changed)
    for path, content in contents.items():
        path.write_bytes(content)
    return bool(said)


def test_a_prepared_text_with_a_bit_flipped_at_any_byte(prepared):
    bit = random.Random(1)
    for path, content in prepared[2].items():
        step = 1 if path.name == "meta.json" else 7
        for at in range(0, len(content), step):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit.randrange(8)]) + content[at + 1 :])
            assert load_damaged(prepared) or content[at : at + 1].isspace()


@pytest.mark.parametrize(
    "field, value",
    [("dtype", ">u2"), ("dtype", "O"), ("vocab_size", 1), ("alphabet", "x" * 17), ("synthetic", True), ("licence", ""),
     ("name", "other"), ("tokenizer", "gpt2"), ("train_tokens", 0), ("meta_sha256", None), ("sha256", None)],
)  # fmt: skip
def test_a_value_of_a_prepared_text_that_was_changed_is_noticed(prepared, field, value):
    path = next(path for path in prepared[2] if path.name == "meta.json")
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {field: value}))
    assert load_damaged(prepared)


@settings(max_examples=300)
@given(data=st.data(), name=st.sampled_from(["train.bin", "val.bin", "meta.json"]))
def test_a_prepared_text_after_accidents(prepared, data, name):
    path = next(path for path in prepared[2] if path.name == name)
    path.write_bytes(data.draw(damaged(prepared[2][path], JSON_TOKENS)))
    load_damaged(prepared)


def test_a_folder_in_the_place_of_a_prepared_file(prepared):
    source, cache, contents, _ = prepared
    for path, content in contents.items():
        path.unlink()
        path.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            corpus, message = tried("prepared", lambda: text.load(f"file:{source}", cache=cache))
        assert corpus is None and "cannot be written" in message
        path.rmdir()
        path.write_bytes(content)


# -- sweeps ------------------------------------------------------------------------------------------------------

SWEEP = b"""purpose = "a test"
recipe = "tiny"
[fields]
text = "synthetic"
tokens = 40_960
[grid]
optimizer = ["AdamW", "MERIT"]
batch_size = [16, 32]
[search]
seed = 0
widen = 2
refine = true
lr.AdamW = [1e-3, 2e-3, 4e-3]
lr.default = [1e-2, 2e-2, 4e-2]
[report]
seeds = [1, 2]
measure = ["curvature"]
"""


def can_be_run(sweep):
    planned, whole = sweep.plan(lambda name: None)
    assert len(planned) <= sweep.least() <= sweep.most()
    assert len({run.name for run in planned}) == len(planned)
    for run in planned[:3]:
        sound(run.recipe)
    for loss in (1.0, None):  # every loss the same, then every run diverged: a search ends, also at the edges
        planned, whole = sweep.plan(lambda name, loss=loss: {"val_loss": loss})
        assert whole and len(planned) <= sweep.most()


@settings(max_examples=500)
@given(damaged(SWEEP, TOML_TOKENS))
@example(SWEEP.replace(b"seed = 0", b"seed = " + b"9" * 5000))
@example(SWEEP.replace(b"seed = 0", b"seed = 9223372036854775808"))
@example(SWEEP.replace(b"[1, 2]", b"[1, 1]"))
@example(SWEEP.replace(b"[1, 2]", b"[]"))
@example(SWEEP.replace(b"[1, 2]", b"3"))
@example(SWEEP.replace(b'["curvature"]', b"3"))
@example(SWEEP.replace(b'["curvature"]', b'"curvature"'))
@example(SWEEP.replace(b'"tiny"', b"[]"))
@example(SWEEP.replace(b'["AdamW", "MERIT"]', b'[["AdamW"]]'))
@example(SWEEP.replace(b"refine = true", b'refine = "yes"'))
@example(SWEEP.replace(b"widen = 2", b"widen = 1000000000"))
@example(SWEEP.replace(b"[1e-3, 2e-3, 4e-3]", b'[1e-3, "2e-3", [4e-3]]'))
@example(SWEEP.replace(b"[1e-3, 2e-3, 4e-3]", b"[0.0, 2e-3, 4e-3]"))
@example(SWEEP.replace(b"[1e-3, 2e-3, 4e-3]", b"[1e300, 1e305, 1e308]"))
@example(SWEEP.replace(b"[16, 32]", b"[" + b"16," * 60 + b"]\nseed = [" + b"1," * 999 + b"]"))
@example(b'lr_from = "a/b"\n[grid]\nseed = [1]\n')
@example(b'lr_from = "\\u0000"\n[grid]\nseed = [1]\n')
def test_a_sweep_file_that_is_garbage_is_refused_and_left_alone(place, content):
    path = place() / "s.toml"
    path.write_bytes(content)
    sweep, message = tried("sweeps", Sweep.read, path)
    assert path.read_bytes() == content
    if sweep is None:
        assert "s.toml" in message
    else:
        can_be_run(sweep)


SWEEP_VALUES = {
    "recipe": "tiny", "fields": {"text": "synthetic", "tokens": 40_960},
    "grid": {"optimizer": ["LAMB"], "batch_size": [16]},
    "search": {"seed": 0, "widen": 2, "refine": True, "lr": {"default": [1e-2, 2e-2, 4e-2]}},
    "report": {"seeds": [1, 2], "measure": ["curvature"]},
}  # fmt: skip


@settings(max_examples=700)
@given(st.sampled_from(list(places_in(SWEEP_VALUES))), HOSTILE | st.just(REMOVED))
@example(("search", "lr", "default", 0), 10**400)
@example(("grid", "optimizer", 0), {"a": 1})
@example(("recipe",), {})
@example(("report", "seeds"), None)
@example(("grid", "batch_size", 0), 10**400)
def test_a_value_of_a_sweep_that_is_garbage(path, value):
    sweep, _ = tried("sweeps", Sweep.from_dict, "s", with_value(SWEEP_VALUES, path, value))
    if sweep is not None:
        can_be_run(sweep)


def test_sweeps_that_take_their_rates_from_each_other(place):
    folder = place()
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (folder / f"{name}.toml").write_text(f'lr_from = "{other}"\n[grid]\nseed = [1]\n')
    _, message = tried("sweeps", Sweep.read, folder / "a.toml")
    assert "lr_from: got 'a', expected the name of another sweep file" in message


@functools.cache
def finished():
    """The name and the file of a finished run of a sweep."""
    run = Sweep.from_dict("s", SWEEP_VALUES).plan(lambda name: None)[0][0]
    row = {"recipe": run.recipe.to_dict(), "val_loss": 2.5, "seconds": 1.5, "tokens": 40_960}
    return run, {"row": row, "curve": [{"step": 1}]}


def row_of(folder, content):
    """The row of a damaged file: None, said and set aside once it is made anew; or one a sweep can go on with."""
    run, result = finished()
    pool = Pool(folder)
    pool.path(run.name).write_bytes(content)
    fed["results"] += 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        row = pool.row(run.name)
        assert pool.row(run.name) == row and pool.seconds() is not None
    assert pool.path(run.name).read_bytes() == content
    if row is None:
        assert len(said) == 1 and str(pool.path(run.name)) in str(said[0].message)
        pool.keep(run.name, result)
        assert pool.row(run.name) == result["row"] == Pool(folder).row(run.name)
        (aside,) = folder.glob("*.damaged*")
        assert aside.read_bytes() == content
        aside.unlink()
    else:
        assert not said and Recipe.from_dict(row["recipe"]) == run.recipe
        assert row["val_loss"] is None or 0 <= row["val_loss"] < math.inf


def test_a_result_of_a_sweep_cut_or_flipped_at_any_byte(place):
    folder, (run, result), bit = place(), finished(), random.Random(2)
    Pool(folder).keep(run.name, result)
    content = Pool(folder).path(run.name).read_bytes()
    for at in range(len(content)):
        row_of(folder, content[:at])
        row_of(folder, content[:at] + bytes([content[at] ^ 1 << bit.randrange(8)]) + content[at + 1 :])


@settings(max_examples=400)
@given(st.sampled_from(list(places_in(finished()[1]))), PLAIN | st.just(REMOVED))
@example(("row",), [])
@example(("row", "val_loss"), "2.5")
@example(("row", "val_loss"), math.nan)
@example(("row", "tokens"), 0)
@example(("row", "recipe", "seed"), 1)
@example(("curve",), None)
def test_a_value_of_a_result_that_is_garbage(place, path, value):
    row_of(place(), json.dumps(with_value(finished()[1], path, value)).encode())


def test_a_result_that_could_not_be_read_again_is_a_failed_run(place):
    class Broken(sweeps.Engine):
        workers = 1

        def start(self, name, run):
            self.name = name

        def next(self):
            fed["results"] += 1
            return self.name, {"row": {"val_loss": "low"}, "curve": []}

        def stop(self):
            pass

    sweep = Sweep.from_dict("s", SWEEP_VALUES)
    states = list(sweeps.work(sweep, Pool(place()), Broken()))
    assert sum("came back damaged" in (state.error or "") for state in states) == 3  # the search's rates, once each


@functools.cache
def table() -> tuple[list[dict], bytes]:
    """The first report row of a recorded sweep, and its curve."""
    folder = ROOT / "data" / "runs" / "sweeps"
    row = next(row for row in sweeps.read_rows(folder / "noise.jsonl") if row["stage"] == "report")
    points = [point for point in sweeps.read_rows(folder / "noise.curves.jsonl") if point["run"] == row["run"]]
    return [row, points[0]], b"".join(json.dumps(point).encode() + b"\n" for point in points[:3])


@settings(max_examples=500)
@given(st.sampled_from(["row", "point"]), st.data(), PLAIN | st.just(REMOVED))
def test_a_table_of_a_sweep_with_garbage(place, which, data, value):
    (row, point), rest = table()
    changed = data.draw(st.sampled_from(list(places_in(row if which == "row" else point))))
    row, point = (with_value(x, changed, value) if which == name else x for name, x in (("row", row), ("point", point)))
    folder = place()
    (folder / "t.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "t.curves.jsonl").write_bytes(json.dumps(point).encode() + b"\n" + rest)
    found, message = tried("tables", sweeps.read_runs, folder / "t.jsonl")
    if found is None:
        assert "t.jsonl" in message and "line 1" in message
    else:
        for run in found:
            assert all(r.peak_logit is None or is_real(r.peak_logit) for r in run) and repr(run)


@settings(max_examples=200)
@given(damaged(json.dumps(table()[0][0]).encode() + b"\n" + table()[1], JSON_TOKENS))
@example("{}\u2028{}".encode())
@example('{"a": "\u2028"}\n'.encode())
@example(b"[1]\n")
def test_a_table_of_a_sweep_after_accidents(place, content):
    path = place() / "t.jsonl"
    path.write_bytes(content)
    rows, message = tried("tables", sweeps.read_rows, path)
    assert path.read_bytes() == content
    assert (rows is None and str(path) in message) or all(isinstance(row, dict) for row in rows)


# -- checkpoints -------------------------------------------------------------------------------------------------

STEPS = 4


class Code:
    """Pickled, it makes a folder when it is loaded: any code could stand there."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def kept(place):
    """A run broken off at its third step: its recipe, text, checkpoints as bytes, and its records had it gone on."""
    pytest.importorskip("merit_lab.checkpoint")
    folder = place()
    (folder / "story.txt").write_bytes(STORY)
    spec, size = f"file:{folder / 'story.txt'}", {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 4}
    recipe = Recipe(model=size, text=spec, batch_size=1, tokens=4 * STEPS, eval_sequences=1, device="cpu")
    corpus = text.load(spec, cache=folder / "cache")
    training = train(recipe, corpus, checkpoint=folder / "kept", checkpoint_every=1, keep=3)
    for _ in range(STEPS - 1):
        next(training)
    training.close()
    contents = {path.name: path.read_bytes() for path in sorted((folder / "kept").iterdir())}
    assert len(contents) == STEPS - 1
    return recipe, corpus, contents, numbers(train(recipe, corpus))


def numbers(records):
    """Everything but the clock."""
    return [dataclasses.replace(r, seconds=0.0) for r in records]


def go_on(kept, folder, kind="checkpoints"):
    """Go on from a folder in which something is damaged. Says whether that ended in the numbers it should have."""
    recipe, corpus, _, expected = kept
    (folder / "notes.txt").write_bytes(b"mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        records, message = tried(
            kind, lambda: numbers(train(recipe, corpus, checkpoint=folder, checkpoint_every=1, keep=3))
        )
    assert (folder / "notes.txt").read_bytes() == b"mine"
    assert message or records == expected
    return records is not None


def unpacked(kept, place):
    folder = place()
    for name, content in kept[2].items():
        (folder / name).write_bytes(content)
    return folder


@settings(max_examples=100)
@given(data=st.data(), name=st.sampled_from([f"step-{step:06d}.checkpoint" for step in (1, 2, 3)]))
def test_a_checkpoint_after_accidents(kept, place, data, name):
    folder = unpacked(kept, place)
    (folder / name).write_bytes(data.draw(damaged(kept[2][name], (b"PK", b"\x80\x04.", b"\n", *JSON_TOKENS))))
    go_on(kept, folder)


def test_the_newest_checkpoint_cut_or_flipped_anywhere(kept, place):
    name, bit = max(kept[2]), random.Random(3)
    content = kept[2][name]
    for at in [*range(0, 100, 4), *range(100, len(content), max(1, len(content) // 25))]:
        for wrong in (content[:at], content[:at] + bytes([content[at] ^ 1 << bit.randrange(8)]) + content[at + 1 :]):
            folder = unpacked(kept, place)
            (folder / name).write_bytes(wrong)
            went_on = go_on(kept, folder)
            assert went_on or at < 100  # in the first line it may be of another format, which is refused
            shutil.rmtree(folder)


def test_all_checkpoints_damaged_and_what_is_none(kept, place):
    for wrong in (b"", b"[" * 5000, b"[" * 990 + b"\n", b'{"merit_lab_checkpoint": 1, "sha256": []}\n', b"PK\x03\x04"):
        folder = unpacked(kept, place)
        for name in kept[2]:
            (folder / name).write_bytes(wrong)
        go_on(kept, folder)
    folder = unpacked(kept, place)
    os.mkfifo(folder / "step-000009.checkpoint")
    (folder / "step-000008.checkpoint").mkdir()
    (folder / "step-zzz.checkpoint").write_bytes(b"?")
    assert go_on(kept, folder)
    assert (folder / "step-zzz.checkpoint").read_bytes() == b"?"


def test_code_in_a_checkpoint_is_not_run(kept, place):
    import hashlib
    import io

    ran = place() / "ran"
    saved = io.BytesIO()
    torch.save({"model": Code(ran)}, saved)
    name = max(kept[2])
    _, header, _ = kept[2][name].split(b"\n", 2)
    for payload in (pickle.dumps(Code(ran)), saved.getvalue(), pickle.dumps({}), b"", b"\x80\x02}."):
        rest = header + b"\n" + payload
        first = json.dumps({"merit_lab_checkpoint": 1, "sha256": hashlib.sha256(rest).hexdigest()}).encode()
        for content in (payload, first + b"\n" + rest):  # as it is, and behind a checksum that is right
            folder = unpacked(kept, place)
            (folder / name).write_bytes(content)
            go_on(kept, folder)
            assert not ran.exists()


# -- all of it ---------------------------------------------------------------------------------------------------


def test_at_least_ten_thousand_inputs_were_tried():
    everything = {"recipes", "runs", "figures", "paths", "weights", "texts", "names", "prepared"}
    everything |= {"sweeps", "results", "tables"}
    if not everything <= fed.keys():
        pytest.skip("only a part of this file was run")
    assert sum(fed.values()) >= 10_000, fed
