"""Copies of shared/ inside each kernel's package.

A Hub kernel stands alone, and kernel-builder reads nothing outside a kernel's folder, so every
kernel carries the shared modules it imports, and those that they import, as `_shared/`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .manifest import Kernel

COPY = "_shared"  # name of the package that holds the copies


class SyncError(ValueError):
    """The shared modules that a kernel needs cannot be told from its sources."""


def sync(root: Path, kernel: Kernel, *, check: bool = False) -> list[Path]:
    """Make `<kernel>/torch-ext/<module>/_shared/` hold the shared modules the kernel imports.

    Args:
        root: The monorepo, with `shared/` in it.
        kernel: The kernel to bring up to date.
        check: Change nothing.

    Returns:
        The files that differed: to be written, or to be removed.

    Raises:
        SyncError: An import names a shared module that does not exist, or a file does not parse.
    """
    target = kernel.source_dir / COPY
    wanted = {
        target / f"{name}.py": _copy(root / "shared" / f"{name}.py")
        for name in _modules(root, kernel)
    }
    present = set() if target.is_symlink() else {f for f in target.rglob("*") if _counts(f)}
    stale = sorted(present - set(wanted))
    changed = sorted(file for file, content in wanted.items() if _read(file) != content)
    if not check:
        if target.is_symlink():  # written through, it would overwrite what it points to
            target.unlink()
        for file in stale:
            file.unlink()
        for file in changed:
            file.unlink(missing_ok=True)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(wanted[file])
        _remove_empty(target)
    return sorted([*stale, *changed])


def _counts(file: Path) -> bool:
    return "__pycache__" not in file.parts and (file.is_symlink() or not file.is_dir())


def _read(file: Path) -> bytes | None:
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file():
        return None
    return file.read_bytes()


def _remove_empty(target: Path) -> None:
    """Remove directories in which nothing is left but bytecode."""
    directories = [d for d in (target, *target.rglob("*")) if d.is_dir()]
    for directory in sorted(directories, reverse=True):
        if not any(_counts(file) for file in directory.rglob("*")):
            for file in directory.glob("*"):
                if file.is_file():
                    file.unlink()
            directory.rmdir()


def _copy(source: Path) -> bytes:
    first = f"# Copied from shared/{source.name} by scripts/sync_shared.py: edit it there.\n"
    return first.encode() + source.read_bytes()


def _modules(root: Path, kernel: Kernel) -> list[str]:
    """Names of the shared modules that the kernel needs, `__init__` included; none if none."""
    shared = root / "shared"
    found: set[str] = set()
    queue: list[str] = []
    for file in sorted(kernel.source_dir.rglob("*.py")):
        package = file.relative_to(kernel.source_dir).parts[:-1]
        if package[:1] != (COPY,):
            queue += _imports(file, package, prefix=(COPY,), shared=shared)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += ["__init__", *_imports(shared / f"{name}.py", (), prefix=(), shared=shared)]
    return sorted(found)


def _imports(
    file: Path, package: tuple[str, ...], prefix: tuple[str, ...], shared: Path
) -> Iterator[str]:
    """Shared modules that one file imports.

    Args:
        file: A Python file.
        package: Where the file's package lies, relative to the root of all it can reach.
        prefix: Where the shared modules lie, relative to the same root.
        shared: The folder with the shared modules.
    """
    for node in ast.walk(parse(file)):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        place = f"{file}:{node.lineno}"
        if node.level - 1 > len(package):
            raise SyncError(f"{place}: wanted an import inside the package, got {node.level} dots")
        path = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
        path = tuple(part for part in path if part)
        names = [alias.name for alias in node.names]
        if path == prefix:
            yield "__init__"
            yield from (name for name in names if (shared / f"{name}.py").is_file())
        elif path[: len(prefix)] == prefix:
            name = path[len(prefix)]
            if len(path) > len(prefix) + 1 or not (shared / f"{name}.py").is_file():
                wanted = ".".join(path[len(prefix) :])
                raise SyncError(f"{place}: wanted a module of {shared}, got {wanted!r}")
            yield name
        elif path == prefix[:-1] and prefix[-1] in names:
            yield "__init__"


def parse(file: Path) -> ast.Module:
    """The syntax tree of a Python file.

    Raises:
        SyncError: It cannot be read or parsed.
    """
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise SyncError(f"{file}: wanted Python source, got {error}") from None
