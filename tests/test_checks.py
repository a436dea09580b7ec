"""The checks: a sound kernel passes, and each broken one is refused with a text that says why."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.resolver import resolve_local_kernel

import build as build_script
import toykernel
from monorepo import artifact, checks
from monorepo.checks import CheckError

SOURCE = toykernel.SOURCE


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


def test_a_sound_kernel_passes_every_check(root, monkeypatch):
    # B76: its variants load through get_kernel, each as on a torch built for its backend.
    kernel = toykernel.load(root)
    # What the caller's environment says of the same kernel does not matter.
    monkeypatch.setenv("LOCAL_KERNELS", f"{kernel.repo_id}={root}")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checks.check_together(root, [kernel])
    checks.check(kernel, kernel.path / "build")


def test_xpu_and_a_kernel_without_layers_pass(tmp_path):
    toml = toykernel.KERNEL_BUILD.replace('"rocm"', '"rocm", "xpu"')
    init = "from .api import scale\n\n__all__ = ['scale']\n"
    card = toykernel.CARD.replace("in layers", "in layers or []")
    files = {
        "toy-scale/build.toml": toml,
        f"{SOURCE}/__init__.py": init,
        "toy-scale/CARD.md": card,
    }
    kernel = toykernel.write(tmp_path, files)
    (kernel.source_dir / "layers.py").unlink()
    checks.check(kernel, artifact.build(tmp_path, kernel))


# Sources

OPS = toykernel.FILES[f"{SOURCE}/ops.py"]
LAYER = "class Scale(nn.Module):\n    has_backward = False\n    can_torch_compile = True\n"
LAYER_FILE = "from torch import nn\n\n\n" + LAYER

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


def broken(root, changes):
    kernel = toykernel.load(root)
    for name, text in changes.items():
        file = kernel.source_dir / name
        if text is None:
            file.unlink()
        else:
            toykernel.put(Path(os.path.normpath(file)), text)
    return kernel


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


# Builds (B79: a check that cannot fail is none)


def edit(name, change):
    def broke(build):
        (build / name).write_text(change((build / name).read_text()))

    return broke


def drop(name):
    return lambda build: (build / name).unlink()


def add(name, text=""):
    return lambda build: toykernel.put(build / name, text)


def move(old, new):
    return lambda build: (build / old).rename(build / new)


CPU = "torch-cpu/metadata.json"
BROKEN_BUILDS = {
    "nothing": (shutil.rmtree, "wanted a build, got none"),
    "no variant": (
        lambda build: [shutil.rmtree(d) for d in build.glob("torch-*")],
        "wanted a variant, got none",
    ),
    "universal": (move("torch-cpu", "torch-universal"), "torch-universal: wanted only torch-cpu"),
    "other backend": (move("torch-cpu", "torch-xpu"), "torch-xpu: wanted only torch-cpu"),
    "swapped": (
        lambda build: [shutil.rmtree(build / "torch-cpu"), move("torch-cuda", "torch-cpu")(build)],
        f"{CPU}: backend: wanted {{'type': 'cpu'}}, got {{'type': 'cuda'}}",
    ),
    "stray file": (add("notes.txt"), "notes.txt: wanted only"),
    "compat module": (
        add("torch-cpu/toy_scale/__init__.py"),
        "torch-cpu/toy_scale/__init__.py: not in the source",
    ),
    "no metadata": (drop(CPU), f"{CPU}: all: wanted complete metadata"),
    "no ops": (drop("torch-cpu/_ops.py"), "torch-cpu/_ops.py: missing"),
    "no init": (drop("torch-rocm/__init__.py"), "torch-rocm/__init__.py: missing"),
    "edited file": (
        edit("torch-cpu/api.py", lambda t: t + "#"),
        "torch-cpu/api.py: differs from the source",
    ),
    "edited file, digest": (edit("torch-cpu/api.py", lambda t: t + "#"), f"{CPU}: digest: wanted"),
    "other id": (
        edit(CPU, lambda t: t.replace("_toy_scale_cpu_", "_toy_scale_gpu_")),
        f"{CPU}: id: wanted _toy_scale_cpu_",
    ),
    "other version": (
        edit(CPU, lambda t: t.replace('"version": 1,', '"version": 2,')),
        f"{CPU}: version: wanted 1, got 2",
    ),
    "extra key": (
        edit(CPU, lambda t: t.replace('"version": 1,', '"version": 1,\n  "more": 1,')),
        f"{CPU}: more: wanted None, got 1",
    ),
    "final newline": (
        edit(CPU, lambda t: t + "\n"),
        f"{CPU}: wanted the keys in order, two spaces",
    ),
    "not json": (edit(CPU, lambda t: t[:-5]), f"{CPU}: all: wanted complete metadata"),
    "bytecode": (add("torch-cpu/__pycache__/a.pyc"), "__pycache__/a.pyc: bytecode is refused"),
    "card": (edit("CARD.md", lambda t: t + "x"), "CARD.md: differs from the template"),
    "no card": (drop("CARD.md"), "CARD.md: differs from the template"),
    "link": (
        lambda build: (build / "torch-cpu/a.py").symlink_to(build / "torch-cpu/api.py"),
        "torch-cpu/a.py: a symbolic link is refused",
    ),
}


@pytest.fixture
def no_load(monkeypatch):
    """Leave out the loading, which takes seconds, where the fault shows without it."""
    monkeypatch.setattr(checks, "_load", lambda kernel, build_dir: [])


@pytest.mark.parametrize(("change", "text"), BROKEN_BUILDS.values(), ids=BROKEN_BUILDS)
def test_broken_builds_are_refused(root, no_load, change, text):
    kernel = toykernel.load(root)
    checks.check_build(kernel, kernel.path / "build")
    change(kernel.path / "build")
    with pytest.raises(CheckError) as error:
        checks.check_build(kernel, kernel.path / "build")
    assert text in str(error.value)


FIELDS = [
    "name",
    "id",
    "version",
    "kernels-minver",
    "license",
    "python-depends",
    "kernel-depends",
    "backend",
    "digest",
    "provenance",
]


@pytest.mark.parametrize("field", FIELDS)
def test_metadata_without_a_field_is_refused_by_file_and_field(root, no_load, field):
    # B74: loaders came to require fields that older builds lacked.
    kernel = toykernel.load(root)
    file = kernel.path / "build" / CPU
    content = json.loads(file.read_text())
    assert sorted(content) == sorted(FIELDS)
    del content[field]
    file.write_text(artifact.dump(content))
    with pytest.raises(CheckError, match=rf"torch-cpu/metadata\.json: {field}: wanted"):
        checks.check_build(kernel, kernel.path / "build")


def test_a_build_of_older_sources_is_refused(root, no_load):
    kernel = broken(root, {"config.py": "BLOCK = 2048\n"})
    with pytest.raises(CheckError, match=r"torch-cpu/config\.py: differs from the source"):
        checks.check_build(kernel, kernel.path / "build")


CARDS = {
    "name left out": (
        "{% for name in functions %}\n- `{{ name }}`\n{% endfor %}",
        "",
        "does not name `scale`, which is public",
    ),
    "layer left out": ("- `{{ name }}`\n{% endfor %}", "{% endfor %}", "does not name"),
    "version by hand": ("version={{ version }}", "version=2", "wanted version=1, got get_kernel("),
    "no version": (", version={{ version }}", "", "wanted version=1, got get_kernel("),
    "old name": ("toy.scale(", "toy.scaled(", "uses toy.scaled, which is not public"),
    "old layer": ("toy.scale(", "toy.layers.Old(", "uses toy.layers.Old, which is no layer"),
    "no Python": ("y = toy", "y == = toy", "wanted an example in Python"),
}


@pytest.mark.parametrize(("old", "new", "text"), CARDS.values(), ids=CARDS)
def test_a_card_that_drifts_from_the_code_is_refused(root, no_load, old, new, text):
    # B85 for the version; what is public is what __all__ says.
    assert old in toykernel.CARD
    toykernel.put(root / "toy-scale/CARD.md", toykernel.CARD.replace(old, new))
    kernel = toykernel.load(root)
    with pytest.raises(CheckError) as error:
        checks.check_build(kernel, artifact.build(root, kernel))
    assert text in str(error.value)


# Loading


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


def test_a_refused_build_changes_nothing_and_the_command_exits_1(root, monkeypatch, capsys):
    monkeypatch.setattr(build_script, "ROOT", root)
    kernel = broken(root, {"config.py": "import numpy\n"})
    before = (kernel.path / "build" / CPU).read_bytes()
    assert build_script.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "import of numpy" in error
    assert (kernel.path / "build" / CPU).read_bytes() == before
