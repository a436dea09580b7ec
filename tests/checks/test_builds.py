"""Checks of builds and cards: a sound one passes, each broken one is refused and says why."""

import json
import shutil

import pytest

import build as build_script
import toykernel
from monorepo import artifact, checks
from monorepo.checks import CheckError

from .helpers import SOURCE, add, broken, drop, edit, move


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


def test_a_refused_build_changes_nothing_and_the_command_exits_1(root, monkeypatch, capsys):
    monkeypatch.setattr(build_script, "ROOT", root)
    kernel = broken(root, {"config.py": "import numpy\n"})
    before = (kernel.path / "build" / CPU).read_bytes()
    assert build_script.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "import of numpy" in error
    assert (kernel.path / "build" / CPU).read_bytes() == before
