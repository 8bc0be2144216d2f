"""The benchmarks: counts are right, verdicts follow from figures, the README quotes them. No time is asserted."""

import inspect
import json

import pytest
import torch
from helpers import needs_compiler, parameter, tensor
from peers import PlainMERIT
from test_optim_agreement import close, golden_cases

from merit_lab import LAMB, MERIT
from merit_lab.bench import __main__ as bench
from merit_lab.bench import collectives, looking, rows, steps, training
from merit_lab.files import repo_root
from merit_lab.probes import traffic
from merit_lab.readme import section

CPU = torch.device("cpu")


# -- traffic -------------------------------------------------------------------------------------------------------


def bytes_a_weight(optimizer_class, **arguments):
    weight = torch.nn.Parameter(torch.randn(512, 512))
    weight.grad = torch.randn(512, 512)
    optimizer = optimizer_class([weight], lr=0.01, **arguments)
    optimizer.step()
    with traffic() as moved:
        optimizer.step()
    return moved.bytes / weight.numel(), moved.peak / weight.numel()


def test_torchs_fused_adamw_moves_28_bytes_a_weight():
    moved, held = bytes_a_weight(torch.optim.AdamW, fused=True)
    assert moved == pytest.approx(28, abs=0.01) and held < 0.01


@needs_compiler
@pytest.mark.parametrize("optimizer_class", [MERIT, LAMB])
def test_the_fused_step_moves_40(optimizer_class):
    moved, held = bytes_a_weight(optimizer_class, fused=True)
    assert moved == pytest.approx(40, abs=0.6) and held < 0.12
    assert bytes_a_weight(optimizer_class, fused=False)[0] > 200


def test_traffic_of_operations_one_can_count_by_hand():
    x, y, row = torch.ones(4, 8), torch.ones(4, 8), torch.ones(1, 8)
    n, r = 4 * 32, 4 * 8

    def moved(operation):
        with traffic() as found:
            kept = operation()
        del kept
        return found.read, found.written, found.peak

    assert moved(lambda: x + y) == (2 * n, n, n)
    assert moved(lambda: x + row) == (n + r, n, n)  # a row that broadcasts is read as the row it is
    assert moved(lambda: x.add_(y)) == (2 * n, n, 0)
    assert moved(lambda: x.mul_(x)) == (n, n, 0)  # given twice, read once
    assert moved(lambda: x.copy_(y)) == (n, n, 0)
    assert moved(lambda: torch.add(x, y, out=x)) == (n, n, 0)
    assert moved(lambda: x.zero_()) == (0, n, 0)
    assert moved(lambda: torch.empty_like(x)) == (0, 0, n)
    assert moved(lambda: x.t()[:2]) == (0, 0, 0)  # a view
    assert moved(lambda: x.amax()) == (n, 4, 4)


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, case", [c.values for c in golden_cases() if c.values[0] == "merit"])
def test_the_plain_loop_is_the_authors_formula(name, case):
    parameters = [parameter(w) for w in case["weights"]]
    optimizer = PlainMERIT(parameters, **case["hyper"])
    for grads, after in zip(case["grads"], case["after"], strict=True):
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = tensor(grad)
        optimizer.step()
        for p, expected in zip(parameters, after, strict=True):
            close(p.detach(), tensor(expected))


def test_the_tensors_are_those_of_gpt2_small():
    assert sum(p.numel() for p in steps.tensors("embedding", CPU)) == 50257 * 768
    shapes = [tuple(p.shape) for p in steps.tensors("block", CPU)]
    assert shapes.count((768, 768)) == 4 and (3072, 768) in shapes and sum(len(s) == 1 for s in shapes) == 10


def test_every_named_peer_is_there_and_steps(monkeypatch):
    monkeypatch.setattr(steps, "tensors", lambda what, device: [torch.nn.Parameter(torch.ones(2, 2))])
    names = [peer.name for peer in steps.peers()]
    assert len(set(names)) == 11 and {steps.FASTEST, steps.PLAIN, steps.FUSED, "pytorch_optimizer's Lamb"} < set(names)
    for peer in steps.peers():
        (p,) = steps.tensors("block", CPU)
        p.grad = torch.ones(2, 2)
        peer.build([p]).step()
        assert (p < 1).all(), peer.name


def test_a_comparison_measures_each_peer():
    chosen = [peer for peer in steps.peers() if peer.name in (steps.FASTEST, steps.FUSED)]
    compared = steps.compare("block", CPU, rounds=1, chosen=chosen)
    assert [row["optimizer"] for row in compared] == [steps.FASTEST, steps.FUSED]
    assert compared[0]["multiple"] == 1 and compared[0]["weights"] == 7_087_872
    assert compared[0]["bytes_moved"] == pytest.approx(28, abs=0.1)
    assert all(row["nanoseconds"] > 0 for row in compared)


def compared(multiple, plain=30.0, held=0.01, device="cpu"):
    names = {steps.FASTEST: 1.0, steps.FUSED: multiple, steps.PLAIN: plain}
    return [
        {"tensors": "block", "device": device, "optimizer": name, "multiple": value, "bytes_held": held}
        for name, value in names.items()
    ]


@pytest.mark.parametrize(
    "found, met",
    [
        (compared(3.0), [True, True, True]),
        (compared(3.1), [False, True, True]),
        (compared(3.0, plain=23.0), [True, True, False]),
        (compared(3.0, held=0.05), [True, False, True]),
        (compared(1.8, device="cuda"), [True, True]),
        (compared(1.9, device="cuda"), [False, True]),
    ],
)
def test_verdicts(found, met):
    assert [row["met"] for row in steps.verdicts(found)] == met


def test_a_device_that_was_not_there_is_said():
    both = compared(2.0) + compared(1.7, device="cuda")
    assert steps.not_measured({"rows": both}) == []
    ((what, target),) = steps.not_measured({"rows": compared(2.0)})
    assert what.endswith("cuda") and target == "at most 1.8 ×"


def test_a_missed_target_is_said():
    row = steps.verdicts(compared(3.14))[0]
    assert rows.said(row) == "MERIT, fused: times torch AdamW, fused, block, cpu: 3.14 × (target at most 3 ×: missed)"


def test_ratios_are_taken_within_a_round():
    assert rows.ratio([2.0, 20.0, 9.0], [1.0, 10.0, 3.0]) == 2.0
    calls = []
    seconds = rows.in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert "".join(calls) == "ababab" and [len(times) for times in seconds.values()] == [2, 2]


# -- training ------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_batch():
    table, (figure,) = training.memory((8, 256), micro=4, model="nano", text="synthetic")
    assert [row["batch_size"] for row in table] == [8, 256]
    assert figure["met"] and figure["value"] < 5


def test_transformers_model_is_as_large_as_ours():
    of = training.recipe(model="nano", text="synthetic")
    corpus = training.train(of).corpus
    ours, theirs = training.build_model(of, corpus), training.transformers_model(of, corpus)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())


# -- collectives ---------------------------------------------------------------------------------------------------


def test_collectives_are_counted_and_set_beside_the_papers_estimate():
    results = collectives.measure([(8, 4), (4, 8)])  # four ranks, of which two share a row and two a column
    counted = {(row["cut"], row["step"]): (row["calls"], row["numbers"]) for row in results["rows"]}
    assert counted["rows cut", "MERIT, fused"] == (1, 2 * (4 + 8) + 4)
    assert counted["columns cut", "MERIT, fused"] == (1, 2 * (8 + 4) + 4)
    assert counted["both cut", "LAMB, fused"] == (2, 8) and counted["both cut", "AdamW"] == (0, 0)
    calls, numbers = (a - b for a, b in zip(counted["both cut", "MERIT"], counted["both cut", "LAMB"], strict=True))
    assert results["paper"] == {"calls": 4, "numbers": 12} == {"calls": calls / 2, "numbers": numbers / 2}
    assert "| MERIT, fused | 1 / 28 | 1 / 28 | 2 / 32 |" in collectives.table(results)


# -- files ---------------------------------------------------------------------------------------------------------


def test_what_is_recorded_of_looking_is_what_the_code_measures():
    """Else the file is of an earlier code: make bench ARGS=looking."""
    source = inspect.getsource(looking)
    assert [row["what"] for row in rows.read("looking")["figures"] if f'"{row["what"]}"' not in source] == []


def test_the_readme_quotes_the_recorded_results():
    readme = (repo_root() / "README.md").read_text(encoding="utf-8")
    assert section(readme, "bench").strip() == bench.markdown({part: rows.read(part) for part in bench.PARTS})


def test_results_are_written_with_machine_and_versions(tmp_path, monkeypatch, capsys):
    found = {"figures": [rows.figure("speed", 0.5, "×", "at least 1 ×", False)]}
    monkeypatch.setattr(training, "measure", lambda: found)
    assert bench.main(["training", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "speed: 0.5 × (target at least 1 ×: missed)" in said and "training.json" in said
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["figures"][0]["met"] is False and {"machine", "cores", "versions", "date"} < written.keys()


def test_an_unknown_part_is_refused(capsys):
    assert bench.main(["speed"]) == 2
    assert "got 'speed', expected one of looking, steps, training, collectives" in capsys.readouterr().err
