"""The smoke call of publish.py, on the build at hand."""

from types import ModuleType

import pytest

from .smoke import smoke


@pytest.mark.kernels_ci
def test_smoke(kernel: ModuleType) -> None:
    smoke(kernel)
