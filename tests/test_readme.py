"""The README says what is there: its map is the notebooks' own words, its code runs, its commands and links exist."""

import re
import shlex
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from merit_lab import MERIT, notebooks, optim
from merit_lab.__main__ import app
from merit_lab.errors import InputError
from merit_lab.files import repo_root
from merit_lab.readme import section
from merit_lab.recipe import RECIPES

ROOT = repo_root()
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
SHELL = "".join(code for language, code in BLOCKS if language == "sh")
LINES = [shlex.split(line, comments=True) for line in SHELL.splitlines()]
COMMANDS = [line[3:] for line in LINES if line[:3] == ["python", "-m", "merit_lab"]]


def test_the_map_is_what_the_notebooks_say():
    assert section(README, "notebooks") == notebooks.course_map(notebooks.find())
    for path in notebooks.find():
        assert f"](notebooks/{path.name})" in README


def test_the_first_notebook_has_the_same_map():
    cells = notebooks.nbformat.read(notebooks.folder() / "00_start_here.ipynb", as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    listed = re.findall(r"^\| \[[^\]]+\]\((\d\d_\w+\.ipynb)\) \| (.+) \|$", text, flags=re.MULTILINE)
    rows = re.findall(r"\(notebooks/(.+?)\) \| (.+?) \|", notebooks.course_map(notebooks.find()))
    assert listed == rows and rows


def first_cell(time="Time: 20 min to read; 15 s to run on 2 CPU cores. GPU: not needed.", question="**Why?** Think."):
    return f"# 01 · A title\n\n{question}\n\n{time}\n"


def store(folder, source):
    notebook = notebooks.nbformat.v4.new_notebook(cells=[notebooks.nbformat.v4.new_markdown_cell(source)])
    path = folder / "01_one.ipynb"
    notebooks.nbformat.write(notebook, path)
    return path


def test_a_line_of_the_map(tmp_path):
    table = notebooks.course_map([store(tmp_path, first_cell())])
    assert table.splitlines()[2:] == ["| [01 · A title](notebooks/01_one.ipynb) | Why? | 20 min | 15 s |"]


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        ({"question": "Why?"}, "question"),
        ({"time": "Time: 15 s to run on 2 CPU cores."}, "time to read"),
        ({"time": "Time: 20 min to read, GPU: 15 s to run."}, "time to run on 2 CPU cores"),
    ],
)
def test_a_notebook_that_does_not_say_is_named(tmp_path, change, lacks):
    with pytest.raises(InputError, match=f"01_one.ipynb: the first cell does not say its {lacks}"):
        notebooks.course_map([store(tmp_path, first_cell(**change))])


def test_the_map_is_written_between_the_markers(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    store(folder, first_cell())
    monkeypatch.setattr(notebooks, "folder", lambda: folder)
    readme = tmp_path / "README.md"
    readme.write_text("before\n")
    assert notebooks.main(["map"]) == 2
    readme.write_text("before\n<!-- notebooks -->\nold\n<!-- /notebooks -->\nafter\n")
    assert notebooks.main(["map"]) == 0
    assert readme.read_text().startswith("before\n<!-- notebooks -->\n| notebook ")
    assert readme.read_text().endswith("| 15 s |\n<!-- /notebooks -->\nafter\n")
    assert notebooks.main(["map"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["README.md: written anew", "README.md: nothing changed"]
    assert "no lines '<!-- notebooks -->'" in said.err


def test_the_six_lines_train_a_model():
    (code,) = [code for language, code in BLOCKS if language == "python"]
    assert len(code.splitlines()) == 6
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = (inputs.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    before = cross_entropy(model(inputs), targets)
    names = {"model": model, "batches": [(inputs, targets)] * 60, "loss_of": cross_entropy}
    exec(code, names)
    assert isinstance(names["optimizer"], MERIT)
    assert cross_entropy(model(inputs), targets) < 0.7 * before


def test_there_are_commands():
    assert {command[0] for command in COMMANDS} >= {"compare", "train", "recipes", "optimizers", "doctor"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_and_its_options_exist(command):
    result = CliRunner().invoke(app, [*command, "--help"])  # an unknown option is refused before help is shown
    assert result.exit_code == 0, result.output
    given = dict(pairwise(command))
    if "--recipe" in given:
        assert given["--recipe"] in RECIPES
    if "--optimizer" in given:
        assert given["--optimizer"] in optim.OPTIMIZERS


def test_an_option_that_does_not_exist_would_be_noticed():
    assert CliRunner().invoke(app, ["compare", "--nonsense", "1", "--help"]).exit_code == 2


def test_make_has_the_targets_named():
    targets = set(re.findall(r"\bmake (\w+)", SHELL + "".join(re.findall(r"`[^`\n]+`", README))))
    assert {"lab", "test", "help", "doctor"} <= targets
    assert targets <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_links_and_pictures_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if not re.match(r"[a-z]+:", target)]
    assert len(targets) > 5
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).exists()] == []
    assert all(len(alt) > 20 for alt in re.findall(r"!\[([^\]]*)\]", README))
