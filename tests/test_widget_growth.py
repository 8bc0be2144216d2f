"""LogitGrowth without a browser: what each control does to the picture."""

import re
import threading
from html import escape, unescape

import fakes
import ipywidgets
import pytest

from merit_lab import figures
from merit_lab.errors import InputError
from merit_lab.widgets import LogitGrowth


@pytest.fixture
def growth():
    """The widget on three runs, the last with another number of measurements."""
    widget = LogitGrowth([fakes.run("AdamW", diverge_at=50), fakes.run("LAMB"), fakes.run("MERIT", 10)])
    yield widget
    widget.close()


def words(html):
    return unescape(re.sub("<[^>]+>", "", html.value))


def test_it_starts_at_the_end_of_the_first_run(growth):
    run = fakes.run("AdamW", diverge_at=50)
    expected = figures.logit_growth(run, at=48, row=True)
    assert growth.alt == expected.alt and "AdamW" in growth.alt and "3 layers" in growth.alt
    assert growth.when.value == "step 48 of 50"
    assert words(growth.sentence) == growth.alt and f'alt="{escape(growth.alt)}"' in growth.picture.value


def test_time_shows_the_softmax_row_then(growth):
    growth.time.value = 0
    first = growth.alt
    assert "At step 1 the largest z, sign included, is" in first and growth.when.value == "step 1 of 50"
    growth.time.value = 10
    assert "At step 30 the largest z, sign included, is" in growth.alt and growth.alt != first


def test_each_head_has_a_row_on_demand(growth):
    growth.per_head.value = True
    assert "6 heads" in growth.alt
    growth.per_head.value = False
    assert "3 layers" in growth.alt


def test_another_run_keeps_the_share_of_time(growth):
    growth.time.value = 8  # half of 16
    growth.run.value = 1
    assert "for LAMB" in growth.alt and (growth.time.value, growth.time.max) == (10, 20)
    growth.run.value = 2
    assert "for MERIT" in growth.alt and (growth.time.value, growth.time.max) == (4, 9)
    assert growth.play.max == 9 and growth.error is None


def test_play_and_slider_are_linked_in_the_browser(growth):
    assert growth._link.source == (growth.play, "value") and growth._link.target == (growth.time, "value")
    assert not growth.time.continuous_update and growth.play.interval >= 250


def test_every_control_has_a_name(growth):
    assert all(c.description for c in (growth.run, growth.per_head, growth.time))


def test_an_error_leaves_the_picture(growth, monkeypatch):
    before = growth.picture.value

    def fail(*args, **kwargs):
        raise ZeroDivisionError("nothing & all")

    monkeypatch.setattr(figures, "logit_growth", fail)
    growth.time.value = 1
    assert "ZeroDivisionError: nothing & all" in words(growth.status) and growth.picture.value == before


def test_close_leaves_nothing():
    before = len(ipywidgets.widgets.widget._instances)
    widget = LogitGrowth(fakes.run("MERIT"))
    widget.time.value = 2
    widget.close()
    assert len(ipywidgets.widgets.widget._instances) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("merit_lab")]


def test_runs_without_attention_are_refused():
    run = fakes.run("MERIT")
    for record in run.records:
        record.max_attention_logit = record.largest_logit = None
    with pytest.raises(InputError, match="measured attention logits"):
        LogitGrowth([run])
