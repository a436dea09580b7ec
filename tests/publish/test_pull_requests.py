"""Pull requests in place of commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import HfApi

import toykernel
from monorepo import release as releases
from monorepo.localhub import LocalHub

from .helpers import REPO, Run, bump, content, edit


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
