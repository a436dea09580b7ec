"""What the loopback Hub refuses: bad names, paths and bodies, tokens without a right."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from monorepo.localhub import LocalHub

from .helpers import KERNEL, REPO, add, commit, commit_body, files, request


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
