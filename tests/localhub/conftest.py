"""A loopback Hub with an empty repository, and a client that may write to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from monorepo.localhub import LocalHub, Organisation

from .helpers import KERNEL


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    organisations = {
        "roofline-kernels": Organisation(trusted=True),
        "untrusted-kernels": Organisation(),
        "unapproved-kernels": Organisation(approved=False),
    }
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Without it the client looks for a list of agents at the Hub's public address.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with LocalHub(tmp_path / "hub", organisations=organisations) as hub:
        yield hub


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    """A writer, with an empty repository."""
    api = HfApi(endpoint=hub.url, token="hf_write")
    api.create_repo(**KERNEL)
    return api
