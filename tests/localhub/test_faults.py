"""Faults on demand, and a server that is stopped or killed."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from monorepo.localhub import LocalHub

from .helpers import KERNEL, REPO, SCRIPTS, add, commit, commit_body, request


def test_fault_before_changes_nothing_and_fault_after_leaves_the_commit(
    hub: LocalHub, api: HfApi
) -> None:
    """Case B95 (b): a 500, or a cut connection, although the commit was stored."""
    for after, count in ((False, 1), (True, 2)):
        for fault in ({"status": 500}, {"cut": True}):
            before = len(hub.commits(REPO))
            hub.faults.add("POST", f"{REPO}/commit/main", after=after, **fault)
            with pytest.raises(Exception, match="500|disconnected|peer closed|incomplete"):
                commit(api, add(f"{after}{fault}"))
            assert hub.log[-1].status == fault.get("status", 0)
            assert len(hub.commits(REPO)) - before == count - 1
    commit(api, add("and then all is well"))


def test_rate_limit_is_waited_out_by_the_client(hub: LocalHub, api: HfApi) -> None:
    hub.faults.add("POST", "/preupload/", status=429, headers={"Retry-After": "0"})
    commit(api, add("a"))
    statuses = [r.status for r in hub.log if "/preupload/" in r.path]
    assert statuses == [429, 200]


def test_download_cut_in_the_middle_is_retried_by_the_client(
    hub: LocalHub, api: HfApi, tmp_path: Path
) -> None:
    commit(api, add("a.txt", b"0123456789" * 1000))
    hub.faults.add("GET", "/resolve/", cut=True, after=True)
    path = api.hf_hub_download(**KERNEL, filename="a.txt", cache_dir=tmp_path)
    assert Path(path).read_bytes() == b"0123456789" * 1000
    assert [r.status for r in hub.log if r.method == "GET" and "/resolve/" in r.path] == [0, 200]


def test_delay_strikes_as_often_as_asked_and_can_be_cleared(hub: LocalHub, api: HfApi) -> None:
    hub.faults.add("GET", "/refs$", delay=0.2, times=2)
    hub.faults.add("GET", "/refs$", status=503, times=5)
    started = time.monotonic()
    for _ in range(2):
        assert api.list_repo_refs(**KERNEL).branches
    assert time.monotonic() - started >= 0.4
    hub.faults.clear()
    assert api.list_repo_refs(**KERNEL).branches
    with pytest.raises(ValueError, match="regular expression"):
        hub.faults.add("GET", "(", status=500)
    with pytest.raises(ValueError, match="at least one of"):
        hub.faults.add("GET", "x")
    with pytest.raises(ValueError, match="status: wanted .*int.*, got 'abc'"):
        hub.faults.add("GET", "x", status="abc")


def test_faults_and_log_over_http(hub: LocalHub, api: HfApi) -> None:
    fault = {"method": "GET", "path": "/refs$", "status": 503, "headers": {"Retry-After": 7}}
    assert request(hub.url, "POST", "/_local/faults", json.dumps(fault).encode())[0] == 200
    status, headers, _ = request(hub.url, "GET", f"/api/kernels/{REPO}/refs")
    assert status == 503 and headers["Retry-After"] == "7"
    log = json.loads(request(hub.url, "GET", "/_local/log")[2])
    assert log[-1] == {"method": "GET", "path": f"/api/kernels/{REPO}/refs", "status": 503}
    request(hub.url, "POST", "/_local/faults", json.dumps(fault).encode())
    assert request(hub.url, "DELETE", "/_local/faults")[0] == 200
    assert request(hub.url, "GET", f"/api/kernels/{REPO}/refs")[0] == 200
    for body in (b"{}", b"[]", b'{"method": "GET", "path": "x", "what": 1}'):
        assert request(hub.url, "POST", "/_local/faults", body)[0] == 400


def test_one_root_is_held_by_one_hub_and_outlives_it(tmp_path: Path) -> None:
    with LocalHub(tmp_path) as hub:
        HfApi(endpoint=hub.url, token="hf_write").create_repo(**KERNEL)
        with pytest.raises(ValueError, match="in use by another hub"):
            LocalHub(tmp_path).start()
        idle = http.client.HTTPConnection("127.0.0.1", hub.port)
        idle.request("GET", "/api/agent-harnesses")
        assert idle.getresponse().status == 404
    idle.close()  # an open connection did not keep the hub from stopping
    with LocalHub(tmp_path) as hub:
        api = HfApi(endpoint=hub.url, token="hf_write")
        assert len(api.list_repo_refs(**KERNEL).branches) == 1
        with pytest.raises(OSError):
            LocalHub(tmp_path / "other", hub.port).start()
        LocalHub(tmp_path / "other").start().stop()  # the failed start let go of its root


class Served:
    """A `hub.py serve` process."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(SCRIPTS / "hub.py"), "serve", "--root", str(root)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_prints_its_url_and_stops_tidily(tmp_path: Path, number: int) -> None:
    served = Served(tmp_path)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", served.url)
        idle = http.client.HTTPConnection(served.url.removeprefix("http://"))
        idle.request("GET", "/api/whoami-v2")
        assert idle.getresponse().status == 401
        command = [sys.executable, str(SCRIPTS / "hub.py"), "serve", "--root", str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert second.returncode == 1 and re.fullmatch(
            "error: .* in use by another hub\n", second.stderr
        )
        assert served.end(number) == 0
    finally:
        served.process.kill()


def test_killed_server_keeps_every_acknowledged_commit_whole(tmp_path: Path) -> None:
    """SIGKILL in the middle of many commits by several publishers, then again on the same root."""
    acknowledged: dict[str, tuple[str, int]] = {}
    for generation in range(2):
        served = Served(tmp_path)
        try:
            api = HfApi(endpoint=served.url, token="hf_write")
            api.create_repo(**KERNEL, exist_ok=True)

            def publish(who: int, generation: int = generation, url: str = served.url) -> None:
                branch = f"{generation}-{who}"
                try:
                    request(url, "POST", f"/api/kernels/{REPO}/branch/{branch}")
                    for i in range(1000):
                        body = commit_body({f"{n}.txt": f"{branch} {i} {n}" for n in range(8)})
                        answer = request(url, "POST", f"/api/kernels/{REPO}/commit/{branch}", body)
                        acknowledged[json.loads(answer[2])["commitOid"]] = (branch, i)
                except (OSError, http.client.HTTPException):  # the server is gone
                    return

            publishers = [threading.Thread(target=publish, args=(who,)) for who in range(3)]
            for publisher in publishers:
                publisher.start()
            deadline = time.monotonic() + 20
            while len(acknowledged) < 25 * (generation + 1) and time.monotonic() < deadline:
                time.sleep(0.005)
            served.end(signal.SIGKILL)
            for publisher in publishers:
                publisher.join()
        finally:
            served.process.kill()

    assert len(acknowledged) >= 50
    assert not any((tmp_path / "repos").rglob("*.tmp"))
    with LocalHub(tmp_path) as hub:
        assert list((tmp_path / "tmp").iterdir()) == []
        branches = {ref.name for ref in HfApi(endpoint=hub.url).list_repo_refs(**KERNEL).branches}
        reachable = {c.id: c for branch in branches for c in hub.commits(REPO, branch)}
        assert acknowledged.keys() <= reachable.keys()
        for c in reachable.values():
            contents = {
                n: (tmp_path / "blobs" / f.sha256).read_text()
                for n, f in c.files.items()
                if n[0] != "."
            }
            assert len(contents) in (0, 8)
            # All its files are of one and the same commit, the acknowledged one.
            origins = {tuple(text.split()[:2]) for text in contents.values()}
            assert len(origins) <= 1
            if c.id in acknowledged:
                branch, i = acknowledged[c.id]
                assert origins == {(branch, str(i))}
