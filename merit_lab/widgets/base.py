"""What every widget of the lab is made of: controls, a status line, a picture, a sentence under it.

    class Rolls(LabWidget):
        def __init__(self):
            self.again = ipywidgets.Button(description="Again")
            super().__init__([self.again])
            self.on_click(self.again, self.refresh)
            self.refresh()

        def draw(self) -> Figure: ...      # from merit_lab.figures; its .alt is the sentence

Two ways to a new picture. `refresh()` draws at once, in the thread that calls it: for what follows a control.
`request()` asks for a picture soon: for what changes by itself. A thread, started on demand and ended when
idle, then draws at most `rate` pictures a second, however often it is asked.

An error in a handler, in `draw`, or in a worker goes whole into the status line; the last picture stays.
There is no Output widget: what a thread prints there is lost in ipykernel 7, and nbval would compare it frame
by frame.
"""

import base64
import html
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import contextmanager

import ipywidgets
from matplotlib.figure import Figure

from ..errors import InputError
from ..figures import output

JOIN_SECONDS = 5.0  # close() waits this long for a thread that is in the middle of something

# ipywidgets (8.1) gives the handle of a slider and the buttons of Play no name that a screen reader could say. The
# picture's onload does: it copies the slider's label. Where inline handlers are forbidden nothing is lost but names.
_NAMES = (
    "const lab = this.closest('.merit-lab'); "
    "lab?.querySelectorAll('[role=slider]').forEach(h => { "
    "const label = h.closest('.jupyter-widgets')?.querySelector('label')?.textContent; "
    "if (label) h.setAttribute('aria-label', label); }); "
    "lab?.querySelectorAll('.widget-play').forEach(p => "
    "['Play the slider', 'Slider to its start', 'Repeat'].forEach((name, i) => { "
    "const button = p.querySelectorAll('button')[i]; "
    "if (button) { button.setAttribute('aria-label', name); button.title = name; } }))"
)
TEXT = "color: var(--jp-content-font-color1, inherit); line-height: 1.45; max-width: 110ch; white-space: normal;"

LEAST_WIDTH = 680  # pixels below which a picture is not shrunk


class Renderer:
    """Calls `draw` soon after a request, at most `rate` times a second, in a thread that ends when idle.

    Requests that come while a picture waits or is drawn are answered together by the next one; the last
    request is always answered.

    Args:
        draw: called without arguments in the thread. It must deal with its own errors.
        rate: pictures a second, at most.
        share: the thread draws during at most this share of the time, so that slow pictures do not take the
            processor from what they show.
        idle: the thread ends after this many seconds without a request.
    """

    def __init__(self, draw: Callable[[], None], rate: float = 4.0, share: float = 0.5, idle: float = 1.0):
        self.draw, self.rate, self.share, self.idle = draw, rate, share, idle
        self.thread: threading.Thread | None = None
        self._wake = threading.Condition()
        self._pending = self._busy = self._closed = False
        self._earliest = 0.0  # on time.monotonic's clock: when the next picture may be drawn

    def ready(self) -> bool:
        """Whether a request would be answered at once."""
        with self._wake:
            return not (self._pending or self._busy or self._closed) and time.monotonic() >= self._earliest

    def request(self) -> None:
        """A picture soon. Does nothing after close()."""
        with self._wake:
            if self._closed:
                return
            self._pending = True
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="merit_lab renderer", daemon=True)
                self.thread.start()
            self._wake.notify_all()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until every request so far is answered. False if that takes longer than `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._closed or not (self._pending or self._busy), timeout)

    def close(self) -> None:
        """End the thread; a picture that is being drawn is finished first."""
        with self._wake:
            self._closed, thread = True, self.thread
            self._wake.notify_all()
        _join(thread)

    def _run(self):
        while True:
            with self._wake:
                if not self._wake.wait_for(lambda: self._closed or self._pending, self.idle) or self._closed:
                    self.thread = None  # under the lock: a request from now on starts another thread
                    self._wake.notify_all()
                    return
                # Further requests do not end this wait: its condition is about closing.
                if self._wake.wait_for(lambda: self._closed, max(0.0, self._earliest - time.monotonic())):
                    continue
                self._pending, self._busy = False, True
            started = time.monotonic()
            try:
                self.draw()
            finally:
                took = time.monotonic() - started
                with self._wake:
                    self._earliest = started + max(1 / self.rate, took / self.share)
                    self._busy = False
                    self._wake.notify_all()


class LabWidget(ipywidgets.VBox):
    """Base of the lab's widgets: a box of controls, status line, picture and sentence.

    Args:
        controls: widgets above the picture.
        below: widgets under the sentence.

    Attributes:
        picture, sentence, status: the ipywidgets.HTML that show them.
        png: bytes of the last picture, None before the first.
        alt: its sentence.
        frames: pictures shown so far.
        error: the exception that the status line shows, or None.
        renderer: the Renderer behind request().
    """

    rate = 4.0  # pictures a second from request(), at most
    share = 0.5  # of the time that request() may spend drawing

    def __init__(self, controls: Iterable[ipywidgets.Widget] = (), below: Iterable[ipywidgets.Widget] = ()):
        self.png: bytes | None = None
        self.alt = ""
        self.frames = 0
        self.error: BaseException | None = None
        self.worker: threading.Thread | None = None
        self.closed = False
        self._drawing = threading.RLock()  # one picture at a time, and in order
        self._handlers: list[Callable[[], None]] = []  # what takes them off again
        self.renderer = Renderer(self.refresh, self.rate, self.share)
        self.picture = ipywidgets.HTML(layout={"margin": "4px 2px"})
        self.sentence = ipywidgets.HTML()
        self.status = ipywidgets.HTML()
        # The status line stands where the controls are: that is where one looks after using one.
        super().__init__([*controls, self.status, self.picture, self.sentence, *below])
        self.add_class("merit-lab")
        self.say("")

    # -- for a subclass to write -------------------------------------------------------------------------

    def draw(self) -> Figure:
        """A figure of what there is to show, never of pyplot. Keep its size, so that the page does not move.

        Its `.alt`, one or two sentences of plain text, is shown under it and is its alternative text.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Make a worker end soon; called by close(). Nothing to do for a widget without one."""

    # -- pictures ----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Draw now and show it, in this thread. An error goes to the status line, the last picture stays."""
        with self._drawing, self.guarded():
            if self.closed:
                return
            figure = self.draw()
            width, height = (round(figure.dpi * inches) for inches in figure.get_size_inches())
            png = output.png(figure, fast=True)
            self.alt, self.png = output.alt_of(figure), png
            self.picture.value = (
                # Where the page is narrow the picture scrolls in its place rather than shrink until nothing can be
                # read; what scrolls must be reachable by keyboard.
                '<div tabindex="0" role="group" aria-label="picture" style="overflow-x: auto">'
                # A picture's pixel is a CSS pixel, so that it is sharp. The size keeps the place before it is
                # decoded, and sync decoding leaves no gap between one picture and the next.
                f'<img class="merit-lab-picture" alt="{html.escape(self.alt)}" '
                f'width="{width}" height="{height}" '
                f'decoding="sync" style="display: block; max-width: max(100%, {LEAST_WIDTH}px); height: auto; '
                f'border-radius: 4px" '
                f'onload="{_NAMES}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>'
            )
            self.sentence.value = f'<p style="{TEXT} margin: 0; min-height: 2.9em">{html.escape(self.alt)}</p>'
            self.frames += 1

    def request(self) -> None:
        """Draw soon, in the renderer's thread, at most `rate` times a second."""
        self.renderer.request()

    # -- words -------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Put this into the status line."""
        self.error = None
        self._set_status(html.escape(text))

    def fail(self, error: BaseException) -> None:
        """Show an error whole: what an InputError says, or any other with its traceback to unfold."""
        self.error = error
        if isinstance(error, InputError):
            self._set_status(f"<strong>Error:</strong> {html.escape(str(error))}", mark=True)
            return
        trace = "".join(traceback.format_exception(error))
        self._set_status(
            f"<strong>{html.escape(type(error).__name__)}:</strong> {html.escape(str(error))}"
            "<details><summary>where</summary>"
            f'<pre style="white-space: pre-wrap">{html.escape(trace)}</pre></details>',
            mark=True,
        )

    def _set_status(self, inner: str, mark: bool = False) -> None:
        # Marked by a bar and a word, not by colour alone; the text keeps the theme's colour.
        bar = "border-left: 4px solid #d55e00; padding-left: 8px;" if mark else ""
        self.status.value = f'<div role="status" style="{TEXT} {bar} min-height: 1.45em">{inner}</div>'

    @contextmanager
    def guarded(self):
        """What goes wrong in the block goes to the status line."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    # -- controls and workers ----------------------------------------------------------------------------

    def on_change(self, control: ipywidgets.Widget, handler: Callable[[], None], name: str = "value") -> None:
        """Call handler() when this trait of the control changes. Its errors go to the status line."""

        def changed(_):
            self._act(handler)

        control.observe(changed, names=name)
        self._handlers.append(lambda: control.unobserve(changed, names=name))

    def on_click(self, button: ipywidgets.Button, handler: Callable[[], None]) -> None:
        """Call handler() when the button is pressed. Its errors go to the status line."""

        def clicked(_):
            self._act(handler)

        button.on_click(clicked)
        self._handlers.append(lambda: button.on_click(clicked, remove=True))

    def _act(self, handler):
        if self.error is not None:
            self.say("")  # whoever does something new has read it
        with self.guarded():
            handler()

    def work(self, function: Callable[[], None]) -> bool:
        """Run function() in a worker thread, its errors to the status line. False if one is at work already.

        The function must look at something that stop() sets, and end soon after.
        """
        if self.closed or (self.worker is not None and self.worker.is_alive()):
            return False

        def run():
            with self.guarded():
                function()

        self.worker = threading.Thread(target=run, name=f"merit_lab {type(self).__name__}", daemon=True)
        self.worker.start()
        return True

    # -- display and end ---------------------------------------------------------------------------------

    def __repr__(self):
        return f"{type(self).__name__}()"  # short and always the same: nbval compares it

    def _repr_mimebundle_(self, **kwargs):
        """The live view, and beside it the last picture, with its alternative text, for readers without a kernel."""
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        if self.png is None:
            return bundle, {}
        bundle["image/png"] = base64.b64encode(self.png).decode()
        return bundle, {"image/png": {"alt": self.alt}}

    def close(self) -> None:
        """End threads, take off handlers, and close every widget inside. A second call does nothing."""
        if getattr(self, "closed", True):  # True: __init__ did not get that far
            super().close()
            return
        self.closed = True
        self.stop()
        self.renderer.close()
        _join(self.worker)
        for take_off in self._handlers:
            take_off()
        self._handlers.clear()
        for widget in [*_inside(self), self]:  # ipywidgets leaves layouts and styles open: they would pile up
            for part in (widget.layout, getattr(widget, "style", None)):
                if part is not None:
                    part.close()
            ipywidgets.VBox.close(widget) if widget is self else widget.close()


def _inside(widget):
    """All widgets below this one, each once, the innermost first."""
    found = []
    for child in getattr(widget, "children", ()):
        found += [*_inside(child), child]
    return list(dict.fromkeys(found))


def _join(thread):
    if thread is not None and thread is not threading.current_thread():
        thread.join(JOIN_SECONDS)
