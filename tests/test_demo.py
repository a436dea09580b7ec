"""`make demo`: it shows every kernel, notices what is off, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import demo
import hub
import toykernel
from checkout import checkout
from monorepo import user
from monorepo.comparison import Comparison

# What a user's shell may hold and no step may heed.
MISLEADING = {
    "HF_TOKEN": "hf_of_the_user",
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "LOCAL_KERNELS": "roofline-kernels/rmsnorm=/nonexistent",
    "KERNELS_CACHE": "/nonexistent",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with one kernel more, as new_kernel.py stamps it."""
    root = checkout(tmp_path_factory.mktemp("demo") / "checkout")
    stamp = [sys.executable, "scripts/new_kernel.py", "toy-twice"]
    subprocess.run(stamp, cwd=root, check=True, capture_output=True)
    toykernel.commit(root)
    return root


def start(root: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """The demonstration, in a process that keeps its temporary files below tmp_path."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "cache").mkdir()
    own = {"TMPDIR": str(tmp_path / "tmp"), "HF_HOME": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, str(root / "scripts/demo.py")],
        env={**os.environ, **MISLEADING, **own, "PYTHONUNBUFFERED": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where the tests run in the background, it is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def check_nothing_is_left(tmp_path: Path) -> None:
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "cache").iterdir()) == []
    processes = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    for process in processes:
        try:
            environment = (process / "environ").read_bytes()
        except OSError:  # of another user, or gone
            continue
        assert f"TMPDIR={tmp_path}/tmp".encode() not in environment, process


def test_whole_way(root: Path, tmp_path: Path) -> None:
    """Every kernel of the manifest, the stamped one too; case B106 for the swapped model."""
    process = start(root, tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    check_nothing_is_left(tmp_path)
    for name in ("rmsnorm", "toy-twice"):
        assert f"roofline-kernels/{name} v1 " in out
        assert f"\nroofline-kernels/{name} version 1: _{name.replace('-', '_')}_" in out
    assert "trust_remote_code=True" in out and "dirty" not in out and "WRONG" not in out
    rows = re.findall(r"^(.*?)  .* (\d+\.\d\d) +(\d+\.\d\d)   (.*)$", out, re.MULTILINE)
    assert rows and all(float(ulp) <= float(allowed) for _, ulp, allowed, _ in rows)
    functions, paths = {row[0] for row in rows}, {row[3] for row in rows}
    assert {"rmsnorm", "add_rmsnorm, norm", "rmsnorm backward, dx", "logits"} <= functions
    assert {"toy_twice", "toy_twice backward"} <= functions
    if not torch.cuda.is_available():
        assert paths == {"PyTorch reference on cpu", "Triton, interpreted on cpu"}
    assert re.search(r"kernelize bound its 5 norms to _rmsnorm_\w+\.layers", out)
    assert toykernel.git(root, "status", "--porcelain") == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("seconds", [0.0, 3.0], ids="after {} s".format)
def test_interrupted_demo_leaves_nothing(
    root: Path, tmp_path: Path, number: int, seconds: float
) -> None:
    process = start(root, tmp_path)
    assert process.stdout is not None
    line = process.stdout.readline()
    url = re.search(r"http://127\.0\.0\.1:\d+", line)
    assert url, line
    time.sleep(seconds)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "interrupted" in out
    check_nothing_is_left(tmp_path)


def wrong() -> Comparison:
    right = torch.ones(3)
    return Comparison("f", "random", (3,), right + 1e-5, right.double(), right)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("bad", [1.00001, float("nan"), float("inf")])
def test_wrong_result_is_told(whole: bool, bad: float) -> None:
    exact = torch.ones(3, dtype=torch.float64)
    peer = exact.float()
    right = Comparison("f", "random", (3,), peer, exact, peer, whole)
    assert right.right and str(right).endswith(" 0.00     2.00")
    actual = torch.tensor([1.0, bad, 1.0])
    assert not Comparison("f", "random", (3,), actual, exact, peer, whole).right


def test_wrong_result_is_counted_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert user._print(["text", wrong(), wrong()], "nowhere", False) == 2
    assert capsys.readouterr().out.count("   nowhere   WRONG\n") == 2


def test_kernel_from_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    with pytest.raises(RuntimeError, match="wanted a kernel downloaded below /nonexistent"):
        user._check_origin(torch)


def test_step_that_fails_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(demo.DemoError, match="a step failed"):
        demo._run(["-c", "raise SystemExit(3)"], {}, tmp_path)
    monkeypatch.setattr(demo, "demonstrate", lambda manifest: demo._run(["-c", "1/0"], {}, "/"))
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "error: a step failed, see above\n"


def test_kernel_without_a_demonstration_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toykernel.write(tmp_path)
    assert demo.main(["--root", str(tmp_path)]) == 1
    assert "toy-scale/tests/demo.py: wanted the kernel's demonstration" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 7])
def test_hub_serves_while_a_program_runs(tmp_path: Path, code: int) -> None:
    """`make publish-local`: what runs finds the Hub by the ecosystem's variables."""
    program = "import os, sys; from huggingface_hub import whoami; whoami(); sys.exit(CODE)"
    command = [sys.executable, "-c", program.replace("CODE", str(code))]
    arguments = ["run", "--root", str(tmp_path / "hub"), "--", *command]
    script = Path(hub.__file__)
    assert subprocess.run([sys.executable, script, *arguments]).returncode == code
