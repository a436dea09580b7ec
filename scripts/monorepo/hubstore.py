"""Storage of a local Hub: repositories, commits and contents as plain files.

Layout below the root, where kind is "kernels" or "models":
    blobs/<sha256>                       contents, shared by all repositories
    repos/<kind>/<id>/commits/<id>.json  commits, never changed
    repos/<kind>/<id>/repo.json          visibility and references, the only file that changes

Every file appears whole, by a rename, and whatever a reference leads to is on disk before the
reference is. So a process killed at any point leaves exactly the state it last acknowledged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

_REPO_ID = re.compile(r"(?!.*(\.\.|--|\.git$))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_BRANCH = re.compile(r"(?!refs/|.*(\.\.|//|\.lock$|/$))[\w][\w./+-]{0,200}", re.ASCII)
_ATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in (
        "bin",
        "gz",
        "npy",
        "npz",
        "onnx",
        "pkl",
        "pt",
        "pth",
        "safetensors",
        "so",
        "tar",
        "zip",
    )
)


class HubError(Exception):
    """A request that the Hub refuses, with what the reply says.

    Args:
        status: HTTP status code.
        message: One line for the client's user.
        code: The Hub's own error code, such as "RepoNotFound".
        headers: Further headers of the reply.
    """

    def __init__(
        self, status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """See the class."""
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


@dataclass(frozen=True)
class File:
    """A file of a commit: where its content is and what a git client would call it."""

    sha256: str
    size: int  # bytes
    oid: str  # git blob id, of the pointer where lfs
    lfs: bool


@dataclass(frozen=True)
class Change:
    """One step of a commit: sets a path, or deletes it where `file` is None.

    A deleted path that ends in "/" is a folder and goes with all that is below it.
    """

    path: str
    file: File | None


@dataclass(frozen=True)
class Commit:
    """A commit and the whole tree it stands for. The id follows from all fields but the date."""

    id: str
    parent: str | None
    title: str
    message: str
    author: str
    date: str
    files: dict[str, File]

    def described(self) -> dict[str, str]:
        """Id, title, message and date."""
        return {"id": self.id, "title": self.title, "message": self.message, "date": self.date}


@dataclass(frozen=True)
class Repo:
    """A repository as of one moment. `refs` maps full names (refs/heads/main) to commit ids."""

    kind: str
    id: str
    private: bool
    created: str
    refs: dict[str, str]

    def ref(self, revision: str) -> str | None:
        """The full name of a branch, tag or reference, or None if there is none of that name."""
        names = (revision, f"refs/heads/{revision}", f"refs/tags/{revision}")
        return next((name for name in names if name in self.refs), None)


class Store:
    """All repositories below one directory, which one process at a time may hold.

    Args:
        root: The directory, made if missing.

    Raises:
        ValueError: Another hub holds the directory.
    """

    def __init__(self, root: Path) -> None:
        """See the class."""
        self.root = root
        self._locks: dict[str, threading.Lock] = {}
        for name in ("blobs", "repos", "tmp"):
            _make_directory(root / name)
        self._held = open(root / "lock", "w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held.close()
            raise ValueError(
                f"{root}: wanted a directory of its own, it is in use by another hub"
            ) from None
        for unfinished in (root / "tmp").iterdir():
            unfinished.unlink()

    def close(self) -> None:
        """Lets go of the directory."""
        self._held.close()

    def blob(self, sha256: str) -> Path:
        """Where the content with this digest is, or would be."""
        return self.root / "blobs" / sha256

    def add_blob(self, content: bytes, *, lfs: bool = False) -> File:
        """Stores a content and returns its file entry."""
        sha256 = hashlib.sha256(content).hexdigest()
        if not self.blob(sha256).exists():
            self._write(self.blob(sha256), content)
        pointer = lfs_pointer(sha256, len(content)) if lfs else content
        return File(sha256, len(content), _git_oid(pointer), lfs)

    def lfs_file(self, sha256: str) -> File | None:
        """The entry of a content uploaded before, or None if it never was."""
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not self.blob(sha256).exists():
            return None
        size = self.blob(sha256).stat().st_size
        return File(sha256, size, _git_oid(lfs_pointer(sha256, size)), True)

    def repo(self, kind: str, repo_id: str) -> Repo | None:
        """The repository, or None if there is none of that kind and id."""
        if not _REPO_ID.fullmatch(repo_id):
            return None
        try:
            fields = json.loads((self._directory(kind, repo_id) / "repo.json").read_bytes())
        except FileNotFoundError:
            return None
        return Repo(kind, repo_id, **fields)

    def commit(self, repo: Repo, revision: str) -> Commit:
        """The commit a branch, tag, reference or commit id leads to.

        Raises:
            HubError: 404, the repository has no such revision.
        """
        ref = repo.ref(revision)
        oid = repo.refs[ref] if ref else revision
        path = self._directory(repo.kind, repo.id) / "commits" / f"{oid}.json"
        if not re.fullmatch("[0-9a-f]{40}", oid) or not path.exists():
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        fields = json.loads(path.read_bytes())
        files = {name: File(**entry) for name, entry in fields.pop("files").items()}
        return Commit(oid, files=files, **fields)

    def history(self, repo: Repo, revision: str) -> list[Commit]:
        """A revision's commits, newest first."""
        commits = [self.commit(repo, revision)]
        while commits[-1].parent:
            commits.append(self.commit(repo, commits[-1].parent))
        return commits

    def create_repo(self, kind: str, repo_id: str, *, private: bool, author: str) -> bool:
        """Makes a repository with one commit on main; False if it exists already.

        Raises:
            HubError: 400, the id is not a valid one.
        """
        if not _REPO_ID.fullmatch(repo_id):
            raise HubError(400, f"Invalid repository name: {repo_id}")
        with self._lock(kind, repo_id):
            if self.repo(kind, repo_id):
                return False
            _make_directory(self._directory(kind, repo_id) / "commits")
            repo = Repo(kind, repo_id, private, _now(), {})
            files = {".gitattributes": self.add_blob(_ATTRIBUTES.encode())}
            oid = self._add_commit(repo, None, "initial commit", "", author, files)
            self._save(replace(repo, refs={"refs/heads/main": oid}))
        return True

    def create_ref(self, repo: Repo, ref: str, start: str) -> None:
        """Makes a branch or tag (full name) at a revision.

        Raises:
            HubError: 400 for a bad name, 404 for an unknown start, 409 if the reference exists.
        """
        name = ref.split("/", 2)[2]
        if not _BRANCH.fullmatch(name):
            raise HubError(400, f"Invalid reference name: {name}")
        with self._lock(repo.kind, repo.id):
            repo = self._reread(repo)
            if ref in repo.refs:
                raise HubError(409, f"Reference already exists: {ref}")
            self._save(replace(repo, refs={**repo.refs, ref: self.commit(repo, start).id}))

    def add_commit(
        self,
        repo: Repo,
        revision: str,
        changes: Iterable[Change],
        *,
        title: str,
        message: str,
        author: str,
        parent: str = "",
        pull_request: bool = False,
    ) -> tuple[Commit, str]:
        """Commits on a branch or an open pull request, or opens one.

        Args:
            repo: The repository.
            revision: Branch or refs/pr/N to commit to; the base where a pull request is opened.
            changes: The steps, in order.
            title: First line of the commit message.
            message: The rest of it.
            author: Name of the user.
            parent: Commit id, or its beginning, that the head must still have; "" for any.
            pull_request: Whether to open a new pull request.

        Returns:
            The commit, and the full name of the reference that now leads to it.

        Raises:
            HubError: 400, 404 or 412; nothing was changed.
        """
        with self._lock(repo.kind, repo.id):
            repo = self._reread(repo)
            head = self.commit(repo, revision)
            ref = _next_pull_request(repo) if pull_request else repo.ref(revision)
            if ref is None or ref.startswith("refs/tags/"):
                raise HubError(400, f"Commits go to a branch or a pull request, not to {revision}")
            if not head.id.startswith(parent.lower()):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = _apply(head.files, changes)
            oid = self._add_commit(repo, head.id, title, message, author, files)
            self._save(replace(repo, refs={**repo.refs, ref: oid}))
            return self.commit(repo, oid), ref

    def _add_commit(
        self,
        repo: Repo,
        parent: str | None,
        title: str,
        message: str,
        author: str,
        files: dict[str, File],
    ) -> str:
        fields = {"parent": parent, "title": title, "message": message, "author": author}
        fields_and_tree = {**fields, "files": {path: asdict(files[path]) for path in sorted(files)}}
        oid = hashlib.sha1(json.dumps(fields_and_tree).encode()).hexdigest()
        path = self._directory(repo.kind, repo.id) / "commits" / f"{oid}.json"
        if not path.exists():
            self._write(path, json.dumps({**fields_and_tree, "date": _now()}).encode())
        _sync(self.root / "blobs")  # contents before the reference that leads to them
        _sync(path.parent)
        return oid

    def _save(self, repo: Repo) -> None:
        path = self._directory(repo.kind, repo.id) / "repo.json"
        fields = {"private": repo.private, "created": repo.created, "refs": repo.refs}
        self._write(path, json.dumps(fields, indent=2).encode())
        _sync(path.parent)

    def _write(self, path: Path, content: bytes) -> None:
        """Makes a file appear whole. The caller syncs its directory."""
        temporary = self.root / "tmp" / uuid.uuid4().hex
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _reread(self, repo: Repo) -> Repo:
        current = self.repo(repo.kind, repo.id)
        assert current is not None  # repositories are never deleted
        return current

    def _directory(self, kind: str, repo_id: str) -> Path:
        return self.root / "repos" / kind / repo_id

    def _lock(self, kind: str, repo_id: str) -> threading.Lock:
        return self._locks.setdefault(f"{kind}/{repo_id}", threading.Lock())


def _apply(files: Mapping[str, File], changes: Iterable[Change]) -> dict[str, File]:
    result = dict(files)
    for change in changes:
        path = change.path.rstrip("/")
        _check_path(path)
        if change.file is not None:
            result[path] = change.file
            continue
        below = path + "/"
        gone = [p for p in result if p.startswith(below)] if change.path != path else [path]
        if not gone or any(p not in result for p in gone):
            raise HubError(
                404, f"A file with this name doesn't exist: {change.path}", "EntryNotFound"
            )
        for p in gone:
            del result[p]
    for path in result:
        parents = path.split("/")[:-1]
        if any("/".join(parents[: i + 1]) in result for i in range(len(parents))):
            raise HubError(400, f"A file and a folder have the same name: {path}")
    return result


def _check_path(path: str) -> None:
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts) or re.search(
        r"[\x00-\x1f\\]", path
    ):
        raise HubError(400, f"Invalid path in commit: {path!r}")


def _next_pull_request(repo: Repo) -> str:
    numbers = [int(ref.rpartition("/")[2]) for ref in repo.refs if ref.startswith("refs/pr/")]
    return f"refs/pr/{max(numbers, default=0) + 1}"


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git stores in place of a file that is kept by LFS."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
