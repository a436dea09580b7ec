"""Build kernels for the Hub, one variant a backend, and check what was built."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from monorepo import artifact, checks
from monorepo.manifest import Kernel, Manifest

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 1 if a kernel cannot be built or breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", nargs="*", help="kernels to build (default: all)")
    parser.add_argument(
        "--backend",
        nargs="+",
        action="extend",
        help="variants to build (default: all of a kernel's); the build then holds no others",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="build into DIR/KERNEL (default: KERNEL/build)"
    )
    arguments = parser.parse_args(argv)
    try:
        manifest = Manifest.load(ROOT)
        checks.check_together(ROOT, manifest.kernels)
        for kernel in manifest.select(arguments.kernel):
            print(_build(kernel, arguments.backend, arguments.out), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _build(kernel: Kernel, backends: list[str] | None, out: Path | None) -> str:
    """Build one kernel and describe the build in a line."""
    start = time.perf_counter()
    built = artifact.build(ROOT, kernel, backends=backends, out=out, check=checks.check)
    variants = sorted(entry.name for entry in built.glob("torch-*"))
    files = sum(file.is_file() for file in built.rglob("*"))
    return (
        f"{kernel.name} {artifact.identify(kernel).unique_id}: {', '.join(variants)}; "
        f"{files} files, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
