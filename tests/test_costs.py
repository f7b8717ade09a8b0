"""Hardware files, collective formulas and op costs."""

from __future__ import annotations

from dataclasses import replace
from math import log2
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.compiler import costs
from meshwright.compiler.flops import backward_cost, op_cost, op_time_s
from meshwright.compiler.graph import Op, Ref, Value
from meshwright.compiler.hardware import Link, OpTimes, ProgramTimes, known_hardware, leaves_block, load_hardware, read_seconds
from meshwright.plans.errors import InputError
from meshwright.plans.layout import CONVERSIONS, I, P, R, Type, shard
from meshwright.plans.mesh import Mesh

LINK = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9, memory_bytes_per_s=1e11)
BYTES = 1 << 24


# hardware


def test_every_hardware_file_loads_under_its_name_with_plausible_figures() -> None:
    assert set(known_hardware()) == {
        "a10", "a100-40gb", "a100-80gb", "cpu", "h100", "h200", "mi300x", "rtx4090", "v100-32gb",
    }  # fmt: skip
    for name in known_hardware():
        hardware = load_hardware(name)
        assert hardware.name == hardware.device.name == name
        assert 2**34 < hardware.device.memory_bytes < 2**40
        bandwidths = [level.bandwidth_bytes_per_s for level in hardware.topology.levels]
        assert bandwidths == sorted(bandwidths, reverse=True)
        assert hardware.device.bandwidth_bytes_per_s > bandwidths[0]


def test_figures_are_those_of_the_data_sheets() -> None:
    h100 = load_hardware("h100")
    assert h100.device.peak_flops["bfloat16"] == 989e12
    assert h100.device.bandwidth_bytes_per_s == 3.35e12
    assert h100.topology.ranks_per_node == 8
    assert h100.device.flops_per_s("float64") == h100.device.flops_per_s("float32")
    assert load_hardware("a100-80gb").device.memory_bytes == 85198045184


def test_an_axis_that_stays_in_its_node_uses_the_inner_link() -> None:
    h100 = load_hardware("h100")
    mesh = Mesh(pp=2, dp=4, tp=8)
    assert h100.link_for("tp", mesh).name == "nvlink"
    assert h100.link_for("dp", mesh) == Link(1.4e-5, 50e9, 0.8 * 3.35e12, name="infiniband")
    assert h100.link_for("tp", Mesh(tp=16)).bandwidth_bytes_per_s == 400e9, "eight members in a node have eight ports"
    assert h100.link_for("pp", Mesh(pp=16)).bandwidth_bytes_per_s == 50e9, "a message between neighbours has one"
    assert h100.link_for("dp", Mesh(dp=4, tp=4)).bandwidth_bytes_per_s == 100e9
    assert h100.link_for("ep", Mesh(dp=4, tp=8, ep=2)).name == "infiniband"


@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=2, tp=3), Mesh(dp=6, cp=2), Mesh(tp=5), Mesh(pp=3, tp=4)], ids=str)
def test_leaving_a_node_equals_listing_every_group(mesh: Mesh) -> None:
    for axis in ("pp", "dp", "cp", "tp"):
        stride = max(b - a for group in mesh.groups(axis) for a, b in zip(group, (*group[1:], group[-1] + 1), strict=True))
        for block in (1, 2, 4, 8, 64):
            leaves = any(len({rank // block for rank in group}) > 1 for group in mesh.groups(axis))
            assert leaves_block(mesh.size(axis), stride, block, mesh.world_size) == leaves


def test_a_users_file_is_read_and_its_mistakes_are_named(tmp_path: Path) -> None:
    good = (Path(costs.__file__).parent / "hardware" / "a10.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(good.replace("name: a10", "name: mine"))
    assert load_hardware(str(path)).name == "mine"
    for old, new, message in (
        ("memory_bytes: 24000000000", "memory_bytes: -1", "memory_bytes"),
        ("matmul: 0.8", "matmul: 8", "efficiency.matmul"),
        ("float32: ", "float99: ", "no float32"),
        ("ranks: null", "ranks: 2", "last of levels"),
        ("op_overhead_s", "op_overhead", "op_overhead"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(InputError, match=message):
            load_hardware(str(path))
    with pytest.raises(InputError, match="found 'b100', expected one of a10, a100-40gb"):
        load_hardware("b100")


# collectives


def test_formulas_are_the_papers() -> None:
    a, b, n = LINK.latency_s, 1 / LINK.bandwidth_bytes_per_s, BYTES
    for p in (2, 4, 8, 64):
        assert costs.all_reduce_ring_s(n, p, LINK) == pytest.approx(2 * (p - 1) * a + 2 * n * (p - 1) / p * b)
        assert costs.all_reduce_halving_doubling_s(n, p, LINK) == pytest.approx(2 * log2(p) * a + 2 * n * (p - 1) / p * b)
        assert costs.all_reduce_doubling_s(n, p, LINK) == pytest.approx(log2(p) * (a + n * b))
        assert costs.all_reduce_tree_s(n, p, LINK) == pytest.approx(2 * log2(p) * a + 2 * n * b)
        assert costs.all_gather_ring_s(n, p, LINK) == pytest.approx((p - 1) * a + n * (p - 1) / p * b)
        assert costs.all_gather_s(n, p, LINK) == pytest.approx(log2(p) * a + n * (p - 1) / p * b)
        assert costs.reduce_scatter_s(n, p, LINK) == pytest.approx(log2(p) * a + n * (p - 1) / p * b)
        assert costs.all_to_all_pairwise_s(n, p, LINK) == pytest.approx((p - 1) * a + n * (p - 1) / p * b)
        assert costs.broadcast_binomial_s(n, p, LINK) == pytest.approx(log2(p) * (a + n * b))
    odd = 5
    assert costs.all_reduce_halving_doubling_s(n, odd, LINK) == pytest.approx(6 * a + (2 * 4 / 5 + 2) * n * b)
    assert costs.all_reduce_s(n, odd, LINK) <= costs.all_reduce_ring_s(n, odd, LINK)
    assert costs.point_to_point_s(n, LINK) == pytest.approx(a + n * b)


def test_reduction_is_charged_where_a_link_has_it() -> None:
    slow = Link(1e-5, 1e9, reduce_bytes_per_s=2e9)
    share = BYTES * 3 / 4
    for formula in (costs.all_reduce_ring_s, costs.all_reduce_halving_doubling_s, costs.reduce_scatter_halving_s):
        assert formula(BYTES, 4, slow) - formula(BYTES, 4, LINK) == pytest.approx(share / 2e9)


@pytest.mark.parametrize(
    "cost", [costs.all_reduce_s, costs.all_gather_s, costs.reduce_scatter_s, costs.all_to_all_s, costs.broadcast_s]
)
def test_costs_grow_with_bytes_and_are_nothing_on_one_rank(cost: costs.Cost) -> None:
    assert cost(BYTES, 1, LINK) == 0
    for ranks in range(2, 20):
        times = [cost(n, ranks, LINK) for n in (0, 10, 10**4, 10**8)]
        assert times == sorted(times) and times[0] > 0
    with pytest.raises(ValueError, match="1 rank or more"):
        cost(BYTES, 0, LINK)


def test_an_all_reduce_costs_as_much_as_its_two_halves() -> None:
    for ranks in (2, 4, 8):
        halves = costs.reduce_scatter_s(BYTES, ranks, LINK) + costs.all_gather_s(BYTES, ranks, LINK)
        assert costs.all_reduce_s(BYTES, ranks, LINK) == pytest.approx(halves)


def test_conversions_cost_what_their_collectives_cost() -> None:
    all_reduce, ranks = costs.all_reduce_s(BYTES, 4, LINK), 4
    assert costs.conversion_s(I, R, BYTES, ranks, LINK, True) == (0, all_reduce)
    assert costs.conversion_s(I, R, BYTES, ranks, LINK, False) == (0, 0)
    assert costs.conversion_s(P, I, BYTES, ranks, LINK, True) == (all_reduce, 0)
    gather, scatter = costs.all_gather_s(BYTES, 4, LINK), costs.reduce_scatter_s(BYTES, 4, LINK)
    assert costs.conversion_s(shard(1), R, BYTES, ranks, LINK, True) == (gather, scatter)
    assert costs.conversion_s(P, shard(1), BYTES, ranks, LINK, True) == (scatter, gather)
    exchange = costs.all_to_all_s(BYTES / 4, 4, LINK)
    assert costs.conversion_s(shard(0), shard(1), BYTES, ranks, LINK, True) == (exchange, exchange)
    sliced, padded = costs.conversion_s(R, shard(0), BYTES, ranks, LINK, True)
    assert sliced == pytest.approx(2 * BYTES / 4 / 1e11) and padded == pytest.approx(BYTES * 1.25 / 1e11)


def test_every_conversion_has_a_cost_and_none_costs_on_one_rank() -> None:
    for source, target in CONVERSIONS:
        pair = (Type("S", 0) if source == "S" else Type(source), Type("S", 1) if target == "S" else Type(target))
        assert all(seconds >= 0 for seconds in costs.conversion_s(*pair, BYTES, 8, LINK, True))
        assert costs.conversion_s(*pair, BYTES, 1, LINK, True) == (0, 0)


# ops


def op_of(
    target: str, operands: dict[str, tuple[int, ...]], result: tuple[int, ...], *rest: object, **kwargs: object
) -> tuple[Op, dict[str, Value]]:
    """An op on float32 operands that all need gradients, and its values."""
    values = {name: Value(name, shape, "float32", True) for name, shape in operands.items()}
    out = Value("out", result, "float32", True)
    return Op(target, (*map(Ref, operands), *rest), tuple(kwargs.items()), (out,)), {**values, "out": out}


MATMULS = {
    "linear": ("aten.linear.default", {"x": (2, 8, 16), "w": (32, 16)}, (2, 8, 32), torch.nn.functional.linear),
    "addmm": ("aten.addmm.default", {"b": (32,), "x": (8, 16), "w": (16, 32)}, (8, 32), torch.addmm),
    "bmm": ("aten.bmm.default", {"x": (4, 8, 16), "w": (4, 16, 32)}, (4, 8, 32), torch.bmm),
    "matmul": ("aten.matmul.default", {"x": (2, 4, 8, 16), "w": (2, 4, 16, 8)}, (2, 4, 8, 8), torch.matmul),
    "conv1d": ("aten.conv1d.default", {"x": (2, 8, 10), "w": (6, 8, 3)}, (2, 6, 8), torch.conv1d),
    "conv2d": ("aten.conv2d.default", {"x": (2, 8, 6, 6), "w": (6, 8, 3, 3)}, (2, 6, 4, 4), torch.conv2d),
}


@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_count_as_torch_counts_them(name: str) -> None:
    target, operands, result, function = MATMULS[name]
    op, values = op_of(target, operands, result)
    tensors = [torch.randn(shape, requires_grad=True) for shape in operands.values()]
    with FlopCounterMode(display=False) as forward:
        out = function(*tensors)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert tuple(out.shape) == result
    assert op_cost(op, values)[0] == forward.get_total_flops()
    assert backward_cost(op, values)[0] == backward.get_total_flops() == 2 * forward.get_total_flops()


def test_a_frozen_operand_halves_the_backward() -> None:
    op, values = op_of(*MATMULS["linear"][:3])
    frozen = {**values, "w": Value("w", (32, 16), "float32", False)}
    assert backward_cost(op, frozen)[0] == op_cost(op, values)[0]
    nothing = {name: Value(name, v.shape, v.dtype, False) for name, v in values.items()}
    assert backward_cost(op, nothing) == (0, 0)


def test_causal_attention_is_half_and_its_backward_recomputes() -> None:
    shapes = {"q": (1, 4, 16, 8), "k": (1, 4, 16, 8), "v": (1, 4, 16, 8)}
    target = "aten.scaled_dot_product_attention.default"
    full, values = op_of(target, shapes, (1, 4, 16, 8))
    by_keyword, _ = op_of(target, shapes, (1, 4, 16, 8), is_causal=True)
    by_place, _ = op_of(target, shapes, (1, 4, 16, 8), None, 0.0, True)
    flops = 2 * 4 * 16 * 16 * (8 + 8)
    assert op_cost(full, values)[0] == flops
    assert op_cost(by_keyword, values)[0] == op_cost(by_place, values)[0] == flops / 2
    assert backward_cost(full, values)[0] == 2.5 * flops


def test_other_ops_cost_bytes_and_views_nothing() -> None:
    add, values = op_of("aten.add.Tensor", {"x": (4, 8), "y": (8,)}, (4, 8))
    assert op_cost(add, values) == (0, 4 * (32 + 8 + 32))
    assert op_cost(add, values, 0.5) == (0, 2 * (32 + 8 + 32))
    twice = Op("aten.mul.Tensor", (Ref("x"), Ref("x")), (), (values["out"],))
    assert op_cost(twice, values) == (0, 4 * 64), "an operand that is read twice is read once"
    view, values = op_of("aten.view.default", {"x": (4, 8)}, (32,), [32])
    assert op_cost(view, values) == backward_cost(view, values) == (0, 0)
    lookup, values = op_of("aten.embedding.default", {"w": (50000, 8), "ids": (3,)}, (3, 8))
    assert op_cost(lookup, values)[1] == 4 * (3 + 24 + 24), "an embedding reads its rows, not its table"


def test_einsum_counts_every_letter_once() -> None:
    values = {"x": Value("x", (2, 8, 16), "float32", True), "y": Value("y", (2, 16, 4), "float32", True)}
    out = Value("out", (2, 8, 4), "float32", True)
    op = Op("aten.einsum.default", ("bik,bkj->bij", [Ref("x"), Ref("y")]), (), (out,))
    assert op_cost(op, {**values, "out": out})[0] == 2 * 2 * 8 * 16 * 4


def test_seconds_follow_the_roofline() -> None:
    h100 = load_hardware("h100")
    large, values = op_of("aten.linear.default", {"x": (8192, 8192), "w": (8192, 8192)}, (8192, 8192))
    forward, backward = op_time_s(large, values, 1.0, h100)
    assert forward == pytest.approx(2 * 8192**3 / (67e12 * 0.8), rel=1e-3)
    assert backward == pytest.approx(2 * forward, rel=1e-3)
    assert op_time_s(large, values, 0.5, h100)[0] == pytest.approx(forward / 2, rel=1e-2)
    small, values = op_of("aten.add.Tensor", {"x": (8,), "y": (8,)}, (8,))
    assert op_time_s(small, values, 1.0, h100)[0] == pytest.approx(h100.device.op_overhead_s, rel=1e-3)


def test_measured_ops_stand_for_the_roofline() -> None:
    cpu = load_hardware("cpu")
    times = OpTimes(((1e3, 1e-5), (1e6, 1e-3)), ((1e3, 2e-5), (1e6, 4e-3)))
    efficiency = replace(cpu.device.efficiency, ops={"linear": times, "broadcast": times}, program=ProgramTimes(1.5, 2.0))
    here = replace(cpu, device=replace(cpu.device, efficiency=efficiency, peak_flops={"float32": 1e11, "bfloat16": 2e11}))
    linear, values = op_of("aten.linear.default", {"x": (50, 100), "w": (100, 100)}, (50, 100))
    assert op_time_s(linear, values, 1.0, here) == pytest.approx((1.5e-3, 2 * read_seconds(times.backward, 2e6)))
    assert op_time_s(linear, values, 1e-3, here)[0] == pytest.approx(1.5e-5)
    half = {**values, "out": replace(values["out"], dtype="bfloat16")}
    assert op_time_s(replace(linear, results=(half["out"],)), half, 1.0, here)[0] == pytest.approx(0.75e-3)
    scaled, values = op_of("aten.mul.Tensor", {"x": (100, 100), "w": (100,)}, (100, 100))
    assert op_time_s(scaled, values, 1.0, here)[0] == pytest.approx(1.5 * read_seconds(times.forward, 4 * 20100))
    plain, values = op_of("aten.mul.Tensor", {"x": (100, 100), "y": (100, 100)}, (100, 100))
    assert op_time_s(plain, values, 1.0, here) == op_time_s(plain, values, 1.0, cpu), "not measured: the roofline"


def test_what_is_cut_from_a_tensor_costs_zeros_in_backward() -> None:
    cut, values = op_of("aten.slice.Tensor", {"x": (100, 8)}, (50, 8), 0, 0, 50)
    assert op_cost(cut, values) == (0, 0)
    assert backward_cost(cut, values) == (0, 4 * (2 * 400 + 800))
