"""A release: one kernel, just built, as the files that each branch of its repository shall hold.

Nothing that lies around is sent: the build is read into memory, and links are refused.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, RepoFile
from kernels._rust import Metadata

from monorepo import artifact, checks
from monorepo.manifest import Kernel, Manifest

# The Hub takes larger commits badly, and kernel-builder splits here too. A reader can see a state
# between two commits, so everything below this size, hence every real kernel, goes in one.
MAX_OPERATIONS = 1000


class PublishError(RuntimeError):
    """A kernel cannot be published, or what was published is not what was built."""


@dataclass(frozen=True)
class Plan:
    """The difference between what a branch holds and what it shall hold.

    Attributes:
        deletions: Paths to delete.
        additions: Content of each file to add or replace, by path.
    """

    deletions: tuple[str, ...]
    additions: Mapping[str, bytes]

    def batches(self) -> Iterator[list[CommitOperationAdd | CommitOperationDelete]]:
        """Yield the operations of each commit: one, unless there are more than a commit takes."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(path, is_folder=False) for path in self.deletions
        ]
        operations += [CommitOperationAdd(path, data) for path, data in self.additions.items()]
        for start in range(0, len(operations), MAX_OPERATIONS):
            yield operations[start : start + MAX_OPERATIONS]


@dataclass(frozen=True)
class Branch:
    """What a branch shall hold: its name, and the content of each of our files by path."""

    name: str
    files: Mapping[str, bytes]

    def plan(self, remote: Mapping[str, RepoFile], *, new: bool) -> Plan:
        """Return what makes a branch that holds `remote` hold our files.

        A new branch starts as a copy of `main`, so all it has below our directories goes. On a
        branch in use, other variants and other files stay: only what a former publication of the
        same variants and benchmarks left behind is deleted.

        Args:
            remote: What the branch holds, by path.
            new: Whether nothing was ever committed to the branch itself.
        """
        variants = {path.parts[:2] for path in map(PurePosixPath, self.files)}
        directories = {variant[0] for variant in variants}

        def stale(path: PurePosixPath) -> bool:
            if str(path) in self.files:
                return False
            if path.parts[0] == "build":
                return "build" in directories and (new or path.parts[:2] in variants)
            if path.parts[0] == "benchmarks":
                return "benchmarks" in directories and (new or fnmatch(path.name, "benchmark*.py"))
            return False

        return Plan(
            deletions=tuple(sorted(path for path in remote if stale(PurePosixPath(path)))),
            additions={
                path: data
                for path, data in sorted(self.files.items())
                if path not in remote or not _holds(remote[path], data)
            },
        )


@dataclass(frozen=True)
class Release:
    """One kernel as it was just built, in memory: exactly what is sent.

    Attributes:
        kernel: The kernel, with the repository id it is published under.
        identity: The identity of its sources.
        build_dir: Where it was built.
        ids: The metadata id of each variant.
        version: The version branch.
        card: `main`, with the card as README.md; None if the kernel has no card.
    """

    kernel: Kernel
    identity: artifact.Identity
    build_dir: Path
    ids: tuple[str, ...]
    version: Branch
    card: Branch | None

    @property
    def repo_id(self) -> str:
        """The repository it is published under."""
        return str(self.kernel.repo_id)

    @property
    def smoke(self) -> Path:
        """The file with the kernel's smoke call."""
        return _smoke_file(self.kernel)


def address(manifest: Manifest, kernel: Kernel, org: str | None) -> Kernel:
    """Return the kernel with the repository id that it is published under.

    Args:
        manifest: The monorepo's manifest, which names the organisation.
        kernel: The kernel.
        org: An organisation to use in place of the manifest's and the kernel's.

    Raises:
        PublishError: If no organisation is named.
    """
    owner = org or manifest.org
    if not owner:
        raise PublishError(
            f"{manifest.root / 'build.toml'} names no organisation to publish to: "
            "set `org` under [monorepo] or pass --org; nothing was built or sent"
        )
    return dataclasses.replace(kernel, repo_id=f"{owner}/{kernel.name}")


def check_sources(kernel: Kernel, *, allow_dirty: bool) -> artifact.Identity:
    """Return the identity of a kernel's sources if they may be published.

    Raises:
        PublishError: If the kernel has no smoke call, publishes through a link, is not committed,
            or its commit is unknown (outside git or in a shallow clone); the last two can be
            allowed.
    """
    if not _has_smoke(_smoke_file(kernel)):
        raise PublishError(
            f"{_smoke_file(kernel)} with a function smoke(kernel) is missing: it is the call that "
            "shows that the published kernel works"
        )
    for path in (kernel.path / "CARD.md", *(kernel.path / "benchmarks").rglob("*")):
        if path.is_symlink():
            raise PublishError(f"{path} is a link: what it leads to may be no part of the kernel")
    identity = artifact.identify(kernel)
    if allow_dirty:
        return identity
    if identity.commit is None:
        raise PublishError(
            f"{kernel.path}: the commit of the sources is unknown, so the build would carry no "
            "provenance: publish from a full git clone (git fetch --unshallow), or pass "
            "--allow-dirty"
        )
    changed = _uncommitted(kernel)
    if identity.dirty or changed:
        raise PublishError(
            f"{kernel.path} has uncommitted changes{changed}: commit them, or pass --allow-dirty"
        )
    return identity


def build(root: Path, kernel: Kernel, out: Path, *, allow_dirty: bool) -> Release:
    """Build a kernel below `out`, check it and read it into memory.

    Raises:
        PublishError: If the build does not match its sources or holds anything but plain files.
        CheckError: If the build fails its checks.
    """
    build_dir = artifact.build(root, kernel, out=out, check=checks.check_build)
    # Again: the build copies shared/ into the kernel, and that can change a committed file.
    identity = check_sources(kernel, allow_dirty=allow_dirty)
    files = _read(build_dir)
    return Release(
        kernel=kernel,
        identity=identity,
        build_dir=build_dir,
        ids=_check_variants(kernel, identity, build_dir),
        version=Branch(f"v{kernel.version}", _version_files(kernel, files)),
        card=Branch("main", {"README.md": files["CARD.md"]}) if "CARD.md" in files else None,
    )


def _smoke_file(kernel: Kernel) -> Path:
    return kernel.path / "tests" / "smoke.py"


def _has_smoke(file: Path) -> bool:
    try:
        body = ast.parse(file.read_bytes()).body
    except FileNotFoundError:
        return False
    except (SyntaxError, ValueError) as error:
        raise PublishError(f"{file}: wanted Python source, got {error}") from None
    return any(isinstance(node, ast.FunctionDef) and node.name == "smoke" for node in body)


def _uncommitted(kernel: Kernel) -> str:
    """Name the uncommitted files that are published but are no part of a build's identity."""
    published = ("CARD.md", ":(glob)benchmarks/benchmark*.py")
    status = artifact.git(
        kernel.path, "status", "--porcelain", "--ignored", "-uall", "--", *published
    )
    names = [line[3:] for line in status.stdout.splitlines()]
    return f" ({', '.join(names)})" if names else ""


def _read(build_dir: Path) -> dict[str, bytes]:
    """Return the content of each file below a directory by its path with `/`.

    Raises:
        PublishError: If there is anything but directories and plain files: a link could bring in
            a file from outside the build.
    """
    files = {}
    for path in sorted(build_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise PublishError(f"{path} is a link or no plain file: it cannot be published")
        if path.is_file():
            files[path.relative_to(build_dir).as_posix()] = path.read_bytes()
    return files


def _version_files(kernel: Kernel, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of the version branch by their path there."""
    variants = {f"torch-{backend}" for backend in kernel.backends}
    chosen = {}
    for path, data in files.items():
        top, _, rest = path.partition("/")
        if top in variants:
            chosen[f"build/{path}"] = data
        elif top == "benchmarks" and fnmatch(rest, "benchmark*.py") and "/" not in rest:
            chosen[path] = data
    return chosen


def _check_variants(
    kernel: Kernel, identity: artifact.Identity, build_dir: Path
) -> tuple[str, ...]:
    """Check that a build is what build.toml says, and return the id of each variant.

    The version branch follows from build.toml alone; a variant that says another version would be
    published where nobody who asks for that version looks.
    """
    built = {path.parent.name for path in build_dir.glob("*/metadata.json")}
    wanted = {f"torch-{backend}" for backend in kernel.backends}
    if built != wanted:
        raise PublishError(f"{build_dir} holds {sorted(built)}, wanted {sorted(wanted)}")
    ids = []
    for variant in sorted(wanted):
        metadata = Metadata.read_from_file(build_dir / variant / "metadata.json")
        if metadata.version != kernel.version:
            raise PublishError(
                f"{build_dir / variant} is of version {metadata.version}, "
                f"{kernel.path / 'build.toml'} says {kernel.version}"
            )
        backend = variant.removeprefix("torch-")
        wanted_id = f"_{kernel.module}_{backend}_{identity.unique_id}"
        if metadata.id != wanted_id:
            raise PublishError(
                f"{build_dir / variant} has the id {metadata.id}, its sources {wanted_id}: "
                "they changed during the build"
            )
        ids.append(metadata.id)
    return tuple(ids)


def _holds(remote: RepoFile, data: bytes) -> bool:
    """Return whether a file on the Hub has this content."""
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == hashlib.sha256(data).hexdigest())
    header = b"blob %d\0" % len(data)
    return bool(remote.blob_id == hashlib.sha1(header + data).hexdigest())
