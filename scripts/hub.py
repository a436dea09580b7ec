"""Serves a Hugging Face Hub on loopback, to publish and load where no Hub can be reached."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from monorepo.localhub import LocalHub


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="print the hub's URL and serve until interrupted")
    serve.add_argument("--port", type=int, default=0, help="TCP port (default: any free one)")
    serve.add_argument(
        "--root", type=Path, default=Path(".local-hub"), help="where it keeps its data"
    )
    arguments = parser.parse_args(argv)

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with LocalHub(arguments.root, arguments.port) as hub:
            print(hub.url, flush=True)
            stop.wait()
    except (OSError, OverflowError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
