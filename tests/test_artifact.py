"""The artifact, byte by byte: identity, _ops.py, metadata.json, variants, and the swap."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from kernels._rust import Digest, DigestAlgorithm, Metadata

import build as build_script
import toykernel
from monorepo import artifact
from monorepo.artifact import BuildError, build, identify
from monorepo.sync import sync

KERNEL = "toy-scale"


def tree(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def real_tree(kernel, tmp_path):
    """Git's own tree of the files that are built, in a repository that holds nothing else."""
    repository = tmp_path / "only"
    for name, file in artifact.source_files(kernel).items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, repository / name)
    toykernel.git(repository, "init", "-q")
    toykernel.git(repository, "add", "-A", "-f")
    return toykernel.git(repository, "write-tree")


# Identity


def test_unique_id_is_that_of_a_real_git_tree(tmp_path):
    root = tmp_path / "repo"
    # Names around the slash show whether directories sort as git sorts them.
    names = ("a-b.py", "a.py", "a/x.py", "a0.py", "a/b/é.py", "configs/NVIDIA H200.json")
    kernel = toykernel.write(root, {f"{toykernel.SOURCE}/{name}": "" for name in names})
    sync(root, kernel)
    assert identify(kernel).unique_id == real_tree(kernel, tmp_path)[:7]


def test_id_is_the_same_in_git_outside_and_in_an_archive(tmp_path):
    root = tmp_path / "repo"
    kernel = toykernel.write(root)
    sync(root, kernel)
    outside = identify(kernel)
    assert (outside.commit, outside.dirty) == (None, False)
    commit = toykernel.commit(root)
    assert identify(kernel) == artifact.Identity(outside.unique_id, commit, False)
    toykernel.git(root, "archive", "--prefix=unpacked/", "-o", str(tmp_path / "a.tar"), "HEAD")
    shutil.unpack_archive(tmp_path / "a.tar", tmp_path)
    assert identify(toykernel.load(tmp_path / "unpacked")) == outside


def test_id_ignores_what_is_not_built(tmp_path):
    kernel = toykernel.write(tmp_path)
    before = identify(kernel)
    toykernel.put(kernel.source_dir / "__pycache__/api.cpython-311.pyc", "x")
    toykernel.put(kernel.source_dir / "_ops.py", "x = 1")
    toykernel.put(kernel.source_dir / "notes.txt", "x")
    toykernel.put(kernel.path / "tests/test_more.py", "x = 1")
    toykernel.put(kernel.path / "CARD.md", "x")
    (kernel.source_dir / "api.py").chmod(0o755)
    assert identify(kernel) == before
    toykernel.put(kernel.source_dir / "api.py", "x = 1")
    assert identify(kernel) != before


@pytest.mark.parametrize("change", ["edit", "add", "delete", "stage", "build.toml", "ignored"])
def test_uncommitted_sources_make_a_dirty_build(tmp_path, change):
    # B83: nobody could tell that a build came from uncommitted sources.
    kernel = toykernel.write(tmp_path, {".gitignore": "hidden.json\nbuild/\n"})
    sync(tmp_path, kernel)
    commit = toykernel.commit(tmp_path)
    if change == "edit":
        toykernel.put(kernel.source_dir / "api.py", "x = 1")
    elif change == "add":
        toykernel.put(kernel.source_dir / "configs/new.json", "{}")
    elif change == "delete":
        (kernel.source_dir / "configs/none.json").unlink()
    elif change == "stage":
        toykernel.put(kernel.source_dir / "api.py", "x = 1")
        toykernel.git(tmp_path, "add", "-A")
    elif change == "build.toml":
        (kernel.path / "build.toml").write_text(toykernel.KERNEL_BUILD + "# more\n")
    elif change == "ignored":  # git status would not tell, but the file ships
        toykernel.put(kernel.source_dir / "configs/hidden.json", "{}")
    identity = identify(kernel)
    assert identity.dirty and identity.commit == commit
    assert identity.unique_id.endswith("_dirty")


def test_a_change_elsewhere_changes_neither_id_nor_commit(tmp_path):
    kernel = toykernel.write(tmp_path)
    sync(tmp_path, kernel)
    toykernel.commit(tmp_path)
    before = identify(kernel)
    toykernel.put(tmp_path / "README.md", "x")
    toykernel.put(kernel.path / "tests/test_more.py", "x = 1")
    toykernel.put(kernel.source_dir / "notes.txt", "does not ship")
    assert identify(kernel) == before
    (kernel.source_dir / "notes.txt").unlink()
    assert toykernel.commit(tmp_path) != before.commit
    assert identify(kernel) == before


def test_sources_that_were_never_committed_are_dirty_without_a_commit(tmp_path):
    kernel = toykernel.write(tmp_path)
    toykernel.git(tmp_path, "init", "-q")
    identity = identify(kernel)
    assert identity.dirty and identity.commit is None


def test_a_folder_that_git_ignores_belongs_to_no_repository(tmp_path):
    toykernel.put(tmp_path / ".gitignore", "unpacked/\n")
    toykernel.commit(tmp_path)
    identity = identify(toykernel.write(tmp_path / "unpacked"))
    assert (identity.commit, identity.dirty) == (None, False)


def test_a_hooks_environment_does_not_turn_the_question_elsewhere(tmp_path, monkeypatch):
    kernel = toykernel.write(tmp_path / "repo")
    toykernel.commit(tmp_path / "repo")
    expected = identify(kernel)
    (tmp_path / "other").mkdir()
    toykernel.git(tmp_path / "other", "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/.git/index"))
    assert identify(kernel) == expected and expected.commit is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallow_clone_records_a_commit_only_if_it_is_the_right_one(tmp_path, depth, capfd):
    root = tmp_path / "repo"
    kernel = toykernel.write(root)
    sync(root, kernel)
    toykernel.commit(root)
    (kernel.source_dir / "config.py").write_text("BLOCK = 2048\n")
    last = toykernel.commit(root)
    toykernel.put(root / "README.md", "later")
    toykernel.commit(root)
    full = identify(kernel)
    assert full.commit == last
    toykernel.git(tmp_path, "clone", "-q", f"--depth={depth}", f"file://{root}", "clone")
    shallow = identify(toykernel.load(tmp_path / "clone"))
    # Where history is cut, its first commit looks as if it had written every file.
    assert shallow == artifact.Identity(full.unique_id, None, False)
    assert "shallow clone" in capfd.readouterr().err
    toykernel.git(tmp_path, "clone", "-q", "--depth=3", f"file://{root}", "deeper")
    assert identify(toykernel.load(tmp_path / "deeper")) == full


def test_a_git_that_refuses_to_answer_is_reported(tmp_path, monkeypatch, capfd):
    kernel = toykernel.write(tmp_path)
    toykernel.commit(tmp_path)
    (tmp_path / ".git/config").write_text("[broken\n")
    identity = identify(kernel)
    assert (identity.commit, identity.dirty) == (None, False)
    assert "no commit is recorded" in capfd.readouterr().err


def test_without_git_installed_the_id_is_the_same(tmp_path, monkeypatch):
    kernel = toykernel.write(tmp_path)
    toykernel.commit(tmp_path)
    expected = identify(kernel).unique_id
    monkeypatch.setenv("PATH", str(tmp_path))
    assert identify(kernel) == artifact.Identity(expected, None, False)


# What a build holds


@pytest.fixture
def built(tmp_path):
    kernel = toykernel.write(tmp_path)
    sync(tmp_path, kernel)
    toykernel.commit(tmp_path)
    return kernel, build(tmp_path, kernel)


def test_build_has_a_variant_a_backend_the_card_and_the_benchmarks(built):
    # B76, B77: what is not in the list of backends cannot be loaded there, and no torch-universal.
    kernel, folder = built
    assert folder == kernel.path / "build"
    names = {"torch-cpu", "torch-cuda", "torch-rocm", "CARD.md", "benchmarks"}
    assert {entry.name for entry in folder.iterdir()} == names
    assert tree(folder / "benchmarks") == tree(kernel.path / "benchmarks")
    expected = {n: f.read_bytes() for n, f in artifact.variant_files(kernel).items()}
    for backend in kernel.backends:
        files = tree(folder / f"torch-{backend}")
        assert files.pop("metadata.json")
        assert files.pop("_ops.py") == (folder / "torch-cpu/_ops.py").read_bytes()
        assert files == expected
    assert {"_shared/rows.py", "configs/none.json", "api.py"} <= set(expected)


def test_xpu_is_a_variant_like_the_others(tmp_path):
    toml = toykernel.KERNEL_BUILD.replace('"rocm"', '"rocm", "xpu"')
    kernel = toykernel.write(tmp_path, {f"{KERNEL}/build.toml": toml})
    folder = build(tmp_path, kernel)
    assert tree(folder / "torch-xpu").keys() == tree(folder / "torch-cpu").keys()


def test_metadata_has_the_prescribed_bytes(built):
    kernel, folder = built
    identity = identify(kernel)
    file = folder / "torch-cuda/metadata.json"
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, folder / "torch-cuda")
    files = dict(sorted(digest.files.items(), key=lambda item: item[0].encode()))
    expected = {
        "name": "toy-scale",
        "id": f"_toy_scale_cuda_{identity.unique_id}",
        "version": 1,
        "kernels-minver": "0.14.0",
        "license": "MIT",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": "cuda"},
        "digest": {"algorithm": "sha256", "files": files},
        "provenance": {
            "kernel-builder": {"version": artifact.TOOL_VERSION},
            "kernel": {"commit": identity.commit, "dirty": False},
        },
    }
    assert file.read_text() == json.dumps(expected, indent=2, ensure_ascii=False)
    read = Metadata.read_from_file(file)
    read.digest.validate(digest)
    assert artifact.as_dict(read) == expected


def test_metadata_with_every_optional_key(tmp_path):
    toml = """\
        [general]
        name = "toy-scale"
        version = 1
        edition = 5
        license = "MIT"
        backends = ["cuda", "rocm"]
        upstream = "https://example.org/a.git"
        source = "git@example.org:a/b.git"
        python-depends = ["einops"]
        kernel-depends = [{ repo-id = "a/b", version = 2 }]
        [general.cuda]
        python-depends = ["nvidia-cutlass-dsl"]
        kernel-depends = [{ repo-id = "a/c", revision = "main" }]
        [general.hub]
        repo-id = "toys/toy-scale"
        [torch-noarch]
        pyext = ["py", "json"]
        cuda_capabilities = ["8.0+PTX"]
        """
    files = {f"{KERNEL}/build.toml": toml, f"{toykernel.SOURCE}/configs/é.json": "{}"}
    folder = build(tmp_path, toykernel.write(tmp_path, files))
    text = (folder / "torch-cuda/metadata.json").read_text()
    content = json.loads(text)
    assert list(content) == [
        "name",
        "id",
        "version",
        "kernels-minver",
        "license",
        "upstream",
        "source",
        "python-depends",
        "kernel-depends",
        "backend",
        "digest",
        "provenance",
    ]
    assert content["kernels-minver"] == "0.17.0"
    assert content["python-depends"] == ["einops", "nvidia-cutlass-dsl"]
    assert content["kernel-depends"][1] == {"repo-id": "a/c", "revision": "main"}
    assert content["backend"] == {"type": "cuda", "archs": ["8.0+PTX"]}
    assert "configs/é.json" in text
    rocm = json.loads((folder / "torch-rocm/metadata.json").read_text())
    assert rocm["backend"] == {"type": "rocm"} and rocm["python-depends"] == ["einops"]


def test_metadata_outside_git_has_no_source_commit(tmp_path):
    folder = build(tmp_path, toykernel.write(tmp_path))
    provenance = json.loads((folder / "torch-cpu/metadata.json").read_text())["provenance"]
    assert provenance == {"kernel-builder": {"version": artifact.TOOL_VERSION}}


def test_dirty_build_says_so_in_id_and_provenance(built, tmp_path):
    # B83
    kernel, _ = built
    toykernel.put(kernel.source_dir / "config.py", "BLOCK = 1\n")
    file = build(tmp_path, kernel) / "torch-cpu/metadata.json"
    read = Metadata.read_from_file(file)
    assert read.provenance.dirty and read.provenance.kernel.commit == identify(kernel).commit
    assert read.id.endswith("_dirty") and read.id.isidentifier()


FAKE_TORCH = """
class torch:
    class backends:
        class mps:
            is_available = staticmethod(lambda: False)
    class version:
        cuda = hip = None
    class ops:
        pass
"""


@pytest.mark.parametrize(
    ("versions", "backend"),
    [
        ({}, "cpu"),
        ({"version__cuda": "12.8"}, "cuda"),
        ({"version__hip": "6.4"}, "rocm"),
        ({"version__xpu": "2025.1"}, "xpu"),
        ({"version__xpu": None}, "cpu"),
        ({"backends__tpu": 1, "version__cuda": "12.8"}, "tpu"),
        ({"neuron": 1, "version__cuda": "12.8"}, "neuron"),
    ],
)
def test_ops_namespace_follows_the_installed_torch(tmp_path, versions, backend):
    kernel = toykernel.write(tmp_path)
    source = artifact.ops_source(kernel, artifact.Identity("abc1234", None, False))
    names = {}
    exec(FAKE_TORCH, names)
    fake = names["torch"]
    for name, value in versions.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(fake, owner) if owner else fake, attribute, value)
    expected = f"_toy_scale_{backend}_abc1234"
    setattr(fake.ops, expected, "the namespace")
    exec(source.replace("import torch\n", ""), names)
    assert names["get_backend"]() == backend
    assert names["_OPS_NAME"] == expected
    assert names["ops"] == "the namespace"
    assert names["add_op_namespace_prefix"]("scale") == f"{expected}::scale"


# Building again


def test_two_builds_are_byte_identical_in_other_folders_and_at_other_times(tmp_path):
    # B83
    first, second = tmp_path / "a", tmp_path / "elsewhere/b"
    built = []
    for root in (first, second):
        kernel = toykernel.write(root)
        os.utime(kernel.source_dir / "api.py", (1, 1 + len(built)))
        built.append(tree(build(root, kernel)))
    assert built[0] == built[1]


@pytest.mark.parametrize("kind", ["link to a folder", "dangling link", "file"])
def test_whatever_stands_in_the_builds_place_is_replaced(tmp_path, kind):
    """And does not block the build after it; what a link leads to is left alone."""
    toykernel.write(tmp_path)
    kernel = toykernel.load(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    toykernel.put(elsewhere / "kept.txt", "kept")
    place = kernel.path / "build"
    if kind == "file":
        toykernel.put(place, "in the way")
    else:
        place.symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nowhere")
    for _ in range(2):
        made = build(tmp_path, kernel)
        assert made == place and not made.is_symlink() and (made / "torch-cpu").is_dir()
        assert not list(kernel.path.glob(".build.*"))
    assert (elsewhere / "kept.txt").read_text() == "kept"


def test_stale_files_and_bytecode_never_survive(built, tmp_path):
    kernel, folder = built
    before = tree(folder)
    toykernel.put(folder / "torch-cpu/gone.py", "x = 1")
    toykernel.put(folder / "torch-xpu/metadata.json", "{}")
    toykernel.put(kernel.source_dir / "__pycache__/api.cpython-311.pyc", "x")
    toykernel.put(kernel.source_dir / "loose.pyc", "x")
    toykernel.put(kernel.path / "benchmarks/__pycache__/b.pyc", "x")
    toykernel.put(kernel.path / ".build.new/torch-cpu/killed.py", "x = 1")
    assert tree(build(tmp_path, kernel)) == before
    assert not list(kernel.path.glob(".build*"))


@pytest.mark.parametrize("failure", ["source", "card", "check"])
def test_a_failed_build_leaves_the_earlier_one(built, tmp_path, failure):
    kernel, folder = built
    before = tree(folder)

    def refuse(kernel, made):
        assert (made / "torch-cpu/metadata.json").is_file()
        raise ValueError("refused")

    if failure == "source":
        toykernel.put(kernel.source_dir / "api.py", "def")
    if failure == "card":
        toykernel.put(kernel.path / "CARD.md", "{{ nothing }}")
    with pytest.raises(ValueError):
        build(tmp_path, kernel, check=refuse)
    assert tree(folder) == before
    assert not list(kernel.path.glob(".build*"))


def test_out_gets_a_folder_a_kernel_and_the_same_bytes(built, tmp_path):
    kernel, folder = built
    out = build(tmp_path, kernel, out=tmp_path / "out")
    assert out == tmp_path / "out/toy-scale"
    assert tree(out) == tree(folder)


def test_a_build_of_some_backends_holds_no_others(built, tmp_path):
    kernel, folder = built
    whole = tree(folder)
    build(tmp_path, kernel, backends=["rocm"])
    rocm = {n: b for n, b in whole.items() if not n.startswith(("torch-cpu", "torch-cuda"))}
    assert tree(folder) == rocm


def test_a_backend_that_the_kernel_has_not_is_refused(built, tmp_path):
    kernel, _ = built
    with pytest.raises(BuildError, match="toy-scale: wanted a backend among cpu, cuda, rocm, got"):
        build(tmp_path, kernel, backends=["cuda", "xpu"])


def test_builds_at_the_same_time_do_not_disturb_each_other(tmp_path):
    kernel = toykernel.write(tmp_path)
    expected = tree(build(tmp_path, kernel))
    code = (
        "import sys; from pathlib import Path; from monorepo import artifact, manifest\n"
        "root = Path(sys.argv[1]); kernel = manifest.Manifest.load(root).kernels[0]\n"
        "for _ in range(20): artifact.build(root, kernel)\n"
    )
    scripts = os.path.dirname(build_script.__file__)
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": scripts}) for _ in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert tree(kernel.path / "build") == expected


# The command line


def test_command_line_builds_checks_and_prints_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build_script, "ROOT", tmp_path)
    kernel = toykernel.write(tmp_path)
    assert build_script.main(["toy-scale", "--out", str(tmp_path / "out")]) == 0
    line = capsys.readouterr().out
    expected = f"toy-scale {identify(kernel).unique_id}: torch-cpu, torch-cuda, torch-rocm; "
    assert line.startswith(expected) and line.count("\n") == 1
    assert (tmp_path / "out/toy-scale/torch-cpu/metadata.json").is_file()


@pytest.mark.parametrize("argv", [["gone"], ["--backend", "xpu"]])
def test_command_line_says_what_is_wrong_and_exits_1(tmp_path, monkeypatch, capsys, argv):
    monkeypatch.setattr(build_script, "ROOT", tmp_path)
    toykernel.write(tmp_path)
    assert build_script.main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "wanted" in error and error.count("\n") == 1
