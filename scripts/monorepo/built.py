"""Loads what measures a kernel: the built package, and files of its benchmarks folder."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from monorepo.manifest import Kernel


def load_built(kernel: Kernel) -> ModuleType:
    """Return the kernel as built in its folder, loaded as users load it."""
    from kernels import get_kernel

    os.environ["LOCAL_KERNELS"] = f"{kernel.repo_id}={kernel.path / 'build'}"
    module: ModuleType = get_kernel(kernel.repo_id, version=kernel.version)
    return module


def load_file(path: Path) -> ModuleType:
    """Return the module of one file outside any package."""
    name = f"{path.parent.parent.name}_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
