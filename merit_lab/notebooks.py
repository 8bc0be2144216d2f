"""Executes the notebooks, brings them to a normal form, and checks that they keep the form of a lesson.

    python -m merit_lab.notebooks run [NAME ...]      execute and store; says which cells changed
    python -m merit_lab.notebooks check [NAME ...]    list every fault; exit code 1 if there is one
    python -m merit_lab.notebooks map                 write the README's table of notebooks from their first cells

NAME is a notebook's name with or without its folder and ending; none means all of them.
"""

import argparse
import difflib
import hashlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import nbformat
from nbformat import NotebookNode

from .errors import InputError
from .files import repo_root, write_whole
from .readme import replaced

COMPARED_FLOOR = 0.8  # the least share of a notebook's code cells whose output nbval must compare
SECONDS_A_CELL = 600  # far above any lesson's: ends what hangs
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    # The spec's name and language are what JupyterLab looks for; another one makes it ask for a kernel.
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    # Without the version, which would change with each reader's Python.
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}


def folder() -> Path:
    """The checkout's notebooks/. InputError where merit_lab was installed without its repository."""
    root = repo_root()
    if root is None:
        raise InputError("the notebooks are in merit_lab's repository, and this is not a checkout of it")
    return root / "notebooks"


def find(names: Iterable[str] = ()) -> list[Path]:
    """The notebooks of these names, or all of them in reading order. InputError for an unknown one."""
    there = sorted(folder().glob("*.ipynb"))
    by_name = {path.stem: path for path in there}
    wanted = [Path(name).stem for name in names]
    for name in wanted:
        if name not in by_name:
            raise InputError(f"no notebook {name!r}; there are: {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in wanted] if wanted else there


# ---------------------------------------------------------------- executing and storing


def kernel_environment() -> dict[str, str]:
    """What a kernel is started with so that its outputs are those of any machine: no GPU, one thread."""
    return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def execute(notebook: NotebookNode, cwd: Path) -> NotebookNode:
    """The same notebook with the outputs of a fresh kernel. nbclient's CellExecutionError if a cell fails."""
    from nbclient import NotebookClient

    client = NotebookClient(
        nbformat.from_dict(notebook),
        kernel_name="python3",
        timeout=SECONDS_A_CELL,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(cwd)}},
    )
    return client.execute(env=os.environ | kernel_environment())


def normal(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what differs from machine to machine or from run to run.

    Widget state goes (GitHub refuses a notebook that has it) and so do the widgets' views, whose model
    ids are random: what stays of a widget is its picture.
    """
    notebook = nbformat.from_dict(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    seen = Counter()
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.pop("attachments", None)
        if not cell.get("id") or seen[cell.id]:
            cell.id = hashlib.sha256(f"{cell.source}{seen.total()}".encode()).hexdigest()[:8]
        seen[cell.id] += 1
        if cell.cell_type == "code":
            cell.outputs = [normal_output(output) for output in merged_streams(cell.outputs)]
    return notebook


def merged_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    # How a kernel cuts its text into messages depends on timing.
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            merged.append(nbformat.from_dict(output))
    return merged


def normal_output(output: NotebookNode) -> NotebookNode:
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
        # text/html and the like may come with metadata of the front end; a picture's is kept, for its alt.
        output.metadata = nbformat.from_dict(
            {kind: data for kind, data in output.metadata.items() if kind in output.data}
        )
    return output


def text_of(notebook: NotebookNode) -> str:
    """The notebook as it is stored."""
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def run(path: Path) -> list[str]:
    """Execute a notebook and store it if that changes it; returns what changed, a line each."""
    stored = nbformat.read(path, as_version=4)
    fresh = normal(execute(stored, path.parent))
    if text_of(fresh) == path.read_text(encoding="utf-8"):
        return []
    write_whole(path, text_of(fresh))
    return changes(normal(stored), fresh) or ["form only"]


def changes(before: NotebookNode, after: NotebookNode) -> list[str]:
    """How the outputs of two executions of the same cells differ, for a person to read."""
    lines = []
    for number, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if old.cell_type != "code":
            continue
        diff = difflib.unified_diff(words(old).splitlines(), words(new).splitlines(), lineterm="", n=0)
        diff = [line for line in diff if not line.startswith(("---", "+++", "@@"))]
        if diff:
            lines += [f"cell {number} says something else:"] + [f"    {line[:100]}" for line in diff[:12]]
            lines += [f"    … {len(diff) - 12} more lines"] if len(diff) > 12 else []
        if pictures(old) != pictures(new):
            lines.append(f"cell {number} shows another picture")
    return lines


def words(cell: NotebookNode) -> str:
    """All text that a code cell put out."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "error":
            parts.append(f"{output.ename}: {output.evalue}")
        parts.append(output.get("text", ""))
        parts += [data for kind, data in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(part for part in parts if part)


def pictures(cell: NotebookNode) -> list[str]:
    data = [output.get("data", {}) for output in cell.outputs]
    return [kinds["image/png"].strip() for kinds in data if "image/png" in kinds]


# ---------------------------------------------------------------- what nbval does with a cell

MARKERS = {"NBVAL_SKIP": "skipped", "NBVAL_IGNORE_OUTPUT": "ignored"}


def marker(cell: NotebookNode) -> str | None:
    """The nbval marker of a code cell: a comment line that is nothing else, as nbval wants it."""
    for line in cell.source.splitlines():
        if line.strip().lstrip("#").strip() in MARKERS and line.strip().startswith("#"):
            return line.strip().lstrip("#").strip()
    return None


def fate(cell: NotebookNode) -> str:
    """What nbval does with a code cell: "compared", "ignored" or "skipped"; "empty" if nothing is stored
    that it could compare (nbval passes such a cell whatever it does, pictures included)."""
    if marker(cell):
        return MARKERS[marker(cell)]
    kinds = [kind for output in cell.outputs for kind in output.get("data", {"text/stream": ""})]
    return "compared" if any(not kind.startswith("image/") for kind in kinds) else "empty"


def fates(path: Path) -> list[str]:
    """fate() of a notebook's code cells, in nbval's numbering ("Cell 0", "Cell 1", …)."""
    notebook = nbformat.read(path, as_version=4)
    return [fate(cell) for cell in notebook.cells if cell.cell_type == "code"]


# ---------------------------------------------------------------- the form of a lesson


@dataclass
class Lesson:
    """A notebook as the rules below see it."""

    path: Path
    notebook: NotebookNode
    previous: str | None  # file names of its neighbours
    next: str | None

    @property
    def prose(self) -> Iterator[tuple[int, str]]:
        """(number, source) of the markdown cells."""
        return ((n, c.source) for n, c in enumerate(self.notebook.cells) if c.cell_type == "markdown")

    @property
    def code(self) -> list[tuple[int, NotebookNode]]:
        return [(n, c) for n, c in enumerate(self.notebook.cells) if c.cell_type == "code"]

    def place(self, phrase: str) -> tuple[int, int] | None:
        """(cell, line) of the first line that opens with the phrase, or heading that has it."""
        for number, source in self.prose:
            for row, line in enumerate(source.splitlines()):
                opening = line.lstrip("#*_> ").lower()
                if opening.startswith(phrase) or (line.startswith("#") and phrase in opening):
                    return number, row
        return None

    def after(self, place: tuple[int, int]) -> str:
        """All markdown from a place on."""
        cell, row = place
        rest = [source for number, source in self.prose if number > cell]
        return "\n\n".join(["\n".join(self.notebook.cells[cell].source.splitlines()[row:]), *rest])


def faults(path: Path) -> list[str]:
    """What a notebook lacks of the form every lesson has; an empty list if nothing."""
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        return [f"not a valid notebook: {str(error).splitlines()[0]}"]
    if not notebook.cells:
        return ["has no cells"]
    names = sorted(other.name for other in path.parent.glob("*.ipynb"))
    here = names.index(path.name)
    lesson = Lesson(
        path,
        notebook,
        previous=names[here - 1] if here else None,
        next=names[here + 1] if here + 1 < len(names) else None,
    )
    return [fault for rule in RULES for fault in rule(lesson)]


def has_a_head(lesson: Lesson) -> Iterator[str]:
    first = lesson.notebook.cells[0]
    lines = first.source.splitlines() or [""]
    if first.cell_type != "markdown" or not lines[0].startswith("# "):
        yield "cell 0: the first line is not a title ('# …')"
        return
    cost = next((line for line in lines if line.lstrip("*_> ").startswith("Time:")), "")
    if not re.search(r"\d+ ?(s|min)\b[^;]*\bCPU", cost) or "GPU" not in cost:
        yield "cell 0: no line 'Time: … 20 s on 2 CPU cores … GPU …' that says what the lesson takes"
    for label, target in (("Previous", lesson.previous), ("Next", lesson.next)):
        found = re.search(rf"{label}: \[[^\]]+\]\(([^)]+)\)", first.source)
        if target and (not found or found[1] != target):
            yield f"cell 0: no link '{label}: […]({target})'"
        if found and not target:
            yield f"cell 0: '{label}:' where there is no such lesson"


def has_its_parts(lesson: Lesson) -> Iterator[str]:
    places = {phrase: lesson.place(phrase) for phrase in PARTS}
    if lesson.path.stem.startswith("00_"):
        del places["what breaks if"]  # the opening takes nothing apart yet
    for phrase, place in places.items():
        if place is None:
            yield f"no part '{phrase.capitalize()}'"
    found = [(place, phrase) for phrase, place in places.items() if place]
    for (place, phrase), (following, other) in pairwise(found):
        if following < place:
            yield f"'{other.capitalize()}' comes before '{phrase.capitalize()}'"
    for phrase in ("you will be able to", "recap"):
        if places[phrase] and (items := list_items(lesson, places[phrase])) != 3:
            yield f"'{phrase.capitalize()}' is followed by {items} list items, not 3"
    if places["references"] and not NUMBERED.search(lesson.after(places["references"])):
        yield "'References' names no numbered equation, table, figure, section, line or algorithm"


PARTS = ("you will be able to", "know before", "predict", "exercise", "what breaks if", "recap", "references")
NUMBERED = re.compile(
    r"\b(eq(uation|\.)?|tab(le|\.)|fig(ure|\.)|sec(tion|\.)|line|algorithm)s?\s*\(?\d|\bappendix [A-Z]\b",
    re.IGNORECASE,
)


def list_items(lesson: Lesson, place: tuple[int, int]) -> int:
    count = 0
    for line in lesson.notebook.cells[place[0]].source.splitlines()[place[1] + 1 :]:
        if re.match(r"([-*+]|\d+[.)]) ", line):
            count += 1
        elif count and line.strip() and not line.startswith(" "):
            break
    return count


def has_one_set_up(lesson: Lesson) -> Iterator[str]:
    tagged = [number for number, cell in lesson.code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        yield f"{len(tagged)} cells are tagged 'parameters', not 1"
    elif tagged[0] != lesson.code[0][0]:
        yield f"cell {tagged[0]}: tagged 'parameters', but it is not the first code cell"
    elif (place := lesson.place("predict")) and place[0] < tagged[0]:
        yield f"cell {tagged[0]}: the set-up comes after 'Predict'"


def asks_before_it_tells(lesson: Lesson) -> Iterator[str]:
    place = lesson.place("predict")
    if not place:
        return
    if "?" not in lesson.notebook.cells[place[0]].source:
        yield f"cell {place[0]}: 'Predict' asks no question"
    run_it = next((number for number, _ in lesson.code if number > place[0]), None)
    end = lesson.place("exercise") or (len(lesson.notebook.cells), 0)
    if run_it is None or run_it > end[0]:
        yield f"cell {place[0]}: no code cell follows the question"
    elif not any(run_it < number <= end[0] and "<details" in source for number, source in lesson.prose):
        yield f"cell {run_it}: no explanation in a <details> follows the answer"


def has_an_exercise(lesson: Lesson) -> Iterator[str]:
    place = lesson.place("exercise")
    if not place:
        return
    checks = [
        (number, cell)
        for number, cell in lesson.code
        if number > place[0] and re.search(r"\bcheck_\w+\(", cell.source)
    ]
    if not checks:
        yield "no code cell after 'Exercise' calls a check_…()"
    elif not any("your turn" in words(cell).lower() for _, cell in checks):
        yield f"cell {checks[0][0]}: the untouched exercise does not say 'your turn'"
    for label in ("Hint", "Solution"):
        if not re.search(rf"<summary>[^<]*{label}", lesson.after(place)):
            yield f"no <details> with the summary '{label}' after 'Exercise'"


def folds_open(lesson: Lesson) -> Iterator[str]:
    for number, source in lesson.prose:
        opened = len(re.findall(r"<details\b", source))
        if opened != source.count("</details>"):
            yield f"cell {number}: a <details> is not closed in the cell it is opened in"
        if opened != source.count("<summary>"):
            yield f"cell {number}: a <details> without a <summary>"
        if re.search(r"</summary>(?![ \t]*\n[ \t]*\n)", source):
            yield f"cell {number}: no empty line after </summary> (Markdown below it would be shown raw)"


def links_lead_somewhere(lesson: Lesson) -> Iterator[str]:
    to_glossary = False
    for number, source in lesson.prose:
        source = re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)
        if re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"]+\")", source):
            yield f"cell {number}: an image without alternative text"
        targets = re.findall(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)", source)
        targets += re.findall(r"(?:href|src)=\"([^\"]+)\"", source)
        for target in targets:
            if re.match(r"[a-z]+:", target):
                continue  # the web's; the tests need no network
            name, _, anchor = unquote(target).partition("#")
            to_glossary |= name == "glossary.md"
            file = (lesson.path.parent / name).resolve() if name else lesson.path
            if not file.is_relative_to(lesson.path.parent.parent.resolve()):
                yield f"cell {number}: the link {target} leaves the repository"
            elif not file.exists():
                yield f"cell {number}: the link {target} leads nowhere"
            elif anchor and file.suffix in (".md", ".ipynb") and anchor not in anchors(file):
                yield f"cell {number}: the link {target} leads to no heading of that file"
    if not to_glossary:
        yield "no link to glossary.md"


def anchors(file: Path) -> set[str]:
    """The anchors of a file's headings, as GitHub and as JupyterLab spell them."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    headings = re.findall(r"^#+ +(.+?) *#*$", text, flags=re.MULTILINE)
    github = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return github | {heading.replace(" ", "-") for heading in headings}


def code_is_executed(lesson: Lesson) -> Iterator[str]:
    for count, (number, cell) in enumerate(lesson.code, start=1):
        if cell.execution_count is None:
            yield f"cell {number}: was not executed"
        elif cell.execution_count != count:
            yield f"cell {number}: executed as [{cell.execution_count}], not in order as [{count}]"
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {number}: ends in an error: {output.ename}: {output.evalue}"
            if output.output_type == "stream" and output.name == "stderr":
                yield f"cell {number}: writes to stderr: {output.text.splitlines()[0][:80]}"
            yield from (f"cell {number}: {fault}" for fault in picture_faults(output))
        if found := MACHINE.search(words(cell)):
            yield f"cell {number}: its output has {found[0]!r}, which is another one elsewhere"


# A path of somebody's machine, an address in memory.
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|var)/\S+|\b[A-Z]:\\\S+|\b0x[0-9a-f]{6,}")


def picture_faults(output: NotebookNode) -> Iterator[str]:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        yield "shows an SVG, which nbval cannot compare from machine to machine; use PNG"
    alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
    if "image/png" in data and len(alt) < 20:
        yield "shows a picture without alternative text (merit_lab.figures.show(figure, alt))"


def code_is_compared(lesson: Lesson) -> Iterator[str]:
    count = Counter(fate(cell) for _, cell in lesson.code)
    for number, cell in lesson.code:
        lines = [line.strip() for line in cell.source.splitlines()]
        if mark := marker(cell):
            following = lines[[line.lstrip("#").strip() for line in lines].index(mark) + 1 :] or [""]
            if not re.match(r"# Why: \w+", following[0]):
                yield f"cell {number}: {mark} without its reason on the next line ('# Why: …')"
        elif any(re.match(r"#\s*NBVAL_\w+\W", line) for line in lines):
            yield f"cell {number}: nbval reads its marker only if it stands alone on its line"
        elif fate(cell) == "empty" and cell.execution_count is not None:
            yield f"cell {number}: nothing nbval could compare; print something, or mark it and say why"
        elif found := re.search(r"\d\.\d{7,}", words(cell)):
            yield f"cell {number}: prints {found[0]}; the last digits are others elsewhere, round it"
        if strange := set(cell.metadata.get("tags", [])) - {"parameters"}:
            yield f"cell {number}: tags {sorted(strange)}; only 'parameters' is known here"
        for pattern, why in AVOID.items():
            if re.search(pattern, cell.source, flags=re.MULTILINE):
                yield f"cell {number}: {why}"
    if lesson.code and count["compared"] < COMPARED_FLOOR * len(lesson.code):
        share = f"{count['compared']} of {len(lesson.code)} code cells"
        yield f"nbval compares {share}, fewer than {COMPARED_FLOOR:.0%}"


AVOID = {
    r"\b(clear_output|update_display)\b": "clear_output and update_display are compared frame by frame",
    r"\b(interact|interactive|interactive_output|Output)\(": "what interact and Output show is not compared",
    r"\btqdm\b": "a progress bar differs from run to run; show progress in a widget",
    r";\s*\Z": "ends with ';', which nbval does not honour; end on a print or a display",
    r"^\s*(!|%pip|%conda|%%bash|%%sh)": "calls the shell",
}


def is_in_normal_form(lesson: Lesson) -> Iterator[str]:
    if "widgets" in lesson.notebook.metadata:
        yield "has widget state in its metadata, which GitHub cannot show"
    if lesson.path.read_text(encoding="utf-8") != text_of(normal(lesson.notebook)):
        yield f"is not in normal form; python -m merit_lab.notebooks run {lesson.path.stem} brings it there"


RULES = (
    has_a_head,
    has_its_parts,
    has_one_set_up,
    asks_before_it_tells,
    has_an_exercise,
    folds_open,
    links_lead_somewhere,
    code_is_executed,
    code_is_compared,
    is_in_normal_form,
)


# ---------------------------------------------------------------- the README's map

MAP_COLUMNS = {
    "title": r"\A# (.+)",
    "question": r"\*\*([^*\n]+\?)\*\*",
    "time to read": r"^\W*Time: (\d+ min) to read",
    "time to run on 2 CPU cores": r"^\W*Time: .*?(\d+ (?:s|min)) to run on 2 CPU cores",
}


def course_map(paths: Iterable[Path]) -> str:
    """A Markdown table of notebooks, a line each, from what their first cells say, for the README.

    InputError for a notebook that does not say its question, or how long it takes.
    """
    rows = ["| notebook | the question | to read | to run |", "|---|---|---:|---:|"]
    for path in paths:
        first = nbformat.read(path, as_version=4).cells[0].source
        found = {what: re.search(pattern, first, flags=re.MULTILINE) for what, pattern in MAP_COLUMNS.items()}
        for what, match in found.items():
            if not match:
                raise InputError(f"{path.name}: the first cell does not say its {what}")
        title, question, reading, running = (match[1].strip() for match in found.values())
        rows.append(f"| [{title}](notebooks/{path.name}) | {question} | {reading} | {running} |")
    return "\n".join(rows) + "\n"


def write_map(readme: Path) -> bool:
    """Put the map of all notebooks between the README's markers; says whether that changed it."""
    before = readme.read_text(encoding="utf-8")
    table = course_map(find())
    after = replaced(before, "notebooks", table)
    if after != before:
        write_whole(readme, after)
    return after != before


# ---------------------------------------------------------------- the command line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m merit_lab.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "check", "map"])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a notebook; none means all")
    options = parser.parse_args(arguments)
    try:
        paths = find(options.names)
        if not paths:
            raise InputError(f"no notebooks in {folder()}")
        if options.what == "map":
            print("README.md: " + ("written anew" if write_map(folder().parent / "README.md") else "nothing changed"))
            return 0
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = [run_one(path) if options.what == "run" else check_one(path) for path in paths]
    return 0 if all(verdicts) else 1


def run_one(path: Path) -> bool:
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    start = time.monotonic()
    try:
        changed = run(path)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"{path.stem}: failed, and was left as it is\n{error}", flush=True)
        return False
    print(f"{path.stem}: {time.monotonic() - start:.0f} s, {'stored anew' if changed else 'nothing changed'}")
    print("".join(f"    {line}\n" for line in changed), end="", flush=True)
    return True


def check_one(path: Path) -> bool:
    found = faults(path)
    count = Counter(fates(path)) if not found or not found[0].startswith("not a valid") else Counter()
    print(f"{path.stem}: " + (f"{len(found)} faults" if found else "in form"), end="; ")
    print(", ".join(f"{number} cells {what}" for what, number in sorted(count.items())))
    print("".join(f"    {fault}\n" for fault in found), end="")
    return not found


if __name__ == "__main__":
    sys.exit(main())
