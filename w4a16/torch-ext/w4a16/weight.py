"""The packed weight: its layout, its inverse, and the rules of what can be packed.

Layout ("planar"): the input features are cut into blocks of 128 and each block into four planes of
32. Word `i` of a row holds feature `i` of each plane, plane j in bits 4j to 4j + 3. So the four
tensors that a kernel unpacks have the layout of the one it loaded, and each meets a contiguous
piece of the activations: nothing is shuffled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ._shared import arrivals
from ._shared.checks import describe

BITS = 4
#: Input features of a block and of one of its planes.
BLOCK = 128
PLANE = 32
#: Sizes of a group; -1 is one group for all input features.
GROUP_SIZES = (32, 64, 128, 256, 512, 1024, -1)
#: Output features come in eights in every checkpoint format.
OUT_MULTIPLE = 8
#: Kernels keep the offsets inside a tile of 128 rows in 32 bits.
MOST_FEATURES = 2**24 - PLANE
#: dtypes of activations.
ACTIVATIONS = (torch.float16, torch.bfloat16)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
#: Above this a scale is kept in float32: kernels that scale the weights before the product
#: multiply it by 2^9 in float16. Those in float32 are applied after the product.
LARGEST_SCALE = 64.0


def refusal(bits: int, group_size: int, in_features: int, out_features: int) -> str | None:
    """Return why a weight cannot be packed, or None if it can."""
    if bits != BITS:
        return f"bits must be 4, got {bits}"
    if group_size not in GROUP_SIZES:
        return f"group_size must be one of {GROUP_SIZES}, got {group_size}"
    for name, value, multiple in (
        ("in_features", in_features, PLANE),
        ("out_features", out_features, OUT_MULTIPLE),
    ):
        if value < multiple or value % multiple or value > MOST_FEATURES:
            return (
                f"{name} must be a multiple of {multiple} from {multiple} to {MOST_FEATURES}, "
                f"got {value}"
            )
    return None


def check_packable(function: str, group_size: int, in_features: int, out_features: int) -> None:
    """Raise ValueError, in the name of `function`, unless such a weight can be packed."""
    reason = refusal(BITS, group_size, in_features, out_features)
    if reason is not None:
        raise ValueError(f"{function}: {reason}")


def group_count(in_features: int, group_size: int) -> int:
    """Return the number of groups; the last one may be partial."""
    return 1 if group_size == -1 else -(-in_features // group_size)


@dataclasses.dataclass(frozen=True, eq=False)
class W4Weight:
    """A 4-bit weight in the kernel's layout; made by `quantize` and the `from_*` functions.

    Output feature n, input feature k and k's group g stand for `(code - zero[g, n]) * scale[g, n]`.

    Attributes:
        qweight: `[ceil(in_features / 128), out_features, 32]` int16; see the module's docstring.
        scales: `[groups, out_features]` float16, bfloat16 or float32; float32 if one exceeds 64.
        zeros: `[groups, out_features]`: int16 zero points, float32 ones (HQQ), or None for 8.
        perm: `[in_features]` int32, or None. Packed feature i is input feature `perm[i]`
            (act-order checkpoints, whose groups are not contiguous).
        in_features: Input features, a multiple of 32.
        group_size: 32, 64, 128, 256, 512, 1024, or -1 for a single group. The last group of a
            row may be partial.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    in_features: int
    group_size: int

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError unless the parts fit each other."""
        if not isinstance(self.qweight, Tensor) or self.qweight.dim() != 3:
            raise ValueError(
                f"W4Weight: qweight must be [blocks, rows, 32], got {describe(self.qweight)}"
            )
        n, k = self.out_features, self.in_features
        check_packable("W4Weight", self.group_size, k, n)
        groups = group_count(k, self.group_size)
        wanted: tuple[tuple[str, Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
            ("qweight", self.qweight, (-(-k // BLOCK), n, PLANE), (torch.int16,)),
            ("scales", self.scales, (groups, n), SCALES),
            ("zeros", self.zeros, (groups, n), (torch.int16, torch.float32)),
            ("perm", self.perm, (k,), (torch.int32,)),
        )
        for name, tensor, shape, dtypes in wanted:
            if tensor is None and name in ("zeros", "perm"):
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
                names = " or ".join(str(dtype) for dtype in dtypes)
                raise TypeError(f"W4Weight: {name} must be {names}, got {describe(tensor)}")
            if tensor.shape != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"W4Weight: {name} must be contiguous of shape {shape}, got {describe(tensor)}"
                )
            if tensor.device != self.qweight.device:
                raise ValueError(
                    f"W4Weight: {name} must be on {self.qweight.device} with qweight, "
                    f"got {describe(tensor)}"
                )

    @property
    def out_features(self) -> int:
        """Output features, a multiple of 8."""
        return self.qweight.shape[1]

    @property
    def device(self) -> torch.device:
        """The device that holds all parts."""
        return self.qweight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.qweight, self.scales, self.zeros, self.perm)
        return sum(part.nbytes for part in parts if part is not None)

    def _map(self, function: Callable[[Tensor], Tensor]) -> W4Weight:
        parts = {
            name: None if part is None else function(part)
            for name, part in (
                ("qweight", self.qweight),
                ("scales", self.scales),
                ("zeros", self.zeros),
                ("perm", self.perm),
            )
        }
        weight = dataclasses.replace(self, **parts)  # type: ignore[arg-type]
        arrivals.reserve(weight.device)
        return weight

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> W4Weight:
        """Return the same weight on a device; dtypes are part of the format and stay."""
        if isinstance(device, torch.dtype):
            raise TypeError(
                "W4Weight.to takes a device: the dtype of the result is that of the activations"
            )
        return self._map(lambda part: part.to(device, non_blocking=non_blocking))

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors from which `from_state_dict` makes the weight again (for safetensors).

        `sizes` is int64: (in_features, group_size).
        """
        parts = {"qweight": self.qweight, "scales": self.scales}
        if self.zeros is not None:
            parts["zeros"] = self.zeros
        if self.perm is not None:
            parts["perm"] = self.perm
        parts["sizes"] = torch.tensor([self.in_features, self.group_size])
        return parts

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor]) -> W4Weight:
        """Return the weight of what `state_dict` returned.

        Raises:
            ValueError: A tensor is missing, unknown, or does not fit the others.
        """
        names = {"qweight", "scales", "zeros", "perm", "sizes"}
        missing = {"qweight", "scales", "sizes"} - tensors.keys()
        if missing or tensors.keys() - names:
            raise ValueError(
                f"W4Weight.from_state_dict: wanted qweight, scales, sizes and at most zeros and "
                f"perm, got {sorted(tensors)}"
            )
        sizes = tensors["sizes"]
        if sizes.shape != (2,):
            raise ValueError(
                "W4Weight.from_state_dict: sizes must be (in_features, group_size), "
                f"got {describe(sizes)}"
            )
        in_features, group_size = (int(size) for size in sizes.tolist())
        qweight, scales = tensors["qweight"], _wide_enough(tensors["scales"])
        zeros, perm = tensors.get("zeros"), tensors.get("perm")
        arrivals.reserve(qweight.device)
        return cls(qweight, scales, zeros, perm, in_features, group_size)


def pack_codes(codes: Tensor) -> Tensor:
    """Return uint8 codes `[n, k]` of 0 to 15 in the planar layout; absent features are 0."""
    n, k = codes.shape
    blocks = -(-k // BLOCK)
    if k % BLOCK:
        codes = torch.nn.functional.pad(codes, (0, blocks * BLOCK - k))
    planes = codes.view(n, blocks, 4, PLANE).transpose(0, 1)
    # Two bytes beside each other, the low one first: an int16 on the machines torch runs on.
    low = planes[:, :, 0] | (planes[:, :, 1] << 4)
    high = planes[:, :, 2] | (planes[:, :, 3] << 4)
    return torch.stack((low, high), -1).view(torch.int16).squeeze(-1)


def unpack_codes(qweight: Tensor, in_features: int) -> Tensor:
    """Return the uint8 codes `[n, in_features]` of a planar tensor, in its order of features."""
    blocks, n, _ = qweight.shape
    halves = qweight.unsqueeze(-1).view(torch.uint8)  # [blocks, n, 32, 2]
    planes = torch.stack((halves & 15, halves >> 4), -1)  # [blocks, n, 32, 2, 2]
    codes = planes.permute(1, 0, 3, 4, 2).reshape(n, blocks * BLOCK)
    return codes[:, :in_features].contiguous()


def _wide_enough(scales: Tensor) -> Tensor:
    """Return scales in float32 if one of them exceeds `LARGEST_SCALE`, else as they are."""
    if scales.dtype in ACTIVATIONS and not scales.is_meta:
        if bool((scales.abs() > LARGEST_SCALE).any()):
            return scales.float()
    return scales


def pack(
    function: str,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    perm: Tensor | None = None,
) -> W4Weight:
    """Return the packed weight of what a format or a quantiser gives.

    Args:
        function: In whose name errors are raised.
        codes: `[n, k]` uint8 of 0 to 15, groups contiguous along k.
        scales: `[groups, n]` float16, bfloat16 or float32; kept as they are, or in float32 if one
            exceeds `LARGEST_SCALE`.
        zeros: `[groups, n]` of an integer dtype, 0 to 15; or float32; or None for 8. Integers
            that are all 8 become None.
        group_size: One of `GROUP_SIZES`. One that covers all of k becomes -1.
        perm: `[k]`: the input feature that stands at each place; None for their own order.
    """
    n, k = codes.shape
    check_packable(function, group_size, k, n)
    if group_size >= k:
        group_size = -1
    shape = (group_count(k, group_size), n)
    if scales.shape != shape:
        raise ValueError(
            f"{function}: scales of {shape[0]} groups and {n} output features are needed, "
            f"got {describe(scales)}"
        )
    if zeros is not None and zeros.shape != shape:
        raise ValueError(f"{function}: zeros must have the shape of scales, got {describe(zeros)}")
    scales = _wide_enough(scales)
    if zeros is not None and not zeros.is_floating_point():
        zeros = zeros.to(torch.int16)
        if not zeros.is_meta and bool((zeros == 8).all()):
            zeros = None
    arrivals.reserve(codes.device)
    return W4Weight(
        pack_codes(codes),
        scales.contiguous(),
        None if zeros is None else zeros.contiguous(),
        None if perm is None else perm.to(torch.int32).contiguous(),
        k,
        group_size,
    )
