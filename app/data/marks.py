"""Tokens of conversations: ids together with whether they are trained and end their document.

They stay in one list of numbers, so that caches, packing and blends handle them as any tokens. An
id as it is is trained, and ends a document if it is the end-of-document token. Others are below
PADDING.
"""

from __future__ import annotations

import numpy as np

from app.data.packing import PADDING

LAST = PADDING - 1  # the number of an untrained token with id 0


def marked(ids_T: np.ndarray, trained_T: np.ndarray) -> np.ndarray:
    """Return the tokens of one conversation, int32 [T], of ids below 2**29."""
    codes_T = 4 * ids_T.astype(np.int32) + trained_T
    codes_T[-1] += 2
    found_T: np.ndarray = LAST - codes_T
    return found_T


def ids_of_marked(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, PADDING where it is: int64 of the same shape."""
    wide = tokens.astype(np.int64)
    return np.where(wide <= LAST, (LAST - wide) >> 2, wide)


def trained(tokens: np.ndarray) -> np.ndarray:
    """Return which tokens are trained, bool of the same shape; PADDING is not."""
    found: np.ndarray = np.where(tokens <= LAST, (LAST - tokens) & 1 == 1, tokens != PADDING)
    return found


def ends(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Return which tokens end their document, bool of the same shape."""
    found: np.ndarray = np.where(tokens <= LAST, (LAST - tokens) & 2 == 2, tokens == eod)
    return found
