"""Checks that load a build, in fresh processes: what importing may not do."""

import os
import subprocess
import sys

import pytest
from kernels.resolver import resolve_local_kernel

import toykernel
from monorepo import artifact, checks
from monorepo.checks import CheckError

from .helpers import LAYER_FILE, broken


def load_errors(root, changes):
    kernel = broken(root, changes)
    folder = artifact.build(root, kernel)
    with pytest.raises(CheckError) as error:
        checks.check_build(kernel, folder)
    assert not list(folder.rglob("__pycache__"))
    return error.value.violations


def test_everything_that_importing_does_wrong_is_found_in_every_variant(root):
    # B80: decoys are first on the path, every submodule is imported, no fault hides another.
    changes = {
        "config.py": "import torch\n\nBLOCK = 1024 if torch.cuda.is_available() else 512\n",
        "reference.py": (
            "try:\n    import toy_scale\nexcept ImportError:\n    pass\n\n\n"
            "def scale(x, factor):\n    return x * factor\n"
        ),
        "ops.py": (
            "import torch\nfrom . import _ops, config, reference\n"
            'lib = torch.library.Library("toy_fixed", "DEF")\n'
            'lib.define("f(Tensor x) -> Tensor")\nscale = reference.scale\n'
        ),
        "layers.py": LAYER_FILE + "    def __init__(self):\n        super().__init__()\n",
        "broken.py": "from .gone import x\n",
        "sub/__init__.py": "",
        "sub/deep.py": "import _shared\n",
    }
    violations = load_errors(root, changes)
    for variant in ("torch-cpu", "torch-cuda", "torch-rocm", "torch-cpu without Triton"):
        found = "\n".join(v for v in violations if v.startswith(f"{variant}: "))
        for text in (
            "import touches CUDA: torch.cuda.is_available",
            "absolute import of toy_scale",
            "absolute import of _shared",
            "operator toy_fixed::f: wanted the namespace _toy_scale_",
            "must not override nn.Module constructor",
            "import of broken: ModuleNotFoundError",
            "import of sub.deep: ImportError: absolute import of _shared",
        ):
            assert text in found


def test_a_kernel_that_cannot_be_imported_without_triton_is_refused(root):
    changes = {"config.py": "import triton\n", "reference.py": "from . import config\nscale = 1\n"}
    violations = load_errors(root, changes)
    assert len(violations) == 1
    assert violations[0].startswith("torch-cpu without Triton: ModuleNotFoundError")


def test_an_import_that_cannot_be_tried_again_is_refused(root):
    # B104: the first import fails for want of Triton, the second finds what the first left.
    changes = {
        "launch.py": (
            "import sys\n\nif hasattr(sys, 'toy_once'):\n    raise RuntimeError('second time')\n"
            "sys.toy_once = True\nimport triton\nlaunch = 1\n"
        )
    }
    violations = load_errors(root, changes)
    start = "torch-cpu without Triton: import of launch: RuntimeError: second time"
    assert len(violations) == 1 and violations[0].startswith(start)


def test_a_process_that_dies_while_loading_is_reported(root):
    changes = {"config.py": "import os\n", "reference.py": "import os\n\nos._exit(3)\n"}
    violations = load_errors(root, changes)
    assert violations[0].startswith("torch-cpu: the process that loads it ended with status")


def test_a_missing_variant_is_an_error_that_lists_what_exists(root):
    # B76
    kernel = toykernel.load(root)
    artifact.build(root, kernel, backends=["rocm"])
    with pytest.raises(FileNotFoundError, match="torch-rocm"):
        resolve_local_kernel(kernel.path, backend="cpu")


def test_two_versions_in_one_process_have_operators_of_their_own(root):
    # B82: also loaded twice, and reloaded.
    kernel = toykernel.load(root)
    first = artifact.build(root, kernel, out=root / "first")
    toml = toykernel.KERNEL_BUILD.replace("version = 1", "version = 2")
    toykernel.put(kernel.path / "build.toml", toml)
    second = artifact.build(root, toykernel.load(root), out=root / "second")
    code = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
one, two = (get_local_kernel(Path(path)) for path in sys.argv[1:])
x = torch.arange(4.0)
for module in (one, two, one):
    assert torch.equal(module.scale(x, 2.0), 2 * x)
    module.__spec__.loader.exec_module(module)  # importlib.reload, which cannot find the spec
    assert torch.equal(module.scale(x, 2.0), 2 * x)
assert get_local_kernel(Path(sys.argv[1])) is one
names = {one._ops._OPS_NAME, two._ops._OPS_NAME}
assert len(names) == 2, names
for name in names:
    assert hasattr(getattr(torch.ops, name), "scale")
"""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(first), str(second)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
