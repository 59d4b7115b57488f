"""Validation over all sets that are held out of training."""

from __future__ import annotations

from app.data.feed import ValidationFeed
from app.engine.start.start import Data
from app.engine.step.engine import Engine
from app.engine.step.records import ValidationReport
from app.engine.step.step import Validation
from app.errors import ConfigError


class Validations:
    """Held-out sets, and the mean of their losses by weight."""

    def __init__(self, engine: Engine, data: Data) -> None:
        self.run = run = engine.plan.run
        self.sets = [
            (
                held,
                ValidationFeed(
                    held.split,
                    engine.groups.dp_rank,
                    run.dp,
                    micro_batch=run.train.micro_batch,
                    eval_batches=run.eval_microbatches,
                ),
            )
            for held in data.validation
        ]
        # by the number of microbatches, which is one for all sets that are large enough
        self.by_count = {
            count: Validation(engine, count) for count in {len(feed) for _, feed in self.sets}
        }

    @property
    def first(self) -> ValidationFeed:
        """Sequences of the first set."""
        return self.sets[0][1]

    def report(self, step: int) -> ValidationReport:
        """Validate after a step. Raises ConfigError if a set has no token with a loss."""
        losses, tokens, total = {}, 0, 0.0
        for held, feed in self.sets:
            losses[held.label], count = self.by_count[len(feed)](list(feed))
            if not count:  # as of conversations that are cut as other documents
                rule = f"validation{held.label and f' of {held.label}'} has no token with a loss"
                size = self.run.train.eval_sequences
                advice = "validate more sequences, or keep conversations whole: "
                advice += "data.packing=best_fit"
                raise ConfigError("train.eval_sequences", size, rule, advice=advice)
            tokens += count
            total += held.weight * losses[held.label]
        mean = total / sum(held.weight for held, _ in self.sets)
        several = losses if len(losses) > 1 else {}
        return ValidationReport(step, mean, tokens, several)
