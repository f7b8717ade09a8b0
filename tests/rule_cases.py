"""Sample calls for the rule table: target, args, kwargs; tensors given as `T(shape)` specs.

The op is run once on whole tensors for its result shapes, so a case is a call and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INTEGERS = ("ids", "bool", "distinct", "rows", "offsets")


@dataclass(frozen=True)
class T:
    """A tensor operand.

    `kind`: float (normal), positive, unit (0 to 1), ordered along the last dim, complex, bool, ids below `high`, ids that are distinct
    along the last dim, rows that are distinct along the first, or offsets (ascending, up to `high`).
    """

    shape: tuple[int, ...]
    kind: str = "float"
    high: int = 8

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return self.integers(generator) if self.kind in INTEGERS else self.numbers(generator)

    def integers(self, generator: torch.Generator) -> torch.Tensor:
        if self.kind == "ids":
            return torch.randint(0, self.high, self.shape, generator=generator)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) > 0.3
        if self.kind == "offsets":
            return torch.arange(1, self.shape[0] + 1) * self.high // self.shape[0]
        order = torch.randperm(self.high, generator=generator)
        if self.kind == "rows":
            return order[: self.shape[0], None].expand(self.shape).contiguous()
        return order[: self.shape[-1]].expand(self.shape).contiguous()

    def numbers(self, generator: torch.Generator) -> torch.Tensor:
        if self.kind == "complex":
            return torch.randn(self.shape, generator=generator, dtype=torch.complex128)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "ordered":
            return x.sort(-1).values
        return {"float": x, "positive": x.abs() + 0.5, "unit": x.sigmoid()}[self.kind]


@dataclass(frozen=True, eq=False)
class Case:
    """A call. Equal only to itself."""

    target: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        shown = [f"{k}={v}" for k, v in self.kwargs]
        return f"{self.target.removeprefix('aten.')}({', '.join([*map(show, self.args), *shown])})"


def show(item: object) -> str:
    """Short text of an argument."""
    if isinstance(item, (T, torch.Tensor)):
        return "x".join(map(str, item.shape)) or "scalar"
    return f"[{', '.join(map(show, item))}]" if isinstance(item, (list, tuple)) else str(item)


X, ROW, COLUMN = T((2, 6, 8)), T((8,)), T((2, 6, 1))

UNARY = "neg exp sin cos tanh sigmoid silu gelu relu erf softplus square abs log_sigmoid expm1".split()
POSITIVE = "log sqrt rsqrt reciprocal log1p".split()

CALLS: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
    *((f"aten.{name}.default", (X,), {}) for name in UNARY),
    *((f"aten.{name}.default", (T((2, 6, 8), "positive"),), {}) for name in POSITIVE),
    ("aten.add.Tensor", (X, X), {}),
    ("aten.add.Tensor", (X, ROW), {}),
    ("aten.add.Tensor", (X, 1.5), {}),
    ("aten.sub.Tensor", (COLUMN, X), {}),
    ("aten.sub.Tensor", (X, 2), {}),
    ("aten.mul.Tensor", (X, COLUMN), {}),
    ("aten.mul.Tensor", (X, 0.5), {}),
    ("aten.div.Tensor", (X, T((2, 6, 1), "positive")), {}),
    ("aten.div.Tensor", (X, 3.0), {}),
    ("aten.rsub.Scalar", (X, 1.0), {}),
    ("aten.pow.Tensor_Scalar", (X, 3), {}),
    ("aten.where.self", (T((2, 6, 8), "bool"), X, X), {}),
    ("aten.masked_fill.Scalar", (X, T((2, 6, 1), "bool"), -5.0), {}),
    ("aten.clamp.default", (X, -0.5, 0.5), {}),
    ("aten.maximum.default", (X, X), {}),
    ("aten.view.default", (X, [2, 6, 2, 4]), {}),
    ("aten.view.default", (X, [12, 8]), {}),
    ("aten.view.default", (T((12, 8)), [2, 6, 8]), {}),
    ("aten.view.default", (T((2, 6, 2, 4)), [2, 6, -1]), {}),
    ("aten.view.default", (T((2, 5, 36)), [2, 5, 3, 6, 2]), {}),
    ("aten.view.default", (T((2, 5, 3, 6, 2)), [2, 5, 36]), {}),
    ("aten.view.default", (T((1, 6, 8)), [6, 8]), {}),
    ("aten.view.default", (T((4, 6)), [6, 4]), {}),
    ("aten.reshape.default", (T((2, 3, 2, 4)), [2, 6, 4]), {}),
    ("aten.flatten.using_ints", (X, 1, 2), {}),
    ("aten.unsqueeze.default", (X, 1), {}),
    ("aten.squeeze.dim", (T((2, 1, 8)), 1), {}),
    ("aten.transpose.int", (X, 1, 2), {}),
    ("aten.transpose.int", (X, -1, -2), {}),
    ("aten.permute.default", (X, [2, 0, 1]), {}),
    ("aten.t.default", (T((6, 8)),), {}),
    ("aten.expand.default", (T((2, 1, 8)), [2, 6, 8]), {}),
    ("aten.expand.default", (T((6, 8)), [2, -1, 8]), {}),
    ("aten.slice.Tensor", (X, 2, 0, 4), {}),
    ("aten.slice.Tensor", (X, 1, 0, 9223372036854775807), {}),
    ("aten.select.int", (X, 1, 2), {}),
    ("aten.unbind.int", (T((3, 6, 8)), 0), {}),
    ("aten.cat.default", ([X, X], -1), {}),
    ("aten.stack.default", ([X, X], 1), {}),
    ("aten.pad.default", (X, [0, 1]), {}),
    ("aten.split.Tensor", (T((2, 6, 12)), 4, 2), {}),
    ("aten.split_with_sizes.default", (T((2, 6, 12)), [8, 2, 2], -1), {}),
    ("aten.chunk.default", (T((2, 6, 8)), 2, -1), {}),
    ("aten.slice_scatter.default", (X, T((2, 3, 8)), 1, 2, 5), {}),
    ("aten.select_scatter.default", (X, T((2, 8)), 1, 0), {}),
    ("aten.linear.default", (X, T((6, 8))), {}),
    ("aten.linear.default", (X, T((6, 8)), T((6,))), {}),
    ("aten.addmm.default", (T((6,)), T((4, 8)), T((8, 6))), {}),
    ("aten.mm.default", (T((4, 8)), T((8, 6))), {}),
    ("aten.bmm.default", (T((2, 4, 8)), T((2, 8, 6))), {}),
    ("aten.matmul.default", (T((2, 4, 6, 8)), T((2, 4, 8, 6))), {}),
    ("aten.matmul.default", (T((2, 6, 8)), T((8, 4))), {}),
    ("aten.matmul.default", (T((1, 4, 6, 8)), T((2, 4, 8, 6))), {}),
    ("aten.scaled_dot_product_attention.default", (T((2, 4, 6, 8)), T((2, 4, 6, 8)), T((2, 4, 6, 8))), {}),
    (
        "aten.scaled_dot_product_attention.default",
        (T((2, 4, 6, 8)), T((2, 4, 6, 8)), T((2, 4, 6, 8)), None, 0.0, True),
        {"scale": 0.3},
    ),
    (
        "aten.scaled_dot_product_attention.default",
        (T((2, 4, 6, 8)), T((2, 4, 4, 8)), T((2, 4, 4, 8)), T((1, 4, 6, 4))),
        {"scale": 0.3},
    ),
    (
        "aten.scaled_dot_product_attention.default",
        (T((2, 4, 6, 8)), T((2, 4, 6, 8)), T((2, 4, 6, 8)), T((2, 1, 6, 6))),
        {},
    ),
    (
        "aten.scaled_dot_product_attention.default",
        (T((2, 4, 6, 8)), T((2, 2, 6, 8)), T((2, 2, 6, 8))),
        {"enable_gqa": True},
    ),
    ("aten.softmax.int", (X, -1), {}),
    ("aten.log_softmax.int", (X, 1), {}),
    ("aten.cumsum.default", (X, 1), {}),
    ("aten.layer_norm.default", (X, [8], ROW, ROW, 1e-5), {}),
    ("aten.layer_norm.default", (X, [8]), {}),
    ("aten.rms_norm.default", (X, [8], ROW, 1e-6), {}),
    ("aten.mean.dim", (X, [-1], True), {}),
    ("aten.mean.dim", (X, [1]), {}),
    ("aten.mean.default", (X,), {}),
    ("aten.sum.dim_IntList", (X, [-1]), {}),
    ("aten.sum.default", (X,), {}),
    ("aten.embedding.default", (T((8, 4)), T((2, 6), "ids")), {}),
    ("aten.embedding.default", (T((8, 4)), T((2, 6), "ids"), 3), {}),
    ("aten.index.Tensor", (T((6, 8)), [T((4,), "ids", 6)]), {}),
    ("mw.cross_entropy_sum", (T((6, 8)), T((6,), "ids"), 3, 0.0), {}),
    ("mw.cross_entropy_sum", (T((6, 8)), T((6,), "ids"), -100, 0.1), {}),
    ("mw.batch_mean", (X,), {}),
    ("mw.token_mean", (T(()), T((), "positive")), {}),
]

CASES = [Case(target, args, tuple(kwargs.items())) for target, args, kwargs in CALLS]
