"""A kernel's repository on a Hub, and how its branches are made to hold a release."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, RepoFile, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from monorepo.release import Branch, PublishError

T = TypeVar("T")

# Seconds before each further attempt when the Hub fails or another publisher was faster.
WAITS = (1.0, 2.0, 4.0, 8.0)


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
        """Return whether `kernels` loads from the owner without `trust_remote_code`.

        Raises:
            PublishError: If the Hub keeps failing.
        """
        return self._retry(f"ask who trusts the owner of {self.repo_id}", self._trusted)

    def _trusted(self) -> bool:
        try:
            overview = self.api.get_organization_overview(self.repo_id.partition("/")[0])
        except HfHubHTTPError as error:
            if error.response.status_code == 404:  # a user: `kernels` concludes the same
                return False
            raise
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


def _may_pass(error: Exception) -> bool:
    """Return whether the same attempt, from what the Hub then holds, can succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 412, 429) or error.response.status_code >= 500
    return isinstance(error, (httpx2.TransportError, json.JSONDecodeError))


def _token_advice(hub: str) -> str:
    return f"Set HF_TOKEN to a token with the role write, from {hub}/settings/tokens"


def log_in(endpoint: str) -> HfApi:
    """Return the Hub's client for the user's token.

    Raises:
        PublishError: If there is no token or the Hub does not accept it.
    """
    token = get_token()
    if token is None:
        raise PublishError(f"no token for {endpoint}. {_token_advice(endpoint)}")
    api = HfApi(endpoint=endpoint, token=token, library_name="roofline-kernels")
    for wait in (*WAITS, None):
        try:
            api.whoami()
            return api
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == 401:
                advice = _token_advice(endpoint)
                said = f"{endpoint} does not accept the token (401). {advice}"
                raise PublishError(said) from error
            if wait is None or not _may_pass(error):
                said = f"{endpoint} answers {status} to a log-in: run it again"
                raise PublishError(said) from error
            time.sleep(wait)
        except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
            raise PublishError(f"{endpoint} cannot be reached: {error}") from error
    raise AssertionError("the last attempt returns or raises")
