"""The rule table: which factors each ATen op has.

A formula names the dims of operands and results ("... k, n k, n -> ... n"); "..." is any number of leading dims. Rules that
depend on arguments are functions of the Call. An op that is not here runs replicated; nothing is guessed.

    rule_for(target)            the rule, or None
    register_rule(target, ...)  adds one for a user's own op
    factors_of(call)            the rule applied to a call
"""

from __future__ import annotations

from collections.abc import Callable

from meshwright.compiler.rules import shapes
from meshwright.compiler.rules.factors import Call, Dims, Factors
from meshwright.plans.layout import I

Rule = Callable[[Call], Factors]


def pointwise(*linear: frozenset[int]) -> Rule:
    """Broadcasting elementwise op; `linear` are the operand sets in which it is linear."""

    def rule(call: Call) -> Factors:
        result = call.results[0].shape
        names = tuple(f"d{i}" for i in range(len(result)))
        operands = []
        for value in call.operands:
            shift = len(result) - len(value.shape)
            operands.append(
                tuple(names[i + shift] if n == result[i + shift] else "" for i, n in enumerate(value.shape))
            )
        kept = tuple(s for s in linear if max(s) < len(operands))
        return Factors(tuple(operands), (names,) * len(call.results), linear=kept)

    return rule


def added(call: Call) -> Factors:
    """add and sub: linear in both tensor operands together; adding a number to P would add it once per rank."""
    linear = (frozenset({0, 1}),) if len(call.operands) == 2 else ()
    return pointwise(*linear)(call)


def multiplied(call: Call) -> Factors:
    """mul: linear in each operand."""
    linear = (frozenset({0}), frozenset({1})) if len(call.operands) == 2 else (frozenset({0}),)
    return pointwise(*linear)(call)


def formula(text: str, **options: object) -> Rule:
    """A rule from its notation. Operands beyond those written, or absent ones, are an error of the table."""
    left, right = text.split("->")

    def rule(call: Call) -> Factors:
        operand_terms = [t.split() for t in left.split(",")][: len(call.operands)]
        result_terms = [t.split() for t in right.split(",")]
        lead = next(
            (len(v.shape) - len(t) + 1 for t, v in zip(operand_terms, call.operands, strict=True) if "..." in t), 0
        )
        operands = tuple(spell(t, lead) for t in operand_terms)
        return Factors(operands, tuple(spell(t, lead) for t in result_terms), **options)  # type: ignore[arg-type]

    return rule


def spell(term: list[str], lead: int) -> Dims:
    """Dims of one term, "..." written out as `lead` factors."""
    return tuple(f for name in term for f in ([f"lead{i}" for i in range(lead)] if name == "..." else [name]))


def whole(argument: int, name: str, default: int) -> Rule:
    """One operand; the dim that an argument names is not sharded (softmax, cumsum, sort, topk)."""

    def rule(call: Call) -> Factors:
        rank = len(call.operands[0].shape)
        dim = call.argument(argument, name, default)
        return nonlinear(lambda c: shapes.same_but(c, {int(dim) % rank} if rank else set()))(call)  # type: ignore[call-overload]

    return rule


def nonlinear(rule: Rule) -> Rule:
    """The rule with no P to P."""

    def restricted(call: Call) -> Factors:
        found = rule(call)
        return Factors(found.operands, found.results, blocked=found.blocked)

    return restricted


def reduction(lowering: str) -> Rule:
    """sum and mean over dims: a reduced dim may be sharded, the result is then P."""

    def rule(call: Call) -> Factors:
        before, after = call.operands[0].shape, call.results[0].shape
        rank = len(before)
        given = call.argument(1, "dim", None)
        dims = [int(d) % rank for d in given] if isinstance(given, (list, tuple)) and given else list(range(rank))
        keep = len(before) == len(after)
        names = tuple(f"d{i}" for i in range(rank))
        result = tuple("" if i in dims else names[i] for i in range(rank) if keep or i not in dims)
        reduced = frozenset(names[i] for i in dims)
        lowered = {f: lowering for f in reduced} if lowering else {}
        return Factors((names,), (result,), summed=reduced, lowering=lowered, linear=(frozenset({0}),))

    return rule


def normalized(call: Call) -> Factors:
    """layer_norm and rms_norm: the normalised dims, last ones, are whole."""
    width = len(call.op.args[1])  # type: ignore[arg-type]
    rank = len(call.operands[0].shape)
    names = tuple("" if i >= rank - width else f"d{i}" for i in range(rank))
    return Factors((names, *(("",) * width,) * (len(call.operands) - 1)), (names,))


def embedding(call: Call) -> Factors:
    """embedding(weight (v, h), ids ...) -> ... h: v by masked lookup (vocabulary parallel; Megatron-LM, arXiv 1909.08053, 3).

    A table is cut by rows, as the head that it is often tied to needs it; by columns only where its rows do not divide.
    """
    ids = tuple(f"i{d}" for d in range(len(call.operands[1].shape)))
    return Factors((("v", "h"), ids), ((*ids, "h"),), summed=frozenset({"v"}), lowering={"v": "vocabulary"}, fallback={"h": "v"})


def cross_entropy_sum(call: Call) -> Factors:
    """logits (t, v), targets (t,): the tokens sum; v by vocabulary-parallel log-softmax (arXiv 1909.08053, section 3).

    Where v divides, no rank ever holds logits over the whole vocabulary, the largest activation of most models.
    """
    if len(call.operands[0].shape) != 2:
        return Factors(tuple(("",) * len(v.shape) for v in call.operands), ((),))
    return Factors(
        (("t", "v"), ("t",)),
        ((),),
        summed=frozenset({"t"}),
        lowering={"v": "vocabulary"},
        lowered_results={"v": (I,)},
        always="v",
    )


def attention(call: Call) -> Factors:
    """q (b h s d), k (b k t d), v (b k t e), mask -> (b h s e): heads, query positions, batch; never keys (softmax)."""
    names: list[Dims] = [("b", "h", "s", ""), ("b", "h", "", ""), ("b", "h", "", "")]
    if len(call.operands[0].shape) != 4:
        return Factors(tuple(("",) * len(v.shape) for v in call.operands), tuple(("",) * len(v.shape) for v in call.results))
    mask = call.slot(3, "attn_mask")
    if mask is not None:
        shape = call.operands[mask].shape
        full = ("b", "h", "s", "")[4 - len(shape) :]
        names.append(tuple(name if size != 1 else "" for name, size in zip(full, shape, strict=True)))
    causal = bool(call.argument(5, "is_causal", False))
    return Factors(tuple(names), (("b", "h", "s", ""),), blocked=frozenset({"s"} if causal else ()))


def matmul(call: Call) -> Factors:
    """matmul of operands of 2 dims or more, leading dims broadcast."""
    a, b, result = (v.shape for v in (*call.operands, call.results[0]))
    if min(len(a), len(b)) < 2:
        return Factors((("",) * len(a), ("",) * len(b)), (("",) * len(result),))
    lead = tuple(f"lead{i}" for i in range(len(result) - 2))

    def leading(shape: tuple[int, ...]) -> Dims:
        own = lead[len(lead) - (len(shape) - 2) :] if len(shape) > 2 else ()
        return tuple(f if n == result[lead.index(f)] else "" for f, n in zip(own, shape, strict=False))

    return Factors(
        ((*leading(a), "m", "k"), (*leading(b), "k", "n")),
        ((*lead, "m", "n"),),
        summed=frozenset({"k"}),
        linear=(frozenset({0}), frozenset({1})),
    )


def index(call: Call) -> Factors:
    """x[indices]: dims that are not indexed are factors, when the indexed ones lead."""
    x = call.operands[0].shape
    indices = call.op.args[1]
    if not isinstance(indices, (list, tuple)) or any(i is None for i in indices):
        return Factors(tuple(("",) * len(v.shape) for v in call.operands), (("",) * len(call.results[0].shape),))
    kept = len(x) - len(indices)
    names = tuple(f"d{i}" for i in range(kept))
    rank = len(call.results[0].shape)
    first = (*("",) * len(indices), *names)
    others = tuple(("",) * len(v.shape) for v in call.operands[1:])
    return Factors((first, *others), ((*("",) * (rank - kept), *names),), linear=(frozenset({0}),))


def grouped(call: Call) -> Factors:
    """grouped_mm(x (t, k), w (e, k, n), offsets (e)) -> (t, n)."""
    rest = tuple(("",) * len(v.shape) for v in call.operands[2:])
    return Factors((("", "k"), ("", "k", "n"), *rest), (("", "n"),), summed=frozenset({"k"}), linear=(frozenset({0}),))


def token_mean(call: Call) -> Factors:
    """A scalar over a count: linear in the scalar."""
    return Factors(tuple(() for _ in call.operands), ((),), linear=(frozenset({0}),))


ELEMENTWISE = """abs neg exp expm1 log log1p sqrt rsqrt reciprocal sin cos tanh sigmoid silu gelu relu erf softplus log_sigmoid
square clamp clamp_min clamp_max pow floor ceil round bitwise_not logical_not logical_and logical_or __and__ __or__ eq ne lt le gt ge
minimum maximum where masked_fill remainder floor_divide leaky_relu elu hardtanh mish type_as to clone contiguous dropout
zeros_like ones_like full_like""".split()

OVERLOADS = """default Tensor Scalar Tensor_Scalar Tensor_Tensor self ScalarOther ScalarSelf dtype dtype_layout device other
prim_Device""".split()

VIEWS = """view.default reshape.default flatten.using_ints unflatten.int unsqueeze.default squeeze.dim squeeze.dims squeeze.default
_unsafe_view.default view_as.default reshape_as.default""".split()

RULES: dict[str, Rule] = {
    **{f"aten.{name}.{overload}": pointwise() for name in ELEMENTWISE for overload in OVERLOADS},
    **{f"aten.{name}.{o}": added for name in ("add", "sub") for o in ("Tensor", "Scalar")},
    **{f"aten.{name}.{o}": multiplied for name in ("mul", "multiply") for o in ("Tensor", "Scalar")},
    **{f"aten.div.{o}": pointwise(frozenset({0})) for o in ("Tensor", "Scalar")},
    "aten.neg.default": pointwise(frozenset({0})),
    "aten.rsub.Scalar": pointwise(),
    "aten.pow.Scalar": pointwise(),
    "aten.clone.default": pointwise(frozenset({0})),
    "aten.contiguous.default": pointwise(frozenset({0})),
    **{f"aten.{name}": shapes.view for name in VIEWS},
    **{f"aten.{name}": shapes.permute for name in ("permute.default", "transpose.int", "t.default", "numpy_T.default")},
    "aten.expand.default": shapes.expand,
    "aten.expand_as.default": nonlinear(shapes.expand),
    "aten.slice.Tensor": shapes.slice_dim,
    "aten.select.int": shapes.select,
    "aten.unbind.int": shapes.select,
    **{f"aten.{name}": shapes.split for name in ("split.Tensor", "split_with_sizes.default", "chunk.default")},
    **{f"aten.{name}.default": shapes.cat for name in ("cat", "concat", "concatenate")},
    "aten.stack.default": shapes.stack,
    "aten.pad.default": shapes.pad,
    "aten.slice_scatter.default": shapes.slice_scatter,
    "aten.select_scatter.default": shapes.slice_scatter,
    "aten.linear.default": formula(
        "... k, n k, n -> ... n", summed=frozenset({"k"}), additive=frozenset({2}), linear=()
    ),
    "aten.addmm.default": formula("n, m k, k n -> m n", summed=frozenset({"k"}), additive=frozenset({0})),
    "aten.mm.default": formula("m k, k n -> m n", summed=frozenset({"k"})),
    "aten.bmm.default": formula("b m k, b k n -> b m n", summed=frozenset({"k"})),
    "aten.matmul.default": matmul,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.softmax.int": whole(1, "dim", -1),
    "aten.log_softmax.int": whole(1, "dim", -1),
    "aten.cumsum.default": whole(1, "dim", -1),
    "aten.sort.default": whole(1, "dim", -1),
    "aten.argsort.default": whole(1, "dim", -1),
    "aten.topk.default": whole(2, "dim", -1),
    "aten.layer_norm.default": normalized,
    "aten.rms_norm.default": normalized,
    "aten.mean.dim": reduction("mean"),
    "aten.mean.default": reduction("mean"),
    "aten.sum.dim_IntList": reduction(""),
    "aten.sum.default": reduction(""),
    "aten.embedding.default": embedding,
    "aten.index.Tensor": index,
    "transformers.grouped_mm_fallback.default": grouped,
    "mw.cross_entropy_sum": cross_entropy_sum,
    "mw.token_mean": token_mean,
}


def rule_for(target: str) -> Rule | None:
    """The rule of an op, or None: the op then runs replicated."""
    return RULES.get(target)


def register_rule(target: str, rule: Rule | str, **options: object) -> None:
    """Teach a custom op ("mylib.myop.default"): a formula such as "... k, n k -> ... n" or a function of the Call.

    `options` are fields of Factors, e.g. summed=frozenset({"k"}). Raises ValueError for an op that has a rule already.
    """
    if target in RULES:
        raise ValueError(f"op {target} has a rule already")
    RULES[target] = formula(rule, **options) if isinstance(rule, str) else rule


def factors_of(call: Call) -> Factors | None:
    """The factors of a call, or None when its op has no rule."""
    rule = rule_for(call.op.target)
    return rule(call) if rule is not None else None
