"""A checkout of this repository as it stands, committed, for tests that publish from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import toykernel

ROOT = Path(__file__).resolve().parents[1]


def checkout(target: Path) -> Path:
    """Copy what a clone would hold to `target` and return it; `toykernel.commit` commits it."""
    left_out = shutil.ignore_patterns(".*", "build", "__pycache__", "docs")
    shutil.copytree(ROOT, target, ignore=left_out)
    for name in (".gitignore", ".gitattributes"):
        shutil.copy(ROOT / name, target)
    toykernel.commit(target)
    return target
