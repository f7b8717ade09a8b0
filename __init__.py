"""Meshwright: a declarative graph compiler for parallelization plans.

    plan = meshwright.compile(model_or_path, mesh={"pp": 2, "tp": 2}, seq=128, global_batch=8)
    plan.save("plan/");  plan = meshwright.Plan.load("plan/");  print(plan.summary())

    engine = meshwright.Engine("plan/", optimizer={"name": "adamw", "lr": 1e-3})      # under torchrun
    metrics = engine.train_step({"input_ids": ids, "labels": ids})

Names are imported when they are first used: a rank that trains loads neither the solver nor transformers.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "Engine": "meshwright.runtime.engine",
    "InputError": "meshwright.plans.errors",
    "Plan": "meshwright.plan",
    "compile": "meshwright.plan",
    "register_rule": "meshwright.compiler.rules.table",
    "simulate": "meshwright.passes.simulate",
}
_MODULES = {"costs": "meshwright.compiler.costs", "layout": "meshwright.plans.layout"}

__all__ = ["Engine", "InputError", "Plan", "compile", "costs", "layout", "register_rule", "simulate"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
