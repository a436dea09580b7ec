"""A sound monorepo to break, built once."""

import shutil

import pytest

import toykernel
from monorepo import artifact, checks


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A built monorepo that breaks no rule; tests work on copies."""
    root = tmp_path_factory.mktemp("sound")
    kernel = toykernel.write(root)
    artifact.build(root, kernel)
    return root


@pytest.fixture
def root(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "repo")
    return tmp_path / "repo"


@pytest.fixture
def no_load(monkeypatch):
    """Leave out the loading, which takes seconds, where the fault shows without it."""
    monkeypatch.setattr(checks, "_load", lambda kernel, build_dir: [])
