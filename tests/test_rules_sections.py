"""Sections: which ways to cut a dim a function's ops ask for, and that packed projections are cut so, from capture to plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.compiler.capture import capture
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.rules.sections import section_table
from meshwright.compiler.rules.table import factors_of

HIDDEN, HEADS = 16, 4


class Packed(nn.Module):
    """A packed projection, what is done with it, and a projection back."""

    def __init__(self, columns: int, inner: int, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.packed = nn.Linear(HIDDEN, columns)
        self.back = nn.Linear(inner, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.back(self.body(self.packed(self.norm(x))))).square().mean()


def heads(x: Tensor, width: int) -> Tensor:
    """(b, s, heads * width) -> (b, heads, s, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (b, h, s, d), as (b, s, h * d)."""
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2).flatten(2)


def by_split(x: Tensor) -> Tensor:
    q, k, v = x.split([64, 32, 32], -1)
    return attend(heads(q, 16), heads(k, 16), heads(v, 16))


def by_slices(x: Tensor) -> Tensor:
    q, k, v, gate = x[..., :64], x[..., 64:96], x[..., 96:128], x[..., 128:]
    return attend(heads(q, 16), heads(k, 16), heads(v, 16)) * gate.sigmoid()


def by_heads(x: Tensor) -> Tensor:
    """Cut into heads first, then into q, k and v."""
    q, k, v = heads(x, 16).split([4, 2, 2], 1)
    return attend(q, k, v)


def by_pieces(x: Tensor) -> Tensor:
    """(3, heads, width): three pieces, then heads."""
    q, k, v = x.unflatten(-1, (3, HEADS, 16)).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v)


def by_head_pieces(x: Tensor) -> Tensor:
    """(heads, 3, width): a head's q, k and v lie together."""
    x = x.unflatten(-1, (HEADS, 3, 16))
    q, k, v = (x[..., i, :].transpose(1, 2) for i in range(3))
    return attend(q, k, v)


def nested(x: Tensor) -> Tensor:
    """A piece is taken apart again."""
    gate, inner = x.split([64, 128], -1)
    a, b = nn.functional.silu(inner).split([64, 64], -1)
    return gate.sigmoid() * a * b


def rotated(x: Tensor) -> Tensor:
    """Halves of the head dim change places: not a dim that a weight could be cut along."""
    q, k, v = (heads(part, 16) for part in x.chunk(3, -1))
    q, k = (y * 0.5 + torch.cat([-y[..., 8:], y[..., :8]], -1) for y in (q, k))
    return attend(q, k, v)


CASES = {
    "split": (by_split, 128, 64, "S(0:64+32+32)"),
    "slices": (by_slices, 192, 64, "S(0:64+32+32+64)"),
    "heads": (by_heads, 128, 64, "S(0:64+32+32)"),
    "pieces": (by_pieces, 192, 64, "S(0:64+64+64)"),
    "head-pieces": (by_head_pieces, 192, 64, "S(0)"),
    "nested": (nested, 192, 64, "S(0:64+64+64)"),
    "rotated": (rotated, 192, 64, "S(0:64+64+64)"),
}


def table_of(module: nn.Module) -> dict[int, list[tuple[int, ...]]]:
    """The section table of a model's only function."""
    kinds = Kinds(capture(module, {"x": torch.ones(2, 8, HIDDEN)}, seq=8, micro_batch=2).graph)
    (kind,) = kinds.by_name.values()
    calls = [kinds.call(kinds.graph.ops[i]) for i in kind.representative.ops]
    return section_table([(call, factors_of(call)) for call in calls])


@pytest.mark.parametrize("name", CASES)
def test_a_packed_projection_is_cut_by_its_pieces(name: str) -> None:
    """Column parallel by sections, row parallel behind: nothing is moved in between."""
    body, columns, inner, layout = CASES[name]
    plan = mw.compile(
        Packed(columns, inner, body), {"x": torch.ones(2, 8, HIDDEN)}, mesh={"tp": 2}, seq=8, micro_batch=2, global_batch=2
    )
    found = plan.document.parameter_layouts
    assert str(found["packed.weight"]) == f"{layout}@tp"
    assert str(found["back.weight"]) == "S(1)@tp"
    text = plan.programs["stage_0"] if "stage_0" in plan.programs else next(iter(plan.programs.values()))
    assert text.count("all-gather;") == 0


def test_ways_go_over_to_other_units_and_to_finer_ones() -> None:
    assert (4, 2, 2) in table_of(Packed(128, 64, by_heads))[8]
    assert (64, 32, 32) in table_of(Packed(128, 64, by_heads))[128]
    assert (64, 64, 64) in table_of(Packed(192, 64, nested))[192]
    assert (64, 32, 32, 64) in table_of(Packed(192, 64, by_slices))[192]


def test_dims_that_no_weight_is_cut_along_have_no_ways() -> None:
    """The head dim comes out of a view as its fast part."""
    assert 16 not in table_of(Packed(192, 64, rotated))
