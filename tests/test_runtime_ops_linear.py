"""column_linear equals the conversion followed by linears; losses, dropout and the context. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.plans.layout import Type, shard
from meshwright.runtime import ops
from meshwright.runtime.axes import Axis, Pending, TrivialAxis
from meshwright.runtime.dry_axes import DryAxis, Tally
from meshwright.tests.simulated import SimulatedAxis, run_ranks, saved_tensors
from meshwright.tests.test_runtime_ops import local

WIDTHS = (6, 2, 4)


def operands(
    source: Type, axis: Axis, bias: bool, frozen: bool = False
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """x as `source`, and this rank's weights and biases."""
    draw = torch.Generator().manual_seed(1)
    x = local(torch.randn(4, 6, 3, generator=draw, dtype=torch.float64), source, axis.size, axis.index).requires_grad_()
    draw = torch.Generator().manual_seed(10 + axis.index)
    weights = [torch.randn(w, 3, generator=draw, dtype=torch.float64).requires_grad_(not frozen) for w in WIDTHS]
    biases = [torch.randn(w, generator=draw, dtype=torch.float64).requires_grad_() if bias else None for w in WIDTHS]
    return x, weights, biases


def outcome(outputs: tuple[Tensor, ...], axis: Axis, inputs: list[Tensor | None], used: int) -> list[Tensor | None]:
    """Outputs, then gradients of the inputs, for gradients that differ by rank."""
    draw = torch.Generator().manual_seed(20 + axis.index)
    loss = sum((y * torch.randn(y.shape, generator=draw, dtype=y.dtype)).sum() for y in outputs[:used])
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*(y.detach() for y in outputs), *(None if x is None else x.grad for x in inputs)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("used", [3, 1])
@pytest.mark.parametrize("source", ["I", "S(1)", "S(0)", "S(1:4+2)"])
def test_column_linear_equals_convert_and_linear(source: str, bias: bool, ranks: int, used: int) -> None:
    text = f"{source} -> R"

    def body(axis: Axis) -> None:
        x, weights, biases = operands(Type.parse(source), axis, bias)
        fused = outcome(ops.column_linear(x, axis, weights, biases, text), axis, [x, *weights, *biases], used)
        x, weights, biases = operands(Type.parse(source), axis, bias)
        full = ops.convert(x, axis, text)
        plain = tuple(ops.linear(full, w, b) for w, b in zip(weights, biases, strict=True))
        for a, b in zip(fused, outcome(plain, axis, [x, *weights, *biases], used), strict=True):
            torch.testing.assert_close(a, b)

    run_ranks(ranks, body)


class Diary(DryAxis, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rank 0 of two: when collectives start and are waited for, and the matmuls between."""

    def __init__(self) -> None:
        DryAxis.__init__(self, "tp", 2, 0, Tally())
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def _noted(self, name: str, pending: Pending) -> Pending:
        self.lines.append(f"start {name}")
        return pending.then(lambda x: (self.lines.append(f"wait {name}"), x)[1])  # type: ignore[func-returns-value]

    def _start_reduce(self, x: Tensor, reduction: str) -> Pending:
        return self._noted("all-reduce", super()._start_reduce(x, reduction))

    def _start_gather(self, x: Tensor) -> Pending:
        return self._noted("all-gather", super()._start_gather(x))

    def _start_scatter(self, stacked: Tensor) -> Pending:
        return self._noted("reduce-scatter", super()._start_scatter(stacked))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm_"):
            self.lines.append("matmul")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("source", "first", "second"),
    [
        (
            "S(1)",
            "start all-gather, matmul, matmul, start reduce-scatter",
            "wait all-gather, matmul, matmul, wait reduce-scatter",
        ),
        ("I", "matmul, matmul, start all-reduce", "matmul, matmul, wait all-reduce"),
    ],
)
def test_column_linear_communicates_while_it_computes_and_saves_the_shard(source: str, first: str, second: str) -> None:
    diary = Diary()
    x, weights, biases = operands(Type.parse(source), diary, False)
    with saved_tensors() as saved:
        outputs = ops.column_linear(x, diary, weights[:2], biases[:2], f"{source} -> R")
    assert sorted(t.numel() for t in saved) == sorted(t.numel() for t in (x, *weights[:2]))
    with diary:
        diary.lines.clear()
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert ", ".join(diary.lines) == f"{first}, {second}"


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    def body(axis: SimulatedAxis) -> list[str]:
        x, weights, biases = operands(shard(1), axis, True, frozen=True)
        ops.column_linear(x, axis, weights, biases, "S(1) -> R")[0].sum().backward()
        assert x.grad is not None and weights[0].grad is None and biases[0] is not None and biases[0].grad is not None
        x, weights, biases = operands(shard(1), axis, False)
        ops.column_linear(x.detach(), axis, weights, biases, "S(1) -> R")[0].sum().backward()
        assert weights[0].grad is not None and weights[1].grad is None
        return axis.log

    assert run_ranks(2, body)[0] == ["all-gather", "reduce-scatter", "all-gather", "all-gather"]


@pytest.mark.parametrize("text", ["P -> R", "S(2) -> R", "I -> I"])
def test_column_linear_refuses_other_conversions(text: str) -> None:
    with pytest.raises(ValueError, match="column_linear cannot do"):
        ops.column_linear(torch.zeros(2, 2, 2), TrivialAxis("tp"), [torch.zeros(2, 2)], [None], text)


def labels_of(case: str) -> Tensor:
    """(2, 8) labels of a vocabulary of 12."""
    labels = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(3))
    if case == "some ignored":
        labels[:, ::3] = -100
    if case == "one shard only":
        labels %= 4
    if case == "none":
        labels[:] = -100
    return labels


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("case", ["all", "some ignored", "one shard only", "none"])
def test_vocab_cross_entropy_equals_torch(
    case: str, smoothing: float, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.runtime.loss.BLOCK_ELEMENTS", 20)
    labels = labels_of(case)
    logits = torch.randn(2, 8, 12, dtype=torch.float64) * 30
    full = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        full.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )
    (expected * 0.3).backward()

    def body(axis: Axis) -> tuple[Tensor, Tensor, list[str]]:
        x = local(logits, shard(2), ranks, axis.index).requires_grad_()
        loss = ops.vocab_cross_entropy_sum(x, labels, axis, -100, smoothing)
        (loss * 0.3).backward()
        assert x.grad is not None
        return loss.detach(), x.grad, getattr(axis, "log", [])

    results = run_ranks(ranks, body)
    for loss, _, log in results:
        torch.testing.assert_close(loss, expected.detach())
        assert log == ["all-reduce"] * (2 if ranks > 1 else 0)
    torch.testing.assert_close(torch.cat([grad for _, grad, _ in results], -1), full.grad)
    torch.testing.assert_close(ops.cross_entropy_sum(logits, labels, -100, smoothing), expected.detach())


def test_cross_entropy_of_bfloat16_is_summed_in_float32() -> None:
    logits = torch.randn(64, 50, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(50, (64,))
    loss = ops.cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16
    expected = torch.nn.functional.cross_entropy(logits.detach().float(), labels, reduction="sum")
    torch.testing.assert_close(loss.detach(), expected)


def test_token_mean_of_parts_is_the_mean() -> None:
    logits, labels = torch.randn(2, 8, 12), labels_of("some ignored")
    count = (labels != -100).sum().float()
    parts = [ops.token_mean(ops.cross_entropy_sum(x, y), count) for x, y in zip(logits, labels, strict=True)]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(torch.stack(parts).sum(), expected)
    assert ops.token_mean(ops.cross_entropy_sum(logits, labels_of("none")), count * 0).isnan()


def test_dropout_depends_on_its_seed_alone() -> None:
    x = torch.randn(400, 5, requires_grad=True)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, other = ops.dropout(x, 0.25, 7), ops.dropout(x, 0.25, 8)
    assert torch.get_rng_state().equal(before)
    assert first.equal(ops.dropout(x, 0.25, 7)) and not first.equal(other)
    assert 0.2 < (first == 0).float().mean() < 0.3
    torch.testing.assert_close(first[first != 0], x[first != 0] / 0.75)
    first.sum().backward()
    assert x.grad is not None and (x.grad == 0).equal(first == 0)
    assert ops.dropout(x, 0.0, 1) is x and not ops.dropout(x, 1.0, 1).any()


def test_attention_dropout_depends_on_its_seed_alone() -> None:
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind(0)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = ops.sdpa(q, k, v, dropout_p=0.5, is_causal=True, seed=2**62 + 1)
    assert torch.get_rng_state().equal(before)
    torch.rand(3)
    assert first.equal(ops.sdpa(q, k, v, dropout_p=0.5, is_causal=True, seed=2**62 + 1))
    assert not first.equal(ops.sdpa(q, k, v, dropout_p=0.5, is_causal=True, seed=3))
    grouped = ops.sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True, scale=0.3)
    repeated = (k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1))
    torch.testing.assert_close(grouped, ops.sdpa(q, *repeated, is_causal=True, scale=0.3))
    with pytest.raises(ValueError, match="needs a seed"):
        ops.sdpa(q, k, v, dropout_p=0.5)
