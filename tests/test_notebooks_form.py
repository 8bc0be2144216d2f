"""Every notebook keeps the form of a lesson, and the checker that says so catches each fault."""

import base64
import copy
import gc
import shutil
import warnings

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from merit_lab import notebooks
from merit_lab.errors import InputError

LESSONS = sorted(notebooks.folder().glob("*.ipynb"))
PNG = base64.b64encode(b"\x89PNG a picture").decode()
ALT = "Two lines: the loss of AdamW rises above that of MERIT."


def test_there_are_notebooks():
    assert LESSONS


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_has_its_form(path):
    assert notebooks.faults(path) == []


# ---------------------------------------------------------------- the checker itself


def text(content):
    return new_output("stream", name="stdout", text=content)


def picture(alt=ALT):
    data = {"image/png": PNG, "text/plain": alt}
    return new_output("display_data", data=data, metadata={"image/png": {"alt": alt}})


def lesson():
    """A small notebook that has everything."""
    head = (
        "# LAMB\n\nTime: 10 min to read; 12 s to run on 2 CPU cores, GPU: not measured.\n\n"
        "Previous: [AdamW](01_adamw.ipynb) · Next: [MERIT](03_merit.ipynb)\n\n"
        "## You will be able to\n\n- read\n- write\n  and more of it\n- compute\n\n"
        "**Know before**: what a [trust ratio](glossary.md#trust-ratio) is, and [the code](../merit_lab/lamb.py)."
    )
    folds = (
        "<details>\n<summary>Hint</summary>\n\nLook at line 9.\n\n</details>\n\n"
        "<details>\n<summary>Solution</summary>\n\n`w / u`\n\n</details>"
    )
    cells = [
        new_markdown_cell(head),
        new_code_cell("seed = 0\nprint(seed)", metadata={"tags": ["parameters"]}, outputs=[text("0\n")]),
        new_markdown_cell("## Predict\n\nWhich is larger?"),
        new_code_cell("show(figure)", outputs=[picture()]),
        new_markdown_cell("<details>\n<summary>Why</summary>\n\nSince *w* is.\n\n</details>"),
        new_markdown_cell("## Exercise: the ratio"),
        new_code_cell("check_ratio(lambda w, u: ...)", outputs=[text("Your turn: write the ratio.\n")]),
        new_markdown_cell(folds),
        new_markdown_cell("## What breaks if the norm is taken away"),
        new_code_cell("print(2)", outputs=[text("2\n")]),
        new_markdown_cell(
            "## Recap\n\n1. one\n2. two\n3. three\n\n## References\n\nYou et al. 2020, Algorithm 2, line 9."
        ),
    ]
    count = 0
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
        if cell.cell_type == "code":
            count += 1
            cell.execution_count = count
    return new_notebook(cells=cells, metadata=copy.deepcopy(notebooks.METADATA))


@pytest.fixture
def place(tmp_path):
    """A repository with three notebooks, of which the middle one is looked at."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "merit_lab").mkdir()
    (tmp_path / "merit_lab" / "lamb.py").touch()
    (folder / "glossary.md").write_text("# Glossary\n\n## trust ratio\n\nA ratio.\n")
    for name in ("01_adamw", "03_merit"):
        (folder / f"{name}.ipynb").touch()
    return folder / "02_lamb.ipynb"


def store(path, notebook):
    path.write_text(notebooks.text_of(notebook), encoding="utf-8")
    return notebooks.faults(path)


def test_a_whole_lesson_has_no_fault(place):
    assert store(place, lesson()) == []


def replaced(cell, old, new):
    def change(notebook):
        assert old in notebook.cells[cell].source
        notebook.cells[cell].source = notebook.cells[cell].source.replace(old, new)

    return change


def outputs(cell, *new):
    def change(notebook):
        notebook.cells[cell].outputs = list(new)

    return change


def without(cell):
    def change(notebook):
        removed = notebook.cells.pop(cell)
        for other in notebook.cells[cell:]:
            if removed.cell_type == other.cell_type == "code":
                other.execution_count -= 1

    return change


def attribute(name, value, cell=None):
    def change(notebook):
        (notebook if cell is None else notebook.cells[cell])[name] = value

    return change


MARKED = "# NBVAL_IGNORE_OUTPUT\n# Why: shows the time.\nprint(1)"

FAULTS = {
    "no title": (replaced(0, "# LAMB", "LAMB"), "the first line is not a title"),
    "no cost": (replaced(0, "Time:", "Takes:"), "no line 'Time:"),
    "a cost without a number": (replaced(0, "12 s to run on", "little, on"), "no line 'Time:"),
    "a cost without the GPU": (replaced(0, "GPU", "elsewhere"), "no line 'Time:"),
    "no way back": (replaced(0, "Previous: ", "Before: "), "no link 'Previous: […](01_adamw.ipynb)'"),
    "another next": (replaced(0, "(03_merit", "(01_adamw"), "no link 'Next: […](03_merit.ipynb)'"),
    "no aims": (replaced(0, "You will be able to", "Aims"), "no part 'You will be able to'"),
    "two aims": (replaced(0, "- compute\n", ""), "'You will be able to' is followed by 2 list items, not 3"),
    "no knowledge": (replaced(0, "Know before", "Needed"), "no part 'Know before'"),
    "no set-up": (attribute("metadata", {}, 1), "0 cells are tagged 'parameters', not 1"),
    "two set-ups": (attribute("metadata", {"tags": ["parameters"]}, 3), "2 cells are tagged 'parameters'"),
    "a late set-up": (
        lambda book: book.cells.insert(1, new_code_cell("1", id="x", execution_count=1, outputs=[text("1")])),
        "cell 2: tagged 'parameters', but it is not the first code cell",
    ),
    "predict first": (lambda book: book.cells.insert(1, book.cells.pop(2)), "the set-up comes after 'Predict'"),
    "no prediction": (replaced(2, "Predict", "Look"), "no part 'Predict'"),
    "no question": (replaced(2, "Which is larger?", "One is larger."), "cell 2: 'Predict' asks no question"),
    "no answer": (without(3), "cell 2: no code cell follows the question"),
    "no explanation": (without(4), "cell 3: no explanation in a <details>"),
    "no exercise": (replaced(5, "Exercise", "More"), "no part 'Exercise'"),
    "no check": (replaced(6, "check_ratio(", "ratio("), "no code cell after 'Exercise' calls a check_"),
    "a solved exercise": (outputs(6, text("right\n")), "the untouched exercise does not say 'your turn'"),
    "no hint": (replaced(7, "Hint", "Help"), "no <details> with the summary 'Hint'"),
    "no solution": (replaced(7, "Solution", "Help"), "no <details> with the summary 'Solution'"),
    "nothing breaks": (replaced(8, "What breaks if", "Without"), "no part 'What breaks if'"),
    "no recap": (replaced(10, "Recap", "End"), "no part 'Recap'"),
    "four points": (replaced(10, "3. three", "3. three\n4. four"), "'Recap' is followed by 4 list items"),
    "no references": (replaced(10, "References", "Thanks"), "no part 'References'"),
    "unnumbered": (replaced(10, "Algorithm 2, line 9", "the paper"), "'References' names no numbered"),
    "out of order": (
        lambda book: book.cells.append(book.cells.pop(5)),
        "'What breaks if' comes before 'Exercise'",
    ),
    "an open fold": (replaced(4, "</details>", ""), "cell 4: a <details> is not closed"),
    "an unnamed fold": (replaced(4, "<summary>Why</summary>\n", ""), "cell 4: a <details> without a <summary>"),
    "a raw fold": (replaced(4, "</summary>\n\n", "</summary>\n"), "cell 4: no empty line after </summary>"),
    "no glossary": (replaced(0, "glossary.md#trust-ratio", "../merit_lab"), "no link to glossary.md"),
    "an unknown term": (replaced(0, "#trust-ratio", "#trust"), "glossary.md#trust leads to no heading"),
    "a lost file": (replaced(0, "lamb.py", "lomb.py"), "the link ../merit_lab/lomb.py leads nowhere"),
    "a link outside": (replaced(0, "../merit_lab", "../../merit_lab"), "leaves the repository"),
    "a lost anchor here": (replaced(10, "You et al.", "[You](#nobody)"), "the link #nobody leads to no heading"),
    "a lost link in HTML": (replaced(8, "taken", '<a href="no.md">taken</a>'), "the link no.md leads nowhere"),
    "a blind image": (replaced(8, "taken", "![](../merit_lab/lamb.py)"), "an image without alternative text"),
    "a blind HTML image": (replaced(8, "taken", '<img src="glossary.md">'), "an image without alternative text"),
    "not executed": (attribute("execution_count", None, 9), "cell 9: was not executed"),
    "out of turn": (attribute("execution_count", 7, 9), "cell 9: executed as [7], not in order as [4]"),
    "an error": (
        outputs(9, new_output("error", ename="ValueError", evalue="no", traceback=[])),
        "cell 9: ends in an error: ValueError: no",
    ),
    "a warning": (
        outputs(9, new_output("stream", name="stderr", text="Deprecated\n")),
        "cell 9: writes to stderr: Deprecated",
    ),
    "a picture for the seeing": (outputs(3, picture(alt="")), "cell 3: shows a picture without alternative"),
    "an SVG": (outputs(3, new_output("display_data", data={"image/svg+xml": "<svg/>"})), "shows an SVG"),
    "somebody's folder": (outputs(9, text("in /home/ada/merit\n")), "has '/home/ada/merit', which is another"),
    "an address": (outputs(9, text("<f at 0x7f00dead00>\n")), "has '0x7f00dead00', which is another"),
    "many digits": (outputs(9, text("0.123456789\n")), "cell 9: prints 0.123456789"),
    "nothing to compare": (outputs(9), "cell 9: nothing nbval could compare"),
    "a picture alone": (
        outputs(3, new_output("display_data", data={"image/png": PNG}, metadata={"image/png": {"alt": ALT}})),
        "cell 3: nothing nbval could compare",
    ),
    "a marker with text": (
        replaced(9, "print(2)", "# NBVAL_IGNORE_OUTPUT: shows the time\nprint(2)"),
        "cell 9: nbval reads its marker only if it stands alone",
    ),
    "a marker unexplained": (
        replaced(9, "print(2)", "# NBVAL_SKIP\nprint(2)"),
        "cell 9: NBVAL_SKIP without its reason on the next line",
    ),
    "a tag for nbval": (attribute("metadata", {"tags": ["nbval-skip"]}, 9), "tags ['nbval-skip']"),
    "too few compared": (attribute("source", MARKED, 9), "nbval compares 3 of 4 code cells, fewer than 80%"),
    "cleared output": (replaced(9, "print(2)", "clear_output()"), "cell 9: clear_output and update_display"),
    "interact": (replaced(9, "print(2)", "interact(f)"), "cell 9: what interact and Output show"),
    "a progress bar": (replaced(9, "print(2)", "from tqdm import trange"), "cell 9: a progress bar"),
    "a semicolon": (replaced(9, "print(2)", "print(2);"), "cell 9: ends with ';'"),
    "the shell": (replaced(9, "print(2)", "!pip list"), "cell 9: calls the shell"),
    "widget state": (attribute("metadata", {"widgets": {}}), "has widget state in its metadata"),
    "another kernel": (
        attribute("metadata", {"kernelspec": {"name": "conda", "display_name": "mine", "language": "python"}}),
        "is not in normal form; python -m merit_lab.notebooks run 02_lamb brings it there",
    ),
    "no cells": (attribute("cells", []), "has no cells"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_own_message(place, name):
    change, message = FAULTS[name]
    notebook = lesson()
    change(notebook)
    found = store(place, notebook)
    assert any(message in fault for fault in found), found


def test_a_file_that_is_no_notebook_is_told(place):
    place.write_text("{")
    [fault] = notebooks.faults(place)
    assert fault.startswith("not a valid notebook")


def test_the_first_and_the_last_lesson_have_one_neighbour(place):
    (place.parent / "01_adamw.ipynb").unlink()
    assert store(place, lesson()) == [
        "cell 0: 'Previous:' where there is no such lesson",
        "cell 0: the link 01_adamw.ipynb leads nowhere",
    ]


def test_the_opening_may_leave_out_what_breaks(place):
    shutil.move(place.parent / "01_adamw.ipynb", place.parent / "00_adamw.ipynb")
    opening = place.with_name("01_adamw.ipynb")
    notebook = lesson()
    replaced(8, "What breaks if", "Without")(notebook)
    assert "no part 'What breaks if'" in store(opening, notebook)
    assert "no part 'What breaks if'" not in store(place.with_name("00_start.ipynb"), notebook)


def test_one_ignored_cell_in_five_is_let_pass(place):
    notebook = lesson()
    notebook.cells[9].source = MARKED
    notebook.cells.insert(2, new_code_cell("print(1)", id="one-more", outputs=[text("1\n")]))
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    assert store(place, notebook) == []
    assert notebooks.fates(place) == ["compared"] * 4 + ["ignored"]


# ---------------------------------------------------------------- normal form and execution


def test_normal_form_drops_what_differs_from_run_to_run():
    notebook = lesson()
    notebook.metadata = {"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.11.7"}}
    notebook.cells[1].metadata |= {"execution": {"iopub.status.busy": "2026-01-01"}, "collapsed": True}
    notebook.cells[1].outputs = [text("a"), text("b\n"), new_output("stream", name="stderr", text="c"), text("d")]
    view = {notebooks.WIDGET_VIEW: {"model_id": "f00"}, "image/png": PNG, "text/plain": ALT}
    notebook.cells[3].outputs = [
        new_output("display_data", data=view, metadata={"image/png": {"alt": ALT}, "needs_background": "light"})
    ]
    notebook.cells[9].id = notebook.cells[1].id
    before = copy.deepcopy(notebook)
    after = notebooks.normal(notebook)
    assert notebook == before  # its argument is left alone
    assert after.metadata == notebooks.METADATA
    assert after.cells[1].metadata == {"tags": ["parameters"]}
    assert [output.text for output in after.cells[1].outputs] == ["ab\n", "c", "d"]
    assert after.cells[3].outputs == [picture()]
    assert len({cell.id for cell in after.cells}) == len(after.cells)
    assert notebooks.normal(after) == after


def test_running_stores_what_a_fresh_kernel_says_and_the_second_time_nothing(tmp_path):
    sources = [
        "import os\nprint(os.path.basename(os.getcwd()), repr(os.environ['CUDA_VISIBLE_DEVICES']))",
        "import ipywidgets\nipywidgets.IntSlider(value=3)",
        f"display({{'image/png': {PNG!r}, 'text/plain': 'it'}}, metadata={{'image/png': {{'alt': 'it'}}}}, raw=True)",
    ]
    path = tmp_path / "one.ipynb"
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    notebook.cells[0].outputs = [text("something old\n")]
    nbformat.write(notebook, path)
    changed = notebooks.run(path)
    assert changed[0] == "cell 0 says something else:"
    assert "    -something old" in changed
    assert f"    +{tmp_path.name} ''" in changed
    assert changed[-1] == "cell 2 shows another picture"
    stored = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in stored.cells] == [1, 2, 3]
    assert stored.metadata == notebooks.METADATA
    assert dict(stored.cells[1].outputs[0].data) == {"text/plain": "IntSlider(value=3)"}
    assert stored.cells[2].outputs[0].metadata["image/png"]["alt"] == "it"

    old = path.stat()
    assert notebooks.run(path) == []
    assert path.stat().st_mtime_ns == old.st_mtime_ns and path.stat().st_ino == old.st_ino


def test_a_cell_that_fails_is_shown_and_the_stored_notebook_left(tmp_path, monkeypatch, capsys):
    path = tmp_path / "one.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print(1)\nraise ValueError('too large')")]), path)
    before = path.read_bytes()
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    assert notebooks.main(["run"]) == 1
    out = capsys.readouterr().out
    assert "one: failed, and was left as it is" in out and "too large" in out
    assert path.read_bytes() == before


def test_check_lists_the_faults_and_returns_one(place, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "folder", lambda: place.parent)
    store(place, lesson())
    assert notebooks.main(["check", "02_lamb"]) == 0
    assert "02_lamb: in form; 4 cells compared" in capsys.readouterr().out
    broken = lesson()
    broken.cells[9].execution_count = None
    store(place, broken)
    assert notebooks.main(["check", "notebooks/02_lamb.ipynb"]) == 1
    assert "02_lamb: 1 faults" in (out := capsys.readouterr().out)
    assert "    cell 9: was not executed" in out


def test_an_unknown_name_is_answered_with_the_known(place, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "folder", lambda: place.parent)
    with pytest.raises(InputError, match="no notebook '04_none'; there are: 01_adamw, 03_merit"):
        notebooks.find(["04_none"])
    assert notebooks.main(["run", "04_none"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_notebooks_at_all_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "folder", lambda: tmp_path)
    assert notebooks.main(["check"]) == 2
    assert f"no notebooks in {tmp_path}" in capsys.readouterr().err


# ---------------------------------------------------------------- the report beside nbval's

pytest_plugins = ["pytester"]


@pytest.fixture
def nbval(pytester):
    """Runs pytest --nbval on notebooks of these cells, under the conftest of notebooks/."""
    shutil.copy(notebooks.folder() / "conftest.py", pytester.path)

    def run(**books):
        for name, cells in books.items():
            for number, cell in enumerate(cells, start=1):
                cell.execution_count = number
            book = new_notebook(cells=cells, metadata=copy.deepcopy(notebooks.METADATA))
            nbformat.write(book, pytester.path / f"{name}.ipynb")
        names = [f"{name}.ipynb" for name in books]
        return pytester.runpytest_inprocess("--nbval", *names, "-p", "no:cacheprovider", "-p", "no:timeout")

    yield run
    with warnings.catch_warnings():  # nbval leaves its kernels' stderr open; else a later test would have to answer
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


LOOK = "import os; print([os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']])"
SLOW = "import time; print(1, flush=True); time.sleep(6); print(2)"


def test_cells_are_counted_and_kernels_see_no_gpu_and_may_be_slow(nbval):
    fifth = new_code_cell("# NBVAL_IGNORE_OUTPUT\n# Why: it differs.\nprint(id(1))", outputs=[text("1\n")])
    result = nbval(
        four_in_five=[*(new_code_cell(f"print({n})", outputs=[text(f"{n}\n")]) for n in range(4)), fifth],
        kernel=[
            new_code_cell(LOOK, outputs=[text("['', '1']\n")]),
            new_code_cell(SLOW, outputs=[text("1\n2\n")]),
        ],
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["four_in_five.ipynb: 4 compared, 1 ignored; 80% compared", "kernel.ipynb: 2 compared; 100% compared"]
    )


def test_too_few_compared_cells_fail_though_each_passes(nbval):
    result = nbval(one=[new_code_cell("print(1)", outputs=[text("1\n")]), new_code_cell("silent = 1")])
    assert result.ret == 1
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["one.ipynb: 1 compared, 1 empty; 50% compared, below the 80% that must be"])


def test_a_cell_that_says_something_else_fails(nbval):
    result = nbval(one=[new_code_cell("print(1)", outputs=[text("2\n")])])
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["one.ipynb: 1 failed; 0% compared*"])
