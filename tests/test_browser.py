"""The widgets in a real browser: headless Chromium against a real JupyterLab, every notebook that shows a widget.

Where MERIT_LAB_SCREENSHOTS names a folder, pictures of each widget at both widths and in both themes go there.
"""

import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest


def needed(module: str, package: str):
    """A module of a package. Where it is not installed all here is skipped, and fails in CI."""
    if os.environ.get("MERIT_LAB_REQUIRE_BROWSER", "0") != "0":
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"the browser tests need {package}: pip install {package}")


sync_api = needed("playwright.sync_api", "playwright")
axe = needed("axe_playwright_python.sync_playwright", "axe-playwright-python")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("LiveTraining", "OptimizerXRay", "LogitGrowth", "WeightPatterns")
NARROW, WIDE = 900, 1600  # pixels of the window
LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"
PATIENCE = 240_000  # ms that a notebook may take on a busy machine

# What the page is asked. `jupyterapp` is there because the server was told to expose it.
OPEN = "path => jupyterapp.commands.execute('docmanager:open', {path})"
RUN_ALL = """() => {
    window.ran = false;
    jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ran = true);
}"""
WIDER = """w => {  // the elements that reach out of the widget, unless something scrolls them
    const right = w.getBoundingClientRect().right + 1;
    const scrolls = e => e && e !== w &&
        (getComputedStyle(e).overflowX === 'auto' || scrolls(e.parentElement));
    return [...w.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().right > right && !scrolls(e))
        .map(e => e.outerHTML.slice(0, 150));
}"""
THEME = "theme => jupyterapp.commands.execute('apputils:change-theme', {theme})"


def uses(notebook: Path) -> list[str]:
    """The widgets that a notebook makes."""
    cells = nbformat.read(notebook, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    return [name for name in NAMES if f"{name}(" in code]


WITH_WIDGETS = {path.stem: uses(path) for path in sorted(NOTEBOOKS.glob("*.ipynb")) if uses(path)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab over a copy of the notebooks, with a place for the workspace's name."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS, home / "notebooks", ignore=shutil.ignore_patterns("conftest.py", ".ipynb_checkpoints"))
    settings = home / "settings" / "@jupyterlab"
    for plugin, values in {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},  # all cells stay in the page
        "docmanager-extension/plugin": {"autosave": False},
    }.items():
        path = settings / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={home / 'notebooks'}"]
    command += ["--IdentityProvider.token=secret", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=secret", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"JupyterLab did not start:\n{(home / 'log').read_text()[-2000:]}")
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/workspaces/{{workspace}}?token=secret"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=chromium, args=[*arguments, "--disable-sync"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(request, lab, browser):
    """A notebook, opened and run to its end in a window of 1600 pixels: (page, names of its widgets)."""
    page = browser.new_page(viewport={"width": WIDE, "height": 1000})
    page.set_default_timeout(60_000)
    page.goto(lab.format(workspace=request.param))  # one of its own: Lab opens again what stood in a workspace
    page.wait_for_function("() => window.jupyterapp && jupyterapp.started", timeout=PATIENCE)
    page.evaluate("() => jupyterapp.restored")
    page.evaluate(OPEN, f"{request.param}.ipynb")
    page.wait_for_selector(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell")
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.ready")
    page.evaluate(RUN_ALL)
    page.wait_for_function("() => window.ran", timeout=PATIENCE)
    yield page, WITH_WIDGETS[request.param], request.param
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()


each_notebook = pytest.mark.parametrize("opened", WITH_WIDGETS, indirect=True, scope="module")
PAIRS = [(notebook, name) for notebook, names in WITH_WIDGETS.items() for name in names]
each_widget = pytest.mark.parametrize("opened, name", PAIRS, indirect=["opened"], scope="module")


def widgets(page):
    return page.locator(".merit-lab:not(.merit-lab .merit-lab)")


def picture(widget):
    """What the picture is, to see whether it changes."""
    return widget.locator("img.merit-lab-picture").first.get_attribute("src")


def wait_until(condition, seconds=60.0):
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def rests(widget, seconds=1.5):
    """Whether the picture stays as it is."""
    before = picture(widget)
    time.sleep(seconds)
    return picture(widget) == before


def button(widget, name):
    return widget.get_by_role("button", name=name, exact=True).first


def press(widget, name):
    button(widget, name).click()


def reach(widget, name):
    """Go to a button by Tab, backwards where it stands before the focus."""
    focused = "e => e === document.activeElement"
    for key in ["Shift+Tab"] * 6 + ["Tab"] * 12:
        if button(widget, name).evaluate(focused):
            return
        widget.page.keyboard.press(key)
    pytest.fail(f"Tab does not reach {name}")


def status(widget):
    """What the status line says."""
    return widget.get_by_role("status").first.inner_text()


def at(widget, words):
    """The step that the status line names after these words, None where it says something else."""
    found = re.match(rf"{words} step ([\d,]+) of", status(widget))
    return int(found[1].replace(",", "")) if found else None


def shown(page, width, theme):
    """Make the window so wide and show this theme."""
    page.set_viewport_size({"width": width, "height": 1000})
    page.evaluate(THEME, theme)
    page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")


def test_a_package_that_is_missing_fails_where_it_is_required(monkeypatch):
    monkeypatch.setenv("MERIT_LAB_REQUIRE_BROWSER", "1")
    with pytest.raises(ImportError):
        needed("not_installed_anywhere", "nothing")
    monkeypatch.setenv("MERIT_LAB_REQUIRE_BROWSER", "0")
    with pytest.raises(pytest.skip.Exception, match="pip install nothing"):
        needed("not_installed_anywhere", "nothing")


def test_there_are_notebooks_with_every_widget():
    assert {name for names in WITH_WIDGETS.values() for name in names} == set(NAMES)


@each_notebook
def test_the_notebook_ran_without_an_error(opened):
    page, names, _ = opened
    panel = page.locator(".jp-NotebookPanel")
    assert panel.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert panel.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert "Error displaying widget" not in panel.inner_text()
    assert widgets(page).count() == len(names)
    for i in range(len(names)):
        assert wait_until(lambda i=i: widgets(page).nth(i).locator("img.merit-lab-picture").count() == 1)


each_width = pytest.mark.parametrize("width", [NARROW, WIDE])
each_theme = pytest.mark.parametrize("theme", [LIGHT, DARK])


@each_notebook
@each_width
@each_theme
def test_no_serious_accessibility_fault(opened, width, theme):
    page, _, _ = opened
    shown(page, width, theme)
    result = axe.Axe().run(page, context=".merit-lab")
    serious = [v for v in result.response["violations"] if v["impact"] in ("serious", "critical")]
    faults = [(v["id"], v["help"], [n["html"][:200] for n in v["nodes"]][:3]) for v in serious]
    assert not faults, json.dumps(faults, indent=1)


@each_notebook
@each_width
@each_theme
def test_it_fits_at_both_widths_and_in_both_themes(opened, width, theme):
    page, _names, notebook = opened
    shown(page, width, theme)
    for i in range(widgets(page).count()):
        widget = widgets(page).nth(i)
        widget.scroll_into_view_if_needed()
        assert not widget.evaluate(WIDER), "wider than the widget's place"
        image = widget.locator("img.merit-lab-picture").first
        box = image.bounding_box()
        assert box["width"] > 300 and box["height"] > 150
        sentence = image.locator("xpath=following::p[1]")
        assert sentence.inner_text() == image.get_attribute("alt") and len(sentence.inner_text()) > 30
        assert sentence.bounding_box()["y"] >= box["y"] + box["height"]
        if folder := os.environ.get("MERIT_LAB_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = f"{notebook}-{i}-{width}-{theme.split()[-1].lower()}.png"
            page.set_viewport_size({"width": width, "height": 2400})  # or what scrolls out of sight would be missing
            widget.scroll_into_view_if_needed()
            page.locator(".jp-OutputArea-output", has=widget).last.screenshot(path=Path(folder) / name)
    page.set_viewport_size({"width": WIDE, "height": 1000})


def first(opened, name):
    """The first widget of this kind in the notebook."""
    page, names, _ = opened
    return widgets(page).nth(names.index(name))


@pytest.mark.parametrize(
    "opened", [n for n, names in WITH_WIDGETS.items() if "LiveTraining" in names], indirect=True, scope="module"
)
def test_live_training_obeys_its_buttons(opened):
    dashboard = first(opened, "LiveTraining")
    press(dashboard, "Reset")
    assert wait_until(lambda: status(dashboard).startswith("Ready. Press Run"))
    assert wait_until(lambda: rests(dashboard, 0.5))
    clear = picture(dashboard)
    press(dashboard, "Step")
    assert wait_until(lambda: picture(dashboard) != clear), "Step shows one step"
    assert wait_until(lambda: rests(dashboard)), "and no more than one"
    assert at(dashboard, "Paused at") == 1
    one = picture(dashboard)
    press(dashboard, "Run")
    assert wait_until(lambda: picture(dashboard) != one), "the picture changes while it runs"
    assert status(dashboard).startswith("Running")
    press(dashboard, "Pause")
    assert wait_until(lambda: rests(dashboard)), "it rests after Pause"
    paused, reached = picture(dashboard), at(dashboard, "Paused at")
    assert reached > 1
    press(dashboard, "Run")
    assert wait_until(lambda: picture(dashboard) != paused), "Run goes on after Pause"
    press(dashboard, "Stop")
    assert wait_until(lambda: rests(dashboard)), "it rests after Stop"
    assert at(dashboard, "Stopped at") > reached
    assert picture(dashboard) != clear, "the last state stays visible"
    # The same without a mouse, from the button before.
    button(dashboard, "Reset").focus()
    for name, key, done in (
        ("Reset", "Enter", lambda: status(dashboard).startswith("Ready. Press Run") and picture(dashboard) == clear),
        ("Step", "Space", lambda: at(dashboard, "Paused at") == 1 and picture(dashboard) == one),
        ("Run", "Enter", lambda: status(dashboard).startswith("Running") and picture(dashboard) not in (clear, one)),
        ("Pause", "Space", lambda: (at(dashboard, "Paused at") or 0) > 1),
        ("Stop", "Enter", lambda: (at(dashboard, "Stopped at") or 0) > 1),
    ):
        reach(dashboard, name)
        dashboard.page.keyboard.press(key)
        assert wait_until(done), (name, status(dashboard))
    assert rests(dashboard)


@each_widget
def test_every_slider_moved_by_keyboard_changes_the_picture(opened, name):
    widget = first(opened, name)
    if name == "LiveTraining":
        press(widget, "Reset")
        assert wait_until(lambda: status(widget).startswith("Ready. Press Run"))
    assert wait_until(lambda: rests(widget, 1.0))
    plan = widget.get_by_text("Next run:").first  # there where sliders decide the next run and not the picture

    def effect():  # not the slider's own number, which the page changes without the kernel
        return plan.inner_text() if plan.count() else picture(widget)

    sliders = widget.get_by_role("slider").filter(visible=True)
    assert sliders.count() > 0
    for i in range(sliders.count()):
        assert sliders.nth(i).get_attribute("aria-disabled") != "true"
        before = effect()
        sliders.nth(i).focus()
        for key in ("ArrowRight", "ArrowLeft"):  # one of them where the slider stands at an end
            sliders.nth(i).press(key)
            if wait_until(lambda before=before: effect() != before, 5):
                break
        else:
            pytest.fail(f"slider {i} changed nothing")


@pytest.mark.parametrize(
    "opened", [n for n, names in WITH_WIDGETS.items() if "OptimizerXRay" in names], indirect=True, scope="module"
)
def test_the_xray_goes_forward_and_back_by_keyboard(opened):
    xray = first(opened, "OptimizerXRay")
    assert wait_until(lambda: rests(xray, 1.0))
    start = picture(xray)
    button(xray, "Forward").focus()
    xray.page.keyboard.press("Enter")
    assert wait_until(lambda: picture(xray) != start)
    reach(xray, "Back")
    xray.page.keyboard.press("Space")
    assert wait_until(lambda: picture(xray) == start)
