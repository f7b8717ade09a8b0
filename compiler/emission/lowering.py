"""How one op is written in a program: its expression on local shapes, under its strategy.

    Site        everything the expression depends on: the op, its strategy, the text of its operands, local result shapes
    expression  the Python text; ops without an entry in LOWERINGS are called as torch.ops say, arguments unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isinf

import torch

from meshwright.compiler.graph import Op, Ref
from meshwright.compiler.rules.factors import Call, Strategy

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
    if isinstance(value, float) and isinf(value):
        return f'float("{"-" if value == -inf else ""}inf")'
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value)
    raise ValueError(f"an argument of type {type(value).__name__} cannot be written: {value!r}")


def numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def reshape(site: Site) -> str:
    return f"{site.argument(0, 'self')}.reshape({numbers(site.local_shapes[0]) or '()'})"


def expand(site: Site) -> str:
    return f"{site.argument(0, 'self')}.expand({numbers(site.local_shapes[0])})"


def split(site: Site) -> str:
    dim = int(site.call.argument(2, "dim", 0))  # type: ignore[call-overload]
    sizes = [shape[dim] for shape in site.local_shapes]
    return f"torch.split({site.argument(0, 'self')}, {sizes}, {dim})"


def dropout(site: Site) -> str:
    return f"ops.dropout({site.argument(0, 'input')}, {site.argument(1, 'p')}, {site.seed})"


def attention(site: Site) -> str:
    parts = [site.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
    probability = site.call.argument(4, "dropout_p", 0.0)
    options = {
        "mask": site.argument(3, "attn_mask"),
        "is_causal": site.argument(5, "is_causal", False),
        "scale": site.argument(6, "scale"),
        "enable_gqa": site.argument(7, "enable_gqa", False),
    }
    written = [f"{k}={v}" for k, v in options.items() if v not in ("None", "False")]
    if probability:
        written += [f"dropout_p={literal(probability)}", f"seed={site.seed}"]
    return f"ops.sdpa({', '.join(parts + written)})"


def embedding(site: Site) -> str:
    weight, ids = site.argument(0, "weight"), site.argument(1, "indices")
    padding = site.call.argument(2, "padding_idx", -1)
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


def token_mean(site: Site) -> str:
    return f"ops.token_mean({site.argument(0, 'loss')}, {site.argument(1, 'denominator')})"


def grouped(site: Site) -> str:
    return f"ops.grouped_mm({', '.join(site.render(a) for a in site.op.args)})"


def transpose(site: Site) -> str:
    return f"{site.argument(0, 'self')}.transpose({site.argument(1, 'dim0')}, {site.argument(2, 'dim1')})"


def contiguous(site: Site) -> str:
    return f"{site.argument(0, 'self')}.contiguous()"


def linear(site: Site) -> str:
    return f"ops.linear({', '.join(site.render(a) for a in site.op.args)})"


def plain(site: Site) -> str:
    """The op as it was captured."""
    op = site.op
    parts = [site.render(a) for a in op.args]
    if op.target in INFIX and len(parts) == 2 and not op.kwargs:
        return f"{parts[0]} {INFIX[op.target]} {parts[1]}"
    parts += [f"{k}={site.render(v)}" for k, v in op.kwargs]
    namespace, name, *overload = op.target.split(".")
    if name in FACTORIES:
        parts.append("device=rt.device")
    call = f"{name}.{overload[0]}" if overload else name
    return f"{'aten' if namespace == 'aten' else 'torch.ops.' + namespace}.{call}({', '.join(parts)})"


LOWERINGS: dict[str, Callable[[Site], str]] = {
    **{
        f"aten.{name}": reshape
        for name in ("view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "_unsafe_view.default",
                     "view_as.default", "reshape_as.default")
    },
    "aten.expand.default": expand,
    "aten.transpose.int": transpose,
    "aten.contiguous.default": contiguous,
    **{f"aten.{name}": split for name in ("split.Tensor", "split_with_sizes.default", "chunk.default")},
    "aten.dropout.default": dropout,
    "aten.linear.default": linear,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.embedding.default": embedding,
    "aten.mean.dim": mean,
    "aten.mean.default": mean,
    "mw.cross_entropy_sum": cross_entropy,
    "mw.token_mean": token_mean,
    "transformers.grouped_mm_fallback.default": grouped,
}  # fmt: skip


def expression(site: Site) -> str:
    """Python text of one op."""
    name = site.op.target.split(".")[1]
    if name in RANDOM:
        raise ValueError(f"op {site.op.target} in {site.op.module or 'the model'} draws random numbers; only dropout is supported")
    return LOWERINGS.get(site.op.target, plain)(site)


