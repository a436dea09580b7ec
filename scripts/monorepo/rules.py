"""Rules for a kernel's sources: those of kernel-builder, and what its checks let pass."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from . import card
from .manifest import BACKEND_PYTHON_DEPENDS, PYTHON_DEPENDS, Kernel

# The steps of one call, lowest first: a lower one never imports a higher one.
STEPS = ("_ops", "_shared", "_kernels", "launch", "config", "reference", "ops", "api")
TOP = len(STEPS)  # layers and modules, side by side
INIT = TOP + 1

# Registrations that take an operator's qualified name first, with the keywords for it.
REGISTRATIONS = {
    "custom_op": ("name",),
    "triton_op": ("name",),
    "define": ("qualname",),
    "impl": ("qualname",),
    "register_autocast": ("op",),
    "register_autograd": ("op",),
    "register_fake": ("op",),
    "register_kernel": ("op",),
    "register_torch_dispatch": ("op",),
    "register_vmap": ("op",),
}
# Those that kernel-builder itself refuses wherever the call is a decorator of another form.
STRICT = {
    "custom_op",
    "triton_op",
    "register_kernel",
    "register_fake",
    "register_vmap",
    "register_torch_dispatch",
}


@dataclass(frozen=True)
class Module:
    """A parsed Python file of a kernel's package.

    Attributes:
        file: Where it lies.
        parts: Its dotted name inside the package, in parts; a package's `__init__` has none of
            its own.
        is_package: Whether it is an `__init__.py`.
        tree: The syntax tree.
    """

    file: Path
    parts: tuple[str, ...]
    is_package: bool
    tree: ast.Module

    def at(self, node: ast.AST) -> str:
        """The place of a node, for a message."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    @property
    def package(self) -> tuple[str, ...]:
        """The package that relative imports start from."""
        return self.parts if self.is_package else self.parts[:-1]


Modules = Mapping[tuple[str, ...], Module]


def violations(kernel: Kernel) -> list[str]:
    """What in a kernel's folder breaks a rule, each with its file; all of it."""
    found = list(_layout(kernel))
    modules, unparsable = _parse(kernel)
    found += unparsable
    if not found:
        for rule in (_absolute_imports, _relative_imports, _layering, _layers, _public):
            found += rule(kernel, modules)
        found += _kernel_text(modules.values())
        found += _namespaces([*modules.values(), *_tests(kernel)])
    return found


def jit_names(files: Iterable[Path]) -> dict[str, list[str]]:
    """The places of all `@triton.jit` functions, by name."""
    places = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes(), filename=str(file))):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                places[node.name].append(f"{file}:{node.lineno}")
    return places


def _layout(kernel: Kernel) -> Iterator[str]:
    source = kernel.source_dir
    if not (source / "__init__.py").is_file():
        yield f"{source / '__init__.py'}: wanted a file, got none"
    if (source / kernel.module).exists() or (source / f"{kernel.module}.py").exists():
        yield f"{source / kernel.module}: a module of the package's own name is refused"
    if not (kernel.path / "CARD.md").is_file():
        yield f"{kernel.path / 'CARD.md'}: wanted a file, got none"
    for name in ("setup.py", "pyproject.toml"):
        if (kernel.path / name).exists():
            yield f"{kernel.path / name}: kernel-builder generates it, it cannot be in the source"
    generated = [*(kernel.path / "torch-ext").rglob("_ops.py"), *kernel.path.glob("metadata*.json")]
    for file in generated:
        yield f"{file}: the build generates it, it cannot be in the source"
    for folder in (kernel.path / "torch-ext", kernel.path / "benchmarks"):
        for file in sorted(folder.rglob("*")):
            if file.is_symlink():
                yield f"{file}: a symbolic link does not survive a build"
    for file in sorted(source.rglob("*")):
        hidden = file.name.startswith(".") or "__pycache__" in file.parts or file.suffix == ".pyc"
        if file.is_file() and not hidden and not kernel.ships(file):
            wanted = ", ".join(kernel.pyext)
            yield f"{file}: would not ship: torch-noarch.pyext has only {wanted}"


def _parse(kernel: Kernel) -> tuple[dict[tuple[str, ...], Module], list[str]]:
    modules, errors = {}, []
    for file in sorted(kernel.source_dir.rglob("*.py")):
        name = file.relative_to(kernel.source_dir).with_suffix("").parts
        is_package = name[-1] == "__init__"
        try:
            # The oldest Python that the kernels support decides what may be written.
            tree = ast.parse(file.read_bytes(), str(file), feature_version=(3, 10))
        except (SyntaxError, ValueError) as error:
            errors.append(f"{file}: wanted Python 3.10 source, got {error}")
            continue
        parts = name[:-1] if is_package else name
        modules[parts] = Module(file, parts, is_package, tree)
    return modules, errors


def _tests(kernel: Kernel) -> list[Module]:
    """The kernel's tests: kernel-builder holds them to the rule for namespaces as well."""
    files = sorted((kernel.path / "tests").rglob("*.py"))
    return [Module(file, (), False, ast.parse(file.read_bytes(), str(file))) for file in files]


def _absolute_imports(kernel: Kernel, modules: Modules) -> Iterator[str]:
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for backend in kernel.backends:
        known = {**PYTHON_DEPENDS, **BACKEND_PYTHON_DEPENDS.get(backend, {})}
        allowed |= {known[name] or name for name in kernel.python_depends(backend)}
        allowed |= {"kernels"} if kernel.kernel_depends(backend) else set()
    for module in modules.values():
        for node in ast.walk(module.tree):
            for name in _absolute_names(node):
                if name.partition(".")[0] not in allowed:
                    wanted = "a relative import, or a package that build.toml declares"
                    yield f"{module.at(node)}: wanted {wanted}, got import of {name}"


def _absolute_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    if isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [] if first.value.startswith(".") else [first.value]
    return []


def _relative_imports(kernel: Kernel, modules: Modules) -> Iterator[str]:
    generated: dict[tuple[str, ...], set[str]] = {
        ("_ops",): {"_OPS_NAME", "add_op_namespace_prefix", "get_backend", "ops"}
    }
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or node.level == 0:
                continue
            dots = "." * node.level + (node.module or "")
            target = _target(module, node)
            if target is None or (target not in modules and target not in generated):
                yield f"{module.at(node)}: import of {dots}, which does not exist"
                continue
            if target == module.package and module.is_package:
                names: set[str] | None = set()  # of itself a package imports modules only
            else:
                names = generated.get(target) or _bound(modules[target])
            for alias in node.names:
                found = names is None or alias.name in names or alias.name == "*"
                submodule = (*target, alias.name)
                is_package = target in modules and modules[target].is_package
                if not found and not (is_package and submodule in {*modules, *generated}):
                    yield f"{module.at(node)}: import of {alias.name} from {dots}: no such name"


def _target(module: Module, node: ast.ImportFrom) -> tuple[str, ...] | None:
    """The module that a relative import names; None above the package."""
    up = node.level - 1
    if up > len(module.package):
        return None
    rest = node.module.split(".") if node.module else []
    return (*module.package[: len(module.package) - up], *rest)


def _bound(module: Module) -> set[str] | None:
    """Names that a module binds; None if that cannot be told."""
    names: set[str] = set()
    for node in _own_nodes(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return None if names & {"*", "__getattr__"} else names


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run at import: not the bodies of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(node)


def _layering(kernel: Kernel, modules: Modules) -> Iterator[str]:
    edges: dict[str, dict[str, str]] = defaultdict(dict)  # step -> imported step -> place
    for module in modules.values():
        step = module.parts[0] if module.parts else "__init__"
        typing_only = _typing_only(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.level and node not in typing_only:
                for imported in _steps(_target(module, node), node, modules):
                    if imported != step:
                        edges[step].setdefault(imported, module.at(node))
    for step in sorted(edges):
        for imported, place in sorted(_reached(step, edges).items()):
            if _is_higher(imported, step) or (step, imported) == ("config", "launch"):
                yield f"{place}: {step} is a lower step than {imported} and cannot import it"


def _steps(target: tuple[str, ...] | None, node: ast.ImportFrom, modules: Modules) -> Iterator[str]:
    """Parts of the package, right below its top, that a relative import reaches."""
    if target:
        yield target[0]
    elif target is not None:
        names = (alias.name for alias in node.names)
        yield from (n if (n,) in modules or n == "_ops" else "__init__" for n in names)


def _is_higher(step: str, than: str) -> bool:
    ranks = _rank(step), _rank(than)
    return ranks[0] is not None and ranks[1] is not None and ranks[0] > ranks[1]


def _reached(step: str, edges: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Steps that a step imports, directly or through modules that are no step."""
    found: dict[str, str] = {}
    queue = list(edges.get(step, {}).items())
    while queue:
        name, place = queue.pop()
        if name not in found:
            found[name] = place
            if _rank(name) is None:
                queue += [(further, place) for further in edges.get(name, {})]
    return found


def _rank(step: str) -> int | None:
    """Height of a step; None for a module that is no step."""
    if step in STEPS:
        return STEPS.index(step)
    return {"layers": TOP, "modules": TOP, "__init__": INIT}.get(step)


def _typing_only(tree: ast.AST) -> set[ast.AST]:
    """Imports that run for type checkers only."""
    guards = (n for n in ast.walk(tree) if isinstance(n, ast.If))
    bodies = (n.body for n in guards if last_name(n.test) == "TYPE_CHECKING")
    return {inner for body in bodies for statement in body for inner in ast.walk(statement)}


def _layers(kernel: Kernel, modules: Modules) -> Iterator[str]:
    if "layers" not in card.public(kernel):
        if ("layers",) in modules:
            yield f"{modules[('layers',)].file}: layers is not in __all__"
        return
    if ("layers",) not in modules:
        yield f"{kernel.source_dir}: __all__ has layers, but there is no such module"
        return
    module = modules[("layers",)]
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _layer(module, node)


def _layer(module: Module, node: ast.ClassDef) -> Iterator[str]:
    flags = set()
    if not any(last_name(base) == "Module" for base in node.bases):
        yield f"{module.at(node)}: {node.name}: a layer derives from nn.Module"
    for member in node.body:
        bare = isinstance(member, ast.AnnAssign) and member.value is None
        is_doc = isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant)
        flag = _flag(member)
        if flag is not None:
            flags.add(flag)
        elif not (bare or is_doc or getattr(member, "name", None) == "forward"):
            what = "forward, has_backward, can_torch_compile and annotations"
            yield f"{module.at(member)}: {node.name}: a layer has only {what}"
    for missing in sorted({"has_backward", "can_torch_compile"} - flags):
        yield f"{module.at(node)}: {node.name}: {missing} = True or False is missing"


def _flag(member: ast.stmt) -> str | None:
    """The name of a boolean flag that a layer may set."""
    target = member.targets[0] if isinstance(member, ast.Assign) else None
    if isinstance(member, ast.AnnAssign):
        target = member.target
    if not isinstance(member, (ast.Assign, ast.AnnAssign)) or not isinstance(target, ast.Name):
        return None
    is_bool = isinstance(member.value, ast.Constant) and isinstance(member.value.value, bool)
    return target.id if is_bool and target.id in ("has_backward", "can_torch_compile") else None


def _public(kernel: Kernel, modules: Modules) -> Iterator[str]:
    module = modules[()]
    lists = [
        node
        for node in module.tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))
        and any(isinstance(n, ast.Name) and n.id == "__all__" for n in ast.walk(node))
    ]
    literal = lists and isinstance(lists[0], ast.Assign) and isinstance(lists[0].value, ast.List)
    elements = lists[0].value.elts if literal else []  # type: ignore[union-attr]
    strings = [e.value for e in elements if isinstance(e, ast.Constant)]
    names = [name for name in strings if isinstance(name, str)]
    if len(lists) != 1 or not names or len(names) != len(elements):
        yield f"{module.file}: __all__: wanted one list of literal names"
        return
    if len(set(names)) != len(names):
        yield f"{module.file}: __all__: wanted each name once, got {names}"
    bound = _bound(module)
    for name in names:
        if bound is not None and name not in bound and (name,) not in modules:
            yield f"{module.file}: __all__: {name} is not defined"


def _namespaces(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _escapes(node):
                wanted = "a name made by add_op_namespace_prefix"
                yield f"{module.at(node)}: {last_name(node.func)}: wanted {wanted}"


def _escapes(call: ast.Call) -> bool:
    """Whether a call registers something outside the build's namespace."""
    function = last_name(call.func)
    if function == "Library":
        first = _argument(call, ("ns",))
        return first is None or last_name(first) != "_OPS_NAME"
    if function not in REGISTRATIONS:
        return False
    first = _argument(call, REGISTRATIONS[function])
    if isinstance(first, ast.Call) and last_name(first.func) == "add_op_namespace_prefix":
        return False
    if function in STRICT:
        return first is not None
    # `define`, `impl`, ... are methods too, of a Library or an operator, which has the namespace.
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    is_method = receiver is not None and last_name(receiver) != "library"
    return not is_method or _qualified(first)


def _argument(call: ast.Call, keywords: Sequence[str]) -> ast.expr | None:
    if call.args:
        return call.args[0]
    return next((k.value for k in call.keywords if k.arg in keywords), None)


def _qualified(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and "::" in str(node.value).partition("(")[0]


def _kernel_text(modules: Iterable[Module]) -> Iterator[str]:
    for module in modules:
        counted = {node.func for node in ast.walk(module.tree) if _counts_an_arrival(node)}
        for node in ast.walk(module.tree):
            name = last_name(node) or ""
            if node in counted:
                continue
            if isinstance(node, (ast.Attribute, ast.Name)) and name.startswith("atomic_"):
                yield f"{module.at(node)}: {name}: results repeat bit for bit, no atomics"
            if name == "autotune" and isinstance(node, (ast.Attribute, ast.Name)):
                yield f"{module.at(node)}: autotune: nothing is timed at run time"


def _counts_an_arrival(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node adds the number 1 and orders memory: it synchronises, and sums no data."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "atomic_add":
        return False
    values = [ast.unparse(value) for value in node.args[1:]]
    orders = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    return values == ["1"] and orders == {"sem": "'acq_rel'"}


def _is_jit(decorator: ast.expr) -> bool:
    return last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "jit"


def last_name(node: ast.AST) -> str | None:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
