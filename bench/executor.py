"""What the executor costs per action: a step of a model that does next to nothing, against the same
calls by hand.

    python bench/executor.py [--rounds 200]

Both run in turn in one process on one thread; prints the median and quartiles of the difference per
action, in µs, and writes bench/results/executor.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from app.data.feed import Batch
from app.engine.step.executor import Executor, RankStages, Transport
from app.engine.step.records import StepInput
from app.engine.watchdog.watchdog import Watchdog
from app.model.chunk import ChunkOutput
from app.model.layers.layer_groups import LayerGroups
from app.model.layers.weight_grads import WeightGrad
from app.plan.pipeline.lowering import lower_all
from app.plan.recompute import RecomputePolicy
from app.plan.schedule import build_schedule

ROOT = Path(__file__).resolve().parent.parent
MICROBATCHES, VOCAB = 64, 8


class Tiny(nn.Module):
    """First and last stage at once: one weight per token."""

    first = last = True
    layer_groups = LayerGroups()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(VOCAB))

    def context(self, *_: Any, **__: Any) -> None:
        """None is needed."""

    def forward(self, tokens_BS: Tensor, context: None, runs: None = None) -> ChunkOutput:
        """B × S -> logits B × S × V."""
        return ChunkOutput(tokens_BS[..., None].float() * self.weight, ())

    def loss(self, logits_BSV: Tensor, labels_BS: Tensor, context: None) -> Tensor:
        """Summed cross-entropy."""
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")


class NoParameters:
    """An optimizer with nothing to send."""

    def start_gather(self, chunk: int) -> None:
        """Nothing."""

    def expect_grads(self, chunk: int, last: bool) -> None:
        """Nothing."""

    def reduce_grads(self, chunk: int) -> None:
        """Nothing."""

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Nothing."""


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    (actions,) = lower_all(build_schedule("none", 1, MICROBATCHES))
    tiny, step = Tiny(), step_input()
    stages = RankStages(
        (tiny,),
        {},
        RecomputePolicy(),
        hidden=torch.Size(()),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    transport, watchdog = Transport(dist.group.WORLD, [0]), Watchdog(0, 60.0)
    executor = Executor(actions, stages, NoParameters(), transport=transport, watchdog=watchdog)
    engine = partial(executor, step)
    plain = partial(by_hand, tiny, step)
    times = [(seconds(engine), seconds(plain)) for _ in range(rounds)]
    dist.destroy_process_group()
    per_action = [(ours - theirs) / len(actions) * 1e6 for ours, theirs in times]
    low, _, high = statistics.quantiles(per_action, n=4)
    result = {
        "us_per_action": round(statistics.median(per_action), 2),
        "quartiles": [round(low, 2), round(high, 2)],
        "ratio_to_by_hand": round(statistics.median(ours / theirs for ours, theirs in times), 3),
        "actions": len(actions),
        "torch": torch.__version__,
    }
    (ROOT / "bench" / "results" / "executor.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def step_input() -> StepInput:
    """Microbatches of one sequence of four tokens."""
    tokens = torch.ones(1, 4, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens, ends_BD=None)
    return StepInput(
        (batch,) * MICROBATCHES,
        torch.ones(MICROBATCHES),
        1.0,
        valid=torch.tensor(4 * MICROBATCHES),
    )


def by_hand(tiny: Tiny, step: StepInput) -> Tensor:
    """The same forwards, losses and backwards in a loop."""
    total = torch.zeros(())
    for batch, weight in zip(step.batches, step.loss_weights_M, strict=True):
        loss = tiny.loss(tiny(batch.tokens_BS, None).x, batch.labels_BS, None) * weight
        total = total + loss.detach()
        loss.backward()
    return total


def seconds(work: Any) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
