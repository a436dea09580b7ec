"""A stamped kernel is whole: it passes the checks, builds, and passes the tests it comes with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import new_kernel
import toykernel
from monorepo import checks
from monorepo.manifest import Kernel, Manifest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = (".*", "build", "__pycache__", "docs")


@pytest.fixture(scope="module")
def stamped(tmp_path_factory) -> Path:
    """A copy of this repository with a kernel more, built."""
    root = tmp_path_factory.mktemp("stamped") / "repo"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for script in (["new_kernel.py", "toy-twice"], ["build.py", "toy-twice"]):
        done = run(root, str(root / "scripts" / script[0]), script[1])
        assert done.returncode == 0, done.stderr
    return root


def run(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("LOCAL_KERNELS", "HF_ENDPOINT", "TRITON_INTERPRET")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    return subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env={**kept, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )


def test_it_is_listed_after_the_others_and_has_every_step(stamped):
    kernels = Manifest.load(stamped).kernels
    assert [k.name for k in kernels] == [
        *(k.name for k in Manifest.load(ROOT).kernels),
        "toy-twice",
    ]
    kernel = kernels[-1]
    assert (kernel.module, kernel.repo_id) == ("toy_twice", "roofline-kernels/toy-twice")
    names = {file.stem for file in kernel.source_dir.glob("*.py")}
    steps = {"__init__", "api", "ops", "config", "launch", "_kernels", "reference", "layers"}
    assert names == steps
    assert (kernel.source_dir / "_shared/checks.py").is_file()
    checks.check_source(kernel)


def test_no_word_of_the_template_is_left(stamped):
    kernel = Manifest.load(stamped).kernels[-1]
    for file in kernel.path.rglob("*"):
        if file.is_file() and "build" not in file.parts and "__pycache__" not in file.parts:
            text = str(file.relative_to(stamped)) + file.read_text()
            for word in ("kernel-name", "kernel_name", "KernelName", "org-name"):
                assert word not in text, file


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_its_own_tests_pass(stamped, interpret):
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "toy-twice/tests")
    done = run(stamped, *arguments, TRITON_INTERPRET=interpret)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " failed" not in done.stdout


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_it_is_clean(stamped, command):
    done = run(stamped, "-m", "ruff", *command, "toy-twice")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "Toy",  # not a kernel's name
        "toy_twice",
        "t",
        "toy-",
        "toy-scale",  # a kernel
        "shared",  # a folder
        "import",  # a keyword
        "ops",  # a step
        "forward",  # a function next to which it would stand
        "json",  # a module of Python
        "torch",
        "numpy",  # installed: its imports would find ours
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, name
):
    toykernel.write(tmp_path)
    monkeypatch.setattr(new_kernel, "ROOT", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert new_kernel.main([name]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "build.toml").read_text() == toykernel.BUILD


@pytest.mark.parametrize(
    "text",
    ['["toy-scale"]', '["toy-scale",]', '[\n    "toy-scale",\n]', '[\n  "toy-scale"\n]  # a'],
)
def test_the_manifest_is_extended_however_it_is_laid_out(tmp_path, text):
    toykernel.write(tmp_path)
    (tmp_path / "shared/checks.py").write_text("")
    (tmp_path / "shared/table.py").write_text("")
    (tmp_path / "shared/device.py").write_text("")
    (tmp_path / "shared/dispatch.py").write_text("")
    toykernel.put(tmp_path / "build.toml", toykernel.BUILD.replace('["toy-scale"]', text))
    folder = new_kernel.stamp(tmp_path, "toy-twice")
    assert [k.name for k in Manifest.load(tmp_path).kernels] == ["toy-scale", "toy-twice"]
    assert Kernel.load(folder).repo_id == "toys/toy-twice"


def test_a_manifest_that_cannot_be_extended_is_left_alone(tmp_path):
    toykernel.write(tmp_path)
    text = toykernel.BUILD.replace('["toy-scale"]', '[\n    "toy-scale"  # first\n]')
    toykernel.put(tmp_path / "build.toml", text)
    with pytest.raises(ValueError, match=r"monorepo\.kernels: wanted a plain list, to add"):
        new_kernel.stamp(tmp_path, "toy-twice")
    assert (tmp_path / "build.toml").read_text() == text
    assert not (tmp_path / "toy-twice").exists()
