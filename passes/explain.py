"""What a decision costs and what else it could have been: `explain` without capturing or planning.

    Explanation        what was chosen, its cost split, every alternative with its cost or why it is illegal
    Outcome            what a whole plan costs: alternatives are compared by it
    parameter_types    every storage type a parameter could have in principle, with why not
    result_types       the same of an op's result
    op_costs           an op's compute, the conversions of its operands, and what autograd keeps of it
    segment_split      a segment's compute, each collective and memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.compiler.assignment import TRAFFIC, Legal, OpClass
from meshwright.compiler.flops import op_time_s
from meshwright.compiler.graph import Parameter
from meshwright.compiler.kinds import Kind, Kinds
from meshwright.compiler.labels import BATCH, HIDDEN, SEQUENCE, Labels
from meshwright.passes.segment_costs import Pricing, compute_seconds, conversion_seconds
from meshwright.plans.layout import I, P, R, Type, conversion, shard
from meshwright.plans.units import format_bytes, format_seconds

Row = tuple[str, str]


@dataclass(frozen=True)
class Outcome:
    """A whole plan: seconds of a step, bytes of the fullest rank, seconds of a step by collective."""

    step_s: float
    memory_bytes: int
    collectives: Mapping[str, float]


@dataclass(frozen=True)
class Alternative:
    """Another choice: what the plan would cost with it, or why it cannot be had."""

    choice: str
    outcome: Outcome | None = None
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """`costs` are (what, how much) of the choice itself; `outcome` is the plan's."""

    name: str
    what: str
    choice: str
    pinned: bool
    outcome: Outcome
    costs: tuple[Row, ...]
    alternatives: tuple[Alternative, ...]
    without_pin: Outcome | None = None

    def lines(self) -> list[str]:
        """Text, a line each."""
        found = [f"{self.name}: {self.what}", f"choice: {self.choice}{' (pinned)' if self.pinned else ''}"]
        found += [f"  {label}: {amount}" for label, amount in self.costs]
        step, memory = format_seconds(self.outcome.step_s), format_bytes(self.outcome.memory_bytes)
        found.append(f"the plan: {step} a step, {memory} on the fullest rank")
        if self.pinned and self.without_pin is not None:
            found.append(f"the pin costs: {difference(self.without_pin, self.outcome)} against the solver's own choice")
        found += ["alternatives, with everything that is not pinned chosen anew:"] if self.alternatives else []
        for other in self.alternatives:
            said = difference(self.outcome, other.outcome) if other.outcome else f"not possible: {other.reason}"
            found.append(f"  {other.choice}: {said}{f' ({other.reason})' if other.outcome and other.reason else ''}")
        return found

    def facts(self) -> dict[str, object]:
        """The same for machines."""
        return {
            "name": self.name,
            "what": self.what,
            "choice": self.choice,
            "pinned": self.pinned,
            "plan": outcome_facts(self.outcome),
            "costs": dict(self.costs),
            "without_pin": outcome_facts(self.without_pin),
            "alternatives": [
                {"choice": a.choice, "reason": a.reason or None, "plan": outcome_facts(a.outcome)} for a in self.alternatives
            ],
        }


def outcome_facts(outcome: Outcome | None) -> dict[str, object] | None:
    """An outcome for machines."""
    if outcome is None:
        return None
    return {"step_s": outcome.step_s, "memory_bytes": outcome.memory_bytes, "collectives": dict(outcome.collectives)}


def difference(base: Outcome, other: Outcome) -> str:
    """What `other` costs more, in words: step time, memory, and the collectives that differ."""
    more_s, more_bytes = other.step_s - base.step_s, other.memory_bytes - base.memory_bytes
    share = f" ({more_s / base.step_s:+.1%})" if base.step_s else ""
    parts = [f"{signed(format_seconds(abs(more_s)), more_s)} a step{share}", f"{signed(format_bytes(abs(more_bytes)), more_bytes)} memory"]
    for name in sorted({*base.collectives, *other.collectives}):
        change = other.collectives.get(name, 0.0) - base.collectives.get(name, 0.0)
        if abs(change) > 1e-9:
            parts.append(f"{name} {signed(format_seconds(abs(change)), change)}")
    return ", ".join(parts)


def signed(text: str, amount: float) -> str:
    return ("-" if amount < 0 else "+") + text


def indivisible(size: int, dim: int, legal: Legal) -> str:
    """Why a dim cannot be sliced, when its size is the reason."""
    return f"dim {dim} of {size} does not divide by {legal.axis}={legal.ranks}" if size % legal.ranks else ""


def parameter_types(kinds: Kinds, legal: Legal, parameter: Parameter, storable: tuple[Type, ...]) -> dict[Type, str]:
    """Every storage type by why it is illegal; "" when it is legal. `storable` are the legal ones."""
    found = dict.fromkeys((*storable, I, R), "")
    if not parameter.trainable:
        found[R] = "the parameter is frozen: it has no gradient to be partial"
    sliced = {t.dim for t in storable if t.kind == "S"}
    for dim, size in enumerate(parameter.value.shape):
        if dim not in sliced:
            found[shard(dim)] = indivisible(size, dim, legal) or reader_refusals(kinds, legal, parameter)
    return found


def reader_refusals(kinds: Kinds, legal: Legal, parameter: Parameter) -> str:
    """Why no op that reads a parameter takes a slice of it."""
    classes = [kinds.class_of_op[i] for i in kinds.graph.consumers.get(parameter.value.name, ()) if i in kinds.class_of_op]
    sizes = {f"{r.size} of {r.factor}" for c in classes for r in legal.refusals.get(c, ())}
    if sizes:
        return f"no op that reads it takes this slice: {', '.join(sorted(sizes))} does not divide by {legal.axis}={legal.ranks}"
    return "no op that reads it takes this slice"


def result_types(kinds: Kinds, legal: Legal, labels: Mapping[str, Labels], op_class: OpClass, sequence: bool) -> dict[Type, str]:
    """Every type of an op's first result by why it is illegal; "" when it is legal. `sequence`: whether the sequence may be cut."""
    op = kinds.op(*op_class)
    value = op.results[0]
    found = dict.fromkeys((s.results[0] for s in legal.strategies[op_class]), "")
    no_rule = op_class in legal.without_rule
    for dim, size in enumerate(value.shape):
        label = labels.get(value.name, ())
        own = label[dim] if dim < len(label) else frozenset()
        if not any(t.kind == "S" and t.dim == dim for t in found):
            found[shard(dim)] = (
                f"{op.target} has no rule"
                if no_rule
                else indivisible(size, dim, legal) or protected(own, sequence) or refused_factors(legal, op_class)
            )
    for type_, why in ((I, "the op always runs sliced here"), (R, "no gradient flows"), (P, "the op sums over nothing that can be cut")):
        found.setdefault(type_, f"{op.target} has no rule" if no_rule else why)
    return found


def protected(labels: frozenset[str], sequence: bool) -> str:
    """Why a dim of this meaning is not cut on this axis."""
    if BATCH in labels:
        return "the batch is dp's to cut"
    if HIDDEN in labels:
        return "the hidden size of what layers hand on stays whole"
    return "sequence_parallel is off" if SEQUENCE in labels and not sequence else ""


def refused_factors(legal: Legal, op_class: OpClass) -> str:
    refused = legal.refusals.get(op_class, ())
    sizes = ", ".join(f"{r.size} of {r.factor}" for r in refused)
    return f"{sizes} does not divide by {legal.axis}={legal.ranks}" if refused else "the op's rule has no such strategy"


def op_costs(pricing: Pricing, op_class: OpClass) -> tuple[Row, ...]:
    """Compute per micro-batch and layer, the conversions of its operands with their collectives, and its result's bytes."""
    assignment, kinds = pricing.assignment, pricing.assignment.kinds
    op, strategy = kinds.op(*op_class), assignment.strategies[op_class]
    split = any(t.kind == "S" for t in (*strategy.operands, *strategy.results))
    forward, backward = op_time_s(op, kinds.graph.values, 1 / assignment.ranks if split else 1.0, pricing.hardware)
    rows = [
        ("operands", ", ".join(map(str, strategy.operands)) or "none"),
        ("compute", f"forward {format_seconds(forward)}, backward {format_seconds(backward)} per micro-batch and layer"),
    ]
    entered = assignment.entry_types(op_class[0])
    times = conversion_seconds(pricing, kinds.by_name[op_class[0]].representative)
    for name, need in dict(zip(op.operands, strategy.operands, strict=True)).items():
        source = entered.get(name, assignment.type_of(name))
        if source != need:
            rows.append((f"{name} {source} -> {need}", conversion_row(source, need, times[name, source, need])))
    rows.append(("result", f"{format_bytes(pricing.local_bytes(op.results[0].name, strategy.results[0]))} on a rank"))
    return tuple(rows)


def conversion_row(source: Type, target: Type, times: tuple[float, float]) -> str:
    """A conversion's collectives and seconds, without what is hidden."""
    names = conversion(source, target)
    forward, backward = (f"{n} {format_seconds(t)}" for n, t in zip((names.forward, names.backward), times, strict=True))
    return f"forward {forward}, backward {backward}, shared by all that read it so"


def segment_split(pricing: Pricing, kind: Kind) -> tuple[Row, ...]:
    """Compute and collectives of one member of a kind, per micro-batch."""
    assignment = pricing.assignment
    forward, backward = compute_seconds(pricing, kind.representative)
    rows = [("compute", f"forward {format_seconds(forward)}, backward {format_seconds(backward)} per micro-batch")]
    found: dict[str, list[float]] = {}
    for (name, source, target), times in conversion_seconds(pricing, kind.representative).items():
        names, runs = conversion(source, target), (True, assignment.kinds.graph.values[name].requires_grad)
        for collective, time_s, run in zip((names.forward, names.backward), times, runs, strict=True):
            if collective in TRAFFIC and run and assignment.ranks > 1:
                found.setdefault(collective, []).append(time_s)
    rows += [(name, f"{len(times)} taking {format_seconds(sum(times))} per micro-batch") for name, times in found.items()]
    return tuple(rows)
