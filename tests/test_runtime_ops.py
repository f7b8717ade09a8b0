"""Conversions: every pair of types, by value and as a linear map with its transpose. One process."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from meshwright.plans.layout import CONVERSIONS, I, P, R, Type, local_slices, shard
from meshwright.runtime import ops
from meshwright.runtime.axes import Axis, TrivialAxis
from meshwright.tests.simulated import SimulatedAxis, run_ranks, saved_tensors

SHAPE = (6, 12, 6)
TRANSPOSED = {"S": "S", "I": "I", "R": "P", "P": "I"}


def cases() -> list[tuple[Type, Type]]:
    """Every conversion, with S of several dims and by sections."""
    spelled = {"I": (I,), "R": (R,), "P": (P,), "S": (shard(0), shard(1), shard(1, (6, 6)), shard(2))}
    pairs = itertools.chain.from_iterable(itertools.product(spelled[a], spelled[b]) for a, b in CONVERSIONS)
    return [(a, b) for a, b in pairs if a != b]


def local(whole: Tensor, type_: Type, ranks: int, index: int) -> Tensor:
    """What a rank holds of `whole`."""
    if type_.kind == "S":
        ranges = local_slices(type_, whole.shape[type_.dim], ranks, index)
        return torch.cat([whole.narrow(type_.dim, a, b - a) for a, b in ranges], type_.dim)
    if type_.kind == "P":
        parts = torch.randn(ranks, *whole.shape, generator=torch.Generator().manual_seed(5), dtype=whole.dtype)
        return whole - parts[1:].sum(0) if index == 0 else parts[index]
    return whole.clone()


def whole(parts: list[Tensor], type_: Type) -> Tensor:
    """The tensor that all ranks' parts mean; I and R must agree."""
    if type_.kind == "P":
        return torch.stack(parts).sum(0)
    if type_.kind != "S":
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0])
        return parts[0]
    ranks = len(parts)
    length = ranks * parts[0].shape[type_.dim]
    shape = list(parts[0].shape)
    shape[type_.dim] = length
    out = parts[0].new_zeros(shape)
    for index, part in enumerate(parts):
        at = 0
        for start, stop in local_slices(type_, length, ranks, index):
            out.narrow(type_.dim, start, stop - start).copy_(part.narrow(type_.dim, at, stop - start))
            at += stop - start
    return out


def gradient_type(type_: Type) -> Type:
    """How the gradient of a tensor of `type_` lies: R's is partial, the others' as stated in plans.layout."""
    return type_ if type_.kind == "S" else Type(TRANSPOSED[type_.kind])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("source", "target"), cases(), ids=str)
def test_conversion_keeps_the_value_and_the_gradient(source: Type, target: Type, ranks: int) -> None:
    value = torch.randn(SHAPE, dtype=torch.float64)
    gradient = torch.randn(SHAPE, dtype=torch.float64)

    def body(axis: Axis) -> tuple[Tensor, Tensor]:
        x = local(value, source, ranks, axis.index).requires_grad_()
        y = ops.convert(x, axis, f"{source} -> {target}")
        assert y.is_contiguous()
        y.backward(local(gradient, gradient_type(target), ranks, axis.index))
        assert x.grad is not None and x.grad.is_contiguous()
        return y.detach(), x.grad

    results = run_ranks(ranks, body)
    torch.testing.assert_close(whole([y for y, _ in results], target), value)
    torch.testing.assert_close(whole([g for _, g in results], gradient_type(source)), gradient)


def pairing(parts: list[Tensor], grads: list[Tensor], type_: Type) -> Tensor:
    """<value, gradient> as the type means it: summed over slices; once where the gradient or the value is the same."""
    products = torch.stack([(x * g).sum() for x, g in zip(parts, grads, strict=True)])
    return products[0] if type_ == I else products.sum()


@pytest.mark.parametrize(("source", "target"), cases(), ids=str)
def test_backward_is_the_adjoint(source: Type, target: Type) -> None:
    value, gradient = torch.randn(2, *SHAPE, dtype=torch.float64)

    def body(axis: Axis) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = local(value, source, 2, axis.index).requires_grad_()
        y = ops.convert(x, axis, f"{source} -> {target}")
        given = local(gradient, gradient_type(target), 2, axis.index)
        (grad,) = torch.autograd.grad(y, x, given)
        return x.detach(), y.detach(), given, grad

    xs, ys, given, grads = (list(column) for column in zip(*run_ranks(2, body), strict=True))
    torch.testing.assert_close(pairing(ys, given, target), pairing(xs, grads, source))


def test_collectives_are_those_of_the_table() -> None:
    local_names = {"identity", "first", "slice", "pad"}

    def body(axis: SimulatedAxis, source: str, target: str) -> list[str]:
        text = f"{'S(0)' if source == 'S' else source} -> {'S(1)' if target == 'S' else target}"
        x = torch.randn(4, 4, requires_grad=True)
        ops.convert(x, axis, text).sum().backward()
        return axis.log

    for (source, target), names in CONVERSIONS.items():
        expected = [n for n in (names.forward, names.backward) if n not in local_names]
        logs = run_ranks(2, lambda axis, s=source, t=target: body(axis, s, t))  # type: ignore[misc]
        assert logs == [expected, expected], (source, target)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("text", ["I -> S(1)", "S(1) -> I", "S(0) -> S(1)", "I -> R", "S(1:2+2) -> R"])
def test_integers_and_bools_convert(text: str, dtype: torch.dtype) -> None:
    source, target = ops.parse_conversion(text)
    value = torch.arange(16).reshape(4, 4).remainder(3).to(dtype)
    parts = run_ranks(2, lambda axis: ops.convert(local(value, source, 2, axis.index), axis, text))
    assert all(part.dtype == dtype for part in parts)
    assert whole(parts, target).equal(value)


def test_a_conversion_saves_nothing_and_a_slice_does_not_keep_the_whole() -> None:
    def body(axis: Axis) -> int:
        x = torch.randn(2, 8, requires_grad=True)
        with saved_tensors() as saved:
            y = ops.convert(ops.convert(x, axis, "I -> S(0)"), axis, "S(0) -> S(1)")
        assert not saved
        return y.untyped_storage().nbytes()

    assert run_ranks(2, body) == [32, 32]


def test_one_rank_is_the_identity() -> None:
    x = torch.randn(3)
    assert all(ops.convert(x, TrivialAxis("tp"), text) is x for text in ("P -> S(0)", "I -> R", "S(0) -> S(1)"))


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("S(0)", (4,), "is not SOURCE -> TARGET"),
        ("S -> I", (4,), "layout type 'S ' is none of"),
        ("I -> S(0)", (3,), r"slicing dim 0 of \(3,\): 3 does not divide by 2 ranks"),
        ("P -> S(0)", (3,), r"splitting dim 0 of \(3,\): 3 does not divide by 2 ranks"),
        ("S(0:4+2) -> I", (4,), r"sections 4\+2 do not add up to the dim's 8"),
    ],
)
def test_errors_say_what_does_not_fit(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, lambda axis: ops.convert(torch.zeros(shape), axis, text))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("padding_idx", [-1, 0, 4])
def test_vocab_embedding_equals_embedding(ranks: int, padding_idx: int) -> None:
    table = torch.randn(12, 5, dtype=torch.float64)
    ids = torch.randint(12, (2, 7))
    ids[0, :3] = torch.tensor([0, 4, 11])
    grad = torch.randn(2, 7, 5, dtype=torch.float64)
    full = table.clone().requires_grad_()
    expected = torch.ops.aten.embedding.default(full, ids, padding_idx)
    expected.backward(grad)

    def body(axis: Axis) -> tuple[Tensor, Tensor]:
        weight = local(table, shard(0), ranks, axis.index).requires_grad_()
        out = ops.convert(ops.vocab_embedding(ids, weight, axis, padding_idx), axis, "P -> I")
        out.backward(grad)
        assert weight.grad is not None
        return out.detach(), weight.grad

    results = run_ranks(ranks, body)
    torch.testing.assert_close(whole([out for out, _ in results], I), expected.detach())
    torch.testing.assert_close(whole([g for _, g in results], shard(0)), full.grad)
