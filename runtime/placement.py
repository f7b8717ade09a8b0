"""Where every parameter of the model lies on the mesh: known to every rank from the plan alone.

    stages    that hold it; a tied parameter may have several, the first owns it
    owners    ranks whose parts make the whole, each element once: on the first stage, dp and cp replica 0, and every
              coordinate of an axis on which it is S, the first one of others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from meshwright.plans.layout import Layout
from meshwright.plans.mesh import Mesh
from meshwright.runtime.weights import Ranges, local_ranges

REPLICAS = ("dp", "cp")
"""Axes whose ranks hold the same parameters, and over which every gradient is the sum of the ranks'."""
LAYOUT_AXES = ("tp",)
"""Axes on which a parameter's layout says what a rank holds."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: full shape, layout, stages that hold it."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    stages: tuple[int, ...]
    trainable: bool = True


@dataclass(frozen=True)
class Placement:
    """All parameters, seen from `rank`."""

    mesh: Mesh
    rank: int
    parameters: Mapping[str, Parameter]

    @cached_property
    def at(self) -> Mapping[str, int]:
        """This rank's coordinates."""
        return self.mesh.coordinates(self.rank)

    @cached_property
    def held(self) -> tuple[Parameter, ...]:
        """Parameters of this rank's stage."""
        return tuple(p for p in self.parameters.values() if self.at["pp"] in p.stages)

    @cached_property
    def owned(self) -> frozenset[str]:
        """Parameters that this rank is an owner of."""
        return frozenset(p.name for p in self.held if self.rank in self.owners(p))

    @cached_property
    def tied_stages(self) -> tuple[tuple[int, ...], ...]:
        """Sets of stages that share a trainable parameter, in an order that is the same on all ranks."""
        return tuple(sorted({p.stages for p in self.parameters.values() if len(p.stages) > 1 and p.trainable}))

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Shape of a rank's part."""
        return parameter.layout.local_shape(parameter.shape, self.mesh)

    def ranges(self, parameter: Parameter, rank: int | None = None) -> Ranges:
        """What a rank that holds the parameter holds of it; this rank unless given."""
        at = self.at if rank is None else self.mesh.coordinates(rank)
        return local_ranges(parameter.shape, parameter.layout, self.mesh, at)

    def owners(self, parameter: Parameter) -> tuple[int, ...]:
        """Ranks; see the module."""
        kinds = [parameter.layout.on(axis).kind for axis in LAYOUT_AXES]
        choices = [range(self.mesh.size(a) if k == "S" else 1) for a, k in zip(LAYOUT_AXES, kinds, strict=True)]
        places = (dict(zip(LAYOUT_AXES, at, strict=True)) for at in product(*choices))
        return tuple(self.mesh.rank(pp=parameter.stages[0], **at) for at in places)

    def stage_group(self, stages: tuple[int, ...]) -> tuple[int, ...]:
        """This rank and those on other stages that hold the same part of a tied parameter."""
        place = {axis: self.at[axis] for axis in ("dp", "cp", "tp")}
        return tuple(self.mesh.rank(pp=stage, **place) for stage in stages)
