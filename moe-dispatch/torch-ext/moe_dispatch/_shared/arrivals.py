# Copied from shared/arrivals.py by scripts/sync_shared.py: edit it there.
"""Counters of arrivals for kernels whose programs share a tile: zero before and after each launch.

A kernel leaves its counters as it found them, so they are set to zero once and used again. Two
launches that may run at the same time must not share them: eager calls have theirs by stream, and
each call that is captured into a CUDA graph keeps its own for good, since a graph may be replayed
at any time, beside any other.
"""

import functools
import threading

import torch

#: Counters of one launch, at most.
MOST = 16384
#: Counters that are set to zero together: 4 MiB.
_ARENA = 2**20


class _Arena:
    """Counters of one device, handed out in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, torch.Tensor] = {}
        self._fill()

    def _fill(self) -> None:
        self._free = torch.zeros(_ARENA, dtype=torch.int32, device=self._device)
        # Other streams use them without waiting for this one; it happens once.
        torch.cuda.synchronize(self._device)

    def take(self, count: int) -> torch.Tensor | None:
        """Return `count` counters nobody else gets, or None if there are none left."""
        count = -(-count // 4) * 4  # 16 bytes: Triton compiles a version for other addresses
        with self._lock:
            if count > self._free.numel():
                return None
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def of_stream(self, stream: int) -> torch.Tensor:
        """Return the counters of a stream's eager calls."""
        counters = self._by_stream.get(stream)
        if counters is None:
            counters = self.take(MOST)
            if counters is None:
                self._fill()
                counters = self.take(MOST)
                assert counters is not None
            self._by_stream[stream] = counters
        elif self._free.numel() < _ARENA // 4:
            self._fill()  # before a capture finds too few, and cannot fill up
        return counters


@functools.cache
def _arena(index: int) -> _Arena:
    return _Arena(torch.device("cuda", index))


_ready: set[int] = set()


def reserve(device: torch.device) -> None:
    """Make counters ready on a device, if it is a GPU: before the first call is captured."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in _ready and not torch.cuda.is_current_stream_capturing():
            _arena(index)
            _ready.add(index)


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return at least `count` counters, all zero, for one launch on the current stream.

    Args:
        device: Where the launch runs; its current stream is asked.
        count: At most `MOST`.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        taken = _arena(index).take(count) if index in _ready else None
        # Zeroed at each replay, at the cost of a further node.
        return torch.zeros(count, dtype=torch.int32, device=device) if taken is None else taken
    if index not in _ready:
        reserve(device)
    return _arena(index).of_stream(torch._C._cuda_getCurrentRawStream(index))
