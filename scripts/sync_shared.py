"""Copy shared/ into each kernel's `_shared/` package, or check that the copies are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monorepo.manifest import Manifest
from monorepo.sync import sync

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 1 if it fails, or with --check if a copy differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    arguments = parser.parse_args(argv)
    try:
        kernels = Manifest.load(ROOT).kernels
        files = [f for k in kernels for f in sync(ROOT, k, check=arguments.check)]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for file in files:
        done = (
            "differs from shared/:" if arguments.check else "wrote" if file.exists() else "removed"
        )
        print(done, file.relative_to(ROOT))
    if files and arguments.check:
        print("error: run scripts/sync_shared.py", file=sys.stderr)
    return int(bool(files and arguments.check))


if __name__ == "__main__":
    raise SystemExit(main())
