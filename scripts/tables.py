"""Draw the measured tables of README.md and the cards from docs/results.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from monorepo.manifest import Manifest
from monorepo.results import update

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Write the tables; with --check only say which differ, and exit 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if one differs"
    )
    arguments = parser.parse_args(argv)
    different = update(Manifest.load(ROOT), check=arguments.check)
    for path in different:
        print(path.relative_to(ROOT))
    if different and arguments.check:
        print("error: these tables differ from docs/results.json; run make tables", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
