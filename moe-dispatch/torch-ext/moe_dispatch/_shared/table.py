# Copied from shared/table.py by scripts/sync_shared.py: edit it there.
"""Tuned launch configurations: JSON tables that ship with a kernel, one file a device.

A table is `{operation: {dtype or width: {static size: {rows: {field: value}}}}}`, every key a
string.
"""

import functools
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


def row_bucket(rows: int) -> int:
    """Return the power of two that stands for a number of rows (rounded up)."""
    return 1 << max(rows - 1, 0).bit_length()


@functools.cache
def load(directory: pathlib.Path, device: str) -> Mapping[str, Any]:
    """Return the table of a device; where none ships, an empty one, said once at INFO."""
    path = directory / f"{device}.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        logger.info("no tuned table for %s in %s: the heuristic is used", device, directory)
        return {}
    table: Mapping[str, Any] = json.loads(text)
    return table


def find(
    table: Mapping[str, Any], operation: str, dtype: str, size: int | str, rows: int
) -> Mapping[str, int] | None:
    """Return the entry tuned for the nearest number of rows, or None if the size is not there.

    Nearest is by ratio: tables hold powers of two, and `rows` is a bucket of `row_bucket`.
    """
    entries = table.get(operation, {}).get(dtype, {}).get(str(size))
    if not entries:
        return None
    nearest = min(
        entries, key=lambda key: (abs(int(key).bit_length() - rows.bit_length()), int(key))
    )
    entry: Mapping[str, int] = entries[nearest]
    return entry
