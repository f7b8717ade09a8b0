"""Seeds, recomputation, weights, and dry runs of a small two-stage program. One process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime import ops
from meshwright.runtime.axes import TrivialAxis, build_axes
from meshwright.runtime.context import Context, Weights
from meshwright.runtime.dry_axes import DryAxis, Tally, dry_axes
from meshwright.runtime.dryrun import DryReport, dry_run
from meshwright.runtime.program import load_program

HEADER = """import torch
from meshwright.runtime import ops
aten = torch.ops.aten

def constants(rt, buffers):
    return {"scale": buffers["scale"] + 1}

def layer(rt, w, hidden, scale, index):
    x = ops.dropout(hidden * scale, 0.1, rt.seed(index, 0, ("tp",)))
    up, = ops.column_linear(x, rt.axis("tp"), (w["up.weight"],), (None,), "S(1) -> R")
    down = ops.linear(ops.sdpa(up[:, None], up[:, None], up[:, None], dropout_p=0.1, seed=rt.seed(index, 1))[:, 0],
                      w["down.weight"])
    return hidden + ops.convert(down, rt.axis("tp"), "P -> S(1)")
"""
FIRST = HEADER + """
PARAMETERS = ("embed", "layers.{0..1}.up.weight", "layers.{0..1}.down.weight")
RECEIVES = ()
SENDS = (("hidden", (2, 4, 6), "float32", True),)
INPUTS = ("input_ids",)
BUFFERS = ("scale",)

def counts(rt, constants, inputs):
    return ()

def forward(rt, w, constants, inputs, received, denominators):
    hidden = ops.vocab_embedding(inputs["input_ids"], w["embed"], rt.axis("tp"))
    hidden = ops.convert(hidden, rt.axis("tp"), "P -> S(1)")
    for i in range(0, 2):
        hidden = rt.layer(layer, w.at(f"layers.{i}."), hidden, constants["scale"], i)
    return (hidden,)
"""
LAST = HEADER + """
PARAMETERS = ("embed",)
RECEIVES = (("hidden", (2, 4, 6), "float32", True),)
SENDS = ()
INPUTS = ("labels",)
BUFFERS = ("scale",)

def counts(rt, constants, inputs):
    return ((inputs["labels"] != -100).sum(),)

def forward(rt, w, constants, inputs, received, denominators):
    logits, = ops.column_linear(received[0], rt.axis("tp"), (w["embed"],), (None,), "S(1) -> R")
    loss = ops.vocab_cross_entropy_sum(logits, inputs["labels"], rt.axis("tp"))
    return (ops.token_mean(loss, denominators[0]),)
"""
PARAMETERS = {"embed": ((16, 6), "float32")} | {
    f"layers.{i}.{name}.weight": (shape, "float32")
    for i in range(2)
    for name, shape in (("up", (10, 6)), ("down", (6, 10)))
}
INPUTS = {"input_ids": ((2, 8), "int64"), "labels": ((2, 8), "int64")}
MESH = Mesh(pp=2, tp=2)
Dry = Callable[..., DryReport]


@pytest.fixture
def dry(tmp_path: Path) -> Dry:
    """dry(text, rank, ...) of a program's text."""

    def run(text: str, rank: int) -> DryReport:
        program = load_program(text, 0, tmp_path / "stage_0.py")
        return dry_run(program, MESH, rank, PARAMETERS, INPUTS, {"scale": ((1,), "float32")})

    return run


def test_dry_run_counts_collectives_and_saved_bytes(dry: Dry) -> None:
    state = torch.get_rng_state()
    report = dry(FIRST, 1)
    assert report.calls == {
        ("tp", "reduce-scatter", "forward"): 3,
        ("tp", "all-gather", "forward"): 2,
        ("tp", "all-gather", "backward"): 5,
        ("tp", "reduce-scatter", "backward"): 2,
    }
    whole = 2 * 8 * 6 * 4
    assert report.num_bytes["tp", "all-gather", "backward"] == 5 * whole
    recomputed = dry(FIRST.replace("rt.layer(", "rt.recomputed_layer("), 1)
    assert recomputed.calls["tp", "all-gather", "backward"] == 7
    assert 0 < recomputed.saved_bytes < report.saved_bytes
    assert torch.get_rng_state().equal(state)

    last = dry(LAST, 3)
    assert last.calls["tp", "all-reduce", "forward"] == 2
    assert last.lines()[0].startswith("rank 3, stage 0: saves ")
    assert "  forward   all-reduce      tp  2 calls, 256 B" in last.lines()


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (FIRST, "((\"hidden\", (2, 4", "((\"hidden\", (2, 8", r"hidden has shape \(2, 4, 6\), SENDS says \(2, 8, 6\)"),
        (FIRST, '"float32", True', '"bfloat16", True', "hidden has dtype float32, SENDS says bfloat16"),
        (FIRST, '"float32", True', '"float32", False', "hidden has a gradient, SENDS says none"),
        (FIRST, "    return (hidden,)", "    return hidden", "forward returned .*Tensor, not a tuple"),
        (FIRST, 'PARAMETERS = ("embed",', 'PARAMETERS = ("embed", "norm",', "reads parameter norm, which the plan"),
        (FIRST, "range(0, 2)", "range(0, 1)", "gives parameter layers.1.up.weight no gradient"),
        (FIRST, 'w["embed"]', 'w["wte"]', "line 25 `hidden = ops.vocab_embedding.*this stage holds no parameter wte"),
        (FIRST, '"P -> S(1)"', '"P -> S(2)"', "line 10 `up, = ops.column_linear.*same reduction dim"),
        (FIRST, 'rt.axis("tp"), "P', 'rt.axis("np"), "P', "unknown mesh axis 'np'"),
        (LAST, "(ops.token_mean(loss, denominators[0]),)", "(logits,)", r"loss has shape \(2, 8, 16\), expected \(\)"),
        (LAST, "received[0], rt", "received[0].detach(), rt", "gives received tensor hidden no gradient"),
        (LAST, 'INPUTS = ("labels",', 'INPUTS = ("labels", "mask",', "reads input mask, which the plan does not have"),
    ],
)  # fmt: skip
def test_dry_run_says_in_one_line_what_does_not_fit(dry: Dry, text: str, old: str, new: str, message: str) -> None:
    assert old in text
    with pytest.raises(InputError, match=f"^programs/stage_0.py.*{message}") as caught:
        dry(text.replace(old, new), 0)
    assert "\n" not in str(caught.value)


def test_seeds_agree_where_the_tensor_is_the_same() -> None:
    def seed(rank: int, sharded: tuple[str, ...], step: int = 0, batch: int = 0, index: int = 0, site: int = 0) -> int:
        rt = Context(dry_axes(Mesh(dp=2, tp=2), rank), "cpu", seed=3)
        rt.step, rt.micro_batch = step, batch
        return rt.seed(index, site, sharded)

    assert seed(0, ()) == seed(1, ())
    assert len({seed(rank, ("tp",)) for rank in range(4)}) == 4
    assert seed(0, ()) != seed(2, ())
    many = {seed(0, (), *place) for place in itertools.product(range(4), repeat=4)}
    assert len(many) == 256 and all(0 <= value < 2**63 for value in many)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer_recomputes_with_the_seeds_it_ran_with(recompute: str) -> None:
    rt = Context(dry_axes(Mesh(), 0), "cpu")
    call = rt.layer if recompute == "none" else rt.recomputed_layer
    calls: list[int] = []

    def layer(rt: Context, w: Weights, x: Tensor, index: int) -> Tensor:
        calls.append(index)
        return ops.dropout(x * w["scale"], 0.5, rt.seed(index, 0)) ** 2

    x = torch.ones(100, requires_grad=True)
    weights = Weights({"layers.0.scale": torch.full((100,), 3.0, requires_grad=True)})
    outputs = []
    for rt.micro_batch in range(2):
        outputs.append(call(layer, weights.at("layers.0."), x, 0))
    assert not outputs[0].equal(outputs[1])
    outputs[0].sum().backward()
    assert x.grad is not None and x.grad.equal(outputs[0] * 2)
    assert len(calls) == (2 if recompute == "none" else 3)
    with torch.no_grad():
        assert call(layer, weights.at("layers.0."), x, 0).equal(outputs[1])
    with pytest.raises(KeyError, match=r"no parameter layers\.0\.bias"):
        weights.at("layers.0.")["bias"]


def test_bad_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mesh axis 'np'; the axes are pp, dp, cp, tp, ep"):
        Context(dry_axes(Mesh(), 0), "cpu").axis("np")


def test_axes_of_a_mesh() -> None:
    axes = dry_axes(Mesh(pp=2, dp=4, tp=2, ep=2), 13)
    assert {n: (a.size, a.index) for n, a in axes.items()} == {
        "pp": (2, 1), "dp": (4, 2), "cp": (1, 0), "tp": (2, 1), "ep": (2, 0)
    }  # fmt: skip
    assert all(isinstance(axis, TrivialAxis) for axis in build_axes(Mesh(), 0).values())
    tally = Tally()
    gathered = DryAxis("dp", 256, 3, tally).all_gather(torch.empty(2, 3, device="meta"), 1)
    assert gathered.shape == (2, 768) and tally.num_bytes == {("dp", "all-gather", "forward"): 2 * 768 * 4}
