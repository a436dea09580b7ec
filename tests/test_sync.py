"""Copies of shared/ in a kernel: exactly what it imports, and never stale."""

import os

import pytest

import sync_shared
import toykernel
from monorepo.sync import SyncError, sync

COPY = f"{toykernel.SOURCE}/_shared"


def copies(root):
    return sorted(file.name for file in (root / COPY).glob("*"))


def test_copies_what_is_imported_transitively_and_nothing_else(tmp_path):
    kernel = toykernel.write(tmp_path)
    written = sync(tmp_path, kernel)
    assert copies(tmp_path) == ["__init__.py", "rows.py", "shape.py"]
    assert written == [tmp_path / COPY / name for name in copies(tmp_path)]
    assert sync(tmp_path, kernel) == []


def test_first_line_says_where_the_copy_comes_from_and_the_rest_is_the_source(tmp_path):
    sync(tmp_path, toykernel.write(tmp_path))
    first, _, rest = (tmp_path / COPY / "rows.py").read_bytes().partition(b"\n")
    assert first.startswith(b"# Copied from shared/rows.py by scripts/sync_shared.py")
    assert rest == (tmp_path / "shared/rows.py").read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        "from ._shared import unused",
        "from ._shared.unused import x",
        "def f():\n    from ._shared import unused",
        "try:\n    from ._shared.unused import x\nexcept ImportError:\n    pass",
    ],
)
def test_every_form_of_import_is_seen(tmp_path, line):
    kernel = toykernel.write(tmp_path, {f"{toykernel.SOURCE}/config.py": line})
    sync(tmp_path, kernel)
    assert "unused.py" in copies(tmp_path)


def test_import_from_a_subpackage_counts_dots(tmp_path):
    # B80: the depth of a relative import is what gets miscounted.
    files = {f"{toykernel.SOURCE}/deep/er.py": "from .._shared import unused"}
    sync(tmp_path, toykernel.write(tmp_path, files))
    assert "unused.py" in copies(tmp_path)
    files = {f"{toykernel.SOURCE}/deep/er.py": "from ...._shared import unused"}
    with pytest.raises(SyncError, match=r"er\.py:1: wanted an import inside the package"):
        sync(tmp_path, toykernel.write(tmp_path, files))


def test_shared_modules_import_each_other_by_name(tmp_path):
    kernel = toykernel.write(tmp_path, {"shared/rows.py": "from . import shape, unused\n"})
    sync(tmp_path, kernel)
    assert copies(tmp_path) == ["__init__.py", "rows.py", "shape.py", "unused.py"]


def test_init_can_import_too(tmp_path):
    kernel = toykernel.write(tmp_path, {"shared/__init__.py": "from .unused import x\n"})
    sync(tmp_path, kernel)
    assert "unused.py" in copies(tmp_path)


def test_stale_copies_go_and_bytecode_does_not_keep_them(tmp_path):
    kernel = toykernel.write(tmp_path)
    sync(tmp_path, kernel)
    stale = tmp_path / COPY / "gone.py"
    toykernel.put(stale, "x = 1\n")
    toykernel.put(tmp_path / COPY / "sub/old.py", "x = 1\n")
    toykernel.put(tmp_path / COPY / "sub/__pycache__/old.pyc", "x")
    assert sync(tmp_path, kernel) == [stale, tmp_path / COPY / "sub/old.py"]
    assert copies(tmp_path) == ["__init__.py", "rows.py", "shape.py"]


def test_no_import_leaves_no_folder(tmp_path):
    kernel = toykernel.write(tmp_path)
    sync(tmp_path, kernel)
    toykernel.put(tmp_path / toykernel.SOURCE / "api.py", "def scale(x): ...\n")
    sync(tmp_path, kernel)
    assert not (tmp_path / COPY).exists()


@pytest.mark.parametrize("line", ["from ._shared.gone import x", "from ._shared.rows.x import y"])
def test_unknown_module_is_named_with_its_place(tmp_path, line):
    kernel = toykernel.write(tmp_path, {f"{toykernel.SOURCE}/config.py": f"\n{line}\n"})
    with pytest.raises(SyncError, match=r"config\.py:2: wanted a module of .*shared, got"):
        sync(tmp_path, kernel)


def test_unparsable_source_is_named(tmp_path):
    kernel = toykernel.write(tmp_path, {f"{toykernel.SOURCE}/config.py": "def"})
    with pytest.raises(SyncError, match=r"config\.py: wanted Python source"):
        sync(tmp_path, kernel)


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_link_to_shared_is_replaced_and_never_written_through(tmp_path, whole_folder):
    kernel = toykernel.write(tmp_path)
    source = (tmp_path / "shared/rows.py").read_bytes()
    if whole_folder:
        (tmp_path / COPY).symlink_to(tmp_path / "shared")
    else:
        (tmp_path / COPY).mkdir()
        (tmp_path / COPY / "rows.py").symlink_to(tmp_path / "shared/rows.py")
    assert tmp_path / COPY / "rows.py" in sync(tmp_path, kernel)
    assert (tmp_path / "shared/rows.py").read_bytes() == source
    assert not (tmp_path / COPY).is_symlink()
    assert not any(file.is_symlink() for file in (tmp_path / COPY).iterdir())


def test_check_lists_differences_changes_nothing_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sync_shared, "ROOT", tmp_path)
    toykernel.write(tmp_path)
    assert sync_shared.main([]) == 0
    assert sync_shared.main(["--check"]) == 0
    copy = tmp_path / COPY / "rows.py"
    copy.write_text("edited\n")
    toykernel.put(tmp_path / COPY / "gone.py", "")
    (tmp_path / COPY / "shape.py").unlink()
    capsys.readouterr()
    assert sync_shared.main(["--check"]) == 1
    shown = capsys.readouterr()
    for name in ("rows.py", "gone.py", "shape.py"):
        assert os.path.join(COPY, name) in shown.out
    assert "__init__.py" not in shown.out
    assert shown.err == "error: run scripts/sync_shared.py\n"
    assert copy.read_text() == "edited\n" and not (tmp_path / COPY / "shape.py").exists()
    assert sync_shared.main([]) == 0
    assert sync_shared.main(["--check"]) == 0


def test_command_line_names_the_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sync_shared, "ROOT", tmp_path)
    assert sync_shared.main([]) == 1
    assert capsys.readouterr().err.startswith("error: ")
