"""Texts, from where they come from to batches of tokens.

    corpus = load("shakespeare")                          # one token a character
    x, y = batch(corpus.train, 64, 32, seed=0, step=1)    # 32 sequences of 64 tokens; y is one token later

A text passes four stations:

    source     yields documents, some of them held out for validation      corpora.py, wheels.py
    tokenizer  turns characters into numbers                               tokenizers.py
    cache      keeps the tokens on disk with their sha256, so that the first two happen once
    batch      cuts sequences out of the tokens
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from .corpora import ONE_IN, Document, Source, check_name, choice, find, joined
from .errors import InputError, shown
from .files import cache_dir, from_json, read_bytes, whole, write_whole
from .tokenizers import NAMES as TOKENIZERS
from .tokenizers import Characters, Tokenizer, gpt2
from .wheels import FetchError, Where, contents

__all__ = ["Corpus", "FetchError", "batch", "check_spec", "fixed_batches", "load"]

PREPARED_FORMAT = 3  # to be raised whenever cleaning, tokenizing or the files of the cache change


# --- loading ---


def load(
    spec: str,
    *,
    cache: str | os.PathLike | None = None,
    offline: bool | None = None,
    block_size: int | None = None,
) -> "Corpus":
    """The tokens of a text; fetched and prepared the first time, read from the cache afterwards.

    spec        "shakespeare", "addresses", "synthetic", "file:PATH", "folder:PATH", "hf:NAME",
                "hf:NAME#config" or "hf:PATH", followed by "@chars" (the default) or "@gpt2"
    cache       folder for fetched and prepared files; default merit_lab.files.cache_dir()
    offline     never try the network; default: whether MERIT_LAB_OFFLINE is set, and not to 0
    block_size  context length in tokens: a text too short for one sequence is an error here and now

    Where Shakespeare or the addresses can be neither found nor fetched, a warning says so and the
    synthetic text is returned. Any other text that cannot be had or used is an InputError.
    """
    text, tokenizer = _split_spec(spec)
    where = Where(Path(cache_dir() if cache is None else cache), _offline() if offline is None else offline)
    try:
        corpus = _load(spec, text, tokenizer, where)
    except FetchError as error:
        # Not for GPT-2 tokens: another vocabulary would silently make another model.
        if tokenizer != "chars" or text not in contents()["corpora"]:
            raise
        fallback = "Using the small synthetic text instead: results on it say nothing about real text."
        warnings.warn(f"{error}\n{fallback}", stacklevel=2)
        corpus = _load("synthetic", "synthetic", "chars", where)
    _check_length(corpus, block_size or 1)
    return corpus


def check_spec(spec: str) -> None:
    """InputError unless `load` could take this, by its form alone: looks for no file and at no network."""
    text, _ = _split_spec(spec)
    check_name(text)


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """A prepared text.

    train, val  1-D arrays of token numbers, uint16 or uint32, mapped from disk and read-only
    sha256      of the bytes of train followed by those of val, as 64 hexadecimal digits
    synthetic   True for a text that merit_lab made up
    alphabet    characters in the order of their numbers; empty for GPT-2 tokens
    """

    name: str
    spec: str
    tokenizer: str
    train: np.memmap
    val: np.memmap
    vocab_size: int
    sha256: str
    synthetic: bool
    licence: str
    alphabet: str
    where: Where

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text. InputError for a character that training never shows."""
        return self._tokenizer.encode(text, "the text given").tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token numbers: a list, or a 1-D array or tensor."""
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise InputError(f"token {i} is not in the vocabulary, which has {self.vocab_size:,} tokens")
        return self._tokenizer.decode(ids)

    def describe(self) -> str:
        """One line for people."""
        made_up = " (made up)" if self.synthetic else ""
        return (
            f"{self.name}@{self.tokenizer}{made_up}: {len(self.train):,} tokens to train on, "
            f"{len(self.val):,} held out, vocabulary of {self.vocab_size:,}, sha256 {self.sha256[:12]}"
        )

    def __repr__(self) -> str:
        return f"<Corpus {self.describe()}>"

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        # On first use: training needs the numbers alone, and neither tiktoken nor the vocabulary.
        return Characters(self.alphabet) if self.tokenizer == "chars" else gpt2(self.where)


def _split_spec(spec: str) -> tuple[str, str]:
    """'shakespeare@gpt2' -> ('shakespeare', 'gpt2')."""
    if not isinstance(spec, str):
        raise InputError(f"a text is named by a string such as 'shakespeare', not by {shown(spec)}")
    text, at, tokenizer = spec.rpartition("@")
    if at and tokenizer in TOKENIZERS:
        return text, tokenizer
    if at and ":" not in spec:  # whereas a path may have an @ of its own
        raise InputError(f"unknown tokenizer {tokenizer!r} in text {shown(spec)}: choose {choice(TOKENIZERS)}")
    return spec, "chars"


def _load(spec: str, text: str, tokenizer: str, where: Where) -> Corpus:
    source = find(text, where)
    folder = where.cache / "tokens" / f"{source.key}-{tokenizer}"
    corpus = _open_if_usable(spec, folder, where)
    if corpus is None:
        _prepare(source, tokenizer, folder, where)
        corpus = _open(spec, folder, where)
    return corpus


def _check_length(corpus: Corpus, block_size: int) -> None:
    needed = block_size + 1  # the last token of x has a successor too
    for part, tokens in (("training", corpus.train), ("held-out", corpus.val)):
        if len(tokens) < needed:
            raise InputError(
                f"{corpus.spec} is too short for a context of {block_size} tokens: its {part} part has "
                f"{len(tokens)}, and {needed} are needed. "
                f"Take a longer text (about {ONE_IN * needed:,} tokens) or a smaller block_size"
            )


def _offline() -> bool:
    return os.environ.get("MERIT_LAB_OFFLINE", "") not in ("", "0")


# --- batches ---


def batch(
    tokens: np.ndarray, block_size: int, batch_size: int, *, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences from random places of a token stream: x and y, each (batch_size, block_size) int64.

    y is x one token later. Places are drawn uniformly, with replacement, and depend on seed and step
    alone: optimizers to be compared see the same data, and a resumed run goes on as if never
    interrupted. Sequence i does not depend on batch_size, so a batch may be cut up anywhere.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("step", step, 0)):
        _check_at_least(name, value, least)
    n_places = _n_places(tokens, block_size)
    # Philox has no state to carry along: it turns a key and a counter into random bits.
    # Each step has 2**64 counters to itself. Raw bits, since numpy may change what
    # Generator.integers makes of them; taken modulo n_places, the bias is below n_places / 2**64.
    bits = np.random.Philox(key=int(seed), counter=int(step) << 64).random_raw(int(batch_size))
    return _cut(tokens, (bits % np.uint64(n_places)).astype(np.int64), block_size)


def fixed_batches(tokens: np.ndarray, block_size: int, n_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Evenly spaced sequences for evaluation: x and y, each (n, block_size) int64, always the same.

    The first starts at the first token and, if n > 1, the last ends at the last. n is n_sequences,
    or less where the stream has fewer places for a sequence to start.
    """
    _check_at_least("n_sequences", n_sequences, 1)
    n_places = _n_places(tokens, block_size)
    places = np.linspace(0, n_places - 1, min(n_sequences, n_places)).astype(np.int64)
    return _cut(tokens, places, block_size)


def _cut(tokens: np.ndarray, places: np.ndarray, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = places[:, None] + np.arange(block_size + 1)  # (B, T+1)
    sequences = torch.from_numpy(tokens[index].astype(np.int64))  # (B, T+1)
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()  # (B, T) each


def _n_places(tokens: np.ndarray, block_size: int) -> int:
    """In how many places a sequence of block_size tokens that has a successor can start."""
    _check_at_least("block_size", block_size, 1)
    if len(tokens) <= block_size:
        raise InputError(
            f"{len(tokens)} tokens are too few for sequences of block_size={block_size} and one token "
            "more: take a longer text or a smaller block_size"
        )
    return len(tokens) - block_size


def _check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")


# --- the cache of prepared tokens ---


@dataclass(frozen=True)
class Meta:
    """meta.json, which stands beside train.bin and val.bin."""

    format: int
    name: str
    tokenizer: str
    vocab_size: int
    dtype: str  # in numpy's notation: little-endian uint16 or uint32
    train_tokens: int
    val_tokens: int
    sha256: str  # of train.bin followed by val.bin
    synthetic: bool
    licence: str
    alphabet: str

    def to_json(self) -> str:
        """The file's content: the fields, and a hash of them, since the bytes of train and val do not tell whether
        the alphabet or the dtype is still theirs.
        """
        values = asdict(self)
        return json.dumps(values | {"meta_sha256": _hash_of(values)}, indent=1) + "\n"


def _hash_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class _Unusable(Exception):
    """Why prepared tokens cannot be used."""


def _prepare(source: Source, tokenizer_name: str, folder: Path, where: Where) -> None:
    """Write train.bin, val.bin and, last of all, meta.json; each appears whole or not at all."""
    split = source.documents()
    tokenizer = Characters.of(split.train) if tokenizer_name == "chars" else gpt2(where)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    digest = hashlib.sha256()
    try:
        with whole(folder / "train.bin") as train, whole(folder / "val.bin") as val:
            train_tokens = _write_tokens(train, _encode(split.train, tokenizer), dtype, digest)
            val_tokens = (
                _write_tokens(val, _encode(split.val, tokenizer), dtype, digest) if train_tokens else 0
            )
            if not val_tokens:
                raise InputError(f"{source.name} is too short to hold out a part of it: take a longer text")
        meta = Meta(
            format=PREPARED_FORMAT,
            name=source.name,
            tokenizer=tokenizer_name,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype.str,
            train_tokens=train_tokens,
            val_tokens=val_tokens,
            sha256=digest.hexdigest(),
            synthetic=source.synthetic,
            licence=source.licence,
            alphabet=tokenizer.alphabet,
        )
        write_whole(folder / "meta.json", meta.to_json())
    except OSError as error:
        raise InputError(
            f"prepared text cannot be written to {folder}: {error.strerror or error}. "
            "Make room, or set MERIT_LAB_DATA to a folder that can be written"
        ) from error


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    for label, text in joined(documents, tokenizer.piece):
        yield tokenizer.encode(text, label)


def _write_tokens(file: IO[bytes], tokens: Iterable[np.ndarray], dtype: np.dtype, digest: Any) -> int:
    count = 0
    for some in tokens:
        raw = some.astype(dtype).tobytes()
        file.write(raw)
        digest.update(raw)
        count += len(some)
    return count


def _open_if_usable(spec: str, folder: Path, where: Where) -> Corpus | None:
    """The prepared text, or None: silently where there is none, with a warning where it is no good."""
    if not any((folder / name).exists() for name in ("train.bin", "val.bin", "meta.json")):
        return None
    try:
        return _open(spec, folder, where)
    except _Unusable as why:
        message = f"the prepared text in {folder} cannot be used: {why}. Preparing it again."
        warnings.warn(message, stacklevel=4)  # at the line that called load()
        return None


def _open(spec: str, folder: Path, where: Where) -> Corpus:
    meta = _read_meta(folder / "meta.json")
    train = _map(folder / "train.bin", meta.dtype, meta.train_tokens)
    val = _map(folder / "val.bin", meta.dtype, meta.val_tokens)
    digest = hashlib.sha256(train)
    digest.update(val)
    if digest.hexdigest() != meta.sha256:
        raise _Unusable("hash mismatch: the tokens are not those that were written")
    return Corpus(
        name=meta.name,
        spec=spec,
        tokenizer=meta.tokenizer,
        train=train,
        val=val,
        vocab_size=meta.vocab_size,
        sha256=meta.sha256,
        synthetic=meta.synthetic,
        licence=meta.licence,
        alphabet=meta.alphabet,
        where=where,
    )


def _read_meta(path: Path) -> Meta:
    try:
        values = from_json(read_bytes(path))
    except FileNotFoundError:
        raise _Unusable("meta.json is missing: it is half written, or being written now") from None
    except (OSError, ValueError):
        raise _Unusable("meta.json is damaged") from None
    if not isinstance(values, dict) or "format" not in values:
        raise _Unusable("meta.json is damaged")
    if values["format"] != PREPARED_FORMAT:
        raise _Unusable(f"it has format {shown(values['format'])}, and this version reads {PREPARED_FORMAT}")
    written = values.pop("meta_sha256", None)
    if written != _hash_of(values):
        raise _Unusable("hash mismatch: meta.json is not as it was written")
    return Meta(**values)


def _map(path: Path, dtype: str, length: int) -> np.memmap:
    expected = length * np.dtype(dtype).itemsize
    found = path.stat().st_size if path.exists() else 0
    if found != expected:
        raise _Unusable(f"hash mismatch: {path.name} has {found:,} bytes instead of {expected:,}")
    return np.memmap(path, dtype=dtype, mode="r")
