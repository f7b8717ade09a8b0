"""Types of ops in 16-bit plans: the table, the casts that come of it, the loss scale, and the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from meshwright.compiler.capture import capture
from meshwright.compiler.graph import Graph, Level
from meshwright.compiler.interpret import call, count_targets, run_graph
from meshwright.compiler.kinds import short_name
from meshwright.compiler.precision import TABLE, Policy
from meshwright.passes.choose_precision import settle_precision
from meshwright.plans.errors import InputError
from meshwright.runtime.loss_scale import LossScale, ScaleOptions, read_scale_options
from meshwright.tests.parity import build

INSIDE = "the kernels widen, accumulate in FP32 and round once: an FP32 result would double what is kept, and is rounded anyway"
DIFFERENCES = {
    "softmax": INSIDE, "layer_norm": INSIDE, "rms_norm": INSIDE, "group_norm": INSIDE,
    "bilinear": "a product; autocast promotes it, since it has no 16-bit kernel of its own",
    "dot": "a product; autocast promotes it to avoid a mismatch of types, which the casts here exclude",
    "vdot": "as dot",
}  # fmt: skip
"""Ops on which the table differs from torch's CUDA autocast lists, and why. docs/precision.md has them too."""
NOT_CAPTURED = frozenset("_convolution cudnn_convolution cudnn_convolution_transpose lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
                         "__matmul__ __pow__".split())  # fmt: skip
"""Names in those lists that no captured graph has."""


def autocast_lists() -> tuple[set[str], set[str]]:
    """(16-bit, FP32) ops of CUDA autocast, as torch's own tests list them."""
    lists = vars(AutocastTestLists(torch.device("cpu")))
    both = ({case[0] for name, cases in lists.items() if name.endswith(kind) for case in cases} for kind in ("fp16", "fp32"))
    low, high = (names - NOT_CAPTURED for names in both)
    return low, high


def test_the_table_differs_from_autocast_where_it_says_so() -> None:
    low, high = autocast_lists()
    assert low and high
    found = {n for n in low if TABLE.get(n, (None,))[0] is not Policy.COMPUTE}
    found |= {n for n in high if TABLE.get(n, (None,))[0] is not Policy.FP32}
    promoted = {case[0] for case in AutocastTestLists(torch.device("cpu")).torch_need_autocast_promote}
    found |= {n for n in promoted if n in TABLE}
    assert found == set(DIFFERENCES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_computes_in_fp32_inside_does(dtype: torch.dtype) -> None:
    """One rounding of the FP32 result of the same operands, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 8, 512, generator=generator) * 3).to(dtype)
    weight = torch.randn(512, generator=generator).to(dtype)
    functional = nn.functional
    pairs = {
        "softmax": lambda x, w: functional.softmax(x, -1),
        "layer_norm": lambda x, w: functional.layer_norm(x, (512,), w),
        "rms_norm": lambda x, w: functional.rms_norm(x, (512,), w, 1e-6),
        "group_norm": lambda x, w: functional.group_norm(x.transpose(1, 2), 4, w),
    }
    for name, op in pairs.items():
        exact, found = op(x.float(), weight.float()), op(x, weight).float()
        off = (found - exact).abs() / exact.abs().clamp(min=float(torch.finfo(dtype).tiny) ** 0.5)
        assert float(off.max()) < 1.6 * torch.finfo(dtype).eps, name


MODELS = [("llama", "sdpa"), ("gpt2", "eager"), ("mixtral", "eager"), ("t5", "sdpa"), ("bert", "eager")]


@pytest.mark.parametrize(("name", "attention"), MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_graphs_run_in_the_types_that_they_say(name: str, attention: str, precision: str) -> None:
    """Captured in the type that runs, and in FP32 with all casts made here: every value has its dtype, the loss is near FP32's."""
    tiny = build(name, layers=2)
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    exact = capture(tiny.directory, seq=16, micro_batch=2, attention=attention)
    truth = loss_of(exact.graph, exact.buffers, tiny.load(), torch.float32)
    for captured in (capture(tiny.directory, seq=16, micro_batch=2, attention=attention, dtype=dtype), exact):
        graph, entries = settle_precision(captured.graph, precision, None)
        assert entries["linear"].startswith("compute")
        found = loss_of(graph, captured.buffers, tiny.load(), getattr(torch, dtype))
        assert abs(found - truth) < {"bf16": 2e-2, "fp16": 2e-3}[precision] * truth
        assert len({s.kind for s in graph.segments if s.prefix}) == len({s.kind for s in captured.graph.segments if s.prefix})
        assert settle_precision(captured.graph, precision, entries)[1] == entries
        no_cast_is_made_twice(graph)


def loss_of(graph: Graph, buffers: dict[str, torch.Tensor], model: nn.Module, dtype: torch.dtype) -> float:
    """Runs a graph and checks the dtype of every result."""
    generator = torch.Generator().manual_seed(3)
    inputs = {v.name: torch.randint(1, 250, v.shape, generator=generator) for v in graph.inputs}
    parameters = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    denominators = [count.float() for count in count_targets(graph, buffers, inputs)]
    loss = run_graph(graph, parameters, buffers, inputs, denominators)
    values = {p.value.name: parameters[p.path] for p in graph.parameters}
    values.update({value.name: buffers[path] for value, path in graph.buffers})
    values.update(inputs)
    values.update({value.name: given for value, given in zip(graph.denominators, denominators, strict=True)})
    for op in graph.ops:
        for result, tensor in zip(op.results, call(op, values), strict=True):
            assert str(tensor.dtype) == f"torch.{result.dtype}", op
            values[result.name] = tensor
    return float(loss)


def no_cast_is_made_twice(graph: Graph) -> None:
    """In a segment, of a value to a type; and none that undoes another."""
    for segment in graph.segments:
        casts = Counter((op.operands[0], op.results[0].dtype) for op in (graph.ops[i] for i in segment.ops) if op.target == "aten.to.dtype")
        assert all(count == 1 for count in casts.values()), segment.name
    for op in graph.ops:
        place = graph.producers.get(op.operands[0], -1) if op.target == "aten.to.dtype" else -1
        if place >= 0 and graph.ops[place].target == "aten.to.dtype" and op.level is Level.COMPUTE:
            first = graph.values[graph.ops[place].operands[0]]
            assert first.dtype != op.results[0].dtype or graph.ops[place].results[0].dtype != "float32", op


def test_the_models_own_casts_are_kept_and_the_logits_stay_narrow() -> None:
    """The norms' upcasts are the model's: none is added. FP32 logits are not made: the loss widens blocks of them."""
    tiny = build("llama", layers=2)
    captured = capture(tiny.directory, seq=16, micro_batch=2, dtype="bfloat16")
    graph, _ = settle_precision(captured.graph, "bf16", None)
    casts = [sum(op.target == "aten.to.dtype" and op.level is Level.COMPUTE for op in g.ops) for g in (captured.graph, graph)]
    assert casts[1] == casts[0] - 1
    loss = next(op for op in graph.ops if op.target == "mw.cross_entropy_sum")
    assert graph.values[loss.operands[0]].dtype == "bfloat16" and loss.results[0].dtype == "float32"


def test_router_logits_and_overrides() -> None:
    tiny = build("mixtral", layers=2)
    captured = capture(tiny.directory, seq=16, micro_batch=2, dtype="bfloat16")
    graph, entries = settle_precision(captured.graph, "bf16", None)
    assert entries["model.layers.*.mlp.gate:linear"].startswith("fp32")
    routers = [op for op in graph.ops if op.module.endswith("mlp.gate") and short_name(op.target) == "linear"]
    assert routers and all(op.results[0].dtype == "float32" for op in routers)
    changed, _ = settle_precision(captured.graph, "bf16", {"model.layers.*.mlp.gate": "compute", "model.layers.{1}.self_attn": "fp32"})
    for op in changed.ops:
        if short_name(op.target) == "linear" and ".layers." in op.module:
            wide = ".1.self_attn" in op.module
            assert op.results[0].dtype == ("float32" if wide else "bfloat16"), op
    assert len({s.kind for s in changed.segments if s.prefix}) == 2
    last = {"model.layers.*.mlp": "compute", "model.layers.*.mlp.gate:linear": "fp32"}
    again, entries = settle_precision(captured.graph, "bf16", last)
    assert list(entries)[-2:] == list(last)
    gates = [op for op in again.ops if op.module.endswith("mlp.gate") and short_name(op.target) == "linear"]
    assert all(op.results[0].dtype == "float32" for op in gates)
    with pytest.raises(InputError, match=r"precision_ops.model.nothing: matches no op"):
        settle_precision(captured.graph, "bf16", {"model.nothing": "fp32"})
    with pytest.raises(InputError, match=r"precision_ops.model.{0: pattern 'model.{0' has a brace without its partner"):
        settle_precision(captured.graph, "bf16", {"model.{0": "fp32"})
    with pytest.raises(InputError, match=r"precision_ops.linear: found 'fp64', expected compute, fp32"):
        settle_precision(captured.graph, "bf16", {"linear": "fp64"})


class Sharp(nn.Module):
    """What a factory may give: FP32 throughout, a product, an exponential, a large sum, and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return (y.exp() / y.exp().sum(-1, keepdim=True) - x).square().mean()


def test_a_module_in_fp32_gets_all_its_casts_here() -> None:
    graph, _ = settle_precision(capture(Sharp(), {"x": torch.ones(2, 8)}, seq=8, micro_batch=2).graph, "fp16", None)
    dtypes = {short_name(op.target): op.results[0].dtype for op in graph.ops if op.target != "aten.to.dtype"}
    assert dtypes["linear"] == "float16"
    assert all(dtypes[name] == "float32" for name in ("exp", "sum", "div", "mean"))
    assert graph.values[graph.loss].dtype == "float32"
    assert all(p.value.dtype == "float16" for p in graph.parameters)


def test_the_loss_scale_moves_as_specified() -> None:
    scale = LossScale.start(read_scale_options({"initial": 8, "interval": 3}))
    seen = []
    for good in (True, True, True, True, False, True, True, True, False, False, False, False):
        seen.append(scale.scale)
        assert scale.good() is None if good else scale.overflowed() in (True, False)
    assert seen == [8, 8, 8, 16, 16, 8, 8, 8, 16, 8, 4, 2]
    assert scale.scale == 1 and not scale.overflowed() and scale.scale == 1
    assert ScaleOptions() == ScaleOptions(2.0**16, 2.0, 0.5, 2000)
    bad = ({"initial": 0.5}, {"growth": 0}, {"backoff": 1}, {"interval": 1.5}, {"scale": 1}, {"growth": "2"}, 3)
    for given in bad:
        with pytest.raises(InputError, match=r"optimizer\.loss_scale"):
            read_scale_options(given)


def test_kernels_equal_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", "meshwright.tests.kernels"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
