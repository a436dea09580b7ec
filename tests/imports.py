"""What importing any kernel promises: its names are described, and a process may hold little."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_RETRY = """
    import sys
    import torch
    from kernels import get_kernel

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            package = "_" + repo_id.rpartition("/")[2].replace("-", "_")
            if name.startswith(package) and name.endswith(f".{module}"):
                raise ImportError("refused for once")

    sys.meta_path.insert(0, Refuse())
    try:
        get_kernel(repo_id, version=1)
    except ImportError as error:
        assert "refused for once" in str(error)
    else:
        raise AssertionError("nothing was refused")
    del sys.meta_path[0]
"""


def fresh(code: str, *arguments: str, **environment: str) -> None:
    """Run code in a new process that can load the kernel; raise with its last words if it fails."""
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


def fresh_without_triton(code: str) -> None:
    """Do what `fresh` does where Triton cannot be imported."""
    fresh("import sys\nsys.modules['triton'] = None\n" + textwrap.dedent(code))


def import_again(repo_id: str, module: str, call: str) -> None:
    """In a new process, let the first import fail at a module, then import again and call."""
    names = f"repo_id, module = {repo_id!r}, {module!r}\n"
    fresh(names + textwrap.dedent(_RETRY) + textwrap.dedent(call))


def plain(function: Callable[..., object]) -> str:
    """Return a function's signature without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def check_described(function: Callable[..., object], sections: Iterable[str]) -> None:
    """Raise unless a docstring has the sections and says something of each parameter."""
    text = inspect.getdoc(function) or ""
    for section in sections:
        assert section in text, section
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter}: " in text, f"{parameter} is not described"
