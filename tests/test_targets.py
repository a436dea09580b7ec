"""Every launch that a kernel lists compiles for every GPU of the manifest and fits it.

Nothing runs: what is proved is that each GPU's compiler accepts the code, and what the code needs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_driver import Launch, problems
from monorepo.manifest import Kernel, Manifest, Target

ROOT = Path(__file__).parents[1]
MANIFEST = Manifest.load(ROOT)
TRITONS = ["3.4", "3.9"]  # the oldest and the newest supported, installed beside the environment
ONE_A_BACKEND = {target.backend: target for target in MANIFEST.targets}.values()
#: GPUs beside those of the manifest that a kernel's heuristic has to fit: L4 and 4090, 99 KB.
SMALLER = {"w4a16": [Target("cuda", 89, 32, 99 * 1024)]}
FAULTY = ROOT / "tests" / "faulty_kernel"


def name_of(value: object) -> str:
    if isinstance(value, Target):
        return f"{value.backend}-{value.arch}"
    return value.name if isinstance(value, Kernel) else f"triton-{value}"


def launches_of(
    target: Target, triton: str, repo_id: str, version: int, build: Path, targets: Path
) -> Iterator[dict[str, Any]]:
    """Compile in a process of its own; yield what compile_target.py says of each launch."""
    installed = sorted(Path(sys.prefix).glob(f"triton-{triton}*"))
    if not installed:
        pytest.skip(f"Triton {triton} is not installed in {sys.prefix}: make tritons")
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": str(installed[0]),
            "LOCAL_KERNELS": f"{repo_id}={build}",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": cache,
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, ROOT / "tests" / "compile_target.py"]
        arguments = [
            target.backend, target.arch, target.warp_size, target.shared_memory,
            repo_id, version, targets,
        ]  # fmt: skip
        done = subprocess.run(
            [*command, *map(str, arguments)], env=environment, capture_output=True, text=True
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        reached = lines[-1] if lines else None
        assert done.returncode == 0, f"{done.stderr}\nlast line of output: {reached}"
        assert lines[0]["triton"].startswith(f"{triton}."), lines[0]
        assert lines[1:], f"{targets} lists no launch"
        yield from lines[1:]


def compile_launches(
    target: Target, triton: str, repo_id: str, version: int, build: Path, targets: Path
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the problems of each launch."""
    for line in launches_of(target, triton, repo_id, version, build, targets):
        yield line["name"], problems_of(line, target)


def problems_of(line: dict[str, Any], target: Target) -> list[str]:
    if line["error"] is not None:
        return [line["error"]]
    if len(line["launches"]) != 1:
        return [f"made {len(line['launches'])} launches, wanted 1"]
    launch = Launch(**line["launches"][0])
    return [f"{launch.kernel} {problem}" for problem in problems(launch, target.shared_memory)]


def pairs() -> list[Any]:
    """Each launch list with both Tritons, in turns in `make test`: all would take it too long."""
    return [
        pytest.param(kernel, target, triton, marks=[] if usual else [pytest.mark.whole_matrix])
        for kernel in MANIFEST.kernels
        for place, target in enumerate((*MANIFEST.targets, *SMALLER.get(kernel.name, ())))
        for triton, usual in zip(TRITONS, (place % 2 == 1, place % 2 == 0), strict=True)
    ]


@pytest.mark.parametrize("kernel, target, triton", pairs(), ids=name_of)
def test_each_shipped_launch_compiles_and_fits(
    kernel: Kernel, target: Target, triton: str, builds: dict[str, Path]
) -> None:
    targets = kernel.path / "tests" / "targets.py"
    assert kernel.repo_id is not None
    compiled = compile_launches(
        target, triton, kernel.repo_id, kernel.version, builds[kernel.repo_id], targets
    )
    wrong = {name: found for name, found in compiled if found}
    assert not wrong, json.dumps(wrong, indent=2)


@pytest.mark.parametrize("triton", TRITONS, ids=name_of)
@pytest.mark.parametrize("target", ONE_A_BACKEND, ids=name_of)
def test_each_fault_is_found(target: Target, triton: str) -> None:
    compiled = compile_launches(
        target, triton, "toys/faulty-kernel", 1, FAULTY, FAULTY / "targets.py"
    )
    found = dict(compiled)
    assert found.pop("sound") == []
    expected = {
        "spills": "scale_rows spills: ",
        "shared memory": "matmul needs ",
        "float64": "sum_in_float64 float64: ",
        "16-bit atomic": "add_to atomic on data: ",
        "floating-point atomic": "add_to atomic on data: ",
        "grid": "scale_rows grid ",
        "threads": "OutOfResources: ",
        "does not compile": "CompilationError: ",
        "no launch": "made 0 launches",
    }
    assert found.keys() == expected.keys()
    for name, start in expected.items():
        assert any(problem.startswith(start) for problem in found[name]), (name, found[name])
