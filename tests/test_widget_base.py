"""What all widgets share: pictures, words, errors, threads, and how they end."""

import base64
import gc
import io
import re
import subprocess
import sys
import threading
import time

import ipywidgets
import pytest
from matplotlib.figure import Figure
from PIL import Image

from merit_lab.errors import InputError
from merit_lab.widgets.base import LabWidget, Renderer


class Counter(LabWidget):
    """Draws how often it was drawn; `fails` makes it raise."""

    def __init__(self):
        self.n, self.fails, self.threads = 0, None, set()
        self.again = ipywidgets.Button(description="Again")
        self.size = ipywidgets.IntSlider(value=1, description="Size")
        self.released = threading.Event()
        super().__init__([ipywidgets.HBox([self.again, self.size])])
        self.on_click(self.again, self.refresh)
        self.on_change(self.size, self.refresh)
        self.refresh()

    def draw(self):
        self.threads.add(threading.current_thread())
        self.n += 1
        if self.fails:
            raise self.fails
        figure = Figure(figsize=(2, 1), dpi=50)
        figure.alt = f'picture {self.n} of "<things>"'
        return figure

    def stop(self):
        self.released.set()


@pytest.fixture
def counter():
    made = Counter()
    yield made
    made.close()


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("merit_lab")]


def test_a_picture_with_its_words(counter):
    src = re.search(r'src="data:image/png;base64,([^"]+)"', counter.picture.value)[1]
    assert base64.b64decode(src) == counter.png
    assert Image.open(io.BytesIO(counter.png)).size == (100, 50)
    assert 'width="100" height="50"' in counter.picture.value
    assert 'alt="picture 1 of &quot;&lt;things&gt;&quot;"' in counter.picture.value
    assert "picture 1 of &quot;&lt;things&gt;&quot;</p>" in counter.sentence.value
    assert counter.alt == 'picture 1 of "<things>"'
    assert 'role="status"' in counter.status.value


def test_the_saved_notebook_shows_the_last_frame(counter):
    counter.again.click()
    bundle, metadata = counter._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == counter.png
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == counter.model_id
    assert bundle["text/plain"] == "Counter()"
    assert metadata == {"image/png": {"alt": counter.alt}}


def test_controls_draw_and_stop_drawing_after_close(counter):
    counter.again.click()
    counter.size.value = 5
    assert counter.frames == counter.n == 3
    counter.close()
    counter.refresh()
    counter.request()
    assert counter.n == 3


def test_a_picture_without_alternative_text_is_an_error(counter):
    counter.draw = lambda: Figure()
    counter.refresh()
    assert "alternative text" in counter.status.value


def test_an_error_is_shown_whole_and_the_last_picture_stays(counter):
    before = counter.picture.value
    counter.fails = ZeroDivisionError("a < b")
    counter.again.click()
    assert counter.picture.value == before
    assert "ZeroDivisionError" in counter.status.value
    assert "a &lt; b" in counter.status.value
    assert "in draw" in counter.status.value  # the traceback, to unfold
    assert counter.error is counter.fails
    counter.fails = None
    counter.again.click()
    assert counter.error is None
    assert "Error" not in counter.status.value
    assert counter.picture.value != before


def test_an_input_error_is_its_message_alone(counter):
    counter.fails = InputError("lr: got 'x', expected a number")
    counter.again.click()
    assert "lr: got &#x27;x&#x27;, expected a number" in counter.status.value
    assert "<details>" not in counter.status.value


def test_the_renderer_draws_at_most_four_frames_a_second(counter):
    counter.renderer.share = 1.0
    started, drawn = time.monotonic(), counter.frames
    while time.monotonic() - started < 1.0:
        counter.request()
        time.sleep(0.005)
    assert counter.renderer.flush()
    elapsed = time.monotonic() - started
    frames = counter.frames - drawn
    assert 2 <= frames <= elapsed * 4 + 1
    assert threading.current_thread() not in counter.threads - {threading.main_thread()}
    assert len(counter.threads) == 2  # main and the renderer's


def test_slow_pictures_leave_the_processor_alone():
    drawn = []

    def slow():
        time.sleep(0.1)
        drawn.append(time.monotonic())

    renderer = Renderer(slow, rate=1000, share=0.2)
    started = time.monotonic()
    while time.monotonic() - started < 1.2:
        renderer.request()
        time.sleep(0.01)
    renderer.close()
    assert 1 <= len(drawn) <= (time.monotonic() - started) / 0.5 + 1


def test_the_renderer_says_when_it_would_draw_at_once():
    released = threading.Event()
    renderer = Renderer(lambda: released.wait(10), rate=0.001)
    assert renderer.ready()
    renderer.request()
    assert not renderer.ready()  # it draws
    released.set()
    assert renderer.flush()
    assert not renderer.ready()  # and must rest
    renderer.close()
    assert not renderer.ready()


def test_the_last_request_is_always_answered():
    seen, state = [], [0]
    renderer = Renderer(lambda: seen.append(state[0]), rate=50)
    for number in range(1, 30):
        state[0] = number
        renderer.request()
        time.sleep(0.002)
    assert renderer.flush()
    assert seen[-1] == 29
    assert len(seen) < 29  # several were answered together
    renderer.close()


def test_the_renderers_thread_ends_when_idle_and_starts_again():
    drawn = []
    renderer = Renderer(lambda: drawn.append(1), rate=100, idle=0.05)
    for expected in (1, 2):
        renderer.request()
        assert renderer.flush()
        thread = renderer.thread
        if thread is not None:
            thread.join(5)
        assert renderer.thread is None
        assert len(drawn) == expected
    renderer.close()


def test_a_renderer_survives_an_error_in_draw(counter):
    counter.fails = ValueError("no")
    counter.request()
    assert counter.renderer.flush()
    counter.fails = None
    counter.request()
    assert counter.renderer.flush()
    assert counter.frames == 2
    assert counter.error is not None  # still to be read: nobody has touched anything


def test_one_worker_at_a_time_and_its_error_is_shown(counter):
    assert counter.work(lambda: counter.released.wait(10))
    assert not counter.work(lambda: None)
    counter.released.set()
    counter.worker.join(10)

    def fail():
        raise RuntimeError("step <3> failed")

    assert counter.work(fail)
    counter.worker.join(10)
    assert "RuntimeError" in counter.status.value
    assert "step &lt;3&gt; failed" in counter.status.value


def test_twenty_cycles_leave_no_thread_no_figure_and_no_widget():
    gc.collect()
    before = (len(threads()), len(ipywidgets.widgets.widget._instances), _figures())
    for _ in range(20):
        counter = Counter()
        counter.request()
        counter.renderer.flush()
        counter.work(lambda released=counter.released: released.wait(10))
        counter.close()
        counter.close()
    del counter
    gc.collect()
    assert (len(threads()), len(ipywidgets.widgets.widget._instances), _figures()) == before


def _figures():
    return sum(type(thing) is Figure for thing in gc.get_objects())


def test_sliders_get_a_name_for_screen_readers(counter):
    assert "setAttribute('aria-label', label)" in counter.picture.value


def test_importing_the_package_loads_neither_ipywidgets_nor_matplotlib():
    code = (
        "import sys, merit_lab.widgets as w; print(w.__all__, sorted({'ipywidgets', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['LiveTraining', 'LogitGrowth', 'OptimizerXRay', 'WeightPatterns'] []"


def test_an_unknown_widget_is_named():
    import merit_lab.widgets

    with pytest.raises(AttributeError, match=r"no attribute 'Xray'.*OptimizerXRay"):
        merit_lab.widgets.Xray  # noqa: B018
