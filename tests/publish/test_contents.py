"""What is published: which files, which commits, on which branch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import RepoFile

import publish
import toykernel
from monorepo import artifact
from monorepo import release as releases
from monorepo.localhub import LocalHub

from .helpers import REPO, THREE, Run, bump, commit_to, content, edit, titles, writes


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
