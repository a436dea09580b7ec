"""Times GPU work: CUDA graphs that rotate over copies of the operands, so that L2 stays cold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

#: What a rotation moves at least, in bytes: several times the 50 to 60 MB L2 of large GPUs.
ROTATION_BYTES = 320 * 2**20
#: The fewest calls in one graph, or the least time of all of them: the rest of a replay has to be
#: small beside them.
FEWEST_CALLS = 16
FEWEST_US = 4000.0
#: A tenth of a millisecond at about 2 GHz.
SLEEP_CYCLES = 200_000
#: The most calls in one graph: small shapes reach the launch rate long before the rotation size.
MOST_CALLS = 4096


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the replays, and their 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float


def copies_for(bytes_per_call: int) -> int:
    """Return over how many copies of the operands a rotation has to go, 2 at least."""
    return max(2, min(MOST_CALLS, -(-ROTATION_BYTES // max(bytes_per_call, 1))))


def side_stream() -> AbstractContextManager[object]:
    """Return a context in which a new stream is current; the default one cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


class Graph:
    """A captured rotation: `calls` in order, their results kept apart; made in a `side_stream`.

    The rotation is repeated until there are enough calls. Results stay alive until the graph
    goes, so that no output address repeats within a rotation: a repeated one would be overwritten
    in L2 and never reach memory.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        for call in calls[:2]:  # compiles, and lets libraries set themselves up
            call()
        fewest = min(FEWEST_CALLS, -(-FEWEST_US // time_eager(calls[0], 1).median_us))
        calls = [*calls] * max(1, int(-(-fewest // len(calls))))
        self.count = len(calls)
        self.graph = torch.cuda.CUDAGraph()
        # On the stream at hand: a backward pass has to be captured where its forward pass ran.
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            self.results = [call() for call in calls]
        torch.cuda.synchronize()

    def replay(self) -> float:
        """Run the rotation once and return microseconds a call."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Busy the GPU until the graph is queued, so that its launch is not timed.
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / self.count


def summarize(samples: Sequence[float]) -> Timing:
    """Return the median and the 20th and 80th percentile of samples in microseconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(last * 0.2)], ordered[round(last * 0.8)]
    )


def time_calls(calls: Sequence[Callable[[], object]], replays: int = 10) -> Timing:
    """Time one graph of `calls` on its own."""
    graph = Graph(calls)
    graph.replay()
    return summarize([graph.replay() for _ in range(replays)])


def time_eager(call: Callable[[], object], calls: int) -> Timing:
    """Time single calls outside a graph, the host's part included: for what no graph can hold."""
    samples = []
    for _ in range(calls):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) * 1000)
    return summarize(samples)


def time_interleaved(
    rivals: dict[str, Sequence[Callable[[], object]]], replays: int = 20
) -> dict[str, Timing]:
    """Time several implementations in turns, so that clocks and neighbours treat all alike."""
    graphs = {name: Graph(calls) for name, calls in rivals.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for _ in range(replays):
        for name, graph in graphs.items():
            samples[name].append(graph.replay())
    return {name: summarize(found) for name, found in samples.items()}


def host_cost(call: Callable[[], object], calls: int = 2000) -> float:
    """Return host microseconds of one call that keeps ahead of the GPU (median of batches)."""
    batch = 50
    _host_batch(call, batch)
    return statistics.median(_host_batch(call, batch) for _ in range(calls // batch))


def host_ratio(call: Callable[[], object], bare: Callable[[], object]) -> float:
    """Return the host time of one call over another's, in turns (median of 30 pairs)."""
    batch = 200
    for each in (call, bare):
        _host_batch(each, batch)
    return statistics.median(_host_batch(call, batch) / _host_batch(bare, batch) for _ in range(30))


def _host_batch(call: Callable[[], object], calls: int) -> float:
    """Return host microseconds of one of `calls` calls that the GPU does not hold back."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6
