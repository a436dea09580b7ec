"""The real kernels, published from a clean checkout and used by the real clients (level 5).

Every process is fresh, knows the Hub by HF_ENDPOINT alone, and cannot reach any other host
(case B100): a `sitecustomize.py` refuses connections that leave loopback and writes them down.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from kernels._rust import Digest, DigestAlgorithm, Metadata

import toykernel
from checkout import ROOT, checkout
from monorepo.localhub import LocalHub, Organisation
from monorepo.manifest import Manifest

KERNELS = Manifest.load(ROOT).kernels
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
each_kernel = pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS])
# What depends on clients and Hub, not on the kernel: shown by the one with the longest name.
one_kernel = pytest.mark.parametrize("name", [max((kernel.name for kernel in KERNELS), key=len)])

GUARD = """\
    import os, sys

    def refuse(event, arguments):
        if event == "socket.connect":
            address = arguments[1]
        elif event == "socket.getaddrinfo":
            address = arguments
        else:
            return
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", None):
            with open(os.environ["CONNECTIONS"], "a") as log:
                print(address, file=log)
            raise OSError(f"blocked: {address}")

    sys.addaudithook(refuse)
    """

# Says, when the tests are over, how many passed and which kernels they had loaded from where.
PLUGIN = """\
    import json, os
    from kernels import get_loaded_kernels

    passed = 0

    def pytest_runtest_logreport(report):
        global passed
        passed += report.when == "call" and report.passed

    def pytest_sessionfinish(session):
        loaded = {k.metadata.name.__str__(): k.module.__file__ for k in get_loaded_kernels()}
        with open(os.environ["REPORT"], "w") as file:
            json.dump({"passed": passed, "loaded": loaded}, file)
    """


@dataclass(frozen=True)
class Published:
    """A checkout, and the Hub that its kernels were published to from a clean tree."""

    checkout: Path
    hub: LocalHub
    folder: Path

    def run(
        self, command: list[str], home: Path, *, cwd: Path | None = None, code: int = 0, **more: str
    ) -> str:
        """Run a program that keeps its cache in `home`; return what it wrote to stdout."""
        connections = home / "connections"
        home.mkdir(exist_ok=True)
        hidden = ("HF_", "HUGGING", "KERNELS_", "LOCAL_KERNELS", "TRANSFORMERS_", "TRITON_INTER")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        own = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(home),
            "PYTHONPATH": str(self.folder / "path"),
            "CONNECTIONS": str(connections),
        }
        done = subprocess.run(
            command,
            cwd=cwd or home,
            env={**kept, **own, **more},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert not connections.exists(), connections.read_text()
        return done.stdout

    def python(self, name: str, program: str, home: Path, **more: str) -> str:
        """Run a program that knows a kernel's REPO, and its `smoke` call."""
        file = self.checkout / name / "tests/smoke.py"
        start = f"""
            import pathlib, runpy, kernels
            REPO, smoke = {repo(name)!r}, runpy.run_path({str(file)!r})["smoke"]
            """
        text = textwrap.dedent(start) + textwrap.dedent(program)
        return self.run([sys.executable, "-c", text], home, **more)

    def cli(self, *arguments: str, home: Path, **more: object) -> str:
        """Run the `kernels` command."""
        return self.run([str(Path(sys.executable).with_name("kernels")), *arguments], home, **more)

    def hf(self, *arguments: str, home: Path) -> str:
        """Run the `hf` command, which otherwise asks PyPI for its own updates."""
        command = [str(Path(sys.executable).with_name("hf")), *arguments]
        return self.run(command, home, HF_HUB_DISABLE_UPDATE_CHECK="1")

    def publish(self, *names: str) -> str:
        command = [sys.executable, str(self.checkout / "scripts/publish.py"), *names]
        return self.run(command, self.folder / "publisher", HF_TOKEN="hf_write")


@contextlib.contextmanager
def served(folder: Path, checkout: Path, root: Path, **options: object) -> Iterator[Published]:
    toykernel.put(folder / "path/sitecustomize.py", GUARD)
    toykernel.put(folder / "path/passed_and_loaded.py", PLUGIN)
    with LocalHub(root, **options) as hub:
        yield Published(checkout, hub, folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    folder = tmp_path_factory.mktemp("published")
    with served(folder, checkout(folder / "checkout"), folder / "hub") as published:
        published.publish()
        yield published


def repo(name: str) -> str:
    return f"roofline-kernels/{name}"


# --- what the README shows -----------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_readme_run(published: Published, tmp_path: Path, example: str) -> None:
    published.run([sys.executable, "-c", example], tmp_path)


# --- the kernels' own tests ----------------------------------------------------------------------


@each_kernel
def test_own_tests_pass_on_what_was_published(
    published: Published, tmp_path: Path, name: str
) -> None:
    """Case B79: tests ran, and what they ran on came from the Hub.

    Those that prove that a kernel works: its bytes are those that all of its tests run on.
    """
    chosen = "kernels_ci and not gpu"
    options = ["-q", "-p", "passed_and_loaded", "-p", "no:cacheprovider", "-m", chosen]
    command = [sys.executable, "-m", "pytest", *options, f"{name}/tests"]
    report = tmp_path / "report.json"
    cwd = published.checkout
    out = published.run(command, tmp_path / "home", cwd=cwd, REPORT=str(report))
    found = json.loads(report.read_text())
    assert found["passed"] > 0, out
    assert Path(found["loaded"][name]).is_relative_to(tmp_path / "home/hub"), found


# --- the artifact --------------------------------------------------------------------------------


@each_kernel
def test_metadata_is_what_the_format_prescribes(
    published: Published, tmp_path: Path, name: str
) -> None:
    """Key for key, in order, with the digest that the loader computes; cases B76, B77, B83."""
    (kernel,) = Manifest.load(published.checkout).select([name])
    api = HfApi(endpoint=published.hub.url, token="hf_read")
    branch = {"repo_type": "kernel", "revision": f"v{kernel.version}", "cache_dir": tmp_path}
    build = Path(api.snapshot_download(repo(name), **branch)) / "build"
    commit = toykernel.git(
        published.checkout,
        "log",
        "-1",
        "--format=%H",
        "--",
        f"{name}/torch-ext",
        f"{name}/build.toml",
    )
    assert {path.name for path in build.iterdir()} == {f"torch-{b}" for b in kernel.backends}
    ids = set()
    for backend in kernel.backends:
        variant = build / f"torch-{backend}"
        text = (variant / "metadata.json").read_text(encoding="utf-8")
        content = json.loads(text)
        unique_id = content["id"].removeprefix(f"_{kernel.module}_{backend}_")
        assert len(unique_id) == 7 and set(unique_id) <= set("0123456789abcdef")
        ids.add(unique_id)
        wanted = {
            "name": name,
            "id": f"_{kernel.module}_{backend}_{unique_id}",
            "version": kernel.version,
            "kernels-minver": "0.14.0",
            "license": "MIT",
            "python-depends": [],
            "kernel-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": hashes(variant)},
            "provenance": {
                "kernel-builder": content["provenance"]["kernel-builder"],
                "kernel": {"commit": commit, "dirty": False},
            },
        }
        assert content == wanted
        assert text == json.dumps(wanted, indent=2, ensure_ascii=False)
        read = Metadata.read_from_file(variant / "metadata.json")
        assert (str(read.name), read.id, read.version) == (name, wanted["id"], kernel.version)
        assert read.digest is not None
        read.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert len(ids) == 1


def hashes(variant: Path) -> dict[str, str]:
    """SHA-256 of each file but the metadata itself, in base64, sorted by path."""
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(
            hashlib.sha256(path.read_bytes()).digest()
        ).decode()
        for path in variant.rglob("*")
        if path.is_file() and path != variant / "metadata.json"
    }
    return dict(sorted(files.items()))


# --- the command line of `kernels` ---------------------------------------------------------------


@each_kernel
def test_kernels_versions(published: Published, tmp_path: Path, name: str) -> None:
    out = published.cli("versions", repo(name), home=tmp_path)
    assert "Version 1:" in out
    for variant in ("torch-cpu", "torch-cuda", "torch-rocm"):
        assert variant in out


@each_kernel
def test_kernels_info(published: Published, tmp_path: Path, name: str) -> None:
    info = json.loads(published.cli("info", repo(name), "--json", home=tmp_path))
    assert info == {
        "repo_id": repo(name),
        "revision": "v1",
        "name": name,
        "version": 1,
        "kernels_minver": "0.14.0",
        "license": "MIT",
        "upstream": None,
        "source": None,
        "python_depends": [],
        "backends": ["cpu", "cuda", "rocm"],
    }


@each_kernel
def test_kernels_lock_and_download(published: Published, tmp_path: Path, name: str) -> None:
    """A project that locks the kernel loads exactly that commit, without asking the Hub."""
    project = tmp_path / "project"
    text = f'[tool.kernels.dependencies]\n"{repo(name)}" = 1\n'
    toykernel.put(project / "pyproject.toml", text)
    published.cli("lock", str(project), home=tmp_path)
    (locked,) = json.loads((project / "kernels.lock").read_text())
    assert locked["dependency"] == {"repo-id": repo(name), "version": 1}
    assert locked["lock"]["commit"] == published.hub.commits(repo(name), "v1")[0].id
    published.cli("download", str(project), home=tmp_path)
    program = """
        lockfile = pathlib.Path("project/kernels.lock")
        kernel = kernels.get_locked_kernel(REPO, lockfile=lockfile)
        smoke(kernel)
        print(kernel.__file__)
        """
    out = published.python(name, program, tmp_path)
    assert f"snapshots/{locked['lock']['commit']}/build/torch-" in out


@each_kernel
def test_kernels_benchmark(published: Published, tmp_path: Path, name: str) -> None:
    """On a checkout: the Hub form of the command asks for a model repository (kernels 0.17)."""
    cwd = published.checkout
    published.run([sys.executable, "scripts/build.py", name], tmp_path, cwd=cwd)
    output = tmp_path / "results.json"
    few = ("--iterations", "2", "--warmup", "1", "--output", str(output))
    published.cli("benchmark", name, *few, home=tmp_path, cwd=cwd)
    results = json.loads(output.read_text())["results"]
    assert results and all(result["verified"] for result in results), results
    assert all(result["timingResults"]["iterations"] == 2 for result in results)


# --- loading -------------------------------------------------------------------------------------


@one_kernel
def test_many_processes_load_at_once(published: Published, tmp_path: Path, name: str) -> None:
    """Cases B98 and B97: 8 processes, one cold cache, then 10 loads each of what is cached."""
    program = """
        import multiprocessing

        def load(start):
            start.wait()
            for _ in range(11):
                kernel = kernels.get_kernel(REPO, version=1)
            smoke(kernel)

        context = multiprocessing.get_context("fork")
        start = context.Barrier(8)
        processes = [context.Process(target=load, args=(start,)) for _ in range(8)]
        [process.start() for process in processes]
        [process.join() for process in processes]
        raise SystemExit(any(process.exitcode for process in processes))
        """
    published.python(name, program, tmp_path)


@one_kernel
def test_version_that_is_no_version(published: Published, tmp_path: Path, name: str) -> None:
    """Case B103: an error that says what is there, never a silent slow path."""
    program = """
        for arguments in ({"version": "1"}, {"version": 99}, {}):
            try:
                kernels.get_kernel(REPO, **arguments)
            except Exception as error:
                print(type(error).__name__, error)
        """
    text, unknown, none = published.python(name, program, tmp_path).splitlines()
    assert text.startswith("TypeError ") and "'str'" in text
    assert unknown == "ValueError Version 99 not found, available versions: 1"
    assert none.startswith("ValueError A kernel version or revision must be specified.")


@one_kernel
def test_offline_after_a_whole_snapshot(published: Published, tmp_path: Path, name: str) -> None:
    """Case B89: by version, branch and commit, once the branch was downloaded whole."""
    published.hf("download", repo(name), "--repo-type", "kernel", "--revision", "v1", home=tmp_path)
    commit = published.hub.commits(repo(name), "v1")[0].id
    published.hub.log.clear()
    program = f"""
        by = {{"version": 1}}, {{"revision": "v1"}}, {{"revision": "{commit}"}}
        loaded = {{kernels.get_kernel(REPO, **each) for each in by}}
        smoke(*loaded)
        """
    published.python(name, program, tmp_path, HF_HUB_OFFLINE="1")
    assert published.hub.log == []


@one_kernel
def test_offline_after_a_mere_load(published: Published, tmp_path: Path, name: str) -> None:
    """Case B89: what the README warns of. If this fails, `kernels` got better: shorten the note.

    Case B107: the commands that list the cache know kernels.
    """
    path = "print(pathlib.Path(kernels.get_kernel(REPO, version=1).__file__).parents[1])"
    build = published.python(name, path, tmp_path).strip()
    listed = published.hf("cache", "ls", "--quiet", home=tmp_path)  # a table would cut long names
    assert f"kernel/{repo(name)}" in listed.splitlines()
    program = """
        try:
            kernels.get_kernel(REPO, version=1)
        except ValueError as error:
            print(error)
        """
    out = published.python(name, program, tmp_path, HF_HUB_OFFLINE="1")
    assert "is not available in the local cache" in out and "Download the kernel while" in out
    local = {"LOCAL_KERNELS": f"{repo(name)}={build}", "HF_HUB_OFFLINE": "1"}
    published.python(name, "smoke(kernels.get_kernel(REPO, version=1))", tmp_path, **local)


@one_kernel
def test_publisher_that_is_not_trusted(published: Published, tmp_path: Path, name: str) -> None:
    """What the README says of trust: refused, unless told otherwise."""
    root = tmp_path / "hub"
    shutil.copytree(published.hub.root, root)
    program = """
        try:
            kernels.get_kernel(REPO, version=1)
        except ValueError as error:
            print(error)
        smoke(kernels.get_kernel(REPO, version=1, trust_remote_code=True))
        """
    nobody = {"roofline-kernels": Organisation()}
    with served(tmp_path, published.checkout, root, organisations=nobody) as other:
        out = other.python(name, program, tmp_path / "home")
    assert "is not from a trusted publisher" in out and "trust_remote_code=True" in out


@each_kernel
def test_two_versions_and_a_local_build_side_by_side(
    published: Published, tmp_path: Path, name: str
) -> None:
    """Case B82: the operators of each live in a namespace of their own."""
    root, sources = tmp_path / "hub", tmp_path / "checkout"
    shutil.copytree(published.hub.root, root)
    shutil.copytree(published.checkout, sources)
    change(sources / name / "build.toml", "version = 1", "version = 2")
    toykernel.commit(sources)
    with served(tmp_path, sources, root) as both:
        both.publish(name)
        change(sources / name / "build.toml", "version = 2", "version = 3")
        both.run([sys.executable, "scripts/build.py", name], tmp_path / "home", cwd=sources)
        program = f"""
            first, second = (kernels.get_kernel(REPO, version=version) for version in (1, 2))
            third = kernels.get_local_kernel(pathlib.Path("{sources}/{name}"))
            for kernel in (first, second, third, first):
                smoke(kernel)
            print(len({{kernel.__name__ for kernel in (first, second, third)}}))
            """
        assert both.python(name, program, tmp_path / "home") == "3\n"


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_guard_refuses_other_hosts(published: Published, tmp_path: Path) -> None:
    """Case B100 rests on it."""
    program = """
        import socket
        for call in (socket.create_connection, lambda address: socket.socket().connect(address)):
            try:
                call(("192.0.2.1", 80))
            except OSError as error:
                print(error)
        """
    with pytest.raises(AssertionError, match="192.0.2.1"):
        published.python("rmsnorm", program, tmp_path)
    assert (tmp_path / "connections").read_text().count("192.0.2.1") == 2
