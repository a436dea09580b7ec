"""A Triton driver that compiles for a GPU that is not there, and records launches, making none.

A kernel's own host code runs under it with CPU or meta tensors: Triton specialises the arguments
and compiles as it would on that GPU, down to the binary. Only loading and launching are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sass

# The same on every target.
MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch that a GPU would have been given.

    Attributes:
        kernel: Name of the `@triton.jit` function.
        constants: Its constexpr arguments and those that Triton specialised away, as text.
        num_warps: Warps of one program.
        grid: Programs along each of the three dimensions.
        shared: Bytes of shared memory of one program.
        seconds: Time its compilation took; 0 where an earlier launch compiled the same.
        files: What was compiled, by kind (`ttir`, `ptx`, `cubin`, `amdgcn`, ...): paths.
    """

    kernel: str
    constants: dict[str, str]
    num_warps: int
    grid: tuple[int, int, int]
    shared: int
    seconds: float
    files: dict[str, str]


class CompileDriver:
    """Stands in for Triton's driver, and its `utils`, of a `triton.backends.compiler.GPUTarget`."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.utils = self
        self.launches: list[Launch] = []
        self._compiled: dict[str, tuple[dict[str, str], float]] = {}

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        # No limit: a launch that asks for too much is recorded like any other.
        return {"max_shared_mem": sys.maxsize}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        module = function = 1
        registers = spills = 0
        return module, function, registers, spills, MAX_THREADS

    def unload_module(self, module: int) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return functools.partial(self._launch, source, metadata)

    def keep(
        self, *, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, **_: Any
    ) -> None:
        """Take the files of one compilation; a `triton.knobs.compilation.listener`."""
        files = {Path(name).suffix[1:]: path for name, path in metadata_group.items()}
        self._compiled[metadata["hash"]] = (files, times.total / 1e6)

    def _launch(self, source: Any, metadata: Any, *args: Any) -> None:
        files, seconds = self._compiled[metadata.hash]
        self._compiled[metadata.hash] = (files, 0.0)
        names = source.fn.arg_names
        x, y, z = args[:3]
        self.launches.append(
            Launch(
                kernel=metadata.name,
                constants={names[path[0]]: str(value) for path, value in source.constants.items()},
                num_warps=metadata.num_warps,
                grid=(int(x), int(y), int(z)),
                shared=metadata.shared,
                seconds=seconds,
                files=files,
            )
        )


@contextmanager
def compiling_for(backend: str, arch: int | str, warp_size: int) -> Iterator[list[Launch]]:
    """Let this process compile for one GPU, and yield the list in which launches are recorded.

    One process serves one GPU: a jitted function keeps the target it first saw.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if hasattr(triton.knobs.amd, "lld_path"):
        # Triton 3.4 links AMD code with ROCm's linker. What is never loaded need not be linked:
        # `true` takes any arguments and leaves the output empty.
        triton.knobs.amd.lld_path = shutil.which("true")
    driver = CompileDriver(GPUTarget(backend, arch, warp_size))
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.listener = driver.keep
    try:
        yield driver.launches
    finally:
        triton.knobs.compilation.listener = None


def problems(launch: Launch, shared_memory: int) -> list[str]:
    """Return what is wrong with a launch on a GPU whose programs may use `shared_memory` bytes."""
    found = []
    if launch.shared > shared_memory:
        found.append(
            f"needs {launch.shared} bytes of shared memory, the target has {shared_memory}"
        )
    if any(size > limit for size, limit in zip(launch.grid, MAX_GRID, strict=True)):
        found.append(f"grid {launch.grid} exceeds {MAX_GRID}")
    spilled = [f"spills: {what} {amount}" for what, amount in spills(launch).items() if amount]
    if spilled and not _spills_aside(launch):
        found += spilled
    for what, kind, pattern in (
        ("float64", "ptx", r"^.*\.f64\b.*$"),
        ("float64", "amdgcn", r"^\s+v_\w*_f64.*$"),
        # Additions in an order that changes from run to run, or at a width GPUs emulate in a loop.
        ("atomic on data", "ttir", r"^.*tt\.(?:atomic|descriptor_reduce).*(?:fadd|[if]16\b).*$"),
    ):
        if kind in launch.files:
            match = re.search(pattern, Path(launch.files[kind]).read_text(), re.MULTILINE)
            if match:
                found.append(f"{what}: {match[0].strip()}")
    return found


def _spills_aside(launch: Launch) -> bool:
    """Return whether the loop that multiplies matrices is as good as free of what was spilled.

    Large tiles fill the registers with sums. What they keep in memory around the loop is touched
    once a tile; inside it, it may take one instruction in a hundred.
    """
    loop = sass.hot_loop(launch.files["cubin"]) if "cubin" in launch.files else []
    touching = sum(sass.operation(each).startswith(("LDL", "STL")) for each in loop)
    return bool(loop) and touching <= len(loop) / 100


def spills(launch: Launch) -> dict[str, int]:
    """Return what the compiled code keeps in memory for want of registers, by the tool's names."""
    if "cubin" in launch.files:
        # Local memory in bytes; ptxas puts spilled registers on the stack.
        usage = _resource_usage(launch.files["cubin"])
        names, pattern = ["STACK", "LOCAL"], r"\b{}:(\d+)"
    else:
        usage = Path(launch.files["amdgcn"]).read_text()
        # Spilled scalar registers go to lanes of vector registers, not to memory.
        names = [".vgpr_spill_count", ".private_segment_fixed_size"]
        pattern = r"(?m)^\s+{}:\s+(\d+)$"
    amounts = {}
    for name in names:
        match = re.search(pattern.format(re.escape(name)), usage)
        assert match, f"no {name} in {usage}"
        amounts[name] = int(match[1])
    return amounts


def _resource_usage(cubin: str) -> str:
    """Return what the cuobjdump that comes with Triton says of a binary."""
    command = [sass.tool("cuobjdump"), "--dump-resource-usage", cubin]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
