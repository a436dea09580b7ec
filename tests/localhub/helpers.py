"""Requests to the loopback Hub, by the real client and by hand."""

from __future__ import annotations

import base64
import http.client
import json
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
REPO = "roofline-kernels/toy"
KERNEL = {"repo_id": REPO, "repo_type": "kernel"}


def add(path: str, content: bytes = b"1") -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


def commit(api: HfApi, *operations: object, **arguments: object) -> str:
    arguments = {**KERNEL, "commit_message": "message", **arguments}
    return api.create_commit(operations=operations, **arguments).oid  # type: ignore[arg-type]


def files(api: HfApi, revision: str = "main", **arguments: object) -> set[str]:
    return set(api.list_repo_files(**{**KERNEL, **arguments}, revision=revision)) - {
        ".gitattributes"
    }


def request(
    hub_url: str, method: str, path: str, body: bytes | None = None, token: str | None = "hf_write"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """A request as no well-behaved client makes it."""
    connection = http.client.HTTPConnection(hub_url.removeprefix("http://"), timeout=30)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def commit_body(contents: dict[str, str]) -> bytes:
    """A commit as the client sends it."""
    lines: list[object] = [{"key": "header", "value": {"summary": "message", "description": ""}}]
    for path, text in contents.items():
        content = base64.b64encode(text.encode()).decode()
        lines.append(
            {"key": "file", "value": {"path": path, "content": content, "encoding": "base64"}}
        )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
