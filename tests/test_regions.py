"""Statements of a function moved into regions that are recomputed: what is one region, where its call stands, what may not move."""

from __future__ import annotations

import pytest

from meshwright.compiler.emission.regions import Body, Tangled, read_statements

GELU = """
# mlp.act
half = x * 0.5
cube = aten.pow.Tensor_Scalar(x, 3.0)
inner = x + cube
tanh = aten.tanh.default(inner)
one = tanh + 1.0
y = half * one
# mlp.c_proj
z = ops.linear(y, w["proj.weight"])
out = ops.convert(z, tp, "P -> I")
""".strip().splitlines()
HALF, CUBE, INNER, TANH, ONE, Y, Z, OUT = range(8)


def body() -> Body:
    return Body(read_statements(GELU), ("x", "index"), ("out",))


def test_a_region_is_a_function_of_what_it_reads() -> None:
    functions, lines = body().fold([(ONE, Y, Z)], "run_layer", ("tp",))
    assert functions == [
        "def run_layer_region(rt, w, tanh, half):\n"
        "    one = tanh + 1.0\n"
        "    y = half * one\n"
        "    # mlp.c_proj\n"
        '    z = ops.linear(y, w["proj.weight"])\n'
        "    return z"
    ]
    called = lines.index("z = rt.recompute(run_layer_region, w, tanh, half)")
    assert lines[called - 1] == "# runs again in the backward pass" and lines[called + 1].startswith("out = ")
    assert body().function((Z, OUT), "f", ("tp", "ep")).splitlines()[1] == '    tp = rt.axis("tp")'


def test_regions_are_connected_and_nothing_leaves_them_and_comes_back() -> None:
    assert body().split({HALF, TANH, ONE}) == ((HALF,), (TANH, ONE))
    assert body().split({INNER, ONE}) == ((INNER,), (ONE,))
    assert body().split({INNER, ONE, Y, CUBE}) == ((CUBE, INNER), (ONE, Y))
    with pytest.raises(Tangled, match="values go from a region to ops outside it and back"):
        body().order([(INNER, ONE)])


def test_what_only_moves_a_value_goes_along() -> None:
    assert body().grown({Z}, {OUT}) == {Z}, "it is returned"
    inner = Body(read_statements([*GELU, "last = aten.relu.default(out)"]), ("x", "index"), ("last",))
    assert inner.grown({Z, 8}, {OUT}) == {Z, OUT, 8} and inner.grown({Z}, {OUT}) == {Z}


def test_no_gradient_is_summed_in_another_order() -> None:
    """x has three readers; the first may not go behind the others. With two readers it may."""
    assert body().moved([(HALF, ONE, Y)]) == {HALF}
    assert body().moved([(ONE, Y)]) == frozenset() and body().moved([(CUBE, INNER, TANH)]) == frozenset()
    two = Body(read_statements([line for line in GELU if not line.startswith("inner")]), ("x", "inner"), ("out",))
    assert two.moved([(HALF, ONE - 1, Y - 1)]) == frozenset()
