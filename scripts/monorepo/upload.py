"""Publishing: from a kernel's sources to a branch of a Hub repository that `get_kernel` loads.

`publish` compares a release with what the Hub holds and sends the difference: one commit for the
version branch, then one for the card on `main`. After that it downloads what the Hub now serves,
checks it byte for byte and against the digest, and calls it in a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

from monorepo.manifest import Kernel, Manifest
from monorepo.release import Branch, PublishError, Release, address, check_sources
from monorepo.remote import Commit, Hub

STEPS = ("try the build", "publish", "publish the card", "download", "load")

# Seconds that loading a kernel and its smoke call may take: a GPU's first compilation included.
SMOKE_TIMEOUT = 600

# Variables that make `kernels` look elsewhere than on the Hub, or leave the token out.
_DIVERTING = frozenset(
    "LOCAL_KERNELS KERNELS_CACHE HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_HUB_OFFLINE "
    "TRANSFORMERS_OFFLINE HF_HUB_DISABLE_IMPLICIT_TOKEN".split()
)

_LOAD_AND_SMOKE = """
import json, pathlib, runpy, sys
from kernels import get_kernel, get_loaded_kernels, get_local_kernel
source, ids, smoke = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if "path" in source:
    kernel = get_local_kernel(pathlib.Path(source["path"]))
else:
    kernel = get_kernel(**source)
loaded = next(k.metadata.id for k in get_loaded_kernels() if k.module is kernel)
if loaded not in ids:
    sys.exit(f"another build was loaded: {loaded}, wanted one of {', '.join(ids)}")
runpy.run_path(smoke)["smoke"](kernel)
"""


@dataclass(frozen=True)
class Result:
    """What was published of one kernel, and where.

    Attributes:
        repo_id: The repository.
        version: The commit with the build.
        card: The commit with the card; None if the kernel has no card.
        trusted: Whether `kernels` trusts the organisation without being told to.
        url: The version branch, on the endpoint in use.
    """

    repo_id: str
    version: Commit
    card: Commit | None
    trusted: bool
    url: str


def select(
    root: Path, names: Sequence[str], *, org: str | None = None, allow_dirty: bool = False
) -> list[Kernel]:
    """Return the kernels that shall be published, if their sources may be; no request is made.

    Args:
        root: The monorepo.
        names: The kernels; none means all.
        org: An organisation to use in place of the manifest's.
        allow_dirty: Whether sources that are not committed may be published.

    Raises:
        PublishError: If a kernel may not be published.
        ManifestError: If a manifest is wrong or there is no kernel of a name.
    """
    manifest = Manifest.load(root)
    kernels = [address(manifest, kernel, org) for kernel in manifest.select(names)]
    for kernel in kernels:
        check_sources(kernel, allow_dirty=allow_dirty)
    return kernels


def dry_run(release: Release) -> list[str]:
    """Return, as lines, the operations that would be sent to a repository that is new."""
    lines = [f"{release.repo_id}: dry run, nothing was sent"]
    for branch in filter(None, (release.version, release.card)):
        files = branch.plan({}, new=True).additions
        total = sum(map(len, files.values()))
        lines.append(f"  {branch.name}: {len(files)} to add, {total} bytes")
        lines += [f"    add {path} {len(data)} bytes" for path, data in files.items()]
    return lines


def verify_download(hub: Hub, release: Release, version: Commit, card: Commit | None) -> None:
    """Download what was published into an empty cache and compare it with what was built.

    Raises:
        PublishError: If it cannot be downloaded, or differs in a byte.
    """
    with tempfile.TemporaryDirectory() as cache:
        root = _download(hub, release.version, version, cache)
        for backend in release.kernel.backends:
            variant = root / "build" / f"torch-{backend}"
            digest = Metadata.read_from_file(variant / "metadata.json").digest
            try:
                digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
            except DigestValidationError as error:
                found = "; ".join(map(str, error.violations))
                raise PublishError(_not_ours(hub, version, f"{variant.name}: {found}")) from error
        if release.card is not None and card is not None:
            _download(hub, release.card, card, cache)


def load(release: Release, source: Mapping[str, object], endpoint: str) -> None:
    """Load the kernel in a fresh process that has an empty cache, and run its smoke call.

    Args:
        release: The kernel.
        source: The arguments of `get_kernel`, or {"path": <directory>} for a local build.
        endpoint: The Hub's URL.

    Raises:
        PublishError: If it does not load, is another build than the release's, or its smoke call
            fails.
    """
    with tempfile.TemporaryDirectory() as home:
        env = {name: value for name, value in os.environ.items() if name not in _DIVERTING}
        token = get_token()
        env |= {"HF_HOME": home, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        env |= {"HF_TOKEN": token} if token else {}
        arguments = [json.dumps(dict(source)), json.dumps(release.ids), str(release.smoke)]
        try:
            child = subprocess.run(
                [sys.executable, "-c", _LOAD_AND_SMOKE, *arguments],
                cwd=home,
                env=env,
                capture_output=True,
                text=True,
                timeout=SMOKE_TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise PublishError(f"{release.smoke} took over {SMOKE_TIMEOUT} s") from error
    if child.returncode != 0:
        said = child.stderr.strip() or child.stdout.strip()
        if token:
            said = said.replace(token, "***")
        where = source.get("path") or source["repo_id"]
        raise PublishError(f"{where} does not load or fails {release.smoke}:\n{said}")


def _download(hub: Hub, branch: Branch, commit: Commit, cache: str) -> Path:
    """Download our files of a commit, compare them with what was sent, return the root."""
    try:
        root = Path(
            hub.api.snapshot_download(
                hub.repo_id,
                repo_type="kernel",
                revision=commit.oid,
                cache_dir=cache,
                allow_patterns=["build/*", "benchmarks/*"] if commit.branch != "main" else None,
            )
        )
    except (httpx2.HTTPError, OSError) as error:
        raise PublishError(
            f"{hub.repo_id} was published ({hub.url(commit.oid)}) but cannot be downloaded "
            f"again: {error}"
        ) from error
    for path, data in branch.files.items():
        if not (root / path).is_file():
            raise PublishError(_not_ours(hub, commit, f"{path} is missing"))
        if (root / path).read_bytes() != data:
            raise PublishError(_not_ours(hub, commit, f"{path} differs"))
    return root


def _not_ours(hub: Hub, commit: Commit, what: str) -> str:
    return f"{hub.url(commit.oid)} does not serve what was built: {what}"


def publish(
    api: HfApi,
    release: Release,
    *,
    private: bool = False,
    create_pr: bool = False,
    step: Callable[[str], None] = lambda text: None,
) -> Result:
    """Publish one kernel, and check what the Hub then serves.

    The build comes before the card: the card names a version, so that must be there first.

    Args:
        api: The client, as `log_in` returns it.
        release: The kernel, just built.
        private: Whether a repository that has to be created is private.
        create_pr: Whether to open pull requests in place of committing.
        step: Called with the text of each step when it begins.

    Raises:
        PublishError: If it cannot be published, or what the Hub serves is not what was built.
    """
    hub = Hub(api, release.repo_id)
    name, version = release.kernel.name, release.version.name
    message = f"Publish {name} {version} ({release.identity.unique_id})"
    send = hub.propose if create_pr else hub.update

    step(f"{name}: {STEPS[0]}")
    load(release, {"path": str(release.build_dir)}, api.endpoint)
    step(f"{name}: {STEPS[1]}")
    if not create_pr:
        hub.create(private=private)
    build_commit = send(release.version, message)
    step(f"{name}: {STEPS[2]}")
    card_commit = send(release.card, message) if release.card else None
    step(f"{name}: {STEPS[3]}")
    verify_download(hub, release, build_commit, card_commit)
    step(f"{name}: {STEPS[4]}")
    source: dict[str, object] = {
        "repo_id": release.repo_id,
        # Built by us a moment ago; other publishers' kernels that it needs are still checked.
        "trust_remote_code": [release.repo_id],
    }
    if build_commit.pull_request:
        source["revision"] = build_commit.oid
    else:
        source["version"] = release.kernel.version
    load(release, source, api.endpoint)
    return Result(release.repo_id, build_commit, card_commit, hub.trusted(), hub.url(version))
