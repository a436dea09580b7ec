"""Publishing against a Hub on loopback, with the real client libraries.

Most tests leave out the two slow steps, importing torch in fresh processes to check the build and
to load what was published; those that ask for `whole_way` do not.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, RepoFile, close_session

import publish
import toykernel
from monorepo import artifact, checks, upload
from monorepo import release as releases
from monorepo import remote as hubs
from monorepo.hubapi import Organisation
from monorepo.localhub import LocalHub

REPO = "toys/toy-scale"
SMOKE = """\
    import torch


    def smoke(kernel):
        assert torch.equal(kernel.scale(torch.ones(2, 3), 2.0), torch.full((2, 3), 2.0))
    """


LOAD = upload.load
THREE = 'backends = ["cpu", "cuda", "rocm"]'


@pytest.fixture
def whole_way() -> None:
    """Keep the slow steps."""


@pytest.fixture(autouse=True)
def loads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, object]]:
    """Leave out the slow steps; the sources that would have been loaded."""
    sources: list[dict[str, object]] = []
    if "whole_way" not in request.fixturenames:
        monkeypatch.setattr(checks, "check_build", lambda kernel, build_dir: None)
        monkeypatch.setattr(upload, "load", lambda release, source, hub: sources.append(source))
    monkeypatch.setattr(hubs, "WAITS", (0.0, 0.0, 0.0, 0.0))
    return sources


@pytest.fixture
def really_load(loads: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the process that loads the published kernel and runs its smoke call."""

    def load(release: releases.Release, source: dict[str, object], endpoint: str) -> None:
        if "repo_id" in source:
            LOAD(release, source, endpoint)

    monkeypatch.setattr(upload, "load", load)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    organisations = {
        "toys": Organisation(trusted=True),
        "untrusted-kernels": Organisation(),
        "newcomers": Organisation(approved=False),
    }
    with LocalHub(tmp_path / "hub", organisations=organisations) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A monorepo whose kernel, of one variant for speed, is committed."""
    root = tmp_path / "monorepo"
    toykernel.write(root)
    edit(root, THREE, 'backends = ["cpu"]', "toy-scale/build.toml")
    toykernel.put(root / "toy-scale" / "tests" / "smoke.py", SMOKE)
    toykernel.put(root / ".gitignore", "build/\n__pycache__/\n*_ignored.py\n")
    artifact.sync(root, toykernel.load(root))
    toykernel.commit(root)
    return root


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(root: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the command line; what it printed on stdout and stderr."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        got = publish.main(["--root", str(root), *arguments])
        out, err = capfd.readouterr()
        assert got == code, out + err
        assert "hf_write" not in out + err and "hf_read" not in out + err
        assert "huggingface.co" not in out + err
        return out, err

    return call


def titles(hub: LocalHub, revision: str, repo_id: str = REPO) -> list[str]:
    """The commits that were made after the repository was created, oldest first."""
    return [c.title for c in reversed(hub.commits(repo_id, revision))][1:]


def content(hub: LocalHub, revision: str, repo_id: str = REPO) -> dict[str, bytes]:
    files = hub.commits(repo_id, revision)[0].files
    return {path: (hub.root / "blobs" / file.sha256).read_bytes() for path, file in files.items()}


def writes(hub: LocalHub) -> list[tuple[str, str]]:
    """Requests that may change something."""
    return [
        (entry.method, entry.path)
        for entry in hub.log
        if entry.method not in ("GET", "HEAD")
        and not re.search("validate-yaml|preupload", entry.path)
    ]


def commit_to(hub: LocalHub, revision: str, files: dict[str, bytes], title: str = "theirs") -> None:
    """What another publisher does."""
    HfApi(endpoint=hub.url, token="hf_write").create_commit(
        REPO,
        [CommitOperationAdd(path, data) for path, data in files.items()],
        commit_message=title,
        repo_type="kernel",
        revision=revision,
    )


def edit(root: Path, old: str, new: str, file: str = f"{toykernel.SOURCE}/reference.py") -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def bump(root: Path) -> None:
    edit(root, "version = 1", "version = 2", "toy-scale/build.toml")
    toykernel.commit(root)


def instead(
    monkeypatch: pytest.MonkeyPatch, method: str, before: Callable[..., None], times: int = 1
) -> None:
    """Have `before` called ahead of the first calls of a method of the client."""
    original = getattr(HfApi, method)
    left = [times]

    def wrapped(self: HfApi, *args: object, **kwargs: object) -> object:
        if left[0] > 0 and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            stack, left[0] = left[0], 0  # what `before` itself calls goes straight through
            before(*args, **kwargs)
            left[0] = stack
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HfApi, method, wrapped)


# --- what is published ---------------------------------------------------------------------------


def test_first_publication_goes_the_whole_way(
    hub: LocalHub, run: Run, root: Path, whole_way: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B91, B92, B100: the build goes to v1, which did not exist; what is printed names it."""
    edit(root, 'backends = ["cpu"]', THREE, "toy-scale/build.toml")
    toykernel.commit(root)
    (root.parent / "decoy").mkdir()
    build = publish.build

    def build_and_divert(*args: object, **kwargs: object) -> object:
        release = build(*args, **kwargs)
        # With this, `kernels` would not look at what was published at all.
        monkeypatch.setenv("LOCAL_KERNELS", f"{REPO}={root.parent / 'decoy'}")
        return release

    monkeypatch.setattr(publish, "build", build_and_divert)
    out, err = run("toy-scale")
    assert titles(hub, "main") == titles(hub, "v1") != []
    assert len(titles(hub, "v1")) == 1
    files = content(hub, "v1")
    for backend in ("cpu", "cuda", "rocm"):
        assert f"build/torch-{backend}/metadata.json" in files
        assert f"build/torch-{backend}/__init__.py" in files
    assert files["benchmarks/benchmark.py"] == b'"""Nothing is measured."""\n'
    others = {path for path in files if not path.startswith(("build/", "benchmarks/"))}
    assert others == {".gitattributes"}
    assert f'get_kernel("{REPO}", version=1)'.encode() in content(hub, "main")["README.md"]
    head = hub.commits(REPO, "v1")[0].id
    assert f"{REPO} v1 {head}: published" in out
    assert f"{REPO} main {hub.commits(REPO)[0].id}: published" in out
    assert f"{hub.url}/kernels/{REPO}/tree/v1" in out
    assert f'get_kernel("{REPO}", version=1)\n' in out
    assert err == ""  # no bar where nobody looks


def test_it_loads_what_a_user_asks_for(
    hub: LocalHub, run: Run, loads: list[dict[str, object]]
) -> None:
    run()
    before, after = loads
    assert list(before) == ["path"]
    assert after == {"repo_id": REPO, "version": 1, "trust_remote_code": [REPO]}


def test_unchanged_sources_publish_nothing(hub: LocalHub, run: Run) -> None:
    run()
    before = hub.commits(REPO, "v1"), hub.commits(REPO)
    hub.log.clear()
    out, _ = run()
    assert out.count("unchanged, nothing was published") == 2
    assert writes(hub) == []
    assert (hub.commits(REPO, "v1"), hub.commits(REPO)) == before


def test_commit_elsewhere_in_the_monorepo_publishes_nothing(
    hub: LocalHub, run: Run, root: Path
) -> None:
    run()
    toykernel.put(root / "README.md", "# Toys\n")
    toykernel.commit(root)
    out, _ = run()
    assert out.count("unchanged, nothing was published") == 2


def test_changed_source_is_one_commit_and_its_stale_file_is_gone(
    hub: LocalHub, run: Run, root: Path
) -> None:
    run()
    stale = "build/torch-cpu/configs/none.json"
    assert stale in content(hub, "v1")
    (root / toykernel.SOURCE / "configs" / "none.json").unlink()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    out, _ = run()
    assert len(titles(hub, "v1")) == 2
    assert len(titles(hub, "main")) == 1  # the card is the same
    files = content(hub, "v1")
    assert stale not in files
    assert b"factor * x" in files["build/torch-cpu/reference.py"]
    assert "v1" in out and "main" in out


def test_old_version_stays_and_both_load_side_by_side(
    hub: LocalHub, run: Run, root: Path, tmp_path: Path
) -> None:
    """B82, B92: version 2 goes to a branch of its own; one process can use both."""
    run()
    old = hub.commits(REPO, "v1")
    edit(root, "x * factor", "x * factor + 1")
    bump(root)
    run()
    assert hub.commits(REPO, "v1") == old
    # The branch started as a copy of main, its own commit is the only one beyond that.
    assert [c.id for c in hub.commits(REPO, "v2")[1:]] == [c.id for c in hub.commits(REPO)[1:]]
    assert b"version=2" in content(hub, "main")["README.md"]
    both = (
        "import torch; from kernels import get_kernel\n"
        f"one, two = (get_kernel('{REPO}', version=v) for v in (1, 2))\n"
        "x = torch.ones(3)\n"
        "print(one.scale(x, 2.0).tolist(), two.scale(x, 2.0).tolist())"
    )
    child = subprocess.run(
        [sys.executable, "-c", both],
        env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.stdout == "[2.0, 2.0, 2.0] [3.0, 3.0, 3.0]\n", child.stderr


def test_only_benchmark_files_that_the_cli_finds_are_published(
    hub: LocalHub, run: Run, root: Path
) -> None:
    toykernel.put(root / "toy-scale/benchmarks/results.csv", "1\n")
    toykernel.put(root / "toy-scale/benchmarks/benchmark_deep/other.py", "1\n")
    toykernel.commit(root)
    run()
    published = {path for path in content(hub, "v1") if path.startswith("benchmarks/")}
    assert published == {"benchmarks/benchmark.py"}


def test_nothing_from_an_earlier_build_is_published(hub: LocalHub, run: Run, root: Path) -> None:
    for name in ("__init__.py", "planted.py"):
        toykernel.put(root / "toy-scale/build/torch-cpu" / name, "raise SystemExit\n")
    run()
    files = content(hub, "v1")
    assert "build/torch-cpu/planted.py" not in files
    assert b"SystemExit" not in files["build/torch-cpu/__init__.py"]


def test_progress_bar_on_a_terminal(
    hub: LocalHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert publish.main(["--root", str(root)]) == 0
    shown = terminal.getvalue()
    assert "toy-scale: build 1/6" in shown and "toy-scale: load 6/6" in shown


def remote(**files: bytes) -> dict[str, RepoFile]:
    def oid(data: bytes) -> str:
        return artifact._blob(data).hex()

    return {
        path: RepoFile(path=path, size=len(data), oid=oid(data)) for path, data in files.items()
    }


HELD = {
    "README.md": b"other",
    "build/torch-cpu/old.py": b"old",
    "build/torch-cpu/same.py": b"same",
    "build/torch-xpu/other.py": b"by another job",
    "benchmarks/benchmark_old.py": b"old",
    "benchmarks/results.csv": b"by hand",
}
OURS = {
    "build/torch-cpu/same.py": b"same",
    "build/torch-cpu/new.py": b"new",
    "benchmarks/benchmark.py": b"new",
}


def test_branch_in_use_keeps_what_is_not_ours() -> None:
    plan = releases.Branch("v1", OURS).plan(remote(**HELD), new=False)
    assert plan.deletions == ("benchmarks/benchmark_old.py", "build/torch-cpu/old.py")
    assert set(plan.additions) == {"build/torch-cpu/new.py", "benchmarks/benchmark.py"}


def test_new_branch_loses_what_it_inherited_from_main() -> None:
    plan = releases.Branch("v2", OURS).plan(remote(**HELD), new=True)
    assert set(plan.deletions) == set(HELD) - set(OURS) - {"README.md"}


def test_benchmarks_stay_where_there_are_none_of_ours() -> None:
    ours = {path: data for path, data in OURS.items() if path.startswith("build/")}
    plan = releases.Branch("v2", ours).plan(remote(**HELD), new=True)
    assert not any(path.startswith("benchmarks/") for path in plan.deletions)


def test_branch_that_holds_all_needs_nothing() -> None:
    plan = releases.Branch("v1", OURS).plan(remote(**OURS), new=False)
    assert list(plan.batches()) == []


def test_file_in_lfs_is_compared_by_its_content() -> None:
    lfs = {"oid": releases.hashlib.sha256(b"new").hexdigest(), "size": 3, "pointerSize": 134}
    files = {"a.bin": RepoFile(path="a.bin", size=3, oid="0" * 40, lfs=lfs)}
    assert not releases.Branch("main", {"a.bin": b"new"}).plan(files, new=False).additions
    assert releases.Branch("main", {"a.bin": b"old"}).plan(files, new=False).additions


def test_new_branch_is_emptied_on_the_hub(hub: LocalHub, run: Run, root: Path) -> None:
    """A build that lies on main, for old readers, does not become part of version 2."""
    run()
    commit_to(hub, "main", {"build/torch-xpu/old.py": b"", "benchmarks/old.txt": b""})
    bump(root)
    run()
    assert not {"build/torch-xpu/old.py", "benchmarks/old.txt"} & set(content(hub, "v2"))
    assert "build/torch-xpu/old.py" in content(hub, "main")


# --- readers, other publishers, failures ---------------------------------------------------------


def test_reader_never_sees_a_half_published_kernel(hub: LocalHub, run: Run, root: Path) -> None:
    """B94: 250 files are one commit, so every state of the branch is whole."""
    run()
    for i in range(250):
        toykernel.put(root / toykernel.SOURCE / f"part_{i}.py", f"I = {i}\n")
    (root / toykernel.SOURCE / "configs" / "none.json").unlink()
    toykernel.commit(root)
    states: set[frozenset[str]] = set()
    done = threading.Event()

    def read() -> None:
        api = HfApi(endpoint=hub.url, token="hf_read")
        while not done.is_set():
            files = api.list_repo_files(REPO, repo_type="kernel", revision="v1")
            states.add(frozenset(path for path in files if path.startswith("build/")))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run()
    finally:
        done.set()
        reader.join()
    assert len(titles(hub, "v1")) == 2
    assert len([p for p in content(hub, "v1") if "/part_" in p]) == 250
    assert 1 <= len(states) <= 2
    for state in states:
        parts = [path for path in state if "/part_" in path]
        assert len(parts) in (0, 250)
        assert ("build/torch-cpu/configs/none.json" in state) == (not parts)


def test_more_than_a_commit_takes_goes_in_batches(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "MAX_OPERATIONS", 5)
    hub.faults.add(method="POST", path="/commit/v1", status=500, after=True)
    run()
    count = len([p for p in content(hub, "v1") if p.startswith(("build/", "benchmarks/"))])
    assert len(titles(hub, "v1")) == -(-count // 5) > 2
    out, _ = run()
    assert out.count("unchanged") == 2


@pytest.mark.parametrize("same", [True, False], ids=["the same build", "another build"])
def test_branch_created_by_another_publisher_meanwhile(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """B92: the answer 409 is as good as success."""
    run()
    bump(root)

    def other(*args: object, **kwargs: object) -> None:
        api = HfApi(endpoint=hub.url, token="hf_write")
        api.create_branch(REPO, branch="v2", repo_type="kernel")
        if not same:
            commit_to(hub, "v2", {"build/torch-cpu/theirs.py": b"1"})

    instead(monkeypatch, "create_branch", other)
    run()
    assert any(e.status == 409 and e.path.endswith("/branch/v2") for e in hub.log)
    assert titles(hub, "v2")[-1].startswith("Publish toy-scale v2")
    assert "build/torch-cpu/theirs.py" not in content(hub, "v2")


def test_two_publishers_at_once_make_one_commit(hub: LocalHub, root: Path, tmp_path: Path) -> None:
    """B92, B95: both succeed, with one commit a branch."""
    kernel = upload.select(root, [])[0]
    release = releases.build(root, kernel, tmp_path / "out", allow_dirty=False)
    start = threading.Barrier(2)
    results: list[upload.Result] = []

    def publisher() -> None:
        api = hubs.log_in(hub.url)
        start.wait()
        results.append(upload.publish(api, release))

    threads = [threading.Thread(target=publisher) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(titles(hub, "v1")) == len(titles(hub, "main")) == 1


def test_head_that_moved_is_read_again(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B95: a commit of somebody else between reading and committing is not overwritten blindly."""
    run()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    theirs = {"build/torch-cpu/theirs.py": b"1", "build/torch-xpu/theirs.py": b"1"}
    instead(monkeypatch, "create_commit", lambda *a, **k: commit_to(hub, "v1", theirs))
    run()
    assert [e.status for e in hub.log if "/commit/v1" in e.path] == [200, 200, 412, 200]
    files = content(hub, "v1")
    assert "build/torch-cpu/theirs.py" not in files  # of a variant that is ours
    assert "build/torch-xpu/theirs.py" in files
    assert b"factor * x" in files["build/torch-cpu/reference.py"]


def test_head_that_keeps_moving_stops_with_a_message(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    count = iter(range(100))

    def other(*args: object, **kwargs: object) -> None:
        commit_to(hub, "v1", {"notes.md": str(next(count)).encode()})

    instead(monkeypatch, "create_commit", other, times=100)
    _, err = run(code=1)
    assert err.startswith("error: cannot publish v1 of toys/toy-scale on http://127.0.0.1:")
    assert "Others kept committing during all 5 attempts" in err
    assert len(titles(hub, "v1")) == 1 + 5


@pytest.mark.parametrize("after", [True, False], ids=["stored", "not stored"])
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/commit/v1", {"status": 500}),
        ("/commit/v1", {"status": 504}),
        ("/commit/v1", {"cut": True}),
        ("/commit/main", {"status": 500}),
        ("/branch/v1", {"status": 500}),
        ("/repos/create", {"cut": True}),
    ],
    ids=str,
)
def test_lost_answer_makes_no_second_commit(
    hub: LocalHub, run: Run, fault: dict[str, object], after: bool, path: str
) -> None:
    """B95: an error after the commit was stored is told from one before by reading the branch."""
    hub.faults.add(method="POST", path=path, after=after, **fault)
    out, _ = run()
    assert len(titles(hub, "v1")) == len(titles(hub, "main")) == 1
    assert out.count(": published") == 2
    assert f"{REPO} v1 {hub.commits(REPO, 'v1')[0].id}: published" in out


def test_hub_that_keeps_failing_stops_with_a_message(hub: LocalHub, run: Run) -> None:
    hub.faults.add(method="POST", path="/commit/v1", status=503, times=100)
    _, err = run(code=1)
    assert "cannot publish v1 of toys/toy-scale" in err
    assert "503" in err and "failed 5 times" in err and "run it again" in err
    assert err.count("\n") == 1
    hub.faults.clear()
    run()
    assert len(titles(hub, "v1")) == 1


def test_error_page_of_a_gateway_is_an_error_that_may_pass(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_json(*args: object, **kwargs: object) -> None:
        json.loads("<html>")

    instead(monkeypatch, "_validate_yaml", no_json)
    run()
    assert len(titles(hub, "main")) == 1


class Killed(BaseException):
    """Ends the program where it is, as a signal does."""


@pytest.mark.parametrize(
    ("method", "skip"),
    [
        ("create_branch", 0),
        ("create_commit", 0),
        ("create_commit", 1),
        ("snapshot_download", 0),
    ],
)
def test_killed_publisher_can_run_again(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, method: str, skip: int
) -> None:
    """B95: wherever it was killed, the second run does what is left and nothing twice."""
    run()
    # On a new branch, whoever comes second must still clear what came from main.
    commit_to(hub, "main", {"build/torch-xpu/old.py": b""})
    bump(root)
    calls = [0]
    original = getattr(HfApi, method)

    def die(self: HfApi, *args: object, **kwargs: object) -> object:
        calls[0] += 1
        if method == "create_branch":
            original(self, *args, **kwargs)
        if calls[0] > skip or method == "create_branch":
            raise Killed
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HfApi, method, die)
        with pytest.raises(Killed):
            run()
    run()
    assert titles(hub, "v2")[-1].startswith("Publish toy-scale v2")
    assert len([t for t in titles(hub, "v2") if "v2" in t]) == 1
    assert len([t for t in titles(hub, "main") if "v2" in t]) == 1
    assert "build/torch-xpu/old.py" not in content(hub, "v2")
    out, _ = run()
    assert out.count("unchanged") == 2


def test_version_is_there_before_the_card_names_it(hub: LocalHub, run: Run, root: Path) -> None:
    run()
    bump(root)
    hub.faults.add(method="POST", path="/commit/v2", status=503, times=100)
    run(code=1)
    assert b"version=1" in content(hub, "main")["README.md"]


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        f"{toykernel.SOURCE}/reference.py",
        f"{toykernel.SOURCE}/untracked.py",
        "toy-scale/CARD.md",
        "toy-scale/benchmarks/benchmark_untracked.py",
        "toy-scale/benchmarks/benchmark_ignored.py",
        "shared/rows.py",
    ],
)
def test_uncommitted_sources_are_refused(hub: LocalHub, run: Run, root: Path, file: str) -> None:
    """B83."""
    with open(root / file, "a") as handle:
        handle.write("# changed\n")
    _, err = run(code=1)
    assert "uncommitted changes" in err and "--allow-dirty" in err
    assert writes(hub) == []
    run("--allow-dirty")
    if "torch-ext" in file or "shared" in file:
        metadata = json.loads(content(hub, "v1")["build/torch-cpu/metadata.json"])
        assert metadata["provenance"]["kernel"]["dirty"] is True
        assert metadata["id"].endswith("_dirty")


def test_sources_outside_git_are_refused(hub: LocalHub, run: Run, root: Path) -> None:
    (root / ".git").rename(root / "moved")
    _, err = run(code=1)
    assert "provenance" in err and writes(hub) == []
    run("--allow-dirty")
    assert len(titles(hub, "v1")) == 1


def test_shallow_clone_is_refused(
    hub: LocalHub, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    toykernel.git(tmp_path, "clone", "-q", "--depth", "1", root.as_uri(), str(clone))
    assert publish.main(["--root", str(clone)]) == 1
    assert "git fetch --unshallow" in capfd.readouterr().err
    assert hub.log == []


def test_without_an_organisation_nothing_is_built_or_asked(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(root, 'org = "toys"\n', "", "build.toml")
    toykernel.commit(root)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("no connection and no build without an organisation")

    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(artifact, "build", never)
    _, err = run(code=1)
    assert err.startswith("error: ") and "names no organisation" in err and "--org" in err
    assert hub.log == []


def test_option_names_the_organisation(hub: LocalHub, run: Run, root: Path) -> None:
    edit(root, 'org = "toys"\n', "", "build.toml")
    toykernel.commit(root)
    run("--org", "untrusted-kernels")
    repo_id = "untrusted-kernels/toy-scale"
    assert len(titles(hub, "v1", repo_id)) == 1
    assert b'get_kernel("untrusted-kernels/toy-scale"' in content(hub, "main", repo_id)["README.md"]


def test_unknown_kernel(hub: LocalHub, run: Run) -> None:
    _, err = run("nothing", code=1)
    assert "nothing" in err and "toy-scale" in err and hub.log == []


def test_dry_run_prints_the_operations_and_asks_nobody(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B85 in a dry run as well: the branch is that of build.toml."""
    with monkeypatch.context() as patch:
        patch.delenv("HF_TOKEN")

        def never(*args: object, **kwargs: object) -> None:
            raise AssertionError("a dry run asks nobody")

        patch.setattr(socket.socket, "connect", never)
        out, err = run("--dry-run")
    assert hub.log == [] and err == ""
    run()
    for branch in ("v1", "main"):
        for path, data in content(hub, branch).items():
            if path != ".gitattributes":
                assert f"    add {path} {len(data)} bytes\n" in out
    assert out.count("    add ") == len(content(hub, "v1")) - 1 + len(content(hub, "main")) - 1
    assert "  v1: " in out and "  main: 1 to add, " in out


def test_token_that_is_not_accepted(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_stolen")
    _, err = run(code=1)
    assert "does not accept the token (401)" in err
    assert f"HF_TOKEN to a token with the role write, from {hub.url}/settings/tokens" in err
    assert "hf_stolen" not in err
    assert writes(hub) == []


def test_log_in_survives_a_passing_failure(hub: LocalHub, run: Run) -> None:
    hub.faults.add("GET", "/whoami", status=503, times=2)
    hub.faults.add("GET", "/overview", status=500, after=False)
    out, _ = run()
    assert "trust_remote_code" not in out, "a failing Hub is no untrusted publisher"


def test_client_that_is_told_to_be_offline(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs.constants, "HF_HUB_OFFLINE", True)
    close_session()  # the library decides when it opens one
    try:
        _, err = run(code=1)
    finally:
        close_session()
    assert "cannot be reached" in err and "HF_HUB_OFFLINE" in err and hub.log == []


def test_no_token(hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "get_token", lambda: None)
    _, err = run(code=1)
    assert "no token" in err and "HF_TOKEN" in err and hub.log == []


def test_hub_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("HF_TOKEN", "hf_write")
        _, err = run("--endpoint", url, code=1)
    assert f"{url} cannot be reached" in err


def test_read_token_may_not_create(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    _, err = run(code=1)
    assert "cannot create toys/toy-scale" in err and "403" in err
    assert "role write, and its owner the right to write to toys" in err and "approval" in err
    assert err.count("\n") == 1


def test_read_token_may_not_commit(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    _, err = run(code=1)
    assert "cannot publish v1 of toys/toy-scale" in err and "403" in err and "--create-pr" in err
    assert len(titles(hub, "v1")) == 1


def test_publisher_that_is_not_approved(hub: LocalHub, run: Run) -> None:
    _, err = run("--org", "newcomers", code=1)
    assert "approval: open a discussion" in err and f"{hub.url}/kernels-community" in err


def test_model_of_the_same_name_is_explained(hub: LocalHub, run: Run) -> None:
    """B101."""
    HfApi(endpoint=hub.url, token="hf_write").create_repo(REPO, repo_type="model")
    _, err = run(code=1)
    assert "is a model repository" in err and "type kernel" in err
    with pytest.raises(LookupError):
        hub.commits(REPO)


def test_private_repository(hub: LocalHub, run: Run) -> None:
    run("--private")
    assert HfApi(endpoint=hub.url, token="hf_read").repo_info(REPO, repo_type="kernel").private
    run("--private")
    run()


def test_public_repository_does_not_pass_for_a_private_one(hub: LocalHub, run: Run) -> None:
    run()
    hub.log.clear()
    _, err = run("--private", code=1)
    assert "is public" in err and writes(hub) == []


def test_kernel_without_a_smoke_call_is_refused(hub: LocalHub, run: Run, root: Path) -> None:
    toykernel.put(root / "toy-scale/tests/smoke.py", "def other(kernel): ...\n")
    toykernel.commit(root)
    _, err = run(code=1)
    assert "smoke.py with a function smoke(kernel) is missing" in err and hub.log == []


def test_smoke_call_that_does_not_parse(hub: LocalHub, run: Run, root: Path) -> None:
    toykernel.put(root / "toy-scale/tests/smoke.py", "def smoke(kernel:\n")
    _, err = run(code=1)
    assert "smoke.py: wanted Python source" in err and hub.log == []


def test_kernel_that_fails_its_smoke_call_is_not_sent(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "load", LOAD)
    edit(root, "full((2, 3), 2.0)", "full((2, 3), 3.0)", "toy-scale/tests/smoke.py")
    toykernel.commit(root)
    _, err = run(code=1)
    assert "fails" in err and "smoke.py" in err and "AssertionError" in err
    assert writes(hub) == []


@pytest.mark.parametrize("name", ["CARD.md", "benchmarks/benchmark_link.py"])
def test_link_is_refused(hub: LocalHub, run: Run, root: Path, tmp_path: Path, name: str) -> None:
    """What it leads to, outside the kernel, must not be published."""
    (tmp_path / "secret").write_text("secret")
    (root / "toy-scale" / name).unlink(missing_ok=True)
    (root / "toy-scale" / name).symlink_to(tmp_path / "secret")
    toykernel.commit(root)
    _, err = run(code=1)
    assert "is a link" in err and hub.log == []


def test_link_in_a_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "link.py").symlink_to(tmp_path / "secret")
    with pytest.raises(releases.PublishError, match="link.py is a link"):
        releases._read(tmp_path / "build")


def test_variant_of_another_version_is_refused(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B85, B91: the branch and what is on it cannot disagree."""
    original = artifact.metadata

    def other(*args: object, **kwargs: object) -> dict[str, object]:
        return {**original(*args, **kwargs), "version": 7}

    monkeypatch.setattr(artifact, "metadata", other)
    _, err = run(code=1)
    assert "is of version 7" in err and "says 1" in err and writes(hub) == []


def test_sources_that_change_during_the_build_are_refused(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = artifact._write

    def other(*args: object) -> None:
        original(*args)
        edit(root, "x * factor", "factor * x")
        toykernel.commit(root)

    monkeypatch.setattr(artifact, "_write", other)
    _, err = run(code=1)
    assert "they changed during the build" in err and writes(hub) == []


# --- pull requests -------------------------------------------------------------------------------


def pull_requests(hub: LocalHub) -> list[str]:
    refs = HfApi(endpoint=hub.url, token="hf_read").list_repo_refs(
        REPO, repo_type="kernel", include_pull_requests=True
    )
    return [ref.ref for ref in refs.pull_requests or ()]


def test_pull_requests_leave_the_branches_alone(
    hub: LocalHub, run: Run, root: Path, request: pytest.FixtureRequest
) -> None:
    run()
    before = hub.commits(REPO, "v1"), hub.commits(REPO)
    edit(root, "x * factor", "factor * x")
    edit(root, "## Layers", "## The layers", "toy-scale/CARD.md")
    toykernel.commit(root)
    request.getfixturevalue("really_load")
    out, _ = run("--create-pr")
    assert pull_requests(hub) == ["refs/pr/1", "refs/pr/2"]
    assert (hub.commits(REPO, "v1"), hub.commits(REPO)) == before
    assert f"proposed in {hub.url}/kernels/{REPO}/discussions/1" in out
    assert b"factor * x" in content(hub, "refs/pr/1")["build/torch-cpu/reference.py"]
    assert b"## The layers" in content(hub, "refs/pr/2")["README.md"]


def test_pull_request_of_nothing_is_not_opened(hub: LocalHub, run: Run) -> None:
    run()
    out, _ = run("--create-pr")
    assert pull_requests(hub) == [] and out.count("unchanged") == 2


def test_pull_request_whose_answer_was_lost_is_not_opened_twice(
    hub: LocalHub, run: Run, root: Path
) -> None:
    run()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    hub.faults.add(method="POST", path="/commit/v1", status=500, after=True)
    out, _ = run("--create-pr")
    assert pull_requests(hub) == ["refs/pr/1"]
    assert f"proposed in {hub.url}/kernels/{REPO}/discussions/1" in out


def test_large_pull_request_goes_in_batches_into_one(
    hub: LocalHub, run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    edit(root, "x * factor", "factor * x")
    toykernel.commit(root)
    monkeypatch.setattr(releases, "MAX_OPERATIONS", 1)
    run("--create-pr")
    assert pull_requests(hub) == ["refs/pr/1"]
    assert b"factor * x" in content(hub, "refs/pr/1")["build/torch-cpu/reference.py"]


@pytest.mark.parametrize("published", [True, False], ids=["no branch", "no repository"])
def test_pull_request_needs_the_branch(
    hub: LocalHub, run: Run, root: Path, published: bool
) -> None:
    if published:
        run()
        bump(root)
    _, err = run("--create-pr", code=1)
    assert "without --create-pr" in err
    assert ("has no branch v2" in err) == published


def test_private_pull_request_makes_no_sense(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--create-pr", "--private")
    assert stop.value.code == 2


# --- afterwards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["build/torch-cpu/api.py", "benchmarks/benchmark.py"])
def test_altered_bytes_are_noticed(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    original = upload.verify_download

    def altered(*args: object) -> None:
        blob = hub.root / "blobs" / hub.commits(REPO, "v1")[0].files[path].sha256
        data = blob.read_bytes()
        blob.write_bytes(data[:-3] + b"#" + data[-2:])  # of the same size
        original(*args)

    monkeypatch.setattr(upload, "verify_download", altered)
    _, err = run(code=1)
    assert f"does not serve what was built: {path} differs" in err


def test_file_added_to_a_variant_is_noticed_by_the_digest(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = upload.verify_download

    def altered(hub_: hubs.Hub, release: releases.Release, *commits: hubs.Commit) -> None:
        commit_to(hub, "v1", {"build/torch-cpu/planted.py": b""})
        head = hub.commits(REPO, "v1")[0].id
        version = releases.dataclasses.replace(commits[0], oid=head)
        original(hub_, release, version, commits[1])

    monkeypatch.setattr(upload, "verify_download", altered)
    _, err = run(code=1)
    assert "torch-cpu" in err and "planted.py" in err


def test_published_kernel_that_cannot_be_downloaded(
    hub: LocalHub, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.add(method="GET", path="/resolve/.*/build/torch-cpu/api.py", status=403, times=100)
    _, err = run(code=1)
    assert "was published" in err and "cannot be downloaded again" in err


def test_another_build_in_the_way_is_noticed(hub: LocalHub, root: Path, tmp_path: Path) -> None:
    """A branch that was overwritten before it is loaded passes for ours by no means."""
    kernel = upload.select(root, [])[0]
    release = releases.build(root, kernel, tmp_path / "out", allow_dirty=False)
    other = releases.dataclasses.replace(release, ids=("_toy_scale_cpu_0000000",))
    with pytest.raises(releases.PublishError, match="another build was loaded: _toy_scale_cpu_"):
        LOAD(other, {"path": str(release.build_dir)}, hub.url)


def test_untrusted_organisation_is_told_to_users(
    hub: LocalHub, run: Run, really_load: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option names the Hub to the process that loads as well."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    out, _ = run("--org", "untrusted-kernels", "--endpoint", hub.url)
    wanted = 'get_kernel("untrusted-kernels/toy-scale", version=1, trust_remote_code=True)'
    assert wanted in out


def test_no_address_of_a_hub_is_written_down() -> None:
    """B100: endpoint and links come from the ecosystem's variables."""
    for module in (upload, publish):
        text = Path(module.__file__).read_text()
        assert "huggingface.co" not in text and "hf.co" not in text
