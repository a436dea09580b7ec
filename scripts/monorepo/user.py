"""The fresh process in which demo.py uses published kernels; a script, never imported.

It knows a Hub by HF_ENDPOINT, and what a user would: repositories and versions. It is given them
as JSON, with the file that demonstrates each kernel; it exits with 1 if a result is not right.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub.utils.tqdm import disable_progress_bars
from kernels import get_kernel

from monorepo.built import load_file
from monorepo.comparison import HEADER, Comparison


def main() -> int:
    """Load each kernel from the Hub, demonstrate it, and print what came out."""
    disable_progress_bars()
    torch.manual_seed(0)
    wrong = 0
    for request in json.loads(sys.argv[1]):
        repository = {"repo_id": request["repo_id"], "version": request["version"]}
        kernel = get_kernel(**repository)
        _check_origin(kernel)
        wrong += _demonstrate(kernel, repository, load_file(Path(request["demo"])))
    if wrong:
        print(f"{wrong} results are off by more than what is allowed", file=sys.stderr)
    return int(wrong > 0)


def _check_origin(kernel: ModuleType) -> None:
    """Refuse a kernel that comes from anywhere but the Hub."""
    file, cache = Path(str(kernel.__file__)), Path(os.environ["HF_HOME"])
    if cache not in file.parents:
        raise RuntimeError(f"wanted a kernel downloaded below {cache}, got {file}")


def _demonstrate(kernel: ModuleType, repository: dict[str, Any], demo: ModuleType) -> int:
    """Print the comparisons of one kernel; return how many are wrong."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = importlib.import_module(f"{kernel.__name__}._shared.device")
    path = "PyTorch reference"
    if facts.uses_triton(torch.empty(0, device=device)):
        path = "Triton, interpreted" if facts.INTERPRETED else "Triton"
    path = f"{path} on {facts.device_name(device)}"
    print(f"\n{repository['repo_id']} version {repository['version']}: {kernel.__name__}")
    print(f"{HEADER}   path", flush=True)
    results = demo.comparisons(kernel, device)
    if hasattr(demo, "in_models"):
        results = itertools.chain(results, demo.in_models(kernel, repository, device))
    return _print(results, path, facts.INTERPRETED)


def _print(results: Iterable[Comparison | str], path: str, interpreted: bool) -> int:
    """Print results as they come; return how many are wrong."""
    wrong, left_out = 0, False
    for result in results:
        if isinstance(result, str):
            print(result, flush=True)
        elif interpreted and result.actual.dtype is torch.bfloat16:
            left_out = True
        else:
            print(f"{result}   {path}{'' if result.right else '   WRONG'}", flush=True)
            wrong += not result.right
    if left_out:
        print("(bfloat16 is left out: the interpreter cuts bits off where a GPU rounds)")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
