"""compile --devices N: the mesh, micro-batch, schedule, recomputation and ZeRO stage by search, then the plan of the best.

    compile_plan    as driver.compile_plan, and what it leaves to search when the declaration has `devices`

The model is captured once for every micro-batch that is tried. Layouts are chosen once for every micro-batch, tp and ep; segments,
stages and the schedule's time are modelled as for a plan. Micro-batches grow by doubling until the best step gets no faster. What
the declaration gives is kept. The plan of the best is then made as any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from meshwright import choosing, driver
from meshwright.compiler.capture import Captured, capture
from meshwright.compiler.experts import find_regions
from meshwright.compiler.footprint import Measurer
from meshwright.compiler.hardware import load_hardware
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.precision import DTYPES
from meshwright.driver import CompiledPlan
from meshwright.passes.choose_regions import Regions
from meshwright.passes.choose_schedule import AUTO, may_put_off
from meshwright.passes.choose_stages import SegmentCost
from meshwright.passes.search import (
    Combination,
    Found,
    Priced,
    Space,
    TooLarge,
    combinations,
    divisors,
    nothing_fits,
    report,
    search,
)
from meshwright.passes.segment_costs import Pricing, collective_seconds, segment_costs
from meshwright.passes.simulate import default_chunks
from meshwright.plans.available import AVAILABLE
from meshwright.plans.document import Declaration
from meshwright.plans.errors import InputError, OverLimitError
from meshwright.runtime.orders import ASYNCHRONOUS
from meshwright.setting import DEFAULT_HARDWARE, DEFAULT_SEQ, Setting, settle

LARGEST_MICRO_BATCH = 8
SEQUENCES_PER_DEVICE = 4
"""Global batch per device when none is given."""
LEAN = 3
"""Combinations that are tried with layouts that keep less."""
LARGER = (2, 4, 8, 16)
"""Multiples of the devices that are tried to say what would fit."""


@dataclass
class Pricer:
    """A model with what has been captured and chosen of it so far."""

    model: str | torch.nn.Module
    example: Mapping[str, object] | None
    declaration: Declaration
    global_batch: int
    limit_bytes: int
    tell: Callable[[str], None]
    captures: dict[int, tuple[Captured, Kinds]] = field(default_factory=dict)
    priced: dict[tuple[int, int, int, str], tuple[Pricing, tuple[SegmentCost, ...]]] = field(default_factory=dict)

    def captured(self, micro_batch: int) -> tuple[Captured, Kinds]:
        """The model captured for a micro-batch."""
        if micro_batch not in self.captures:
            self.tell(f"capturing the model with a micro-batch of {micro_batch}")
            found = capture(
                self.model,
                dict(self.example) if self.example is not None else None,
                task=self.declaration.task,
                seq=self.declaration.seq or DEFAULT_SEQ,
                micro_batch=micro_batch,
                attention=self.declaration.attention or "sdpa",
                dtype=DTYPES[self.declaration.precision or "fp32"],
            )
            graph, _ = choosing.with_casts(found, self.declaration)
            self.captures[micro_batch] = found, Kinds(graph)
        return self.captures[micro_batch]

    def setting(self, way: Combination) -> Setting:
        """The declaration with a combination filled in."""
        chosen = {
            "devices": None,
            "mesh": way.mesh,
            "micro_batch": way.micro_batch,
            "global_batch": self.global_batch,
            "schedule": way.schedule,
            "chunks": way.chunks,
            "recompute": way.recompute,
            "zero": way.zero,
            "memory_limit": self.limit_bytes,
        }
        return settle(self.declaration.model_copy(update=chosen))

    def plan(self, way: Combination) -> CompiledPlan:
        """The plan of a combination, without the weights of a model that was given as an object."""
        return driver.plan_captured(self.captured(way.micro_batch)[0], self.setting(way), self.tell)

    def pricing(self, way: Combination) -> tuple[Pricing, tuple[SegmentCost, ...]]:
        """Layouts and costs of segments, shared by all that have the micro-batch, tp, ep and recomputation."""
        key = (way.micro_batch, way.mesh.tp, way.mesh.ep, way.recompute)
        if key not in self.priced:
            _, kinds = self.captured(way.micro_batch)
            setting = self.setting(way)
            known = next((p for k, (p, _) in self.priced.items() if k[:3] == key[:3]), None)
            self.tell(f"choosing layouts for tp={way.mesh.tp}")
            assignment = known.assignment if known else choosing.choose(kinds, setting).assignment
            puts_off = may_put_off(self.declaration.schedule or AUTO)
            regions = known.regions if known else Regions(Measurer(assignment, way.mesh, puts_off), setting.hardware)
            pricing = Pricing(assignment, way.mesh, setting.hardware, regions, way.recompute)
            self.priced[key] = pricing, segment_costs(pricing)
        return self.priced[key]

    def segments(self, way: Combination) -> tuple[SegmentCost, ...]:
        return self.pricing(way)[1]

    def price(self, way: Combination) -> Priced | TooLarge:
        """A combination's step and memory, without a limit: one that does not fit says by how much."""
        setting = self.setting(way)
        pricing = replace(self.pricing(way)[0], mesh=way.mesh)
        try:
            choice = choosing.pipeline(pricing, setting)
        except InputError:
            free = replace(setting, declaration=setting.declaration.model_copy(update={"memory_limit": None}))
            needs = choosing.pipeline(pricing, free)
            fullest = max(s.memory.total for s in needs.stages.stages) * needs.chunks
            return TooLarge(way, max(fullest, needs.fullest_bytes))
        stages = choice.stages
        busy = stages.step_s - stages.end_s
        collectives = sum(collective_seconds(pricing).values()) * setting.micro_batches / way.mesh.pp
        idle = stages.bubble * busy
        parts = {
            "waiting in the pipeline": idle,
            "collectives inside layers": collectives,
            "sums over dp and the update": stages.end_s,
            "compute": busy - idle - collectives,
        }
        return Priced(way, stages.step_s, choice.fullest_bytes, parts)


def compile_plan(
    model: str | torch.nn.Module,
    *,
    example: Mapping[str, object] | None = None,
    declaration: Declaration | None = None,
    progress: Callable[[str], None] | None = None,
) -> CompiledPlan:
    """The plan that a declaration asks for. InputError for what cannot be had."""
    declared = declaration or Declaration()
    if declared.devices is None:
        return driver.compile_plan(model, example=example, declaration=declared, progress=progress)
    if declared.mesh is not None and declared.mesh.world_size != declared.devices:
        ranks = declared.mesh.world_size
        raise InputError(f"devices: found {declared.devices}, but the mesh {declared.mesh} has {ranks} ranks; give one of the two")
    hardware = load_hardware(declared.hardware or DEFAULT_HARDWARE)
    batch = declared.global_batch or SEQUENCES_PER_DEVICE * declared.devices
    limit = declared.memory_limit or hardware.device.memory_bytes
    pricer = Pricer(model, example, declared, batch, limit, progress or (lambda text: None))
    found = explore(pricer, declared.devices)
    if not found.priced:
        kept_less = leaner(pricer, found)
        if kept_less is not None:
            return driver.with_weights(kept_less, pricer.captured(kept_less.document.micro_batch)[0], model)
        raise InputError(nothing_fits(declared.devices, found, pricer.limit_bytes, larger(pricer, declared.devices)))
    compiled = fitting(pricer, found)
    compiled = replace(compiled, search=(*report(declared.devices, found, pricer.limit_bytes), *compiled.search))
    return driver.with_weights(compiled, pricer.captured(compiled.document.micro_batch)[0], model)


def fitting(pricer: Pricer, found: Found) -> CompiledPlan:
    """The plan of the best combination that fits with padded buckets, gathers and sums over dp, and a line for each that does not."""
    said: list[str] = []
    *better, last = [place.combination for place in found.best_meshes()]
    for way in better:
        try:
            return replace(pricer.plan(way), search=tuple(said))
        except OverLimitError as error:
            said.append(f"  {way}: not taken after all: {error}")
    return replace(pricer.plan(last), search=tuple(said))


def leaner(pricer: Pricer, found: Found) -> CompiledPlan | None:
    """Where nothing fits with the fastest layouts: the first of the nearest combinations that fits with layouts that keep less."""
    nearest = sorted((t for t in found.too_large if t.combination.mesh.tp > 1), key=lambda t: t.needs_bytes)
    for place in nearest[:LEAN]:
        way = place.combination
        try:
            compiled = pricer.plan(way)
        except InputError:
            continue
        first, *others = report(way.mesh.world_size, found, pricer.limit_bytes)
        chosen = f"  none fits with the fastest layouts; {way} fits with layouts that keep less, chosen"
        return replace(compiled, search=(first, chosen, *others))
    return None


def explore(pricer: Pricer, devices: int) -> Found:
    """Every combination that is worth it, micro-batches from the smallest."""
    found = Found()
    best = None
    for micro_batch in micro_batches(pricer):
        kinds = pricer.captured(micro_batch)[1]
        refused: Counter[str] = Counter()
        legal = combinations(space(pricer, kinds, devices, micro_batch), refused)
        ways = [way for way in legal if pricer.declaration.mesh in (None, way.mesh)]
        found.refused.update(refused)
        search(ways, pricer.segments, pricer.price, pricer.global_batch, pricer.limit_bytes, found)
        fastest = min((p.step_s for p in found.priced), default=None)
        if best is not None and (fastest is None or fastest >= best):
            break
        best = fastest
        if not ways or best is None:
            break
    return found


def micro_batches(pricer: Pricer) -> tuple[int, ...]:
    """Sizes to try: the given one, or powers of two that divide the global batch."""
    if pricer.declaration.micro_batch is not None:
        return (pricer.declaration.micro_batch,)
    sizes = (1 << n for n in range(LARGEST_MICRO_BATCH.bit_length()))
    return tuple(n for n in sizes if n <= LARGEST_MICRO_BATCH and pricer.global_batch % n == 0)


def space(pricer: Pricer, kinds: Kinds, devices: int, micro_batch: int) -> Space:
    """What this version has, or what was given."""
    given = pricer.declaration
    schedules = [given.schedule] if given.schedule not in (None, "auto") else [s for s in available("schedule") if s != ASYNCHRONOUS]
    hardware = load_hardware(given.hardware or DEFAULT_HARDWARE)
    recompute = [given.recompute] if given.recompute not in (None, "auto") else [str(r) for r in available("recompute") if r != "auto"]
    return Space(
        devices,
        pricer.global_batch,
        (micro_batch,),
        tuple((name, given.chunks or default_chunks(name)) for name in map(str, schedules)),
        tuple(map(str, recompute)),
        (given.zero,) if given.zero is not None else tuple(int(str(z)) for z in available("zero")),
        tuple(ep for ep in divisors(devices) if ep == 1 or find_regions(kinds, ep).by_kind),
        len(kinds.graph.segments),
        hardware.topology.ranks_per_node,
    )


def available(key: str) -> tuple[object, ...]:
    """Values that this version has, what needs a choice of its own left out."""
    return tuple(value for value in AVAILABLE[key] if value != "auto")


def larger(pricer: Pricer, devices: int) -> str:
    """The least multiple of the devices that fits, in words; nothing when none that is tried does."""
    for times in LARGER:
        if pricer.declaration.mesh is not None:
            return ""
        batch = pricer.global_batch * (1 if pricer.declaration.global_batch else times)
        wider = replace(pricer, global_batch=batch, priced={})
        if explore(wider, devices * times).priced:
            return f"{devices * times} devices, "
    return ""
