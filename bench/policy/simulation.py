# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Miss rates of rules on a stream."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from rules import LRU, OPTIMUM, HotBuffer, Rule
from streams import Model, Shape, next_uses, pick, score_steps

Key = tuple[str, float]  # name of a rule, size of the hot buffer in top-k


@dataclass(frozen=True)
class Measured:
    """What one stream gave, steps that only warm up left out.

    Attributes:
        overlap: Share of a step's picks that the step before picked, too.
        rates: Misses by picks.
    """

    overlap: float
    rates: dict[Key, float]

    def won(self, rule: str, size: float) -> float:
        """Share of the gap between LRU and the optimum that a rule wins back."""
        lru, best = self.rates[LRU.name, size], self.rates[OPTIMUM.name, size]
        return (lru - self.rates[rule, size]) / (lru - best) if lru > best else 0.0


def mean(streams: Sequence[Measured]) -> Measured:
    """The means of streams that were measured alike."""
    return Measured(
        float(np.mean([s.overlap for s in streams])),
        {
            key: float(np.mean([s.rates[key] for s in streams]))
            for key in streams[0].rates
        },
    )


def measure(
    model: Model, shape: Shape, seed: int, cases: Iterable[tuple[Rule, float]]
) -> Measured:
    """Run rules side by side on one stream.

    Args:
        model: Where its scores come from.
        shape: Its sizes.
        seed: Of the stream, and of rules that draw.
        cases: Rules and the sizes of their hot buffers, in top-k.

    Raises:
        ValueError: A hot buffer is smaller than top-k, or was not full after warming
            up.
    """
    buffers = {
        (rule.name, size): rule.make(round(size * shape.top_k), shape.max_rows, seed)
        for rule, size in cases
    }
    misses = {key: np.zeros(shape.steps) for key in buffers}
    # The optimum has to wait until the future is known.
    online = [key for key in buffers if key[0] != OPTIMUM.name]
    picks = np.empty((shape.steps, shape.top_k), np.int64)
    for step, scores in enumerate(score_steps(model, shape, seed)):
        picks[step] = pick(scores, shape.top_k)
        for key in online:
            misses[key][step] = buffers[key].step(picks[step], scores)
        if step == shape.warm_up - 1:
            _check_full({key: buffers[key] for key in online}, shape)
    again = next_uses(picks, shape.max_rows)
    for key in buffers.keys() - online:
        for step in range(shape.steps):
            misses[key][step] = buffers[key].step(picks[step], again[step])
    rates = {
        key: float(counts[shape.warm_up :].mean()) / shape.top_k
        for key, counts in misses.items()
    }
    return Measured(_overlap(picks[max(shape.warm_up - 1, 0) :]), rates)


def _check_full(buffers: dict[Key, HotBuffer], shape: Shape) -> None:
    for (name, size), buffer in buffers.items():
        if not buffer.is_full:
            raise ValueError(
                f"--warm-up is {shape.warm_up:,}, and the hot buffer of {name} at "
                f"{size:g} x top-k is not full by then; give more steps"
            )


def _overlap(picks: np.ndarray) -> float:
    pairs = zip(picks[:-1], picks[1:])
    shared = [len(np.intersect1d(a, b, assume_unique=True)) for a, b in pairs]
    return sum(shared) / picks[1:].size if shared else float("nan")
