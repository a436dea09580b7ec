"""Checks of sources: what kernel-builder allows, what this monorepo adds."""

import shutil

import pytest

import toykernel
from monorepo import checks
from monorepo.checks import CheckError

from .helpers import LAYER_FILE, SOURCE, broken

OPS = toykernel.FILES[f"{SOURCE}/ops.py"]
BROKEN_SOURCES = {
    # Layout
    "no init": ({"__init__.py": None}, "__init__.py: wanted a file, got none"),
    "package in package": ({"toy_scale/__init__.py": ""}, "a module of the package's own name"),
    "module in package": ({"toy_scale.py": ""}, "a module of the package's own name"),
    "ops in source": ({"_ops.py": ""}, "_ops.py: the build generates it"),
    "nested ops": ({"sub/_ops.py": ""}, "_ops.py: the build generates it"),
    "setup": ({"../../setup.py": ""}, "setup.py: kernel-builder generates it"),
    "metadata": ({"../../metadata-cuda.json": ""}, "metadata-cuda.json: the build generates it"),
    "no card": ({"../../CARD.md": None}, "CARD.md: wanted a file, got none"),
    "dropped by pyext": ({"configs/a.toml": ""}, "would not ship: torch-noarch.pyext has only"),
    "too new a syntax": ({"config.py": "type A = int\n"}, "wanted Python 3.10 source"),
    # Imports (B80)
    "own name": ({"config.py": "import toy_scale.api\n"}, "config.py:1: wanted a relative import"),
    "own name, lazily": (
        {"config.py": "def f():\n    from toy_scale import api\n"},
        "config.py:2: wanted a relative import, or a package that build.toml declares, got import",
    ),
    "shared by name": ({"config.py": "from _shared.rows import rows\n"}, "import of _shared.rows"),
    "sibling": ({"config.py": "import rmsnorm\n"}, "import of rmsnorm"),
    "own file by name": ({"config.py": "import reference\n"}, "import of reference"),
    "not declared": ({"config.py": "import numpy as np\n"}, "import of numpy"),
    "by import_module": (
        {"config.py": "import importlib\nimportlib.import_module('toy_scale.api')\n"},
        "config.py:2: wanted a relative import",
    ),
    "nothing there": ({"config.py": "from .gone import x\n"}, "import of .gone, which does not"),
    "no such name": ({"api.py": "from . import opps\n"}, "import of opps from .: no such name"),
    "no such function": (
        {"api.py": "def scale(x):\n    from .reference import scaled\n"},
        "api.py:2: import of scaled from .reference: no such name",
    ),
    "too many dots": ({"config.py": "from ..api import scale\n"}, "import of ..api, which"),
    # One direction
    "lower imports higher": (
        {"reference.py": "from .api import scale\n"},
        "reference.py:1: reference is a lower step than api",
    ),
    "config imports launch": ({"config.py": "from .launch import launch\n"}, "config is a lower"),
    "lazily": (
        {"config.py": "BLOCK = 1\n\n\ndef f():\n    from . import ops\n"},
        "config.py:5: config is a lower step than ops",
    ),
    "through another file": (
        {"pack.py": "from . import api\n", "config.py": "from . import pack\n"},
        "config.py:1: config is a lower step than api",
    ),
    "api imports init": ({"api.py": "from . import scale\n"}, "api is a lower step"),
    "shared imports kernel": (
        {"_shared/rows.py": "from ..config import BLOCK\nrows = BLOCK\n"},
        "_shared is a lower step than config",
    ),
    # Layers
    "constructor": (
        {"layers.py": LAYER_FILE + "    def __init__(self): ...\n"},
        "a layer has only",
    ),
    "helper": ({"layers.py": LAYER_FILE + "    def help(self): ...\n"}, "a layer has only forward"),
    "constant": ({"layers.py": LAYER_FILE + "    size = 3\n"}, "a layer has only forward"),
    "no flag": (
        {"layers.py": LAYER_FILE.replace("    has_backward = False\n", "")},
        "Scale: has_backward = True or False is missing",
    ),
    "no module": ({"layers.py": LAYER_FILE.replace("(nn.Module)", "")}, "derives from nn.Module"),
    "no layers": ({"layers.py": None}, "import of layers from .: no such name"),
    "layers not public": (
        {"__init__.py": "from .api import scale\n\n__all__ = ['scale']\n"},
        "layers is not in __all__",
    ),
    # Public names
    "tuple": ({"__init__.py": "__all__ = ('scale',)\n"}, "__all__: wanted one list of literal"),
    "none": ({"__init__.py": "from .api import scale\n"}, "__all__: wanted one list of literal"),
    "added to": (
        {"__init__.py": "__all__ = ['a']\n__all__ += ['b']\n"},
        "__all__: wanted one list of literal names",
    ),
    "computed": ({"__init__.py": "__all__ = ['a', str()]\n"}, "__all__: wanted one list"),
    "twice": ({"__init__.py": "a = 1\n__all__ = ['a', 'a']\n"}, "__all__: wanted each name once"),
    "undefined": ({"__init__.py": "__all__ = ['gone']\n"}, "__all__: gone is not defined"),
    # Kernel text
    "atomics": (
        {"_kernels.py": "import triton.language as tl\n\n\ndef f(p):\n    tl.atomic_add(p, 1)\n"},
        "_kernels.py:5: atomic_add: results repeat bit for bit",
    ),
    "atomics on data": (
        {
            "_kernels.py": "import triton.language as tl\n\n\n"
            "def f(p, x):\n    tl.atomic_add(p, 1, sem='acq_rel')\n"
            "    tl.atomic_add(p, x, sem='acq_rel')\n"
        },
        "_kernels.py:6: atomic_add: results repeat bit for bit",
    ),
    "autotune": (
        {"_kernels.py": "import triton\n\n\n@triton.autotune([], [])\ndef f(p): ...\n"},
        "autotune: nothing is timed at run time",
    ),
}


@pytest.mark.parametrize(("changes", "text"), BROKEN_SOURCES.values(), ids=BROKEN_SOURCES)
def test_broken_sources_are_refused(root, changes, text):
    kernel = broken(root, changes)
    with pytest.raises(CheckError) as error:
        checks.check_source(kernel)
    assert text in str(error.value)


REGISTRATIONS = {
    "decorator": '@torch.library.custom_op("toy::f", mutates_args=())\ndef f(x): ...\n',
    "keyword": '@torch.library.custom_op(name="toy::f", mutates_args=())\ndef f(x): ...\n',
    "bare name": '@custom_op("toy::f", mutates_args=())\ndef f(x): ...\n',
    "triton_op": '@torch.library.triton_op("toy::f", mutates_args={})\ndef f(x): ...\n',
    "nested": 'def g():\n    @torch.library.custom_op("toy::f")\n    def f(x): ...\n',
    "method": 'class A:\n    @torch.library.register_fake("toy::f")\n    def f(x): ...\n',
    "not a decorator": 'f = torch.library.custom_op("toy::f", len, mutates_args=())\n',
    "f-string": 'torch.library.register_fake(f"{1}::f")(len)\n',
    "library": 'lib = torch.library.Library("toy", "DEF")\n',
    "library by keyword": 'lib = torch.library.Library(ns="toy", kind="DEF")\n',
    "define": 'torch.library.define("toy::f", "(Tensor x) -> Tensor")\n',
    "impl": 'torch.library.impl("toy::f", "cpu")(len)\n',
    "qualified method": 'lib.define("toy::f(Tensor x) -> Tensor")\n',
    "autograd": 'torch.library.register_autograd("toy::f", len)\n',
    "other prefix": 'torch.library.register_fake(prefix("f"))(len)\n',
}


@pytest.mark.parametrize("text", REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_an_operator_outside_the_builds_namespace_is_refused(root, text):
    # B82: two versions in one process would register the same name twice.
    kernel = broken(root, {"config.py": "import torch\n\n" + text})
    with pytest.raises(CheckError, match=r"config\.py:\d+: \w+: wanted a name made by add_op_name"):
        checks.check_source(kernel)


def test_tests_are_held_to_the_namespace_rule_as_kernel_builder_does(root):
    kernel = toykernel.load(root)
    toykernel.put(kernel.path / "tests/test_toy.py", REGISTRATIONS["decorator"])
    with pytest.raises(CheckError, match=r"tests/test_toy\.py:1: custom_op"):
        checks.check_source(kernel)


SOUND_TEXTS = {
    "operator method": (
        "from ._ops import add_op_namespace_prefix as p\nimport torch\n"
        "from ._ops import add_op_namespace_prefix\n"
        '@torch.library.custom_op(add_op_namespace_prefix("f"), mutates_args=())\n'
        "def f(x: torch.Tensor) -> torch.Tensor:\n    return x\n"
        "f.register_autograd(len, setup_context=len)\n@f.register_fake\ndef _(x):\n    return x\n"
    ),
    "own library": (
        "import torch\nfrom ._ops import _OPS_NAME\n"
        'lib = torch.library.Library(_OPS_NAME, "FRAGMENT")\n'
        'lib.define("f(Tensor x) -> Tensor")\nlib.impl("f", len, "CPU")\n'
    ),
    "typing only": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .api import scale\n"
    ),
    "standard library and torch": "import functools\nimport torch.nn.functional as F\n",
    "relative import_module": "import importlib\nimportlib.import_module('.api', __package__)\n",
}


@pytest.mark.parametrize("text", SOUND_TEXTS.values(), ids=SOUND_TEXTS)
def test_what_is_allowed_is_not_refused(root, text):
    checks.check_source(broken(root, {"config.py": text}))


def test_links_are_refused(root):
    kernel = toykernel.load(root)
    (kernel.source_dir / "linked.json").symlink_to(kernel.source_dir / "configs/none.json")
    (kernel.path / "benchmarks/linked").symlink_to(kernel.path / "tests")
    with pytest.raises(CheckError) as error:
        checks.check_source(kernel)
    assert "linked.json: a symbolic link" in str(error.value)
    assert "benchmarks/linked: a symbolic link" in str(error.value)


def test_every_violation_is_listed(root):
    kernel = broken(root, {"config.py": "import numpy\nimport rmsnorm\nfrom .api import scale\n"})
    with pytest.raises(CheckError) as error:
        checks.check_source(kernel)
    assert len(error.value.violations) == 3
    assert len(str(error.value).splitlines()) == 4


def test_two_kernels_with_one_jit_name_are_refused(root):
    # B122: Triton's cache tells kernels by that name.
    manifest = toykernel.BUILD.replace('"toy-scale"', '"toy-scale", "toy-two"')
    shutil.copytree(root / "toy-scale", root / "toy-two")
    (root / "toy-two/torch-ext/toy_scale").rename(root / "toy-two/torch-ext/toy_two")
    toml = toykernel.KERNEL_BUILD.replace("toy-scale", "toy-two")
    toykernel.put(root / "toy-two/build.toml", toml)
    toykernel.put(root / "build.toml", manifest)
    kernels = checks_kernels(root)
    with pytest.raises(CheckError, match=r"toy_scale_kernel: .*toy-scale.*:6, .*toy-two.*:6"):
        checks.check_together(root, kernels)
    text = (root / "toy-two/torch-ext/toy_two/_kernels.py").read_text()
    toykernel.put(root / "toy-two/torch-ext/toy_two/_kernels.py", text.replace("scale_k", "two_k"))
    checks.check_together(root, kernels)


def checks_kernels(root):
    return toykernel.Manifest.load(root).kernels
