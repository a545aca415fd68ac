# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Synthetic streams of what an indexer picks, with its scores.

In every step the indexer scores all rows of one request and picks the best. A score is
a sum of parts that are independent between rows, in units of the first:

- popularity: normal, stays with a row for good;
- drift: a stationary Ornstein-Uhlenbeck process (AR(1) by step);
- noise: normal, new in every step;
- recency: a bonus that decays with the age of a row.

Nothing here comes from a model: it is a way to write rankings that change partly
slowly, partly quickly, with parameters that can be read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

_RECENT = 8  # ages, in decay times, after which a bonus is nothing


@dataclass(frozen=True)
class Model:
    """How scores arise; amounts are standard deviations.

    Attributes:
        popularity: Of what stays with a row.
        drift: Of what changes slowly.
        drift_steps: Steps in which the drift's correlation falls to 1/e.
        noise: Of what is new in every step.
        recency: Bonus of the newest row.
        recency_rows: Rows in which the bonus falls to 1/e.
    """

    popularity: float
    drift: float
    drift_steps: float
    noise: float
    recency: float = 2.0
    recency_rows: int = 64

    def at_pace(self, pace: float) -> "Model":
        """The model whose scores change so many times as far from step to step."""
        return replace(
            self, drift_steps=self.drift_steps / pace**2, noise=self.noise * pace
        )

    def scaled(self, divisor: int) -> "Model":
        """The model for a shape that is scaled alike."""
        return replace(self, recency_rows=max(1, self.recency_rows // divisor))


@dataclass(frozen=True)
class Shape:
    """The sizes of a stream.

    Attributes:
        top_k: Rows that are picked in every step.
        context: Rows in the first step; every step adds one.
        steps: Steps, those that only warm up included.
        warm_up: First steps, in which nothing is counted.
    """

    top_k: int
    context: int
    steps: int
    warm_up: int

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"--top-k is {self.top_k}; give 1 or more")
        if self.context <= self.top_k:
            raise ValueError(
                f"--context is {self.context:,}; give more than --top-k "
                f"({self.top_k:,}), or every step picks all rows"
            )
        if not 0 <= self.warm_up < self.steps:
            raise ValueError(
                f"--warm-up is {self.warm_up:,}; give 0 to {self.steps - 1:,}, "
                "or more --steps: steps behind it are counted"
            )

    @property
    def max_rows(self) -> int:
        """Rows in the last step."""
        return self.context + self.steps - 1

    def scaled(self, divisor: int) -> "Shape":
        """The same proportions and steps with fewer rows."""
        return replace(
            self, top_k=self.top_k // divisor, context=self.context // divisor
        )


def score_steps(model: Model, shape: Shape, seed: int) -> Iterator[np.ndarray]:
    """The scores of every step, float32 ``[rows of that step]``.

    The same arguments give the same scores. An array is valid until the next one.
    """
    rng = np.random.default_rng([seed, shape.context])
    rows = shape.max_rows
    popularity = model.popularity * rng.standard_normal(rows, dtype=np.float32)
    drift = rng.standard_normal(rows, dtype=np.float32)
    fresh = np.empty(rows, np.float32)
    keep = np.float32(np.exp(-1 / model.drift_steps))
    renew = np.sqrt(1 - keep * keep)
    age = np.arange(_RECENT * model.recency_rows, dtype=np.float32)[::-1]
    bonus = model.recency * np.exp(-age / np.float32(model.recency_rows))
    for step in range(shape.steps):
        if step and model.drift:
            rng.standard_normal(out=fresh, dtype=np.float32)
            drift *= keep
            fresh *= renew
            drift += fresh
        now = shape.context + step
        scores = popularity[:now] + np.float32(model.drift) * drift[:now]
        if model.noise:
            noise = fresh[:now]
            rng.standard_normal(out=noise, dtype=np.float32)
            noise *= np.float32(model.noise)
            scores += noise
        recent = min(now, len(bonus))
        scores[-recent:] += bonus[-recent:]
        yield scores


def pick(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The positions of the best scores, int64 ``[top_k]``, ascending."""
    first = len(scores) - top_k
    return np.sort(np.argpartition(scores, first)[first:])


def next_uses(picks: np.ndarray, max_rows: int) -> np.ndarray:
    """When each pick is picked again, int64 ``[steps, top_k]``; never is ``steps``.

    Args:
        picks: Positions, ``[steps, top_k]``, distinct within a step.
        max_rows: More than every position.
    """
    steps = len(picks)
    again = np.empty(picks.shape, np.int64)
    following = np.full(max_rows, steps, np.int64)
    for step in range(steps - 1, -1, -1):
        again[step] = following[picks[step]]
        following[picks[step]] = step
    return again
