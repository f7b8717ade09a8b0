"""Pipeline schedules by name: each a function that gives the order of compute on every rank, F, B and W.

    order(ranks, chunks, micro_batches) -> Schedule          without transfers; runtime.schedules adds those

The model is cut into ranks * chunks stages. They are dealt to ranks round and round (stage s on rank s mod p), or for V
schedules down and back up (p ranks: 0 1 .. p-1 p-1 .. 1 0), which keeps the loss beside the embedding.

    name           chunks   bubble for equal stages of F, B and W seconds each (whole ranks)      activations, in whole ranks
    gpipe          1        (p-1) (F + B + W)                                                    m
    1f1b           1        (p-1) (F + B + W)                                                    p - s
    interleaved    2 or more  (p-1) (F + B + W) / v                                              about p (1 + (p-1) / (p v))
    zb-h1          1        (p-1) (F + B - W)                                                    p
    zb-h2          1        (p-1) (F + B - 2 W) on each rank, from its first action to its last  2 p - 1
    zb-v           2        (p-1) F / v when F = B = W                                           p
    pipedream-2bw  1        0: the next step's forwards fill it                                  p - s, and two weight versions
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.runtime.actions import Action, Actions, Kind, Schedule, StageRanks

F, B, W = Kind.F, Kind.B, Kind.W
Order = Callable[[int, int, int], Schedule]


def loop_ranks(ranks: int, chunks: int) -> StageRanks:
    """Stages dealt round and round."""
    return tuple(range(ranks)) * chunks


def v_ranks(ranks: int, chunks: int) -> StageRanks:
    """Stages dealt down and back up."""
    return tuple(r for chunk in range(chunks) for r in (range(ranks) if chunk % 2 == 0 else reversed(range(ranks))))


def gpipe(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965, section 2.3)."""
    order = [(kind, i) for kind in (F, B) for i in range(micro_batches)]
    return tuple(tuple(Action(stage, kind, i) for kind, i in order) for stage in range(ranks))


def one_f_one_b(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turn, after a warm-up of one forward per later stage (PipeDream-Flush:
    Narayanan et al., arXiv 2006.09503, section 2.2; as in arXiv 2104.04473, figure 4 top)."""
    return tuple(tuple(_alternating(r, ranks - r - 1, None, micro_batches)) for r in range(ranks))


def zb_h1(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B with the weight gradients put off, so far that every rank keeps p micro-batches (Qi et al., arXiv 2401.10241,
    section 2.1.2, figure 2 top). Rank s does W of micro-batch i after B of i + s."""
    return tuple(tuple(_alternating(r, ranks - r - 1, r, micro_batches)) for r in range(ranks))


def zb_h2(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """The same with twice the warm-up, which fills the bubble before the first backward and keeps 2p - 1 micro-batches
    (Qi et al., arXiv 2401.10241, section 2.1.2, figure 2 bottom)."""
    return tuple(tuple(_alternating(r, 2 * (ranks - r - 1), 2 * r, micro_batches)) for r in range(ranks))


def _alternating(stage: int, warmup: int, delay: int | None, micro_batches: int) -> Iterator[Action]:
    """`warmup` forwards, then forward and backward in turn; W of a micro-batch `delay` backwards after its own B."""
    warmup = min(micro_batches, warmup)
    yield from (Action(stage, F, i) for i in range(warmup))
    for i in range(micro_batches):
        if warmup + i < micro_batches:
            yield Action(stage, F, warmup + i)
        yield Action(stage, B, i)
        if delay is not None and i >= delay:
            yield Action(stage, W, i - delay)
    if delay is not None:
        yield from (Action(stage, W, i) for i in range(max(0, micro_batches - delay), micro_batches))


def interleaved(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """1F1B over several chunks per rank, p micro-batches at a time through each (Narayanan et al., arXiv 2104.04473,
    section 2.2, figure 4 bottom). For any number of micro-batches: the order of the next multiple of p, less what is too many."""
    whole = -(-micro_batches // ranks) * ranks
    groups = [range(start, start + ranks) for start in range(0, whole, ranks)]
    forwards = [(chunk, i) for group in groups for chunk in range(chunks) for i in group]
    backwards = [(chunk, i) for group in groups for chunk in reversed(range(chunks)) for i in group]
    orders = (_interleaved_rank(r, ranks, forwards, backwards, (chunks - 1) * ranks) for r in range(ranks))
    return _without(orders, micro_batches)


def _interleaved_rank(
    rank: int, ranks: int, forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], first_loss: int
) -> Iterator[Action]:
    """`first_loss`: forwards before the one whose backward is the first."""
    warmup = min(len(forwards), 2 * (ranks - rank - 1) + first_loss)
    yield from (Action(chunk * ranks + rank, F, i) for chunk, i in forwards[:warmup])
    for k, (chunk, i) in enumerate(backwards):
        if warmup + k < len(forwards):
            ahead, j = forwards[warmup + k]
            yield Action(ahead * ranks + rank, F, j)
        yield Action(chunk * ranks + rank, B, i)


def _without(orders: Iterable[Iterable[Action]], micro_batches: int) -> Schedule:
    """Without the micro-batches that are too many. No rank waits for them, so what could run still can."""
    return tuple(tuple(a for a in order if a.micro_batch < micro_batches) for order in orders)


def zb_v(ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """Two chunks per rank in a V, weight gradients where they fill gaps; no more activations than 1F1B's first rank
    (Qi et al., arXiv 2401.10241, section 6; arXiv 2405.15362, section 3.3, V-ZB)."""
    enough = max(micro_batches, 2 * ranks - 1)
    return _without((_zb_v_rank(r, ranks, enough) for r in range(ranks)), micro_batches)


def _zb_v_rank(rank: int, ranks: int, micro_batches: int) -> Actions:
    """Counts tell how many micro-batches each kind of action has had, on the way down and on the way back."""
    down, back = rank, 2 * ranks - 1 - rank
    counts: dict[tuple[int, Kind], int] = {}
    found: list[Action] = []

    def do(stage: int, *kinds: Kind) -> None:
        for kind in kinds:
            i = counts.get((stage, kind), 0)
            if i < micro_batches:
                found.append(Action(stage, kind, i))
                counts[stage, kind] = i + 1

    for _ in range(2 * (ranks - rank) - 1):
        do(down, F)
    for _ in range(rank):
        do(back, F)
        do(down, F)
    for _ in range(ranks - rank):
        do(back, F, B, W)
    while counts[back, F] < micro_batches or counts[down, F] < micro_batches:
        do(down, F, B, W)
        do(back, F, B, W)
    for _ in range(rank):
        do(down, B)
        do(back, B)
    for _ in range(ranks - rank):
        do(down, B, W)
    for stage in (back, down):
        for _ in range(micro_batches - counts.get((stage, W), 0)):
            do(stage, W)
    return tuple(found)


@dataclass(frozen=True)
class Named:
    """A schedule that plans can name.

    most_chunks     chunks per rank it may have (the least is 2 where it may have several); it has `chunks` unless told
    stage_ranks     (ranks, chunks) -> the rank of each stage
    """

    order: Order
    chunks: int = 1
    most_chunks: int = 1
    stage_ranks: Callable[[int, int], StageRanks] = loop_ranks

    def allows(self, chunks: int) -> bool:
        return min(2, self.most_chunks) <= chunks <= self.most_chunks


MANY = 1 << 16
ASYNCHRONOUS = "pipedream-2bw"
"""The schedule whose steps follow each other without a flush."""
SCHEDULES: Mapping[str, Named] = {
    "gpipe": Named(gpipe),
    "1f1b": Named(one_f_one_b),
    "interleaved": Named(interleaved, 2, MANY),
    "zb-h1": Named(zb_h1),
    "zb-h2": Named(zb_h2),
    "zb-v": Named(zb_v, 2, 2, v_ranks),
    ASYNCHRONOUS: Named(one_f_one_b),
}
"""By name in plans. The order of pipedream-2bw is that of one step alone; steps that follow each other have no flush between
them (runtime.endless)."""
