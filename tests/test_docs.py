"""What the texts say is so: names, commands, options. Their examples run in test_published.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monorepo import card
from monorepo.manifest import Kernel, Manifest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("README.md", "CONTRIBUTING.md")
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
KERNELS = Manifest.load(ROOT).kernels

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
each_text = pytest.mark.parametrize("name", TEXTS)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(kernel: Kernel) -> str:
    """The README's section on a kernel."""
    found = re.search(rf"^## {kernel.name}\n(.*?)(?=^## )", text_of("README.md"), re.M | re.S)
    assert found, f"README.md has no section on {kernel.name}"
    return found[1]


def listed(text: str) -> set[str]:
    """The names that a text lists: those in code at the start of a bullet."""
    bullets = re.findall(r"^- ((?:`[\w.]+(?:\([^`]*)?`(?:, )?)+)", text, re.M)
    return {name for bullet in bullets for name in re.findall(r"`([\w.]+)", bullet)}


def public(kernel: Kernel) -> set[str]:
    """The kernel's public functions and modules, and its layers, as `layers.Name`."""
    tree = ast.parse((kernel.source_dir / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    file = kernel.source_dir / "layers.py"
    layers = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    classes = {f"layers.{node.name}" for node in layers.body if isinstance(node, ast.ClassDef)}
    return {*names, *classes} - {"layers"}


@each_kernel
def test_readme_lists_the_public_names(kernel: Kernel) -> None:
    assert listed(section(kernel)) == public(kernel)


@each_kernel
def test_card_lists_the_public_names(kernel: Kernel) -> None:
    text = card.render(kernel)
    functions, layers = (
        listed(found[1]) if found else set()
        for found in (
            re.search(rf"^## {title}.*?\n(.*?)(?=^## )", text, re.M | re.S)
            for title in ("Functions", "Layers")
        )
    )
    assert functions | {f"layers.{name}" for name in layers} == public(kernel)


@each_kernel
def test_readme_holds_the_version_and_the_place_of_the_results(kernel: Kernel) -> None:
    """Case B85: the version that an example names is the one that is published."""
    text = section(kernel)
    assert re.findall(rf'get_kernel\("{kernel.repo_id}", version=(\d+)\)', text) == [
        str(kernel.version)
    ]
    assert re.search(rf"^<!-- results:{kernel.name} -->\n(.*\n)*?<!-- /results -->$", text, re.M)


@each_text
def test_targets_of_make_exist(name: str) -> None:
    """A target that a text names is one of the Makefile's, and one that is shown by `make help`."""
    makefile = text_of("Makefile")
    shown = set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))
    named = set(re.findall(r"(?:`|^ +)make ([a-z-]+)", text_of(name), re.M))
    assert named and named <= shown | {"help"}, named - shown


def test_targets_of_make_run_files_that_exist() -> None:
    named = set(re.findall(r"\b(?:scripts|tests)/[\w/]+\.py", text_of("Makefile")))
    assert named and [file for file in named if not (ROOT / file).is_file()] == []


@each_text
def test_files_that_are_named_exist(name: str) -> None:
    named = set(re.findall(r"\b(?:scripts|tests|shared)/[\w/]+\.py|\]\(([\w/.]+)\)", text_of(name)))
    assert [file for file in named if file and not (ROOT / file).is_file()] == []


@each_text
def test_options_that_are_named_exist(name: str) -> None:
    """Each `scripts/x.py --option` of a text is one that the script's help shows."""
    calls = re.findall(r"scripts/(\w+\.py)((?: [\w\[\].-]+)*)", text_of(name))
    for script, rest in calls:
        command = rest.split()[0] if rest.split()[:1] in (["serve"], ["run"]) else None
        shown = usage(ROOT / "scripts" / script, *([command] if command else []))
        for option in re.findall(r"--[\w-]+", rest):
            assert option in shown, f"{script} {option}"


def usage(script: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *command, "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_explains_itself(script: Path) -> None:
    assert "usage: " in usage(script)
