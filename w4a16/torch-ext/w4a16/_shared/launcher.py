# Copied from shared/launcher.py by scripts/sync_shared.py: edit it there.
"""Launches Triton kernels, from the second time on without Triton's handling of arguments.

`kernel[grid](...)` looks at every argument of every call to find the specialisation that it has
already compiled, which costs more host time than the launch. A caller that knows what the
specialisation depends on passes that as a key, and the compiled kernel is called directly.
"""

from collections.abc import Hashable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[Hashable, Any] = {}
#: Entries at most: strides are part of keys, and a server may see ever new ones.
_MOST = 4096
#: On AMD, Triton addresses tensors whose storage is below this many bytes with 32 bits.
_SHORT_ADDRESSES = 2**31 if torch.version.hip is not None else None


def launch(
    key: Hashable,
    kernel: Any,
    programs: int,
    tensors: tuple[torch.Tensor | TensorDescriptor | None, ...],
    scalars: tuple[int | float, ...],
    constants: dict[str, Any],
    num_warps: int,
    max_registers: int = 0,
) -> None:
    """Launch a kernel on the current device, on a grid of one axis.

    Args:
        key: Equal for two calls only if Triton would compile the same for both, alignment and
            size of storage aside: it has to tell the kernel, the device, which tensors are None,
            their dtypes, the boxes of descriptors, the values of specialised integers, the
            constants and the warps.
        kernel: A `@triton.jit` function whose parameters are tensors, scalars and constants.
        programs: Programs of the grid.
        tensors: The kernel's pointers and TMA descriptors, in order.
        scalars: The kernel's numbers, in order.
        constants: The kernel's compile-time constants, in order.
        num_warps: Warps of a program.
        max_registers: The most registers a thread may take (NVIDIA); 0 leaves it to the compiler.
    """
    pointers: list[int | TensorDescriptor | None] = []
    bits = 0
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            continue
        if type(tensor) is TensorDescriptor:  # its address is a multiple of 16 bytes
            pointers.append(tensor)
            continue
        pointer = tensor.data_ptr()
        bits |= pointer
        pointers.append(pointer)
        if _SHORT_ADDRESSES and tensor.untyped_storage().nbytes() >= _SHORT_ADDRESSES:
            bits |= 1
    # Data at odd addresses, and large ones on AMD, specialise by tensor: left to Triton.
    usual = bits % 16 == 0
    compiled = _compiled.get(key) if usual else None
    if compiled is not None:
        # Addresses instead of tensors: the launcher then asks the driver nothing about them.
        compiled[programs, 1, 1](*pointers, *scalars, *constants.values())
        return
    options = {"num_warps": num_warps}
    if max_registers:  # no option of Triton's other backends
        options["maxnreg"] = max_registers
    compiled = kernel[programs, 1, 1](*tensors, *scalars, **constants, **options)
    if usual and compiled is not None:  # the interpreter compiles nothing
        if len(_compiled) >= _MOST:
            _compiled.clear()
        _compiled[key] = compiled
