"""Decides in what type ops compute: the table of compiler.precision, router logits of this model, and what the declaration says.

What is chosen goes into the plan as `precision_ops`; the casts are made from that alone (compiler.casts).

Router logits are found from the graph: a product with a parameter whose result goes to a top-k or argmax through nothing but
softmaxes, sigmoids, pointwise ops and views. Its operands are cast to FP32, as Megatron-Core's `moe_router_dtype` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.compiler.casts import insert_casts
from meshwright.compiler.graph import Graph, Level, Op
from meshwright.compiler.kinds import short_name
from meshwright.compiler.precision import (
    DTYPES,
    ROUTER,
    Policy,
    default_policy,
    entry,
    matches,
    policies,
    read_policy,
)
from meshwright.plans.errors import InputError

PICKS = frozenset({"topk", "argmax", "sort", "argsort"})
PRODUCTS = frozenset({"linear", "mm", "addmm", "matmul"})
PASSES_ON = frozenset("softmax _softmax log_softmax sigmoid tanh softplus to view reshape add sub mul div neg masked_fill where transpose "
                      "squeeze unsqueeze flatten sum topk scatter gather permute slice expand".split())


def choose_precision(graph: Graph, declared: Mapping[str, str] | None) -> dict[str, str]:
    """`precision_ops` of a plan for a captured graph: what the model has of the table, its router, and the declaration's entries last.
    InputError for an entry that matches nothing."""
    found = {}
    for op in graph.ops:
        policy, why = default_policy(op)
        if op.level is Level.COMPUTE and policy is not Policy.WIDEST:
            found[short_name(op.target)] = entry(policy, why)
    found = dict(sorted(found.items()))
    found.update({router_key(op): entry(Policy.FP32, ROUTER) for op in routers(graph)})
    own = declared or {}
    for key, text in own.items():
        check_entry(graph, key, text)
    return {**{key: text for key, text in found.items() if key not in own}, **own}


def check_entry(graph: Graph, key: str, text: str) -> None:
    """InputError for a policy that is none, or a pattern without an op."""
    where = f"plan.yaml: precision_ops.{key}"
    read_policy(where, text)
    try:
        found = any(short_name(op.target) == key or matches(key, op) for op in graph.ops)
    except ValueError as problem:
        raise InputError(f"{where}: {problem}") from None
    if not found:
        modules = sorted({op.module for op in graph.ops if op.module})
        example = modules[len(modules) // 2] if modules else "model"
        raise InputError(f"{where}: matches no op; give an op such as softmax, a module such as {example}, or MODULE:OP")


def routers(graph: Graph) -> list[Op]:
    """The products that router logits come from, in order."""
    found: dict[int, None] = {}
    for op in graph.ops:
        is_pick = op.level is Level.COMPUTE and short_name(op.target) in PICKS
        if is_pick and graph.values[op.operands[0]].dtype.startswith(("float", "bfloat")):
            pending = [op.operands[0]]
            while pending:
                place = graph.producers.get(pending.pop(), -1)
                if place < 0 or place in found:
                    continue
                name = short_name(graph.ops[place].target)
                if name in PRODUCTS and any(n in graph.parameter_of for n in graph.ops[place].operands):
                    found[place] = None
                elif name in PASSES_ON:
                    pending.extend(graph.ops[place].operands)
    return [graph.ops[place] for place in sorted(found)]


def router_key(op: Op) -> str:
    """Entry of a router in all layers alike."""
    path = ".".join("*" if part.isdigit() else part for part in op.module.split("."))
    return f"{path or '*'}:{short_name(op.target)}"


def settle_precision(graph: Graph, precision: str, declared: Mapping[str, str] | None) -> tuple[Graph, dict[str, str]]:
    """The graph with its casts, and `precision_ops`. With fp32 the graph as it is, and none."""
    if precision == "fp32":
        return graph, {}
    entries = choose_precision(graph, declared)
    return insert_casts(graph, DTYPES[precision], policies(graph, entries)), entries
