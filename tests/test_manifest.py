"""build.toml, of the monorepo and of a kernel: what is read, what is refused, with which text."""

import re
from pathlib import Path

import pytest

import toykernel
from monorepo.manifest import Kernel, Manifest, ManifestError, Target

ROOT = Path(__file__).resolve().parent.parent


def kernel_with(root: Path, old: str, new: str) -> Kernel:
    assert old in toykernel.KERNEL_BUILD
    toykernel.put(root / "build.toml", toykernel.KERNEL_BUILD.replace(old, new))
    return Kernel.load(root)


def test_manifest_reads_org_kernels_and_targets(tmp_path):
    toykernel.write(tmp_path)
    manifest = Manifest.load(tmp_path)
    assert manifest.org == "toys"
    assert [kernel.name for kernel in manifest.kernels] == ["toy-scale"]
    assert manifest.targets == (Target("cuda", 90, 32, 232448),)


def test_own_manifest_has_the_supported_targets():
    targets = {(t.backend, t.arch): t for t in Manifest.load(ROOT).targets}
    assert {key: t.shared_memory // 1024 for key, t in targets.items()} == {
        ("cuda", 80): 163,
        ("cuda", 90): 227,
        ("cuda", 100): 227,
        ("hip", "gfx942"): 64,
        ("hip", "gfx950"): 160,
    }
    assert all(t.warp_size == (64 if t.backend == "hip" else 32) for t in targets.values())


def test_kernel_reads_every_value(tmp_path):
    toykernel.put(
        tmp_path / "build.toml",
        """\
        [general]
        name = "toy-scale"
        version = 3
        edition = 5
        license = "Apache-2.0"
        backends = ["cuda", "xpu"]
        upstream = "https://example.org/a.git"
        source = "git@example.org:a/b.git"
        python-depends = ["einops"]
        kernel-depends = [{ repo-id = "a/b", version = 2 }]
        [general.cuda]
        python-depends = ["nvidia-cutlass-dsl"]
        [general.xpu]
        kernel-depends = [{ repo-id = "a/c", revision = "main" }]
        [general.hub]
        repo-id = "toys/toy-scale"
        branch = "v3"
        [torch-noarch]
        cuda_capabilities = ["8.0+PTX"]
        rocm_archs = ["gfx942"]
        """,
    )
    kernel = Kernel.load(tmp_path)
    assert (kernel.name, kernel.module, kernel.version) == ("toy-scale", "toy_scale", 3)
    assert (kernel.license, kernel.backends) == ("Apache-2.0", ("cuda", "xpu"))
    assert (kernel.repo_id, kernel.pyext) == ("toys/toy-scale", ("py", "pyi"))
    assert (kernel.upstream, kernel.source) == (
        "https://example.org/a.git",
        "git@example.org:a/b.git",
    )
    assert kernel.python_depends("cuda") == ["einops", "nvidia-cutlass-dsl"]
    assert kernel.python_depends("xpu") == ["einops"]
    assert kernel.kernel_depends("xpu") == [
        {"repo-id": "a/b", "version": 2},
        {"repo-id": "a/c", "revision": "main"},
    ]
    assert (kernel.archs("cuda"), kernel.archs("xpu")) == (("8.0+PTX",), ())
    assert kernel.source_dir == tmp_path / "torch-ext" / "toy_scale"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("edition = 5", "", "general.edition: wanted 5, got nothing"),
        ("edition = 5", "edition = 4", "general.edition: wanted 5, got 4"),
        ("edition = 5", 'edition = "5"', "general.edition: wanted 5, got '5'"),
        ('"cpu", "cuda", "rocm"', "", "general.backends: wanted one or more of"),
        ('"cpu", "cuda"', '"cpu", "cpu"', "general.backends: wanted each backend once"),
        ('"rocm"', '"metal"', "general.backends: wanted one or more of cpu, cuda, rocm, xpu, got"),
        ('"rocm"', '"npu"', "Unknown variant npu"),
        ('"MIT"', '"My own"', "general.license: wanted a Hub licence id such as MIT, got 'My own'"),
        ("toys/toy-scale", "toys/other", "repo-id: wanted ORG/toy-scale, got 'toys/other'"),
        ("toys/toy-scale", "not an id // x", "repo-id: wanted ORG/toy-scale"),
        ('"toy-scale"', '"toy_scale"', "Invalid kernel name `toy_scale`"),
        ("version = 1", "version = -1", "Invalid value integer `-1`"),
        ("version = 1", "", "Missing field version"),
        ("[general.hub]", '[general.hub]\nbranch = "main"', "branch: wanted v1 or no such key"),
        ('"py", "json"', '"json"', "torch-noarch.pyext: wanted a list of extensions"),
        ('"py", "json"', '"py", "py"', "torch-noarch.pyext: wanted a list of extensions"),
        ('"py", "json"', '"py", "pyc"', "torch-noarch.pyext: wanted extensions without the dot"),
        ('"py", "json"', '"py", "so"', "torch-noarch.pyext: wanted sources and data only"),
        ("pyext", 'cuda_capabilities = ["sm_90"]\npyext', "cuda_capabilities: wanted entries"),
        ("pyext", 'rocm_archs = ["mi300"]\npyext', "rocm_archs: wanted entries like"),
        ("pyext", 'cuda-capabilities = ["9.0"]\npyext', "Unknown field cuda-capabilities"),
        ("license", 'python-depends = ["numpy"]\nlicense', "general.python-depends: wanted one"),
        ("[torch-noarch]", "[torch]", "torch-noarch: wanted a table: only noarch"),
        ("[torch-noarch]", "[torch-noarch", "wanted TOML, got"),
    ],
)
def test_what_cannot_be_built_is_refused_with_file_and_key(tmp_path, old, new, text):
    with pytest.raises(ManifestError) as error:
        kernel_with(tmp_path, old, new)
    assert str(tmp_path / "build.toml") in str(error.value)
    assert text in str(error.value)


def test_bad_backend_dependency_is_refused_though_the_backend_is_not_built(tmp_path):
    extra = '[general.xpu]\npython-depends = ["nki"]\n[general.hub]'
    with pytest.raises(ManifestError, match=r"general\.xpu\.python-depends: wanted one of onednn"):
        kernel_with(tmp_path, "[general.hub]", extra)


def test_compiled_parts_are_refused(tmp_path):
    extra = '[kernel.scale]\nbackend = "cuda"\ndepends = []\nsrc = ["a.cu"]\n[torch-noarch]'
    with pytest.raises(ManifestError, match="kernel: wanted no compiled parts"):
        kernel_with(tmp_path, "[torch-noarch]", extra)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ManifestError, match=re.escape(f"{tmp_path / 'build.toml'}: wanted a file")):
        Kernel.load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"toys"', "7", "monorepo.org: wanted a Hub organisation's name, got 7"),
        ('["toy-scale"]', "[]", "monorepo.kernels: wanted a non-empty list"),
        ('["toy-scale"]', '["toy-scale", "toy-scale"]', "monorepo.kernels: wanted each folder"),
        ('["toy-scale"]', '["toy-scale", "gone"]', "gone/build.toml: wanted a file, got none"),
        ("[monorepo]", "[mono]", "mono: wanted only monorepo, target"),
        ("arch = 90", "", "target.arch: wanted a value of the right type, got nothing"),
        ('"cuda"', '"metal"', "target.backend: wanted cuda or hip, got 'metal'"),
        ("warp-size = 32", "warp-size = 0", "target: wanted sizes above 0"),
        ("warp-size = 32", "warp-size = 32\nwarps = 4", "target.warps: wanted only"),
        ('"toys"', '"others"', "repo-id: wanted others/toy-scale, with the organisation of"),
    ],
)
def test_wrong_top_level_manifest_is_refused(tmp_path, old, new, text):
    toykernel.write(tmp_path)
    assert old in toykernel.BUILD
    toykernel.put(tmp_path / "build.toml", toykernel.BUILD.replace(old, new, 1))
    with pytest.raises(ManifestError) as error:
        Manifest.load(tmp_path)
    assert text in str(error.value)


def test_folder_and_name_are_one(tmp_path):
    toykernel.write(tmp_path)
    (tmp_path / "toy-scale").rename(tmp_path / "scale")
    toykernel.put(tmp_path / "build.toml", toykernel.BUILD.replace('"toy-scale"', '"scale"'))
    with pytest.raises(ManifestError, match="general.name: wanted the folder's name, 'scale'"):
        Manifest.load(tmp_path)


def test_select_keeps_build_order_and_names_what_exists(tmp_path):
    toykernel.write(tmp_path)
    manifest = Manifest.load(tmp_path)
    assert manifest.select([]) == manifest.kernels
    assert manifest.select(["toy-scale"]) == manifest.kernels
    with pytest.raises(ManifestError, match="wanted one of toy-scale, got 'toy'"):
        manifest.select(["toy"])
