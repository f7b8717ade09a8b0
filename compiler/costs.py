"""What collectives cost: alpha-beta formulas, and the conversions between layouts that are made of them. Public as `mw.costs`.

Terms
    a     `link.latency_s`, seconds per message
    b     1 / `link.bandwidth_bytes_per_s`, seconds per byte; every rank sends and receives at once
    g     1 / `link.reduce_bytes_per_s`, seconds per byte that is added
    p     `ranks` in the group; lg p = log2 p
    n     `num_bytes` of the whole array, as nccl-tests counts: all-gather's result; one rank's input of reduce-scatter and
          all-to-all; the array that all-reduce and broadcast work on

Sources
    [T]   Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005
    [S]   Sanders, Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; as in NCCL
    [N]   nccl-tests, doc/PERFORMANCE.md: the same bandwidth terms

Each `..._s` without an algorithm in its name is the cheapest of the algorithms that NCCL and MPICH choose between for the
arrays of training; one rank costs nothing. Where a link has measurements of a collective on some number of ranks, that number
takes what was measured, and others as much more or less as the formula says. No two groups share a wire: hardware.link_for gives
each rank its own port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor, log2

from meshwright.compiler.hardware import Link
from meshwright.plans.layout import Type, conversion

Cost = Callable[[float, int, Link], float]


def point_to_point_s(num_bytes: float, link: Link) -> float:
    """One message: a + n b."""
    return link.latency_s + num_bytes / link.bandwidth_bytes_per_s


def all_reduce_ring_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Reduce-scatter and all-gather around a ring: 2(p-1) a + 2 n(p-1)/p b + n(p-1)/p g. [T]"""
    share = num_bytes * (ranks - 1) / ranks
    return 2 * (ranks - 1) * link.latency_s + 2 * share / link.bandwidth_bytes_per_s + share / link.reduce_bytes_per_s


def all_reduce_halving_doubling_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Recursive halving, then doubling (Rabenseifner): 2 lg p a + 2 n(p-1)/p b + n(p-1)/p g. [T]

    When p is no power of two: (2 floor(lg p) + 2) a + (2(p-1)/p + 2) n b + n(1 + (p-1)/p) g.
    """
    odd = 0 if is_power_of_two(ranks) else 1
    share = num_bytes * (ranks - 1) / ranks
    sent, added = 2 * share + 2 * odd * num_bytes, share + odd * num_bytes
    messages = 2 * floor(log2(ranks)) + 2 * odd
    return messages * link.latency_s + sent / link.bandwidth_bytes_per_s + added / link.reduce_bytes_per_s


def all_reduce_doubling_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Recursive doubling, for arrays of a few KB, not in NCCL: lg p (a + n b + n g); two more messages when p is no power of
    two. [T]"""
    steps = floor(log2(ranks))
    odd = 0 if is_power_of_two(ranks) else 1
    added = (steps + odd) * num_bytes / link.reduce_bytes_per_s
    return (steps + 2 * odd) * point_to_point_s(num_bytes, link) + added


def all_reduce_tree_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Two binary trees, pipelined, up and down: 2 ceil(lg p) a + 2 n b + n g. [S]"""
    steps = 2 * ceil(log2(ranks))
    return steps * link.latency_s + 2 * num_bytes / link.bandwidth_bytes_per_s + num_bytes / link.reduce_bytes_per_s


def all_reduce_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Every rank gets the sum of all ranks' arrays."""
    return cheapest("all-reduce", (all_reduce_ring_s, all_reduce_halving_doubling_s, all_reduce_tree_s), num_bytes, ranks, link)


def all_gather_ring_s(num_bytes: float, ranks: int, link: Link) -> float:
    """(p-1) a + n(p-1)/p b. [T]"""
    return (ranks - 1) * link.latency_s + num_bytes * (ranks - 1) / ranks / link.bandwidth_bytes_per_s


def all_gather_bruck_s(num_bytes: float, ranks: int, link: Link) -> float:
    """ceil(lg p) a + n(p-1)/p b; recursive doubling when p is a power of two. [T]"""
    return ceil(log2(ranks)) * link.latency_s + num_bytes * (ranks - 1) / ranks / link.bandwidth_bytes_per_s


def all_gather_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Every rank gets the whole array, of which each had a slice."""
    return cheapest("all-gather", (all_gather_ring_s, all_gather_bruck_s), num_bytes, ranks, link)


def reduce_scatter_ring_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Ring or pairwise exchange: (p-1) a + n(p-1)/p b + n(p-1)/p g. [T]"""
    share = num_bytes * (ranks - 1) / ranks
    return (ranks - 1) * link.latency_s + share / link.bandwidth_bytes_per_s + share / link.reduce_bytes_per_s


def reduce_scatter_halving_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Recursive halving: lg p a + n(p-1)/p b + n(p-1)/p g. [T]

    When p is no power of two the odd ranks hand their array over first and get their slice last: 2 a + n(1 + 1/p) b + n g more.
    """
    share = num_bytes * (ranks - 1) / ranks
    odd = 0 if is_power_of_two(ranks) else 1
    messages = floor(log2(ranks)) + 2 * odd
    sent, added = share + odd * num_bytes * (1 + 1 / ranks), share + odd * num_bytes
    return messages * link.latency_s + sent / link.bandwidth_bytes_per_s + added / link.reduce_bytes_per_s


def reduce_scatter_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Every rank gets its slice of the sum of all ranks' arrays."""
    return cheapest("reduce-scatter", (reduce_scatter_ring_s, reduce_scatter_halving_s), num_bytes, ranks, link)


def all_to_all_pairwise_s(num_bytes: float, ranks: int, link: Link) -> float:
    """(p-1) a + n(p-1)/p b. [T]"""
    return (ranks - 1) * link.latency_s + num_bytes * (ranks - 1) / ranks / link.bandwidth_bytes_per_s


def all_to_all_bruck_s(num_bytes: float, ranks: int, link: Link) -> float:
    """For short arrays: ceil(lg p) (a + n/2 b). [T]"""
    return ceil(log2(ranks)) * point_to_point_s(num_bytes / 2, link)


def all_to_all_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Every rank sends each other rank its part of an array of n bytes, own part included."""
    return cheapest("all-to-all", (all_to_all_pairwise_s, all_to_all_bruck_s), num_bytes, ranks, link)


def broadcast_binomial_s(num_bytes: float, ranks: int, link: Link) -> float:
    """ceil(lg p) (a + n b). [T]"""
    return ceil(log2(ranks)) * point_to_point_s(num_bytes, link)


def broadcast_scatter_gather_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Scatter, then a ring of all-gather, for long arrays: (ceil(lg p) + p - 1) a + 2 n(p-1)/p b. [T]"""
    messages = ceil(log2(ranks)) + ranks - 1
    return messages * link.latency_s + 2 * num_bytes * (ranks - 1) / ranks / link.bandwidth_bytes_per_s


def broadcast_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Every rank gets one rank's array."""
    return cheapest("broadcast", (broadcast_binomial_s, broadcast_scatter_gather_s), num_bytes, ranks, link)


def cheapest(collective: str, algorithms: tuple[Cost, ...], num_bytes: float, ranks: int, link: Link) -> float:
    """The least cost, in proportion to what was measured on the link; ValueError for arguments that mean nothing."""
    if ranks < 1 or num_bytes < 0:
        raise ValueError(f"a collective of {num_bytes} bytes on {ranks} ranks; expected 0 bytes or more on 1 rank or more")
    if ranks == 1:
        return 0.0
    modelled = min(algorithm(num_bytes, ranks, link) for algorithm in algorithms)
    measured = link.seconds(collective, num_bytes)
    if measured is None or ranks == link.measured_ranks:
        return modelled if measured is None else measured
    reference = min(algorithm(num_bytes, link.measured_ranks, link) for algorithm in algorithms)
    return modelled * measured / reference if reference else measured


def is_power_of_two(ranks: int) -> bool:
    """Whether recursive algorithms need no extra steps."""
    return ranks & (ranks - 1) == 0


def slice_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Reads and writes one slice."""
    return 2 * num_bytes / ranks / link.memory_bytes_per_s


def pad_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Reads one slice and writes the whole array."""
    return num_bytes * (1 + 1 / ranks) / link.memory_bytes_per_s


def first_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Writes zeros on every rank but the first."""
    return num_bytes / link.memory_bytes_per_s


def exchange_s(num_bytes: float, ranks: int, link: Link) -> float:
    """All-to-all between two slicings of an array: each rank holds a slice and sends all of it but its own part."""
    return all_to_all_s(num_bytes / ranks, ranks, link)


def nothing_s(num_bytes: float, ranks: int, link: Link) -> float:
    """Identity."""
    return 0.0


CONVERSION_COSTS: Mapping[str, Cost] = {
    "identity": nothing_s,
    "all-reduce": all_reduce_s,
    "all-gather": all_gather_s,
    "reduce-scatter": reduce_scatter_s,
    "all-to-all": exchange_s,
    "slice": slice_s,
    "pad": pad_s,
    "first": first_s,
}
"""By the names in plans.layout.CONVERSIONS; bytes are those of the whole tensor."""


def conversion_s(
    source: Type, target: Type, global_bytes: float, ranks: int, link: Link, requires_grad: bool
) -> tuple[float, float]:
    """(forward, backward) seconds that turn `source` into `target` on one axis; `global_bytes` are those of the whole tensor.

    Backward is 0 when no gradient flows. Nothing costs anything on one rank.
    """
    if ranks == 1:
        return 0.0, 0.0
    pair = conversion(source, target)
    forward = CONVERSION_COSTS[pair.forward](global_bytes, ranks, link)
    backward = CONVERSION_COSTS[pair.backward](global_bytes, ranks, link) if requires_grad else 0.0
    return forward, backward
