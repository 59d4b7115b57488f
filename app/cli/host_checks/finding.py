"""Result of one check, and how results are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class CheckState(Enum):
    """Outcome of a check."""

    ok = "ok"
    skip = "skip"  # not measured here; the text says why
    warn = "warn"  # a run starts, but slower or at a risk
    fail = "fail"  # a run would fail, or compute wrong numbers


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one check on one host, or of all hosts together."""

    check: str
    state: CheckState
    measured: str
    advice: str = ""  # what to do; empty where nothing has to be done
    host: str = ""  # empty: of all hosts together

    def __post_init__(self) -> None:
        troubled = self.state in (CheckState.warn, CheckState.fail)
        assert bool(self.advice) == troubled, "advice belongs to trouble, and to nothing else"

    def as_json(self) -> dict[str, str]:
        """Return the fields as text."""
        return {
            "check": self.check,
            "state": self.state.value,
            "measured": self.measured,
            "advice": self.advice,
            "host": self.host,
        }

    @classmethod
    def from_json(cls, found: dict[str, str]) -> CheckResult:
        """Return what `as_json` was made from."""
        return cls(
            found["check"],
            CheckState(found["state"]),
            found["measured"],
            advice=found["advice"],
            host=found["host"],
        )


def ok(check: str, measured: str) -> CheckResult:
    """Return the finding of a check that has passed."""
    return CheckResult(check, CheckState.ok, measured)


def skip(check: str, why: str) -> CheckResult:
    """Return the finding of a check that could not be made here."""
    return CheckResult(check, CheckState.skip, why)


def warn(check: str, measured: str, advice: str) -> CheckResult:
    """Return the finding of a check after which a run works, but worse than it could."""
    return CheckResult(check, CheckState.warn, measured, advice=advice)


def fail(check: str, measured: str, advice: str) -> CheckResult:
    """Return the finding of a check after which a run does not work."""
    return CheckResult(check, CheckState.fail, measured, advice=advice)


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return 1 if a check has failed, otherwise 0: warnings do not keep a run from starting."""
    return int(any(each.state is CheckState.fail for each in findings))


def as_json(findings: Sequence[CheckResult], hosts: int, seconds: float) -> str:
    """Return the findings of `hosts` hosts as JSON, with the exit code and the time taken."""
    return json.dumps(
        {
            "hosts": hosts,
            "seconds": round(seconds, 1),
            "exit_code": exit_code(findings),
            "checks": [each.as_json() for each in findings],
        },
        indent=1,
    )


def as_text(findings: Sequence[CheckResult], hosts: int, seconds: float) -> str:
    """Return a line per check, with what to do below it; equal ones of several hosts once."""
    merged: dict[tuple[str, CheckState, str, str], list[str]] = {}
    for each in findings:
        key = (each.check, each.state, each.measured, each.advice)
        merged.setdefault(key, []).append(each.host)
    wide = max((len(check) for check, *_ in merged), default=0)
    lines = []
    for (check, state, measured, advice), where in merged.items():
        named = f"{', '.join(dict.fromkeys(where))}: " if hosts > 1 and any(where) else ""
        lines.append(f"{state.value:4}  {check:{wide}}  {named}{measured}")
        if advice:
            lines.append(f"{'':{wide + 8}}-> {advice}")
    counts = [sum(each.state is state for each in findings) for state in CheckState]
    told = ", ".join(f"{n} {state.value}" for state, n in zip(CheckState, counts, strict=True) if n)
    many = "1 host" if hosts == 1 else f"{hosts} hosts"
    return "\n".join([*lines, f"{many}, {seconds:.0f} s: {told}"])
