"""Repositories, branches and commits, as the real client sees them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    RepositoryNotFoundError,
)

from monorepo.hubstore import Change, Store
from monorepo.localhub import LocalHub

from .helpers import KERNEL, REPO, add, commit, files


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


def test_identical_trees_on_one_parent_have_one_commit_id(hub: LocalHub, api: HfApi) -> None:
    for branch in ("v1", "v2"):
        api.create_branch(**KERNEL, branch=branch)
    assert commit(api, add("a"), revision="v1") == commit(api, add("a"), revision="v2")
    assert commit(api, add("b"), revision="v1") != commit(api, add("c"), revision="v2")
