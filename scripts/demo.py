"""Show the whole way: build, publish to a Hub on loopback, load with `get_kernel`, compare.

Everything that it starts or writes, builds aside, is gone when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monorepo.localhub import LocalHub, Organisation
from monorepo.manifest import Kernel, Manifest, ManifestError

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent

# What would tell a process more than HF_ENDPOINT does, or turn it elsewhere.
HINTS = ("HF_", "HUGGING", "KERNELS_", "LOCAL_KERNELS", "TRANSFORMERS_", "PYTHON", "TRITON_INTER")


class DemoError(RuntimeError):
    """A step of the demonstration failed; what failed has said why."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 1 if anything is off, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = time.perf_counter()
    try:
        demonstrate(Manifest.load(arguments.root))
    except (ValueError, OSError, DemoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything was stopped and removed", file=sys.stderr)
        return 130
    print(f"\nall as it should be, after {time.perf_counter() - start:.0f} s")
    return 0


def demonstrate(manifest: Manifest) -> None:
    """Build and publish every kernel, then use them as somebody else would.

    Raises:
        ManifestError: The monorepo names no organisation, or a kernel has no demonstration.
        DemoError: A step failed.
    """
    if manifest.org is None:
        raise ManifestError(f"{manifest.root}/build.toml: wanted monorepo.org, to publish to")
    requests = [_request(kernel, manifest.org) for kernel in manifest.kernels]
    trusted = {manifest.org: Organisation(trusted=True)}
    with (
        tempfile.TemporaryDirectory(prefix="demo-") as folder,
        LocalHub(Path(folder, "hub"), organisations=trusted) as hub,
    ):
        away = Path(folder, "away")
        away.mkdir()
        hints = {"HF_ENDPOINT": hub.url, "HF_HOME": f"{folder}/publisher", "TMPDIR": folder}
        print(f"a Hub on loopback serves {hub.url}; building and publishing", flush=True)
        publish = [f"{SCRIPTS}/publish.py", "--allow-dirty", "--root", str(manifest.root)]
        _run(publish, {**hints, "HF_TOKEN": "hf_write"}, away)
        print(
            f"\n{manifest.org} is a trusted publisher on this Hub. On the real one, a publisher "
            "that is not listed needs\nget_kernel(..., trust_remote_code=True): nobody has "
            "vetted what such a kernel runs on your machine."
        )
        hints |= {"HF_HOME": f"{folder}/user", "PYTHONPATH": str(SCRIPTS)}
        _use(requests, hints, away)


def _request(kernel: Kernel, org: str) -> dict[str, object]:
    demo = kernel.path / "tests" / "demo.py"
    if not demo.is_file():
        raise ManifestError(f"{demo}: wanted the kernel's demonstration, got no such file")
    return {"repo_id": f"{org}/{kernel.name}", "version": kernel.version, "demo": str(demo)}


def _use(requests: Sequence[object], hints: Mapping[str, str], away: Path) -> None:
    """Load and compare in a fresh process; without a GPU, in the interpreter as well."""
    import torch

    user = ["-m", "monorepo.user", json.dumps(requests)]
    _run(user, hints, away)
    if not torch.cuda.is_available():
        print("\nno GPU here; the same Triton kernels in Triton's interpreter:")
        _run(user, {**hints, "TRITON_INTERPRET": "1"}, away)


def _run(command: Sequence[str], hints: Mapping[str, str], away: Path) -> None:
    """Run Python in a fresh process that knows only these hints, away from the repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(HINTS)}
    child = subprocess.Popen(
        [sys.executable, *command], env={**kept, **hints}, cwd=away, start_new_session=True
    )
    try:
        code = child.wait()
    except KeyboardInterrupt:
        _stop(child)
        raise
    if code != 0:
        raise DemoError("a step failed, see above")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a process and those it started: first by asking, so that they clean up."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    raise SystemExit(main())
