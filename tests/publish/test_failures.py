"""Readers, other publishers and failures of the Hub, all at the worst moment."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from huggingface_hub import HfApi

import toykernel
from monorepo import release as releases
from monorepo import remote as hubs
from monorepo import upload
from monorepo.localhub import LocalHub

from .helpers import REPO, Run, bump, commit_to, content, edit, instead, titles


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
