"""make's set-up repairs itself. Stand-ins for venv and pip make that quick; one test has the real ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema  # comes with jupyterlab
import psutil  # comes with ipykernel
import pytest

from merit_lab import bootstrap
from merit_lab.files import repo_root

# python -m venv: a Python that passes everything on to the real one.
VENV = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1], "bin")
folder.mkdir(parents=True, exist_ok=True)
(folder / "python").write_text(f'#!/bin/sh\\nexec "{sys.executable}" "$@"\\n')
(folder / "python").chmod(0o755)
"""
# python -m pip install …: fails while there is a file "offline", waits before or while it installs for "wait …".
PIP = """
import os, sys, time

def wait(name):
    open("at " + name, "w").close()
    while os.path.exists("wait " + name):
        time.sleep(0.02)

wait("resolving")
if os.path.exists("offline"):
    print("WARNING: Retrying after connection broken by 'NewConnectionError('")
    print("ERROR: No matching distribution found for torch")
    sys.exit(1)
print("Installing collected packages: torch", flush=True)
wait("installing")
open(".venv/installed", "w").write(" ".join(sys.argv[1:]))
"""


# As if make had not been called from make: that one says which folders it enters.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}


class Project:
    """A checkout of which make setup sees Makefile, bootstrap.py, pyproject.toml and constraints.txt."""

    def __init__(self, root: Path, stand_ins: Path | None):
        self.root = root
        self.variables = {"PYTHON": sys.executable}
        (root / "merit_lab").mkdir(parents=True)
        shutil.copy(repo_root() / "Makefile", root)
        shutil.copy(repo_root() / "merit_lab" / "bootstrap.py", root / "merit_lab")
        (root / "pyproject.toml").write_text("")
        (root / "constraints.txt").write_text("")
        if stand_ins:
            (stand_ins / "pip").mkdir(parents=True)
            (stand_ins / "venv.py").write_text(VENV)
            (stand_ins / "pip" / "__init__.py").write_text("")
            (stand_ins / "pip" / "__main__.py").write_text(PIP)
            self.variables["PYTHONPATH"] = str(stand_ins)

    def start(self, *arguments, **variables):
        return subprocess.Popen(
            ["make", "setup", *arguments],
            cwd=self.root,
            env=ENVIRONMENT | self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def set_up(self, *arguments, **variables):
        """(exit code, output)"""
        process = self.start(*arguments, **variables)
        out, _ = process.communicate(timeout=200)
        return process.returncode, out

    @property
    def fit(self):
        venv = self.root / ".venv"
        if not (venv / "installed").exists() or (venv / ".incomplete").exists():
            return False
        return subprocess.run([venv / "bin" / "python", "-c", ""]).returncode == 0

    def catch(self, point, sign):
        """A set-up that waits at this point, caught when the file `sign` is there."""
        (self.root / f"wait {point}").touch()
        process = self.start()
        until = time.monotonic() + 60
        while not (self.root / sign).exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.02)
        return process

    def go_on(self):
        for file in self.root.glob("wait *"):
            file.unlink()

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        self.go_on()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "a folder", tmp_path / "stand-ins")


PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "tiny"
version = "1.0"
"""
BACKEND = """
import os, zipfile

def build_editable(folder, settings=None, metadata=None):
    with zipfile.ZipFile(os.path.join(folder, "tiny-1.0-py3-none-any.whl"), "w") as wheel:
        info = "tiny-1.0.dist-info/"
        wheel.writestr("tiny.py", "print('tiny is here')")
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return "tiny-1.0-py3-none-any.whl"
"""


def test_with_the_real_venv_and_pip(tmp_path):
    """On a project without dependencies, which needs no network."""
    project = Project(tmp_path / "tiny", None)
    (project.root / "pyproject.toml").write_text(PYPROJECT)
    (project.root / "backend.py").write_text(BACKEND)
    code, out = project.set_up()
    assert code == 0, out
    python = project.root / ".venv" / "bin" / "python"
    assert subprocess.check_output([python, "-c", "import tiny"], cwd=tmp_path, text=True) == "tiny is here\n"
    assert project.set_up() == (0, "")


def test_the_second_call_does_nothing_and_a_change_updates(project):
    code, out = project.set_up()
    assert code == 0 and project.fit, out
    assert "making .venv" in out and "there is none yet" in out
    command = (project.root / ".venv" / "installed").read_text()
    assert command.endswith("-c constraints.txt -e .[lab,test]")
    (project.root / "at resolving").unlink()
    assert project.set_up() == (0, "")
    assert not (project.root / "at resolving").exists()  # pip was not even started

    kept = project.root / ".venv" / "kept"
    kept.touch()
    for name in ("constraints.txt", "pyproject.toml"):
        (project.root / name).write_text("# another\n")
        code, out = project.set_up()
        assert code == 0 and "bringing .venv up to date" in out
        assert kept.exists()
        assert project.set_up() == (0, "")


def test_jupyterlab_opens_without_a_question_about_news(project):
    """Its default is set in .venv; the installed JupyterLab must know the settings by these names and values."""
    project.set_up()
    lab = Path("share", "jupyter", "lab")
    defaults = json.loads((project.root / ".venv" / lab / "settings" / "overrides.json").read_text())
    (plugin,) = defaults
    schema = json.loads((sys.prefix / lab / "schemas" / f"{plugin.replace(':', '/')}.json").read_text())
    for name, value in defaults[plugin].items():
        assert value != schema["properties"][name]["default"]
        jsonschema.validate(value, schema["properties"][name])


@pytest.mark.parametrize("point", ["resolving", "installing"])
def test_killed_in_the_middle_it_repairs_itself(project, point):
    project.kill(project.catch(point, sign=f"at {point}"))
    left_over = project.root / ".venv" / "left_over"
    left_over.touch()
    assert not project.fit
    code, out = project.set_up()
    assert code == 0 and project.fit, out
    assert "the last set-up was broken off" in out
    assert not left_over.exists()


def test_an_update_killed_while_it_installs_starts_from_nothing_and_before_that_does_not(project):
    assert project.set_up()[0] == 0
    (project.root / "constraints.txt").write_text("# another\n")
    (project.root / "at resolving").unlink()
    project.kill(project.catch("resolving", sign="at resolving"))
    assert project.fit
    code, out = project.set_up()
    assert code == 0 and "up to date" in out and "making" not in out

    (project.root / "constraints.txt").write_text("# a third\n")
    project.kill(project.catch("installing", sign=".venv/.incomplete"))
    assert not project.fit
    code, out = project.set_up()
    assert code == 0 and "the last set-up was broken off" in out
    assert project.fit


def test_two_at_a_time_make_one(project):
    first = project.catch("installing", sign="at installing")
    second = project.start()
    assert "waiting" in second.stdout.readline()
    project.go_on()
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 0, out
    assert second.communicate(timeout=120)[0] == ""
    assert second.returncode == 0 and project.fit


def test_a_set_up_waits_for_a_pip_that_outlived_the_one_before(project):
    first = project.catch("installing", sign="at installing")
    # Only the script dies; its pip goes on writing.
    below = psutil.Process(first.pid).children(recursive=True)
    [script] = [process for process in below if "merit_lab/bootstrap.py" in process.cmdline()]
    script.kill()
    second = project.start()
    assert "waiting" in second.stdout.readline()
    project.go_on()
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and project.fit, out
    first.communicate(timeout=10)


def test_a_moved_folder_is_set_up_anew(project):
    assert project.set_up()[0] == 0
    project.root = project.root.rename(project.root.with_name("another folder"))
    code, out = project.set_up()
    assert code == 0 and "it was made in another folder" in out
    assert project.fit


def test_a_python_that_is_gone_is_replaced(project):
    assert project.set_up()[0] == 0
    (project.root / ".venv" / "bin" / "python").unlink()
    (project.root / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    code, out = project.set_up()
    assert code == 0 and "its Python does not run" in out
    assert project.fit


def test_another_python_makes_another_environment(project):
    assert project.set_up()[0] == 0
    python = project.root / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\necho 3.10\n")
    code, out = project.set_up()
    assert code == 0 and "it has Python 3.10, this is 3." in out


def test_without_a_network_it_says_so(project):
    (project.root / "offline").touch()
    code, out = project.set_up()
    assert code != 0
    assert "ERROR: No matching distribution found for torch" in out
    assert "The first set-up needs the network" in out and "run make again" in out
    assert "NewConnectionError" in (project.root / ".venv" / "setup.log").read_text()
    (project.root / "offline").unlink()
    code, out = project.set_up()
    assert code == 0 and project.fit, out


def test_an_update_that_fails_leaves_the_environment(project):
    assert project.set_up()[0] == 0
    (project.root / "offline").touch()
    (project.root / "constraints.txt").write_text("# another\n")
    assert project.set_up()[0] != 0
    assert project.fit
    (project.root / "offline").unlink()
    code, out = project.set_up()
    assert code == 0 and "up to date" in out and "making" not in out


def test_no_fit_python_is_told_with_what_to_do(project, tmp_path):
    code, out = project.set_up(PYTHON="/no/such/python")
    assert code != 0
    assert "/no/such/python does not run or is older than 3.11. Name another: make PYTHON=" in out
    tools = tmp_path / "tools"  # a PATH without any Python
    tools.mkdir()
    for name in ("make", "sh", "id"):
        (tools / name).symlink_to(shutil.which(name))
    code, out = project.set_up("PYTHON=", PATH=str(tools))
    assert code != 0
    assert "No Python >= 3.11 was found" in out


def test_a_python_without_venv_is_told_with_debians_package(monkeypatch, tmp_path):
    real = bootstrap.importlib.util.find_spec
    monkeypatch.setattr(
        bootstrap.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else real(name)
    )
    with pytest.raises(bootstrap.SetUpError, match="apt install python3-venv"):
        bootstrap.make_venv(tmp_path / ".venv", "there is none yet", 0)
    assert not (tmp_path / ".venv").exists()
