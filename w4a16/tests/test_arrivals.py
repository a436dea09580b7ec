"""Counters of arrivals, with CUDA played by tensors on the CPU: who gets which, for how long."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

from .oracle import part, weight

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "0",
    reason="host code, the same with and without the interpreter",
)
GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Cuda:
    """Stands for the part of CUDA that counters ask: streams, captures, zeroed memory."""

    def __init__(self) -> None:
        self.stream = 7
        self.capturing = False
        self.synchronized: list[object] = []
        self.zeroed: list[int] = []


@pytest.fixture
def cuda(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    arrivals = part(kernel, "_shared.arrivals")
    zeros = torch.zeros

    def zeros_here(*size: object, device: torch.device | None = None, **options: object):
        tensor = zeros(*size, **options)
        if device is not None and device.type == "cuda":
            fake.zeroed.append(tensor.numel())
        return tensor

    monkeypatch.setattr(arrivals, "_ready", set())
    arrivals._arena.cache_clear()
    monkeypatch.setattr(torch, "zeros", zeros_here)
    for name, value in (
        ("is_current_stream_capturing", lambda: fake.capturing),
        ("synchronize", fake.synchronized.append),
        ("current_device", lambda: 0),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: 100 * index + fake.stream,
        raising=False,
    )  # fmt: skip
    yield fake
    arrivals._arena.cache_clear()


def disjoint(*tensors: torch.Tensor) -> bool:
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)
    return all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))


def test_a_stream_keeps_its_own(kernel: ModuleType, cuda: Cuda) -> None:
    """Launches of one stream follow each other; those of two may run at once."""
    arrivals = part(kernel, "_shared.arrivals")
    first = arrivals.counters(GPU, 5)
    assert first.numel() >= 5 and first.dtype is torch.int32 and not bool(first.any())
    assert arrivals.counters(GPU, arrivals.MOST).data_ptr() == first.data_ptr()
    cuda.stream = 8
    second = arrivals.counters(GPU, 5)
    assert disjoint(first, second)
    cuda.stream = 7
    assert arrivals.counters(GPU, 1).data_ptr() == first.data_ptr()
    assert first.numel() >= arrivals.MOST


def test_a_device_keeps_its_own(kernel: ModuleType, cuda: Cuda) -> None:
    """Case B46."""
    arrivals = part(kernel, "_shared.arrivals")
    assert disjoint(arrivals.counters(GPU, 4), arrivals.counters(OTHER, 4))
    assert arrivals._ready == {0, 1} and len(cuda.synchronized) == 2


def test_each_captured_call_keeps_its_own(kernel: ModuleType, cuda: Cuda) -> None:
    """Two graphs of one stream may be replayed at once: nothing captured is given out again."""
    arrivals = part(kernel, "_shared.arrivals")
    eager = arrivals.counters(GPU, 9)
    cuda.capturing = True
    captured = [arrivals.counters(GPU, count) for count in (1, 5, 9, 16384)]
    cuda.capturing = False
    assert disjoint(eager, arrivals.counters(GPU, 9)) is False  # the same again
    assert disjoint(eager, *captured)
    for count, tensor in zip((1, 5, 9, 16384), captured, strict=True):
        assert tensor.numel() >= count and not bool(tensor.any())
        assert (tensor.data_ptr() - eager.data_ptr()) % 16 == 0


def test_first_call_in_a_capture(kernel: ModuleType, cuda: Cuda) -> None:
    """Case B59: a weight on the device made counters ready; nothing is synchronised by a call."""
    arrivals = part(kernel, "_shared.arrivals")
    arrivals.reserve(torch.device("cuda"))
    assert arrivals._ready == {0} and cuda.zeroed == [arrivals._ARENA]
    cuda.capturing = True
    taken = arrivals.counters(GPU, 8)
    assert cuda.zeroed == [arrivals._ARENA] and len(cuda.synchronized) == 1
    assert taken.numel() == 8


def test_capture_on_a_device_that_was_not_made_ready(kernel: ModuleType, cuda: Cuda) -> None:
    """Nothing can be filled while capturing: the graph zeroes counters of its own."""
    arrivals = part(kernel, "_shared.arrivals")
    cuda.capturing = True
    arrivals.reserve(GPU)
    first, second = arrivals.counters(GPU, 8), arrivals.counters(GPU, 8)
    assert arrivals._ready == set() and cuda.synchronized == [] and cuda.zeroed == [8, 8]
    assert disjoint(first, second)


def test_captures_run_out(kernel: ModuleType, cuda: Cuda) -> None:
    """Captures beyond what there is zero their own; an eager call then makes new ones."""
    arrivals = part(kernel, "_shared.arrivals")
    eager = arrivals.counters(GPU, 4)
    cuda.capturing = True
    taken = [eager]
    while len(cuda.zeroed) == 1:
        taken.append(arrivals.counters(GPU, arrivals.MOST))
    assert len(taken) == 1 + arrivals._ARENA // arrivals.MOST  # one too many, which zeroes itself
    assert disjoint(*taken)
    cuda.capturing = False
    assert arrivals.counters(GPU, 4).data_ptr() == eager.data_ptr()
    assert cuda.zeroed == [arrivals._ARENA, arrivals.MOST, arrivals._ARENA]
    cuda.capturing = True
    again = arrivals.counters(GPU, 4)
    assert disjoint(again, *taken) and len(cuda.zeroed) == 3


def test_many_streams(kernel: ModuleType, cuda: Cuda) -> None:
    """More streams than one arena serves, each with its own for good."""
    arrivals = part(kernel, "_shared.arrivals")
    found = {}
    for stream in range(arrivals._ARENA // arrivals.MOST + 6):
        cuda.stream = stream
        found[stream] = arrivals.counters(GPU, 4)
    assert disjoint(*found.values())
    for stream in (0, 63, 65):
        cuda.stream = stream
        assert arrivals.counters(GPU, 4).data_ptr() == found[stream].data_ptr()


def test_where_there_is_no_gpu(kernel: ModuleType, cuda: Cuda) -> None:
    """The interpreter gets fresh zeros; a CPU weight makes nothing ready."""
    arrivals = part(kernel, "_shared.arrivals")
    cpu = torch.device("cpu")
    first, second = arrivals.counters(cpu, 3), arrivals.counters(cpu, 3)
    assert first.numel() == 3 and disjoint(first, second) and not bool(first.any())
    arrivals.reserve(cpu)
    weight(kernel, 8, 32).to("meta")
    assert arrivals._ready == set() and cuda.zeroed == []
