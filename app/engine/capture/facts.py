"""Cost of captured graphs on a rank: their number, capture time, and memory by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from app.engine.capture.recorder import Recorder
from app.plan.formatting import GIB
from app.plan.memory.overheads import MIB

PARTS = ("static", "cut", "pool", "objects")  # fields of GraphFacts with sizes


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Number, capture time and memory of one rank's graphs; sizes in bytes."""

    count: int
    seconds: float  # capture time
    # driver memory of the graphs themselves; 0 without capture on a GPU
    objects: int
    static: int  # static buffers of inputs and output gradients
    cut: int  # outputs of captured parts, in the pools; memory shared in turn counts once
    pool: int  # the rest of the pools

    @classmethod
    def of(cls, recorder: Recorder) -> GraphFacts:
        """Collect the facts of all graphs that `recorder` holds."""
        cut = covered(output for recording in recorder.recordings for output in recording.outputs)
        return cls(
            count=len(recorder.recordings),
            seconds=recorder.seconds,
            objects=recorder.object_bytes,
            static=recorder.static.bytes,
            cut=cut,
            pool=max(0, recorder.pool_bytes - cut),
        )

    def beside(self, count: int) -> str:
        """Return one line of captured numbers, beside the planned `count` of graphs."""
        sizes = (f"{name} {getattr(self, name) / MIB:.2f}" for name in PARTS)
        graphs = f"{self.count} graphs ({count} planned) captured in {self.seconds:.1f} s"
        return f"{graphs}; MiB: {', '.join(sizes)}"

    def metrics(self) -> dict[str, float]:
        """Return metrics by key: graph_count, graph_capture_s, and sizes in GiB."""
        sizes = {f"graph_{name}_gib": getattr(self, name) / GIB for name in PARTS}
        return {"graph_count": self.count, "graph_capture_s": self.seconds, **sizes}


def covered(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the union of the tensors' memory."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
