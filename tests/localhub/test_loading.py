"""Kernels loaded from the loopback Hub by `kernels`, its functions and its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    RepositoryNotFoundError,
)

from monorepo.localhub import LocalHub

from .helpers import REPO, add, commit


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
