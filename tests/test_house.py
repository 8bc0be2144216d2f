"""What holds the parts of the repository together: one list of dependencies, a light core, nobody's paths."""

import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import merit_lab
from merit_lab import bootstrap
from merit_lab.files import repo_root

ROOT = repo_root()
FOLDERS = {".ci", "data", "merit_lab", "notebooks", "tests"}
# What a GPU machine without Jupyter has no use for, and what would make `import merit_lab` slow.
SHELL_PACKAGES = ("matplotlib", "seaborn", "pandas", "ipywidgets", "IPython", "typer", "rich", "datasets", "tiktoken")
# They draw, show, execute notebooks or are a program; every other module is the core.
SHELL_MODULES = ("figures", "widgets", "exercises", "notebooks", "compare", "bench", "__main__")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required():
    """(name, least version) of every dependency in pyproject.toml."""
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return {re.fullmatch(r"([\w-]+)>=([\d.]+)(?:; .*)?", entry).groups() for entries in lists for entry in entries}


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))


def tracked():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def numbers(version):
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))


def test_every_dependency_is_pinned_to_a_version_it_allows():
    pinned = pins()
    assert required()
    for name, least in required():
        assert numbers(pinned[name]) >= numbers(least), name


def test_pins_are_exact_and_of_no_single_platform():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    strange = [line for line in lines if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)]
    assert not strange
    assert "torch==2.13.0" in lines


def test_every_dependency_says_what_it_is_for():
    lines = re.findall(r'^    "[\w-]+>=.*', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(lines) >= len(required())
    assert [line for line in lines if not re.search(r",\s+# \w+", line)] == []


def test_conda_installs_what_make_installs():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, through_pip = conda["dependencies"]
    assert python.removeprefix("python").startswith(project()["requires-python"])
    assert pip == "pip"
    assert through_pip == {"pip": ["-c constraints.txt", f"-e .[{bootstrap.EXTRAS}]"]}
    # Not every extra is named, but every package is among those that are, save for an engine for clusters.
    extras = project()["optional-dependencies"]
    del extras["ray"]
    named = {entry for extra in bootstrap.EXTRAS.split(",") for entry in extras[extra]}
    assert named == {entry for entries in extras.values() for entry in entries}


def test_a_version_has_one_place_and_the_citation_follows():
    assert "version" in project()["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == merit_lab.__version__
    assert citation["license"] == project()["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    for reference in citation["references"]:
        assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", reference["identifiers"][0]["value"])
        assert all(author.keys() == {"given-names", "family-names"} for author in reference["authors"])


def core_modules():
    files = (ROOT / "merit_lab").rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return sorted(name for name in names if not {*name.split(".")} & {*SHELL_MODULES})


def test_the_core_loads_no_plotting_widget_or_command_line_package():
    modules = core_modules()
    assert {"merit_lab", "merit_lab.optim.merit", "merit_lab.models.gpt2", "merit_lab.training"} <= set(modules)
    code = (
        f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
        f"print(*(name for name in {SHELL_PACKAGES} if name in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == []


def test_the_names_of_the_package_load_no_plotting_package():
    code = "from merit_lab import *; import sys; print('matplotlib' in sys.modules, 'ipywidgets' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.stdout.split() == ["False", "False"], out.stderr


def test_make_help_lists_every_target_for_people():
    makefile = (ROOT / "Makefile").read_text()
    out = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    listed = re.findall(r"^  ([a-z]+) +\S", out.stdout, flags=re.MULTILINE)
    assert {"lab", "test", "notebooks", "lint", "doctor", "help", "clean"} <= set(listed)
    targets = re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE)
    assert set(listed) == set(targets) - {"text"}  # a step of others


def test_make_lets_python_keep_what_it_compiled():
    """pip compiles nothing (--no-compile), so that the first import must be allowed to."""
    ask = ["make", "--no-print-directory", "--eval", "ask: ; @echo [$$PYTHONDONTWRITEBYTECODE]", "ask"]
    out = subprocess.run(
        ask, cwd=ROOT, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True
    )
    assert out.stdout == "[]\n", out.stderr


@pytest.mark.parametrize(
    ("arguments", "expected", "absent"),
    [
        ([], ["--ServerApp.ip=127.0.0.1", "--ServerApp.port=8888"], ["port_retries", "--no-browser", "token"]),
        (["PORT=9001"], ["--ServerApp.port=9001", "--ServerApp.port_retries=0"], ["--no-browser"]),
        (["HEADLESS=1"], ["--no-browser", "/lab/tree/notebooks/00_start_here.ipynb"], []),
        (["HEADLESS=0"], ["--LabApp.news_url=None"], ["--no-browser"]),
    ],
)
def test_make_lab_asks_for_what_it_says(arguments, expected, absent):
    out = subprocess.run(["make", "-n", "lab", *arguments], cwd=ROOT, capture_output=True, text=True).stdout
    command = out[out.index("jupyter lab") :]
    assert [part for part in expected if part not in command] == []
    assert [part for part in absent if part in command] == []


def test_the_top_level_has_the_folders_of_the_design_alone():
    assert {file.relative_to(ROOT).parts[0] for file in tracked() if file.parent != ROOT} <= FOLDERS


def test_no_file_names_a_place_outside_the_repository():
    # In pieces, or this file would name them too.
    words = ["/" + "work/", ".." + "/shared"]
    texts = {str(file.relative_to(ROOT)): file.read_text(errors="ignore") for file in tracked()}
    assert [(name, word) for name, text in texts.items() for word in words if word in text] == []


def test_what_is_generated_is_not_tracked():
    generated = re.compile(r"(^|/)(__pycache__|\.ipynb_checkpoints|\.venv|\.pytest_cache)/|^data/cache/|\.tmp$")
    assert [name for name in map(str, (file.relative_to(ROOT) for file in tracked())) if generated.search(name)] == []
