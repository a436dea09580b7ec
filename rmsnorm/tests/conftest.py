"""What the tests of rmsnorm watch."""

from __future__ import annotations

import collections
from types import ModuleType

import pytest

from .oracle import part

LAUNCHES = ("forward", "backward", "backward_wide", "backward_weight", "sum_partials")


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

    for name in LAUNCHES:
        monkeypatch.setattr(launch, name, counted(name))
    return counts
