"""Next combinations to measure: planned times, corrected by what measurements say of each choice.

The logarithm of measured over planned time is modelled as a common offset, one correction per
choice (a schedule, a dispatcher, …) and a rest of the combination, all normal with the standard
deviations below: Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning,
section 3.3). Those come next that may well be fastest: lowest mean minus one deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from app.advice.combinations import PlannedCombination

OFFSET = 1.0  # of all times together, as on hardware without a profile
PER_CHOICE = 0.2
REST = 0.03  # of a combination
GAIN = 0.01  # share of the time that a further measurement must promise


def next_combinations(
    combinations: Sequence[PlannedCombination],
    times: Mapping[str, float],
    failed: Sequence[str],
    *,
    count: int,
) -> list[PlannedCombination]:
    """Return up to `count` combinations to measure next; none once no gain is likely.

    times: measured milliseconds by key; failed: keys that have none.
    """
    known = [place for place, each in enumerate(combinations) if each.key in times]
    done = {*times, *failed}
    waiting = [n for n, each in enumerate(combinations) if each.fits and each.key not in done]
    features = _features(combinations)
    planned = np.log([each.seconds * 1e3 for each in combinations])
    ratios = [float(np.log(times[combinations[n].key]) - planned[n]) for n in known]
    best = min((planned[n] + ratio for n, ratio in zip(known, ratios, strict=True)), default=None)
    chosen: list[PlannedCombination] = []
    while waiting and len(chosen) < count:
        mean, deviation = _corrections(features, known, ratios)
        low = planned + mean - deviation
        place = min(waiting, key=lambda n: (low[n], n))
        if best is not None and low[place] > best + np.log(1 - GAIN):
            break
        # as if measured at its mean, so that the others of this row tell something else
        known, ratios = [*known, place], [*ratios, float(mean[place])]
        waiting.remove(place)
        chosen.append(combinations[place])
    return chosen


def _features(combinations: Sequence[PlannedCombination]) -> np.ndarray:
    """Return [combination, choice]: 1 where the combination has it; the first column is all 1."""
    listed = [each.choices for each in combinations]
    pairs = list(dict.fromkeys(pair for choices in listed for pair in choices.items()))
    places = {pair: place for place, pair in enumerate(pairs, 1)}
    found = np.zeros((len(combinations), len(pairs) + 1))
    found[:, 0] = 1.0
    for row, choices in zip(found, listed, strict=True):
        row[[places[pair] for pair in choices.items()]] = 1.0
    return found


def _corrections(
    features: np.ndarray, known: Sequence[int], ratios: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each combination's logarithm of measured / planned."""
    prior = np.full(features.shape[1], PER_CHOICE**2)
    prior[0] = OFFSET**2
    x = features[list(known)]
    precision = np.diag(1 / prior) + x.T @ x / REST**2
    covariance = np.linalg.inv(precision)
    weights = covariance @ x.T @ np.array(ratios) / REST**2
    variance = np.einsum("nc,cd,nd->n", features, covariance, features) + REST**2
    return features @ weights, np.sqrt(variance)
