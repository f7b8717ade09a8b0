"""Seconds of an op from curves that were measured on the machine (`efficiency.ops` of a hardware file), in place of the roofline.

    measured_as    the name under which an op is looked up: its own, or that of the op in LIKE that it is about as fast as
    measured_s     (forward, backward) seconds of so much work

Work is what compiler.flops counts: operations of products and attention, bytes of all others. Curves are of float32: products and
attention in another dtype are faster by the ratio of peaks, and other ops move fewer bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from meshwright.compiler.graph import Op, Value
from meshwright.compiler.hardware import Hardware, read_seconds
from meshwright.compiler.views import CUTS, VIEWS

BROADCAST = "broadcast"
"""A product with an operand that is repeated, as a norm's weight: its gradient is summed."""
VIEW = "unsqueeze"

_LIKE = {
    "linear": "addmm mm bmm matmul mv addmv dot baddbmm einsum conv1d conv2d conv3d grouped_mm _grouped_mm grouped_mm_fallback",
    "scaled_dot_product_attention": "",
    "add": "sub rsub neg to _to_copy clone contiguous copy where masked_fill clamp clamp_min maximum minimum relu abs dropout "
           "native_dropout",
    "mul": "div square pow leaky_relu",
    BROADCAST: "",
    "silu": "sigmoid exp softplus logsigmoid log log1p log_sigmoid elu mish hardswish sin cos reciprocal rsqrt sqrt",
    "gelu": "erf",
    "tanh": "",
    "mean": "sum amax amin max min prod any all var std argmax cumsum logsumexp norm linalg_vector_norm",
    "softmax": "log_softmax _softmax _log_softmax",
    "layer_norm": "native_layer_norm rms_norm group_norm native_group_norm batch_norm",
    "cat": "stack repeat roll flip pad constant_pad_nd repeat_interleave",
    "slice": f"unfold diagonal {' '.join(sorted(CUTS))}",
    "embedding": "index gather index_select index_add scatter scatter_add index_put take_along_dim",
    "cross_entropy_sum": "",
}  # fmt: skip
LIKE: Mapping[str, str] = {
    **dict.fromkeys(VIEWS, VIEW),
    **{name: like for like, names in _LIKE.items() for name in (like, *names.split())},
}
"""By short name of an op: the measured op that it is taken for. What is not listed is taken for an addition."""
BY_FLOPS = frozenset(("linear", "scaled_dot_product_attention"))


def measured_as(name: str, op: Op, values: Mapping[str, Value]) -> str:
    """The measured op that an op of this short name is taken for."""
    like = LIKE.get(name, "add")
    if like == "mul" and any(prod(values[n].shape) < prod(op.results[0].shape) for n in op.operands):
        return BROADCAST
    return like


def measured_s(like: str, work: tuple[float, float], dtype: str, hardware: Hardware) -> tuple[float, float] | None:
    """(forward, backward) seconds of (forward, backward) work; None where the hardware has no such measurements."""
    efficiency = hardware.device.efficiency
    times = efficiency.ops.get(like)
    if times is None:
        return None
    peaks, program = hardware.device.peak_flops, efficiency.program
    faster = peaks["float32"] / peaks.get(dtype, peaks["float32"]) if like in BY_FLOPS else 1.0
    forward = read_seconds(times.forward, work[0]) * faster * program.forward + program.forward_op_s
    if not work[1] or not times.backward:
        return forward, 0.0
    return forward, read_seconds(times.backward, work[1]) * faster * program.backward + program.backward_op_s
