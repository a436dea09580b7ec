"""Publishing: from a kernel's sources to a branch of a Hub repository that `get_kernel` loads.

Nothing that lies around is sent. `publish` builds the kernels into a directory of its own, reads
the result into memory, compares it with what the Hub holds and sends the difference: one commit
for the version branch, then one for the card on `main`. After that it downloads what the Hub now
serves, checks it byte for byte and against the digest, and calls it in a fresh process.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TypeVar

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    constants,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata

from monorepo import artifact, checks
from monorepo.manifest import Kernel, Manifest

T = TypeVar("T")

# The Hub takes larger commits badly, and kernel-builder splits here too. A reader can see a state
# between two commits, so everything below this size, hence every real kernel, goes in one.
MAX_OPERATIONS = 1000

# Seconds before each further attempt when the Hub fails or another publisher was faster.
WAITS = (1.0, 2.0, 4.0, 8.0)

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


class PublishError(RuntimeError):
    """A kernel cannot be published, or what was published is not what was built."""


@dataclass(frozen=True)
class Plan:
    """The difference between what a branch holds and what it shall hold.

    Attributes:
        deletions: Paths to delete.
        additions: Content of each file to add or replace, by path.
    """

    deletions: tuple[str, ...]
    additions: Mapping[str, bytes]

    def batches(self) -> Iterator[list[CommitOperationAdd | CommitOperationDelete]]:
        """Yield the operations of each commit: one, unless there are more than a commit takes."""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(path, is_folder=False) for path in self.deletions
        ]
        operations += [CommitOperationAdd(path, data) for path, data in self.additions.items()]
        for start in range(0, len(operations), MAX_OPERATIONS):
            yield operations[start : start + MAX_OPERATIONS]


@dataclass(frozen=True)
class Branch:
    """What a branch shall hold: its name, and the content of each of our files by path."""

    name: str
    files: Mapping[str, bytes]

    def plan(self, remote: Mapping[str, RepoFile], *, new: bool) -> Plan:
        """Return what makes a branch that holds `remote` hold our files.

        A new branch starts as a copy of `main`, so all it has below our directories goes. On a
        branch in use, other variants and other files stay: only what a former publication of the
        same variants and benchmarks left behind is deleted.

        Args:
            remote: What the branch holds, by path.
            new: Whether nothing was ever committed to the branch itself.
        """
        variants = {path.parts[:2] for path in map(PurePosixPath, self.files)}
        directories = {variant[0] for variant in variants}

        def stale(path: PurePosixPath) -> bool:
            if str(path) in self.files:
                return False
            if path.parts[0] == "build":
                return "build" in directories and (new or path.parts[:2] in variants)
            if path.parts[0] == "benchmarks":
                return "benchmarks" in directories and (new or fnmatch(path.name, "benchmark*.py"))
            return False

        return Plan(
            deletions=tuple(sorted(path for path in remote if stale(PurePosixPath(path)))),
            additions={
                path: data
                for path, data in sorted(self.files.items())
                if path not in remote or not _holds(remote[path], data)
            },
        )


@dataclass(frozen=True)
class Release:
    """One kernel as it was just built, in memory: exactly what is sent.

    Attributes:
        kernel: The kernel, with the repository id it is published under.
        identity: The identity of its sources.
        build_dir: Where it was built.
        ids: The metadata id of each variant.
        version: The version branch.
        card: `main`, with the card as README.md; None if the kernel has no card.
    """

    kernel: Kernel
    identity: artifact.Identity
    build_dir: Path
    ids: tuple[str, ...]
    version: Branch
    card: Branch | None

    @property
    def repo_id(self) -> str:
        """The repository it is published under."""
        return str(self.kernel.repo_id)

    @property
    def smoke(self) -> Path:
        """The file with the kernel's smoke call."""
        return _smoke_file(self.kernel)


@dataclass(frozen=True)
class Commit:
    """The commit of a branch that holds what was to be published.

    Attributes:
        branch: The branch's name.
        oid: The commit, 40 hex digits.
        changed: False if the branch held it all before, and nothing was sent.
        pull_request: URL of the pull request, if the commit is in one.
    """

    branch: str
    oid: str
    changed: bool
    pull_request: str | None = None


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


# --- before anything is sent ---------------------------------------------------------------------


def address(manifest: Manifest, kernel: Kernel, org: str | None) -> Kernel:
    """Return the kernel with the repository id that it is published under.

    Args:
        manifest: The monorepo's manifest, which names the organisation.
        kernel: The kernel.
        org: An organisation to use in place of the manifest's and the kernel's.

    Raises:
        PublishError: If no organisation is named.
    """
    owner = org or manifest.org
    if not owner:
        raise PublishError(
            f"{manifest.root / 'build.toml'} names no organisation to publish to: "
            "set `org` under [monorepo] or pass --org; nothing was built or sent"
        )
    return dataclasses.replace(kernel, repo_id=f"{owner}/{kernel.name}")


def check_sources(kernel: Kernel, *, allow_dirty: bool) -> artifact.Identity:
    """Return the identity of a kernel's sources if they may be published.

    Raises:
        PublishError: If the kernel has no smoke call, publishes through a link, is not committed,
            or its commit is unknown (outside git or in a shallow clone); the last two can be
            allowed.
    """
    if not _has_smoke(_smoke_file(kernel)):
        raise PublishError(
            f"{_smoke_file(kernel)} with a function smoke(kernel) is missing: it is the call that "
            "shows that the published kernel works"
        )
    for path in (kernel.path / "CARD.md", *(kernel.path / "benchmarks").rglob("*")):
        if path.is_symlink():
            raise PublishError(f"{path} is a link: what it leads to may be no part of the kernel")
    identity = artifact.identify(kernel)
    if allow_dirty:
        return identity
    if identity.commit is None:
        raise PublishError(
            f"{kernel.path}: the commit of the sources is unknown, so the build would carry no "
            "provenance: publish from a full git clone (git fetch --unshallow), or pass "
            "--allow-dirty"
        )
    changed = _uncommitted(kernel)
    if identity.dirty or changed:
        raise PublishError(
            f"{kernel.path} has uncommitted changes{changed}: commit them, or pass --allow-dirty"
        )
    return identity


def build(root: Path, kernel: Kernel, out: Path, *, allow_dirty: bool) -> Release:
    """Build a kernel below `out`, check it and read it into memory.

    Raises:
        PublishError: If the build does not match its sources or holds anything but plain files.
        CheckError: If the build fails its checks.
    """
    build_dir = artifact.build(root, kernel, out=out, check=checks.check_build)
    # Again: the build copies shared/ into the kernel, and that can change a committed file.
    identity = check_sources(kernel, allow_dirty=allow_dirty)
    files = _read(build_dir)
    return Release(
        kernel=kernel,
        identity=identity,
        build_dir=build_dir,
        ids=_check_variants(kernel, identity, build_dir),
        version=Branch(f"v{kernel.version}", _version_files(kernel, files)),
        card=Branch("main", {"README.md": files["CARD.md"]}) if "CARD.md" in files else None,
    )


def _smoke_file(kernel: Kernel) -> Path:
    return kernel.path / "tests" / "smoke.py"


def _has_smoke(file: Path) -> bool:
    try:
        body = ast.parse(file.read_bytes()).body
    except FileNotFoundError:
        return False
    except (SyntaxError, ValueError) as error:
        raise PublishError(f"{file}: wanted Python source, got {error}") from None
    return any(isinstance(node, ast.FunctionDef) and node.name == "smoke" for node in body)


def _uncommitted(kernel: Kernel) -> str:
    """Name the uncommitted files that are published but are no part of a build's identity."""
    published = ("CARD.md", ":(glob)benchmarks/benchmark*.py")
    status = artifact._git(
        kernel.path, "status", "--porcelain", "--ignored", "-uall", "--", *published
    )
    names = [line[3:] for line in status.stdout.splitlines()]
    return f" ({', '.join(names)})" if names else ""


def _read(build_dir: Path) -> dict[str, bytes]:
    """Return the content of each file below a directory by its path with `/`.

    Raises:
        PublishError: If there is anything but directories and plain files: a link could bring in
            a file from outside the build.
    """
    files = {}
    for path in sorted(build_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise PublishError(f"{path} is a link or no plain file: it cannot be published")
        if path.is_file():
            files[path.relative_to(build_dir).as_posix()] = path.read_bytes()
    return files


def _version_files(kernel: Kernel, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of the version branch by their path there."""
    variants = {f"torch-{backend}" for backend in kernel.backends}
    chosen = {}
    for path, data in files.items():
        top, _, rest = path.partition("/")
        if top in variants:
            chosen[f"build/{path}"] = data
        elif top == "benchmarks" and fnmatch(rest, "benchmark*.py") and "/" not in rest:
            chosen[path] = data
    return chosen


def _check_variants(
    kernel: Kernel, identity: artifact.Identity, build_dir: Path
) -> tuple[str, ...]:
    """Check that a build is what build.toml says, and return the id of each variant.

    The version branch follows from build.toml alone; a variant that says another version would be
    published where nobody who asks for that version looks.
    """
    built = {path.parent.name for path in build_dir.glob("*/metadata.json")}
    wanted = {f"torch-{backend}" for backend in kernel.backends}
    if built != wanted:
        raise PublishError(f"{build_dir} holds {sorted(built)}, wanted {sorted(wanted)}")
    ids = []
    for variant in sorted(wanted):
        metadata = Metadata.read_from_file(build_dir / variant / "metadata.json")
        if metadata.version != kernel.version:
            raise PublishError(
                f"{build_dir / variant} is of version {metadata.version}, "
                f"{kernel.path / 'build.toml'} says {kernel.version}"
            )
        backend = variant.removeprefix("torch-")
        wanted_id = f"_{kernel.module}_{backend}_{identity.unique_id}"
        if metadata.id != wanted_id:
            raise PublishError(
                f"{build_dir / variant} has the id {metadata.id}, its sources {wanted_id}: "
                "they changed during the build"
            )
        ids.append(metadata.id)
    return tuple(ids)


# --- the Hub -------------------------------------------------------------------------------------


def endpoint_in_use(endpoint: str | None = None) -> str:
    """Return the Hub's URL: the one given, else HF_ENDPOINT, else the client library's."""
    # Read now: the library reads the variable once, when it is imported.
    return (endpoint or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


class Hub:
    """One repository on a Hub, and the way to make its branches hold what they shall hold.

    Each step reads what is there, sends the difference on condition that nothing changed in
    between, and can be repeated: after an error that may pass, an answer that got lost or a
    commit of somebody else, it simply starts over from what the Hub then holds.
    """

    def __init__(self, api: HfApi, repo_id: str) -> None:
        """Use `api`, whose endpoint and token decide which Hub and who, on one repository."""
        self.api = api
        self.repo_id = repo_id
        self._sent: set[str] = set()

    def create(self, *, private: bool) -> None:
        """Create the repository if it is missing.

        Raises:
            PublishError: If it may not be created, a model of the same name is in its place, or
                it is public and shall be private.
        """
        self._retry(f"create {self.repo_id}", lambda: self._create(private))

    def update(self, branch: Branch, message: str) -> Commit:
        """Make a branch hold what it shall hold; create it if it is missing.

        Raises:
            PublishError: If the Hub refuses, keeps failing, or others keep committing.
        """
        doing = f"publish {branch.name} of {self.repo_id}"
        return self._retry(doing, lambda: self._update(branch, message))

    def propose(self, branch: Branch, message: str) -> Commit:
        """Open a pull request that makes a branch, which must exist, hold what it shall hold.

        Raises:
            PublishError: As `update`, and if the branch does not exist.
        """
        doing = f"open a pull request against {branch.name} of {self.repo_id}"
        known = self._retry(doing, self._pull_requests)
        return self._retry(doing, lambda: self._propose(branch, message, set(known)))

    def trusted(self) -> bool:
        """Return whether `kernels` loads from the owner without `trust_remote_code`."""
        try:
            overview = self.api.get_organization_overview(self.repo_id.partition("/")[0])
        except httpx2.HTTPError:
            return False  # a user, for example: `kernels` asks the same and concludes the same
        return bool(getattr(overview, "trustedKernelPublisher", False))

    def url(self, revision: str) -> str:
        """Return the page of a revision."""
        return f"{self.api.endpoint}/kernels/{self.repo_id}/tree/{revision}"

    def _create(self, private: bool) -> None:
        try:
            info = self.api.repo_info(self.repo_id, repo_type="kernel")
        except RepositoryNotFoundError:
            if self.api.repo_exists(self.repo_id, repo_type="model"):
                raise PublishError(
                    f"{self.repo_id} is a model repository on {self.api.endpoint}; `get_kernel` "
                    "reads only repositories of type kernel: rename or delete the model, or "
                    "publish under another name"
                ) from None
            self.api.create_repo(
                self.repo_id, repo_type="kernel", private=private or None, exist_ok=True
            )
            return
        if private and getattr(info, "private", None) is False:
            raise PublishError(
                f"{self.repo_id} exists on {self.api.endpoint} and is public: --private counts "
                "when a repository is created; change its visibility there first"
            )

    def _update(self, branch: Branch, message: str) -> Commit:
        main = self._head("main")
        head = self._head(branch.name)
        if head is None:
            self.api.create_branch(
                self.repo_id, branch=branch.name, repo_type="kernel", exist_ok=True
            )
            head = self._head(branch.name)
        # Not whether we created it just now: whoever did, us before a crash included, may not
        # have come to commit.
        new = branch.name != "main" and head == main
        return self._send(branch, message, branch.name, head, new=new)

    def _propose(self, branch: Branch, message: str, known: set[str]) -> Commit:
        head = self._head(branch.name)
        if head is None:
            raise PublishError(
                f"{self.repo_id} has no branch {branch.name} on {self.api.endpoint}, and a pull "
                "request cannot create it: somebody with write access has to, for instance by "
                "publishing without --create-pr"
            )
        if branch.name in self._sent:
            # A pull request of ours may have been opened although the answer was an error.
            for ref, oid in self._pull_requests().items():
                if ref not in known and self._holds(branch, oid):
                    page = f"{self.api.endpoint}/kernels/{self.repo_id}/discussions/"
                    return Commit(branch.name, oid, True, page + ref.rpartition("/")[2])
        new = branch.name != "main" and head == self._head("main")
        return self._send(branch, message, branch.name, head, new=new, create_pr=True)

    def _send(
        self,
        branch: Branch,
        message: str,
        revision: str,
        head: str | None,
        *,
        new: bool,
        create_pr: bool = False,
    ) -> Commit:
        if head is None:
            raise PublishError(f"{self.repo_id}: {revision} was created and then deleted")
        pull_request = None
        changed = branch.name in self._sent
        for operations in branch.plan(self._files(head), new=new).batches():
            self._sent.add(branch.name)
            info = self.api.create_commit(
                self.repo_id,
                operations,
                commit_message=message,
                repo_type="kernel",
                revision=revision,
                parent_commit=head,
                create_pr=create_pr,
            )
            head, changed = info.oid, True
            if create_pr:  # the first batch opens it, the others follow into it
                revision, create_pr, pull_request = str(info.pr_revision), False, info.pr_url
        return Commit(branch.name, head, changed, pull_request)

    def _head(self, revision: str) -> str | None:
        """Return the commit of a revision, None if there is no such revision."""
        try:
            return self.api.repo_info(self.repo_id, repo_type="kernel", revision=revision).sha
        except RevisionNotFoundError:
            return None

    def _files(self, commit: str) -> dict[str, RepoFile]:
        entries = self.api.list_repo_tree(
            self.repo_id, repo_type="kernel", revision=commit, recursive=True
        )
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _holds(self, branch: Branch, commit: str) -> bool:
        plan = branch.plan(self._files(commit), new=False)
        return not plan.additions and not plan.deletions

    def _pull_requests(self) -> dict[str, str]:
        """Return the head commit of each pull request by its ref."""
        refs = self.api.list_repo_refs(self.repo_id, repo_type="kernel", include_pull_requests=True)
        return {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}

    def _retry(self, doing: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds, or fails for a reason that does not pass by itself."""
        for wait in (*WAITS, None):
            try:
                return attempt()
            # The client parses some answers before it looks at their status: a gateway's error
            # page then shows as an error of JSON.
            except (httpx2.HTTPError, json.JSONDecodeError) as error:
                if wait is None or not _may_pass(error):
                    raise PublishError(self._explain(doing, error)) from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _explain(self, doing: str, error: Exception) -> str:
        """Say what could not be done and what to do about it."""
        owner = self.repo_id.partition("/")[0]
        hub = self.api.endpoint
        again = f"it failed {len(WAITS) + 1} times and nothing is half done: run it again later"
        if not isinstance(error, HfHubHTTPError):
            return f"cannot {doing} on {hub}: {type(error).__name__}: {error}; run it again later"
        status = error.response.status_code
        reason = " ".join((error.server_message or str(error)).split()).rstrip(".")
        said = f"cannot {doing} on {hub}: {status}: {reason}"
        if status == 401:
            return f"{said}. {_token_advice(hub)}"
        if status == 403:
            said += f". The token needs the role write, and its owner the right to write to {owner}"
        if status == 403 and doing.startswith("create"):
            return (
                f"{said}. A new publisher of kernels also needs approval: open a discussion on "
                f"{hub}/kernels-community that shows a working build and says where its source "
                "is, what it is for and how it compares in a benchmark"
            )
        if status == 403 and doing.startswith("publish"):
            return f"{said}; who lacks that right can propose the change with --create-pr"
        if status == 404 and doing.startswith("open"):
            return (
                f"{said}. The repository does not exist or the token does not see it; "
                "publishing without --create-pr creates it"
            )
        if status == 412:
            return (
                f"{said}. Others kept committing during all {len(WAITS) + 1} attempts: "
                "run it again when they are done"
            )
        return f"{said}; {again}" if _may_pass(error) else said


def _holds(remote: RepoFile, data: bytes) -> bool:
    """Return whether a file on the Hub has this content."""
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == hashlib.sha256(data).hexdigest())
    header = b"blob %d\0" % len(data)
    return bool(remote.blob_id == hashlib.sha1(header + data).hexdigest())


def _may_pass(error: Exception) -> bool:
    """Return whether the same attempt, from what the Hub then holds, can succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 412, 429) or error.response.status_code >= 500
    return isinstance(error, (httpx2.TransportError, json.JSONDecodeError))


def _token_advice(hub: str) -> str:
    return f"Set HF_TOKEN to a token with the role write, from {hub}/settings/tokens"


# --- after it was sent ---------------------------------------------------------------------------


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


# --- the whole way -------------------------------------------------------------------------------


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


def log_in(endpoint: str) -> HfApi:
    """Return the Hub's client for the user's token.

    Raises:
        PublishError: If there is no token or the Hub does not accept it.
    """
    token = get_token()
    if token is None:
        raise PublishError(f"no token for {endpoint}. {_token_advice(endpoint)}")
    api = HfApi(endpoint=endpoint, token=token, library_name="roofline-kernels")
    try:
        api.whoami()
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            advice = _token_advice(endpoint)
            raise PublishError(f"{endpoint} does not accept the token (401). {advice}") from error
        raise PublishError(f"{endpoint} answers {status} to a log-in: run it again") from error
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        raise PublishError(f"{endpoint} cannot be reached: {error}") from error
    return api


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
