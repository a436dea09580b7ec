"""Time the kernels beside their peers on the GPU at hand, into docs/results.json.

The workloads come from each kernel's `benchmarks/benchmark.py`. Rivals are timed in turns, in
CUDA graphs over rotating copies of the operands (cold L2). Rows that were timed before on the
same device are replaced, all others are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from monorepo.built import load_built, load_file
from monorepo.manifest import Kernel, Manifest
from monorepo.timing import (
    copies_for,
    host_cost,
    side_stream,
    time_calls,
    time_eager,
    time_interleaved,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results.json"


def machine() -> dict[str, str]:
    """Return what a figure depends on besides the code."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver.strip().splitlines()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def stream_rate() -> float:
    """Return TB/s of an element-wise sum of two tensors into a third, 2 GB in all."""
    a, b = (torch.randn(2**28, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    timing = time_calls([lambda: torch.add(a, b, out=out)] * 4)
    return 3 * a.numel() * a.element_size() / timing.median_us / 1e6


def stream_calls(size: int, copies: int) -> list[Callable[[], object]]:
    """Return calls that move `size` bytes each and compute nothing: what memory allows."""
    count = size // 3 // torch.bfloat16.itemsize
    calls: list[Callable[[], object]] = []
    for _ in range(copies):
        a, b, out = (torch.randn(count, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        calls.append(functools.partial(torch.add, a, b, out=out))
    return calls


def measure(kernel: Kernel) -> Iterator[list[dict[str, Any]]]:
    """Yield, workload by workload of a kernel, one row for each rival."""
    module = load_built(kernel)
    benchmark = load_file(kernel.path / "benchmarks" / "benchmark.py")
    for workload in tqdm(list(benchmark.workloads(module)), disable=not sys.stderr.isatty()):
        rows = []
        copies = copies_for(workload.bytes)
        calls = workload.prepare(copies)
        floor = getattr(workload, "floor_us", None)
        if floor is None:  # what memory allows is measured where it is not computed
            calls["stream"] = stream_calls(workload.bytes, copies)
        timings = time_interleaved(calls)
        for rival, call in getattr(workload, "prepare_eager", dict)().items():
            timings[rival] = time_eager(call, 4)
        for rival, timing in timings.items():
            rows.append(
                {
                    "kernel": kernel.name,
                    "operation": workload.operation,
                    "shape": list(workload.shape),
                    "dtype": str(workload.dtype).removeprefix("torch."),
                    "rival": rival,
                    **dataclasses.asdict(timing),
                    "bytes": workload.bytes,
                    "flop": workload.flop,
                    **({} if floor is None else {"floor_us": floor}),
                }
            )
        shown = "  ".join(f"{name} {timing.median_us:.2f}" for name, timing in timings.items())
        rate = workload.bytes / timings["ours"].median_us / 1e6
        over = "" if floor is None else f", {timings['ours'].median_us / floor:.2f} of the floor"
        print(
            f"{workload.operation:12} {'x'.join(map(str, workload.shape)):>11} "
            f"{rows[-1]['dtype']:8}  {shown}  ({rate:.2f} TB/s{over})",
            flush=True,
        )
        del calls
        torch.cuda.empty_cache()
        yield rows


def measure_host(kernel: Kernel) -> list[dict[str, Any]]:
    """Return one row for the host cost of each rival's call, in microseconds."""
    benchmark = load_file(kernel.path / "benchmarks" / "benchmark.py")
    rows = []
    for rival, call in benchmark.host_calls(load_built(kernel)).items():
        cost = host_cost(call)
        rows.append({"kernel": kernel.name, "operation": "host", "rival": rival, "median_us": cost})
        print(f"host cost of {rival}: {cost:.2f} us", flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Time the named kernels, or all, and merge the rows into the results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="default: all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: benchmarks need a GPU; none is visible here", file=sys.stderr)
        return 1
    facts = machine()
    rows: list[dict[str, Any]] = []
    before = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    arguments.output.parent.mkdir(exist_ok=True)
    with side_stream():
        stream = stream_rate()
        print(f"{facts['device']}, stream of two reads and a write: {stream:.2f} TB/s")
        for kernel in Manifest.load(ROOT).select(arguments.kernels):
            # The id says which sources were measured, in a checkout or not.
            build = load_built(kernel).__name__
            before = [
                row for row in before
                if row["kernel"] != kernel.name or row["device"] != facts["device"]
            ]  # fmt: skip
            for found in itertools.chain([measure_host(kernel)], measure(kernel)):
                rows += [row | {"build": build, "stream_tbps": stream} | facts for row in found]
                # At once: a run that is cut short keeps what it has.
                arguments.output.write_text(json.dumps(before + rows, indent=0) + "\n")
    print(f"wrote {len(rows)} rows to {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
