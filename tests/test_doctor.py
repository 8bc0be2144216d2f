"""The environment check says what is wrong and what to do, and its exit code tells whether it matters."""

import importlib.metadata
import re
import sys

import pytest

from merit_lab import doctor, text
from merit_lab.errors import InputError


def test_this_environment_passes_every_essential_check(capsys):
    assert doctor.report() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    assert all(re.match(r"\[ok\] \S|\[!!\] \S.* -> \S", line) for line in lines)


def test_every_check_that_can_fail_says_what_to_do():
    always = [check.what for check in doctor.checks() if not check.advice]
    # These three report, they do not judge: system, device, folder.
    assert len(always) == 3, always


def without(monkeypatch, package, version=None):
    real = importlib.metadata.version

    def other(name):
        if name != package:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", other)


def test_a_core_package_that_is_missing_is_essential(monkeypatch, capsys):
    without(monkeypatch, "einops")
    assert doctor.report() == 1
    assert "[!!] einops is not installed -> run make setup" in capsys.readouterr().out


def test_a_package_for_the_notebooks_is_not(monkeypatch, capsys):
    without(monkeypatch, "seaborn")
    assert doctor.report() == 0
    assert "[!!] seaborn is not installed (for the notebooks) ->" in capsys.readouterr().out


def test_an_old_package_is_found_by_number_not_by_letter(monkeypatch):
    without(monkeypatch, "torch", "2.9.1+cu128")  # "2.9" > "2.11" as text
    [torch] = [check for check in doctor.packages() if check.what.startswith("torch ")]
    assert not torch.ok
    assert "2.9.1+cu128 is older than 2.11" in torch.what


def test_a_missing_compiler_is_a_line_and_no_error(monkeypatch, capsys):
    from merit_lab.optim import fast_c

    monkeypatch.setattr(fast_c, "library", lambda dtype: None)
    assert doctor.report() == 0
    said = "[!!] LAMB and MERIT take their fused step in torch -> it is slower there; install gcc"
    assert said in capsys.readouterr().out


def test_a_torch_that_does_not_import_is_a_line_not_a_crash(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.report() == 1
    assert "[!!] torch does not import" in capsys.readouterr().out


def test_widgets_that_would_stay_blank_are_found(monkeypatch):
    without(monkeypatch, "jupyterlab_widgets", "1.1.4")
    assert not next(check for check in doctor.lab() if check.what.startswith("ipywidgets")).ok


def test_no_jupyter_is_one_line(monkeypatch):
    without(monkeypatch, "jupyterlab_widgets")
    assert [check.ok for check in doctor.lab()] == [False]


@pytest.mark.parametrize(
    ("program", "ok"), [("python", True), (sys.executable, True), ("/opt/elsewhere/bin/python", False)]
)
def test_a_kernel_that_runs_another_python_is_found(monkeypatch, program, ok):
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda *_: KernelSpec(argv=[program]))
    [kernel] = [check for check in doctor.lab() if check.what.startswith("the kernel")]
    assert kernel.ok == ok


def test_a_text_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path))
    last = list(doctor.places())[-1]
    assert not last.ok
    assert "python -m merit_lab text shakespeare" in last.advice


def test_a_folder_that_cannot_be_written_is_told_and_essential(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path / "file"))
    [check] = doctor.places()
    assert not check.ok and check.essential
    assert "MERIT_LAB_DATA" in check.advice


def test_a_text_that_cannot_be_read_is_told(monkeypatch):
    def refuse(*_, **__):
        raise InputError("the wheel is another one than corpora.toml says")

    monkeypatch.setattr(text, "load", refuse)
    assert "another one" in list(doctor.places())[-1].advice


def test_the_verdict_is_the_same_on_every_fit_machine(monkeypatch, capsys):
    for name in ("machine", "packages", "torch_and_device", "lab", "places"):
        monkeypatch.setattr(doctor, name, lambda: [doctor.Check(True, "fine")])
    doctor.verdict()
    assert capsys.readouterr().out.splitlines() == [
        "Python, packages and PyTorch: True",
        "JupyterLab, kernel and widgets: True",
        "text and folders: True",
        "environment is ready: True",
    ]
    monkeypatch.setattr(doctor, "lab", lambda: [doctor.Check(False, "no slider", "install one")])
    doctor.verdict()
    out = capsys.readouterr().out
    assert "JupyterLab, kernel and widgets: False" in out
    assert "environment is ready: False\n[!!] no slider -> install one" in out


def test_the_browser_may_be_named(monkeypatch):
    monkeypatch.setenv("MERIT_LAB_BROWSER", sys.executable)
    assert doctor.find_browser() == sys.executable
    monkeypatch.setenv("MERIT_LAB_BROWSER", "/no/such/browser")
    assert doctor.find_browser() is None
    assert not doctor.browser().ok
