"""Measures this machine and writes a hardware file (compiler.hardware has its keys): `meshwright profile -o hardware.yaml`.

    matmul        linear layers of growing size by dtype: peak_flops is the best rate, matmul_by_flops the share by size
    memory        additions of growing size: bandwidth_bytes_per_s is that of the largest, memory_by_bytes the share by size
    overhead      forward and backward of many additions of four numbers
    ops           forward and backward of common ops by size, a small program and the optimizer (op_profile)
    collectives   all-reduce, all-gather, reduce-scatter, all-to-all and messages by size, through the runtime's own axes, on all ranks
                  of this job; without torchrun the command starts ranks of its own (gloo, or NCCL where every rank has a GPU)

All ranks measure at the same time, since what they share is shared in a step too. Times of the first three are the least of many runs, in
CPU time on a CPU; those of ops are medians; those of collectives have computing between them, so that waiting for the slower rank and
waking up count. No smaller message takes longer than a larger one.
A CPU has one thread per rank, as torchrun sets it. Memory of a machine is shared among its ranks, and so are its cores where there are more
ranks (`ranks_per_core`).

    python -m meshwright.profiling OUT SECONDS ELEMENTS    one rank (torchrun sets its variables); rank 0 writes JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from meshwright.compiler.hardware import read_hardware
from meshwright.op_profile import Effort, growing, measure_ops, measure_program, rounded, update_bytes_per_s
from meshwright.plans.errors import InputError
from meshwright.plans.mesh import Mesh
from meshwright.runtime.axes import Axis, build_axes
from meshwright.runtime.launch import choose_device

Points = list[list[float]]
Progress = Callable[[str], None]

EFFORT = Effort()
LEAST_RUNS = 5
ROWS = 2
"""Of arrays that are sliced along their second dim, as a sequence is."""
WORK = 384
"""Side of the matrices that ranks multiply between collectives: about a millisecond of a CPU core."""
PATIENCE_S = 600
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
MATMUL_SIZES = {"cpu": (16, 32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
MEMORY_SIZES = {"cpu": tuple(1 << n for n in range(10, 25, 2)), "cuda": tuple(1 << n for n in range(12, 29, 2))}
MESSAGE_SIZES = tuple(1 << n for n in range(10, 25, 2))
CHAIN = 100


def profile(output: Path, ranks: int, progress: Progress) -> dict[str, object]:
    """Measures and writes; the file's data. Under torchrun every rank calls it and rank 0 writes. InputError for a bad place."""
    if output.is_dir() or not output.parent.is_dir():
        raise InputError(f"-o: {output} cannot be written; give the path of a file in a directory that exists")
    if "WORLD_SIZE" in os.environ:
        ranks = int(os.environ["WORLD_SIZE"])
        data = measure(ranks, progress, EFFORT)
        if int(os.environ.get("RANK", "0")):
            return {}
    else:
        data = start_ranks(ranks, progress) if ranks > 1 else measure(1, progress, EFFORT)
    read_hardware(data, "profile")
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=130)
    partial = output.with_name(output.name + ".partial")
    partial.write_text(f"# Measured by meshwright profile, {ranks} ranks, torch {torch.__version__}, one thread per rank.\n{text}", "utf-8")
    partial.replace(output)
    return data


def measure(ranks: int, progress: Progress, effort: Effort) -> dict[str, object]:
    """The keys of a hardware file, as one of so many ranks that measure together."""
    found = measure_collectives(progress, effort) if ranks > 1 else None
    return {**measure_device(ranks, progress, effort), "levels": [level(found, ranks)]}


def level(found: dict[str, Points] | None, ranks: int) -> dict[str, object]:
    """The link that all ranks talk over. One rank has nobody to talk to: its figures are those of memory."""
    device = choose_device(None).type
    if found is None:
        return {"name": "none", "ranks": None, "latency_s": 0.0, "bandwidth_bytes_per_s": 1e9, "overlaps": device == "cuda"}
    messages = found.pop("message")
    (small, latency), (large, longest) = messages[0], messages[-1]
    return {
        "name": "measured",
        "ranks": None,
        "latency_s": rounded(latency),
        "bandwidth_bytes_per_s": rounded((large - small) / max(longest - latency, 1e-9)),
        "overlaps": device == "cuda",
        "measured_ranks": ranks,
        "collectives": found,
    }


def measure_device(ranks: int, progress: Progress, effort: Effort) -> dict[str, object]:
    """The keys of a hardware file about one device."""
    device = choose_device(None)
    if device.type == "cpu":
        torch.set_num_threads(1)
    peaks, curve = {}, [[1.0, 1.0]]
    for dtype in DTYPES[device.type]:
        name = str(dtype).removeprefix("torch.")
        progress(f"matmul, {name}")
        rates = matmul_rates(device, dtype, effort)
        peaks[name] = rounded(max(rate for _, rate in rates))
        if dtype == torch.float32:
            curve = [[flops, rounded(rate / peaks[name])] for flops, rate in rates]
    progress("memory")
    moved = memory_rates(device, effort)
    bandwidth = moved[-1][1]
    crowd = max(1.0, ranks / (os.cpu_count() or 1)) if device.type == "cpu" else 1.0
    efficiency: dict[str, object] = {
        "matmul": curve[-1][1],
        "memory": 1.0,
        "matmul_by_flops": curve,
        "memory_by_bytes": [[size, rounded(rate / bandwidth)] for size, rate in moved],
    }
    data: dict[str, object] = {
        "name": device_name(device),
        "memory_bytes": memory_bytes(device) // (ranks if device.type == "cpu" else 1),
        "bandwidth_bytes_per_s": rounded(bandwidth / crowd),
        "peak_flops": {name: rounded(peak / crowd) for name, peak in peaks.items()},
        "efficiency": efficiency,
        "op_overhead_s": rounded(op_overhead_s(device, effort) * crowd),
        "update_bytes_per_s": rounded(update_bytes_per_s(device, effort.budget_s) / crowd),
        "ranks_per_core": crowd,
    }
    efficiency["ops"] = measure_ops(device, effort, crowd, progress)
    progress("a program")
    hardware = read_hardware({**data, "levels": [level(None, 1)]}, "profile")
    efficiency["program"] = measure_program(hardware, device, effort.budget_s, crowd)
    return data


def device_name(device: torch.device) -> str:
    """What plans call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return "this-cpu"


def memory_bytes(device: torch.device) -> int:
    """Of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest_s(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of one run, the least of many."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    run()
    synchronize(device)
    best, end, count = float("inf"), time.perf_counter() + budget_s, 0
    while time.perf_counter() < end or count < LEAST_RUNS:
        start = clock()
        run()
        synchronize(device)
        best = min(best, clock() - start)
        count += 1
    return best


def matmul_rates(device: torch.device, dtype: torch.dtype, effort: Effort) -> list[tuple[float, float]]:
    """(operations, operations per second) of linear layers."""
    found = []
    for size in (n for n in MATMUL_SIZES[device.type] if n * n <= effort.largest):
        x = torch.randn(size, size, device=device, dtype=dtype)
        weight = torch.randn(size, size, device=device, dtype=dtype)
        seconds = fastest_s(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), device, effort.budget_s)  # type: ignore[misc]
        found.append((2.0 * size**3, 2.0 * size**3 / seconds))
    return found


def memory_rates(device: torch.device, effort: Effort) -> list[tuple[float, float]]:
    """(bytes read and written, bytes per second) of additions of two arrays into a third."""
    found = []
    for count in (n for n in MEMORY_SIZES[device.type] if n <= effort.largest):
        x, y, out = (torch.ones(count, device=device) for _ in range(3))
        seconds = fastest_s(lambda x=x, y=y, out=out: torch.add(x, y, out=out), device, effort.budget_s)  # type: ignore[misc]
        found.append((12.0 * count, 12.0 * count / seconds))
    return found


def op_overhead_s(device: torch.device, effort: Effort) -> float:
    """Seconds of an op that computes next to nothing, the mean of forward and backward."""
    x = torch.zeros(4, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = y + x
        y.sum().backward()

    return fastest_s(chain, device, effort.budget_s) / (2 * CHAIN)


def start_ranks(ranks: int, progress: Progress) -> dict[str, object]:
    """Measured by ranks of their own on this machine."""
    progress(f"{ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="meshwright-profile-") as folder:
        out = Path(folder) / "found.json"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launch += ["-m", "meshwright.profiling", str(out), str(EFFORT.budget_s), str(EFFORT.largest)]
        done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode or not out.is_file():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InputError(f"profile: {ranks} ranks could not measure this machine: {last}")
        found: dict[str, object] = json.loads(out.read_text())
    return found


def measure_collectives(progress: Progress, effort: Effort) -> dict[str, Points]:
    """[bytes, seconds] by collective, on all ranks of this job; the same everywhere."""
    device = choose_device(None)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=PATIENCE_S))
    ranks = dist.get_world_size()
    axis = build_axes(Mesh(tp=ranks), dist.get_rank())["tp"]
    found: dict[str, Points] = {}
    for name, run in runs(axis).items():
        progress(name)
        sizes = [size for size in MESSAGE_SIZES if size // 4 <= effort.largest]
        found[name] = growing([[float(size), together_s(run, size, axis, device, effort.budget_s)] for size in sizes])
    found["message"] = [[size, rounded(seconds / 2)] for size, seconds in found["message"]]
    return found


def runs(axis: Axis) -> dict[str, Callable[[torch.Tensor], object]]:
    """What is measured, on an array of as many bytes as compiler.costs counts."""
    ranks = axis.size
    return {
        "all-reduce": axis.all_reduce,
        "all-gather": lambda x: axis.all_gather(x.view(ROWS, -1)[:, : x.numel() // ROWS // ranks], 1),
        "reduce-scatter": lambda x: axis.reduce_scatter(x.view(ROWS, -1), 1),
        "all-to-all": lambda x: axis.all_to_all(x.view(ranks, -1), 1, 0),
        "message": lambda x: message(x, axis.index),
    }


def message(x: torch.Tensor, index: int) -> None:
    """From rank 0 to rank 1 and back: two messages."""
    if index == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    elif index == 1:
        dist.recv(x, 0)
        dist.send(x, 0)


def together_s(run: Callable[[torch.Tensor], object], size: int, axis: Axis, device: torch.device, budget_s: float) -> float:
    """Seconds of one run on all ranks, as in a program: every rank computes before, by itself, and waits for those that come later. The
    mean over ranks of a rank's mean without its slowest tenth."""
    unit = ROWS * axis.size
    x = torch.ones(size // 4 // unit * unit, device=device)
    work = torch.ones(WORK, WORK, device=device)
    times: list[float] = []
    count = torch.ones(())
    for _ in range(LEAST_RUNS):
        run(x)
    while float(count) > 0:
        work = torch.nn.functional.linear(work, work) / WORK
        synchronize(device)
        start = time.perf_counter()
        run(x)
        synchronize(device)
        times.append(time.perf_counter() - start)
        count = torch.tensor(float(sum(times) < budget_s), device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
    kept = sorted(times)[: max(1, 9 * len(times) // 10)]
    mean = torch.tensor(sum(kept) / len(kept) / axis.size, device=device)
    dist.all_reduce(mean)
    return rounded(float(mean))


def main(arguments: Sequence[str]) -> None:
    """One rank: measures; rank 0 writes. Arguments: file, seconds, elements (Effort)."""
    found = measure(int(os.environ["WORLD_SIZE"]), lambda text: None, Effort(float(arguments[1]), int(arguments[2])))
    if dist.get_rank() == 0:
        Path(arguments[0]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
