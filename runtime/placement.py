"""Where every parameter of the model lies on the mesh: known to every rank from the plan alone.

    stages    that hold it, as pp coordinates of ranks: with several model chunks a rank's stages are one here, which holds each
              parameter once. A tied parameter may have several, the first owns it
    owners    ranks whose parts make the whole, each element once: on the first stage, every coordinate of an axis on which
              it is S, the first one of others. As ep is part of dp, they have dp coordinates 0 to ep-1 if it is S on ep, else 0
    replicas  ranks that hold the same part, of the same stage and tp coordinate: all of dp and cp, or if it is S on ep those
              of dp with the same ep coordinate, and cp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from meshwright.plans.layout import Layout
from meshwright.plans.mesh import EXPERT_REPLICAS, Mesh
from meshwright.runtime.weights import Ranges, local_ranges

REPLICAS = (EXPERT_REPLICAS, "dp", "cp")
"""Axes whose ranks hold the same parameters; see Parameter.replica_axes."""
LAYOUT_AXES = ("tp", "ep")
"""Axes on which a parameter's layout says what a rank holds."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model: full shape, layout, stages that hold it. ValueError for one that is R or P on ep."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    stages: tuple[int, ...]
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.layout.on("ep").kind in ("R", "P"):
            raise ValueError(f"parameter {self.name}: found {self.layout}, expected S or nothing on ep: dp sums what is not S")

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Those of REPLICAS over which its replicas lie: the gradient is the sum of theirs.

        The gradient of a slice on ep is a sum over the tokens of the ep group already, so only the ranks that own the same
        experts are summed.
        """
        return (EXPERT_REPLICAS, "cp") if self.layout.on("ep").kind == "S" else ("dp", "cp")


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
        num_tp, num_ep = (self.mesh.size(a) if parameter.layout.on(a).kind == "S" else 1 for a in LAYOUT_AXES)
        stage = parameter.stages[0]
        return tuple(self.mesh.rank(pp=stage, dp=ep, tp=tp) for tp, ep in product(range(num_tp), range(num_ep)))
