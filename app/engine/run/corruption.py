"""React to corrupt data that replays have found, by `train.on_corruption`.

All ranks have agreed on what was found, and so decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.choices import OnCorruption
from app.config import TrainConfig
from app.data.feed import Batch
from app.engine.integrity.check import Corruption, IntegrityCheck
from app.engine.step.step import TrainingStep
from app.errors import Corrupted


@dataclass(slots=True)
class CorruptionGuard:
    """Checks every `train.replay_every` steps and before each checkpoint."""

    check: IntegrityCheck
    config: TrainConfig
    rollbacks: int = 0
    named: set[int] = field(default_factory=set)  # ranks that were at fault before
    last: Corruption = field(default_factory=lambda: Corruption((), ""))

    @classmethod
    def of(cls, step: TrainingStep, config: TrainConfig) -> CorruptionGuard | None:
        """Return the guard of a run; None without `train.replay_every`."""
        if config.replay_every is None:
            return None
        return cls(IntegrityCheck(step, config.replay_every), config)

    def rolls_back(self, step: int, batches: Sequence[Batch], saves: bool) -> bool:
        """Check after a step with these microbatches, if it is time or the step `saves`; return
        True to roll back. Raises Corrupted to end the run.
        """
        found = self.check.after(step, batches, now=saves)
        if found is None:
            return False
        self.last = found
        policy = self.config.on_corruption
        if policy is not OnCorruption.rollback:
            text = f"step {step}: {found.text} (train.on_corruption={policy.value})"
            raise Corrupted(text, found.ranks)
        if again := self._again(found):
            raise Corrupted(f"step {step}: {found.text}, {again}", found.ranks)
        self.named.update(found.ranks)
        self.rollbacks += 1
        return True

    def _again(self, found: Corruption) -> str:
        if self.named & set(found.ranks):
            return "as before the last rollback"
        if self.rollbacks == self.config.max_rollbacks:
            return f"after {self.rollbacks} rollbacks (train.max_rollbacks)"
        return ""
