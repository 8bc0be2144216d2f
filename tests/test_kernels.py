"""The widgets in a real kernel, without a browser, under ipykernel 6 and 7: what a page would send and get back.

One of the two majors is installed; the other is fetched once, into the cache folder, and put before it for its kernel
alone. In ipykernel 7 a thread knows nothing of the cell that started it, so that what it prints is lost: what a
worker or renderer shows must arrive under both.
"""

import ast
import html
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from merit_lab.files import cache_dir, write_whole
from merit_lab.notebooks import kernel_environment

PINS = {"6": ("ipykernel==6.31.0", "nest-asyncio==1.6.0"), "7": ("ipykernel==7.4.0",)}  # what pip need not resolve
TESTS = Path(__file__).resolve().parent
OFFLINE = os.environ.get("MERIT_LAB_OFFLINE", "") not in ("", "0")
PATIENCE = 120.0  # seconds for anything on a busy machine

SETUP = """
import gc, threading, time
import ipykernel, ipywidgets, fakes, torch
from itertools import pairwise
from matplotlib.figure import Figure
from merit_lab.models import GPT2, GPT2Config
from merit_lab.widgets import LiveTraining, LogitGrowth, OptimizerXRay, WeightPatterns, live

class Training(fakes.Training):
    pass

live.train = Training
NAMES = ("AdamW", "LAMB", "MERIT")

def dashboard(n_steps, names=NAMES):
    return LiveTraining([fakes.recipe(name, n_steps) for name in names])

def model():
    torch.manual_seed(0)
    return GPT2(GPT2Config(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=24))

def left():
    gc.collect()
    return (
        [t.name for t in threading.enumerate() if t.name.startswith("merit_lab")],
        sum(type(x) is Figure for x in gc.get_objects()), Training.open, len(ipywidgets.widgets.widget._instances),
    )
"""


class Kernel:
    """A kernel and what a page would know of it.

    Attributes:
        updates: (id, state) of every change of a widget that arrived, in order.
    """

    def __init__(self, folder: Path, before: Path | None):
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "kernel under test", "language": "python",
        }  # fmt: skip
        write_whole(folder / "tested" / "kernel.json", repr(spec).replace("'", '"'))
        specs = KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)
        paths = [str(path) for path in (before, TESTS) if path]
        environment = os.environ | kernel_environment() | {"PYTHONPATH": os.pathsep.join(paths)}
        self.updates: list[tuple[str, dict]] = []
        self.manager = KernelManager(kernel_name="tested", kernel_spec_manager=specs)
        self.manager.start_kernel(env=environment, cwd=folder)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def restart(self):
        """As JupyterLab's Restart does: ask the kernel to end, and start another."""
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=PATIENCE)

    def run(self, code, **expressions):
        """Run a cell; what these expressions are then, or of the only one."""
        asked = self.client.execute(code, user_expressions=expressions, store_history=False)
        self._until_idle(asked)
        while True:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == asked:
                break
        content = reply["content"]
        assert content["status"] == "ok", "\n".join(content.get("traceback", ()))
        found = {}
        for name, value in content["user_expressions"].items():
            assert value["status"] == "ok", value
            found[name] = ast.literal_eval(value["data"]["text/plain"])
        return found

    def value(self, expression):
        """What an expression is, as a plain value."""
        return self.run("", value=expression)["value"]

    def send(self, widget, data):
        """What a page sends when somebody uses this widget (its name in the kernel)."""
        comm = self.value(f"{widget}.model_id")
        message = self.client.session.msg("comm_msg", {"comm_id": comm, "data": data})
        self.client.shell_channel.send(message)
        self._until_idle(message["header"]["msg_id"])

    def click(self, button):
        self.send(button, {"method": "custom", "content": {"event": "click"}})

    def set(self, control, **state):
        self.send(control, {"method": "update", "state": state, "buffer_paths": []})

    def until(self, condition, *of):
        """Wait until an expression in the kernel is true; updates that arrive meanwhile are kept."""
        end = time.monotonic() + PATIENCE
        while not self.value(condition):
            assert time.monotonic() < end, f"never: {condition}; {[self.value(x) for x in of]}"
            self.listen(0.05)

    def listen(self, seconds):
        """Take what arrives for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self._keep(self.client.get_iopub_msg(timeout=left))
            except queue.Empty:
                return

    def shown(self, widget):
        """The values of an HTML widget that arrived so far."""
        comm = self.value(f"{widget}.model_id")
        return [state["value"] for at, state in self.updates if at == comm and "value" in state]

    def _until_idle(self, asked):
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            self._keep(message)
            about_it = message["msg_type"] == "status" and message["parent_header"].get("msg_id") == asked
            if about_it and message["content"]["execution_state"] == "idle":
                return

    def _keep(self, message):
        content = message["content"]
        if message["msg_type"] == "comm_msg" and content["data"].get("method") == "update":
            self.updates.append((content["comm_id"], content["data"]["state"]))
        assert message["msg_type"] != "error", "\n".join(content["traceback"])
        assert not (message["msg_type"] == "stream" and content["name"] == "stderr"), content["text"]


def fetched(major: str) -> Path | None:
    """Where this major of ipykernel is, None for the installed one. Skips, or fails in CI, where it cannot be had."""
    if version("ipykernel").split(".")[0] == major:
        return None
    folder = cache_dir() / PINS[major][0].replace("==", "-")
    if folder.is_dir():
        return folder
    if why := "MERIT_LAB_OFFLINE is set" if OFFLINE else _fetch(PINS[major], folder):
        message = f"no ipykernel {major}: {why}. pip install --no-deps --target {folder} {' '.join(PINS[major])}"
        if os.environ.get("MERIT_LAB_REQUIRE_BROWSER", "0") != "0":
            pytest.fail(message)
        pytest.skip(message)
    return folder


def _fetch(packages, folder) -> str:
    """Install them into the folder, which is there whole or not at all. Returns what went wrong, or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--retries", "1", "--timeout", "20", "--target", f"{scratch}/made", *packages]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            return f"pip says {done.stderr.strip()[-300:]!r}"
        with suppress(OSError):  # somebody else was quicker
            os.replace(f"{scratch}/made", folder)
    return ""


@pytest.fixture(scope="module", params=["6", "7"], ids="ipykernel {}".format)
def kernel(request, tmp_path_factory):
    """A kernel of each major, with SETUP run. Its .major is the one asked for."""
    before = fetched(request.param)
    made = Kernel(tmp_path_factory.mktemp("kernels"), before)
    made.major, made.before = request.param, before
    try:
        made.run(SETUP)
        yield made
    finally:
        made.close()


@pytest.fixture
def lab(kernel):
    """The kernel as it was set up; after the test nothing may be left in it."""
    before = kernel.run("Training.seconds, Training.fail_at = 0.0, None", left="left()")["left"]
    kernel.updates.clear()
    yield kernel
    kernel.run("widget.close(); widget = None")
    kernel.until("not left()[0]", "left()")
    assert kernel.value("left()") == before


def words(text):
    return html.unescape(re.sub("<[^>]+>", "", text))


def test_the_kernel_is_of_that_version(kernel):
    assert kernel.value("ipykernel.__version__").split(".")[0] == kernel.major
    if kernel.before:
        assert Path(kernel.value("ipykernel.__file__")).is_relative_to(kernel.before)


def test_buttons_do_what_they_say(lab):
    lab.run("Training.seconds = 0.005; widget = dashboard(10**5); taken = lambda: len(widget.runs[2].records)")
    lab.run("widget.budget = 1.0")  # pictures soon
    lab.click("widget.run_button")
    assert lab.value("widget.state") == "running"
    lab.until("widget.frames >= 3", "widget.status.value")
    lab.click("widget.pause_button")
    lab.until("widget.state == 'paused' and widget.wait(60)")
    lab.listen(0.2)
    frames, taken = lab.value("widget.frames"), lab.value("taken()")
    assert len(lab.shown("widget.picture")) == frames  # all arrived
    assert "Paused at step" in words(lab.shown("widget.status")[-1])
    lab.listen(0.4)
    assert (lab.value("widget.frames"), lab.value("taken()")) == (frames, taken)
    lab.click("widget.step_button")
    lab.until("widget.state == 'paused' and widget.wait(60)")
    assert lab.value("taken()") == taken + 1 and lab.value("widget.frames") == frames + 1
    lab.click("widget.run_button")
    lab.until(f"taken() > {taken + 3}")
    lab.click("widget.stop_button")
    lab.until("widget.state == 'stopped' and not widget.worker.is_alive()")
    assert lab.value("taken()") > taken + 1 and lab.value("widget.png is not None")
    lab.click("widget.reset_button")
    assert lab.run("", state="widget.state", taken="taken()") == {"state": "ready", "taken": 0}


def test_sliders_decide_the_next_run(lab):
    lab.run("widget = dashboard(40)")
    lab.set("widget.rates[1]", value=0.0421)
    lab.set("widget.batch", index=lab.value("widget.batch.options.index(32)"))
    assert "20 steps of 32 sequences; AdamW at lr 0.01, LAMB at lr 0.0421" in words(lab.shown("widget.progress")[-1])
    lab.click("widget.run_button")
    lab.until("widget.state == 'done' and widget.wait(60)")
    assert lab.value("[(lane.recipe.lr, len(lane.records)) for lane in widget.runs]") == [
        (0.01, 20), (0.0421, 20), (0.01, 20)
    ]  # fmt: skip
    pictures = len(lab.shown("widget.picture"))
    lab.set("widget.tensor", index=1)
    lab.until("widget.wait(60) and widget.tensor.index == 1")
    lab.listen(0.2)
    assert len(lab.shown("widget.picture")) == pictures + 1
    assert "Done: step 20 of 20" in words(lab.shown("widget.status")[-1])


def test_at_most_four_frames_a_second(lab):
    lab.run("""if True:
        Training.seconds = 0.003
        widget = dashboard(10**6, ["MERIT"])
        widget.budget, began, draw = 1.0, [], widget.renderer.draw
        widget.renderer.draw = lambda: (began.append(time.monotonic()), draw())
    """)
    lab.click("widget.run_button")
    lab.until("len(began) >= 6")
    lab.click("widget.stop_button")
    lab.until("widget.state == 'stopped'")
    lab.listen(0.2)
    gaps, drawn, taken = lab.value("(min(b - a for a, b in pairwise(began)), len(began), widget.position)")
    assert gaps > 0.249 and taken > 8 * drawn  # it could have been drawn far more often
    assert 5 <= len(lab.shown("widget.picture")) <= drawn + 2  # the first, and the last at rest


def test_twenty_cycles_leave_no_thread_and_no_figure(lab):
    lab.run("Training.seconds = 0.001; widget = dashboard(10**5)")
    lab.click("widget.step_button")
    lab.until("widget.wait(60) and not left()[0]")
    lab.click("widget.stop_button")
    before = lab.value("left()")
    for _ in range(20):
        lab.click("widget.run_button")
        lab.click("widget.stop_button")
    lab.until("widget.wait(60) and not left()[0]", "left()")
    assert lab.value("left()") == before


def test_an_error_arrives_whole_and_the_last_picture_stays(lab):
    lab.run("Training.fail_at = 12; widget = dashboard(60)")
    lab.click("widget.run_button")
    lab.until("widget.state == 'failed' and widget.wait(60)")
    lab.listen(0.2)
    status = lab.shown("widget.status")[-1]
    assert "RuntimeError: the step <12> failed & so on" in words(status) and "__next__" in status
    assert "AdamW" in lab.shown("widget.picture")[-1]


# Widgets that change only when a control does: how each is made, and control -> what the page sends.
STILL = {
    "replay": (
        "LiveTraining([fakes.run(name) for name in NAMES])",
        {"time": {"value": 20}, "tensor": {"index": 1}, "step_button": None},
    ),
    "growth": (
        "LogitGrowth([fakes.run(name) for name in NAMES])",
        {"time": {"value": 3}, "run": {"index": 2}, "per_head": {"value": True}},
    ),
    "patterns": ("WeightPatterns(model())", {"layer": {"value": 1}, "seed": {"value": 5}, "again": None}),
    "X-ray": (
        "OptimizerXRay()",
        {
            "time": {"value": 3}, "back": None, "forward": None, "lr": {"value": 0.5}, "weight_decay": {"value": 0.5},
            "beta1": {"value": 0.5}, "beta2": {"value": 0.5}, "eps": {"value": 0.25}, "gradients": {"index": 1},
            "seed": {"value": 5}, "outlier": {"value": 10.0}, "outlier_row": {"value": 2},
            "outlier_column": {"value": 3}, "outlier_in": {"index": 1},
            "optimizers[0]": {"index": 3}, "row": {"value": 2}, "column": {"value": 2}, "source": {"index": 2},
            "weight_text": {"value": "1 2\n3 4"}, "grad_text": {"value": "1 2\n3 5"}, "show": {"index": 1},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STILL)
def test_every_control_changes_what_is_shown(lab, name):
    make, controls = STILL[name]
    lab.run(f"widget = {make}")
    for control, state in controls.items():
        frames, picture = lab.value("widget.frames"), lab.value("hash(widget.png)")
        if state is None:
            lab.click(f"widget.{control}")
        else:
            lab.set(f"widget.{control}", **state)
        lab.until(f"widget.frames > {frames}", "widget.status.value")
        assert lab.value("widget.error is None"), lab.value("widget.status.value")
        if control != "again":  # the weights are still the same
            assert lab.value("hash(widget.png)") != picture, control
    if name == "replay":
        lab.until("widget.wait(60)")
    lab.listen(0.2)
    arrived = sum(a != b for a, b in pairwise(lab.shown("widget.picture")))
    assert arrived >= len(controls) - ("again" in controls)  # each reaches the page


def test_a_restart_ends_a_run_and_the_new_kernel_works(kernel):
    kernel.run("Training.seconds = 0.005; widget = dashboard(10**6)")
    kernel.click("widget.run_button")
    kernel.until("widget.position > 3 and widget.frames > 1", "widget.status.value")
    process = kernel.run("import os", pid="os.getpid()")["pid"]
    kernel.restart()
    with pytest.raises(ProcessLookupError):  # and its threads with it
        os.kill(process, 0)
    kernel.run(SETUP)
    assert kernel.value("left()[:3]") == ([], 0, 0)
    kernel.run("widget = dashboard(40)")
    kernel.click("widget.run_button")
    kernel.until("widget.state == 'done' and widget.wait(60)")
    kernel.listen(0.2)
    assert "Done: step 40 of 40" in words(kernel.shown("widget.status")[-1])
    kernel.run("widget.close(); widget = None")
