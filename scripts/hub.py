"""Serves a Hugging Face Hub on loopback, to publish and load where no Hub can be reached."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
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
    run = commands.add_parser("run", help="serve while a command runs, which may publish")
    run.add_argument("program", nargs="+", help="after --: what runs, with HF_ENDPOINT, HF_TOKEN")
    for command in (serve, run):
        command.add_argument(
            "--root", type=Path, default=Path(".local-hub"), help="where it keeps its data"
        )
    arguments = parser.parse_args(argv)

    try:
        if arguments.command == "run":
            return _run(arguments.root, arguments.program)
        _serve(arguments.root, arguments.port)
    except (OSError, OverflowError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _serve(root: Path, port: int) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with LocalHub(root, port) as hub:
        print(hub.url, flush=True)
        stop.wait()


def _run(root: Path, program: list[str]) -> int:
    """Returns the exit code of the program, which is killed if this is interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with LocalHub(root) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_write"}
        return subprocess.run(program, env=environment).returncode


if __name__ == "__main__":
    raise SystemExit(main())
