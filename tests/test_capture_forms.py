"""What capture makes of inputs, losses and training-only code of unusual forms: replayed, equal to eager."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.compiler.capture import Captured, capture
from meshwright.compiler.interpret import count_targets, run_graph
from meshwright.plans.errors import InputError
from meshwright.runtime.batch import flat_inputs

T = torch.Tensor
N, D, C = 4, 6, 5


def replay(captured: Captured, module: nn.Module, inputs: dict[str, T]) -> T:
    ones = [count.float() for count in count_targets(captured.graph, captured.buffers, inputs)]
    return run_graph(captured.graph, dict(module.named_parameters()), captured.buffers, inputs, ones)


def check(module: nn.Module, captured: Captured, inputs: dict[str, object]) -> None:
    """Loss and gradients of the captured graph against the module's own."""
    found, expected = replay(captured, module, flat_inputs(inputs)), module(**inputs)
    torch.testing.assert_close(found, expected)
    leaves = list(module.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))


class Nested(nn.Module):
    """Takes states as a dict of pairs, and a flag that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)

    def forward(self, states: dict[str, tuple[T, T]], labels: T, negate: bool = False) -> T:
        a, b = states["full"]
        y = self.proj(a) * b + states["other"][0]
        return F.mse_loss(-y if negate else y, labels)


def test_nested_inputs_are_flat_and_other_arguments_are_part_of_the_program() -> None:
    torch.manual_seed(0)
    module = Nested()
    random = {"states": {"full": (torch.randn(N, D), torch.randn(N, D)), "other": (torch.randn(N, D),)}, "labels": torch.randn(N, D)}
    example = {**random, "negate": True}
    captured = capture(module, example, seq=D, micro_batch=N)
    assert [v.name for v in captured.graph.inputs] == ["states_full_0", "states_full_1", "states_other_0", "labels"]
    assert captured.graph.notes == ()
    check(module, captured, example)


def test_an_input_may_have_several_entries_for_each_row() -> None:
    class Several(nn.Linear):
        def forward(self, parts: T, labels: T) -> T:
            return F.mse_loss(super().forward(parts).view(-1, 3, D).sum(1), labels)

    captured = capture(Several(D, D), {"parts": torch.zeros(6, D), "labels": torch.zeros(2, D)}, seq=D, micro_batch=N)
    assert [v.shape for v in captured.graph.inputs] == [(3 * N, D), (N, D)]
    with pytest.raises(InputError, match="parts has 5 rows"):
        capture(Several(D, D), {"parts": torch.zeros(5, D), "labels": torch.zeros(2, D)}, seq=D, micro_batch=N)


class Scores(nn.Module):
    def __init__(self, loss: Callable[[T, T], T]) -> None:
        super().__init__()
        self.out = nn.Linear(D, 3 * C)
        self.loss = loss

    def forward(self, x: T, labels: T) -> T:
        return self.loss(self.out(x).view(-1, 3, C), labels)


def masked_mean(y: T, t: T) -> T:
    mask = (t != 0).float()
    return (F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none") * mask.flatten()).sum() / mask.sum()


LOSSES: dict[str, tuple[Callable[[T, T], T], bool]] = {
    "classes in dim 1": (lambda y, t: F.cross_entropy(y.transpose(1, 2), t), True),
    "negative log likelihood": (lambda y, t: F.nll_loss(F.log_softmax(y.flatten(0, 1), -1), t.flatten()), True),
    "masked mean": (masked_mean, True),
    "mean square": (lambda y, t: F.mse_loss(y.sum(-1), t.float()), True),
    "binary": (lambda y, t: F.binary_cross_entropy_with_logits(y[..., 0], (t > 2).float()), True),
    "plain mean": (lambda y, t: y.pow(2).mean(), True),
    "span": (lambda y, t: (F.cross_entropy(y[:, 0], t[:, 0].clamp(0, 3), ignore_index=3) + F.cross_entropy(y[:, 1], t[:, 1])) / 2, True),
    "square of a mean": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()).square(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_micro_batches_add_up(name: str) -> None:
    """The sum over two micro-batches, with the counts of both, is the loss of all rows; what is not gets a note."""
    loss, is_exact = LOSSES[name]
    torch.manual_seed(0)
    module = Scores(loss)
    captured = capture(module, {"x": torch.zeros(N, D), "labels": torch.zeros(N, 3, dtype=torch.int64)}, seq=3, micro_batch=N)
    assert (captured.graph.notes == ()) is is_exact
    x, labels = torch.randn(2 * N, D), torch.randint(0, C, (2 * N, 3))
    labels[1:3] = 0
    parts = [{"x": x[i : i + N], "labels": labels[i : i + N]} for i in (0, N)]
    counts = [count_targets(captured.graph, captured.buffers, part) for part in parts]
    totals = [torch.stack(list(pair)).sum().float() for pair in zip(*counts, strict=True)]
    parameters = dict(module.named_parameters())
    found = sum(run_graph(captured.graph, parameters, captured.buffers, part, totals) for part in parts)
    if is_exact:
        torch.testing.assert_close(found, module(x, labels))


class Noisy(nn.Linear):
    """Noise while it trains."""

    def forward(self, x: T) -> T:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return super().forward(x)


class Skips(nn.Linear):
    """Leaves itself out by chance while it trains."""

    def forward(self, x: T) -> T:
        if self.training and torch.rand([]) < 0.5:
            return x
        return super().forward(x)


class Clips(nn.Linear):
    """Clips its weight while it trains."""

    def forward(self, x: T) -> T:
        if self.training:
            self.weight.data.clamp_(-1.0, 1.0)
        return super().forward(x)


@pytest.mark.parametrize(("layer", "reason"), [(Noisy, "draws random numbers"), (Skips, r"chance \(.*:\d+\)"), (Clips, "fails")])
def test_what_only_training_does_is_left_out_with_a_note(layer: type[nn.Linear], reason: str) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer(D, D) for _ in range(2))

        def forward(self, x: T) -> T:
            for part in self.layers:
                x = part(x)
            return x.square().mean()

    module = Loss()
    captured = capture(module, {"x": torch.zeros(N, D)}, seq=D, micro_batch=N)
    (note,) = captured.graph.notes
    assert note.startswith("layers.{0,1}: captured as in evaluation")
    assert re.search(reason, note)
    assert all(m.training for m in module.modules())
    check(module.eval(), captured, {"x": torch.randn(N, D)})


def test_batch_norm_uses_the_batch() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x: T) -> T:
            return self.norm(x).square().mul(torch.arange(D)).mean()

    module = Normed()
    captured = capture(module, {"x": torch.zeros(N, D)}, seq=D, micro_batch=N)
    assert captured.buffers == {} and captured.graph.notes[0].endswith("norm.num_batches_tracked")
    check(module, captured, {"x": torch.randn(N, D)})


def test_sizes_that_depend_on_constants_are_known() -> None:
    class Selects(nn.Linear):
        def forward(self, x: T) -> T:
            mask = torch.arange(N) % 2 == 0
            out = torch.zeros_like(x)
            out[mask] = super().forward(x[mask])
            count = mask.sum().item()
            return (out / count).square().mean()

    torch.manual_seed(0)
    module = Selects(D, D)
    check(module, capture(module, {"x": torch.zeros(N, D)}, seq=D, micro_batch=N), {"x": torch.randn(N, D)})


def test_sizes_that_depend_on_inputs_are_refused_with_the_line() -> None:
    class Selects(nn.Linear):
        def forward(self, x: T) -> T:
            return super().forward(x[x[:, 0] > 0]).square().mean()

    with pytest.raises(InputError, match=r"test_capture_forms.py:\d+: .*depends on the data"):
        capture(Selects(D, D), {"x": torch.zeros(N, D)}, seq=D, micro_batch=N)
