"""Factors of contractions: matmuls, einsum, convolutions, attention. A contracted factor is summed: its result is P.

What is added to a contraction (a bias) is P with it: every rank adds its part of the sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshwright.compiler.rules.factors import Call, Dims, Factors, Rule, Strategy, aligned, whole
from meshwright.plans.layout import R, shard

EACH = (frozenset({0}), frozenset({1}))
K = frozenset({"k"})


def added_to(rule: Rule) -> Rule:
    """addmm, addmv, baddbmm, addbmm: the first operand is broadcast to the result of the rule on the others, and added."""

    def extended(call: Call) -> Factors:
        found = rule(replace(call, operands=call.operands[1:]))
        first = aligned(call.operands[0].shape, call.results[0].shape, found.results[0])
        return replace(found, operands=(first, *found.operands), additive=frozenset({0}), linear=())

    return extended


def matmul(call: Call) -> Factors:
    """matmul: leading dims are broadcast, an operand of one dim has only the contracted one."""
    a, b, result = (v.shape for v in (*call.operands, call.results[0]))
    rows, columns = ("m",) * (len(a) > 1), ("n",) * (len(b) > 1)
    lead = tuple(f"lead{i}" for i in range(len(result) - len(rows) - len(columns)))
    sizes = result[: len(lead)]
    left = (*aligned(a[:-2], sizes, lead), *rows, "k")
    right = (*aligned(b[:-2], sizes, lead), "k", *columns)
    return Factors((left, right), ((*lead, *rows, *columns),), summed=K, linear=EACH)


def cdist(call: Call) -> Factors:
    """cdist(x (..., p, m), y (..., r, m)) -> (..., p, r): rows of both; the coordinates are whole."""
    a, b, result = (v.shape for v in (*call.operands[:2], call.results[0]))
    lead = tuple(f"lead{i}" for i in range(len(result) - 2))
    sizes = result[: len(lead)]
    left, right = (*aligned(a[:-2], sizes, lead), "p", ""), (*aligned(b[:-2], sizes, lead), "r", "")
    return Factors((left, right), ((*lead, "p", "r"),))


def einsum_terms(call: Call) -> tuple[list[list[str]], list[str]]:
    """Letters of every operand and of the result, an ellipsis written out as lead0, lead1, ..."""
    left, arrow, right = str(call.op.args[0]).replace(" ", "").partition("->")
    texts = left.split(",")
    ranks = [len(v.shape) for v in call.operands]
    leads = [rank - len(t.replace("...", "")) if "..." in t else 0 for t, rank in zip(texts, ranks, strict=True)]
    most = max(leads)
    if not arrow:
        counts = Counter(letter for t in texts for letter in t.replace("...", ""))
        right = "..." * bool(most) + "".join(sorted(letter for letter, n in counts.items() if n == 1))

    def written(text: str, lead: int) -> list[str]:
        before, dots, behind = text.partition("...")
        return [*before, *(f"lead{i}" for i in range(most - lead, most) if dots), *behind]

    return [written(t, lead) for t, lead in zip(texts, leads, strict=True)], written(right, most)


def einsum(call: Call) -> Factors:
    """einsum: every letter is a factor, those that the result lacks are summed. Linear in each operand.

    A dim of one entry that is broadcast is whole; so is a letter that one operand has twice (a diagonal).
    """
    operands, result = einsum_terms(call)
    sizes: dict[str, int] = {}
    for term, value in zip(operands, call.operands, strict=True):
        for letter, n in zip(term, value.shape, strict=True):
            sizes[letter] = max(n, sizes.get(letter, 0))
    twice = frozenset(letter for term in operands for letter in term if term.count(letter) > 1)
    dims = tuple(
        tuple(letter if n == sizes[letter] and letter not in twice else "" for letter, n in zip(term, v.shape, strict=True))
        for term, v in zip(operands, call.operands, strict=True)
    )
    kept = tuple("" if letter in twice else letter for letter in result)
    gone = frozenset(sizes) - frozenset(result) - twice
    return Factors(dims, (kept,), summed=gone, linear=tuple(frozenset({i}) for i in range(len(dims))))


# convolutions


def convolution(transposed: bool, groups: int) -> Rule:
    """conv(x (n, c, ...), weight (o, c / groups, kernel...), bias (o)) -> (n, o, ...); transposed, the weight is (c, o / groups, ...).

    Ungrouped, c is contracted. Grouped, whole groups of channels are sharded (each channel by itself, where it is depthwise).
    Places are whole, unless the kernel is one place. `groups` is the place of that argument.
    """

    def rule(call: Call) -> Factors:
        x, weight = call.operands[0].shape, call.operands[1].shape
        number = call.integer(groups, "groups", 1)
        rows = ("b",) * (len(x) == len(weight))
        pointwise = is_pointwise(call, groups) and not is_transposed(call, transposed)
        places = tuple(f"p{i}" if pointwise else "" for i in range(len(weight) - 2))
        kernel = ("",) * len(places)
        if number > 1:
            operands: tuple[Dims, ...] = ((*rows, "g", *places), ("g", "", *kernel), ("g",))
            result = (*rows, "g", *places)
            return Factors(operands[: len(call.operands)], (result,), lowering={"g": "units"}, units={"g": number})
        ends = ("c", "o") if is_transposed(call, transposed) else ("o", "c")
        operands = ((*rows, "c", *places), (*ends, *kernel), ("o",))
        additive = frozenset({2} if len(call.operands) == 3 else ())
        linear = EACH if len(call.operands) == 2 else ()
        return Factors(
            operands[: len(call.operands)],
            ((*rows, "o", *places),),
            summed=frozenset({"c"}),
            additive=additive,
            linear=linear,
        )

    return rule


def is_transposed(call: Call, by_name: bool) -> bool:
    """aten.convolution has a flag, the others say it in their name."""
    return bool(call.op.args[6]) if call.op.target == "aten.convolution.default" else by_name


def is_pointwise(call: Call, groups: int) -> bool:
    """Whether a convolution looks at one place at a time: a kernel of one place, stride 1, no padding."""
    kernel = call.operands[1].shape[2:]
    strides = call.integers(3, "stride")
    padding = call.argument(4, "padding", 0)
    padded = padding not in ("same", "valid") if isinstance(padding, str) else any(call.integers(4, "padding"))
    return groups == 6 and all(n == 1 for n in (*kernel, *strides)) and not padded


def bilinear(call: Call) -> Factors:
    """bilinear(x (..., i), y (..., j), weight (o, i, j), bias (o)) -> (..., o)."""
    lead = tuple(f"lead{i}" for i in range(len(call.operands[0].shape) - 1))
    operands: tuple[Dims, ...] = ((*lead, "i"), (*lead, "j"), ("o", "i", "j"), ("o",))
    summed = frozenset({"i", "j"})
    return Factors(operands[: len(call.operands)], ((*lead, "o"),), summed=summed, additive=frozenset({3}))


# attention


def attention(call: Call) -> Factors:
    """q (b h s d), k (b k t d), v (b k t e), mask -> (b h s e): heads, query positions, batch; never keys (softmax).

    Fewer key heads than query heads (`enable_gqa`) are sharded with them where they divide. Where they do not, k and v stay whole and each
    rank takes the key heads of its own query heads. Ranks below 4 lack b, then h.
    """
    shapes = [v.shape for v in call.operands[:3]]
    rank = len(call.results[0].shape)
    if rank < 2 or any(len(s) != rank for s in shapes):
        return whole(call)
    lead = ("b", "h")[-(rank - 2) :] if rank < 5 else (*(f"lead{i}" for i in range(rank - 3)), "h")
    lead = lead if rank > 2 else ()
    sizes = call.results[0].shape[: len(lead)]
    grouped = bool(call.argument(7, "enable_gqa", False)) and rank > 2 and shapes[0][-3] != shapes[1][-3]
    names: list[Dims] = [(*aligned(s[:-2], sizes, lead), "s" if i == 0 else "", "") for i, s in enumerate(shapes)]
    if grouped and min(s[-3] for s in shapes) > 1:
        names[1:] = [(*n[:-3], "h", "", "") for n in names[1:]]
    mask = call.slot(3, "attn_mask")
    full = (*call.results[0].shape[:-1], shapes[1][-2])
    if mask is not None:
        names.append(aligned(call.operands[mask].shape, full, (*lead, "s", "")))
    blocked = frozenset({"s"} if call.argument(5, "is_causal", False) else ())
    result: Dims = (*lead, "s", "")
    factors = Factors(tuple(names), (result,), blocked=blocked)
    if not grouped or min(s[-3] for s in shapes) == 1:
        return factors
    own = tuple(shard(n.index("h")) if slot not in (1, 2) and "h" in n else R for slot, n in enumerate(names))
    extra = Strategy("own_heads", own, (shard(result.index("h")),), "own_heads")
    return replace(factors, extra=(extra,), fallback={"own_heads": "h"})


def grouped(call: Call) -> Factors:
    """grouped_mm(x (t, k), w (e, k, n), offsets (e)) -> (t, n)."""
    rest = tuple(("",) * len(v.shape) for v in call.operands[2:])
    return Factors((("", "k"), ("", "k", "n"), *rest), (("", "n"),), summed=K, linear=(frozenset({0}),))


def ranked(rule: Rule, *ranks: int) -> Rule:
    """The rule where the operands have these ranks; whole operands otherwise."""

    def checked(call: Call) -> Factors:
        return rule(call) if tuple(len(v.shape) for v in call.operands) == ranks else whole(call)

    return checked


