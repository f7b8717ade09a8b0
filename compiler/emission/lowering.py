"""How one op is written in a program: its expression on local shapes, under its strategy.

    Site        everything the expression depends on: the op, its strategy, the text of its operands, local result shapes
    expression  the Python text; ops without an entry in LOWERINGS are called as torch.ops say, arguments unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch

from meshwright.compiler.graph import Op, Ref, aten_packet
from meshwright.compiler.rules.factors import Call, Strategy
from meshwright.compiler.rules.shapes import slice_window

FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "scalar_tensor", "tensor", "linspace")
INFIX = {"aten.add.Tensor": "+", "aten.sub.Tensor": "-", "aten.mul.Tensor": "*", "aten.div.Tensor": "/"}
RANDOM = ("bernoulli", "rand", "randn", "rand_like", "randn_like", "multinomial", "normal", "uniform", "exponential", "feature_dropout")


@dataclass(frozen=True)
class Site:
    """One op about to be written. `texts` gives the text of each operand by value name; `seed` is the text of its seed."""

    call: Call
    strategy: Strategy
    texts: Mapping[str, str]
    local_shapes: tuple[tuple[int, ...], ...]
    axis: str
    ranks: int
    seed: str

    @property
    def op(self) -> Op:
        return self.call.op

    def operand_shape(self, slot: int) -> tuple[int, ...]:
        """Shape of an operand as this rank has it."""
        type_, shape = self.strategy.operands[slot], self.call.operands[slot].shape
        return tuple(n // self.ranks if type_.kind == "S" and i == type_.dim else n for i, n in enumerate(shape))

    def argument(self, index: int, name: str, default: object = None) -> str:
        """Text of an argument by position or keyword."""
        return self.render(self.call.argument(index, name, default))

    def render(self, tree: object) -> str:
        """Python text of a nested argument."""
        if isinstance(tree, Ref):
            return self.texts[tree.name]
        if isinstance(tree, list):
            return "[" + ", ".join(map(self.render, tree)) + "]"
        if isinstance(tree, tuple):
            return "(" + ", ".join(map(self.render, tree)) + ("," if len(tree) == 1 else "") + ")"
        return literal(tree)


def literal(value: object) -> str:
    """Python text of a literal argument. ValueError for what has no text."""
    if isinstance(value, float) and not isfinite(value):
        return f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    raise ValueError(f"an argument of type {type(value).__name__} cannot be written: {value!r}")


def numbers(values: tuple[int, ...]) -> str:
    """A size as arguments."""
    return ", ".join(map(str, values)) or "()"


def reshape(site: Site) -> str:
    return f"{site.argument(0, 'self')}.reshape({numbers(site.local_shapes[0])})"


def expand(site: Site) -> str:
    return f"{site.argument(0, 'self')}.expand({numbers(site.local_shapes[0])})"


def repeat(site: Site) -> str:
    """Counts on local shapes: a dim of one entry, or a new one, is copied as often as this rank's result has it."""
    local, own = site.local_shapes[0], site.operand_shape(0)
    own = (1,) * (len(local) - len(own)) + own
    return f"{site.argument(0, 'self')}.repeat({numbers(tuple(n // max(m, 1) for n, m in zip(local, own, strict=True)))})"


def repeat_interleave(site: Site) -> str:
    if site.call.argument(2, "dim") is None:
        return f"{site.argument(0, 'self')}.repeat_interleave({site.argument(1, 'repeats')})"
    dim = int(str(site.call.argument(2, "dim")))
    count = site.local_shapes[0][dim] // max(site.operand_shape(0)[dim], 1)
    return f"{site.argument(0, 'self')}.repeat_interleave({count}, {dim})"


def split(site: Site) -> str:
    dim = int(site.call.argument(2, "dim", 0))  # type: ignore[call-overload]
    sizes = [shape[dim] for shape in site.local_shapes]
    return f"torch.split({site.argument(0, 'self')}, {sizes}, {dim})"


def local_window(site: Site) -> tuple[int, int, int] | None:
    """(dim, start, stop) of a slice along a sharded dim, on this rank's part; None where the dim is whole, or sliced with a step."""
    dim, start, stop, step = slice_window(site.call)
    type_ = site.strategy.operands[0]
    if step != 1 or type_.kind != "S" or type_.dim != dim:
        return None
    return dim, start // site.ranks, stop // site.ranks


def slice_dim(site: Site) -> str:
    window = local_window(site)
    if window is None:
        return plain(site)
    dim, start, stop = window
    return f"aten.slice.Tensor({site.argument(0, 'self')}, {dim}, {start}, {stop})"


def slice_scatter(site: Site) -> str:
    window = local_window(site)
    if window is None:
        return plain(site)
    dim, start, stop = window
    return f"aten.slice_scatter.default({site.argument(0, 'self')}, {site.argument(1, 'src')}, {dim}, {start}, {stop})"


def dropout(site: Site) -> str:
    return f"ops.dropout({site.argument(0, 'input')}, {site.argument(1, 'p')}, {site.seed})"


def attention(site: Site) -> str:
    parts = [site.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    if site.strategy.lowering == "own_heads":
        heads = site.call.operands[0].shape[-3]
        parts[1:] = [f"ops.own_heads({part}, {site.axis}, {heads})" for part in parts[1:]]
    probability = site.call.argument(4, "dropout_p", 0.0)
    options = {
        "mask": site.argument(3, "attn_mask"),
        "is_causal": site.argument(5, "is_causal", False),
        "scale": site.argument(6, "scale"),
        "enable_gqa": site.argument(7, "enable_gqa", False) if site.strategy.lowering != "own_heads" else "False",
    }
    written = [f"{k}={v}" for k, v in options.items() if v not in ("None", "False")]
    if probability:
        written += [f"dropout_p={literal(probability)}", f"seed={site.seed}"]
    return f"ops.sdpa({', '.join(parts + written)})"


def embedding(site: Site) -> str:
    weight, ids = site.argument(0, "weight"), site.argument(1, "indices")
    padding = site.call.argument(2, "padding_idx", -1)
    if site.call.argument(3, "scale_grad_by_freq", False) or site.call.argument(4, "sparse", False):
        return plain(site)
    if site.strategy.lowering == "vocabulary":
        return f"ops.vocab_embedding({ids}, {weight}, {site.axis}, padding_idx={padding})"
    return f"ops.embedding({ids}, {weight}, padding_idx={padding})"


def cross_entropy(site: Site) -> str:
    logits, labels = site.argument(0, "logits"), site.argument(1, "labels")
    tail = f"{site.argument(2, 'ignore_index', -100)}, {site.argument(3, 'label_smoothing', 0.0)}"
    if site.strategy.lowering == "vocabulary":
        return f"ops.vocab_cross_entropy_sum({logits}, {labels}, {site.axis}, {tail})"
    return f"ops.cross_entropy_sum({logits}, {labels}, {tail})"


def mean(site: Site) -> str:
    text = plain(site)
    return f"{text} / {site.ranks}" if site.strategy.lowering == "mean" else text


def batch_mean(site: Site) -> str:
    return f'ops.batch_mean({site.argument(0, "statistic")}, rt.axis("dp"))'


def autograd_function(site: Site) -> str:
    text = f"ops.autograd_function({', '.join(site.render(a) for a in site.op.args)})"
    return f"{text}[0]" if len(site.op.results) == 1 else text


def token_mean(site: Site) -> str:
    return f"ops.token_mean({site.argument(0, 'loss')}, {site.argument(1, 'denominator')})"


def grouped(site: Site) -> str:
    return f"ops.grouped_mm({', '.join(site.render(a) for a in site.op.args)})"


def rms_norm(site: Site) -> str:
    return f"ops.rms_norm({', '.join([site.render(a) for a in site.op.args] + [f'{k}={site.render(v)}' for k, v in site.op.kwargs])})"


def transpose(site: Site) -> str:
    return f"{site.argument(0, 'self')}.transpose({site.argument(1, 'dim0')}, {site.argument(2, 'dim1')})"


def contiguous(site: Site) -> str:
    return f"{site.argument(0, 'self')}.contiguous()"


def linear(site: Site) -> str:
    return f"ops.linear({', '.join(site.render(a) for a in site.op.args)})"


def addmm(site: Site) -> str:
    """bias + x @ weight with a stored weight is a linear, whose weight gradient can be put off."""
    bias, x, weight = (site.render(a) for a in site.op.args[:3])
    is_linear = len(site.call.operands) == 3 and [len(o.shape) for o in site.call.operands] == [1, 2, 2] and not site.op.kwargs
    return f"ops.linear({x}, {weight}.t(), {bias})" if is_linear and weight.startswith('w["') else plain(site)


def units(place: int, name: str) -> Callable[[Site], str]:
    """An op that is told how many groups there are: each rank has its share of them."""

    def written(site: Site) -> str:
        if site.strategy.lowering != "units":
            return plain(site)
        count = literal(int(str(site.call.argument(place, name))) // site.ranks)
        parts = [count if i == place else site.render(a) for i, a in enumerate(site.op.args)]
        parts += [f"{k}={count if k == name else site.render(v)}" for k, v in site.op.kwargs]
        return called(site.op.target, parts)

    return written


def called(target: str, parts: list[str]) -> str:
    """A call of an op as torch.ops has it."""
    namespace, name, *overload = target.split(".")
    call = f"{name}.{overload[0]}" if overload else name
    return f"{'aten' if namespace == 'aten' else 'torch.ops.' + namespace}.{call}({', '.join(parts)})"


def plain(site: Site) -> str:
    """The op as it was captured."""
    op = site.op
    parts = [site.render(a) for a in op.args]
    if op.target in INFIX and len(parts) == 2 and not op.kwargs:
        return f"{parts[0]} {INFIX[op.target]} {parts[1]}"
    parts += [f"{k}={site.render(v)}" for k, v in op.kwargs]
    if aten_packet(op.target) in FACTORIES:
        parts.append("device=rt.device")
    return called(op.target, parts)


RESHAPES = """view.default reshape.default flatten.using_ints unflatten.int _unsafe_view.default view_as.default reshape_as.default
ravel.default squeeze.default squeeze.dim squeeze.dims""".split()
SPLITS = """split.Tensor split.sizes split_with_sizes.default chunk.default unsafe_split.Tensor unsafe_chunk.default tensor_split.sections
tensor_split.indices""".split()
CONVOLUTIONS = """conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding conv_transpose1d.default
conv_transpose2d.input conv_transpose3d.input""".split()
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits".split()

LOWERINGS: dict[str, Callable[[Site], str]] = {
    **{f"aten.{name}": reshape for name in RESHAPES},
    **{f"aten.{name}.default": expand for name in ("expand", "expand_as", "broadcast_to")},
    **{f"aten.{name}.default": repeat for name in ("repeat", "tile")},
    "aten.repeat_interleave.self_int": repeat_interleave,
    "aten.transpose.int": transpose,
    "aten.contiguous.default": contiguous,
    **{f"aten.{name}": split for name in SPLITS},
    "aten.slice.Tensor": slice_dim,
    "aten.narrow.default": slice_dim,
    "aten.slice_scatter.default": slice_scatter,
    **{f"aten.{name}": units(6, "groups") for name in CONVOLUTIONS},
    "aten.convolution.default": units(8, "groups"),
    "aten.group_norm.default": units(1, "num_groups"),
    "aten.dropout.default": dropout,
    "aten.linear.default": linear,
    "aten.addmm.default": addmm,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.rms_norm.default": rms_norm,
    "aten.embedding.default": embedding,
    "aten.mean.dim": mean,
    "aten.mean.default": mean,
    **{f"aten.{name}.default": mean for name in LOSSES},
    "mw.cross_entropy_sum": cross_entropy,
    "mw.token_mean": token_mean,
    "mw.batch_mean": batch_mean,
    "meshwright.autograd_function.default": autograd_function,
    "transformers.grouped_mm_fallback.default": grouped,
}


def expression(site: Site) -> str:
    """Python text of one op."""
    if aten_packet(site.op.target) in RANDOM:
        raise ValueError(f"op {site.op.target} in {site.op.module or 'the model'} draws random numbers; only dropout is supported")
    return LOWERINGS.get(site.op.target, plain)(site)
