"""The HTTP API of the Hugging Face Hub, as far as publishing and loading a kernel needs it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from monorepo.hubstore import Change, File, HubError, Repo, Store, lfs_pointer

USER = "local-user"
TOKENS = {"hf_write": "write", "hf_read": "read"}
LFS_THRESHOLD = 10 * 1024 * 1024  # bytes


@dataclass(frozen=True)
class Organisation:
    """A namespace, of which the local user is a member.

    Args:
        trusted: Whether `kernels` loads its kernels without `trust_remote_code`.
        approved: Whether it may hold kernel repositories.
    """

    trusted: bool = False
    approved: bool = True


ORGANISATIONS = {
    "roofline-kernels": Organisation(trusted=True),
    "untrusted-kernels": Organisation(),
}


@dataclass(frozen=True)
class Request:
    """A request, read whole. `base` is the URL the client knows the hub by."""

    base: str
    query: Mapping[str, Sequence[str]]
    body: bytes
    role: str | None  # "read" or "write", None without a token

    def flag(self, name: str) -> bool:
        """Whether a query parameter is on."""
        return self.query.get(name, ["0"])[0].lower() in ("1", "true")

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object."""
        return json_object(self.body or b"{}")


@dataclass(frozen=True)
class Reply:
    """An answer; a path as its body means that file's content."""

    status: int
    body: bytes | Path = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def ok(value: Any, status: int = 200) -> Reply:
    """A JSON answer."""
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def refusal(error: HubError) -> Reply:
    """The answer to a refused request: the message in the body, and in the Hub's headers."""
    reply = ok({"error": error.message}, error.status)
    headers = {"X-Error-Message": error.message, **error.headers}
    if error.code:
        headers["X-Error-Code"] = error.code
    return Reply(reply.status, reply.body, {**reply.headers, **headers})


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        HubError: 400, it is not one.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise HubError(400, "Wanted a JSON object")
    return value


_Route = Callable[..., Reply]
_ROUTES: list[tuple[str, re.Pattern[str], _Route]] = []
_REPO = r"/api/(?P<kind>kernels|models)/(?P<repo_id>[^/]+/[^/]+)"
_FILES = r"/(?:(?P<kind>kernels)/)?(?P<repo_id>[^/]+/[^/]+?)"


def _route(method: str, pattern: str) -> Callable[[_Route], _Route]:
    """Registers a method of `Api`; the pattern matches the path before percent-decoding."""

    def register(function: _Route) -> _Route:
        _ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class Api:
    """What each route does. A method's arguments are the named groups of its pattern, decoded.

    Args:
        store: Where the repositories are.
        organisations: Namespaces that exist, besides the user's own.
        tokens: Token to its role, "read" or "write".
    """

    def __init__(
        self, store: Store, organisations: Mapping[str, Organisation], tokens: Mapping[str, str]
    ) -> None:
        """See the class."""
        self.store, self.organisations, self.tokens = store, organisations, tokens
        self.uploads: set[str] = set()  # digests that a writer was told to upload

    def answer(self, method: str, path: str, request: Request) -> Reply:
        """Answers a request.

        Raises:
            HubError: It is refused.
        """
        for route_method, pattern, function in _ROUTES:
            match = pattern.fullmatch(path)
            if match and route_method == ("GET" if method == "HEAD" else method):
                groups = match.groupdict()
                return function(self, request, **{n: unquote(v) for n, v in groups.items() if v})
        raise HubError(404, f"No such route: {method} {path}")

    def role(self, authorization: str | None) -> str | None:
        """The role of an Authorization header's token; None without a header.

        Raises:
            HubError: 401, no such token.
        """
        if authorization is None:
            return None
        role = self.tokens.get(authorization.removeprefix("Bearer "))
        if role is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return role

    def _read(self, request: Request, kind: str, repo_id: str) -> Repo:
        repo = self.store.repo(kind, repo_id)
        if repo is None or (repo.private and request.role is None):
            # One answer for both, so that a private repository's name does not leak.
            if request.role is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def _read_file(self, request: Request, kind: str, repo_id: str) -> Repo:
        # `kernels benchmark` fetches a kernel by the URLs of a model of the same name.
        if kind == "models" and self.store.repo(kind, repo_id) is None:
            kind = "kernels"
        return self._read(request, kind, repo_id)

    def _write(
        self, request: Request, kind: str, repo_id: str, *, offer_pull_request: bool = False
    ) -> Repo:
        if request.role is None:
            raise HubError(401, "Invalid username or password.")
        repo = self._read(request, kind, repo_id)
        if request.role != "write" and offer_pull_request and not request.flag("create_pr"):
            raise HubError(403, "pass `create_pr=1` as a query parameter to create a Pull Request")
        if request.role != "write":
            raise HubError(403, "you must use a write token to upload to a repository.")
        return repo

    @_route("GET", "/api/whoami-v2")
    def _whoami(self, request: Request) -> Reply:
        if request.role is None:
            raise HubError(401, "Invalid username or password.")
        orgs = [
            {"type": "org", "name": n, "fullname": n, "roleInOrg": "write"}
            for n in self.organisations
        ]
        token = {"displayName": "local", "role": request.role}
        auth = {"type": "access_token", "accessToken": token}
        return ok(
            {"type": "user", "id": USER, "name": USER, "fullname": USER, "orgs": orgs, "auth": auth}
        )

    @_route("GET", "/api/organizations/(?P<name>[^/]+)/overview")
    def _organisation(self, request: Request, name: str) -> Reply:
        if name not in self.organisations:
            raise HubError(404, "This organization does not exist")
        trusted = self.organisations[name].trusted
        return ok({"name": name, "fullname": name, "trustedKernelPublisher": trusted})

    @_route("POST", "/api/validate-yaml")
    def _validate_yaml(self, request: Request) -> Reply:
        _string(request.json(), "content")
        return ok({"errors": [], "warnings": []})

    @_route("POST", "/api/repos/create")
    def _create(self, request: Request) -> Reply:
        asked = request.json()
        repo_type = _string(asked, "type", "model")
        if repo_type not in ("kernel", "model"):
            raise HubError(400, f"type: wanted kernel or model, got {repo_type!r}")
        namespace = _string(asked, "organization", USER)
        self._check_may_create(request, repo_type, namespace)
        kind, repo_id = f"{repo_type}s", f"{namespace}/{_string(asked, 'name')}"
        private = asked.get("visibility") == "private" or asked.get("private") is True
        new = self.store.create_repo(kind, repo_id, private=private, author=USER)
        answer = {"url": _web_url(request, kind, repo_id), "name": repo_id}
        if new:
            return ok(answer)
        return ok({**answer, "error": f"You already created this {repo_type} repo"}, 409)

    def _check_may_create(self, request: Request, repo_type: str, namespace: str) -> None:
        if request.role is None:
            raise HubError(401, "Invalid username or password.")
        if request.role != "write" or namespace not in (USER, *self.organisations):
            message = f"You don't have the rights to create a {repo_type} under the namespace"
            raise HubError(403, f'{message} "{namespace}"')
        approved = namespace in self.organisations and self.organisations[namespace].approved
        if repo_type == "kernel" and not approved:
            message = (
                f'The namespace "{namespace}" is not approved to publish kernels. To ask for it'
            )
            raise HubError(
                403, f"{message}, open a discussion on the kernels-community organization"
            )

    @_route("GET", _REPO)
    def _info(self, request: Request, kind: str, repo_id: str) -> Reply:
        return ok(self._describe(self._read(request, kind, repo_id), "main"))

    @_route("GET", _REPO + "/revision/(?P<revision>[^/]+)")
    def _revision(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        return ok(self._describe(self._read_file(request, kind, repo_id), revision))

    def _describe(self, repo: Repo, revision: str) -> dict[str, Any]:
        commit = self.store.commit(repo, revision)
        return {
            "id": repo.id,
            "author": repo.id.partition("/")[0],
            "sha": commit.id,
            "private": repo.private,
            "gated": False,
            "createdAt": repo.created,
            "lastModified": commit.date,
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": path} for path in commit.files],
        }

    @_route("GET", _REPO + "/refs")
    def _refs(self, request: Request, kind: str, repo_id: str) -> Reply:
        refs: dict[str, list[dict[str, str]]] = {"heads": [], "tags": [], "pr": []}
        for ref, oid in self._read(request, kind, repo_id).refs.items():
            _, what, name = ref.split("/", 2)
            refs[what].append({"name": name, "ref": ref, "targetCommit": oid})
        pulls = {"pullRequests": refs["pr"]} if request.flag("include_prs") else {}
        return ok({"branches": refs["heads"], "tags": refs["tags"], "converts": [], **pulls})

    @_route("POST", _REPO + "/branch/(?P<name>[^/]+)")
    def _branch(self, request: Request, kind: str, repo_id: str, name: str) -> Reply:
        repo = self._write(request, kind, repo_id)
        start = _string(request.json(), "startingPoint", "main")
        self.store.create_ref(repo, f"refs/heads/{name}", start)
        return ok({})

    @_route("POST", _REPO + "/tag/(?P<revision>[^/]+)")
    def _tag(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self._write(request, kind, repo_id)
        self.store.create_ref(repo, f"refs/tags/{_string(request.json(), 'tag')}", revision)
        return ok({})

    @_route("GET", _REPO + "/commits/(?P<revision>[^/]+)")
    def _commits(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        history = self.store.history(self._read(request, kind, repo_id), revision)
        return ok([{**c.described(), "authors": [{"user": c.author}]} for c in history])

    @_route("GET", _REPO + "/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?")
    def _tree(
        self, request: Request, kind: str, repo_id: str, revision: str, path: str = ""
    ) -> Reply:
        files = self.store.commit(self._read_file(request, kind, repo_id), revision).files
        path = path.strip("/")
        top = f"{path}/" if path else ""
        inside = {name: file for name, file in files.items() if name.startswith(top)}
        if path and not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        entries = _entries(inside, top)
        if not request.flag("recursive"):
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(top)]
        return ok(entries)

    @_route("POST", _REPO + "/preupload/(?P<revision>[^/]+)")
    def _preupload(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self._write(request, kind, repo_id, offer_pull_request=True)
        commit = self.store.commit(repo, revision)
        attributes = commit.files.get(".gitattributes")
        patterns = self.store.blob(attributes.sha256).read_text() if attributes else ""
        answer = []
        for asked in _objects(request.json(), "files"):
            path, there = _string(asked, "path"), commit.files.get(_string(asked, "path"))
            lfs = 0 < asked["size"] and (asked["size"] >= LFS_THRESHOLD or _is_lfs(path, patterns))
            oid = {"oid": there.sha256 if lfs else there.oid} if there else {}
            answer.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if lfs else "regular",
                    "shouldIgnore": False,
                    **oid,
                }
            )
        return ok({"files": answer})

    @_route("POST", _FILES + r"\.git/info/lfs/objects/batch")
    def _lfs_batch(self, request: Request, repo_id: str, kind: str = "models") -> Reply:
        self._write(request, kind, repo_id)
        answer = []
        for asked in _objects(request.json(), "objects"):
            oid = _string(asked, "oid")
            actions = {}
            if self.store.lfs_file(oid) is None:
                self.uploads.add(oid)
                actions = {"actions": {"upload": {"href": f"{request.base}/lfs/{oid}"}}}
            answer.append({"oid": oid, "size": asked["size"], **actions})
        return ok({"transfer": "basic", "objects": answer})

    @_route("PUT", "/lfs/(?P<oid>[0-9a-f]{64})")
    def _lfs_upload(self, request: Request, oid: str) -> Reply:
        if (
            oid not in self.uploads
        ):  # this URL is its own permission: the client sends no token here
            raise HubError(403, "Access denied")
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise HubError(400, "The content does not have the sha256 it was announced with")
        self.store.add_blob(request.body)
        return Reply(200, b"", {"ETag": f'"{oid}"'})

    @_route("POST", _REPO + "/commit/(?P<revision>[^/]+)")
    def _commit(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self._write(request, kind, repo_id, offer_pull_request=True)
        pull_request = request.flag("create_pr")
        lines = [json_object(line) for line in request.body.splitlines() if line.strip()]
        if not lines or lines[0].get("key") != "header":
            raise HubError(400, "Wanted a header as the first line of a commit")
        header = _object(lines[0], "value")
        with ThreadPoolExecutor(
            16
        ) as pool:  # many small files: to wait for the disk once, not for each
            changes = list(pool.map(self._change, lines[1:]))
        commit, ref = self.store.add_commit(
            repo,
            revision,
            changes,
            title=_string(header, "summary"),
            message=_string(header, "description", ""),
            author=USER,
            parent=_string(header, "parentCommit", ""),
            pull_request=pull_request,
        )
        url = _web_url(request, kind, repo_id)
        pull = (
            {"pullRequestUrl": f"{url}/discussions/{ref.removeprefix('refs/pr/')}"}
            if pull_request
            else {}
        )
        return ok(
            {
                "success": True,
                "commitOid": commit.id,
                "commitUrl": f"{url}/commit/{commit.id}",
                **pull,
            }
        )

    def _change(self, line: dict[str, Any]) -> Change:
        key, value = _string(line, "key"), _object(line, "value")
        path = _string(value, "path")
        if key == "deletedFile":
            return Change(path.rstrip("/"), None)
        if key == "deletedFolder":
            return Change(path.rstrip("/") + "/", None)
        if key == "file":
            content = _string(value, "content").encode()
            if value.get("encoding") == "base64":
                try:
                    content = base64.b64decode(content, validate=True)
                except binascii.Error:
                    raise HubError(400, f"{path}: wanted base64") from None
            return Change(path, self.store.add_blob(content))
        if key == "lfsFile":
            file = self.store.lfs_file(_string(value, "oid"))
            if file is None:
                raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
            return Change(path, file)
        raise HubError(400, f"Unknown operation in a commit: {key}")

    @_route("GET", _FILES + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def _resolve(
        self, request: Request, repo_id: str, revision: str, path: str, kind: str = "models"
    ) -> Reply:
        commit = self.store.commit(self._read_file(request, kind, repo_id), revision)
        headers = {"X-Repo-Commit": commit.id}
        file = commit.files.get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        if file.lfs:
            headers.update({"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)})
        headers.update({"ETag": f'"{file.oid}"', "Content-Type": "application/octet-stream"})
        return Reply(200, self.store.blob(file.sha256), headers)


def _entries(files: Mapping[str, File], top: str) -> list[dict[str, Any]]:
    """Entries for the files and all folders between them and `top`, ordered by path."""
    entries: dict[str, dict[str, Any]] = {}
    for path, file in files.items():
        entries[path] = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
        if file.lfs:
            pointer_size = len(lfs_pointer(file.sha256, file.size))
            lfs = {"oid": file.sha256, "size": file.size, "pointerSize": pointer_size}
            entries[path]["lfs"] = lfs
        folder = path.rpartition("/")[0]
        while folder and len(folder) >= len(top) and folder not in entries:
            below = sorted((p, f.oid) for p, f in files.items() if p.startswith(f"{folder}/"))
            oid = hashlib.sha1(repr(below).encode()).hexdigest()
            entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": oid}
            folder = folder.rpartition("/")[0]
    return [entries[path] for path in sorted(entries)]


def _is_lfs(path: str, attributes: str) -> bool:
    for line in attributes.splitlines():
        pattern, *settings = line.split() or [""]
        name = path if "/" in pattern else path.rpartition("/")[2]
        if "filter=lfs" in settings and fnmatch(name, pattern):
            return True
    return False


def _web_url(request: Request, kind: str, repo_id: str) -> str:
    return f"{request.base}/{'kernels/' if kind == 'kernels' else ''}{repo_id}"


def _object(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(value.get(name), dict):
        raise HubError(400, f'"{name}" must be an object')
    return value[name]  # type: ignore[no-any-return]


def _string(value: Mapping[str, Any], name: str, default: str | None = None) -> str:
    if value.get(name) is None and default is not None:
        return default
    if not isinstance(value.get(name), str):
        raise HubError(400, f'"{name}" must be a string')
    return value[name]  # type: ignore[no-any-return]


def _objects(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects, each with a size in bytes."""
    items = value.get(name)
    if not isinstance(items, list) or not all(
        isinstance(i, dict) and isinstance(i.get("size"), int) for i in items
    ):
        raise HubError(400, f'"{name}" must be a list of objects, each with a "size"')
    return items
