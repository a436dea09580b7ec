"""What the tests of rmsnorm watch."""

from __future__ import annotations

import collections
import inspect
from types import ModuleType

import pytest

from .oracle import part


def launch_functions(kernel: ModuleType) -> list[str]:
    """Return the names of the functions that launch a Triton kernel."""
    launch = part(kernel, "launch")
    functions = inspect.getmembers(launch, inspect.isfunction)
    return [name for name, function in functions if function.__module__ == launch.__name__]


@pytest.fixture
def launches(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Count the Triton launches of a test by their name."""
    launch = part(kernel, "launch")
    counts: collections.Counter[str] = collections.Counter()

    def counted(name: str):
        function = getattr(launch, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in launch_functions(kernel):
        monkeypatch.setattr(launch, name, counted(name))
    return counts
