"""Buckets: every element of the model in one place and one shard; what is reduced together together."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import pytest
import torch

from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.runtime import buckets
from meshwright.runtime.buckets import ALIGNMENT, Arrangement, unit_of
from meshwright.runtime.placement import Parameter, Placement

LAYOUTS = {
    "embed.weight": "S(0)@tp",
    "layers.0.norm.weight": "R@tp",
    "layers.0.up.weight": "S(1)@tp",
    "layers.0.experts.up": "S(0)@ep",
    "layers.0.experts.down": "S(1)@tp S(0)@ep",
    "layers.1.norm.weight": "R@tp",
    "layers.1.up.weight": "S(1)@tp",
    "head.weight": "I",
    "head.bias": "I",
}


def arrangement(mesh: Mesh, rank: int, zero: int, stages: Mapping[str, tuple[int, ...]] | None = None) -> Arrangement:
    def parameter(name: str) -> Parameter:
        shape = (6,) if "norm" in name or "bias" in name else (4, 6)
        return Parameter(name, shape, Layout.parse(LAYOUTS[name]), (stages or {}).get(name, (0,)), name != "head.bias")

    return Arrangement(Placement(mesh, rank, {name: parameter(name) for name in LAYOUTS}), frozenset({"layers.0", "layers.1"}), zero)


def test_a_bucket_is_a_class_of_a_unit_with_zero_3_and_of_many_else() -> None:
    mesh = Mesh(dp=4, tp=2, ep=2)
    names = [[s.parameter.name for s in b.spans] for b in arrangement(mesh, 3, 3).own]
    assert names == [
        ["embed.weight"],
        ["layers.0.up.weight", "layers.0.norm.weight"],
        ["layers.0.experts.up", "layers.0.experts.down"],
        ["layers.1.up.weight", "layers.1.norm.weight"],
        ["head.weight"],
    ]
    own = arrangement(mesh, 3, 1).own
    assert [(b.axis, b.num_shards, len(b.spans)) for b in own] == [("dp", 4, 6), ("edp", 2, 2)]
    assert [s.parameter.name for s in own[0].spans][-2:] == ["layers.0.norm.weight", "layers.1.norm.weight"]
    tied = arrangement(Mesh(pp=2, dp=2), 0, 2, {"embed.weight": (0, 1)}).own
    assert [b.stages for b in tied] == [(0, 1), (0,), (0,)]


def test_units_are_joined_until_a_bucket_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)
    own = arrangement(Mesh(dp=2), 0, 0).own
    assert [sorted({unit_of(s.parameter.name, {"layers.0", "layers.1"}) for s in b.spans}) for b in own] == [
        ["embed", "layers.0"], ["layers.0"], ["layers.1"], ["head"],
    ]  # fmt: skip


def test_every_element_has_one_place_and_counts_once() -> None:
    for mesh in (Mesh(dp=4, tp=2, ep=2), Mesh(pp=2, dp=3), Mesh(dp=2, tp=2)):
        stages = {"embed.weight": (0, 1)} if mesh.pp == 2 else {}
        ranks = [arrangement(mesh, rank, 1, stages) for rank in range(mesh.world_size)]
        for name in LAYOUTS:
            parameter = ranks[0].placement.parameters[name]
            seen = torch.zeros(parameter.shape)
            for rank, view in enumerate(ranks):
                if mesh.coordinates(rank)["pp"] not in parameter.stages or not view.counts(parameter, rank):
                    continue
                part = torch.zeros(view.placement.local_shape(parameter))
                start, stop = view.portion(parameter, rank)
                part.view(-1)[start:stop] = 1
                index = [torch.tensor([i for run in dim for i in range(*run)]) for dim in view.placement.ranges(parameter)]
                seen[torch.meshgrid(*index, indexing="ij")] += part
            assert seen.eq(1).all(), (mesh, name)
        for bucket in ranks[0].own:
            at = bucket.start
            for span in bucket.spans:
                assert span.start >= at and span.start % ALIGNMENT == 0 and span.size == prod(span.shape)
                at = span.stop
            assert bucket.stop >= at and bucket.shard_size % ALIGNMENT == 0
