"""Every ATen op that the shared zoo meets has a rule, or is named here with the reason why it needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.compiler.rules.table import rule_for

OPS = Path(__file__).resolve().parents[1].parent / "shared" / "zoo" / "ops.txt"

CAST = "a cast, of which capture has one form"
FACTORY = "reads no tensor: made whole on every rank when a program is loaded"
RANDOM = "random numbers other than dropout's are refused by capture"
CHECK = "checks what is known when the model is captured; nothing reads it"
NUMBER = "a number taken from data is refused by capture, one that is known is a literal"
WITHOUT_RULE = {
    **dict.fromkeys("to.dtype_layout to.device type_as.default".split(), CAST),
    **dict.fromkeys(
        """arange.default arange.start arange.start_step eye.default full.default zeros.default ones.default empty.memory_format
        scalar_tensor.default empty_like.default zeros_like.default ones_like.default full_like.default new_empty.default
        new_full.default new_ones.default new_zeros.default lift_fresh_copy.default""".split(),
        FACTORY,
    ),
    **dict.fromkeys(
        "rand.default rand_like.default randn.default uniform_.default exponential_.default feature_dropout.default".split(), RANDOM
    ),
    **dict.fromkeys("_assert_tensor_metadata.default _assert_scalar.default _is_all_true.default".split(), CHECK),
    **dict.fromkeys("item.default sym_size.int".split(), NUMBER),
}
"""ATen ops of the zoo that no rule is asked for, with the reason."""

REGIONS = {
    "py:_operator": "arithmetic on numbers, or an item of a list of results: gone after capture",
    "hop:wrap_with_set_grad_enabled": "a region without gradients: inlined by capture",
}


def listed() -> list[str]:
    """Names in ops.txt, without counts."""
    lines = OPS.read_text().splitlines() if OPS.is_file() else []
    return [line.split("\t")[0].split()[0] for line in lines if line.strip() and not line.startswith("#")]


def pure(target: str) -> str:
    """aten.add_.Tensor as capture writes it: aten.add.Tensor; a copy is a cast, after an expansion."""
    namespace, name, overload = target.split(".")
    if name == "copy_":
        return "aten.to.dtype"
    return f"{namespace}.{name[:-1]}.{overload}" if name.endswith("_") and not name.endswith("__") else target


def known(name: str) -> bool:
    if any(name.startswith(region) for region in REGIONS):
        return True
    return name.removeprefix("aten.") in WITHOUT_RULE or rule_for(pure(name)) is not None


@pytest.mark.skipif(not OPS.is_file(), reason="there is no zoo beside the repository")
def test_every_op_of_the_zoo_has_a_rule_or_a_reason() -> None:
    names = listed()
    assert len(names) > 150
    assert [name for name in names if not known(name)] == []


def test_reasons_are_of_ops_that_exist_and_have_no_rule() -> None:
    for name in WITHOUT_RULE:
        packet, overload = name.split(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload)
        assert rule_for(f"aten.{name}") is None, f"{name} has a rule and a reason for none"
