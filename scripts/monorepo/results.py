"""The measured tables of README.md and the cards, drawn from docs/results.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monorepo.manifest import Kernel, Manifest

Row = dict[str, Any]

#: The dtype that tables show; docs/results.json holds all.
SHOWN = "bfloat16"
OPERATIONS = ("forward", "add_forward", "backward")
PEERS = ("torch", "torch.compile", "liger", "stream")


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables of one kernel's rows, one for each machine it was timed on."""
    machines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(str(row[fact]) for fact in ("device", "torch", "triton", "build"))
        machines.setdefault(key, []).append(row)
    return "\n\n".join(_table(found) for found in machines.values())


def _table(rows: Sequence[Row]) -> str:
    """Return the table of one machine: a line a shape and operation, ratios to the peers."""
    timed = {
        (row["operation"], tuple(row["shape"]), row["rival"]): row
        for row in rows
        if row.get("dtype") == SHOWN
    }
    host = {row["rival"]: row["median_us"] for row in rows if row["operation"] == "host"}
    shapes = list(dict.fromkeys(shape for _, shape, _ in timed))
    any_row = rows[0]
    if all(len(shape) == 3 for shape in shapes):
        return _product_table(any_row, timed, host)
    if all(len(shape) == 5 for shape in shapes):
        return _layer_table(any_row, timed, host)
    lines = [
        f"{any_row['device']}, torch {any_row['torch']}, Triton {any_row['triton']}, {SHOWN}, "
        f"build `{any_row['build']}`. Median of CUDA graph replays over rotating copies, in "
        "microseconds; then how many times as long each peer took in the same run: below 1, it "
        "was faster. `stream` is a bare element-wise sum that moves the same bytes.",
        "",
        "| operation | rows x hidden | us | TB/s | " + " | ".join(PEERS) + " |",
        "|---" * (4 + len(PEERS)) + "|",
    ]
    for operation in OPERATIONS:
        for shape in shapes:
            ours = timed.get((operation, shape, "ours"))
            if ours is None:
                continue
            time = ours["median_us"]
            ratios = []
            for peer in PEERS:
                row = timed.get((operation, shape, peer))
                ratios.append(f"{row['median_us'] / time:.2f}" if row else "-")
            cells = [
                operation,
                " x ".join(map(str, shape)),
                f"{time:.2f}",
                f"{ours['bytes'] / time / 1e6:.2f}",
                *ratios,
            ]
            lines.append("| " + " | ".join(cells) + " |")
    if host:
        costs = ", ".join(f"{rival} {cost:.1f} us" for rival, cost in host.items())
        lines += ["", f"Host cost of one eager call: {costs}."]
    return "\n".join(lines)


def _product_table(any_row: Row, timed: dict[Any, Row], host: dict[str, float]) -> str:
    """Return the table of products (tokens, in, out): a line a number of tokens, a column a shape.

    Each cell holds how many times as long torch's product of 16-bit weights took, and our time.
    """
    operations = list(dict.fromkeys(operation for operation, _, _ in timed))
    sizes = list(dict.fromkeys(shape[1:] for _, shape, _ in timed))
    lines = [
        f"{any_row['device']}, torch {any_row['torch']}, Triton {any_row['triton']}, {SHOWN}, "
        f"build `{any_row['build']}`. How many times as long `F.linear` (cuBLAS) takes on the "
        "dequantised weight, in the same run, and our time in microseconds: median of CUDA graph "
        "replays over rotating weights. Below 1, cuBLAS was faster.",
    ]
    for operation in operations:
        titles = " | ".join(f"{k} x {n}" for k, n in sizes)
        lines += ["", f"| {operation}: tokens | {titles} |", "|---" * (1 + len(sizes)) + "|"]
        tokens = dict.fromkeys(shape[0] for name, shape, _ in timed if name == operation)
        for count in tokens:
            cells = [str(count)]
            for k, n in sizes:
                ours = timed.get((operation, (count, k, n), "ours"))
                peer = timed.get((operation, (count, k, n), "torch"))
                if ours is None or peer is None:
                    cells.append("-")
                    continue
                time = ours["median_us"]
                cells.append(f"{peer['median_us'] / time:.2f} ({time:.1f})")
            lines.append("| " + " | ".join(cells) + " |")
    if host:
        costs = ", ".join(f"{rival} {cost:.1f} us" for rival, cost in host.items())
        lines += ["", f"Host cost of one eager call: {costs}."]
    return "\n".join(lines)


#: What a cell of each table of layers shows of two rivals' microseconds, and of the floor.
LAYER_TABLES = {
    "Time over the floor (microseconds)": ("ours", "floor", "{0:.2f} ({1:.0f})"),
    "`torch._grouped_mm` over ours": ("grouped_mm", "ours", "{0:.1f}"),
    "A loop over the experts, without a graph, over ours": ("loop", "ours", "{0:.1f}"),
    "Router, choice and order alone, in microseconds": ("router", "ours", "{1:.1f}"),
}


def _layer_table(any_row: Row, timed: dict[Any, Row], host: dict[str, float]) -> str:
    """Return the tables of layers (tokens, experts, ...): a line a model, a column a number."""
    lines = [
        f"{any_row['device']}, torch {any_row['torch']}, Triton {any_row['triton']}, {SHOWN}, "
        f"build `{any_row['build']}`. The floor is the larger of bytes / 4.3 TB/s (experts that "
        "have a token, tokens in and out, each once) and operations / 790 TFLOP/s. Median of CUDA "
        "graph replays over rotating weights, all rivals in turns; the router is part of each.",
    ]
    tokens = sorted({shape[0] for _, shape, _ in timed})
    for title, (rival, other, form) in LAYER_TABLES.items():
        lines += ["", f"| {title}: tokens | {' | '.join(map(str, tokens))} |"]
        lines.append("|---" * (1 + len(tokens)) + "|")
        for model in dict.fromkeys(name for name, _, found in timed if found == rival):
            rows = {
                (shape[0], found): row
                for (name, shape, found), row in timed.items()
                if name == model
            }
            cells = []
            for count in tokens:
                row, beside = rows.get((count, rival)), rows.get((count, "ours"))
                if row is None or beside is None:
                    cells.append("-")
                    continue
                under = beside["floor_us"] if other == "floor" else beside["median_us"]
                cells.append(form.format(row["median_us"] / under, row["median_us"]))
            lines.append(f"| {model} | {' | '.join(cells)} |")
    if host:
        costs = ", ".join(f"{rival} {cost:.0f} us" for rival, cost in host.items())
        lines += ["", f"Host cost of one eager call: {costs}."]
    return "\n".join(lines)


def with_table(text: str, kernel: str, table: str) -> str:
    """Return a document with the table between the kernel's markers; unchanged without them."""
    start, end = f"<!-- results:{kernel} -->", "<!-- /results -->"
    before, found, rest = text.partition(start)
    if not found:
        return text
    _, closing, after = rest.partition(end)
    if not closing:
        raise ValueError(f"{start} has no {end} after it")
    return f"{before}{start}\n{table}\n{closing}{after}"


def documents(manifest: Manifest, kernel: Kernel) -> list[Path]:
    """Return the documents that may show a kernel's table."""
    return [manifest.root / "README.md", kernel.path / "CARD.md"]


def update(manifest: Manifest, *, check: bool = False) -> list[Path]:
    """Draw every table again and return the documents that differ; write them unless `check`."""
    path = manifest.root / "docs" / "results.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    texts: dict[Path, str] = {}
    for kernel in manifest.kernels:
        own = [row for row in rows if row["kernel"] == kernel.name]
        table = markdown(own) if own else "Not measured yet."
        for document in documents(manifest, kernel):
            if document.exists():
                text = texts.get(document, document.read_text())
                texts[document] = with_table(text, kernel.name, table)
    different = [document for document, text in texts.items() if document.read_text() != text]
    if not check:
        for document in different:
            document.write_text(texts[document])
    return different
