"""Build kernels and publish them to a Hub; see `--help`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm

from monorepo.release import PublishError, build
from monorepo.remote import Commit, endpoint_in_use, log_in
from monorepo.upload import STEPS, Result, dry_run, publish, select

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    """Publish the kernels named on the command line; return the exit code."""
    arguments = _parser().parse_args(argv)
    disable_progress_bars()  # the client library's: one bar is enough
    try:
        _run(arguments)
    except (ValueError, PublishError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Build kernels, publish each to branch v<version> of its Hub repository and "
        "its card to main, then download, verify and run what the Hub serves. The Hub is "
        "HF_ENDPOINT, the token HF_TOKEN or that of `hf auth login`.",
    )
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="default: all")
    parser.add_argument("--org", help="publish to this organisation, not the manifest's")
    parser.add_argument("--endpoint", help="the Hub's URL, in place of HF_ENDPOINT")
    parser.add_argument(
        "--dry-run", action="store_true", help="build and print what a new repository would get"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--private", action="store_true", help="a repository that is created is private"
    )
    how.add_argument(
        "--create-pr", action="store_true", help="open pull requests in place of committing"
    )
    parser.add_argument(
        "--allow-dirty", action="store_true", help="publish sources that are not committed"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    dirty = arguments.allow_dirty
    kernels = select(arguments.root, arguments.kernels, org=arguments.org, allow_dirty=dirty)
    # Before the build: a token that is not accepted need not wait for it.
    api = None if arguments.dry_run else log_in(endpoint_in_use(arguments.endpoint))
    steps = len(kernels) * (1 if api is None else 1 + len(STEPS))
    # disable=None: no bar where stderr is no terminal.
    bar = tqdm(
        total=steps, disable=None, leave=False, bar_format="{desc} {n_fmt}/{total_fmt}|{bar}|"
    )
    with tempfile.TemporaryDirectory() as out, bar:

        def step(text: str) -> None:
            bar.n += 1
            bar.set_description_str(text)

        releases = []
        for kernel in kernels:
            step(f"{kernel.name}: build")
            releases.append(
                build(arguments.root, kernel, Path(out, kernel.name), allow_dirty=dirty)
            )
        if api is None:
            for release in releases:
                print("\n".join(dry_run(release)))
            return
        for release in releases:
            result = publish(
                api,
                release,
                private=arguments.private,
                create_pr=arguments.create_pr,
                step=step,
            )
            bar.clear()
            print("\n".join(_lines(result, release.kernel.version)), flush=True)


def _lines(result: Result, version: int) -> list[str]:
    trust = "" if result.trusted else ", trust_remote_code=True"
    lines = [_line(result.repo_id, result.version)]
    if result.card:
        lines.append(_line(result.repo_id, result.card))
    lines.append("verified: downloaded again, digests agree, loads and passes its smoke call")
    lines.append(f"  {result.url}")
    if not result.version.pull_request:
        lines.append(f'  get_kernel("{result.repo_id}", version={version}{trust})')
    return lines


def _line(repo_id: str, commit: Commit) -> str:
    if commit.pull_request:
        done = f"proposed in {commit.pull_request}"
    else:
        done = "published" if commit.changed else "unchanged, nothing was published"
    return f"{repo_id} {commit.branch} {commit.oid}: {done}"


if __name__ == "__main__":
    raise SystemExit(main())
