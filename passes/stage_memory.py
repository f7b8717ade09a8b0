"""What a rank keeps of its micro-batches over its list of actions, in bytes. Numbers in, numbers out.

A micro-batch goes through a stage's segments i = 0 ... n. They keep A_i from its F to its B and, where weight gradients wait for a W, D_i
from there to the W: operands of the products. For the moment they need F_i in the forward, T_i in the backward, S_i in a backward that puts
weight gradients off (all three beside A_i), V_i in the W (beside D_i). The most that there is of the micro-batch during

    F                  max over i of  A_0 + ... + A_i + F_i
    B                  max over i of  A_0 + ... + A_i + T_i                             (a backward frees from the last segment on)
    B before a W       max over i of  A_0 + ... + A_i + S_i + D_(i+1) + ... + D_n
    W                  max over i of  D_0 + ... + D_i + V_i

to which come all other micro-batches: A of each between F and B, D of each between B and W. What several segments of a stage hold counts
once, from the beginning to the end of an action.

    Option       a segment's numbers            Needs     a stage's
    Moment       an action, and how many other micro-batches are kept meanwhile
    rank_rows    the numbers of every stage of a rank at the rank's fullest, messages included (passes.message_memory)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from meshwright.compiler.footprint import PutOff
from meshwright.passes.message_memory import Sizes
from meshwright.runtime.actions import COMPUTE, Action, Actions, Kind, split_backwards


@dataclass(frozen=True)
class Option:
    """One way to run a segment.

    own_bytes         that autograd keeps for it alone, per micro-batch
    shared            storages that it keeps and that others may keep too, by name
    transient_bytes   the most that is there beside what is kept, in its forward or backward
    seconds           that it adds to the backward
    forward_bytes     of transient_bytes, what the forward needs; None: as much
    put_off           when its weight gradients wait for a W; None: all is kept till then
    """

    own_bytes: int
    shared: Mapping[str, int] = field(default_factory=dict)
    transient_bytes: int = 0
    seconds: float = 0.0
    forward_bytes: int | None = None
    put_off: PutOff | None = None

    @property
    def forward_need(self) -> int:
        """F_i."""
        return self.transient_bytes if self.forward_bytes is None else self.forward_bytes

    @property
    def waiting(self) -> PutOff:
        """D_i, S_i and V_i."""
        return self.put_off or PutOff(self.own_bytes, self.shared, self.transient_bytes)


class Doing(Enum):
    """What is done with a micro-batch; SPLIT is a B before a W."""

    FORWARD = "F"
    BACKWARD = "B"
    SPLIT = "B before W"
    WEIGHT = "W"


@dataclass(frozen=True)
class Moment:
    """An action of a stage. Of other micro-batches, `kept` are between F and B, `put_off` between B and W."""

    doing: Doing
    kept: int
    put_off: int = 0

    def covers(self, other: Moment) -> bool:
        """Whether nothing needs more in the other: a backward's need is no less than the forward's."""
        as_much = self.doing is other.doing or (self.doing is Doing.BACKWARD and other.doing is Doing.FORWARD)
        return as_much and self.kept >= other.kept and self.put_off >= other.put_off


def in_flight(count: int) -> tuple[Moment, ...]:
    """Of a stage that keeps so many micro-batches and puts nothing off."""
    return (Moment(Doing.BACKWARD, count - 1),)


def doing(action: Action, split: frozenset[tuple[int, int]]) -> Doing:
    """What an action of a rank does. `split`: its backwards before a W."""
    if action.kind is Kind.F:
        return Doing.FORWARD
    if action.kind is Kind.W:
        return Doing.WEIGHT
    return Doing.SPLIT if (action.stage, action.micro_batch) in split else Doing.BACKWARD


def moments(actions: Iterable[Action]) -> tuple[Moment, ...]:
    """Those of a stage's actions that may need most."""
    own = tuple(actions)
    split = split_backwards(own)
    kept = put_off = 0
    found: dict[Moment, None] = {}
    for action in own:
        now = doing(action, split)
        kept -= now in (Doing.BACKWARD, Doing.SPLIT)
        put_off -= now is Doing.WEIGHT
        found[Moment(now, kept, put_off)] = None
        kept += now is Doing.FORWARD
        put_off += now is Doing.SPLIT
    return tuple(m for m in found if not any(other.covers(m) for other in found if other != m))


@dataclass(frozen=True)
class Needs:
    """A micro-batch of a stage: A and D, and the most that there is of it during each of its actions."""

    kept: int
    put_off: int
    during: Mapping[Doing, int]

    @classmethod
    def plain(cls, kept: int) -> Needs:
        """Of a stage that keeps so much until the end and needs no more."""
        return cls(kept, kept, dict.fromkeys(Doing, kept))

    def most(self, moment: Moment) -> int:
        """The most that there is at a moment."""
        return self.others(moment) + self.during[moment.doing]

    def held(self, moment: Moment) -> int:
        """What lasts at a moment, before or after its action."""
        before = 0 if moment.doing is Doing.FORWARD else self.put_off if moment.doing is Doing.WEIGHT else self.kept
        after = {Doing.FORWARD: self.kept, Doing.SPLIT: self.put_off}.get(moment.doing, 0)
        return self.others(moment) + max(before, after)

    def others(self, moment: Moment) -> int:
        """Of other micro-batches."""
        return moment.kept * self.kept + moment.put_off * self.put_off


def needs_of(options: Sequence[Option]) -> Needs:
    """Of a stage whose segments take these, in order."""
    shared = {now: sum({name: size for o in options for name, size in rule.shared(o).items()}.values()) for now, rule in RULES.items()}
    return Needs(
        shared[Doing.FORWARD] + sum(o.own_bytes for o in options),
        shared[Doing.WEIGHT] + sum(o.waiting.own_bytes for o in options),
        {now: shared[now] + list(rule.peaks(options))[-1] for now, rule in RULES.items()},
    )


def forward_peaks(options: Sequence[Option]) -> Iterator[int]:
    """During F, of the first option, the first two and so on, without what is shared."""
    sums = accumulate(option.own_bytes for option in options)
    return accumulate((kept + option.forward_need for kept, option in zip(sums, options, strict=True)), max)


def backward_peaks(options: Sequence[Option]) -> Iterator[int]:
    """The same during B."""
    sums = accumulate(option.own_bytes for option in options)
    return accumulate((kept + option.transient_bytes for kept, option in zip(sums, options, strict=True)), max)


def split_peaks(options: Sequence[Option]) -> Iterator[int]:
    """The same during a B before a W."""
    most = kept = 0
    for option in options:
        kept += option.own_bytes
        most = max(most + option.waiting.own_bytes, kept + option.waiting.backward_bytes)
        yield most


def weight_peaks(options: Sequence[Option]) -> Iterator[int]:
    """The same during a W."""
    sums = accumulate(option.waiting.own_bytes for option in options)
    return accumulate((left + option.waiting.weight_bytes for left, option in zip(sums, options, strict=True)), max)


@dataclass(frozen=True)
class Rule:
    """How what there is during an action is added up: a segment's need, what it shares with others, and the peaks of its stage."""

    need: Callable[[Option], int]
    shared: Callable[[Option], Mapping[str, int]]
    peaks: Callable[[Sequence[Option]], Iterator[int]]


RULES: Mapping[Doing, Rule] = {
    Doing.FORWARD: Rule(lambda o: o.forward_need, lambda o: o.shared, forward_peaks),
    Doing.BACKWARD: Rule(lambda o: o.transient_bytes, lambda o: o.shared, backward_peaks),
    Doing.SPLIT: Rule(lambda o: o.waiting.backward_bytes, lambda o: {**o.shared, **o.waiting.shared}, split_peaks),
    Doing.WEIGHT: Rule(lambda o: o.waiting.weight_bytes, lambda o: o.waiting.shared, weight_peaks),
}


def stage_bytes(options: Sequence[Option], at: Sequence[Moment]) -> int:
    """The most that a stage has of its micro-batches."""
    needs = needs_of(options)
    return max(map(needs.most, at))


@dataclass(frozen=True)
class Row:
    """A stage's part of its rank's fullest moments: `activations` when most lasts, `transient` beyond that when most is there at all."""

    activations: int = 0
    transient: int = 0


def stage_row(needs: Needs, at: Sequence[Moment]) -> Row:
    """Of a stage alone on its rank."""
    held = max(map(needs.held, at))
    return Row(held, max(map(needs.most, at)) - held)


def rank_rows(actions: Actions, needs: Mapping[int, Needs], messages: Sizes) -> dict[int, Row]:
    """Of the stages of a rank, whose micro-batches and messages come and go by its actions."""
    split = split_backwards(actions)
    now: dict[int, int] = dict.fromkeys(needs, 0)
    held, most, sent, fullest, busiest = 0, 0, 0, dict(now), min(needs)
    for action in actions:
        stage, of = action.stage, needs[action.stage]
        free, made = messages.get(action, (0, 0))
        sent -= free
        what = doing(action, split) if action.kind in COMPUTE else None
        if what in (Doing.BACKWARD, Doing.SPLIT, Doing.WEIGHT):
            now[stage] -= of.put_off if what is Doing.WEIGHT else of.kept
        during = 0 if what is None else of.during[what]
        if what in (Doing.FORWARD, Doing.SPLIT):
            now[stage] += of.kept if what is Doing.FORWARD else of.put_off
            during -= of.kept if what is Doing.FORWARD else of.put_off
        lasting = sum(now.values())
        if (there := lasting + sent + max(during, made)) > most:
            most, busiest = there, stage
        if lasting > held:
            held, fullest = lasting, dict(now)
        sent += made
    return {stage: Row(fullest[stage], max(0, most - held) if stage == busiest else 0) for stage in needs}
