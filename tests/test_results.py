"""The measured tables: drawn from one file, and from nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from monorepo.manifest import Manifest
from monorepo.results import markdown, update, with_table

ROOT = Path(__file__).resolve().parents[1]
FACTS = {
    "device": "GPU X",
    "torch": "2.9",
    "triton": "3.5",
    "kernel": "toy",
    "bytes": 4e6,
    "build": "b",
}


def row(rival: str, us: float, **more: object) -> dict[str, object]:
    base = {"operation": "forward", "shape": [16, 64], "dtype": "bfloat16", "rival": rival}
    return FACTS | base | {"median_us": us} | more


def test_ratios_are_of_the_peer_to_us() -> None:
    rows = [row("ours", 2.0), row("torch", 5.0), row("stream", 1.0)]
    rows += [row("ours", 7.0, dtype="float16"), row("ours", 9.0, operation="host", dtype=None)]
    table = markdown(rows)
    assert "| forward | 16 x 64 | 2.00 | 2.00 | 2.50 | - | - | 0.50 |" in table
    assert "GPU X, torch 2.9, Triton 3.5, bfloat16, build `b`" in table and "ours 9.0 us" in table
    assert "7.00" not in table


def test_machines_are_not_mixed() -> None:
    rows = [row("ours", 2.0), row("torch", 4.0), row("ours", 14.0, device="GPU Y")]
    first, second = markdown(rows).split("GPU Y")
    assert "| 2.00 | 2.00 | 2.00 |" in first and "| 14.00 | 0.29 | - |" in second


def test_layers_are_over_their_floor() -> None:
    """A line a model, a column a number of tokens; what was not timed is no number."""
    layer = {"operation": "toy layer", "floor_us": 8.0}
    rows = [row("ours", 10.0, shape=[1, 8, 2, 64, 32], **layer)]
    rows += [row("grouped_mm", 25.0, shape=[1, 8, 2, 64, 32], **layer)]
    rows += [row("ours", 12.0, shape=[16, 8, 2, 64, 32], **layer)]
    table = markdown(rows)
    assert "| Time over the floor (microseconds): tokens | 1 | 16 |" in table
    assert "| toy layer | 1.25 (10) | 1.50 (12) |" in table
    assert "| toy layer | 2.5 | - |" in table


def test_only_the_space_between_the_markers_changes() -> None:
    text = "a\n<!-- results:toy -->\nold\n<!-- /results -->\nb\n"
    assert with_table(text, "toy", "new") == text.replace("old", "new")
    assert with_table(text, "other", "new") == text
    with pytest.raises(ValueError, match="no <!-- /results -->"):
        with_table("<!-- results:toy -->\n", "toy", "new")


def test_a_number_changed_by_hand_is_found(tmp_path: Path) -> None:
    kernels = [kernel.name for kernel in Manifest.load(ROOT).kernels]
    for name in ("build.toml", "README.md", "docs", *kernels):
        subprocess.run(["cp", "-r", ROOT / name, tmp_path / name], check=True)
    manifest = Manifest.load(tmp_path)
    update(manifest)
    assert update(manifest, check=True) == []
    readme = tmp_path / "README.md"
    rows = json.loads((tmp_path / "docs" / "results.json").read_text())
    ours = next(r for r in rows if r["rival"] == "ours" and r["operation"] == "forward")
    number = f"{ours['median_us']:.2f}"
    text = readme.read_text()
    assert number in text
    readme.write_text(text.replace(number, "0.01"))
    assert update(manifest, check=True) == [readme]
    assert readme.read_text() != text
    assert update(manifest) == [readme] and readme.read_text() == text


@pytest.mark.parametrize("script", ("bench.py", "tune.py"))
def test_measuring_without_a_gpu_says_so(script: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1 and "needs a GPU" in done.stderr.replace("need a", "needs a")
