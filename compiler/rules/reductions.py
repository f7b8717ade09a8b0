"""Factors of reductions, scans, normalisations, pooling and losses over classes.

A sum over a sharded dim is P. Whatever is not linear in the reduced dim (a maximum, a norm, a softmax, a sort) needs it whole. A scan
(cumsum) needs its dim whole too, and is linear.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.compiler.rules.factors import Call, Dims, Factors, Rule, aligned, broadcast, dims_of, whole
from meshwright.compiler.rules.shapes import LINEAR, named_dim, same_but
from meshwright.plans.layout import I


def listed_dims(call: Call, index: int, name: str = "dim") -> set[int]:
    """The reduced dims: those that an argument lists, all where it lists none."""
    rank = len(call.operands[0].shape)
    listed = call.integers(index, name) if index >= 0 else []
    return {d % rank for d in listed or range(rank)} if rank else set()


def kept_dims(names: Dims, reduced: set[int], result: tuple[int, ...]) -> Dims:
    """Names of a result that lacks the reduced dims, or keeps them with one entry."""
    keep = len(result) == len(names)
    return tuple("" if i in reduced else name for i, name in enumerate(names) if keep or i not in reduced)


def reduced(index: int = 1, name: str = "dim") -> Rule:
    """max, var, norm, any, argmax ...: the reduced dims are whole. `index` is the argument that lists them, -1 for all dims."""

    def rule(call: Call) -> Factors:
        dims = listed_dims(call, index, name)
        names = dims_of(len(call.operands[0].shape), dims)
        return Factors((names,), tuple(kept_dims(names, dims, r.shape) for r in call.results))

    return rule


def summed(index: int = 1, lowering: str = "") -> Rule:
    """sum and mean: a reduced dim may be sharded, the result is then P."""

    def rule(call: Call) -> Factors:
        dims = listed_dims(call, index)
        names = dims_of(len(call.operands[0].shape))
        taken = frozenset(names[i] for i in dims)
        lowered = {f: lowering for f in taken} if lowering else {}
        result = kept_dims(names, dims, call.results[0].shape)
        return Factors((names,), (result,), summed=taken, lowering=lowered, linear=LINEAR)

    return rule


def along(index: int, default: int = -1, linear: bool = False) -> Rule:
    """Softmax, sort, topk, cumsum: one operand, the dim that an argument names is whole."""

    def rule(call: Call) -> Factors:
        factors = same_but(call, {named_dim(call, index, default=default)} if call.operands[0].shape else set())
        return factors if linear else replace(factors, linear=())

    return rule


def picked(index: int, default: int = -1) -> Rule:
    """kthvalue, mode, median along a dim: reduced to one entry, or gone."""

    def rule(call: Call) -> Factors:
        dims = {named_dim(call, index, default=default)} if call.operands[0].shape else set()
        names = dims_of(len(call.operands[0].shape), dims)
        return Factors((names,), tuple(kept_dims(names, dims, r.shape) for r in call.results))

    return rule


def histogram(call: Call) -> Factors:
    """histc over a given range: counts of all entries, so those of the ranks' shares add up. Without a range it is the data's own."""
    if not call.argument(2, "min", 0) and not call.argument(3, "max", 0):
        return whole(call)
    names = dims_of(len(call.operands[0].shape))
    return Factors((names,), (("",),), summed=frozenset(names))


def normalized(call: Call) -> Factors:
    """layer_norm and rms_norm: the normalised dims, last ones, are whole."""
    width = len(call.integers(1, "normalized_shape"))
    rank = len(call.operands[0].shape)
    names = dims_of(rank, set(range(rank - width, rank)))
    return Factors((names, *(("",) * width,) * (len(call.operands) - 1)), (names,) * len(call.results))


def group_norm(call: Call) -> Factors:
    """group_norm(x (n, c, ...), groups): whole groups of channels, and rows."""
    names = ("n", "c", *("",) * (len(call.operands[0].shape) - 2))
    others = (("c",),) * (len(call.operands) - 1)
    groups = call.integer(1, "num_groups", 1)
    return Factors((names, *others), (names,), lowering={"c": "units"}, units={"c": groups})


def batch_norm(call: Call) -> Factors:
    """batch_norm(x (n, c, ...)): channels; rows and places too, unless it is their statistics that are taken."""
    training = bool(call.argument(5, "training", True))
    rank = len(call.operands[0].shape)
    names = tuple("c" if i == 1 else "" if training else f"d{i}" for i in range(rank))
    return Factors((names, *(("c",),) * (len(call.operands) - 1)), (names,))


def instance_norm(call: Call) -> Factors:
    """instance_norm(x (n, c, ...)): every row and channel has its own statistics."""
    running = call.slot(3, "running_mean") is not None
    names = ("" if running else "n", "c", *("",) * (len(call.operands[0].shape) - 2))
    return Factors((names, *(("c",),) * (len(call.operands) - 1)), (names,))


def weight_norm(call: Call) -> Factors:
    """_weight_norm(v, g, dim): v scaled to norm g along all dims but one, which is a factor."""
    rank = len(call.operands[0].shape)
    dim = call.integer(2, "dim", 0)
    names = tuple("o" if i == dim else "" for i in range(rank))
    if len(call.operands[1].shape) != rank:
        return whole(call)
    return Factors((names, names), (names,))


def class_loss(reduction: int) -> Rule:
    """nll_loss and cross_entropy (n, c, ...), targets (n, ...) or (n, c, ...): classes are whole; a mean over targets is too."""

    def rule(call: Call) -> Factors:
        scores, target = call.operands[0].shape, call.operands[1].shape
        kind = call.integer(reduction, "reduction", 1)
        if kind == 1 or not scores:
            return whole(call)
        class_dim = 1 if len(scores) > 1 else 0
        names = dims_of(len(scores), {class_dim})
        rest = names[:class_dim] + names[class_dim + 1 :]
        others = tuple(("",) * len(v.shape) for v in call.operands[2:])
        operands = (names, names if len(target) == len(scores) else rest, *others)
        return Factors(operands, (rest if kind == 0 else (),), summed=frozenset(n for n in rest if n) if kind else frozenset())

    return rule


def cross_entropy_sum(call: Call) -> Factors:
    """logits (t, v), targets (t,): the tokens sum; v by vocabulary-parallel log-softmax (Megatron-LM, arXiv 1909.08053, section 3).

    Where v divides, no rank ever holds logits over the whole vocabulary, the largest activation of most models.
    """
    if len(call.operands[0].shape) != 2:
        return whole(call)
    return Factors(
        (("t", "v"), ("t",)),
        ((),),
        summed=frozenset({"t"}),
        lowering={"v": "vocabulary"},
        lowered_results={"v": (I,)},
        contiguous=frozenset({"v"}),
        always="v",
    )


def token_mean(call: Call) -> Factors:
    """A scalar over a count: linear in the scalar."""
    return Factors(tuple(() for _ in call.operands), ((),), linear=LINEAR)


def distance(call: Call) -> Factors:
    """cosine_similarity(x, y, dim) and pairwise_distance: broadcast, then reduced along one dim, which is whole."""
    packet = call.op.target.split(".")[1]
    a, b = (v.shape for v in call.operands[:2])
    full = broadcast(a, b)
    rank = len(full)
    dim = (call.integer(2, "dim", 1) if packet == "cosine_similarity" else -1) % max(rank, 1)
    names = dims_of(rank, {dim})
    operands = tuple(aligned(shape, full, names) for shape in (a, b))
    return Factors(operands, (kept_dims(names, {dim}, call.results[0].shape),))
