"""The optimizer X-ray: what it shows is what the step functions return, whatever control is moved."""

import base64
import re
import threading

import ipywidgets
import numpy as np
import pytest
import torch

from merit_lab import Recipe, optim, runs, train
from merit_lab.errors import InputError
from merit_lab.figures import matrices
from merit_lab.models import GPT2, GPT2Config
from merit_lab.probes import ratios
from merit_lab.widgets import OptimizerXRay
from merit_lab.widgets import xray as module
from merit_lab.widgets.xray import PRESETS, as_matrix, benchmark_xray, decided_by, explain, parse, to_text

W = [[0.3, -0.4, 0.1], [0.1, 0.2, -1.5]]
G = [[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]]


@pytest.fixture
def drawn(monkeypatch):
    """What was given to be drawn, the latest last: dicts with steps and the keywords of step_maps."""
    calls = []
    real = matrices.step_maps

    def spy(steps, **how):
        calls.append({"steps": {step.name: step for step in steps}, **how})
        return real(steps, **how)

    monkeypatch.setattr(matrices, "step_maps", spy)
    return calls


@pytest.fixture
def xray(drawn):
    made = OptimizerXRay(weight=W, grad=G)
    yield made
    made.close()


def chain(name, weight=W, grads=(G,), lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0):
    """The last of some steps, and the weight it started from, by the step function alone."""
    weight = torch.as_tensor(weight, dtype=torch.float64)
    m = v = torch.zeros_like(weight)
    step = None
    for t, grad in enumerate(grads, 1):
        before = weight
        grad = torch.as_tensor(grad, dtype=torch.float64)
        step = optim.step_function(name)(
            weight, grad, m, v, step=t, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        weight, m, v = step.weight, step.exp_avg, step.exp_avg_sq
    return before, step


def assert_shown(drawn, name, before, step, grad=G):
    """The picture's arrays for this optimizer are the step's."""
    shown = drawn[-1]["steps"][name]
    np.testing.assert_array_equal(shown.w, before)
    np.testing.assert_array_equal(shown.g, grad)
    np.testing.assert_array_equal(shown.u, step.direction)
    np.testing.assert_array_equal(shown.update, step.update)
    if not hasattr(step, "weight_ratio"):
        assert shown.s is shown.b is shown.r is shown.c is shown.decided is shown.clipped is None
        return
    assert shown.b == step.weight_ratio
    if not hasattr(step, "element_ratio"):
        assert shown.r is shown.c is shown.clipped is None
        np.testing.assert_array_equal(shown.s, np.full_like(before, step.weight_ratio))
        return
    np.testing.assert_array_equal(shown.s, step.element_ratio)
    np.testing.assert_array_equal(shown.r, step.row_ratio.flatten())
    np.testing.assert_array_equal(shown.c, step.column_ratio.flatten())
    np.testing.assert_array_equal(shown.clipped, step.clipped)


# -- what is shown -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_every_optimizer_shows_what_its_step_function_returns(name, drawn):
    widget = OptimizerXRay(name, weight=W, grad=G, weight_decay=0.1)
    before, step = chain(name, weight_decay=0.1)
    assert_shown(drawn, name, before, step)
    assert widget.names == [name]
    shares = ratios(step)
    decided = decided_by(name, step)
    assert (decided is None) == (shares is None)
    if decided is not None and optim.named(name).switches.get("bound", True):
        for part in ("row", "column", "bound"):
            assert (decided == part).mean() == pytest.approx(getattr(shares, f"won_{part}"), rel=1e-5)
    widget.close()


def test_without_the_bound_a_tie_is_the_rows():
    _, step = chain("MERIT without bound", weight=[[1.0, 0.5], [0.2, 0.1]], grads=[[[1.0, 1.0], [1.0, 1.0]]])
    assert (step.element_ratio[0] == step.weight_ratio).all()  # row 1 holds the matrix's largest weight
    assert decided_by("MERIT without bound", step).tolist() == [["row", "row"], ["column", "column"]]
    _, step = chain("MERIT", weight=[[1.0, 0.5], [0.2, 0.1]], grads=[[[1.0, 1.0], [1.0, 1.0]]])
    assert (decided_by("MERIT", step) == "bound").all()
    _, step = chain("MERIT column only")
    fake = step._replace(element_ratio=step.row_ratio.expand_as(step.element_ratio))  # equal to r by chance
    assert "row" not in decided_by("MERIT column only", fake)
    assert "row" in decided_by("MERIT", fake)


@pytest.mark.parametrize(
    ("preset", "name", "element", "move"),
    [
        ("a zero row", "MERIT", (1, 1), -0.0044721),
        ("a zero row", "MERIT paper variant", (1, 2), -0.002),
        ("a dead column", "MERIT", (2, 1), 0.0),
        ("no gradient, decay alone", "MERIT", (1, 2), 0.005),
        ("no gradient, decay alone", "MERIT", (2, 2), -0.01),
        ("no gradient, decay alone", "LAMB", (2, 2), -0.02),
        ("no gradient, decay alone", "AdamW", (2, 2), -0.002),
        ("Q, K and V in one matrix", "MERIT", (1, 1), -0.01),
    ],
)
def test_worked_cases_are_presets(preset, name, element, move):
    widget = OptimizerXRay([name], preset=preset)
    widget.row.value, widget.column.value = element
    words = f"moved: {name} by {module._n(round(move, 7))}."
    assert words in widget.alt
    assert words in widget.sentence.value
    widget.close()


def test_every_preset_is_drawn_and_its_hint_is_shown(xray):
    for name, preset in PRESETS.items():
        xray.source.value = name
        assert xray.error is None
        assert torch.equal(xray.weight, as_matrix(preset.weight, "w"))
        assert torch.equal(parse(xray.weight_text.value, "w"), xray.weight)
        assert preset.hint.split(",")[0].split("'")[0] in xray.hint.value
        assert xray.settings == {**module.SETTINGS, **preset.settings}


def test_one_line_is_enough():
    widget = OptimizerXRay()
    assert widget.names == ["AdamW", "LAMB", "MERIT"]
    assert widget.frames == 1
    decided = decided_by("MERIT", widget.taken("MERIT").step)
    assert {"row", "column", "bound"} <= set(decided.ravel())
    assert widget.taken("MERIT").step.clipped.any()
    widget.close()


# -- controls ----------------------------------------------------------------------------------------------------

OTHER = {"lr": 0.5, "beta1": 0.5, "beta2": 0.6, "eps": 0.25, "weight_decay": 0.3}


@pytest.mark.parametrize(("control", "value"), OTHER.items())
def test_settings(xray, drawn, control, value):
    getattr(xray, control).value = value
    settings = dict(module.SETTINGS)
    if control in ("beta1", "beta2"):
        settings["betas"] = (value, 0.95) if control == "beta1" else (0.9, value)
    else:
        settings[control] = value
    assert xray.frames == 2
    for name in xray.names:
        assert_shown(drawn, name, *chain(name, **settings))


def test_settings_of_the_second_step(xray, drawn):
    xray.time.value = 2
    xray.lr.value = 0.3
    for name in xray.names:
        assert_shown(drawn, name, *chain(name, grads=[G, G], lr=0.3))


def test_time(xray, drawn):
    first = xray.png
    for t in (2, 3, 4):
        xray.forward.click()
        assert xray.time.value == t
        for name in xray.names:
            assert_shown(drawn, name, *chain(name, grads=[G] * t))
    assert "step 4 of 20" in drawn[-1]["title"]
    for _ in range(3):
        xray.back.click()
    assert xray.png == first
    xray.back.click()
    assert (xray.time.value, xray.frames) == (1, 7)  # nothing before step 1
    xray.time.value = 20
    assert_shown(drawn, "MERIT", *chain("MERIT", grads=[G] * 20))
    xray.forward.click()
    assert xray.time.value == 20


def test_earlier_steps_can_be_taken_again_where_they_are_not_kept(xray, drawn, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 0)
    for t in (12, 3, 11, 1):
        xray.time.value = t
        assert_shown(drawn, "AdamW", *chain("AdamW", grads=[G] * t))
    assert all(len(history.states) == 2 for history in xray._histories.values())


def test_random_gradients_follow_the_seed_and_begin_with_g(xray, drawn):
    xray.gradients.value = "random around g (step 1 is g)"
    assert_shown(drawn, "MERIT", *chain("MERIT"))
    xray.time.value = 3
    grads = [xray.gradient(t) for t in (1, 2, 3)]
    assert grads[0].tolist() == G
    assert not torch.equal(grads[1], grads[0])
    assert not torch.equal(grads[2], grads[1])
    for name in xray.names:  # the same gradients for every optimizer
        assert_shown(drawn, name, *chain(name, grads=grads), grad=grads[2])
    picture = xray.png
    xray.seed.value = 1
    assert not torch.equal(xray.gradient(3), grads[2])
    assert xray.png != picture
    xray.seed.value = 0
    assert xray.png == picture


@pytest.mark.parametrize("inside", ["w", "g"])
def test_outlier(xray, drawn, inside):
    xray.outlier_in.value = inside
    xray.outlier_row.value, xray.outlier_column.value = 2, 3
    xray.outlier.value = 100.0
    weight, grad = torch.tensor(W, dtype=torch.float64), torch.tensor(G, dtype=torch.float64)
    (weight if inside == "w" else grad)[1, 2] *= 100
    xray.time.value = 2
    for name in xray.names:
        assert_shown(drawn, name, *chain(name, weight, [grad, grad]), grad=grad)
    xray.outlier.value = 1.0
    assert_shown(drawn, "MERIT", *chain("MERIT", grads=[G, G]))


def test_a_move_of_the_slider_is_one_picture(xray):
    for value in (2.0, 5.0):
        before = xray.frames
        xray.outlier.value = value
        assert xray.frames == before + 1


def test_optimizers(xray, drawn):
    xray.optimizers[1].value = "+ bound"
    assert list(drawn[-1]["steps"]) == ["AdamW", "+ bound", "MERIT"]
    assert_shown(drawn, "+ bound", *chain("+ bound"))
    xray.optimizers[2].value = "(none)"
    assert list(drawn[-1]["steps"]) == ["AdamW", "+ bound"]
    xray.optimizers[1].value = "AdamW"  # named twice, shown once
    assert list(drawn[-1]["steps"]) == ["AdamW"]
    assert xray.error is None


def test_show(xray, drawn):
    assert drawn[-1]["quantities"] == tuple(matrices.QUANTITIES)
    xray.show.value = "ratios: u, s, decided by"
    assert drawn[-1]["quantities"] == ("u", "s", "decided")
    assert xray.alt.startswith("Heatmaps of the direction, the trust ratios and which ratio decided under")


def test_the_chosen_element_is_outlined_and_read(xray, drawn):
    assert drawn[-1]["chosen"] == (0, 0)
    xray.row.value, xray.column.value = 2, 3
    assert drawn[-1]["chosen"] == (1, 2)
    assert "element in row 2, column 3" in xray.reading.value
    taken = xray.taken("MERIT")
    for line in explain("MERIT", taken, 1, 2):
        assert f">{line.rule}<".replace("'", "&#x27;") in xray.reading.value
    assert f"MERIT by {module._n((taken.step.weight - taken.weight)[1, 2])}." in xray.alt


def test_typed_entries(xray, drawn):
    xray.weight_text.value = "1, 2; 3 4\n5 −6.5"
    assert "g: got 2 x 3, but w is 3 x 2" in xray.status.value  # g has not followed yet
    xray.grad_text.value = "2"  # one number for all
    assert xray.error is None
    weight, grad = [[1, 2], [3, 4], [5, -6.5]], [[2, 2]] * 3
    assert_shown(drawn, "MERIT", *chain("MERIT", weight, [grad]), grad=grad)
    assert xray.source.value == "your own entries"
    assert (xray.row.max, xray.column.max) == (3, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 2\n3 x", "w, row 2, column 2: got &#x27;x&#x27;, expected a finite number"),
        ("1 nan", "w, row 1, column 2: got &#x27;nan&#x27;"),
        ("1 2\n3", "w, row 2: got 1 numbers, but row 1 has 2"),
        ("1 2\n,", "w, row 2: got &#x27;,&#x27;, expected numbers"),
        ("  \n", "w: got no numbers"),
        ("\n".join(["1"] * 17), "w: got 17 x 1, expected 16 rows and columns at most"),
    ],
)
def test_a_wrong_entry_is_named_and_the_last_picture_stays(xray, text, words):
    before, picture = xray.weight, xray.picture.value
    xray.weight_text.value = text
    assert words in xray.status.value
    assert xray.weight_text.value == text  # what was typed stays to be mended
    assert torch.equal(xray.weight, before)
    assert xray.picture.value == picture
    xray.forward.click()  # goes on with what was there
    assert xray.error is None
    xray.weight_text.value = "9 8 7\n6 5 4"
    assert (xray.error, xray.weight.tolist()) == (None, [[9, 8, 7], [6, 5, 4]])
    assert "Error" not in xray.status.value


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [("lr", -1.0, "lr: got -1.0"), ("beta1", 1.0, r"betas[0]: got 1.0"), ("eps", float("inf"), "eps: got inf")],
)
def test_a_setting_out_of_range_is_named_and_the_last_picture_stays(xray, control, value, words):
    picture, good = xray.picture.value, getattr(xray, control).value
    getattr(xray, control).value = value
    assert words in xray.status.value
    xray.row.value = 2  # still nothing to show
    assert words in xray.status.value
    assert xray.picture.value == picture
    getattr(xray, control).value = good
    assert xray.error is None
    assert xray.picture.value != picture  # row 2 is outlined


# -- one element in words ----------------------------------------------------------------------------------------


def _number(line):
    """The number that a line ends at."""
    return float(re.findall(r"= (−?[\d.e−]+)", line.here.split(":")[0].split(",")[0])[-1].replace("−", "-"))


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_the_reading_follows_the_lines_of_the_optimizers_file(name):
    widget = OptimizerXRay(name, weight=W, grad=G, weight_decay=0.1)
    widget.time.value = 2
    taken = widget.taken(name)
    widget.close()
    kind = optim.named(name).optimizer
    documented = re.findall(r"line (\d)   (\S+) ←", __import__(kind.__module__, fromlist=["x"]).__doc__)
    for i in range(2):
        for j in range(3):
            lines = explain(name, taken, i, j)
            assert [line.line for line in lines] == [number for number, _ in documented]
            by_line = {line.line: line for line in lines}
            step = taken.step
            assert _number(by_line["1"]) == pytest.approx(step.exp_avg[i, j].item(), rel=1e-4)
            assert _number(by_line["2"]) == pytest.approx(step.exp_avg_sq[i, j].item(), rel=1e-4)
            assert _number(lines[-1]) == pytest.approx(step.weight[i, j].item(), rel=1e-4)
            if kind is optim.AdamW:
                assert _number(by_line["3"]) == pytest.approx(step.exp_avg_hat[i, j].item(), rel=1e-4)
                assert _number(by_line["4"]) == pytest.approx(step.exp_avg_sq_hat[i, j].item(), rel=1e-4)
                assert _number(by_line["5"]) == pytest.approx(step.direction[i, j].item(), rel=1e-4)
            elif kind is optim.LAMB:
                assert by_line["4"].here.endswith(module._n(step.direction[i, j]))
                assert _number(by_line["5"]) == pytest.approx(step.weight_ratio.item(), rel=1e-4)
            else:
                assert _number(by_line["3"]) == pytest.approx(step.direction[i, j].item(), rel=1e-4)
                assert _number(by_line["4"]) == pytest.approx(step.weight_ratio.item(), rel=1e-4)
                assert _number(by_line["5"]) == pytest.approx(step.row_ratio[i, 0].item(), rel=1e-4)
                assert _number(by_line["6"]) == pytest.approx(step.column_ratio[0, j].item(), rel=1e-4)
                assert module._n(step.element_ratio[i, j]) in by_line["7"].here
                words = {"row": "the row's", "column": "the column's", "bound": "the whole matrix's"}
                assert words[decided_by(name, step)[i, j]] in by_line["7"].here
                product = (step.element_ratio * step.direction)[i, j].item()
                assert _number(by_line["8"]) == pytest.approx(product, rel=1e-4)
                clipped = f"clipped to {module._n(step.update[i, j])}" in by_line["8"].here
                assert clipped == step.clipped[i, j].item()


def test_the_reading_of_a_rung_says_what_it_takes():
    _, step = chain("MERIT l2")
    taken = module.Taken(1, *(torch.tensor(x, dtype=torch.float64) for x in (W, G)), *(2 * [step.exp_avg * 0]),
                         module.SETTINGS, step)  # fmt: skip
    assert explain("MERIT l2", taken, 0, 0)[3].rule == "b ← ‖w‖₂ / ‖u‖₂"
    rules = {
        "LAMB without bias correction": "s ← b",
        "+ element-wise": "s ← max(r, c)",
        "+ bound": "s ← max(max(r, c), b)",
        "MERIT row only": "s ← max(r, b)",
        "MERIT column only": "s ← max(c, b)",
    }
    for name, rule in rules.items():
        lines = explain(name, taken._replace(step=chain(name)[1]), 0, 0)
        assert lines[6].rule == rule
        assert ("no clip" in lines[7].rule) == (name in ("LAMB without bias correction", "+ element-wise", "+ bound"))


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("MERIT", 4, "0 / 0.44721: a norm is 0, guarded: 1"),
        ("MERIT", 6, "a row or column of w or of u is all zero, guarded: 1"),
        ("MERIT paper variant", 4, "0 / 0.44721 = 0"),
    ],
)
def test_the_reading_of_a_guard(name, line, words):
    widget = OptimizerXRay(name, preset="a zero row")
    assert explain(name, widget.taken(name), 0, 0)[line].here == words
    widget.close()


def test_the_reading_of_a_direction_that_is_zero():
    widget = OptimizerXRay(["MERIT paper variant", "LAMB"], weight=[[1, 2]], grad=[[0, 0]])
    lines = explain("MERIT paper variant", widget.taken("MERIT paper variant"), 0, 0)
    assert lines[3].here == "2 / 0: left out of the maximum"
    assert lines[8].here == "1 − 0.01 · 0 = 1"
    assert "a norm is 0, guarded: 1" in explain("LAMB", widget.taken("LAMB"), 0, 0)[4].here
    widget.close()


# -- matrices from a run -----------------------------------------------------------------------------------------


def _model(fused=False):
    torch.manual_seed(0)
    config = GPT2Config(block_size=8, vocab_size=7, n_layer=2, n_head=4, n_embd=40, fused_qkv=fused)
    return GPT2(config)


@pytest.mark.parametrize("fused", [False, True])
def test_a_large_matrix_is_shown_in_part_and_computed_whole(drawn, fused):
    model = _model(fused)
    tokens = torch.randint(0, 7, (2, 9))
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1].backward()
    widget = OptimizerXRay(["LAMB", "MERIT"], run=model, weight_decay=0.1)
    assert list(widget.source.options)[:4] == ["layer 0, W_Q", "layer 0, W_K", "layer 1, W_Q", "layer 1, W_K"]
    widget.source.value = "layer 1, W_K"
    weight = model.blocks[1].attention.query_key_value_weights()[1].detach()
    attention = model.blocks[1].attention
    grad = attention.qkv.weight.grad[40:80] if fused else attention.key.weight.grad
    widget.row.value, widget.column.value = 20, 40
    rows, columns = slice(16, 32), slice(24, 40)
    assert drawn[-1]["origin"] == (16, 24)
    assert drawn[-1]["chosen"] == (3, 15)
    for name in ("LAMB", "MERIT"):
        zeros = torch.zeros_like(weight)
        settings = {**module.SETTINGS, "weight_decay": 0.1}
        step = optim.step_function(name)(weight, grad, zeros, zeros, step=1, **settings)
        shown = drawn[-1]["steps"][name]
        np.testing.assert_array_equal(shown.update, step.update[rows, columns])
        assert shown.b == step.weight_ratio
    np.testing.assert_array_equal(shown.r, step.row_ratio[rows, 0])
    assert "rows 17 to 32 and columns 25 to 40 of a 40 x 40 matrix, ratios of the whole" in widget.alt
    assert "of 1600 elements" in widget.alt
    assert "latest step" in widget.hint.value
    widget.outlier_row.value = 40
    widget.outlier.value = 10.0
    assert widget.weight[39, 0] == weight[39, 0] * 10
    widget.close()


def test_weights_without_gradients_get_random_ones_and_it_is_said():
    widget = OptimizerXRay("MERIT", run=_model())
    assert "gradient is random" in widget.hint.value
    first = widget.gradient(1)
    assert first.std().item() == pytest.approx(1, rel=0.1)
    widget.source.value = "layer 0, W_K"
    assert not torch.equal(widget.gradient(1), first)
    widget.source.value = "layer 0, W_Q"
    assert torch.equal(widget.gradient(1), first)
    assert widget.weight_text.disabled
    widget.source.value = "your own entries"  # begins with something that can be typed over
    assert widget.error is None
    assert not widget.weight_text.disabled
    assert torch.equal(widget.weight, parse(widget.weight_text.value, "w"))
    widget.close()


def test_a_live_training_brings_its_settings():
    training = train(Recipe.named("tiny", text="synthetic", optimizer="MERIT", batch_size=2, tokens=512, lr=0.03))
    next(training)
    widget = OptimizerXRay(run=training)
    assert widget.settings == {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    query = training.model.blocks[0].attention.query.weight
    assert torch.equal(widget.weight, query)
    assert torch.equal(widget.gradient(1), query.grad)
    shown = widget.weight.clone()
    next(training)
    assert torch.equal(widget.weight, shown)  # a copy: what is looked at stays
    widget.source.value = "a zero row"
    assert widget.settings == module.SETTINGS  # its hint speaks of these
    widget.close()
    training.close()


def test_a_recorded_run_brings_its_weights_and_settings(drawn, tmp_path):
    recipe = Recipe.named("tiny", text="synthetic", optimizer="MERIT", batch_size=2, tokens=512, lr=0.03)
    training = train(recipe)
    list(runs.record_to(tmp_path / "run.jsonl", training, keep_weights=True))
    run = runs.read(tmp_path / "run.jsonl")
    widget = OptimizerXRay("MERIT", run=run)
    assert widget.settings == {"lr": 0.03, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    for layer, block in enumerate(training.model.blocks):
        for name in ("query", "key"):
            widget.source.value = f"layer {layer}, W_{name[0].upper()}"
            kept = run.weights()[f"blocks.{layer}.attention.{name}.weight"]
            assert torch.equal(widget.weight, kept.to(widget.weight.dtype))
            true = getattr(block.attention, name).weight.detach()
            torch.testing.assert_close(kept, true, rtol=1e-3, atol=1e-5)
            np.testing.assert_array_equal(drawn[-1]["steps"]["MERIT"].w, widget.weight[:16, :16])
            assert "gradient is random" in widget.hint.value  # a file keeps none
    widget.close()


# -- from text and back ------------------------------------------------------------------------------------------


def test_text_and_matrix():
    matrix = torch.tensor([[0.1, -2.0], [1e-7, 1 / 3]], dtype=torch.float64)
    assert torch.equal(parse(to_text(matrix), "w"), matrix)
    assert to_text(as_matrix(torch.tensor([[0.1, 2.0]]), "w")) == "0.1 2"  # float32's digits, not its noise
    assert to_text(as_matrix(np.ones((1, 2)), "w")) == "1 1"
    assert as_matrix(3, "w").tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizers": []}, "optimizers: got 0 names"),
        ({"optimizers": ["AdamW"] * 4}, "optimizers: got 4 names"),
        ({"optimizers": ["Adam"]}, "'Adam'.*'AdamW'"),
        ({"preset": "nothing"}, "preset: got 'nothing'"),
        ({"weight": "abc"}, "weight: got 'abc'"),
        ({"weight": [[1.0, float("nan")]]}, "weight"),
        ({"weight": torch.ones(17, 2)}, "17 x 2"),
        ({"weight": W, "grad": [[1.0, 2.0]]}, "g: got 1 x 2"),
        ({"lr": -1}, "lr: got -1"),
        ({"betas": 0.9}, "betas: got 0.9"),
        ({"steps": 0}, "steps: got 0"),
        ({"run": 3}, "got int"),
    ],
)
def test_what_is_refused(arguments, words):
    before = len(ipywidgets.widgets.widget._instances)
    with pytest.raises(InputError, match=words):
        OptimizerXRay(**arguments)
    assert len(ipywidgets.widgets.widget._instances) == before  # nothing half made is left


# -- the widget as a whole ---------------------------------------------------------------------------------------


def test_controls_have_names_and_wait_for_the_end_of_a_move(xray):
    for control in _controls(xray):
        if isinstance(control, ipywidgets.Image | ipywidgets.HTML | ipywidgets.Box):
            continue
        assert control.description
        if hasattr(control, "continuous_update"):
            assert not control.continuous_update or isinstance(control, ipywidgets.FloatText)


def _controls(box):
    for child in box.children:
        yield child
        yield from _controls(child) if isinstance(child, ipywidgets.Box) else ()


def test_saved_notebooks_show_the_last_picture(xray):
    xray.forward.click()
    bundle, _ = xray._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == xray.png
    assert bundle["text/plain"] == "OptimizerXRay()"
    assert f'alt="{module.html.escape(xray.alt)}"' in xray.picture.value


def test_close_leaves_nothing():
    before = len(ipywidgets.widgets.widget._instances), threading.active_count()
    for _ in range(3):
        widget = OptimizerXRay("MERIT")
        widget.forward.click()
        widget.close()
        frames = widget.frames
        widget.row.value = 2
        assert widget.frames == frames
    assert (len(ipywidgets.widgets.widget._instances), threading.active_count()) == before


def test_the_benchmark_measures_one_picture_a_move():
    seconds = benchmark_xray(size=4, moves=3, optimizers=["MERIT"])
    assert len(seconds) == 3
    assert all(s > 0 for s in seconds)


# -- the picture -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (0.0, 2, "0"), (-0.0, 2, "0"), (1.0, 2, "1"), (0.447, 2, ".45"), (0.447, 3, ".447"), (-0.0447, 2, "-.045"),
        (0.0098, 2, ".01"), (-0.0042, 2, "-.004"), (4e-5, 2, "4e-5"), (0.996, 2, "1"), (12.3, 2, "12"),
        (612.4, 2, "612"), (61342.0, 2, "6e4"), (-1e-7, 2, "-1e-7"), (float("inf"), 2, "inf"),
        (float("nan"), 2, "nan"), (0.00012345, 3, "1.2e-4"), (1234.5, 3, "1234"), (3e-12, 2, "3e-12"),
    ],
)  # fmt: skip
def test_short_numbers(value, digits, words):
    assert matrices.short(value, digits) == words


def test_colours_mean_what_they_should():
    values = np.array([[-2.0, 0.0, 2.0, np.nan]])
    colours = matrices.signed_colors(values, 2.0)[0]
    assert colours[0][2] > colours[0][0]  # negative is blue
    assert colours[2][0] > colours[2][2]  # positive is red
    assert (colours[1][:3] > 0.95).all()  # zero is white
    assert len(set(colours[3][:3])) == 1  # not finite is grey
    light = matrices.ratio_colors(np.array([[1.0, 10.0, 100.0]]), 1.0, 100.0)[0] @ [0.3, 0.6, 0.1, 0]
    assert light[0] > light[1] > light[2]
    assert light[0] - light[1] == pytest.approx(light[1] - light[2], abs=0.15)  # a log scale
    assert np.isfinite(matrices.ratio_colors(np.array([[0.0, 5.0]]), 5.0, 5.0)).all()


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (3, 16), (16, 2), (1, 16)])
@pytest.mark.parametrize("count", [1, 3])
def test_every_shape_fits_the_page(shape, count):
    torch.manual_seed(0)
    w, g = torch.randn(*shape, dtype=torch.float64), torch.randn(*shape, dtype=torch.float64)
    widget = OptimizerXRay(["MERIT", "AdamW", "LAMB"][:count], weight=w, grad=g)
    assert widget.error is None
    taken = {name: widget.taken(name) for name in widget.names}
    whole = tuple(slice(None) for _ in range(2))
    figure = matrices.step_maps([module._picture(n, t, whole) for n, t in taken.items()], chosen=(0, 0))
    boxes = next(a for a in figure.artists if isinstance(a, matrices._Boxes)).boxes
    width, height = figure.get_size_inches()
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= width
    assert boxes[:, 3].max() <= height
    words = next(a for a in figure.artists if isinstance(a, matrices._Words)).words
    assert all(0 <= x <= width and 0 <= y <= height for x, y, *_ in words)
    shown = {word for _, _, word, *_ in words}
    numbered = [{matrices.short(x, digits) for x in w.ravel().tolist()} <= shown for digits in (2, 3)]
    assert any(numbered) == (max(shape) <= 8)
    widget.close()


def test_a_page_that_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="got none"):
        matrices.step_maps([])
    ones = np.ones((17, 2))
    with pytest.raises(InputError, match="17 x 2"):
        matrices.step_maps([matrices.StepPicture("AdamW", ones, ones, ones, ones)])
    ones = np.ones((2, 2))
    with pytest.raises(InputError, match="got 'x'"):
        matrices.step_maps([matrices.StepPicture("AdamW", ones, ones, ones, ones)], quantities=["x"])
