"""What every kernel's tests share: the built kernel, the device, and what can run there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
# Parameters of a test that name a dtype which the kernel rounds to.
ROUNDED = ("dtype", "out_dtype", "total_dtype")


def check_interpreter() -> None:
    """Refuse a TRITON_INTERPRET that Triton, imported earlier, has not seen (case B112)."""
    if "triton" not in sys.modules:
        return
    import triton.language
    from triton.runtime.interpreter import InterpretedFunction

    if isinstance(triton.language.sum, InterpretedFunction) != INTERPRETED:
        raise pytest.UsageError(
            f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')!r} came after triton was "
            "imported: set it before Python starts"
        )


def pytest_configure(config: pytest.Config) -> None:
    check_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(item, "callspec", None)
        names = [] if parameters is None else [str(parameters.params.get(name)) for name in ROUNDED]
        if INTERPRETED and "torch.bfloat16" in names:
            # Case B110. What it loads is right, so weights and residuals in bfloat16 are tested.
            reason = "Triton's interpreter rounds float32 to bfloat16 by cutting bits off"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if INTERPRETED:
        pytest.skip("needs compiled kernels; TRITON_INTERPRET interprets them")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; torch sees none here")


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers in every run of a test."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> str:
    """Where the kernels run here: the interpreter and the reference take CPU tensors."""
    import torch

    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture(scope="session")
def uses_triton(device: str) -> bool:
    """Whether Triton's kernels, not the reference, compute on `device`."""
    return device == "cuda" or INTERPRETED


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The kernel in whose folder the test lies, loaded as users load it.

    It comes from `<kernel>/build`, or from a Hub where HF_ENDPOINT names one. LOCAL_KERNELS is
    set for these tests and the processes they start, not for those of the scripts.
    """
    from kernels import get_kernel

    from monorepo.manifest import Manifest

    manifest = Manifest.load(ROOT)
    (mine,) = (kernel for kernel in manifest.kernels if kernel.path in request.path.parents)
    with pytest.MonkeyPatch.context() as patch:
        if "LOCAL_KERNELS" not in os.environ and "HF_ENDPOINT" not in os.environ:
            local = (f"{kernel.repo_id}={kernel.path / 'build'}" for kernel in manifest.kernels)
            patch.setenv("LOCAL_KERNELS", ":".join(local))
        yield get_kernel(mine.repo_id, version=mine.version)
    check_interpreter()
