"""Sample calls from PyTorch's own database of ops (OpInfo), as cases of the rule table.

    opinfo_cases(target)     a few samples of one overload: small, of float64, integers or bools, as many factors as can be had

OpInfo has inputs of Python functions. They are given to the overload whose schema takes them. Sizes of the database are 5 and 10; they
are replaced by even ones, since a dim has to divide by the ranks to be sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from types import ModuleType

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import definitions
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from meshwright.compiler.graph import Op, Ref
from meshwright.compiler.rules.strategies import strategies
from meshwright.compiler.rules.table import factors_of
from meshwright.tests.rule_cases import Case
from meshwright.tests.rule_checks import built, overload

EVEN = {"L": 12, "M": 8, "S": 6, "XS": 2}
LOOKED_AT, KEPT, LARGEST = 24, 2, 4096
DTYPES = (torch.float64, torch.int64, torch.bool)
"""Samples are of the first of these that an op takes."""


@contextmanager
def even_sizes() -> Iterator[None]:
    """The database's sizes, all even meanwhile."""
    modules = [common_methods_invocations, *(m for m in vars(definitions).values() if isinstance(m, ModuleType))]
    found = [(m, name, getattr(m, name)) for m in modules for name in EVEN if isinstance(getattr(m, name, None), int)]
    for module, name, _ in found:
        setattr(module, name, EVEN[name])
    try:
        yield
    finally:
        for module, name, size in found:
            setattr(module, name, size)


@cache
def infos_by_name() -> dict[str, list[OpInfo]]:
    """Entries of the database under every name that ATen may know them by."""
    found: dict[str, list[OpInfo]] = {}
    for info in common_methods_invocations.op_db:
        names = {info.name, info.name.split(".")[-1], info.name.replace(".", "_"), info.aten_name, *(a.name for a in info.aliases)}
        for name in names:
            found.setdefault(name, []).append(info)
    return found


def samples(info: OpInfo) -> Iterator[SampleInput]:
    dtype = next((d for d in DTYPES if info.supports_dtype(d, "cpu")), None)
    if dtype is not None:
        yield from islice(info.sample_inputs("cpu", dtype, requires_grad=False), LOOKED_AT)


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_of(item)


def listed(item: object) -> object:
    """Sizes and tuples as lists, as the graph has them."""
    return [listed(i) for i in item] if isinstance(item, (list, tuple)) else item


def case_of(target: str, sample: SampleInput) -> Case | None:
    """A sample as a call of one overload; None when its schema does not take it."""
    args = tuple(map(listed, (sample.input, *sample.args)))
    case = Case(target, args, tuple((k, listed(v)) for k, v in sample.kwargs.items()))
    given = list(tensors_of((args, [v for _, v in case.kwargs])))
    if not given or any(t.numel() > LARGEST or t.is_sparse or t.dtype not in DTYPES for t in given):
        return None
    try:
        call, _ = built(case)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return case if fits_schema(call.op) else None


def fits_schema(op: Op) -> bool:
    """Whether numbers are given as numbers: torch also takes a tensor of one entry or a bool for them, which no graph has."""
    kinds = {a.name: str(a.type) for a in overload(op.target)._schema.arguments}
    given = [*zip(kinds, op.args, strict=False), *op.kwargs]
    return all(fits(item, kinds[name]) for name, item in given)


def fits(item: object, kind: str) -> bool:
    """Whether an argument is what its schema says."""
    if isinstance(item, Ref):
        return "Tensor" in kind
    return not isinstance(item, complex) and not (isinstance(item, bool) and "int" in kind)


def sharded(case: Case, ranks: int) -> frozenset[str]:
    """Factors of the strategies of a case that shard something."""
    call, _ = built(case)
    legal, _ = strategies(call, factors_of(call), ranks, {})
    return frozenset(s.factor for s in legal if any(t.kind == "S" for t in s.types))


def opinfo_cases(target: str, ranks: int) -> list[Case]:
    """The samples of an overload that have the most strategies, different ones first."""
    name = target.split(".")[1]
    found: list[Case] = []
    with even_sizes():
        for info in infos_by_name().get(name.lstrip("_"), []):
            found += [case for case in (case_of(target, s) for s in samples(info)) if case is not None]
    kept: list[Case] = []
    seen: set[tuple[frozenset[str], int]] = set()
    for case in sorted(found, key=lambda c: -len(sharded(c, ranks))):
        sign = (sharded(case, ranks), len(built(case)[0].operands))
        if sign not in seen and len(kept) < KEPT:
            seen.add(sign)
            kept.append(case)
    return kept
