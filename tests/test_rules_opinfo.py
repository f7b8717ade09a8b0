"""Every rule against PyTorch's own samples of its op (OpInfo), and whether every rule is exercised at all."""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.rules.strategies import strategies
from meshwright.compiler.rules.table import RULES, factors_of
from meshwright.tests.rule_cases import Case
from meshwright.tests.rule_cases_all import HAND_MADE
from meshwright.tests.rule_checks import built, check_strategy

pytest.importorskip("expecttest", reason="PyTorch's database of ops needs it")

RANKS = 2
NEVER_SHARDED = {
    **{
        f"aten.{name}.default": "one number of all entries, and not a sum: the entries have to be on one rank"
        for name in "max min any all prod var std median nanmedian".split()
    },
    "aten.masked_scatter.default": "where an entry of the source goes depends on the whole mask; it passes P on",
    "mw.token_mean": "of scalars",
}
"""Ops whose rule shards nothing, with the reason."""


def shards(case: Case) -> bool:
    """Whether a case has a strategy that shards something."""
    call, _ = built(case)
    legal, _ = strategies(call, factors_of(call), RANKS, {})
    return any(t.kind == "S" for s in legal for t in s.types)


@pytest.fixture(scope="module")
def cases_of() -> object:
    """Samples by target; the database takes seconds to import, so it is imported when the first test runs."""
    module = pytest.importorskip("meshwright.tests.rule_cases_opinfo")
    torch.set_num_threads(1)
    return module.opinfo_cases


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", sorted(RULES))
def test_samples_of_every_op(target: str, cases_of: object) -> None:
    """Every legal strategy of the samples equals the whole op; some case, hand-made or not, shards something."""
    samples = cases_of(target, RANKS) if target.startswith("aten.") else []  # type: ignore[operator]
    for case in samples:
        call, tensors = built(case)
        for strategy in strategies(call, factors_of(call), RANKS, {})[0]:
            check_strategy(call, strategy, tensors, RANKS)
    own = [case for case in HAND_MADE if case.target == target]
    assert samples or own, f"{target} has no case"
    assert any(map(shards, (*own, *samples))) == (target not in NEVER_SHARDED)
