"""Every rule, every strategy: run on simulated ranks, recombined by the types' meaning, equal to the op run whole.

Values are checked against the definition of the types (plans.layout), forward and backward: what a strategy says of an
operand's gradient must be so. The text that runs is the text that programs contain.
"""

from __future__ import annotations

import pytest
import torch

from meshwright.compiler.emission.lowering import Site, expression
from meshwright.compiler.graph import Op, Ref, Value
from meshwright.compiler.rules.factors import Call, Strategy
from meshwright.compiler.rules.strategies import strategies
from meshwright.compiler.rules.table import factors_of, register_rule, rule_for
from meshwright.plans.layout import Layout, Type
from meshwright.plans.mesh import Mesh
from meshwright.runtime import ops
from meshwright.runtime.axes import join_shards, take_shard
from meshwright.tests.rule_cases import CASES, T
from meshwright.tests.simulated import SimulatedAxis, run_ranks

SECTIONS = {12: [(4, 4, 4)], 8: [(4, 4)], 6: [(2, 4)]}


def build(target: str, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Call, dict[str, torch.Tensor]]:
    """The call with its Values, and whole operands by name."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}

    def place(item: object) -> object:
        if isinstance(item, T):
            name = f"v{len(tensors)}"
            tensors[name] = item.make(generator)
            return Ref(name)
        return [place(i) for i in item] if isinstance(item, list) else item

    placed = tuple(place(a) for a in args)
    draft = Op(target, placed, tuple(kwargs.items()), (Value("r0", (), "float64"),))
    values = tuple(value(n, tensors[n]) for n in draft.operands)
    outputs = run(Call(draft, values, draft.results), whole(draft), tensors, None, 1)
    results = tuple(value(f"r{i}", t) for i, t in enumerate(outputs))
    op = Op(target, placed, tuple(kwargs.items()), results)
    return Call(op, values, results), tensors


def value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(tensor.shape), str(tensor.dtype).split(".")[1], tensor.is_floating_point())


def whole(op: Op) -> Strategy:
    return Strategy("", (Type("I"),) * len(op.operands), (Type("I"),) * len(op.results))


def run(
    call: Call, strategy: Strategy, tensors: dict[str, torch.Tensor], axis: SimulatedAxis | None, ranks: int
) -> tuple[torch.Tensor, ...]:
    """The emitted expression on one rank's operands."""
    target = call.op.target
    if target.startswith("aten.") and axis is None:
        args = rebuild(call.op.args, tensors)
        output = call_aten(target)(*args, **{k: rebuild(v, tensors) for k, v in call.op.kwargs})
    else:
        mesh = Mesh(tp=ranks)
        shapes = tuple(
            Layout.of({"tp": t}).local_shape(v.shape, mesh) for v, t in zip(call.results, strategy.results, strict=True)
        )
        site = Site(call, strategy, {n: n for n in tensors}, shapes, "axis", ranks, "0")
        output = eval(expression(site), {"torch": torch, "ops": ops, "aten": torch.ops.aten, "axis": axis, **tensors})
    return tuple(output) if isinstance(output, (list, tuple)) else (output,)


def call_aten(target: str) -> object:
    _, name, overload = target.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def rebuild(tree: object, tensors: dict[str, torch.Tensor]) -> object:
    if isinstance(tree, Ref):
        return tensors[tree.name]
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(item, tensors) for item in tree)
    return tree


def deal(x: torch.Tensor, type_: Type, ranks: int, seed: int, gradient: bool = False) -> list[torch.Tensor]:
    """One tensor per rank that together mean x: as a value of this type, or as a gradient of a value of this type."""
    if type_.kind == "S":
        return [take_shard(x, type_.dim, ranks, r, type_.sections) for r in range(ranks)]
    if type_.kind == ("R" if gradient else "P") and x.is_floating_point():
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(ranks - 1)]
        return [*parts, x - sum(parts)]
    return [x.clone() for _ in range(ranks)]


def check_meaning(parts: list[torch.Tensor], type_: Type, expected: torch.Tensor, what: str, gradient: bool) -> None:
    """Whether per-rank tensors mean `expected`."""
    if type_.kind == "S":
        joined = join_shards(torch.stack(parts), type_.dim, type_.sections)
    elif type_.kind == ("R" if gradient else "P"):
        joined = torch.stack(parts).sum(0)
    else:
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], msg=lambda m: f"{what}: ranks differ: {m}")
        joined = parts[0]
    torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def check_strategy(call: Call, strategy: Strategy, tensors: dict[str, torch.Tensor], ranks: int) -> None:
    names = call.op.operands
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    expected = run(call, whole(call.op), leaves, None, 1)
    floating = [i for i, y in enumerate(expected) if y.requires_grad]
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(expected[i].shape, generator=generator, dtype=torch.float64) for i in floating]
    torch.autograd.backward([expected[i] for i in floating], cotangents)
    dealt = {n: deal(tensors[n], t, ranks, k) for k, (n, t) in enumerate(zip(names, strategy.operands, strict=True))}
    pulled = [deal(g, strategy.results[i], ranks, 50 + i, gradient=True) for i, g in zip(floating, cotangents, strict=True)]

    def rank(axis: SimulatedAxis) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        own = {n: parts[axis.index].clone().requires_grad_(parts[0].is_floating_point()) for n, parts in dealt.items()}
        outputs = run(call, strategy, own, axis, ranks)
        torch.autograd.backward([outputs[i] for i in floating], [g[axis.index] for g in pulled])
        return tuple(y.detach() for y in outputs), {n: x.grad for n, x in own.items() if x.grad is not None}

    found = run_ranks(ranks, rank)
    for i, (type_, y) in enumerate(zip(strategy.results, expected, strict=True)):
        check_meaning([outputs[i] for outputs, _ in found], type_, y.detach(), f"{strategy}: result {i}", False)
    for name, type_ in zip(names, strategy.operands, strict=True):
        if leaves[name].grad is not None:
            grads = [g.get(name, torch.zeros_like(dealt[name][0])) for _, g in found]
            check_meaning(grads, type_, leaves[name].grad, f"{strategy}: gradient of {name}", True)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{CASES.index(case)}")
def test_every_strategy_equals_the_whole_op(case: tuple[str, tuple[object, ...], dict[str, object]], ranks: int) -> None:
    call, tensors = build(*case)
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


def test_an_op_without_a_rule_runs_whole_and_may_be_taught() -> None:
    call, _ = build("aten.add.Tensor", (T((2, 6, 8)), T((2, 6, 8))), {})
    unknown = Call(Op("mylib.mix.default", call.op.args, (), call.results), call.operands, call.results)
    legal, _ = strategies(unknown, factors_of(unknown), 2, {})
    assert [s.factor for s in legal] == ["", "R"]
    register_rule("mylib.mix.default", "b s h, b s h -> b s h")
    legal, _ = strategies(unknown, factors_of(unknown), 2, {})
    assert {"b", "s", "h"} <= {s.factor for s in legal}
    with pytest.raises(ValueError, match="has a rule already"):
        register_rule("mylib.mix.default", "b s h, b s h -> b s h")
