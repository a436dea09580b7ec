"""A small monorepo with one kernel that runs anywhere, for the tests of the scripts."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

from monorepo.manifest import Kernel, Manifest

BUILD = """\
[monorepo]
org = "toys"
kernels = ["toy-scale"]

[[target]]
backend = "cuda"
arch = 90
warp-size = 32
shared-memory = 232448
"""

KERNEL_BUILD = """\
[general]
name = "toy-scale"
version = 1
edition = 5
license = "MIT"
backends = ["cpu", "cuda", "rocm"]

[general.hub]
repo-id = "toys/toy-scale"

[torch-noarch]
pyext = ["py", "json"]
"""

CARD = """\
---
library_name: kernels
license: {{ license }}
---
# {{ repo_id }}

```python
from kernels import get_kernel

toy = get_kernel("{{ repo_id }}", version={{ version }})
y = toy.scale(x, 2.0)
```

## Functions
{% for name in functions %}
- `{{ name }}`
{% endfor %}

## Layers
{% for name in layers %}
- `{{ name }}`
{% endfor %}
"""

FILES = {
    "shared/__init__.py": '"""Helpers of every kernel."""\n',
    "shared/rows.py": """\
        \"\"\"Rows of a tensor.\"\"\"

        from .shape import last


        def rows(x):
            return x.numel() // max(last(x), 1)
        """,
    "shared/shape.py": """\
        \"\"\"Sizes of a tensor.\"\"\"


        def last(x):
            return x.shape[-1]
        """,
    "shared/unused.py": '"""No kernel imports this."""\n',
    "build.toml": BUILD,
    "toy-scale/build.toml": KERNEL_BUILD,
    "toy-scale/CARD.md": CARD,
    "toy-scale/benchmarks/benchmark.py": '"""Nothing is measured."""\n',
    "toy-scale/tests/test_toy.py": "",
    "toy-scale/torch-ext/toy_scale/__init__.py": """\
        \"\"\"Multiply by a number.\"\"\"

        from . import layers
        from .api import scale

        __all__ = ["layers", "scale"]
        """,
    "toy-scale/torch-ext/toy_scale/api.py": """\
        \"\"\"The public function.\"\"\"

        from . import ops
        from ._shared.rows import rows


        def scale(x, factor=1.0):
            return ops.scale(x, float(factor)) if rows(x) else x.clone()
        """,
    "toy-scale/torch-ext/toy_scale/ops.py": """\
        \"\"\"The operator.\"\"\"

        import torch

        from ._ops import add_op_namespace_prefix, ops
        from .reference import scale as reference


        @torch.library.custom_op(add_op_namespace_prefix("scale"), mutates_args=())
        def scale_op(x: torch.Tensor, factor: float) -> torch.Tensor:
            if x.is_cuda:
                from .launch import launch

                return launch(x, factor)
            return reference(x, factor)


        @torch.library.register_fake(add_op_namespace_prefix("scale"))
        def _(x, factor):
            return torch.empty_like(x)


        def scale(x, factor):
            return ops.scale(x, factor)
        """,
    "toy-scale/torch-ext/toy_scale/config.py": """\
        \"\"\"Block sizes.\"\"\"

        BLOCK = 1024
        """,
    "toy-scale/torch-ext/toy_scale/launch.py": """\
        \"\"\"Grid and call.\"\"\"

        import torch
        import triton

        from ._kernels import toy_scale_kernel


        def launch(x, factor):
            y = torch.empty_like(x)
            grid = (triton.cdiv(x.numel(), 1024),)
            toy_scale_kernel[grid](x, y, factor, x.numel(), BLOCK=1024)
            return y
        """,
    "toy-scale/torch-ext/toy_scale/_kernels.py": """\
        import triton
        import triton.language as tl


        @triton.jit
        def toy_scale_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + i, mask=i < n, other=0.0)
            tl.store(y_ptr + i, x * factor, mask=i < n)
        """,
    "toy-scale/torch-ext/toy_scale/reference.py": """\
        \"\"\"The same in PyTorch.\"\"\"


        def scale(x, factor):
            return x * factor
        """,
    "toy-scale/torch-ext/toy_scale/layers.py": """\
        \"\"\"Layers for kernelize.\"\"\"

        import torch
        from torch import nn

        from .api import scale


        class Scale(nn.Module):
            \"\"\"Multiplies by `self.factor`.\"\"\"

            has_backward = False
            can_torch_compile = True
            factor: float

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return scale(x, self.factor)
        """,
    "toy-scale/torch-ext/toy_scale/configs/none.json": "{}\n",
}

SOURCE = "toy-scale/torch-ext/toy_scale"


def write(root: Path, changes: dict[str, str] | None = None) -> Kernel:
    """Write the monorepo below `root`, with some files changed, and return its kernel."""
    for name, text in {**FILES, **(changes or {})}.items():
        put(root / name, text)
    return load(root)


def load(root: Path) -> Kernel:
    """The one kernel of the monorepo, as its build.toml now says."""
    return Manifest.load(root).kernels[0]


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text), encoding="utf-8")


def git(root: Path, *arguments: str) -> str:
    """Run git there, untouched by the settings of whoever runs the tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *who, *arguments],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def commit(root: Path, message: str = "change") -> str:
    """Commit everything and return the commit's id."""
    if not (root / ".git").exists():
        git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", message)
    return git(root, "rev-parse", "HEAD")
