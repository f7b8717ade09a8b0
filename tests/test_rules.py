"""Every rule, every strategy, on hand-made calls; and what follows from rules."""

from __future__ import annotations

import pytest

from meshwright.compiler.rules.strategies import strategies
from meshwright.compiler.rules.table import factors_of, rule_for
from meshwright.tests.rule_cases import Case, T
from meshwright.tests.rule_cases_all import HAND_MADE
from meshwright.tests.rule_checks import build, built, check_strategy

SECTIONS = {12: [(4, 4, 4)], 8: [(4, 4)], 6: [(2, 4)]}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", HAND_MADE, ids=str)
def test_every_strategy_equals_the_whole_op(case: Case, ranks: int) -> None:
    call, tensors = built(case)
    assert rule_for(call.op.target) is not None
    legal, _ = strategies(call, factors_of(call), ranks, SECTIONS)
    for strategy in legal:
        check_strategy(call, strategy, tensors, ranks)


def test_column_row_and_vocabulary_strategies_exist() -> None:
    """The rules alone give what Megatron does by hand."""
    call, _ = build("aten.linear.default", (T((2, 6, 8)), T((6, 8)), T((6,))), {})
    legal, _ = strategies(call, factors_of(call), 2, {})
    written = {(s.factor, *map(str, s.operands), *map(str, s.results)) for s in legal}
    assert ("n", "R", "S(0)", "S(0)", "S(2)") in written
    assert ("k", "S(2)", "S(1)", "P", "P") in written
    assert ("lead1", "S(1)", "R", "R", "S(1)") in written
    call, _ = build("aten.embedding.default", (T((8, 4)), T((2, 6), "ids")), {})
    legal, _ = strategies(call, factors_of(call), 2, {})
    assert any(s.lowering == "vocabulary" and str(s.operands[0]) == "S(0)" and str(s.results[0]) == "P" for s in legal)


def test_what_does_not_divide_is_refused_and_named() -> None:
    call, _ = build("aten.linear.default", (T((2, 5, 8)), T((9, 8))), {})
    legal, refused = strategies(call, factors_of(call), 2, {})
    assert "n" not in {s.factor for s in legal}
    assert {(r.factor, r.size) for r in refused} == {("n", 9), ("lead1", 5)}
