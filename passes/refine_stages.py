"""From the solver's cuts to those of least simulated step time.

passes.solver minimises a closed form of the step time, exact for equal stages and close for uneven ones. Here cuts are judged by the
simulated schedule itself:

    every partition        that memory and pins allow, when so many simulations are within EFFORT: the answer is the best there is
    one cut at a time      otherwise: of all cuts moved by one item the best move is taken, until none is better or EFFORT is spent

Partitions whose lower bound is no better than what is known are not simulated: the slowest rank works on every micro-batch, and one
micro-batch goes through every stage. Equal times leave the solver's cuts, which are the evenest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from math import comb

from meshwright.passes.solver import Chain, Cuts

EFFORT = 200_000
"""Actions that may be simulated: about half a second."""
BETTER = 1e-9
"""Least relative gain that counts."""

StepTime = Callable[[Cuts], float]


def refine(chain: Chain, cuts: Cuts, step_s: StepTime, ranks: tuple[int, ...]) -> Cuts:
    """The best cuts found, from the solver's. `ranks`: of every stage; `step_s` simulates."""
    if chain.stages == 1 or len(chain.pinned) >= chain.stages - 1:
        return cuts
    cost = 2 * chain.stages * chain.micro_batches
    allowed = EFFORT // cost
    search = Search(chain, cuts, step_s, ranks)
    if comb(len(chain.items) - 1, chain.stages - 1) <= allowed:
        for other in partitions(chain):
            search.offer(other)
        return search.cuts
    while allowed > 0:
        before = search.cuts
        moves = [move for move in moved(before) if fits(chain, move)]
        for move in moves[:allowed]:
            search.offer(move)
        allowed -= len(moves)
        if search.cuts == before:
            break
    return search.cuts


class Search:
    """The best cuts so far."""

    def __init__(self, chain: Chain, cuts: Cuts, step_s: StepTime, ranks: tuple[int, ...]) -> None:
        self.chain, self.simulated, self.ranks = chain, step_s, ranks
        self.cuts, self.least_s = cuts, step_s(cuts)

    def offer(self, cuts: Cuts) -> None:
        """Takes cuts that are better."""
        if self.bound_s(cuts) >= self.least_s * (1 - BETTER):
            return
        found = self.simulated(cuts)
        if found < self.least_s * (1 - BETTER):
            self.cuts, self.least_s = cuts, found

    def bound_s(self, cuts: Cuts) -> float:
        """No schedule is faster."""
        work: dict[int, float] = {}
        for rank, (start, stop) in zip(self.ranks, pairwise((0, *cuts)), strict=True):
            work[rank] = work.get(rank, 0.0) + self.chain.duration(start, stop) * self.chain.tick_s
        return self.chain.micro_batches * max(work.values()) * (1 - 1e-6)


def partitions(chain: Chain) -> Iterator[Cuts]:
    """Every partition that memory and pins allow."""
    size = len(chain.items)
    for inner in combinations(range(1, size), chain.stages - 1):
        cuts = (*inner, size)
        if fits(chain, cuts):
            yield cuts


def moved(cuts: Cuts) -> Iterator[Cuts]:
    """Every partition with one cut moved by one item."""
    for place in range(len(cuts) - 1):
        for step in (-1, 1):
            yield (*cuts[:place], cuts[place] + step, *cuts[place + 1 :])


def fits(chain: Chain, cuts: Cuts) -> bool:
    """Whether every stage has an item, is where it is pinned, and is within memory."""
    spans = tuple(pairwise((0, *cuts)))
    if any(start >= stop for start, stop in spans) or any(cuts[stage] != end for stage, end in chain.pinned.items()):
        return False
    limit = chain.limit_bytes
    return limit is None or all(chain.memory_bytes(stage, start, stop) <= limit for stage, (start, stop) in enumerate(spans))
