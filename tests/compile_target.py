"""Compile the launches of a kernel's tests/targets.py for one GPU; a process of its own.

The Triton of PYTHONPATH compiles the kernel of LOCAL_KERNELS. Prints a JSON line with Triton's
version, then one a launch: its name, what was recorded, and the error where there was one.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import triton
from kernels import get_kernel

from compile_driver import compiling_for


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["cuda", "hip"])
    parser.add_argument("arch", type=lambda text: int(text) if text.isdecimal() else text)
    parser.add_argument("warp_size", type=int)
    parser.add_argument("shared_memory", type=int)
    parser.add_argument("repo_id")
    parser.add_argument("version", type=int)
    parser.add_argument("targets", type=Path)
    arguments = parser.parse_args(argv)

    _print({"triton": triton.__version__})
    kernel = get_kernel(arguments.repo_id, version=arguments.version)
    targets = _load(arguments.targets)
    with compiling_for(arguments.backend, arguments.arch, arguments.warp_size) as launches:
        for name, launch in targets.launches(kernel, arguments.shared_memory):
            error = None
            try:
                launch()
            except Exception as caught:  # whatever the compiler raises is a finding
                error = _describe(caught)
            records = [dataclasses.asdict(record) for record in launches]
            launches.clear()
            _print({"name": name, "error": error, "launches": records})
    return 0


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("targets", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> str:
    # Triton's own error says where, its cause what.
    text = f"{type(error).__name__}: {error}"
    return f"{text}\n{_describe(error.__cause__)}" if error.__cause__ else text


def _print(value: object) -> None:
    # At once: should the compiler abort, the last line says how far it came.
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
