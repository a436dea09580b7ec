"""The two kinds of build.toml: the monorepo's own, and one of each kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels._rust import Build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EDITION = 5
BACKENDS = (
    "cpu",
    "cuda",
    "rocm",
    "xpu",
)  # those with a loader variant that Triton or torch can serve

# Python dependencies that kernel-builder knows, with the name under which each is imported.
PYTHON_DEPENDS = {"einops": "einops", "helion": "helion", "tvm-ffi": "tvm_ffi"}
BACKEND_PYTHON_DEPENDS: dict[str, dict[str, str | None]] = {
    "cuda": {"nvidia-cutlass-dsl": "cutlass"},
    "xpu": {"onednn": None},
}

# Hub licence ids that suit source code.
LICENSES = frozenset(
    "0bsd afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd bsd-2-clause bsd-3-clause "
    "bsd-3-clause-clear bsl-1.0 cc0-1.0 ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 gpl gpl-2.0 "
    "gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 mit mpl-2.0 ms-pl ncsa osl-3.0 postgresql unlicense wtfpl "
    "zlib".split()
)


class ManifestError(ValueError):
    """A build.toml does not say what it must; the text names file, key, wanted and got."""


@dataclass(frozen=True)
class Depends:
    """Dependencies of one table: Python packages and other Hub kernels."""

    python: tuple[str, ...] = ()
    kernels: tuple[Mapping[str, str | int], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel: a folder with a valid build.toml.

    Attributes:
        path: The folder.
        name: Name on the Hub, with dashes.
        module: Name in Python: the name with underscores.
        version: Major version; published on branch `v<version>`.
        license: Licence id as written.
        backends: Backends in file order; each becomes one variant.
        repo_id: `org/name` on the Hub, if given.
        pyext: Extensions of the files that ship, without the dot.
        upstream: URL of the code this kernel derives from, as written.
        source: URL of this kernel's source, as written.
        depends: Dependencies of every backend.
        backend_depends: Further dependencies by backend.
        cuda_capabilities: CUDA capabilities the kernel is limited to; empty for any.
        rocm_archs: ROCm architectures the kernel is limited to; empty for any.
    """

    path: Path
    name: str
    module: str
    version: int
    license: str
    backends: tuple[str, ...]
    repo_id: str | None
    pyext: tuple[str, ...]
    upstream: str | None
    source: str | None
    depends: Depends
    backend_depends: Mapping[str, Depends]
    cuda_capabilities: tuple[str, ...]
    rocm_archs: tuple[str, ...]

    @property
    def source_dir(self) -> Path:
        """The Python package that becomes a variant."""
        return self.path / "torch-ext" / self.module

    def ships(self, file: Path) -> bool:
        """Whether a file below torch-ext is part of the artifact, by its name alone."""
        return not is_bytecode(file) and file.name.endswith(
            tuple(f".{extension}" for extension in self.pyext)
        )

    def python_depends(self, backend: str) -> list[str]:
        """Python dependencies of one backend: the general ones, then its own."""
        return [*self.depends.python, *self.backend_depends.get(backend, Depends()).python]

    def kernel_depends(self, backend: str) -> list[dict[str, str | int]]:
        """Kernel dependencies of one backend: the general ones, then its own."""
        own = self.backend_depends.get(backend, Depends()).kernels
        return [dict(entry) for entry in (*self.depends.kernels, *own)]

    def archs(self, backend: str) -> tuple[str, ...]:
        """Architectures that one backend's variant is limited to; empty for any."""
        return {"cuda": self.cuda_capabilities, "rocm": self.rocm_archs}.get(backend, ())

    @classmethod
    def load(cls, path: Path) -> Kernel:
        """Read and check `<path>/build.toml`.

        Raises:
            ManifestError: The file is missing or says something that cannot be built.
        """
        file = path / "build.toml"
        table = _read(file)
        general = table.get("general")
        edition = general.get("edition") if isinstance(general, dict) else None
        if edition != EDITION or isinstance(edition, bool):
            raise _error(file, "general.edition", EDITION, edition)
        try:
            Build.open(path)
        except ValueError as error:
            raise ManifestError(f"{file}: {_reason(error, path)}") from None
        assert isinstance(general, dict)
        noarch = table.get("torch-noarch")
        if noarch is None:
            raise _error(file, "torch-noarch", "a table: only noarch kernels are built here", None)
        if table.get("kernel"):
            raise _error(file, "kernel", "no compiled parts", table["kernel"])
        hub = general.get("hub", {})
        kernel = cls(
            path=path,
            name=general["name"],
            module=general["name"].replace("-", "_"),
            version=general["version"],
            license=general["license"],
            backends=tuple(general["backends"]),
            repo_id=hub.get("repo-id"),
            pyext=tuple(noarch.get("pyext", ("py", "pyi"))),
            upstream=general.get("upstream"),
            source=general.get("source"),
            depends=_depends(general),
            backend_depends={
                backend: _depends(general[backend])
                for backend in ("cuda", "xpu", "neuron", "tpu")
                if backend in general
            },
            cuda_capabilities=tuple(noarch.get("cuda_capabilities", ())),
            rocm_archs=tuple(noarch.get("rocm_archs", ())),
        )
        _check(file, kernel, branch=hub.get("branch"))
        return kernel


@dataclass(frozen=True)
class Target:
    """A compile target, in the terms of Triton's `GPUTarget`.

    Attributes:
        backend: `cuda` or `hip`.
        arch: Compute capability as a number (90) or architecture name (`gfx942`).
        warp_size: Threads in a warp.
        shared_memory: Bytes of shared memory that one program may use.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


@dataclass(frozen=True)
class Manifest:
    """The monorepo: organisation on the Hub, kernels in build order, compile targets."""

    root: Path
    org: str | None
    kernels: tuple[Kernel, ...]
    targets: tuple[Target, ...]

    @classmethod
    def load(cls, root: Path) -> Manifest:
        """Read `<root>/build.toml` and that of every kernel it lists.

        Raises:
            ManifestError: One of the files is missing or wrong.
        """
        file = root / "build.toml"
        table = _read(file)
        _only(file, "", table, {"monorepo", "target"})
        monorepo = table.get("monorepo")
        if not isinstance(monorepo, dict):
            raise _error(file, "monorepo", "a table", monorepo)
        _only(file, "monorepo.", monorepo, {"org", "kernels"})
        org = monorepo.get("org")
        if org is not None and not (isinstance(org, str) and re.fullmatch(r"[\w.-]+", org)):
            raise _error(file, "monorepo.org", "a Hub organisation's name", org)
        names = monorepo.get("kernels")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            raise _error(file, "monorepo.kernels", "a non-empty list of folder names", names)
        if len(set(names)) != len(names):
            raise _error(file, "monorepo.kernels", "each folder once", names)
        kernels = tuple(Kernel.load(root / name) for name in names)
        for folder, kernel in zip(names, kernels, strict=True):
            _check_member(folder, kernel, org)
        targets = table.get("target", [])
        if not isinstance(targets, list):
            raise _error(file, "target", "an array of tables", targets)
        return cls(root, org, kernels, tuple(_target(file, entry) for entry in targets))

    def select(self, names: Sequence[str]) -> tuple[Kernel, ...]:
        """The named kernels in build order; all of them for no name.

        Raises:
            ManifestError: A name is not one of the manifest's kernels.
        """
        known = [kernel.name for kernel in self.kernels]
        for name in names:
            if name not in known:
                raise _error(self.root / "build.toml", "kernel", f"one of {', '.join(known)}", name)
        return tuple(kernel for kernel in self.kernels if not names or kernel.name in names)


def is_bytecode(file: Path) -> bool:
    """Whether a file is compiled Python, which never ships."""
    return "__pycache__" in file.parts or file.suffix == ".pyc"


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{file}: wanted a file, got none") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ManifestError(f"{file}: wanted TOML, got {error}") from None


def _error(file: Path, key: str, wanted: object, got: object) -> ManifestError:
    shown = "nothing" if got is None else repr(got)
    return ManifestError(f"{file}: {key}: wanted {wanted}, got {shown}")


def _reason(error: ValueError, path: Path) -> str:
    """The validator's text without the two prefixes that repeat the path."""
    text = str(error)
    for prefix in (
        f"Cannot parse build configuration in `{path}`: ",
        f"Cannot parse TOML in {path / 'build.toml'}: ",
    ):
        text = text.removeprefix(prefix)
    return text.strip()


def _only(file: Path, prefix: str, table: Mapping[str, Any], allowed: set[str]) -> None:
    for key in table:
        if key not in allowed:
            raise _error(file, f"{prefix}{key}", f"only {', '.join(sorted(allowed))}", table[key])


def _depends(table: Mapping[str, Any]) -> Depends:
    return Depends(tuple(table.get("python-depends", ())), tuple(table.get("kernel-depends", ())))


def _check(file: Path, kernel: Kernel, branch: str | None) -> None:
    """What the validator of `kernels` lets pass and a build cannot use."""
    if not kernel.backends or not set(kernel.backends) <= set(BACKENDS):
        wanted = f"one or more of {', '.join(BACKENDS)}"
        raise _error(file, "general.backends", wanted, list(kernel.backends))
    if len(set(kernel.backends)) != len(kernel.backends):
        raise _error(file, "general.backends", "each backend once", list(kernel.backends))
    if kernel.license.lower() not in LICENSES:
        raise _error(file, "general.license", "a Hub licence id such as MIT", kernel.license)
    if kernel.repo_id is not None:
        match = re.fullmatch(r"[\w.-]+/([\w.-]+)", kernel.repo_id)
        if match is None or match[1] != kernel.name:
            raise _error(file, "general.hub.repo-id", f"ORG/{kernel.name}", kernel.repo_id)
    if branch not in (None, f"v{kernel.version}"):
        raise _error(file, "general.hub.branch", f"v{kernel.version} or no such key", branch)
    if "py" not in kernel.pyext or len(set(kernel.pyext)) != len(kernel.pyext):
        wanted = 'a list of extensions, each once, with "py"'
        raise _error(file, "torch-noarch.pyext", wanted, list(kernel.pyext))
    for extension in kernel.pyext:
        if not re.fullmatch(r"[\w.-]*\w", extension) or extension in ("pyc", "pyo"):
            raise _error(file, "torch-noarch.pyext", "extensions without the dot", extension)
        if extension in ("so", "pyd", "dll", "dylib", "o", "a", "cubin", "hsaco"):
            raise _error(file, "torch-noarch.pyext", "sources and data only", extension)
    for key, pattern, values in (
        ("cuda_capabilities", r"\d+\.\d+[af]?(\+PTX)?", kernel.cuda_capabilities),
        ("rocm_archs", r"gfx[0-9a-f]+", kernel.rocm_archs),
    ):
        for value in values:
            if not re.fullmatch(pattern, value):
                raise _error(file, f"torch-noarch.{key}", f"entries like {pattern}", value)
    _check_depends(file, "general", kernel.depends, set(PYTHON_DEPENDS))
    for backend, depends in kernel.backend_depends.items():
        known = set(BACKEND_PYTHON_DEPENDS.get(backend, {}))
        _check_depends(file, f"general.{backend}", depends, known)


def _check_depends(file: Path, key: str, depends: Depends, known: set[str]) -> None:
    for name in depends.python:
        if name not in known:
            wanted = f"one of {', '.join(sorted(known))}" if known else "no entry"
            raise _error(file, f"{key}.python-depends", wanted, name)
    for entry in depends.kernels:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(entry["repo-id"])):
            raise _error(file, f"{key}.kernel-depends", "a repo-id like ORG/NAME", entry["repo-id"])


def _check_member(folder: str, kernel: Kernel, org: str | None) -> None:
    file = kernel.path / "build.toml"
    if kernel.name != folder:
        raise _error(file, "general.name", f"the folder's name, {folder!r}", kernel.name)
    if org is not None and kernel.repo_id not in (None, f"{org}/{kernel.name}"):
        wanted = f"{org}/{kernel.name}, with the organisation of the top-level build.toml"
        raise _error(file, "general.hub.repo-id", wanted, kernel.repo_id)


def _target(file: Path, entry: Any) -> Target:
    keys = {"backend": str, "arch": (int, str), "warp-size": int, "shared-memory": int}
    if not isinstance(entry, dict):
        raise _error(file, "target", "a table", entry)
    _only(file, "target.", entry, set(keys))
    for key, kind in keys.items():
        if not isinstance(entry.get(key), kind) or isinstance(entry.get(key), bool):  # type: ignore[arg-type]
            raise _error(file, f"target.{key}", "a value of the right type", entry.get(key))
    if entry["backend"] not in ("cuda", "hip"):
        raise _error(file, "target.backend", "cuda or hip", entry["backend"])
    if entry["warp-size"] <= 0 or entry["shared-memory"] <= 0:
        raise _error(file, "target", "sizes above 0", entry)
    return Target(entry["backend"], entry["arch"], entry["warp-size"], entry["shared-memory"])
