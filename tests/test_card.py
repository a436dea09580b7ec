"""The card: the template's variables, found as kernel-builder finds them."""

import pytest

import toykernel
from monorepo import card

INIT = f"{toykernel.SOURCE}/__init__.py"


def test_card_has_names_version_and_licence(tmp_path):
    text = card.render(toykernel.write(tmp_path))
    assert text.startswith("---\nlibrary_name: kernels\nlicense: mit\n---\n# toys/toy-scale\n")
    assert 'get_kernel("toys/toy-scale", version=1)' in text
    assert text.endswith("## Functions\n- `scale`\n\n## Layers\n- `Scale`\n")


def test_version_of_the_card_is_that_of_the_build(tmp_path):
    # B85: nothing that a user copies may pin another version.
    toml = toykernel.KERNEL_BUILD.replace("version = 1", "version = 2")
    kernel = toykernel.write(tmp_path, {"toy-scale/build.toml": toml})
    assert "version=2)" in card.render(kernel)


@pytest.mark.parametrize(
    ("init", "functions"),
    [
        ('__all__ = ["a", "layers", "b"]', ["a", "b"]),
        ('__all__ = ("a",)', None),
        ('__all__: list[str] = ["a"]', None),
        ('__all__ = []\n__all__ += ["a"]', None),
        ('__all__ = ["a"]\n__all__ = ["b"]', ["a"]),
        ('if True:\n    __all__ = ["a"]', None),
        ('__all__ = ["a", name, 3]', ["a"]),
        ("", None),
    ],
)
def test_functions_are_those_of_the_first_plain_list(tmp_path, init, functions):
    assert card.functions(toykernel.write(tmp_path, {INIT: init})) == functions


def test_layers_are_all_top_level_classes_if_public(tmp_path):
    kernel = toykernel.write(tmp_path)
    text = (
        "from x import Imported\nclass A: ...\nclass _B(A):\n    class Inner: ...\ndef f(): ...\n"
    )
    toykernel.put(kernel.source_dir / "layers.py", text)
    assert card.layers(kernel) == ["A", "_B"]
    toykernel.put(kernel.source_dir / "layers/__init__.py", "class P: ...\n")
    assert card.layers(kernel) == ["P"]
    toykernel.put(tmp_path / INIT, '__all__ = ["scale"]')
    assert card.layers(kernel) is None


def test_benchmark_upstream_and_source(tmp_path):
    template = "{{ has_benchmark }} {{ upstream }} {{ source }}"
    toml = toykernel.KERNEL_BUILD.replace(
        "edition",
        'upstream = "git@host.org:a/b.git"\nsource = "https://host.org/a/b"\nedition',
    )
    files = {"toy-scale/CARD.md": template, "toy-scale/build.toml": toml}
    kernel = toykernel.write(tmp_path, files)
    assert card.render(kernel) == "True ssh://git@host.org/a/b.git https://host.org/a/b"
    (kernel.path / "benchmarks/benchmark.py").rename(kernel.path / "benchmarks/benchmark_a.py")
    assert card.render(kernel).startswith("False ")


def test_a_variable_that_does_not_exist_is_refused(tmp_path):
    kernel = toykernel.write(tmp_path, {"toy-scale/CARD.md": "{{ functoins }}"})
    with pytest.raises(card.CardError, match=r"CARD\.md: wanted a card template, got 'functoins'"):
        card.render(kernel)


@pytest.mark.parametrize("template", ["{% for x %}", "{{ a b }}"])
def test_a_template_that_does_not_parse_is_refused(tmp_path, template):
    kernel = toykernel.write(tmp_path, {"toy-scale/CARD.md": template})
    with pytest.raises(card.CardError, match=r"CARD\.md: wanted a card template"):
        card.render(kernel)


def test_a_kernel_without_repo_id_has_no_card(tmp_path):
    toml = toykernel.KERNEL_BUILD.replace('repo-id = "toys/toy-scale"', "")
    kernel = toykernel.write(tmp_path, {"toy-scale/build.toml": toml})
    with pytest.raises(card.CardError, match=r"general\.hub\.repo-id: wanted ORG/toy-scale"):
        card.render(kernel)
