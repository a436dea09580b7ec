"""What the tests of publishing do to a monorepo and to a Hub."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi

import toykernel
from monorepo import upload
from monorepo.localhub import LocalHub

REPO = "toys/toy-scale"
SMOKE = """\
    import torch


    def smoke(kernel):
        assert torch.equal(kernel.scale(torch.ones(2, 3), 2.0), torch.full((2, 3), 2.0))
    """


LOAD = upload.load
THREE = 'backends = ["cpu", "cuda", "rocm"]'

Run = Callable[..., tuple[str, str]]


def titles(hub: LocalHub, revision: str, repo_id: str = REPO) -> list[str]:
    """The commits that were made after the repository was created, oldest first."""
    return [c.title for c in reversed(hub.commits(repo_id, revision))][1:]


def content(hub: LocalHub, revision: str, repo_id: str = REPO) -> dict[str, bytes]:
    files = hub.commits(repo_id, revision)[0].files
    return {path: (hub.root / "blobs" / file.sha256).read_bytes() for path, file in files.items()}


def writes(hub: LocalHub) -> list[tuple[str, str]]:
    """Requests that may change something."""
    return [
        (entry.method, entry.path)
        for entry in hub.log
        if entry.method not in ("GET", "HEAD")
        and not re.search("validate-yaml|preupload", entry.path)
    ]


def commit_to(hub: LocalHub, revision: str, files: dict[str, bytes], title: str = "theirs") -> None:
    """What another publisher does."""
    HfApi(endpoint=hub.url, token="hf_write").create_commit(
        REPO,
        [CommitOperationAdd(path, data) for path, data in files.items()],
        commit_message=title,
        repo_type="kernel",
        revision=revision,
    )


def edit(root: Path, old: str, new: str, file: str = f"{toykernel.SOURCE}/reference.py") -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def bump(root: Path) -> None:
    edit(root, "version = 1", "version = 2", "toy-scale/build.toml")
    toykernel.commit(root)


def instead(
    monkeypatch: pytest.MonkeyPatch, method: str, before: Callable[..., None], times: int = 1
) -> None:
    """Have `before` called ahead of the first calls of a method of the client."""
    original = getattr(HfApi, method)
    left = [times]

    def wrapped(self: HfApi, *args: object, **kwargs: object) -> object:
        if left[0] > 0 and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            stack, left[0] = left[0], 0  # what `before` itself calls goes straight through
            before(*args, **kwargs)
            left[0] = stack
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, method, wrapped)
