"""Measures ops, a reference program and the optimizer on this machine: `efficiency.ops`, `efficiency.program`, `update_bytes_per_s` of a
hardware file (compiler.hardware).

    ops         each op of compiler.measured_ops.LIKE on growing sizes, forward and backward through autograd, as the reference interpreter
                calls it; several copies in turn, so that operands come from memory as in a program. Medians
    program     a captured Transformer of two blocks, in two sizes: how many times as long its passes take as their ops, and how much more
                each op takes for being called from a program
    update      norm, clipping and fused AdamW over flat tensors, as runtime.optimizer does

Every rank of a job measures at the same time: what they share (memory, power, a core's two threads) is shared then as it is in a step.
Time is CPU time on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compiler.capture import capture
from meshwright.compiler.flops import amount, backward_cost, op_cost, op_time_s
from meshwright.compiler.graph import Op, Ref, Value
from meshwright.compiler.hardware import Hardware
from meshwright.compiler.interpret import call
from meshwright.compiler.measured_ops import BROADCAST, VIEW

Points = list[list[float]]

COLUMNS = 256
VOCABULARY = 4096
ROWS = {"cpu": (1, 16, 256, 1024, 4096, 16384), "cuda": (16, 256, 4096, 32768, 131072)}
SQUARES = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
LENGTHS = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (128, 512, 1024, 2048, 4096)}
COPIES_BYTES = 1 << 24
"""Operands of all copies together, about."""
MOST_COPIES = 8
LEAST_RUNS = 5
LARGEST_LOGITS = 1 << 23
PROGRAM_ROWS, PROGRAM_LENGTH = (1, 4), 128

X0, X1, X2 = Ref("x0"), Ref("x1"), Ref("x2")


@dataclass(frozen=True)
class Effort:
    """Seconds that one size is measured for, and elements of the largest tensor that is measured."""

    budget_s: float = 0.25
    largest: int = 1 << 40


@dataclass(frozen=True)
class Sample:
    """An op to measure: its arguments, and the shapes of its operands x0, x1 and so on; `indices` are whole numbers below `bound`."""

    target: str
    args: tuple[object, ...]
    shapes: tuple[tuple[int, ...], ...]
    indices: frozenset[int] = frozenset()
    bound: int = 1

    @property
    def elements(self) -> int:
        """Of the largest operand."""
        return max(prod(shape) for shape in self.shapes)

    def op(self) -> tuple[Op, dict[str, Value]]:
        """The op with its operands' values; a run finds its result."""
        values = {
            f"x{i}": Value(f"x{i}", shape, "int64" if i in self.indices else "float32", i not in self.indices)
            for i, shape in enumerate(self.shapes)
        }
        bare = Op(self.target, self.args, (), ())
        result = call(bare, self.tensors(torch.device("cpu")))[0]
        return replace(bare, results=(Value("y", tuple(result.shape), "float32", True),)), values

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Operands of a run."""
        return {
            f"x{i}": torch.randint(0, self.bound, shape, device=device)
            if i in self.indices
            else torch.randn(shape, device=device).requires_grad_()
            for i, shape in enumerate(self.shapes)
        }


def samples(device: str) -> dict[str, tuple[Sample, ...]]:
    """By measured op, from small to large."""
    rows, squares, lengths = ROWS[device], SQUARES[device], LENGTHS[device]

    def by_rows(target: str, *args: object, shapes: tuple[tuple[int, ...], ...] = ()) -> tuple[Sample, ...]:
        operands = sum(isinstance(arg, Ref) for arg in args) - len(shapes)
        return tuple(Sample(f"aten.{target}", args, (*((n, COLUMNS),) * operands, *shapes)) for n in rows)

    weight = (COLUMNS,)
    attention = "aten.scaled_dot_product_attention.default"
    second = frozenset((1,))
    return {
        "linear": tuple(Sample("aten.linear.default", (X0, X1), ((n, n), (n, n))) for n in squares),
        "scaled_dot_product_attention": tuple(
            Sample(attention, (X0, X1, X2, None, 0.0, True), ((1, 8, n, 64),) * 3) for n in lengths
        ),
        "add": by_rows("add.Tensor", X0, X1),
        "mul": by_rows("mul.Tensor", X0, X1),
        BROADCAST: by_rows("mul.Tensor", X0, X1, shapes=(weight,)),
        "silu": by_rows("silu.default", X0),
        "gelu": by_rows("gelu.default", X0),
        "tanh": by_rows("tanh.default", X0),
        "mean": by_rows("mean.dim", X0, [-1], True),
        "softmax": by_rows("softmax.int", X0, -1),
        "layer_norm": by_rows("layer_norm.default", X0, [COLUMNS], X1, X2, shapes=(weight, weight)),
        "cat": tuple(Sample("aten.cat.default", ([X0, X1], -1), ((n, COLUMNS // 2),) * 2) for n in rows),
        "slice": by_rows("slice.Tensor", X0, -1, 0, COLUMNS // 2),
        "embedding": tuple(
            Sample("aten.embedding.default", (X0, X1), ((VOCABULARY, COLUMNS), (n,)), second, VOCABULARY) for n in rows
        ),
        "cross_entropy_sum": tuple(
            Sample("mw.cross_entropy_sum", (X0, X1, -100, 0.0), ((n, VOCABULARY), (n,)), second, VOCABULARY)
            for n in rows
            if n * VOCABULARY <= LARGEST_LOGITS
        ),
        VIEW: (Sample("aten.unsqueeze.default", (X0, 0), ((16, COLUMNS),)),),
    }


def clock_of(device: torch.device) -> Callable[[], float]:
    """CPU time on a CPU; elapsed time, when the GPU is done, elsewhere."""
    if device.type == "cpu":
        return time.thread_time

    def elapsed() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return elapsed


def measure_ops(
    device: torch.device, effort: Effort, crowd: float, progress: Callable[[str], None]
) -> dict[str, dict[str, Points]]:
    """[work, seconds] by op, forward and backward; `crowd`: ranks per core."""
    found: dict[str, dict[str, Points]] = {}
    for name, sizes in samples(device.type).items():
        progress(f"op {name}")
        forward: Points = []
        backward: Points = []
        for sample in [s for s in sizes if s.elements <= effort.largest] or sizes[:1]:
            op, values = sample.op()
            times = op_seconds(sample, op, device, effort.budget_s / 2)
            for points, cost, seconds in ((forward, op_cost, times[0]), (backward, backward_cost, times[1])):
                work = amount(cost(op, values))
                if work or not points:
                    points.append([max(1.0, work), rounded(seconds * crowd)])
        found[name] = {"forward": growing(forward), "backward": growing(backward)}
    return found


def growing(points: Points) -> Points:
    """No size takes longer than a larger one."""
    least = float("inf")
    found = []
    for size, seconds in reversed(points):
        least = min(least, seconds)
        found.append([size, least])
    return found[::-1]


def op_seconds(sample: Sample, op: Op, device: torch.device, budget_s: float) -> tuple[float, float]:
    """(forward, backward) seconds of one call."""
    clock = clock_of(device)
    size = 4 * sum(map(prod, sample.shapes))
    copies = [sample.tensors(device) for _ in range(max(1, min(MOST_COPIES, COPIES_BYTES // size)))]
    leaves = [t for given in copies for t in given.values() if t.requires_grad]
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < LEAST_RUNS:
        start = clock()
        made = [call(op, given)[0] for given in copies]
        middle = clock()
        gradients = [torch.ones_like(t) for t in made]
        begin = clock()
        torch.autograd.grad(made, leaves, gradients)
        times.append(((middle - start) / len(copies), (clock() - begin) / len(copies)))
    forward, backward = zip(*times[1:], strict=True)
    return statistics.median(forward), statistics.median(backward)


def rounded(number: float) -> float:
    return float(f"{number:.4g}")


class Block(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(3)])
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 11 * width // 4, bias=False) for _ in range(2))
        self.down = nn.Linear(11 * width // 4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = normed(x, self.first)
        q, k, v = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in self.qkv)
        x = x + self.out(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True).transpose(1, 2).flatten(2))
        h = normed(x, self.second)
        made: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return made


def normed(x: Tensor, weight: Tensor) -> Tensor:
    scaled: Tensor = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    return scaled


def turned(x: Tensor) -> Tensor:
    """The ops of a rotary embedding."""
    first, second = x.chunk(2, -1)
    return x * 0.5 + torch.cat((-second, first), -1) * 0.5


class Reference(nn.Module):
    """A small Transformer that returns its loss."""

    def __init__(self, width: int = 256, heads: int = 4, layers: int = 2, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def measure_program(hardware: Hardware, device: torch.device, budget_s: float, crowd: float) -> dict[str, float]:
    """What a program's forward and backward take beside their ops: so many times as long, and seconds more for every op. From programs
    of two sizes, that run in turn. The hardware has what was measured of ops."""
    model = Reference().to(device)
    modelled = []
    batches = []
    for rows in PROGRAM_ROWS:
        ids = torch.randint(0, VOCABULARY, (rows, PROGRAM_LENGTH), device=device)
        batches.append({"input_ids": ids, "labels": ids})
        example = {n: t.cpu() for n, t in batches[-1].items()}
        graph = capture(model, example, task=None, seq=PROGRAM_LENGTH, micro_batch=rows, attention="sdpa").graph
        modelled.append([op_time_s(op, graph.values, 1.0, hardware) for op in graph.ops])
    measured = program_seconds(model, batches, clock_of(device), budget_s)
    found = {}
    for way, name in enumerate(("forward", "backward")):
        small, large = (sum(times[way] for times in ops) for ops in modelled)
        num_ops = sum(times[way] > 0 for times in modelled[0])
        factor, more = fitted((small, large), (measured[0][way] * crowd, measured[1][way] * crowd))
        found[name], found[f"{name}_op_s"] = rounded(factor), rounded(more / num_ops)
    return found


def fitted(modelled: tuple[float, float], measured: tuple[float, float]) -> tuple[float, float]:
    """(a, b) with measured = a modelled + b for a small and a large program. Neither is below 0: where noise would have it so, a alone
    fits both."""
    factor = (measured[1] - measured[0]) / (modelled[1] - modelled[0])
    more = measured[0] - factor * modelled[0]
    return (factor, more) if factor > 0 and more >= 0 else (sum(measured) / sum(modelled), 0.0)


def program_seconds(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], clock: Callable[[], float], budget_s: float
) -> list[tuple[float, float]]:
    """(forward, backward) seconds of every batch, medians; gradients add up as over micro-batches."""
    times: list[list[tuple[float, float]]] = [[] for _ in batches]
    end = time.perf_counter() + 20 * budget_s
    while time.perf_counter() < end or len(times[0]) < LEAST_RUNS:
        for batch, found in zip(batches, times, strict=True):
            start = clock()
            loss = model(**batch)
            middle = clock()
            loss.backward()
            found.append((middle - start, clock() - middle))
    return [
        (statistics.median(f for f, _ in found[1:]), statistics.median(b for _, b in found[1:])) for found in times
    ]


def update_bytes_per_s(device: torch.device, budget_s: float) -> float:
    """Bytes of float32 parameters that the optimizer updates per second."""
    clock = clock_of(device)
    value = torch.randn(1 << 22, device=device).requires_grad_()
    value.grad = torch.randn_like(value)
    optimizer = torch.optim.AdamW([value], lr=1e-6, fused=True)
    times: list[float] = []
    end = time.perf_counter() + 4 * budget_s
    while time.perf_counter() < end or len(times) < LEAST_RUNS:
        start = clock()
        norm = torch.linalg.vector_norm(value.grad)
        value.grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        times.append(clock() - start)
    return rounded(value.nbytes / statistics.median(times[1:]))
