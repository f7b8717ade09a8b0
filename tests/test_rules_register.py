"""mw.register_rule: rules for a user's own ops, as a formula and as a function, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import meshwright as mw
from meshwright.compiler.graph import Op
from meshwright.compiler.rules import table
from meshwright.compiler.rules.factors import Call, Factors
from meshwright.compiler.rules.strategies import strategies
from meshwright.compiler.rules.table import factors_of
from meshwright.tests.rule_cases import T
from meshwright.tests.rule_checks import build, check_strategy


@torch.library.custom_op("ruletest::scored", mutates_args=())
def scored(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight.t() + bias


@scored.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    flat = grad.flatten(0, -2)
    return grad @ weight, flat.t() @ x.flatten(0, -2), flat.sum(0)


scored.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
TARGET = "ruletest.scored.default"


class Scored(torch.nn.Module):
    """Up by the custom op, down by a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(128, 32) / 6)
        self.shift = torch.nn.Parameter(torch.zeros(128))
        self.down = torch.nn.Linear(128, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.ops.ruletest.scored(x, self.up, self.shift).relu()).square().mean()


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules registered by a test are gone after it."""
    monkeypatch.setattr(table, "RULES", dict(table.RULES))
    yield


def offered(target: str = TARGET) -> set[str]:
    """Factors that are sharded, each strategy checked on two ranks."""
    call, tensors = build(target, (T((2, 6, 8)), T((4, 8)), T((4,))), {})
    legal, _ = strategies(call, factors_of(call), 2, {})
    for strategy in legal:
        check_strategy(call, strategy, tensors, 2)
    return {s.factor for s in legal}


def test_without_a_rule_an_op_runs_whole() -> None:
    assert offered() == {""}


def test_a_formula() -> None:
    mw.register_rule(TARGET, "... k, n k, n -> ... n", summed={"k"}, additive={2})
    assert offered() == {"", "R", "lead0", "lead1", "k", "n"}


def test_a_formula_with_whole_dims_and_blocked_factors() -> None:
    mw.register_rule(TARGET, "... _, n _, n -> ... n", blocked={"n"})
    assert offered() == {"", "R", "lead0", "lead1"}


def test_a_function_of_the_call() -> None:
    def rule(call: Call) -> Factors:
        rows = tuple(f"r{i}" for i in range(len(call.operands[0].shape) - 1))
        return Factors(((*rows, ""), ("n", ""), ("n",)), ((*rows, "n"),))

    mw.register_rule(TARGET, rule)
    assert offered() == {"", "R", "r0", "r1", "n"}


def test_linear_operands_pass_partial_values_on() -> None:
    mw.register_rule("ruletest.halved.default", "b s h -> b s h", linear=({0},))
    call, _ = build("aten.neg.default", (T((2, 6, 8)),), {})
    halved = Call(Op("ruletest.halved.default", call.op.args, (), call.results), call.operands, call.results)
    legal, _ = strategies(halved, factors_of(halved), 2, {})
    assert ("P", "P") in {(str(s.operands[0]), str(s.results[0])) for s in legal}


def test_a_dim_that_an_op_makes_is_not_sharded() -> None:
    mw.register_rule("ruletest.widened.default", "b s -> b s e")
    call, _ = build("aten.one_hot.default", (T((2, 6), "ids"), 8), {})
    widened = Call(Op("ruletest.widened.default", call.op.args, (), call.results), call.operands, call.results)
    legal, _ = strategies(widened, factors_of(widened), 2, {})
    assert {s.factor for s in legal} == {"", "b", "s"}


def test_the_plan_of_a_model_follows_the_rule() -> None:
    def up_layout() -> tuple[str, tuple[str, ...]]:
        plan = mw.compile(Scored(), {"x": torch.ones(2, 16, 32)}, mesh={"tp": 2}, micro_batch=2, global_batch=2)
        return str(plan.document.parameter_layouts["up"]), plan.document.notes

    layout, notes = up_layout()
    assert any(f"{TARGET} has no rule" in note for note in notes)
    mw.register_rule(TARGET, "... k, n k, n -> ... n", summed={"k"}, additive={2})
    layout, notes = up_layout()
    assert layout == "S(0)@tp"
    assert not any("has no rule" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("b s h", {}, "is not OPERANDS -> RESULTS"),
        ("b b -> b", {}, "has 'b' twice"),
        ("b ... -> b", {}, "stands for leading dims"),
        ("b k, k n -> b n", {"summed": {"m"}}, "summed names 'm', which no operand has"),
    ],
)
def test_what_is_no_formula_is_refused(text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mw.register_rule(TARGET, text, **options)


def test_unknown_options_and_second_rules_are_refused() -> None:
    with pytest.raises(TypeError, match="has no option 'sumed'"):
        mw.register_rule(TARGET, "b k -> b", sumed={"k"})
    with pytest.raises(TypeError, match="go with a formula"):
        mw.register_rule(TARGET, lambda call: Factors((), ()), summed={"k"})
    with pytest.raises(ValueError, match="has a rule already"):
        mw.register_rule("aten.linear.default", "... k, n k -> ... n")


def test_a_rule_that_does_not_fit_a_call_is_named() -> None:
    mw.register_rule(TARGET, "b k, n k, n -> b n")
    with pytest.raises(ValueError, match=r"the rule of ruletest.scored.default names \[2, 2, 1, 2\] dims"):
        offered()
