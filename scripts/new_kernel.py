"""Stamp a new kernel: a folder that builds and passes its tests as it stands, to be filled in."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from kernels._rust import KernelName

from monorepo.manifest import Manifest, ManifestError, is_bytecode
from monorepo.sync import sync

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).resolve().parent / "templates" / "kernel"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 1 if the name cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="as on the Hub: lower case, with dashes")
    arguments = parser.parse_args(argv)
    try:
        stamp(ROOT, arguments.name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {arguments.name}/ and added it to build.toml; next: scripts/build.py")
    return 0


def stamp(root: Path, name: str) -> Path:
    """Write a kernel's folder from the template and list it in the manifest.

    Args:
        root: The monorepo.
        name: The kernel's name.

    Returns:
        The folder.

    Raises:
        ValueError: The name is not allowed, or taken.
    """
    manifest = Manifest.load(root)
    module = KernelName(name).python_name
    folder = root / name
    taken = {kernel.module for kernel in manifest.kernels} | sys.stdlib_module_names
    installed = importlib.util.find_spec(module) is not None  # imports of it would be ours
    if folder.exists() or installed or module in taken | _template_words():
        wanted = "a name that no kernel, installed package or word of the template has"
        raise ValueError(f"{name}: wanted {wanted}, got one that is taken")
    words = {
        "kernel-name": name,
        "kernel_name": module,
        "KernelName": "".join(part.capitalize() for part in name.split("-")),
        "org-name": manifest.org or "org-name",
    }
    manifest_text = _listed(root / "build.toml", name)
    for source, text in _template().items():
        file = folder / _fill(source, words)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_fill(text, words), encoding="utf-8")
    (root / "build.toml").write_text(manifest_text, encoding="utf-8")
    (kernel,) = Manifest.load(root).select([name])
    sync(root, kernel)
    return folder


def _template() -> dict[str, str]:
    """The template's texts by their path in it."""
    files = (file for file in sorted(TEMPLATE.rglob("*")) if file.is_file())
    return {
        str(file.relative_to(TEMPLATE)): file.read_text(encoding="utf-8")
        for file in files
        if not is_bytecode(file)
    }


def _template_words() -> set[str]:
    """Names that code of the template uses, keywords among them: a kernel's would hide them."""
    code = (text for path, text in _template().items() if path.endswith(".py"))
    return {word for text in code for word in re.findall(r"\w+", text)} - {"kernel_name"}


def _fill(text: str, words: dict[str, str]) -> str:
    return re.sub("|".join(words), lambda match: words[match[0]], text)


def _listed(file: Path, name: str) -> str:
    """The manifest's text with one more kernel at the end of its list."""
    text = file.read_text(encoding="utf-8")
    kernels = tomllib.loads(text)["monorepo"]["kernels"]
    longer = re.sub(
        r"^(kernels\s*=\s*\[[^\]]*?),?(\s*\])", rf'\1, "{name}"\2', text, count=1, flags=re.M
    )
    try:
        if tomllib.loads(longer)["monorepo"]["kernels"] == [*kernels, name]:
            return longer
    except tomllib.TOMLDecodeError:  # a comment in the list, or the like
        pass
    raise ManifestError(f"{file}: monorepo.kernels: wanted a plain list, to add {name!r} to")


if __name__ == "__main__":
    raise SystemExit(main())
