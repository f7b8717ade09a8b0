"""All hand-made cases of the rule table."""

from __future__ import annotations

from meshwright.tests.rule_cases import CASES
from meshwright.tests.rule_cases_index import INDEX, REDUCTIONS
from meshwright.tests.rule_cases_nn import ATTENTION, CONTRACTIONS, CONVOLUTIONS, LOSSES, NORMS, POOLING
from meshwright.tests.rule_cases_shapes import ELEMENTWISE, SHAPES

HAND_MADE = [
    *CASES, *SHAPES, *ELEMENTWISE, *INDEX, *REDUCTIONS, *CONTRACTIONS, *ATTENTION, *CONVOLUTIONS, *POOLING, *NORMS, *LOSSES,
]  # fmt: skip
