"""What is refused, and what the message says to do."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from huggingface_hub import HfApi, close_session

import publish
import toykernel
from monorepo import artifact, upload
from monorepo import release as releases
from monorepo import remote as hubs
from monorepo.localhub import LocalHub

from .helpers import LOAD, REPO, Run, content, edit, titles, writes


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
