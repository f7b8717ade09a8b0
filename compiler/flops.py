"""What one op costs on one device: floating-point operations, bytes, and seconds by the roofline.

    work             op_cost: (flops, bytes) of the forward. Matmuls, attention and convolutions count two operations per
                     multiply-add; every other op counts only the bytes that it reads and writes; views cost nothing
    backward work    backward_cost: a matmul runs once more for each operand that needs a gradient; attention runs 2.5 times its
                     forward, since it recomputes the scores (Dao, arXiv 2307.08691, section 3.1); a slice writes zeros for all that it
                     was cut from, an expanded tensor sums over its copies, other views do nothing; other ops move the gradients
                     of their results and operands, and read what they saved
    seconds          op_time_s: as it was measured, where the hardware says (compiler.measured_ops); else
                     max(flops / reached flops per s, bytes / reached bytes per s), and the device's overhead per op
                     (Williams et al., Roofline, CACM 52(4), 2009)

`fraction` is the part of the op that one rank computes under its layout (1/tp when it is sharded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from meshwright.compiler.graph import Op, Ref, Value
from meshwright.compiler.hardware import Hardware
from meshwright.compiler.measured_ops import measured_as, measured_s
from meshwright.compiler.views import CUTS, VIEWS

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element."""

ATTENTION_BACKWARD = 2.5

Values = Mapping[str, Value]
Flops = Callable[[Op, tuple[Value, ...]], float]


def value_bytes(value: Value) -> int:
    """Bytes of the whole tensor."""
    return prod(value.shape) * ITEM_BYTES.get(value.dtype, 4)


def short_name(op: Op) -> str:
    """`linear` of aten.linear.default."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else op.target


def contraction(operand: int, dim: int) -> Flops:
    """2 x elements of the result x the contracted dim, which is `dim` of an operand."""

    def flops(op: Op, operands: tuple[Value, ...]) -> float:
        shape = operands[operand].shape
        return 2.0 * prod(op.results[0].shape) * (shape[dim] if shape else 1)

    return flops


def attention_flops(op: Op, operands: tuple[Value, ...]) -> float:
    """q (.. s d), k (.. t d), v (.. t e): scores and their product with v; a causal mask leaves half."""
    query, key, value = (v.shape for v in operands[:3])
    full = 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return full / 2 if is_causal(op) else full


def is_causal(op: Op) -> bool:
    """The flag of scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)."""
    return bool(dict(op.kwargs).get("is_causal", op.args[5] if len(op.args) > 5 else False))


def convolution_flops(op: Op, operands: tuple[Value, ...]) -> float:
    """2 x elements of the result x the weight's elements per output channel."""
    return 2.0 * prod(op.results[0].shape) * prod(operands[1].shape[1:])


def einsum_flops(op: Op, operands: tuple[Value, ...]) -> float:
    """2 x the product of all letters' sizes, as if done in one go; ellipses count as the result's elements."""
    equation = str(op.args[0]).replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if "." in equation or len(terms) != len(operands):
        return 2.0 * prod(op.results[0].shape) * max(v.shape[-1] for v in operands if v.shape)
    sizes = {letter: n for term, v in zip(terms, operands, strict=True) for letter, n in zip(term, v.shape, strict=True)}
    return 2.0 * prod(sizes.values())


MATMULS: Mapping[str, tuple[Flops, tuple[int, ...]]] = {
    "linear": (contraction(0, -1), (0, 1)),
    "addmm": (contraction(1, -1), (1, 2)),
    "baddbmm": (contraction(1, -1), (1, 2)),
    "addmv": (contraction(1, -1), (1, 2)),
    "mm": (contraction(0, -1), (0, 1)),
    "bmm": (contraction(0, -1), (0, 1)),
    "mv": (contraction(0, -1), (0, 1)),
    "dot": (contraction(0, -1), (0, 1)),
    "matmul": (contraction(0, -1), (0, 1)),
    "grouped_mm": (contraction(0, -1), (0, 1)),
    "_grouped_mm": (contraction(0, -1), (0, 1)),
    "grouped_mm_fallback": (contraction(0, -1), (0, 1)),
    "einsum": (einsum_flops, (0, 1)),
    "conv1d": (convolution_flops, (0, 1)),
    "conv2d": (convolution_flops, (0, 1)),
    "conv3d": (convolution_flops, (0, 1)),
}
"""By short name: operations, and the operands whose gradients are a matmul each."""

LOOKUPS: Mapping[str, int] = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0}
"""Ops that read only some rows of an operand: as many bytes as their result has."""


def distinct(op: Op, values: Values) -> tuple[Value, ...]:
    """Operands that are tensors of the graph, each once."""
    return tuple(values[name] for name in dict.fromkeys(op.operands))


def positional(op: Op, values: Values) -> tuple[Value, ...]:
    """Operands in order, repeats included."""
    return tuple(values[name] for name in op.operands)


def read_bytes(op: Op, values: Values) -> int:
    """Bytes that the forward reads."""
    source = LOOKUPS.get(short_name(op))
    looked_up = op.args[source] if source is not None and source < len(op.args) else None
    skipped = looked_up.name if isinstance(looked_up, Ref) else None
    read = sum(value_bytes(v) for v in distinct(op, values) if v.name != skipped)
    return read + (value_bytes(op.results[0]) if skipped is not None else 0)


def op_cost(op: Op, values: Values, fraction: float = 1.0) -> tuple[float, float]:
    """(flops, bytes) of one rank's part of the forward."""
    name = short_name(op)
    if name in VIEWS:
        return 0.0, 0.0
    moved = read_bytes(op, values) + sum(value_bytes(r) for r in op.results)
    return matmul_flops(op, values) * fraction, moved * fraction


def matmul_flops(op: Op, values: Values) -> float:
    """Operations of a matmul, attention or convolution; 0 of any other op."""
    name, operands = short_name(op), positional(op, values)
    if name == "scaled_dot_product_attention":
        return attention_flops(op, operands)
    return MATMULS[name][0](op, operands) if name in MATMULS else 0.0


def backward_cost(op: Op, values: Values, fraction: float = 1.0) -> tuple[float, float]:
    """(flops, bytes) of one rank's part of the backward; nothing when no operand needs a gradient."""
    name, operands = short_name(op), positional(op, values)
    wanted = tuple(v for v in distinct(op, values) if v.requires_grad)
    results = sum(value_bytes(r) for r in op.results)
    if name in CUTS and wanted:
        return 0.0, (2 * results + value_bytes(wanted[0])) * fraction
    if name in VIEWS or not wanted:
        return 0.0, 0.0
    if name == "scaled_dot_product_attention":
        moved = 2 * results + 2 * sum(value_bytes(v) for v in operands)
        return ATTENTION_BACKWARD * matmul_flops(op, values) * fraction, moved * fraction
    if name in MATMULS:
        flops, factors = MATMULS[name]
        runs = sum(operands[i].requires_grad for i in factors if i < len(operands))
        moved = runs * (results + sum(value_bytes(operands[i]) for i in factors if i < len(operands)))
        return runs * flops(op, operands) * fraction, moved * fraction
    if name in LOOKUPS:
        return 0.0, (2 * results + value_bytes(wanted[0])) * fraction
    return 0.0, (results + 2 * sum(value_bytes(v) for v in wanted)) * fraction


def op_time_s(op: Op, values: Values, fraction: float, hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) seconds of one rank's part of an op."""
    dtype = op.results[0].dtype
    costs = op_cost(op, values, fraction), backward_cost(op, values, fraction)
    name = short_name(op)
    measured = measured_s(measured_as(name, op, values), (amount(costs[0]), amount(costs[1])), dtype, hardware)
    return measured or (roofline_s(costs[0], dtype, hardware), roofline_s(costs[1], dtype, hardware))


def amount(cost: tuple[float, float]) -> float:
    """The work of (flops, bytes) by which an op is measured: its flops if it has any."""
    return cost[0] or cost[1]


def roofline_s(cost: tuple[float, float], dtype: str, hardware: Hardware) -> float:
    """Seconds of (flops, bytes) on one device; nothing takes no time."""
    flops, moved = cost
    if not flops and not moved:
        return 0.0
    device = hardware.device
    return max(device.matmul_s(flops, dtype), device.memory_s(moved)) + device.op_overhead_s
