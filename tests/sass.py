"""The machine code of a kernel that was compiled for NVIDIA, and the loop it spends its time in."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA.*?`\((\.L_x_\d+)\)")


def tool(name: str) -> str:
    """Return the path of one of the tools that come with Triton."""
    spec = find_spec("triton")
    assert spec and spec.origin
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)


def instructions(cubin: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions of a binary, and where its labels stand among them."""
    command = [tool("nvdisasm"), "-c", cubin]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.search(line):
            found.append(instruction[1])
    return found, labels


def hot_loop(cubin: str) -> list[str]:
    """Return the instructions of the smallest loop that multiplies matrices; none, if none does."""
    found, labels = instructions(cubin)
    loops = []
    for end, instruction in enumerate(found):
        branch = _BRANCH.search(instruction)
        start = labels.get(branch[1], end) if branch else end
        body = found[start : end + 1]
        if start < end and any("MMA" in each for each in body):
            loops.append(body)
    return min(loops, key=len, default=[])


def operation(instruction: str) -> str:
    """Return an instruction's name with its modifiers, without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split(" ")[0]
