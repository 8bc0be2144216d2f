"""What every exercise judged by a plain list of mistakes does alike; the other tests of each stand in its own file."""

import pytest

from merit_lab.exercises import audit, cost, edge, mediation, merit, patterns, sweeps

MODULES = {
    "audit": audit, "cost": cost, "edge": edge, "mediation": mediation, "merit": merit, "patterns": patterns,
    "sweeps": sweeps,
}  # fmt: skip
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
each_mistake = pytest.mark.parametrize(
    "module, name", [pytest.param(m, name, id=f"{k}-{name}") for k, m in MODULES.items() for name in m.MISTAKES]
)


@each_module
def test_untouched_it_is_your_turn(module):
    def untouched(**arguments):
        raise NotImplementedError

    assert module.verdict(untouched).startswith("your turn")


@each_mistake
def test_each_typical_mistake_is_named(module, name):
    assert module.verdict(module.MISTAKES[name].function) == f"not yet: {module.MISTAKES[name].says}"


@each_module
def test_the_messages_differ(module):
    assert len({mistake.says for mistake in module.MISTAKES.values()}) == len(module.MISTAKES)
