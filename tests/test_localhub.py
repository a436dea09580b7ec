"""The loopback Hub, driven by the real `huggingface_hub` and `kernels` clients."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from monorepo.hubstore import Change, Store
from monorepo.localhub import LocalHub, Organisation

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
REPO = "roofline-kernels/toy"
KERNEL = {"repo_id": REPO, "repo_type": "kernel"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    organisations = {
        "roofline-kernels": Organisation(trusted=True),
        "untrusted-kernels": Organisation(),
        "unapproved-kernels": Organisation(approved=False),
    }
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # Without it the client looks for a list of agents at the Hub's public address.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    with LocalHub(tmp_path / "hub", organisations=organisations) as hub:
        yield hub


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    """A writer, with an empty repository."""
    api = HfApi(endpoint=hub.url, token="hf_write")
    api.create_repo(**KERNEL)
    return api


def add(path: str, content: bytes = b"1") -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def commit(api: HfApi, *operations: object, **arguments: object) -> str:
    arguments = {**KERNEL, "commit_message": "message", **arguments}
    return api.create_commit(operations=operations, **arguments).oid  # type: ignore[arg-type]


def files(api: HfApi, revision: str = "main", **arguments: object) -> set[str]:
    return set(api.list_repo_files(**{**KERNEL, **arguments}, revision=revision)) - {
        ".gitattributes"
    }


def request(
    hub_url: str, method: str, path: str, body: bytes | None = None, token: str | None = "hf_write"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """A request as no well-behaved client makes it."""
    connection = http.client.HTTPConnection(hub_url.removeprefix("http://"), timeout=30)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def commit_body(contents: dict[str, str]) -> bytes:
    """A commit as the client sends it."""
    lines: list[object] = [{"key": "header", "value": {"summary": "message", "description": ""}}]
    for path, text in contents.items():
        content = base64.b64encode(text.encode()).decode()
        lines.append(
            {"key": "file", "value": {"path": path, "content": content, "encoding": "base64"}}
        )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_repo_branch_tag_and_commits_are_seen_by_the_client(hub: LocalHub, api: HfApi) -> None:
    api.create_branch(**KERNEL, branch="v1")
    first = commit(api, add("build/torch-cpu/a.py"), add("build/torch-cpu/sub/b.py"), revision="v1")
    api.create_tag(**KERNEL, tag="release", revision="v1")
    second = commit(
        api,
        add("README.md", b"# Card\n"),
        CommitOperationDelete("build/torch-cpu/a.py"),
        revision="v1",
    )

    assert re.fullmatch("[0-9a-f]{40}", first) and first != second
    refs = api.list_repo_refs(**KERNEL, include_pull_requests=True)
    assert {ref.name: ref.target_commit for ref in refs.branches}["v1"] == second
    assert [(ref.ref, ref.target_commit) for ref in refs.tags] == [("refs/tags/release", first)]
    assert files(api) == set()
    assert (
        files(api, "v1") == files(api, "refs/heads/v1") == {"README.md", "build/torch-cpu/sub/b.py"}
    )
    assert (
        files(api, "release")
        == files(api, first)
        == {"build/torch-cpu/a.py", "build/torch-cpu/sub/b.py"}
    )
    tree = api.list_repo_tree(**KERNEL, path_in_repo="build/torch-cpu", revision=first)
    assert [entry.path for entry in tree] == ["build/torch-cpu/a.py", "build/torch-cpu/sub"]
    assert [c.commit_id for c in api.list_repo_commits(**KERNEL, revision="v1")][:2] == [
        second,
        first,
    ]
    assert [c.id for c in hub.commits(REPO, "v1")][:2] == [second, first]
    assert api.repo_info(**KERNEL, revision="v1").sha == second
    assert api.file_exists(REPO, "README.md", repo_type="kernel", revision="v1")
    assert not api.file_exists(REPO, "README.md", repo_type="kernel")


def test_creating_twice_conflicts_unless_it_may_exist(hub: LocalHub, api: HfApi) -> None:
    assert api.create_repo(**KERNEL, exist_ok=True) == f"{hub.url}/kernels/{REPO}"
    api.create_branch(**KERNEL, branch="v1")
    api.create_branch(**KERNEL, branch="v1", exist_ok=True)
    for again in (
        lambda: api.create_repo(**KERNEL),
        lambda: api.create_branch(**KERNEL, branch="v1"),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            again()
        assert error.value.response.status_code == 409


def test_model_and_kernel_of_one_name_are_two_repos(hub: LocalHub, api: HfApi) -> None:
    """Case B101: a repository made as a model must not be visible to `get_kernel`."""
    api.create_repo("roofline-kernels/other", repo_type="model")
    with pytest.raises(RepositoryNotFoundError):
        api.list_repo_refs("roofline-kernels/other", repo_type="kernel")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info(REPO, repo_type="model")
    api.create_repo(REPO, repo_type="model")
    commit(api, add("weights.txt"), repo_type="model")
    assert files(api, repo_type="model") == {"weights.txt"}
    assert files(api) == set()


def test_unchanged_files_make_no_commit(
    hub: LocalHub, api: HfApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def operations() -> list[CommitOperationAdd]:
        return [add("a.py", b"x = 1\n"), add("empty.txt", b""), add("w.safetensors", b"\0" * 100)]

    first = commit(api, *operations())
    assert commit(api, *operations()) == first
    assert len(hub.commits(REPO)) == 2  # with the initial one
    assert commit(api, add("a.py", b"x = 2\n"), *operations()[1:]) != first


def test_moved_head_refuses_the_commit(hub: LocalHub, api: HfApi) -> None:
    """Case B95 (a)."""
    head = api.repo_info(**KERNEL).sha
    second = commit(api, add("a"), parent_commit=head)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as error:
        commit(api, add("b"), parent_commit=head)
    assert error.value.response.status_code == 412
    assert files(api) == {"a"} and api.repo_info(**KERNEL).sha == second


def test_two_publishers_do_not_lose_each_others_commits(hub: LocalHub, api: HfApi) -> None:
    """Case B95: every commit that was acknowledged is in the history, with its files."""

    def publish(who: int) -> None:
        own = HfApi(endpoint=hub.url, token="hf_write")
        for i in range(10):
            commit(own, add(f"{who}/{i}"))

    threads = [threading.Thread(target=publish, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files(api) == {f"{who}/{i}" for who in range(4) for i in range(10)}
    history = hub.commits(REPO)
    assert len(history) == 41
    assert all(
        len(c.files) == len(c.files.keys() & n.files.keys())
        for n, c in zip(history, history[1:], strict=False)
    )


def test_pull_request_leaves_its_base_alone(hub: LocalHub, api: HfApi) -> None:
    api.create_branch(**KERNEL, branch="v1")
    pull = api.create_commit(
        **KERNEL, operations=[add("a")], commit_message="m", revision="v1", create_pr=True
    )
    assert (
        pull.pr_revision == "refs/pr/1" and pull.pr_url == f"{hub.url}/kernels/{REPO}/discussions/1"
    )
    commit(api, add("b"), revision="refs/pr/1")
    other = api.create_commit(**KERNEL, operations=[add("c")], commit_message="m", create_pr=True)
    assert files(api, "refs/pr/1") == {"a", "b"}
    assert files(api, other.pr_revision) == {"c"} and other.pr_num == 2
    assert files(api, "v1") == files(api) == set()
    assert api.list_repo_refs(**KERNEL).pull_requests is None


def test_large_and_binary_files_go_by_lfs(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    large, binary = b"0123456789abcdef" * (700 * 1024), bytes(range(256))
    commit(api, add("large.txt", large), add("deep/w.safetensors", binary), add("small.txt"))
    kinds = {
        f.path: f.lfs is not None
        for f in api.list_repo_tree(**KERNEL, recursive=True)
        if hasattr(f, "lfs")
    }
    assert kinds == {
        ".gitattributes": False,
        "large.txt": True,
        "deep/w.safetensors": True,
        "small.txt": False,
    }
    snapshot = Path(api.snapshot_download(**KERNEL, cache_dir=tmp_path))
    assert (snapshot / "large.txt").read_bytes() == large
    assert (snapshot / "deep/w.safetensors").read_bytes() == binary

    uploads = [r for r in hub.log if r.method == "PUT"]
    commit(api, add("again.safetensors", binary))
    assert len(uploads) == 2 and [r for r in hub.log if r.method == "PUT"] == uploads


def test_lfs_content_that_was_not_announced_or_is_damaged_is_refused(
    hub: LocalHub, api: HfApi
) -> None:
    oid = "0" * 64
    assert request(hub.url, "PUT", f"/lfs/{oid}", b"x")[0] == 403
    batch = json.dumps({"objects": [{"oid": oid, "size": 1}]}).encode()
    assert request(hub.url, "POST", f"/kernels/{REPO}.git/info/lfs/objects/batch", batch)[0] == 200
    assert request(hub.url, "PUT", f"/lfs/{oid}", b"x")[0] == 400
    lines = [
        {"key": "header", "value": {"summary": "m"}},
        {"key": "lfsFile", "value": {"path": "a", "algo": "sha256", "oid": oid, "size": 1}},
    ]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    status, _, answer = request(hub.url, "POST", f"/api/kernels/{REPO}/commit/main", body)
    assert status == 400 and b"LFS pointer" in answer


def test_unknown_repo_revision_and_file_have_the_hubs_error_codes(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    anonymous = HfApi(endpoint=hub.url, token=False)
    for client, status in ((api, 404), (anonymous, 401)):
        with pytest.raises(RepositoryNotFoundError) as error:
            client.list_repo_refs("roofline-kernels/absent", repo_type="kernel")
        assert error.value.response.status_code == status
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id: v9"):
        api.repo_info(**KERNEL, revision="v9")
    with pytest.raises(RevisionNotFoundError):
        commit(api, add("a"), revision="v9")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(**KERNEL, filename="absent.py", cache_dir=tmp_path)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(**KERNEL, path_in_repo="absent"))
    with pytest.raises(EntryNotFoundError, match="A file with this name doesn't exist"):
        commit(api, CommitOperationDelete("absent/"))
    status, headers, body = request(hub.url, "GET", "/api/nothing")
    assert status == 404 and "No such route" in json.loads(body)["error"]
    assert headers["X-Error-Message"] == json.loads(body)["error"]


@pytest.mark.parametrize(
    "path", ["../a", "/a", "a/../../b", ".git/config", "a/.GIT/b", "a//b", "a\\b", "a\n", "", "."]
)
def test_unsafe_path_is_refused_and_changes_nothing(hub: LocalHub, api: HfApi, path: str) -> None:
    body = commit_body({"good": "1", path: "1"})
    status, _, answer = request(hub.url, "POST", f"/api/kernels/{REPO}/commit/main", body)
    assert status == 400 and "Invalid path" in json.loads(answer)["error"]
    assert files(api) == set()


@pytest.mark.parametrize("renamed", [False, True], ids=["before", "after"])
def test_commit_that_dies_at_any_step_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """Dies before, or right after, the n-th file of a commit appears, for every n."""

    class DiedError(Exception):
        pass

    store = Store(tmp_path)
    store.create_repo("kernels", REPO, private=False, author="user")
    rename = Path.replace
    for step in range(5):  # three contents, the commit, the reference
        left = iter([False] * step + [True])

        def die(path: Path, target: Path, left: Iterator[bool] = left) -> None:
            now = next(left)
            if renamed or not now:
                rename(path, target)
            if now:
                raise DiedError

        repo = store.repo("kernels", REPO)
        assert repo is not None
        before = store.commit(repo, "main")
        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(DiedError):
            texts = [f"{step} {n}".encode() for n in range(3)]
            changes = [Change(f"{text}", store.add_blob(text)) for text in texts]
            store.add_commit(repo, "main", changes, title="m", message="", author="user")
        monkeypatch.undo()
        store.close()
        store = Store(tmp_path)
        repo = store.repo("kernels", REPO)
        assert repo is not None
        now = store.commit(repo, "main")
        assert (now == before) != (renamed and step == 4)
        assert len(now.files) - len(before.files) == (3 if now != before else 0)
        assert all(store.blob(f.sha256).stat().st_size == f.size for f in now.files.values())
        assert list((tmp_path / "tmp").iterdir()) == []
    store.close()


def test_any_file_name_comes_back(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    names = ["größe 1%.txt", "a+b&c=d#e?f.txt", "%2e%2e/x", "deep/resolve/main/x", ".hidden"]
    commit(api, *(add(name, name.encode()) for name in names))
    assert files(api) == set(names)
    for name in names:
        path = api.hf_hub_download(**KERNEL, filename=name, cache_dir=tmp_path)
        assert Path(path).read_text() == name


def test_malformed_commit_is_a_bad_request(hub: LocalHub, api: HfApi) -> None:
    header = b'{"key": "header", "value": {"summary": "m"}}\n'
    for body in (
        b"",
        b"not json",
        b'{"key": "header", "value": {"summary": "m", "parentCommit": 1}}',
        header + b"[]",
        header + b'{"key": "file"}',
        header + b'{"key": "file", "value": {"path": "a", "content": "%", "encoding": "base64"}}',
        header + b'{"key": "what", "value": {"path": "a"}}',
        header + b'{"key": "file", "value": {"path": "a", "content": ""}}\n'
        b'{"key": "file", "value": {"path": "a/b", "content": ""}}',
    ):
        assert request(hub.url, "POST", f"/api/kernels/{REPO}/commit/main", body)[0] == 400
    with pytest.raises(BadRequestError, match="not to release"):
        api.create_tag(**KERNEL, tag="release")
        commit(api, add("a"), revision="release")
    assert files(api) == set() and len(hub.commits(REPO)) == 1


def test_commit_cut_short_by_the_client_is_not_made(hub: LocalHub, api: HfApi) -> None:
    body = commit_body({"a": "1"})
    head = (
        f"POST /api/kernels/{REPO}/commit/main HTTP/1.1\r\n"
        "Host: localhost\r\nAuthorization: Bearer hf_write\r\n"
    )
    with socket.create_connection(("127.0.0.1", hub.port), timeout=10) as client:
        client.sendall(f"{head}Content-Length: {len(body) + 100}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert len(hub.commits(REPO)) == 1


def test_tokens_and_namespaces_limit_what_is_written(hub: LocalHub, api: HfApi) -> None:
    reader = HfApi(endpoint=hub.url, token="hf_read")
    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
    assert {org["name"] for org in api.whoami()["orgs"]} >= {"roofline-kernels"}
    assert files(reader) == set()
    refused = [
        (
            reader,
            lambda a: a.create_repo("roofline-kernels/new", repo_type="kernel"),
            403,
            "don't have the rights",
        ),
        (reader, lambda a: commit(a, add("a")), 403, "create_pr=1"),
        (reader, lambda a: commit(a, add("a"), create_pr=True), 403, "write token"),
        (reader, lambda a: a.create_branch(**KERNEL, branch="v1"), 403, "write token"),
        (
            api,
            lambda a: a.create_repo("elsewhere/new", repo_type="kernel"),
            403,
            "don't have the rights",
        ),
        (
            api,
            lambda a: a.create_repo("unapproved-kernels/new", repo_type="kernel"),
            403,
            "not approved",
        ),
        (api, lambda a: a.create_repo("local-user/new", repo_type="kernel"), 403, "not approved"),
        (
            HfApi(endpoint=hub.url, token=False),
            lambda a: commit(a, add("a")),
            401,
            "Invalid username or password",
        ),
        (
            HfApi(endpoint=hub.url, token="hf_x"),
            lambda a: a.repo_info(**KERNEL),
            401,
            "Invalid credentials",
        ),
        (HfApi(endpoint=hub.url, token="hf_x"), lambda a: a.whoami(), 401, "Invalid user token"),
    ]
    for client, call, status, text in refused:
        with pytest.raises(HfHubHTTPError, match=text) as error:
            call(client)
        assert error.value.response.status_code == status
    assert api.create_repo("unapproved-kernels/new", repo_type="model").repo_type == "model"
    assert api.create_repo("local-user/new", repo_type="model").repo_id == "local-user/new"


def test_private_repo_is_hidden_from_the_anonymous(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    private = {"repo_id": "roofline-kernels/hidden", "repo_type": "kernel"}
    api.create_repo(**private, private=True)
    commit(api, add("a"), **private)
    assert api.repo_info(**private).private
    assert (
        Path(api.hf_hub_download(**private, filename="a", cache_dir=tmp_path / "1")).read_bytes()
        == b"1"
    )
    anonymous = HfApi(endpoint=hub.url, token=False)
    with pytest.raises(RepositoryNotFoundError):
        anonymous.repo_info(**private)
    with pytest.raises(HfHubHTTPError):
        anonymous.hf_hub_download(**private, filename="a", cache_dir=tmp_path / "2")
    for path in ("resolve/main/a", "resolve/main/absent"):
        answers = [
            request(hub.url, "HEAD", f"/{k}roofline-kernels/hidden/{path}", token=None)
            for k in ("", "kernels/")
        ]
        assert [(status, headers["X-Error-Code"]) for status, headers, _ in answers] == [
            (401, "RepoNotFound")
        ] * 2


def test_bad_repo_names_do_not_reach_the_disk(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    for name in ("..", "a/b", "../x", "a..b", "x.git", ""):
        body = json.dumps(
            {"name": name, "organization": "roofline-kernels", "type": "kernel"}
        ).encode()
        assert request(hub.url, "POST", "/api/repos/create", body)[0] == 400, name
    assert request(hub.url, "GET", "/api/kernels/..%2F..%2Fx/..%2Fy")[0] == 404
    assert [p.name for p in (tmp_path / "hub/repos/kernels").rglob("repo.json")] == ["repo.json"]
    for branch in ("refs/heads/x", "a/../b", "x.lock", "a b"):
        with pytest.raises(BadRequestError, match="Invalid reference name"):
            api.create_branch(**KERNEL, branch=branch)


def test_fault_before_changes_nothing_and_fault_after_leaves_the_commit(
    hub: LocalHub, api: HfApi
) -> None:
    """Case B95 (b): a 500, or a cut connection, although the commit was stored."""
    for after, count in ((False, 1), (True, 2)):
        for fault in ({"status": 500}, {"cut": True}):
            before = len(hub.commits(REPO))
            hub.faults.add("POST", f"{REPO}/commit/main", after=after, **fault)
            with pytest.raises(Exception, match="500|disconnected|peer closed|incomplete"):
                commit(api, add(f"{after}{fault}"))
            assert hub.log[-1].status == fault.get("status", 0)
            assert len(hub.commits(REPO)) - before == count - 1
    commit(api, add("and then all is well"))


def test_rate_limit_is_waited_out_by_the_client(hub: LocalHub, api: HfApi) -> None:
    hub.faults.add("POST", "/preupload/", status=429, headers={"Retry-After": "0"})
    commit(api, add("a"))
    statuses = [r.status for r in hub.log if "/preupload/" in r.path]
    assert statuses == [429, 200]


def test_download_cut_in_the_middle_is_retried_by_the_client(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    commit(api, add("a.txt", b"0123456789" * 1000))
    hub.faults.add("GET", "/resolve/", cut=True, after=True)
    path = api.hf_hub_download(**KERNEL, filename="a.txt", cache_dir=tmp_path)
    assert Path(path).read_bytes() == b"0123456789" * 1000
    assert [r.status for r in hub.log if r.method == "GET" and "/resolve/" in r.path] == [0, 200]


def test_delay_strikes_as_often_as_asked_and_can_be_cleared(hub: LocalHub, api: HfApi) -> None:
    hub.faults.add("GET", "/refs$", delay=0.2, times=2)
    hub.faults.add("GET", "/refs$", status=503, times=5)
    started = time.monotonic()
    for _ in range(2):
        assert api.list_repo_refs(**KERNEL).branches
    assert time.monotonic() - started >= 0.4
    hub.faults.clear()
    assert api.list_repo_refs(**KERNEL).branches
    with pytest.raises(ValueError, match="regular expression"):
        hub.faults.add("GET", "(", status=500)
    with pytest.raises(ValueError, match="at least one of"):
        hub.faults.add("GET", "x")
    with pytest.raises(ValueError, match="status: wanted .*int.*, got 'abc'"):
        hub.faults.add("GET", "x", status="abc")


def test_faults_and_log_over_http(hub: LocalHub, api: HfApi) -> None:
    fault = {"method": "GET", "path": "/refs$", "status": 503, "headers": {"Retry-After": 7}}
    assert request(hub.url, "POST", "/_local/faults", json.dumps(fault).encode())[0] == 200
    status, headers, _ = request(hub.url, "GET", f"/api/kernels/{REPO}/refs")
    assert status == 503 and headers["Retry-After"] == "7"
    log = json.loads(request(hub.url, "GET", "/_local/log")[2])
    assert log[-1] == {"method": "GET", "path": f"/api/kernels/{REPO}/refs", "status": 503}
    request(hub.url, "POST", "/_local/faults", json.dumps(fault).encode())
    assert request(hub.url, "DELETE", "/_local/faults")[0] == 200
    assert request(hub.url, "GET", f"/api/kernels/{REPO}/refs")[0] == 200
    for body in (b"{}", b"[]", b'{"method": "GET", "path": "x", "what": 1}'):
        assert request(hub.url, "POST", "/_local/faults", body)[0] == 400


def test_one_root_is_held_by_one_hub_and_outlives_it(tmp_path: Path) -> None:
    with LocalHub(tmp_path) as hub:
        HfApi(endpoint=hub.url, token="hf_write").create_repo(**KERNEL)
        with pytest.raises(ValueError, match="in use by another hub"):
            LocalHub(tmp_path).start()
        idle = http.client.HTTPConnection("127.0.0.1", hub.port)
        idle.request("GET", "/api/agent-harnesses")
        assert idle.getresponse().status == 404
    idle.close()  # an open connection did not keep the hub from stopping
    with LocalHub(tmp_path) as hub:
        api = HfApi(endpoint=hub.url, token="hf_write")
        assert len(api.list_repo_refs(**KERNEL).branches) == 1
        with pytest.raises(OSError):
            LocalHub(tmp_path / "other", hub.port).start()
        LocalHub(tmp_path / "other").start().stop()  # the failed start let go of its root


class Served:
    """A `hub.py serve` process."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(SCRIPTS / "hub.py"), "serve", "--root", str(root)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_prints_its_url_and_stops_tidily(tmp_path: Path, number: int) -> None:
    served = Served(tmp_path)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.url)
        idle = http.client.HTTPConnection(served.url.removeprefix("http://"))
        idle.request("GET", "/api/whoami-v2")
        assert idle.getresponse().status == 401
        command = [sys.executable, str(SCRIPTS / "hub.py"), "serve", "--root", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert second.returncode == 1 and re.fullmatch(
            "error: .* in use by another hub\n", second.stderr
        )
        assert served.end(number) == 0
    finally:
        served.process.kill()


def test_killed_server_keeps_every_acknowledged_commit_whole(tmp_path: Path) -> None:
    """SIGKILL in the middle of many commits by several publishers, then again on the same root."""
    acknowledged: dict[str, tuple[str, int]] = {}
    for generation in range(2):
        served = Served(tmp_path)
        try:
            api = HfApi(endpoint=served.url, token="hf_write")
            api.create_repo(**KERNEL, exist_ok=True)

            def publish(who: int, generation: int = generation, url: str = served.url) -> None:
                branch = f"{generation}-{who}"
                try:
                    request(url, "POST", f"/api/kernels/{REPO}/branch/{branch}")
                    for i in range(1000):
                        body = commit_body({f"{n}.txt": f"{branch} {i} {n}" for n in range(8)})
                        answer = request(url, "POST", f"/api/kernels/{REPO}/commit/{branch}", body)
                        acknowledged[json.loads(answer[2])["commitOid"]] = (branch, i)
                except (OSError, http.client.HTTPException):  # the server is gone
                    return

            publishers = [threading.Thread(target=publish, args=(who,)) for who in range(3)]
            for publisher in publishers:
                publisher.start()
            deadline = time.monotonic() + 20
            while len(acknowledged) < 25 * (generation + 1) and time.monotonic() < deadline:
                time.sleep(0.005)
            served.end(signal.SIGKILL)
            for publisher in publishers:
                publisher.join()
        finally:
            served.process.kill()

    assert len(acknowledged) >= 50
    assert not any((tmp_path / "repos").rglob("*.tmp"))
    with LocalHub(tmp_path) as hub:
        assert list((tmp_path / "tmp").iterdir()) == []
        branches = {ref.name for ref in HfApi(endpoint=hub.url).list_repo_refs(**KERNEL).branches}
        reachable = {c.id: c for branch in branches for c in hub.commits(REPO, branch)}
        assert acknowledged.keys() <= reachable.keys()
        for c in reachable.values():
            contents = {
                n: (tmp_path / "blobs" / f.sha256).read_text()
                for n, f in c.files.items()
                if n[0] != "."
            }
            assert len(contents) in (0, 8)
            # All its files are of one and the same commit, the acknowledged one.
            origins = {tuple(text.split()[:2]) for text in contents.values()}
            assert len(origins) <= 1
            if c.id in acknowledged:
                branch, i = acknowledged[c.id]
                assert origins == {(branch, str(i))}


def publish_kernel(api: HfApi, repo_id: str, version: int, value: int) -> None:
    """A kernel made by hand, for the CPU."""
    name = repo_id.partition("/")[2]
    metadata = {
        "name": name,
        "id": f"_{name}_cpu_{version}{value}",
        "version": version,
        "license": "MIT",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": "cpu"},
    }
    init = f"from ._ops import ops\n__all__ = ['value']\ndef value():\n    return {value}\n"
    ops = f"import torch\nops = torch.ops._{name}_cpu_{version}{value}\n"
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    api.create_branch(repo_id, branch=f"v{version}", repo_type="kernel")
    variant = "build/torch-cpu"
    commit(
        api,
        add(f"{variant}/__init__.py", init.encode()),
        add(f"{variant}/_ops.py", ops.encode()),
        add(f"{variant}/metadata.json", json.dumps(metadata, indent=2).encode()),
        repo_id=repo_id,
        revision=f"v{version}",
    )


def run_client(hub: LocalHub, home: Path, program: str) -> str:
    """Runs a program in a fresh process that knows the hub only by HF_ENDPOINT, and no token."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "HUGGING", "KERNELS", "LOCAL_KERNELS"))
    }
    environment = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=home.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_get_kernel_loads_trusted_kernels_and_refuses_others(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    """Cases B101 and B103: versions side by side, a clear error for an absent version."""
    publish_kernel(api, REPO, 1, 10)
    publish_kernel(api, REPO, 2, 20)
    publish_kernel(api, "untrusted-kernels/toy", 1, 30)
    program = f"""
        from kernels import get_kernel, has_kernel
        one, two = get_kernel("{REPO}", version=1), get_kernel("{REPO}", version=2)
        assert (one.value(), two.value()) == (10, 20)
        assert get_kernel("{REPO}", revision="v1").value() == 10
        assert has_kernel("{REPO}", version=1)
        def error_of(call):
            try:
                call()
            except Exception as error:
                return f"{{type(error).__name__}}: {{error}}"
        absent = error_of(lambda: get_kernel("{REPO}", version=9))
        assert absent == "ValueError: Version 9 not found, available versions: 1, 2", absent
        untrusted = error_of(lambda: get_kernel("untrusted-kernels/toy", version=1))
        assert "is not from a trusted publisher" in untrusted, untrusted
        assert get_kernel("untrusted-kernels/toy", version=1, trust_remote_code=True).value() == 30
        missing = error_of(lambda: get_kernel("roofline-kernels/absent", version=1))
        assert missing.startswith("RepositoryNotFoundError"), missing
        print("done")
    """
    assert run_client(hub, tmp_path / "home", program) == "done\n"
    assert {r.status for r in hub.log} <= {200, 401, 404, 409}


def test_kernels_command_line(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    publish_kernel(api, REPO, 1, 10)
    publish_kernel(api, REPO, 2, 20)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f'[tool.kernels.dependencies]\n"{REPO}" = 1\n')
    program = f"""
        import sys
        from kernels.cli import main
        kernel, project = "{REPO}", "{project}"
        for arguments in (
            ["versions", kernel], ["info", kernel], ["lock", project], ["download", project]
        ):
            sys.argv = ["kernels", *arguments]
            main()
    """
    output = run_client(hub, tmp_path / "home", program)
    assert "Version 1:" in output and "Version 2:" in output and "torch-cpu" in output
    assert "Revision: v2" in output and "License: MIT" in output
    head = hub.commits(REPO, "v1")[0].id
    (locked,) = json.loads((project / "kernels.lock").read_text())
    assert (
        locked["dependency"] == {"repo-id": REPO, "version": 1} and locked["lock"]["commit"] == head
    )
    assert list((tmp_path / "home").rglob(f"snapshots/{head}/build/torch-cpu/__init__.py"))


def test_kernel_is_found_by_the_model_urls_that_kernels_benchmark_uses(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    publish_kernel(api, REPO, 1, 10)
    snapshot = Path(api.snapshot_download(REPO, revision="v1", cache_dir=tmp_path / "cache"))
    assert (snapshot / "build/torch-cpu/metadata.json").exists()
    with pytest.raises(RepositoryNotFoundError):  # reading files only: no repository was made by it
        api.repo_info(REPO)
    with pytest.raises(RepositoryNotFoundError):
        commit(api, add("a"), repo_type="model")


def test_identical_trees_on_one_parent_have_one_commit_id(hub: LocalHub, api: HfApi) -> None:
    for branch in ("v1", "v2"):
        api.create_branch(**KERNEL, branch=branch)
    assert commit(api, add("a"), revision="v1") == commit(api, add("a"), revision="v2")
    assert commit(api, add("b"), revision="v1") != commit(api, add("c"), revision="v2")
