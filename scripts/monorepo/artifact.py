"""The artifact: what a kernel's folder becomes on the Hub.

A build is a directory with one variant a backend (`torch-cpu`, `torch-cuda`, ...), the card and the
benchmarks. The variants hold the same Python files and differ in `metadata.json`. The same sources
give the same bytes.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels._rust import Digest, DigestAlgorithm, Metadata

from . import card
from .manifest import Kernel, is_bytecode
from .sync import sync

# Recorded in every artifact as the tool that built it; the suffix tells it from kernel-builder.
TOOL_VERSION = "0.1.0+roofline-kernels"

# The file that upstream's builder generates under the same name and with the same public names.
# The backend is found when it is imported, so it is the same file in every variant.
_OPS = '''\
"""The operator namespace of this build. Generated: not part of the source."""

import torch


def get_backend() -> str:
    """The backend that the installed torch is built for, by the names of kernel variants."""
    if hasattr(torch.backends, "tpu"):
        return "tpu"
    if hasattr(torch, "neuron"):
        return "neuron"
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    if torch.backends.mps.is_available():
        return "metal"
    if getattr(torch.version, "xpu", None) is not None:
        return "xpu"
    return "cpu"


_OPS_NAME = f"_{module}_{get_backend()}_{unique_id}"

ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """The operator's name inside this build's own namespace."""
    return f"{_OPS_NAME}::{op_name}"
'''


class BuildError(ValueError):
    """A kernel cannot be built as asked."""


@dataclass(frozen=True)
class Identity:
    """Which sources a build is made of.

    Attributes:
        unique_id: First 7 hex digits of the git tree of what is built, and `_dirty` if the
            sources differ from the last commit.
        commit: The last commit that touched the sources; None where git does not know it.
        dirty: The sources differ from the last commit. Always False outside git.
    """

    unique_id: str
    commit: str | None
    dirty: bool


def source_files(kernel: Kernel) -> dict[str, Path]:
    """The files that the unique id stands for, by their path in the kernel's folder, sorted."""
    files = [kernel.path / "build.toml"]
    files += [file for file in (kernel.path / "torch-ext").rglob("*") if file.is_file()]
    named = {file.relative_to(kernel.path).as_posix(): file for file in files}
    return {name: file for name, file in sorted(named.items()) if _is_source(kernel, name)}


def _is_source(kernel: Kernel, name: str) -> bool:
    if name == "build.toml":
        return True
    path = Path(name)
    return path.parts[0] == "torch-ext" and path.name != "_ops.py" and kernel.ships(path)


def variant_files(kernel: Kernel) -> dict[str, Path]:
    """The source files of every variant, by their path in the variant, sorted."""
    prefix = f"torch-ext/{kernel.module}/"
    files = source_files(kernel)
    return {n.removeprefix(prefix): file for n, file in files.items() if n.startswith(prefix)}


def identify(kernel: Kernel) -> Identity:
    """Find out which sources the kernel's folder holds.

    The id is computed from the files alone, so a checkout and an unpacked archive of it agree.
    Where the history is cut (a shallow clone) and the commit cannot be told, or git refuses to
    answer, a warning on stderr says so and no commit is recorded.
    """
    blobs = {name: _blob(file.read_bytes()) for name, file in source_files(kernel).items()}
    unique_id = _tree(blobs).hex()[:7]
    if not _in_git(kernel.path):
        return Identity(unique_id, None, False)
    dirty = _committed(kernel) != {name: digest.hex() for name, digest in blobs.items()}
    return Identity(f"{unique_id}_dirty" if dirty else unique_id, _last_commit(kernel), dirty)


def _blob(content: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).digest()


def _tree(files: dict[str, bytes]) -> bytes:
    """Git's id of a tree with these blobs, every file with mode 644."""
    entries: dict[bytes, tuple[bytes, bytes]] = {}
    directories: dict[str, dict[str, bytes]] = {}
    for name, blob in files.items():
        first, _, rest = name.partition("/")
        if rest:
            directories.setdefault(first, {})[rest] = blob
        else:
            entries[first.encode()] = (b"100644", blob)
    # Git sorts a directory as if its name ended in a slash.
    for name, content in directories.items():
        entries[name.encode() + b"/"] = (b"40000", _tree(content))
    body = b"".join(
        mode + b" " + name.rstrip(b"/") + b"\0" + digest
        for name, (mode, digest) in sorted(entries.items())
    )
    return hashlib.sha1(b"tree %d\0" % len(body) + body).digest()


def git(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask git about the repository of a directory; the answer may be a failure."""
    # A hook's GIT_DIR or GIT_INDEX_FILE would turn the question to another repository or index.
    own = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")
    environment = {key: value for key, value in os.environ.items() if key not in own}
    return subprocess.run(
        ["git", "-C", str(path), *arguments],
        capture_output=True,
        text=True,
        env={**environment, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
    )


def _in_git(path: Path) -> bool:
    try:
        answer = git(path, "rev-parse", "--is-inside-work-tree")
    except FileNotFoundError:  # no git: an archive can be built all the same
        return False
    if answer.returncode != 0:
        if "not a git repository" not in answer.stderr:
            _warn(path, f"git says: {answer.stderr.strip()}")
        return False
    # A folder that git is told to ignore belongs to no commit of the repository around it.
    return answer.stdout == "true\n" and git(path, "check-ignore", "-q", ".").returncode != 0


def _committed(kernel: Kernel) -> dict[str, str]:
    """Blob ids of the last commit's source files."""
    listing = git(kernel.path, "ls-tree", "-r", "-z", "HEAD", "--", "build.toml", "torch-ext")
    lines = (line.split("\t", 1) for line in listing.stdout.split("\0") if line)
    blobs = {name: facts.split()[2] for facts, name in lines}
    return {name: blob for name, blob in blobs.items() if _is_source(kernel, name)}


def _last_commit(kernel: Kernel) -> str | None:
    log = git(kernel.path, "log", "-1", "--format=%H", "--", "build.toml", "torch-ext")
    commit = log.stdout.strip()
    if not commit:
        return None
    if git(kernel.path, "rev-parse", "--is-shallow-repository").stdout == "true\n":
        # A cut history makes its oldest commits look as if they had touched every file.
        file = git(kernel.path, "rev-parse", "--path-format=absolute", "--git-path", "shallow")
        if commit in Path(file.stdout.rstrip("\n")).read_text().split():
            _warn(kernel.path, "shallow clone, the last commit that touched it is not known")
            return None
    return commit


def _warn(path: Path, text: str) -> None:
    print(f"warning: {path}: {text}; no commit is recorded", file=sys.stderr)


def variant_id(kernel: Kernel, backend: str, identity: Identity) -> str:
    """The `id` of a variant: the name under which it is loaded, unique to its sources."""
    return f"_{kernel.module}_{backend}_{identity.unique_id}"


def ops_source(kernel: Kernel, identity: Identity) -> str:
    """The text of `_ops.py`."""
    text = _OPS.replace("{module}", kernel.module)
    return text.replace("{unique_id}", identity.unique_id)


def digest(variant: Path) -> dict[str, Any]:
    """SHA-256 of each file of a variant, in base64, as the Hub's loader computes it.

    Raises:
        BuildError: The loader computes another digest.
    """
    files: dict[str, str] = {}
    for file in sorted(variant.rglob("*"), key=lambda f: f.relative_to(variant).as_posix()):
        name = file.relative_to(variant).as_posix()
        own = name in ("metadata.json", "metadata.json.sigstore")
        if file.is_file() and not own and not is_bytecode(Path(name)):
            content = hashlib.sha256(file.read_bytes()).digest()
            files[name] = base64.b64encode(content).decode()
    theirs = Digest.hash_variant(DigestAlgorithm.SHA256, variant).files
    if files != theirs:
        differing = sorted({*files.items()} ^ {*theirs.items()})
        raise BuildError(f"{variant}: wanted the loader's digest, got another: {differing}")
    return {"algorithm": "sha256", "files": files}


def metadata(
    kernel: Kernel, backend: str, identity: Identity, digest: dict[str, Any]
) -> dict[str, Any]:
    """The content of a variant's `metadata.json`, in the order of its keys."""
    kernel_depends = kernel.kernel_depends(backend)
    archs = kernel.archs(backend)
    provenance: dict[str, Any] = {"kernel-builder": {"version": TOOL_VERSION}}
    if identity.commit is not None:
        provenance["kernel"] = {"commit": identity.commit, "dirty": identity.dirty}
    content = {
        "name": kernel.name,
        "id": variant_id(kernel, backend, identity),
        "version": kernel.version,
        # 0.17 is the first release that loads the dependencies of a kernel.
        "kernels-minver": "0.17.0" if kernel_depends else "0.14.0",
        "license": kernel.license,
        "upstream": kernel.upstream,
        "source": kernel.source,
        "python-depends": kernel.python_depends(backend),
        "kernel-depends": kernel_depends,
        "backend": {"type": backend, **({"archs": list(archs)} if archs else {})},
        "digest": digest,
        "provenance": provenance,
    }
    return {key: value for key, value in content.items() if value is not None}


def dump(content: dict[str, Any]) -> str:
    """The text of `metadata.json`: two spaces, no final newline, as kernel-builder writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False)


def build(
    root: Path,
    kernel: Kernel,
    *,
    backends: Sequence[str] | None = None,
    out: Path | None = None,
    check: Callable[[Kernel, Path], None] | None = None,
) -> Path:
    """Build a kernel: sync shared/, then write its variants, card and benchmarks.

    The build is made aside and takes the place of an earlier one when it is whole, so no file of
    the earlier build survives, and a build that fails leaves the earlier one as it was.

    Args:
        root: The monorepo.
        kernel: The kernel to build.
        backends: Variants that the build is to hold; all of the kernel's by default.
        out: Build into `<out>/<kernel's name>` instead of `<kernel>/build`.
        check: Called with the finished build before it takes its place; raises to refuse it.

    Returns:
        The build's directory.

    Raises:
        BuildError: The kernel has no such backend, or cannot be built.
    """
    chosen = _choose(kernel, backends)
    target = kernel.path / "build" if out is None else out / kernel.name
    made, old = (target.with_name(f".{target.name}.{part}") for part in ("new", "old"))
    with _lock(kernel.path):
        sync(root, kernel)
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (made, old):  # of a build that was killed
            _remove(leftover)
        try:
            _write(kernel, chosen, made)
            if check is not None:
                check(kernel, made)
            if target.is_symlink() or target.exists():
                target.rename(old)
            made.rename(target)
        finally:
            for leftover in (made, old):
                _remove(leftover)
    return target


def _remove(path: Path) -> None:
    """Remove whatever is at a path; of a link, the link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _choose(kernel: Kernel, backends: Sequence[str] | None) -> list[str]:
    for backend in backends or ():
        if backend not in kernel.backends:
            wanted = ", ".join(kernel.backends)
            raise BuildError(f"{kernel.name}: wanted a backend among {wanted}, got {backend!r}")
    return [backend for backend in kernel.backends if not backends or backend in backends]


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold off other builds of the same kernel."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(kernel: Kernel, backends: Sequence[str], target: Path) -> None:
    identity = identify(kernel)
    for backend in backends:
        variant = target / f"torch-{backend}"
        for name, file in variant_files(kernel).items():
            _put(variant / name, file.read_bytes())
        _put(variant / "_ops.py", ops_source(kernel, identity).encode())
        content = metadata(kernel, backend, identity, digest(variant))
        _put(variant / "metadata.json", dump(content).encode())
        _reread(variant / "metadata.json", content)
    if (kernel.path / "CARD.md").is_file():
        _put(target / "CARD.md", card.render(kernel).encode())
    benchmarks = kernel.path / "benchmarks"
    for file in benchmarks.rglob("*"):
        if file.is_file() and not is_bytecode(file.relative_to(benchmarks)):
            _put(target / "benchmarks" / file.relative_to(benchmarks), file.read_bytes())


def _put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def _reread(file: Path, content: dict[str, Any]) -> None:
    """Read the metadata as the loader does and compare it with what was meant."""
    read = as_dict(Metadata.read_from_file(file))
    keys = differing(content, read)
    if keys:
        raise BuildError(f"{file}: {', '.join(keys)}: wanted {content}, got {read}")


def differing(content: dict[str, Any], read: dict[str, Any]) -> list[str]:
    """The keys of a `metadata.json` under which the loader reads something else."""
    # The loader gives URLs in their long form; the file has what the author wrote.
    wanted = dict(content)
    for key in {"upstream", "source"} & set(content):
        wanted[key] = card.url(content[key])
    keys = [*wanted, *(key for key in read if key not in wanted)]
    return [key for key in keys if wanted.get(key) != read.get(key)]


def as_dict(read: Metadata) -> dict[str, Any]:
    """What the loader read from a `metadata.json`, under the file's keys."""
    content: dict[str, Any] = {
        "name": str(read.name),
        "id": read.id,
        "version": read.version,
        "kernels-minver": _text(read.kernels_minver),
        "license": read.license,
        "upstream": read.upstream,
        "source": read.source,
        "python-depends": list(read.python_depends),
        "kernel-depends": [_dependency(entry) for entry in read.kernel_depends],
        "backend": {"type": str(read.backend.backend_type)},
    }
    if read.backend.archs:
        content["backend"]["archs"] = list(read.backend.archs)
    if read.digest is not None:
        content["digest"] = {"algorithm": str(read.digest.algorithm), "files": read.digest.files}
    if read.provenance is not None:
        builder, source = read.provenance.kernel_builder, read.provenance.kernel
        content["provenance"] = {
            "kernel-builder": {"version": builder.version, **_git_of(builder.git)}
        }
        if source is not None:
            content["provenance"]["kernel"] = _git_of(source)
    return {key: value for key, value in content.items() if value is not None}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _dependency(entry: Any) -> dict[str, str | int]:
    version = entry.version
    if hasattr(version, "version"):
        return {"repo-id": entry.repo_id, "version": version.version}
    return {"repo-id": entry.repo_id, "revision": version.revision}


def _git_of(status: Any) -> dict[str, Any]:
    return {} if status is None else {"commit": status.commit, "dirty": status.dirty}
