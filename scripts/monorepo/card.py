"""The card of a kernel: its CARD.md template filled in, for the Hub's README.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import jinja2

from .manifest import Kernel


class CardError(ValueError):
    """A card cannot be rendered; the text names the template."""


def render(kernel: Kernel) -> str:
    """The card's text, as kernel-builder renders it.

    The template sees `repo_id`, `version`, `functions`, `layers` (each a list, or none),
    `has_benchmark`, `upstream`, `source` (URLs, or none) and `license` (in lower case).

    Raises:
        CardError: There is no template, it uses another variable or does not parse, or the
            kernel has no repo-id.
    """
    template = kernel.path / "CARD.md"
    if kernel.repo_id is None:
        file = kernel.path / "build.toml"
        raise CardError(f"{file}: general.hub.repo-id: wanted ORG/{kernel.name} for the card")
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.from_string(template.read_text(encoding="utf-8")).render(
            repo_id=kernel.repo_id,
            version=kernel.version,
            functions=functions(kernel),
            layers=layers(kernel),
            has_benchmark=(kernel.path / "benchmarks" / "benchmark.py").is_file(),
            upstream=url(kernel.upstream),
            source=url(kernel.source),
            license=kernel.license.lower(),
        )
    except (OSError, jinja2.TemplateError) as error:
        raise CardError(f"{template}: wanted a card template, got {error}") from None


def functions(kernel: Kernel) -> list[str] | None:
    """Public names but `layers`, or none."""
    return [name for name in public(kernel) if name != "layers"] or None


def layers(kernel: Kernel) -> list[str] | None:
    """Top-level classes of the `layers` module, if `layers` is public."""
    if "layers" not in public(kernel):
        return None
    for file in (kernel.source_dir / "layers" / "__init__.py", kernel.source_dir / "layers.py"):
        if file.is_file():
            body = _parse(file).body
            return [node.name for node in body if isinstance(node, ast.ClassDef)] or None
    return None


def public(kernel: Kernel) -> list[str]:
    """Names in the first top-level `__all__ = [...]` of `__init__.py`."""
    for node in _parse(kernel.source_dir / "__init__.py").body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            if not isinstance(node.value, ast.List):
                return []
            constants = [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
            return [value for value in constants if isinstance(value, str)]
    return []


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:
        raise CardError(f"{file}: wanted Python source, got {error}") from None


def url(text: str | None) -> str | None:
    """A git URL; the short form `git@host:org/repo.git` becomes an ssh URL."""
    if text is None or "://" in text:
        return text
    return re.sub(r"^([^/:]+):(?!/)", r"ssh://\1/", text)
