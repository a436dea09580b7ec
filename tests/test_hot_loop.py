"""What the inner loop of w4a16's decoding holds, on NVIDIA: its weights stay in registers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_driver import Launch
from monorepo.manifest import Target
from sass import hot_loop, operation
from test_targets import MANIFEST, launches_of, name_of

TRITONS = ["3.4", "3.9"]
ARCHS = ("80", "90")
#: Bytes a thread stores, by the width in an instruction's name; 4 without one.
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def bytes_stored(instruction: str) -> int:
    """Return the bytes that each thread puts into shared memory."""
    name, *modifiers = operation(instruction).split(".")
    if name == "STSM":  # 8 x 8 matrices of 16 bits, one a register
        return 4 * int(modifiers[-1]) if modifiers[-1].isdecimal() else 4
    return next((WIDTHS[each] for each in modifiers if each in WIDTHS), 4) if name == "STS" else 0


@pytest.mark.parametrize("triton", TRITONS, ids=name_of)
@pytest.mark.parametrize(
    "target", [target for target in MANIFEST.targets if str(target.arch) in ARCHS], ids=name_of
)
def test_weights_stay_in_registers(
    target: Target,
    triton: str,
    builds: dict[str, Path],
) -> None:
    (kernel,) = (kernel for kernel in MANIFEST.kernels if kernel.name == "w4a16")
    assert kernel.repo_id is not None
    lines = launches_of(
        target, triton, kernel.repo_id, kernel.version, builds[kernel.repo_id],
        kernel.path / "tests" / "decode.py",
    )  # fmt: skip
    seen = 0
    for line in lines:
        assert line["error"] is None, line
        launch = Launch(**line["launches"][0])
        loop = hot_loop(launch.files["cubin"])
        names = [operation(each) for each in loop]
        assert any(re.match(r"HG?MMA", name) for name in names), line["name"]
        assert not [name for name in names if name.startswith("I2F")], line["name"]
        # Scales and zero points may change threads on their way: 2 bytes a row each. Weights
        # take 256 bytes a row in 16 bits.
        rows, threads = int(launch.constants["BLOCK_N"]), 32 * launch.num_warps
        stored = threads * sum(map(bytes_stored, loop))
        assert stored <= 2 * max(4 * rows, 2 * threads), (line["name"], stored)
        seen += 1
    assert seen >= 4  # both numbers of tokens, both dtypes


def test_stores_are_counted() -> None:
    counted = {
        "STS.U16 [R3+0x1c000], R116": 2,
        "@!P0 STS [R3], R4": 4,
        "@P1 STS.128 [R3+UR4], R4": 16,
        "STSM.16.M88.4 [R3], R4": 16,
        "LDS.64 R112, [R8+0x1c000]": 0,
        "LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64]": 0,
    }
    assert {text: bytes_stored(text) for text in counted} == counted
