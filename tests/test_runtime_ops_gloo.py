"""The same ops over real process groups: one run of four gloo ranks that checks them all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plans.mesh import Mesh
from meshwright.runtime import ops
from meshwright.runtime.axes import Axis, ProcessAxis, TrivialAxis, build_axes
from meshwright.tests.ranks import run_ranks
from meshwright.tests.test_runtime_ops import cases, gradient_type, local

MESH = Mesh(dp=2, tp=2, ep=2)
SHAPE = (4, 12, 6)


def check_primitives(axis: Axis, dtype: torch.dtype) -> None:
    """All collectives of one dtype; bool can be moved, not summed."""
    whole = torch.arange(24).reshape(2, 4, 3).remainder(5).to(dtype)
    mine = whole.narrow(1, axis.index * 2, 2)
    assert axis.all_gather(mine, 1).equal(whole)
    assert axis.all_to_all(mine, 0, 1).equal(whole.narrow(0, axis.index, 1))
    if dtype != torch.bool:
        assert axis.all_reduce(whole).equal(whole * 2)
        assert axis.all_reduce(whole + axis.index, "max").equal(whole + 1)
        assert axis.reduce_scatter(whole, 1).equal(mine * 2)


def check_uneven(axis: Axis, dtype: torch.dtype, *trailing: int) -> None:
    """Rank a sends a * b rows to b: rank 0 none, and none to it."""
    counts = [axis.index * other for other in range(axis.size)]
    x = torch.full((sum(counts), *trailing), axis.index).to(dtype)
    expected = torch.arange(axis.size).repeat_interleave(torch.tensor(counts)).to(dtype)
    found = axis.start_exchange_rows(x, counts, counts).wait()
    assert found.dtype == dtype and found.equal(expected.view(-1, *[1] * len(trailing)).expand(-1, *trailing))


def check_experts(axis: Axis) -> None:
    """Rows go to their experts and come back; rank 0 has none. Two experts on each rank."""
    counts = torch.arange(2 * axis.size) * axis.index
    ids = torch.arange(2 * axis.size).repeat_interleave(counts)
    route = ops.route(counts.cumsum(0).to(torch.int32), axis, len(ids))
    x = (ids + 100.0 * axis.index).unsqueeze(1).requires_grad_()
    y = ops.dispatch(x, route)
    here = ops.local_experts(ops.dispatch(ids, route), axis, 2 * axis.size)
    assert here.equal(torch.repeat_interleave(torch.diff(route.offsets, prepend=torch.zeros(1, dtype=torch.int32))))
    z = ops.combine(y * 2, route)
    z.backward(x.detach())
    assert z.equal(2 * x) and x.grad is not None and x.grad.equal(2 * x)


def check_conversions(axis: Axis) -> None:
    """Every conversion and its transpose, on values that are known everywhere."""
    value, gradient = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(2))
    for source, target in cases():
        x = local(value, source, axis.size, axis.index).requires_grad_()
        y = ops.convert(x, axis, f"{source} -> {target}")
        y.backward(local(gradient, gradient_type(target), axis.size, axis.index))
        assert x.grad is not None
        for found, type_, expected in ((y.detach(), target, value), (x.grad, gradient_type(source), gradient)):
            if type_.kind == "P":
                found = axis.all_reduce(found)
            elif type_.kind == "S":
                expected = local(expected, type_, axis.size, axis.index)
            torch.testing.assert_close(found, expected, msg=f"{source} -> {target}")


def stage(axis: Axis, whole: dict[str, Tensor], ids: Tensor, fused: bool) -> dict[str, Tensor]:
    """A sequence-parallel block with sharded vocabulary; the loss, and gradients of this rank's shards."""
    w = {n: local(whole[n], ops.parse_conversion(f"S({d}) -> I")[0], axis.size, axis.index).requires_grad_()
         for n, d in (("embed", 0), ("up", 0), ("gate", 0), ("bias", 0), ("down", 1))}  # fmt: skip
    hidden = ops.convert(ops.vocab_embedding(ids, w["embed"], axis, 3), axis, "P -> S(1)")
    if fused:
        up, gate = ops.column_linear(hidden, axis, (w["up"], w["gate"]), (w["bias"], None), "S(1) -> R")
    else:
        full = ops.convert(hidden, axis, "S(1) -> R")
        up, gate = ops.linear(full, w["up"], w["bias"]), ops.linear(full, w["gate"])
    hidden = hidden + ops.convert(ops.linear(up * gate.sigmoid(), w["down"]), axis, "P -> S(1)")
    (logits,) = ops.column_linear(hidden, axis, (w["embed"],), (None,), "S(1) -> R")
    loss = ops.token_mean(ops.vocab_cross_entropy_sum(logits, ids, axis), torch.tensor(16.0))
    loss.backward()
    return {"loss": loss.detach(), **{n: x.grad for n, x in w.items() if x.grad is not None}}


def check_stage(axis: Axis) -> None:
    """Sharded over two ranks against one rank; fused against plain."""
    draw = torch.Generator().manual_seed(4)
    shapes = {"embed": (20, 8), "up": (12, 8), "gate": (12, 8), "bias": (12,), "down": (8, 12)}
    whole = {n: torch.randn(s, generator=draw) for n, s in shapes.items()}
    ids = torch.randint(20, (2, 8), generator=draw)
    single = stage(TrivialAxis("tp"), whole, ids, False)
    for fused in (False, True):
        sharded = stage(axis, whole, ids, fused)
        torch.testing.assert_close(sharded.pop("loss"), single["loss"])
        assert len(sharded) == len(shapes)
        for name, grad in sharded.items():
            type_ = ops.parse_conversion(f"S({1 if name == 'down' else 0}) -> I")[0]
            torch.testing.assert_close(grad, local(single[name], type_, axis.size, axis.index))


def check_rank() -> dict[str, tuple[int, ...]]:
    """Everything, on one of the ranks; the ranks of its groups."""
    dist.init_process_group("gloo")
    axes = build_axes(MESH, dist.get_rank())
    groups = {n: a for n, a in axes.items() if isinstance(a, ProcessAxis)}
    assert groups["ep"].group is groups["dp"].group
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        check_primitives(axes["tp"], dtype)
        check_uneven(axes["ep"], dtype, 3)
    check_primitives(axes["dp"], torch.bool)
    check_uneven(axes["ep"], torch.bool, 2)
    wide, half = (build_axes(Mesh(dp=4, ep=ep), dist.get_rank()) for ep in (4, 2))
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        check_uneven(wide["ep"], dtype)
        check_uneven(wide["ep"], dtype, 0)
    check_experts(wide["ep"])
    check_experts(half["ep"])
    sums = half["edp"].all_reduce(torch.tensor([float(dist.get_rank())]))
    assert sums.item() == 2 + 2 * (dist.get_rank() % 2) and wide["edp"].size == 1
    check_conversions(axes["dp"])
    check_stage(axes["tp"])
    with pytest.raises(ValueError, match="mesh tp=8 has 8 ranks, but 4 processes were started"):
        build_axes(Mesh(tp=8), dist.get_rank())
    return {n: a.ranks for n, a in (*groups.items(), ("replicas", half["edp"])) if isinstance(a, ProcessAxis)}


def test_four_gloo_ranks() -> None:
    groups = run_ranks(4, check_rank, timeout=60)
    assert groups[3] == {"dp": (1, 3), "tp": (2, 3), "ep": (1, 3), "replicas": (1, 3)}
