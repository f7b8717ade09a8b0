"""Formulas: a rule in one line, "... k, n k -> ... n".

    OPERANDS -> RESULTS, both comma-separated; each is the names of its dims, in order
    "..."   any number of leading dims, the same in every term that has it
    "_"     a dim that is not sharded

A name that only results have is a dim that the op makes by itself: it is not sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields

from meshwright.compiler.rules.factors import Call, Dims, Factors, Rule
from meshwright.plans.errors import InputError

LEAD, WHOLE = "...", "_"
Terms = list[list[str]]
NAMING = ("summed", "blocked", "contiguous")
"""Options that are sets of factor names."""


def formula(text: str, **options: object) -> Rule:
    """A rule from its notation; `options` are fields of Factors: summed={"k"}, additive={2}, linear=({0}, {1}).

    Operands at the end may be absent from a call. ValueError for a text that is no formula, or an option that names what it lacks;
    TypeError for an unknown option.
    """
    operand_terms, result_terms = parsed(text)
    check_options(text, options, {name for term in operand_terms for name in term})
    made = {name for term in result_terms for name in term} - {name for term in operand_terms for name in term}
    blocked = frozenset(made) | frozenset(str(name) for name in listed(options.get("blocked", ())))
    given = {**options, "blocked": blocked}

    def rule(call: Call) -> Factors:
        terms = operand_terms[: len(call.operands)]
        lead = next((len(v.shape) - len(t) + 1 for t, v in zip(terms, call.operands, strict=False) if LEAD in t), 0)
        operands = tuple(spell(t, lead) for t in terms)
        results = tuple(spell(t, lead) for t in result_terms)
        check_sizes(text, call, (*operands, *results))
        return Factors(operands, results, **given)  # type: ignore[arg-type]

    return rule


def check_sizes(text: str, call: Call, terms: tuple[Dims, ...]) -> None:
    """InputError when one factor names dims of two sizes."""
    if len(terms) != len(call.values) or any(len(n) != len(v.shape) for n, v in zip(terms, call.values, strict=True)):
        return  # said by factors_of
    sizes: dict[str, int] = {}
    for names, value in zip(terms, call.values, strict=False):
        for name, size in zip(names, value.shape, strict=False):
            if name and sizes.setdefault(name, size) != size:
                raise InputError(f"{call.op.target}: rule {text!r} gives dims of {sizes[name]} and {size} the same name {name}")


def parsed(text: str) -> tuple[Terms, Terms]:
    """Terms of operands and results."""
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ValueError(f"formula {text!r} is not OPERANDS -> RESULTS, as in '... k, n k -> ... n'")
    operands, results = ([term.split() for term in side.split(",")] for side in (left, right))
    for term in (*operands, *results):
        twice = [name for name in term if name != WHOLE and term.count(name) > 1]
        if twice:
            raise ValueError(f"formula {text!r} has {twice[0]!r} twice in {' '.join(term)!r}; a dim has a name of its own")
        if LEAD in term[1:]:
            raise ValueError(f"formula {text!r}: '...' stands for leading dims, so it comes first")
    return operands, results


def check_options(text: str, options: dict[str, object], names: Collection[str]) -> None:
    """Whether options are fields of Factors, and name factors of the formula's operands."""
    known = [f.name for f in fields(Factors) if f.name not in ("operands", "results")]
    for option, value in options.items():
        if option not in known:
            raise TypeError(f"formula {text!r} has no option {option!r}; the options are {', '.join(known)}")
        strange = [str(n) for n in listed(value) if n not in names] if option in NAMING else []
        if strange:
            raise ValueError(f"formula {text!r}: {option} names {strange[0]!r}, which no operand has")


def listed(value: object) -> Iterable[object]:
    return value if isinstance(value, Iterable) else (value,)


def spell(term: list[str], lead: int) -> Dims:
    """Dims of one term, "..." written out as `lead` factors."""
    names = [f for name in term for f in ([f"lead{i}" for i in range(lead)] if name == LEAD else [name])]
    return tuple("" if name == WHOLE else name for name in names)
