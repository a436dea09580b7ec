# Copied from shared/device.py by scripts/sync_shared.py: edit it there.
"""What runs a tensor: Triton or the reference, on which device, under which name."""

import contextlib
import functools

import torch

try:
    import triton
except ImportError:  # a CPU-only torch: the reference serves every call
    triton = None

#: Whether `@triton.jit` functions run in Triton's interpreter, which takes CPU tensors.
INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)

_ON_CURRENT_DEVICE = contextlib.nullcontext()


def has_triton() -> bool:
    """Return whether Triton can be imported."""
    return triton is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Return whether the Triton kernel, not the reference, computes a call on `tensor`."""
    if tensor.is_cuda:
        return triton is not None or _reference_on_gpu()
    return INTERPRETED and tensor.device.type == "cpu"


@functools.cache
def _reference_on_gpu() -> bool:
    """Say once that GPU tensors take the slow path, and why."""
    import warnings

    warnings.warn(
        "Triton cannot be imported: calls on GPU tensors run the plain PyTorch reference, "
        "which is several times slower. Install the triton that belongs to this torch.",
        stacklevel=4,
    )
    return False


@functools.cache
def on_nvidia() -> bool:
    """Return whether kernels are compiled for NVIDIA GPUs; false in the interpreter."""
    return not INTERPRETED and target_arch() > 0


@functools.cache
def target_arch() -> int:
    """Return the compute capability that Triton compiles for, 90 for instance; 0 for AMD."""
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def smallest_dot() -> int:
    """Return the fewest columns of a `tl.dot`: Triton 3.4 refuses fewer than 16."""
    if triton is None:
        return 8
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return 16 if version < (3, 5) else 8


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the device of `tensor` is the current one.

    Triton launches on the current device, whatever device its arguments are on.
    """
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _ON_CURRENT_DEVICE
    return torch.cuda.device(tensor.get_device())


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of a device as it stands in file names: `NVIDIA_H200`, or `cpu`."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    """Return the number of multiprocessors (compute units on AMD) of a device."""
    if device.type != "cuda":
        return 4  # the interpreter runs programs one after another: few, but more than one
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory (LDS on AMD) that one program may use."""
    if device.type != "cuda":
        return 65536
    properties = torch.cuda.get_device_properties(device)
    # NVIDIA allows more than the default if a kernel opts in, which Triton does.
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) or int(
        properties.shared_memory_per_block
    )
