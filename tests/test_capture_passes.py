"""The passes, on small modules: in-place ops, gradient modes, losses, no-ops, segments, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.compiler.capture import capture
from meshwright.compiler.capture.functionalize import is_in_place
from meshwright.compiler.graph import Graph, Level
from meshwright.compiler.interpret import count_targets, run_graph
from meshwright.compiler.kinds import Kinds
from meshwright.compiler.rules.strategies import strategies
from meshwright.plans.errors import InputError

T = torch.Tensor
N, D = 4, 6


class Model(nn.Module):
    """A loss over `body(weight-scaled x)`; `body` is what a test is about."""

    def __init__(self, body: Callable[[T], T]) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.body = body

    def forward(self, x: T) -> T:
        return self.body(self.proj(x)).float().pow(2).mean()


def write_slice(h: T) -> T:
    y = h * 2
    y[:, 1:3] = h[:, 3:5].sin()
    return y


def write_through_views(h: T) -> T:
    y = h * 1.5
    z = y.view(2, 2, D).transpose(0, 1)
    z[0, :, 2:4].mul_(3.0)
    y.add_(1.0)
    return y + z.transpose(0, 1).reshape(N, D)


def read_a_view_after_a_write(h: T) -> T:
    y = h.clone()
    row = y[1]
    other = y.t()
    y.mul_(2.0)
    row.add_(1.0)
    return other + row.sum()


def split_parts(h: T) -> T:
    y = h + 0.5
    with torch.no_grad():
        z = y.detach().clone()
        a, b = z.chunk(2, dim=1)
        a.sub_(b)
        z.unbind(0)[2].zero_()
    return y + z


def fills(h: T) -> T:
    y = torch.zeros_like(h)
    y[0] = h[1]
    y[2:].fill_(3.0)
    y[:, 0] = -1.0
    y.masked_fill_(y > 2.5, 0.25)
    return y * h


def index_puts(h: T) -> T:
    y = h.new_empty(N, D)
    y[torch.arange(N).flip(0)] = h
    y.index_add_(0, torch.tensor([0, 0, 1]), h[:3])
    return y.diagonal().exp_() + y[:, 0].sum()


def promotes(h: T) -> T:
    count = torch.ones(N, dtype=torch.int64)
    count += 2
    y = h.clone()
    y += count.to(torch.float64)[:, None]
    return y


def without_grad(h: T) -> T:
    with torch.no_grad():
        scale = h.abs().amax(dim=-1, keepdim=True)
    return h / scale + h.detach()


def written_without_grad(h: T) -> T:
    y = h + 0.5
    with torch.no_grad():
        y.mul_(2.0)
    return y


def given_back_by_a_region(h: T) -> T:
    with torch.no_grad():
        same = h.to(h.dtype)
        scale = same.abs().amax()
    return (same * 2 + h) / scale


def lists_of_one(h: T) -> T:
    (a,) = h.split(N)
    (b,) = a[:, None].unbind(1)
    return b.chunk(1)[0] * h


BODIES = [
    given_back_by_a_region,
    lists_of_one,
    write_slice,
    write_through_views,
    read_a_view_after_a_write,
    split_parts,
    fills,
    index_puts,
    promotes,
    without_grad,
]


def captured_graph(module: nn.Module, **inputs: T) -> Graph:
    return capture(module, inputs, seq=D, micro_batch=N).graph


@pytest.mark.parametrize("body", BODIES)
def test_pure_form_equals_eager(body: Callable[[T], T]) -> None:
    torch.manual_seed(0)
    module = Model(body)
    captured = capture(module, {"x": torch.zeros(N, D)}, seq=D, micro_batch=N)
    assert not any(is_in_place(op.target) for op in captured.graph.ops)
    x = torch.randn(N, D)
    ones = [count.float() for count in count_targets(captured.graph, captured.buffers, {"x": x})]
    parameters = dict(module.named_parameters())
    found = run_graph(captured.graph, parameters, captured.buffers, {"x": x}, ones)
    expected = module(x)
    torch.testing.assert_close(found, expected)
    leaves = list(parameters.values())
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


OWN_BACKWARD = "meshwright.autograd_function.default"


class Straight(torch.autograd.Function):
    """Rounds; its backward is not the derivative of that."""

    @staticmethod
    def forward(ctx: object, x: T) -> T:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: T) -> T:  # type: ignore[override]
        return grad


class Square(torch.autograd.Function):
    """Squares, with its own derivative."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: T) -> T:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: T) -> T:  # type: ignore[override]
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * x * grad


def test_custom_functions() -> None:
    """A backward that is the derivative of its forward is inlined; another is kept, and is on no rank's part of a gradient."""
    plain = captured_graph(Model(Square.apply), x=torch.zeros(N, D))
    assert plain.ops and not any(op.target == OWN_BACKWARD for op in plain.ops)
    test_pure_form_equals_eager(Straight.apply)
    graph = captured_graph(Model(Straight.apply), x=torch.zeros(N, D))
    op = next(op for op in graph.ops if op.target == OWN_BACKWARD)
    legal, _ = strategies(Kinds(graph).call(op), None, 2, {})
    assert [s.factor for s in legal] == [""]


def test_a_custom_function_must_be_importable() -> None:
    class Inner(Straight):
        pass

    with pytest.raises(InputError, match=r"Inner is a custom autograd.Function.*must import.*define it at the top of a module"):
        captured_graph(Model(Inner.apply), x=torch.zeros(N, D))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda h: h + torch.rand_like(h), "draws random numbers"),
        (lambda h: h * h.sum().item(), "depends on the data"),
        (lambda h: h if h.sum() > 0 else -h, r"test_capture_passes.py:\d+: what runs there depends on the data"),
        (written_without_grad, "without gradient, into a value that carries one"),
        (lambda h: h.expand(3, N, D).mul_(2.0), "cannot trace|no pure form"),
    ],
)
def test_refusals_name_the_reason(body: Callable[[T], T], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        captured_graph(Model(body), x=torch.zeros(N, D))


def test_writing_into_a_parameter_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: T) -> T:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x).sum()

    with pytest.raises(InputError, match="writes into parameter weight"):
        captured_graph(Writes(D, D), x=torch.zeros(N, D))


def test_no_loss_is_refused() -> None:
    with pytest.raises(InputError, match="gave no scalar loss"):
        captured_graph(nn.Linear(D, D), input=torch.zeros(N, D))


class Scores(nn.Module):
    """A loss made from logits and labels by `loss`."""

    def __init__(self, loss: Callable[[T, T], T]) -> None:
        super().__init__()
        self.out = nn.Linear(D, 5)
        self.loss = loss

    def forward(self, x: T, labels: T) -> T:
        return self.loss(self.out(x), labels)


def graph_of(loss: Callable[[T, T], T]) -> Graph:
    return captured_graph(Scores(loss), x=torch.zeros(N, D), labels=torch.zeros(N, dtype=torch.int64))


def test_cross_entropy_becomes_sum_and_count() -> None:
    graph = graph_of(lambda y, t: 0.5 * F.cross_entropy(y, t, ignore_index=7, label_smoothing=0.1).float())
    (total,) = [op for op in graph.ops if op.target == "mw.cross_entropy_sum"]
    assert total.args[2:] == (7, 0.1) and graph.notes == ()
    count = graph.ops[graph.producers[graph.counts[0]]]
    assert count.target == "aten.sum.default" and count.level is Level.INPUT
    assert graph.ops[graph.producers[count.operands[0]]].args[1] == 7


def test_two_cross_entropies_have_two_denominators() -> None:
    graph = graph_of(lambda y, t: (F.cross_entropy(y, t) + F.cross_entropy(-y, t)) / 2)
    assert len(graph.denominators) == 2 and sum(op.target == "mw.token_mean" for op in graph.ops) == 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t) ** 2,
        lambda y, t: F.cross_entropy(y, t, weight=torch.arange(5.0)),
        lambda y, t: F.cross_entropy(y, y.softmax(-1).detach()),
        lambda y, t: y.pow(2).sum(),
    ],
)
def test_other_losses_are_averaged_over_micro_batches(loss: Callable[[T, T], T]) -> None:
    graph = graph_of(loss)
    assert len(graph.denominators) == 1 and "averaged over micro-batches" in graph.notes[0]
    assert graph.ops[graph.producers[graph.counts[0]]].level is Level.CONSTANT
    assert graph.ops[graph.producers[graph.loss]].target == "mw.token_mean"


def test_no_ops_and_dropout_that_is_off() -> None:
    def body(h: T) -> T:
        h = F.dropout(h, 0.0, True) + F.dropout(h, 0.5, False)
        h = (h.contiguous() + 0) * 1.0
        return F.dropout(h.view(N, D)[:].expand(N, D).to(torch.float32), 0.25, True)

    graph = captured_graph(Model(body), x=torch.zeros(N, D))
    targets = [op.target.split(".")[1] for op in graph.ops if op.level is Level.COMPUTE]
    assert targets == ["linear", "add", "dropout", "pow", "mean", "token_mean"]


def test_gradient_flow() -> None:
    graph = captured_graph(Model(without_grad), x=torch.zeros(N, D))
    flows = {op.target.split(".")[1]: op.results[0].requires_grad for op in graph.ops}
    assert flows["linear"] and flows["div"] and not flows["detach"]


class Shared(nn.Module):
    """Layers 0, 1, 0, 1: parameters are shared, layers are entered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: T) -> T:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x).relu()
        return x.sum()


def test_layers_entered_again_are_segments_of_their_own() -> None:
    graph = captured_graph(Shared(), x=torch.zeros(N, D))
    assert [s.name for s in graph.segments] == ["layers.0", "layers.1", "layers.0@1", "layers.1@1", "head"]
    assert [s.prefix for s in graph.segments] == ["layers.0", "layers.1", "layers.0", "layers.1", ""]
    assert len({s.kind for s in graph.segments[1:4]}) == 1


class Hooked(nn.Module):
    """A gradient hook where `where` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where = nn.Linear(D, D), where
        if where == "module":
            self.inner.register_full_backward_hook(lambda *_: None)
        if where == "parameter":
            self.inner.weight.register_hook(lambda grad: grad / 2)

    def forward(self, x: T) -> T:
        h = self.inner(x)
        if self.where == "tensor":
            h.register_hook(lambda grad: grad.clamp(-1, 1))
        return h.sum()


@pytest.mark.parametrize(("where", "said"), [("module", "backward hook"), ("parameter", "gradient hook"), ("tensor", "on a tensor")])
def test_hooks_that_change_gradients_are_refused(where: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        captured_graph(Hooked(where), x=torch.zeros(N, D))


class Clipped(Straight):
    """Its backward differs from the derivative for large gradients alone."""

    @staticmethod
    def forward(ctx: object, x: T) -> T:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: T) -> T:  # type: ignore[override]
        return (grad * 2).clamp(-50, 50)


def test_a_backward_that_clips_is_kept() -> None:
    graph = captured_graph(Model(Clipped.apply), x=torch.zeros(N, D))
    assert any(op.target == OWN_BACKWARD for op in graph.ops)


def scaled_in_place(h: T) -> T:
    copies = [h.clone()]
    torch._foreach_mul_(copies, 2.0)
    return copies[0]


def test_an_op_without_result_is_refused() -> None:
    with pytest.raises(InputError, match="gives no result, so what it does would be lost"):
        captured_graph(Model(scaled_in_place), x=torch.zeros(N, D))
