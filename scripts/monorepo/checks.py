"""Checks that a kernel must pass: of its sources, of its build, and of all kernels together."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kernels._rust import Metadata

from . import artifact, card, rules
from .manifest import Kernel, is_bytecode


class CheckError(ValueError):
    """A kernel or its build breaks rules; the text lists each violation on a line."""

    def __init__(self, what: str, violations: Sequence[str]) -> None:
        """Name what was checked and the violations."""
        super().__init__("\n  ".join([f"{what}:", *violations]))
        self.violations = tuple(violations)


def check(kernel: Kernel, build_dir: Path) -> None:
    """Check a kernel's sources, then what was built of them.

    Raises:
        CheckError: One of the two breaks rules.
    """
    check_source(kernel)
    check_build(kernel, build_dir)


def check_source(kernel: Kernel) -> None:
    """Check a kernel's folder.

    Raises:
        CheckError: It breaks rules; all of them are listed.
    """
    violations = rules.violations(kernel)
    if violations:
        raise CheckError(f"{kernel.path}", violations)


def check_together(root: Path, kernels: Iterable[Kernel]) -> None:
    """Check that no two `@triton.jit` functions of the monorepo share a name.

    Triton's cache and profiles tell kernels by that name alone.

    Raises:
        CheckError: Some do.
    """
    files = [file for kernel in kernels for file in sorted(kernel.source_dir.rglob("*.py"))]
    files = [file for file in files if "_shared" not in file.parts]
    places = rules.jit_names([*sorted((root / "shared").glob("*.py")), *files])
    clashes = [f"{name}: {', '.join(at)}" for name, at in places.items() if len(at) > 1]
    if clashes:
        raise CheckError("triton.jit functions of the same name", clashes)


def check_build(kernel: Kernel, build_dir: Path) -> None:
    """Check a build against its sources, and load it in a fresh process.

    Raises:
        CheckError: It breaks rules; all of them are listed. What cannot be loaded sensibly, for
            it breaks others, is not loaded.
    """
    violations = list(_variants(kernel, build_dir))
    if not violations:
        violations = [*_card(kernel, build_dir), *_load(kernel, build_dir)]
    if violations:
        below = f"{build_dir}{os.sep}"
        raise CheckError(f"build of {kernel.path}", [v.replace(below, "") for v in violations])


def _variants(kernel: Kernel, build_dir: Path) -> Iterator[str]:
    if not build_dir.is_dir():
        yield f"{build_dir}: wanted a build, got none"
        return
    allowed = {f"torch-{backend}": backend for backend in kernel.backends}
    entries = sorted(entry.name for entry in build_dir.iterdir())
    for entry in entries:
        if entry not in {*allowed, "CARD.md", "benchmarks"}:
            yield f"{build_dir / entry}: wanted only {', '.join(allowed)}, CARD.md, benchmarks"
    found = [entry for entry in entries if entry in allowed]
    if not found:
        yield f"{build_dir}: wanted a variant, got none"
    for file in sorted(build_dir.rglob("*")):
        if file.is_symlink():
            yield f"{file}: a symbolic link is refused"
        elif is_bytecode(file.relative_to(build_dir)):
            yield f"{file}: bytecode is refused"
    identity = artifact.identify(kernel)
    for entry in found:
        yield from _files(kernel, identity, build_dir / entry)
        yield from _metadata(kernel, allowed[entry], identity, build_dir / entry)


def _files(kernel: Kernel, identity: artifact.Identity, variant: Path) -> Iterator[str]:
    """The variant's files are the sources and `_ops.py`, byte for byte."""
    wanted = {n: file.read_bytes() for n, file in artifact.variant_files(kernel).items()}
    wanted["_ops.py"] = artifact.ops_source(kernel, identity).encode()
    files = (file for file in variant.rglob("*") if file.is_file())
    got = {file.relative_to(variant).as_posix(): file for file in files}
    got.pop("metadata.json", None)
    for name in sorted({*wanted, *got}):
        if name not in got:
            yield f"{variant / name}: missing"
        elif name not in wanted:
            yield f"{variant / name}: not in the source"
        elif got[name].read_bytes() != wanted[name]:
            yield f"{variant / name}: differs from the source"


def _metadata(
    kernel: Kernel, backend: str, identity: artifact.Identity, variant: Path
) -> Iterator[str]:
    file = variant / "metadata.json"
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
        read = artifact.as_dict(Metadata.read_from_file(file))
    except (OSError, ValueError) as error:
        missing = re.search(r"missing field `([\w-]+)`", str(error))
        yield f"{file}: {missing[1] if missing else 'all'}: wanted complete metadata, got {error}"
        return
    wanted = artifact.metadata(kernel, backend, identity, artifact.digest(variant))
    for key in {**wanted, **content}:
        if content.get(key) != wanted.get(key):
            yield f"{file}: {key}: wanted {wanted.get(key)}, got {content.get(key)}"
        elif key in artifact.differing(wanted, read):
            yield f"{file}: {key}: wanted {wanted.get(key)}, the loader reads {read.get(key)}"
    if content == wanted and text != artifact.dump(wanted):
        yield f"{file}: wanted the keys in order, two spaces and no final newline"


def _card(kernel: Kernel, build_dir: Path) -> Iterator[str]:
    file = build_dir / "CARD.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if text != card.render(kernel):
        yield f"{file}: differs from the template as rendered"
        return
    functions, layers = card.functions(kernel) or [], card.layers(kernel) or []
    for name in (*functions, *layers):
        if not re.search(rf"`(layers\.)?{re.escape(name)}\b[^`]*`", text):
            yield f"{file}: does not name `{name}`, which is public"
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            yield f"{file}: wanted an example in Python, got {error} in {block!r}"
            continue
        yield from (f"{file}: {wrong}" for wrong in _example(kernel, tree, functions, layers))


def _example(
    kernel: Kernel, tree: ast.Module, functions: Sequence[str], layers: Sequence[str]
) -> Iterator[str]:
    """What an example of the card says that is not so: version and names."""
    loaded = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and rules.last_name(node.func) == "get_kernel":
            arguments = ast.unparse(node)
            if node.args and ast.unparse(node.args[0]) == repr(kernel.repo_id):
                versions = [ast.unparse(k.value) for k in node.keywords if k.arg == "version"]
                if versions != [str(kernel.version)]:
                    yield f"wanted version={kernel.version}, got {arguments}"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if rules.last_name(node.value.func) == "get_kernel":
                loaded |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        if owner in loaded and node.attr not in (*functions, "layers"):
            yield f"the example uses {owner}.{node.attr}, which is not public"
        if owner.removesuffix(".layers") in loaded - {owner} and node.attr not in layers:
            yield f"the example uses {owner}.{node.attr}, which is no layer"


def _load(kernel: Kernel, build_dir: Path) -> list[str]:
    """Load every variant with `get_kernel` in a fresh process, decoys first on its path."""
    repo_id = kernel.repo_id or f"local/{kernel.name}"
    backends = [b for b in kernel.backends if (build_dir / f"torch-{b}").is_dir()]
    identity = artifact.identify(kernel)
    names = (file.with_suffix("").parts for file in _python_files(kernel))
    folders = {file.parent.name for file in kernel.path.parent.glob("*/build.toml")}
    with tempfile.TemporaryDirectory() as folder:
        decoys = sorted(
            {kernel.module, *(f.replace("-", "_") for f in folders), "_shared", "shared"}
        )
        for name in decoys:
            _decoy(Path(folder), name)
        request = {
            "repo_id": repo_id,
            "version": kernel.version,
            "module": kernel.module,
            "build": str(build_dir.resolve()),
            "backends": backends,
            "ids": {b: artifact.variant_id(kernel, b, identity) for b in backends},
            "modules": [".".join(name) for name in names if name[-1] != "__init__"],
            "public": card.public(kernel),
            "layers": card.layers(kernel) or [],
            "decoys": folder,
            "decoy_names": decoys,
        }
        local = f"{repo_id}={build_dir.resolve()}"
        others = os.environ.get("LOCAL_KERNELS")
        environment = {
            **os.environ,
            "LOCAL_KERNELS": f"{others}:{local}" if others else local,  # the last one counts
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("TRITON_INTERPRET", None)
        process = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("load.py")), json.dumps(request)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
    if process.returncode != 0:
        return [f"loading failed: {process.stderr.strip() or process.stdout.strip()}"]
    findings: list[str] = json.loads(process.stdout.splitlines()[-1])
    return findings


def _python_files(kernel: Kernel) -> list[Path]:
    names = [*artifact.variant_files(kernel), "_ops.py"]
    return [Path(name) for name in names if name.endswith(".py")]


def _decoy(folder: Path, name: str) -> None:
    """A package of that name which tells that it was imported, and fails."""
    (folder / name).mkdir()
    lines = (
        "import sys",
        "sys.decoys.append(__name__)",
        "raise ImportError('absolute import of ' + __name__)",
    )
    (folder / name / "__init__.py").write_text("\n".join(lines))
