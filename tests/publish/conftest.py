"""Fixtures of publishing against a Hub on loopback, with the real client libraries.

Most tests leave out the two slow steps, importing torch in fresh processes to check the build and
to load what was published; those that ask for `whole_way` do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import publish
import toykernel
from monorepo import artifact, checks, upload
from monorepo import release as releases
from monorepo import remote as hubs
from monorepo.hubapi import Organisation
from monorepo.localhub import LocalHub

from .helpers import LOAD, SMOKE, THREE, Run, edit


@pytest.fixture
def whole_way() -> None:
    """Keep the slow steps."""


@pytest.fixture(autouse=True)
def loads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, object]]:
    """Leave out the slow steps; the sources that would have been loaded."""
    sources: list[dict[str, object]] = []
    if "whole_way" not in request.fixturenames:
        monkeypatch.setattr(checks, "check_build", lambda kernel, build_dir: None)
        monkeypatch.setattr(upload, "load", lambda release, source, hub: sources.append(source))
    monkeypatch.setattr(hubs, "WAITS", (0.0, 0.0, 0.0, 0.0))
    return sources


@pytest.fixture
def really_load(loads: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the process that loads the published kernel and runs its smoke call."""

    def load(release: releases.Release, source: dict[str, object], endpoint: str) -> None:
        if "repo_id" in source:
            LOAD(release, source, endpoint)

    monkeypatch.setattr(upload, "load", load)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    organisations = {
        "toys": Organisation(trusted=True),
        "untrusted-kernels": Organisation(),
        "newcomers": Organisation(approved=False),
    }
    with LocalHub(tmp_path / "hub", organisations=organisations) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A monorepo whose kernel, of one variant for speed, is committed."""
    root = tmp_path / "monorepo"
    toykernel.write(root)
    edit(root, THREE, 'backends = ["cpu"]', "toy-scale/build.toml")
    toykernel.put(root / "toy-scale" / "tests" / "smoke.py", SMOKE)
    toykernel.put(root / ".gitignore", "build/\n__pycache__/\n*_ignored.py\n")
    artifact.sync(root, toykernel.load(root))
    toykernel.commit(root)
    return root


@pytest.fixture
def run(root: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line; what it printed on stdout and stderr."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        got = publish.main(["--root", str(root), *arguments])
        out, err = capfd.readouterr()
        assert got == code, out + err
        assert "hf_write" not in out + err and "hf_read" not in out + err
        assert "huggingface.co" not in out + err
        return out, err

    return call
