"""Sample calls from PyTorch's own database of ops (OpInfo), as cases of the rule table.

    opinfo_cases(target)     a few samples of one overload: small, of float64, integers or bools, as many factors as can be had

OpInfo has inputs of Python functions. They are given to the overload whose schema takes them. Sizes of the database are 5 and 10; they
are replaced by even ones, since a dim has to divide by the ranks to be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
Call = tuple[list[object], dict[str, object]]


def as_where(args: list[object], kwargs: dict[str, object]) -> Call:
    return [args[1], args[0], args[2]], {}


def as_index(args: list[object], kwargs: dict[str, object]) -> Call:
    return [args[0], args[1]], {}


def as_einsum(args: list[object], kwargs: dict[str, object]) -> Call:
    return [args[1], args[0]], {}


def as_list(args: list[object], kwargs: dict[str, object]) -> Call:
    return [args], {}


def as_batch_norm(args: list[object], kwargs: dict[str, object]) -> Call:
    x, mean, variance = args[:3]
    given = {"training": False, "momentum": 0.1, "eps": 1e-5, **kwargs}
    rest = [given["training"], given["momentum"], given["eps"], False]
    return [x, given.get("weight"), given.get("bias"), mean, variance, *rest], {}


def as_class_loss(args: list[object], kwargs: dict[str, object]) -> Call:
    return args, {**kwargs, "reduction": REDUCTIONS[str(kwargs.get("reduction", "mean"))]}


def as_pool(args: list[object], kwargs: dict[str, object]) -> Call:
    return args, {k: v for k, v in kwargs.items() if k != "return_indices" and v is not None}


ADAPTED: dict[str, tuple[str, Callable[[list[object], dict[str, object]], Call]]] = {
    "aten.where.self": ("where", as_where),
    "aten.index.Tensor": ("index_put", as_index),
    "aten.einsum.default": ("einsum", as_einsum),
    "aten.broadcast_tensors.default": ("broadcast_tensors", as_list),
    "aten.batch_norm.default": ("nn.functional.batch_norm", as_batch_norm),
    "aten.cross_entropy_loss.default": ("nn.functional.cross_entropy", as_class_loss),
    "aten.nll_loss_nd.default": ("nn.functional.nll_loss", as_class_loss),
    "aten.max_pool2d.default": ("nn.functional.max_pool2d", as_pool),
}
"""Overloads whose arguments are not those of the Python function: its name in the database, and how to say the call."""


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
    args, kwargs = list(map(listed, (sample.input, *sample.args))), {k: listed(v) for k, v in sample.kwargs.items()}
    if target in ADAPTED:
        args, kwargs = ADAPTED[target][1](args, kwargs)
    case = Case(target, tuple(args), tuple(kwargs.items()))
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
    name = ADAPTED[target][0] if target in ADAPTED else target.split(".")[1].lstrip("_")
    found: list[Case] = []
    with even_sizes():
        for info in infos_by_name().get(name, []):
            found += [case for case in (case_of(target, s) for s in samples(info)) if case is not None]
    kept: list[Case] = []
    seen: set[tuple[frozenset[str], int]] = set()
    for case in sorted(found, key=lambda c: -len(sharded(c, ranks))):
        sign = (sharded(case, ranks), len(built(case)[0].operands))
        if sign not in seen and len(kept) < KEPT:
            seen.add(sign)
            kept.append(case)
    return kept
