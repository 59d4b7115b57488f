"""Formatting of numbers for people."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from app.plan.actions import OnMicrobatch

# control characters, which XML does not allow, and lone surrogates, which fonts do not have
NOT_DRAWN = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
GIB = 2**30
MOST_RANKS = 8  # longest group that is listed in full


def figures(value: float) -> str:
    """Format with three significant digits, never an exponent: 0.0123, 1.23, 123, 12,345."""
    if value == 0:
        return "0"
    digits = 0
    while digits < 6 and abs(value) * 10**digits < 99.95:
        digits += 1
    return f"{value:,.{digits}f}"


def gib(size: int) -> str:
    """Format bytes in GiB, two decimals."""
    return f"{size / GIB:.2f}"


def amount(number: float) -> str:
    """Format a count, from a thousand on in k, M, B (10⁹) or T (10¹²): 999, 2.05 k, 44.04 B."""
    text = f"{number:.0f}"
    for unit in "kMBT":
        if len(text.partition(".")[0]) <= 3:
            break
        number /= 1000
        text = f"{number:.2f} {unit}"
    return text


def byte_count(number: float) -> str:
    """Format bytes, from a thousand on in kB, MB, GB or TB: 999 B, 1.44 MB."""
    text = amount(number).replace("B", "G")
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def count_of(number: int, one: str, many: str | None = None) -> str:
    """Format a number with its noun: 1 rank, 2,048 ranks."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def signed_percent(share: float) -> str:
    """Format a change with its sign, in whole per cent: +12 %."""
    return f"{round(100 * share):+d} %"


def ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers with consecutive ones joined: "0–3, 6"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def short_list(ranks: Sequence[int]) -> str:
    """Format a group's ranks, a long one as the first two and the last: "[0, 8, …, 1016]"."""
    shown: Sequence[object] = ranks
    if len(ranks) > MOST_RANKS:
        shown = [ranks[0], ranks[1], "…", ranks[-1]]
    return f"[{', '.join(map(str, shown))}]"


def compact(actions: Iterable[OnMicrobatch]) -> Iterator[str]:
    """Yield actions as words, consecutive microbatches joined: F0–3.0 B0.0 F4.0."""

    def row(place: tuple[int, OnMicrobatch]) -> tuple[str, int, int]:
        nth, action = place
        return action.letter, action.chunk, action.mb - nth

    for (letter, chunk, _), run in groupby(enumerate(actions), row):
        yield f"{letter}{ranges([action.mb for _, action in run])}.{chunk}"


def cut(words: Iterable[str], width: int, end: str) -> str:
    """Join words to a line of at most `width` columns; `end` replaces those that do not fit."""
    line = whole = ""
    for word in words:
        whole = f"{whole} {word}" if whole else word
        if len(whole) > width:
            return f"{line} {end}"
        if len(whole) + 1 + len(end) <= width:
            line = whole
    return whole


def drawable(name: str) -> str:
    """Return a user's name with every character that no font has replaced by �."""
    return NOT_DRAWN.sub("\ufffd", name)


@contextmanager
def literal_text() -> Iterator[None]:
    """Make matplotlib draw text literally within the block.

    A dollar sign begins no formula, and a character that the font lacks is a box without a warning.
    """
    import matplotlib  # slow import

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing from", UserWarning)
        yield
