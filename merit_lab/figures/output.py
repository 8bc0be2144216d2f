"""Figures on their way out: PNG bytes, a notebook's display, files."""

import io
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from ..errors import InputError
from ..files import whole

# Figures are drawn one at a time: matplotlib's caches of fonts and texts are shared between threads.
_drawing = threading.Lock()


def png(figure: Figure, fast: bool = False) -> bytes:
    """The figure as a PNG, the same bytes for the same picture (no date, no version in it).

    Args:
        fast: for pictures that are soon replaced: less compression, and what has not changed is not drawn again.
    """
    with _drawing:
        canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
        drawing = getattr(figure, "drawing", None)
        if drawing is None:
            canvas.draw()
        else:
            drawing.paint(canvas, again=fast)
        size = canvas.get_width_height(physical=True)
        picture = Image.frombuffer("RGBA", size, canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
    if fast:
        return _quick_png(picture)
    out = io.BytesIO()
    picture.save(out, format="PNG", compress_level=6)
    return out.getvalue()


def _quick_png(picture: Image.Image) -> bytes:
    """An RGB picture as a PNG without filters. Pillow tries five on each line, which takes most of its time, and on
    charts with large plain areas none is as good.
    """
    width, height = picture.size
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # (height, the filter's number 0 and then R, G, B)
    lines[:, 1:] = np.asarray(picture).reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def show(figure: Figure, alt: str | None = None) -> None:
    """Show a figure in a notebook: a PNG with alternative text.

    The plain text beside it says what the figure shows, without sizes or measured numbers, so that nbval can
    compare it on any machine. The alternative text, numbers and all, stands in the output's metadata.

    Args:
        alt: alternative text in place of the one generated from the data.
    """
    from IPython.display import display

    data, metadata = bundle(figure, alt)
    display(data, metadata=metadata, raw=True)


def bundle(figure: Figure, alt: str | None = None) -> tuple[dict, dict]:
    """What `show` displays: the data by MIME type, and its metadata."""
    alt = alt or alt_of(figure)
    what = getattr(figure, "what", None) or alt
    return {"image/png": png(figure), "text/plain": what}, {"image/png": {"alt": alt}}


def alt_of(figure: Figure) -> str:
    """The figure's alternative text. InputError if it has none."""
    alt = getattr(figure, "alt", None)
    if not alt:
        raise InputError("figure: it has no alternative text; pass alt=…, a sentence that says what it shows")
    return alt


def save(figure: Figure, stem: str | os.PathLike) -> tuple[Path, Path]:
    """Write STEM.png and STEM.pdf, each whole. Returns their paths.

    The same figure gives the same bytes. The alternative text goes into the PDF as its subject.
    """
    stem = Path(stem)
    if stem.suffix in (".png", ".pdf"):
        stem = stem.with_suffix("")
    picture, page = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".pdf")
    with whole(picture) as file:
        file.write(png(figure))
    about = {"CreationDate": None, "Creator": None, "Producer": None, "Subject": getattr(figure, "alt", None)}
    with whole(page) as file, _drawing:
        figure.savefig(file, format="pdf", metadata=about)
    return picture, page
