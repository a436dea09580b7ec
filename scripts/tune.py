"""Search the launch configurations of the GPU at hand and write a kernel's table for it.

Each kernel's `benchmarks/tuning.py` says which problems to search and what to try. Every
candidate has to be right on poisoned outputs before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from monorepo.built import load_built, load_file
from monorepo.manifest import Manifest
from monorepo.numerics import FLOOR_ULP, tensor_error
from monorepo.search import Search
from monorepo.timing import copies_for, side_stream, time_calls

ROOT = Path(__file__).resolve().parent.parent


def compile_share(searches: list[Search], share: int, shares: int) -> None:
    """Compile every `shares`-th candidate into Triton's cache by running it once."""
    at = 0
    for search in searches:
        mine = [c for i, c in enumerate(search.candidates, at) if i % shares == share]
        at += len(search.candidates)
        if not mine:
            continue
        run, _ = search.prepare(1)
        for candidate in mine:
            run(0, candidate)
        del run
        torch.cuda.empty_cache()  # the other workers share the GPU
    torch.cuda.synchronize()


def tune(search: Search) -> tuple[Any, float, list[tuple[float, Any]]]:
    """Return the fastest right candidate, its microseconds, and all as (microseconds, config)."""
    copies = copies_for(search.bytes_per_call)
    run, wanted = search.prepare(copies)
    exact_outputs = wanted()
    found = []
    for candidate in search.candidates:
        for output in run(0, candidate):
            output.fill_(float("nan"))
        outputs = run(0, candidate)
        for actual, exact in zip(outputs, exact_outputs, strict=True):
            error = tensor_error(actual, exact)
            if not error.largest <= FLOOR_ULP:
                raise ValueError(f"{search.operation} {candidate} is off by {error.largest} ulp")
        calls = [functools.partial(run, i, candidate) for i in range(copies)]
        with side_stream():
            found.append((time_calls(calls, replays=5).median_us, candidate))
    found.sort(key=lambda pair: pair[0])
    return found[0][1], found[0][0], found


def main(argv: list[str] | None = None) -> int:
    """Tune the named kernels, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="default: all")
    parser.add_argument("--log", type=Path, help="also write every timing here, as JSON lines")
    parser.add_argument(
        "--size", action="append", help="only problems of this size; entries of others are kept"
    )
    parser.add_argument("--operation", action="append", help="the same of this operation")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--shares", type=int, default=os.cpu_count(), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: tuning needs a GPU; none is visible here", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name().replace(" ", "_").replace("/", "_")
    for kernel in Manifest.load(ROOT).select(arguments.kernels):
        tuning = kernel.path / "benchmarks" / "tuning.py"
        if not tuning.exists():
            print(f"{kernel.name}: nothing to tune (no benchmarks/tuning.py)")
            continue
        searches = list(load_file(tuning).searches(load_built(kernel)))
        path = kernel.source_dir / "configs" / f"{device}.json"
        table: dict[str, Any] = {}
        if arguments.size:
            searches = [search for search in searches if str(search.size) in arguments.size]
        if arguments.operation:
            searches = [each for each in searches if each.operation in arguments.operation]
        if arguments.size or arguments.operation:
            table = json.loads(path.read_text()) if path.exists() else {}
        if arguments.share is not None:
            compile_share(searches, arguments.share, arguments.shares)
            continue
        command = [sys.executable, __file__, kernel.name, "--shares", str(arguments.shares)]
        command += [f"--size={size}" for size in arguments.size or ()]
        command += [f"--operation={operation}" for operation in arguments.operation or ()]
        workers = [subprocess.Popen([*command, "--share", str(i)]) for i in range(arguments.shares)]
        if any([worker.wait() for worker in workers]):
            print(f"error: {kernel.name}: a candidate does not compile", file=sys.stderr)
            return 1
        log = arguments.log.open("a") if arguments.log else None
        for search in tqdm(searches, disable=not sys.stderr.isatty()):
            best, microseconds, found = tune(search)
            entries = table.setdefault(search.operation, {}).setdefault(search.dtype, {})
            entry = dataclasses.asdict(best)
            entries.setdefault(str(search.size), {})[str(search.rows)] = entry
            rate = search.bytes_per_call / microseconds / 1e6
            print(
                f"{search.operation} {search.dtype} {search.rows}x{search.size}: "
                f"{microseconds:.2f} us, {rate:.2f} TB/s, {best}"
            )
            if log:
                for time_us, candidate in found:
                    row = dataclasses.asdict(candidate) | {
                        "operation": search.operation, "dtype": search.dtype,
                        "size": search.size, "rows": search.rows, "us": time_us,
                    }  # fmt: skip
                    log.write(json.dumps(row) + "\n")
            torch.cuda.empty_cache()
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
