"""What is checked once it was sent."""

from __future__ import annotations

from pathlib import Path

import pytest

import publish
from monorepo import release as releases
from monorepo import remote as hubs
from monorepo import upload
from monorepo.localhub import LocalHub

from .helpers import LOAD, REPO, Run, commit_to


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
