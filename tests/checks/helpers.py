"""A toy monorepo, and ways to break it."""

import os
from pathlib import Path

import toykernel

SOURCE = toykernel.SOURCE
LAYER = "class Scale(nn.Module):\n    has_backward = False\n    can_torch_compile = True\n"
LAYER_FILE = "from torch import nn\n\n\n" + LAYER


def broken(root, changes):
    kernel = toykernel.load(root)
    for name, text in changes.items():
        file = kernel.source_dir / name
        if text is None:
            file.unlink()
        else:
            toykernel.put(Path(os.path.normpath(file)), text)
    return kernel


def edit(name, change):
    def broke(build):
        (build / name).write_text(change((build / name).read_text()))

    return broke


def drop(name):
    return lambda build: (build / name).unlink()


def add(name, text=""):
    return lambda build: toykernel.put(build / name, text)


def move(old, new):
    return lambda build: (build / old).rename(build / new)
