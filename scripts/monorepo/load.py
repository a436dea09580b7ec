"""The fresh process in which checks.py loads a build; a script, never imported.

It is given a request as JSON and prints its findings, one JSON list, as the last line of stdout.
torch and Triton are imported once; each variant then loads in a fork of its own, as if torch were
built for that variant's backend.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

# What asks a driver for something: none of it may run at import.
CUDA_CALLS = (
    "_lazy_init",
    "current_device",
    "current_stream",
    "device_count",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_available",
    "synchronize",
)


DECOYS: list[str] = []  # packages of the same name as ours that were imported


def main() -> None:
    """Load every variant of the request and print what is wrong with it."""
    request = json.loads(sys.argv[1])
    sys.path[0] = request["decoys"]  # ahead of everything, and this folder is not on the path
    import kernels.layer.layer  # noqa: F401
    import torch  # noqa: F401
    import triton  # noqa: F401

    findings: list[str] = []
    for backend in request["backends"]:
        findings += _forked(request, backend, triton=True)
    without = "cpu" if "cpu" in request["backends"] else request["backends"][0]
    findings += _forked(request, without, triton=False)
    print(json.dumps(findings))


def _forked(request: dict[str, Any], backend: str, *, triton: bool) -> list[str]:
    name = f"torch-{backend}" + ("" if triton else " without Triton")
    with tempfile.NamedTemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            findings: list[str] = []
            try:
                _load(request, backend, triton, findings)
            except BaseException as error:  # whatever it is, it is the finding
                findings.append(_describe(error))
            Path(answer.name).write_text(json.dumps(findings))
            sys.stdout.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status != 0:
            return [f"{name}: the process that loads it ended with status {status}"]
        return [f"{name}: {finding}" for finding in json.loads(Path(answer.name).read_text())]


def _describe(error: BaseException) -> str:
    """The error with the place that raised it, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (at {last.filename}:{last.lineno})".replace("\n", " ")


def _load(request: dict[str, Any], backend: str, triton: bool, findings: list[str]) -> None:
    import torch
    from kernels import get_kernel

    _pretend(torch, backend)
    hidden = {} if triton else _hide_triton()
    cuda_calls = _watch_cuda(torch)
    operators = set(torch._C._dispatch_get_all_op_names())
    setattr(sys, "decoys", DECOYS)  # noqa: B010

    module = get_kernel(request["repo_id"], version=request["version"])
    variant = Path(request["build"]) / f"torch-{backend}"
    name = request["ids"][backend]
    if Path(str(module.__file__)).resolve().parent != variant.resolve():
        findings.append(f"wanted the loader to choose {variant}, got {module.__file__}")
    if module.__name__ != name or module._ops._OPS_NAME != name:
        got = f"{module.__name__} and {module._ops._OPS_NAME}"
        findings.append(f"wanted module and operator namespace {name}, got {got}")
    findings += [
        f"__all__: no attribute {n!r}" for n in request["public"] if not hasattr(module, n)
    ]
    findings += _import_all(name, request["modules"], triton)
    if not triton:
        # What failed without Triton has to import once Triton is there, in the same process.
        sys.modules.update(hidden)
        findings += _import_all(name, request["modules"], True)
    findings += _check_layers(module, request["layers"])

    new = set(torch._C._dispatch_get_all_op_names()) - operators
    known = {name, *(operator.partition("::")[0] for operator in operators)}
    foreign = sorted(operator for operator in new if operator.partition("::")[0] not in known)
    findings += [f"operator {operator}: wanted the namespace {name}" for operator in foreign]
    findings += [f"import touches CUDA: torch.cuda.{call}" for call in sorted(set(cuda_calls))]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        findings.append("import initialises CUDA")
    decoys = {*DECOYS, *(sys.modules.keys() & request["decoy_names"])}
    findings += [f"absolute import of {decoy}" for decoy in sorted(decoys)]


def _pretend(torch: Any, backend: str) -> None:
    """Make loader and kernel see a torch built for this backend."""
    torch.version.cuda = "12.8" if backend == "cuda" else None
    torch.version.hip = "6.4.0" if backend == "rocm" else None
    torch.version.xpu = "20250101" if backend == "xpu" else None


def _hide_triton() -> dict[str, ModuleType]:
    """Make imports of Triton fail; return what brings it back."""
    hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "triton"}
    for name in hidden:
        del sys.modules[name]
    sys.modules["triton"] = None  # type: ignore[assignment]
    return hidden


def _watch_cuda(torch: Any) -> list[str]:
    """Record calls of what needs a driver."""
    calls: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in CUDA_CALLS:
        setattr(torch.cuda, name, watched(name, getattr(torch.cuda, name)))
    return calls


def _import_all(package: str, modules: list[str], triton: bool) -> list[str]:
    findings = []
    for module in modules:
        try:
            importlib.import_module(f"{package}.{module}")
        except Exception as error:
            # Kernel text needs Triton; what wraps it must not.
            missing = isinstance(error, ModuleNotFoundError) and error.name
            if triton or str(missing).partition(".")[0] != "triton":
                findings.append(f"import of {module}: {_describe(error)}")
    return findings


def _check_layers(module: Any, names: list[str]) -> list[str]:
    """Ask the check that `kernelize` makes."""
    from kernels.layer.layer import _validate_layer

    findings = []
    for name in names:
        try:
            layer = getattr(module.layers, name)
            _validate_layer(check_cls=layer, cls=layer, repo=f"layer {name}")
        except (AttributeError, TypeError) as error:
            findings.append(f"layers.{name}: {error}")
    return findings


if __name__ == "__main__":
    main()
