"""The declaration with its defaults filled in: what planning starts from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.compiler.hardware import Hardware, load_hardware
from meshwright.passes.choose_schedule import AUTO
from meshwright.plans.document import Declaration
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh

DEFAULT_SEQ = 128
DEFAULT_HARDWARE = "cpu"
MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Setting:
    """The declaration with its defaults filled in."""

    declaration: Declaration
    mesh: Mesh
    seq: int
    micro_batch: int
    global_batch: int
    hardware: Hardware

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.mesh.dp * self.micro_batch)

    @property
    def memory_limit(self) -> int | None:
        """Bytes of a rank. Recomputation is chosen for the hardware's memory when no limit is given."""
        chooses = self.declaration.recompute == AUTO and self.declaration.recomputed is None
        return self.declaration.memory_limit or (self.hardware.device.memory_bytes if chooses else None)


    def with_less_memory(self, num_bytes: int) -> Setting:
        """The same with a smaller limit, if there is one."""
        if not num_bytes or self.memory_limit is None:
            return self
        return replace(self, declaration=self.declaration.model_copy(update={"memory_limit": max(1, self.memory_limit - num_bytes)}))


def settle(declaration: Declaration) -> Setting:
    """Defaults: mesh of one rank, sequence of 128, micro-batch of 1, four micro-batches per pipeline stage."""
    mesh = declaration.mesh or Mesh()
    micro_batch = declaration.micro_batch or 1
    share = mesh.dp * micro_batch
    default = share * (1 if mesh.pp == 1 else MICRO_BATCHES_PER_STAGE * mesh.pp)
    global_batch = declaration.global_batch or default
    if global_batch % share:
        raise InputError(
            f"global_batch: found {global_batch}, expected a multiple of dp * micro_batch = {mesh.dp} * {micro_batch} = {share}"
        )
    hardware = load_hardware(declaration.hardware or DEFAULT_HARDWARE)
    return Setting(declaration, mesh, declaration.seq or DEFAULT_SEQ, micro_batch, global_batch, hardware)
