"""Routes, dispatch, combine and exchange against plain indexing of the tokens of all ranks. One process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from meshwright.runtime import ops
from meshwright.runtime.axes import Axis, TrivialAxis
from meshwright.runtime.dry_axes import DryAxis, Tally
from meshwright.tests.simulated import run_ranks, saved_tensors

HIDDEN, INNER = 4, 6


@dataclass(frozen=True)
class Tokens:
    """One rank's: rows per expert, and rows of no expert after them."""

    counts: tuple[int, ...]
    spare: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.spare

    def offsets(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(self.counts).cumsum(0).to(dtype)

    def place(self, expert: int) -> slice:
        start = sum(self.counts[:expert])
        return slice(start, start + self.counts[expert])


CASES = {
    "uneven": (Tokens((3, 0, 2, 5)), Tokens((1, 4, 0, 2))),
    "a rank without tokens": (Tokens((0, 0, 0, 0)), Tokens((1, 4, 0, 2), 1)),
    "nobody has any": (Tokens((0, 0)), Tokens((0, 0), 2)),
    "all to one rank": (Tokens((0, 0, 3, 1), 2), Tokens((0, 0, 0, 6))),
    "none to itself": (Tokens((0, 3)), Tokens((2, 0))),
    "one expert each": (Tokens((2, 1, 3)), Tokens((0, 1, 4)), Tokens((2, 2, 0))),
    "three ranks": (Tokens((2, 1, 3, 0, 0, 1), 1), Tokens((0, 1, 4, 2, 2, 2)), Tokens((0,) * 6)),
    "four ranks": (Tokens((1, 0, 2, 0)), Tokens((0, 0, 0, 5), 2), Tokens((3, 3, 3, 3)), Tokens((0, 1, 0, 0))),
}
every_case = pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)


def rows_of(tokens: tuple[Tokens, ...], *trailing: int) -> list[Tensor]:
    """Rows of every rank, all different."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(t.rows, *trailing, generator=draw, dtype=torch.float64) for t in tokens]


def dispatched(rows: list[Tensor], tokens: tuple[Tokens, ...], index: int) -> Tensor:
    """What rank `index` must receive: by expert, then by rank."""
    share = len(tokens[0].counts) // len(tokens)
    experts = range(index * share, (index + 1) * share)
    return torch.cat([x[t.place(e)] for e in experts for x, t in zip(rows, tokens, strict=True)])


@every_case
@pytest.mark.parametrize("trailing", [(HIDDEN,), (), (2, 3)])
def test_dispatch_and_combine_are_each_others_inverse_and_backward(tokens: tuple[Tokens, ...], trailing: tuple[int, ...]) -> None:
    ranks = len(tokens)
    rows = rows_of(tokens, *trailing)
    share = len(tokens[0].counts) // ranks

    def body(axis: Axis) -> None:
        mine = tokens[axis.index]
        route = ops.route(mine.offsets(), axis, mine.rows)
        arriving = [sum(t.counts[axis.index * share + e] for t in tokens) for e in range(share)]
        assert route.offsets.equal(torch.tensor(arriving).cumsum(0).to(torch.int32))
        x = rows[axis.index].clone().requires_grad_()
        with saved_tensors() as saved:
            y = ops.dispatch(x, route)
            z = ops.combine(y, route)
        assert not saved
        assert y.is_contiguous() and y.equal(dispatched(rows, tokens, axis.index))
        expected = rows[axis.index].clone()
        expected[mine.rows - mine.spare :] = 0
        assert z.equal(expected)
        (grad,) = torch.autograd.grad(y, x, dispatched(rows, tokens, axis.index), retain_graph=True)
        assert grad.equal(expected)
        (grad,) = torch.autograd.grad(z, y, rows[axis.index])
        assert grad.equal(y)

    run_ranks(ranks, body, "ep")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16])
def test_rows_of_any_dtype(dtype: torch.dtype) -> None:
    tokens = CASES["uneven"]
    rows = [(x * 2).to(dtype) for x in rows_of(tokens)]

    def body(axis: Axis) -> None:
        mine = tokens[axis.index]
        route = ops.route(mine.offsets(torch.int64), axis, mine.rows)
        assert route.offsets.dtype == torch.int64
        y = ops.dispatch(rows[axis.index], route)
        assert y.dtype == dtype and not y.requires_grad and y.equal(dispatched(rows, tokens, axis.index))
        assert ops.combine(y, route).equal(rows[axis.index])

    run_ranks(2, body, "ep")


Weights = dict[str, Tensor]


def weights(num_experts: int) -> Weights:
    draw = torch.Generator().manual_seed(4)
    shapes = {"up": (num_experts, HIDDEN, INNER), "bias": (num_experts, INNER), "down": (num_experts, INNER, HIDDEN)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def experts(w: Weights, x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """A gated MLP per expert; `ids` are the rows' experts, for the bias."""
    inner = ops.grouped_mm(x, w["up"], offsets) + w["bias"][ids]
    return ops.grouped_mm(inner * inner.sigmoid(), w["down"], offsets)


def spread(w: Weights, x: Tensor, mine: Tokens, axis: Axis) -> Tensor:
    """The same with experts over the axis; w are the local ones."""
    num_experts = len(mine.counts)
    ids = torch.arange(num_experts).repeat_interleave(torch.tensor(mine.counts))
    ids = torch.cat([ids, ids.new_full((mine.spare,), num_experts - 1)])
    route = ops.route(mine.offsets(), axis, mine.rows)
    here = ops.local_experts(ops.dispatch(ids, route), axis, num_experts)
    return ops.combine(experts(w, ops.dispatch(x, route), route.offsets, here), route)


@every_case
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_over_ranks_equal_experts_in_one_place(tokens: tuple[Tokens, ...], recompute: bool) -> None:
    ranks, num_experts = len(tokens), len(tokens[0].counts)
    rows, gradients = rows_of(tokens, HIDDEN), rows_of(tokens, HIDDEN)
    whole = {name: w.requires_grad_() for name, w in weights(num_experts).items()}
    share = num_experts // ranks

    def alone() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.clone().requires_grad_() for x in rows]
        outputs = []
        for x, mine in zip(leaves, tokens, strict=True):
            parts = [experts({n: w[e : e + 1] for n, w in whole.items()}, x[mine.place(e)],
                             torch.tensor([mine.counts[e]]), torch.zeros(mine.counts[e], dtype=torch.long))
                     for e in range(num_experts)]  # fmt: skip
            outputs.append(torch.cat([*parts, torch.zeros(mine.spare, HIDDEN, dtype=torch.float64)]))
        torch.autograd.backward(outputs, gradients)
        return [y.detach() for y in outputs], [x.grad for x in leaves if x.grad is not None]

    def body(axis: Axis) -> tuple[Tensor, Tensor, Weights]:
        here = slice(axis.index * share, (axis.index + 1) * share)
        local = {n: w.detach()[here].clone().requires_grad_() for n, w in whole.items()}
        x = rows[axis.index].clone().requires_grad_()
        if recompute:
            y = checkpoint(spread, local, x, tokens[axis.index], axis, use_reentrant=False, preserve_rng_state=False)
        else:
            y = spread(local, x, tokens[axis.index], axis)
        y.backward(gradients[axis.index])
        assert x.grad is not None
        return y.detach(), x.grad, {n: w.grad for n, w in local.items() if w.grad is not None}

    outputs, grads = alone()
    found = run_ranks(ranks, body, "ep")
    for (y, grad, _), expected, expected_grad in zip(found, outputs, grads, strict=True):
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(grad, expected_grad)
    for name, w in whole.items():
        torch.testing.assert_close(torch.cat([local[name] for _, _, local in found]), w.grad)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchange_of_all_tokens_for_every_expert(ranks: int) -> None:
    num_experts, tokens = 12, 5
    draw = torch.Generator().manual_seed(5)
    whole = torch.randn(num_experts, ranks * tokens, HIDDEN, generator=draw, dtype=torch.float64)
    gradient = torch.randn(whole.shape, generator=draw, dtype=torch.float64)

    def body(axis: Axis) -> None:
        mine = whole.narrow(1, axis.index * tokens, tokens).clone().requires_grad_()
        y = ops.exchange(mine, axis, 0, 1)
        here = slice(axis.index * num_experts // ranks, (axis.index + 1) * num_experts // ranks)
        assert y.equal(whole[here]) and ops.exchange(y, axis, -2, -3).equal(mine)
        y.backward(gradient[here])
        assert mine.grad is not None and mine.grad.equal(gradient.narrow(1, axis.index * tokens, tokens))

    run_ranks(ranks, body, "ep")


def test_second_derivatives() -> None:
    tokens = CASES["uneven"]

    def body(axis: Axis) -> None:
        x = rows_of(tokens, HIDDEN)[axis.index].requires_grad_()
        route = ops.route(tokens[axis.index].offsets(), axis, tokens[axis.index].rows)
        y = ops.combine(ops.dispatch(x, route) ** 3, route)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 6 * x.detach())

    run_ranks(2, body, "ep")


def test_one_rank_is_the_identity() -> None:
    axis, x, offsets = TrivialAxis("ep"), torch.randn(5, 2), torch.tensor([2, 4])
    route = ops.route(offsets, axis, 5)
    assert route.offsets is offsets and ops.dispatch(x, route) is x and ops.combine(x, route) is x
    assert ops.exchange(x, axis, 0, 1) is x and ops.local_experts(offsets, axis, 2) is offsets


def test_a_dry_run_spreads_rows_evenly_and_reads_nothing() -> None:
    tally = Tally()
    axis = DryAxis("ep", 4, 1, tally)
    with FakeTensorMode():
        x = torch.empty(10, HIDDEN, requires_grad=True)
        ids = torch.empty(10, dtype=torch.int64)
        route = ops.route(torch.empty(8, dtype=torch.int32), axis, 10)
        assert route.offsets.shape == (2,) and route.offsets.dtype == torch.int32
        w = {"up": torch.empty(2, HIDDEN, INNER), "bias": torch.empty(2, INNER), "down": torch.empty(2, INNER, HIDDEN)}
        y = ops.dispatch(x, route)
        here = ops.local_experts(ops.dispatch(ids, route), axis, 8)
        assert y.shape == x.shape and here.shape == ids.shape
        z = ops.combine(experts(w, y, route.offsets, here), route)
        assert z.shape == x.shape
        z.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert ops.exchange(torch.empty(8, 3, 2), axis, 0, 1).shape == (2, 12, 2)
    moved = 10 * HIDDEN * 4
    assert tally.calls == {("ep", "all-to-all", "forward"): 7}
    assert tally.num_bytes["ep", "all-to-all", "forward"] == 8 * 4 + 10 * 8 + 4 * moved + 8 * 3 * 2 * 4


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda axis: ops.route(torch.tensor([1, 2, 3]), axis, 3), "3 experts do not divide by ep=2"),
        (lambda axis: ops.local_experts(torch.tensor([1]), axis, 3), "3 experts do not divide by ep=2"),
        (lambda axis: ops.route(torch.tensor([1, 4]), axis, 3), r"route of 3 rows: the experts have \[1, 3\] of them"),
        (lambda axis: ops.route(torch.tensor([3, 2]), axis, 3), r"route of 3 rows: the experts have \[3, -1\] of them"),
        (lambda axis: ops.dispatch(torch.zeros(4), ops.route(torch.tensor([1, 2]), axis, 3)), "dispatch of 4 rows by a route of 3"),
        (lambda axis: ops.combine(torch.zeros(3), ops.route(torch.tensor([1, 2]), axis, 3)), "combine of 3 rows by a route that deli"),
        (lambda axis: ops.exchange(torch.zeros(2, 2), axis, 0, -2), "splits and joins the same dim 0"),
        (lambda axis: axis.start_exchange_rows(torch.zeros(3), (1, 1), (1, 1)), "of 3 rows, the counts add up to 2"),
        (lambda axis: axis.start_exchange_rows(torch.zeros(3), (3,), (3,)), "over ep=2 with 1 and 1 counts"),
    ],
)  # fmt: skip
def test_errors_say_what_does_not_fit(ask: Callable[[Axis], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, ask, "ep")
