"""One call under one strategy: run on simulated ranks, recombined by the types' meaning, equal to the op run whole.

Values are checked against the definition of the types (plans.layout), forward and backward: what a strategy says of an
operand's gradient must be so. The text that runs is the text that programs contain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TypeVar

import torch

from meshwright.compiler.emission.lowering import Site, expression
from meshwright.compiler.graph import Op, Ref, Value
from meshwright.compiler.rules.factors import Call, Strategy
from meshwright.plans.layout import Layout, Type
from meshwright.plans.mesh import Mesh
from meshwright.runtime import ops
from meshwright.runtime.axes import TrivialAxis, join_shards, take_shard
from meshwright.tests.rule_cases import Case, T
from meshwright.tests.simulated import Meeting, SimulatedAxis, run_ranks

Tensors = dict[str, torch.Tensor]
Result = TypeVar("Result")
COLLECTIVE = ("vocabulary",)
"""Lowerings that communicate."""

ALONE = SimpleNamespace(axis=lambda name: TrivialAxis(name), device=torch.device("cpu"))
"""The runtime context of a rank that is alone on every axis but the one that is simulated."""


def build(target: str, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Call, Tensors]:
    """The call with its Values, and whole operands by name. Tensors of a case are given as T, or as they are."""
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}

    def place(item: object) -> object:
        if isinstance(item, (T, torch.Tensor)):
            name = f"v{len(tensors)}"
            tensors[name] = item.make(generator) if isinstance(item, T) else item.detach().clone()
            return Ref(name)
        return [place(i) for i in item] if isinstance(item, (list, tuple)) else item

    placed = tuple(place(a) for a in args)
    named = tuple((k, place(v)) for k, v in kwargs.items())
    draft = Op(target, placed, named, (Value("r0", (), "float64"),))
    values = tuple(value(n, tensors[n]) for n in draft.operands)
    outputs = run(Call(draft, values, draft.results), whole(draft), tensors, None, 1)
    results = tuple(value(f"r{i}", t) for i, t in enumerate(outputs))
    op = Op(target, placed, named, results)
    return Call(op, values, results), tensors


@cache
def built(case: Case) -> tuple[Call, Tensors]:
    """`build`, once per case."""
    return build(case.target, case.args, dict(case.kwargs))


def carries_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def value(name: str, tensor: torch.Tensor) -> Value:
    return Value(name, tuple(tensor.shape), str(tensor.dtype).split(".")[1], carries_gradient(tensor))


def whole(op: Op) -> Strategy:
    return Strategy("", (Type("I"),) * len(op.operands), (Type("I"),) * len(op.results))


def run(call: Call, strategy: Strategy, tensors: Tensors, axis: SimulatedAxis | None, ranks: int) -> tuple[torch.Tensor, ...]:
    """The emitted expression on one rank's operands; the captured op itself where there is no axis."""
    target = call.op.target
    if target.startswith("aten.") and axis is None:
        args = rebuild(call.op.args, tensors)
        output = overload(target)(*args, **{k: rebuild(v, tensors) for k, v in call.op.kwargs})
    else:
        mesh = Mesh(tp=ranks)
        shapes = tuple(
            Layout.of({"tp": t}).local_shape(v.shape, mesh) for v, t in zip(call.results, strategy.results, strict=True)
        )
        site = Site(call, strategy, {n: n for n in tensors}, shapes, "axis", ranks, "0")
        known = {"torch": torch, "ops": ops, "aten": torch.ops.aten, "axis": axis, "rt": ALONE}
        output = eval(expression(site), {**known, **tensors})
    return tuple(output) if isinstance(output, (list, tuple)) else (output,)


def overload(target: str) -> torch._ops.OpOverload:
    """torch.ops.aten.NAME.OVERLOAD."""
    _, name, which = target.split(".")
    return getattr(getattr(torch.ops.aten, name), which)


def rebuild(tree: object, tensors: Tensors) -> object:
    if isinstance(tree, Ref):
        return tensors[tree.name]
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuild(item, tensors) for item in tree)
    return tree


def deal(x: torch.Tensor, type_: Type, ranks: int, seed: int, gradient: bool = False) -> list[torch.Tensor]:
    """One tensor per rank that together mean x: as a value of this type, or as a gradient of a value of this type."""
    if type_.kind == "S":
        return [take_shard(x, type_.dim, ranks, r, type_.sections) for r in range(ranks)]
    if type_.kind == ("R" if gradient else "P") and carries_gradient(x):
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
            torch.testing.assert_close(part, parts[0], equal_nan=True, msg=lambda m: f"{what}: ranks differ: {m}")
        joined = parts[0]
    torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")


@dataclass(frozen=True)
class Whole:
    """The op run whole: results, which of them carry a gradient, their cotangents, and gradients of operands by name."""

    results: tuple[torch.Tensor, ...]
    flowing: tuple[int, ...]
    cotangents: tuple[torch.Tensor, ...]
    gradients: Tensors


def run_whole(call: Call, tensors: Tensors, differentiable: frozenset[str]) -> Whole:
    """The op and its backward pass, with respect to the given operands."""
    leaves = {n: t.clone().requires_grad_(n in differentiable) for n, t in tensors.items()}
    results = run(call, whole(call.op), leaves, None, 1)
    flowing = tuple(i for i, y in enumerate(results) if y.requires_grad)
    generator = torch.Generator().manual_seed(7)
    cotangents = tuple(torch.randn(results[i].shape, generator=generator, dtype=results[i].dtype) for i in flowing)
    torch.autograd.backward([results[i] for i in flowing], cotangents)
    gradients = {n: x.grad for n, x in leaves.items() if x.grad is not None}
    return Whole(tuple(y.detach() for y in results), flowing, cotangents, gradients)


def differentiable_whole(call: Call, tensors: Tensors) -> tuple[Whole, frozenset[str]]:
    """The op run whole with respect to as many operands as torch can: all, the first, none."""
    floats = frozenset(n for n, t in tensors.items() if carries_gradient(t))
    for wanted in (floats, floats & set(call.op.operands[:1])):
        try:
            return run_whole(call, tensors, wanted), wanted
        except RuntimeError as error:
            if "not differentiable" not in str(error) and "not implemented" not in str(error):
                raise
    return run_whole(call, tensors, frozenset()), frozenset()


def one_by_one(ranks: int, body: Callable[[SimulatedAxis], Result]) -> list[Result]:
    """run_ranks without threads, for what has no collective: one would wait in vain."""
    return [body(SimulatedAxis("tp", ranks, index, Meeting(ranks))) for index in range(ranks)]


def check_strategy(call: Call, strategy: Strategy, tensors: Tensors, ranks: int) -> None:
    """AssertionError names the strategy and what of it is not so."""
    names = call.op.operands
    expected, wanted = differentiable_whole(call, tensors)
    dealt = {n: deal(tensors[n], t, ranks, k) for k, (n, t) in enumerate(zip(names, strategy.operands, strict=True))}
    pairs = zip(expected.flowing, expected.cotangents, strict=True)
    pulled = [deal(g, strategy.results[i], ranks, 50 + i, gradient=True) for i, g in pairs]

    def rank(axis: SimulatedAxis) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        own = {n: parts[axis.index].clone().requires_grad_(n in wanted) for n, parts in dealt.items()}
        outputs = run(call, strategy, own, axis, ranks)
        torch.autograd.backward([outputs[i] for i in expected.flowing], [g[axis.index] for g in pulled])
        return tuple(y.detach() for y in outputs), {n: x.grad for n, x in own.items() if x.grad is not None}

    found = run_ranks(ranks, rank) if strategy.lowering in COLLECTIVE else one_by_one(ranks, rank)
    for i, (type_, y) in enumerate(zip(strategy.results, expected.results, strict=True)):
        check_meaning([outputs[i] for outputs, _ in found], type_, y, f"{strategy}: result {i}", False)
    for name, type_ in zip(names, strategy.operands, strict=True):
        if name in expected.gradients:
            grads = [g.get(name, torch.zeros_like(dealt[name][0])) for _, g in found]
            check_meaning(grads, type_, expected.gradients[name], f"{strategy}: gradient of {name}", True)
