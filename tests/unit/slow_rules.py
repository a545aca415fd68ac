# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Rules for hot buffers once more, one row at a time, to compare the study with."""

from collections import deque
from typing import Any

import numpy as np


class SlowFifo:
    def __init__(self, hot_rows: int) -> None:
        self.hot_rows = hot_rows
        self.rows: deque[int] = deque()

    def step(self, picks: list[int], scores: list[float]) -> int:
        missed = [row for row in picks if row not in self.rows]
        for row in missed:
            if len(self.rows) == self.hot_rows:
                self.rows.remove(next(r for r in self.rows if r not in picks))
            self.rows.append(row)
        return len(missed)


class SlowKeyed:
    """The lowest key leaves first, equal ones by slot; empty slots before all."""

    def __init__(self, hot_rows: int) -> None:
        self.rows: list[int | None] = [None] * hot_rows
        self.key: list[Any] = [0.0] * hot_rows
        self.rng = np.random.default_rng(7)
        self.steps = 0

    def before(self, free: list[int]) -> None:
        """Set the keys of slots not in use."""

    def after(self, picked: dict[int, float], fetched: list[int]) -> None:
        """Set keys; the scores of the picks' slots, and the slots that were filled."""

    def step(self, picks: list[int], scores: list[float]) -> int:
        missed = [row for row in picks if row not in self.rows]
        free = [slot for slot, row in enumerate(self.rows) if row not in picks]
        self.before(free)
        empty = [slot for slot in free if self.rows[slot] is None]
        full = [slot for slot in free if self.rows[slot] is not None]
        fetched = (empty + sorted(full, key=lambda s: (self.key[s], s)))[: len(missed)]
        for row, slot in zip(missed, fetched):
            self.rows[slot] = row
        self.after({self.rows.index(row): scores[row] for row in picks}, fetched)
        self.steps += 1
        return len(missed)


class SlowRandom(SlowKeyed):
    def before(self, free: list[int]) -> None:
        for slot, drawn in zip(free, self.rng.random(len(free)).tolist()):
            self.key[slot] = drawn


class SlowFrequency(SlowKeyed):
    def after(self, picked: dict[int, float], fetched: list[int]) -> None:
        for slot in range(len(self.rows)):
            kept = 0.0 if slot in fetched else self.key[slot]
            self.key[slot] = kept * 0.8 + (slot in picked)


class SlowScoreThen(SlowKeyed):
    def after(self, picked: dict[int, float], fetched: list[int]) -> None:
        for slot, score in picked.items():
            self.key[slot] = score


class SlowLruScoreThen(SlowKeyed):
    def __init__(self, hot_rows: int) -> None:
        super().__init__(hot_rows)
        self.key = [(0, 0.0)] * hot_rows

    def after(self, picked: dict[int, float], fetched: list[int]) -> None:
        for slot, score in picked.items():
            self.key[slot] = (self.steps, score)


class SlowClock:
    def __init__(self, hot_rows: int) -> None:
        self.rows: list[int | None] = [None] * hot_rows
        self.marked = [False] * hot_rows
        self.hand = 0

    def step(self, picks: list[int], scores: list[float]) -> int:
        missed = [row for row in picks if row not in self.rows]
        in_use = [row in picks for row in self.rows]
        for row in missed:
            while in_use[self.hand] or self.marked[self.hand]:
                if not in_use[self.hand]:
                    self.marked[self.hand] = False
                self.hand = (self.hand + 1) % len(self.rows)
            self.rows[self.hand] = row
            in_use[self.hand] = True
            self.hand = (self.hand + 1) % len(self.rows)
        for slot, held in enumerate(self.rows):
            self.marked[slot] |= held in picks
        return len(missed)
