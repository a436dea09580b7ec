# Copied from shared/dispatch.py by scripts/sync_shared.py: edit it there.
"""Whether an eager call has to go through PyTorch's dispatcher."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def needs_operator(function: str, *tensors: Tensor | None) -> bool:
    """Return whether a call on these tensors has to use the registered operator.

    It costs more than the launch itself, so plain eager inference calls the implementation. What
    has to see the operator: compilation, tracing and other modes, transforms of `torch.func`,
    subclasses of tensors, lazily negated tensors, and gradients.

    Raises:
        NotImplementedError: In the name of `function`, if a tensor carries a forward-mode
            tangent, which operators drop without a word.
    """
    if torch.compiler.is_compiling():
        return True
    if forward_ad._current_level >= 0:  # torch.func.jvp has a level, too
        _refuse_tangents(function, tensors)
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    ):
        return True
    grad = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in _PLAIN or tensor.is_neg() or (grad and tensor.requires_grad)
        ):
            return True
    return False


def _refuse_tangents(function: str, tensors: tuple[Tensor | None, ...]) -> None:
    for tensor in tensors:
        if tensor is None:
            continue
        dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
        if dual.tangent is not None:
            raise NotImplementedError(
                f"{function}: there is no forward-mode derivative; use reverse mode (backward)"
            )
