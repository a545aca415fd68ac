# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Hot buffers with different rules for which rows make room for those that are missed.

All picks of a step lie in the buffer together, so a rule chooses among the slots that
no pick of the step is in, as `assign` does. One query row per step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

NO_SLOT = -1
NO_ROW = -1


class HotBuffer:
    """A hot buffer; its rule is in the subclass.

    Attributes:
        slot_pos: int64 ``[hot_rows]``. Position of each slot's row, or NO_ROW.
        pos_slot: int64 ``[max_rows]``. Slot of each position, or NO_SLOT.
    """

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        self.slot_pos = np.full(hot_rows, NO_ROW)
        self.pos_slot = np.full(max_rows, NO_SLOT)
        self._seed = seed

    @property
    def is_full(self) -> bool:
        """Whether every slot has held a row."""
        return bool((self.slot_pos != NO_ROW).all())

    def step(self, picks: np.ndarray, facts: np.ndarray) -> int:
        """Bring in the picks of a step; return how many were missed.

        Args:
            picks: Positions, distinct, at most as many as slots.
            facts: What the rule may look at: for the optimum the next use of every
                pick, ``[picks]``; for the others the scores of the step, ``[rows]``.
        """
        if len(picks) > len(self.slot_pos):
            raise ValueError(
                f"a step picks {len(picks):,} rows and the hot buffer has "
                f"{len(self.slot_pos):,}; give sizes of 1 x top-k or more"
            )
        slots = self.pos_slot[picks]
        is_hit = slots != NO_SLOT
        in_use = np.zeros(len(self.slot_pos), bool)
        in_use[slots[is_hit]] = True
        missed = picks[~is_hit]
        taken = self.take(in_use, len(missed), facts)
        old = self.slot_pos[taken]
        self.pos_slot[old[old != NO_ROW]] = NO_SLOT
        self.slot_pos[taken] = missed
        self.pos_slot[missed] = taken
        self.note(picks, taken, facts)
        return len(missed)

    def take(self, in_use: np.ndarray, count: int, facts: np.ndarray) -> np.ndarray:
        """Choose `count` slots that are not in use, and change the order if any."""
        raise NotImplementedError

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        """See the picks, all of which are in the buffer now."""


class Lru(HotBuffer):
    """The LRU of `assign`: an order of the slots, partitioned in every step.

    `enter` says where the rows that were fetched go in the slots not in use: 1 is
    behind them, as `assign` does it; 0 is in front of them, where they make room first.
    """

    enter = 1.0

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        super().__init__(hot_rows, max_rows, seed)
        self.order = np.arange(hot_rows)

    def take(self, in_use: np.ndarray, count: int, facts: np.ndarray) -> np.ndarray:
        used = in_use[self.order]
        free = self.rank(self.order[~used], facts)
        taken, rest = free[:count], free[count:]
        self.order = self.join(rest, taken, self.order[used])
        return taken

    def rank(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """The slots not in use, the first to be taken in front."""
        return free

    def join(self, rest: np.ndarray, taken: np.ndarray, used: np.ndarray) -> np.ndarray:
        """The new order, oldest first."""
        cut = int(self.enter * len(rest))
        return np.concatenate([rest[:cut], taken, rest[cut:], used])


class LruHalfway(Lru):
    """Fetched rows enter in the middle of the slots not in use."""

    enter = 0.5


class LruOldest(Lru):
    """Fetched rows make room first, unless they are picked again in the next step."""

    enter = 0.0


class LruNewest(Lru):
    """Fetched rows count as used later than rows that were hit in the same step."""

    def join(self, rest: np.ndarray, taken: np.ndarray, used: np.ndarray) -> np.ndarray:
        return np.concatenate([rest, used, taken])


class Fifo(Lru):
    """Oldest fetch first; hits change nothing."""

    def take(self, in_use: np.ndarray, count: int, facts: np.ndarray) -> np.ndarray:
        taken = self.order[~in_use[self.order]][:count]
        stays = np.ones(len(self.order), bool)
        stays[taken] = False
        self.order = np.concatenate([self.order[stays[self.order]], taken])
        return taken


class Clock(HotBuffer):
    """Second chance: a hand goes round and spares, once, what was picked since."""

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        super().__init__(hot_rows, max_rows, seed)
        self.is_marked = np.zeros(hot_rows, bool)
        self.hand = 0

    def take(self, in_use: np.ndarray, count: int, facts: np.ndarray) -> np.ndarray:
        if not count:
            return np.empty(0, np.int64)
        hot_rows = len(in_use)
        ring = (self.hand + np.arange(hot_rows)) % hot_rows
        free = ring[~in_use[ring]]
        marked = self.is_marked[free]
        # A second round finds those that the first one spared.
        taken = np.concatenate([free[~marked], free[marked]])[:count]
        if count <= len(free) - marked.sum():
            passed = free[: np.flatnonzero(~marked)[count - 1]]
            self.is_marked[passed] = False
        else:
            self.is_marked[free] = False
        self.hand = (int(taken[-1]) + 1) % hot_rows
        return taken

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        self.is_marked[self.pos_slot[picks]] = True


class ScoreHalf(Lru):
    """LRU in two parts: rows that score below the mean of the slots not in use first.

    What a device could do without selecting: one sum, one comparison, one more scan.
    """

    def rank(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        is_empty = self.slot_pos[free] == NO_ROW
        scores = facts[self.slot_pos[free]]
        scores[is_empty] = -np.inf
        if is_empty.all():
            return free
        is_low = scores < scores[~is_empty].mean(dtype=np.float64)
        return np.concatenate([free[is_low], free[~is_low]])


class Keyed(HotBuffer):
    """Lowest key first, empty slots before all; equal keys by slot."""

    def take(self, in_use: np.ndarray, count: int, facts: np.ndarray) -> np.ndarray:
        free = np.flatnonzero(~in_use)
        keys = np.asarray(self.keys(free, facts), np.float64)
        keys[self.slot_pos[free] == NO_ROW] = -np.inf
        # Stable: the same on every machine, whatever it sorts with.
        return free[np.argsort(keys, kind="stable")[:count]]

    def keys(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """A key for each of these slots; what it says of empty ones does not matter."""
        raise NotImplementedError


class Random(Keyed):
    """Any row, all alike."""

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        super().__init__(hot_rows, max_rows, seed)
        self._rng = np.random.default_rng(seed)

    def keys(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        return self._rng.random(len(free))


class ScoreNow(Keyed):
    """Lowest score of this step first."""

    def keys(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        return facts[self.slot_pos[free]]


class Remembering(Keyed):
    """Rules with a key for each slot that changes when the slot's row is picked."""

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        super().__init__(hot_rows, max_rows, seed)
        self.kept = np.zeros(hot_rows)

    def keys(self, free: np.ndarray, facts: np.ndarray) -> np.ndarray:
        return self.kept[free]


class ScoreThen(Remembering):
    """Lowest score first, each as it was when the row was last picked."""

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        self.kept[self.pos_slot[picks]] = facts[picks]


class LruScoreThen(Remembering):
    """LRU; among rows picked last in the same step, lowest score of that step first."""

    def __init__(self, hot_rows: int, max_rows: int, seed: int = 0) -> None:
        super().__init__(hot_rows, max_rows, seed)
        self._step = 0

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        rank = np.argsort(np.argsort(facts[picks], kind="stable"))
        self._step += 1
        self.kept[self.pos_slot[picks]] = self._step + rank / len(picks)


class Frequency(Remembering):
    """Fewest picks while in the buffer first; a pick counts `fade` less per step."""

    fade = 0.8

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        self.kept[taken] = 0.0
        self.kept *= self.fade
        self.kept[self.pos_slot[picks]] += 1.0


class Optimum(Remembering):
    """Farthest next use first: the fewest misses that any rule can have.

    Exact for steps with many picks, too: every pick must be in the buffer, so there is
    no other choice than which of the other rows leave, and never a reason to let one
    leave before its slot is needed.
    """

    def note(self, picks: np.ndarray, taken: np.ndarray, facts: np.ndarray) -> None:
        self.kept[self.pos_slot[picks]] = -facts


class Work(Enum):
    """What a rule needs on the device, compared with the LRU of `assign`."""

    NO_MORE = "no more"
    MORE = "more"


@dataclass(frozen=True)
class Rule:
    """A rule, and what it needs on the device.

    Attributes:
        name: What tables and pictures call it.
        gives_up: Which of the rows that a step does not pick make room first.
        make: Makes its buffer.
        work: Compared with LRU.
        needs: Why.
    """

    name: str
    gives_up: str
    make: Callable[[int, int, int], HotBuffer]
    work: Work
    needs: str


LRU = Rule(
    "LRU",
    "least recently used: those that were picked last the longest time ago; of those "
    "picked last in the same step, its misses",
    Lru,
    Work.NO_MORE,
    "what `assign` does: an order of the slots, split by one scan; the slots to take "
    "are the first ones not in use",
)
_SELECT = "and a selection of the lowest, where LRU takes the first of an order"
_PLACE = "another place in the order"
ONLINE = (
    LRU,
    Rule(
        "LRU, fetched newest",
        "as LRU, but of those picked last in the same step, its hits",
        LruNewest,
        Work.NO_MORE,
        _PLACE,
    ),
    Rule(
        "LRU, fetched halfway",
        "as LRU, but a row that is fetched counts as old as the middle one of those "
        "that the step does not pick",
        LruHalfway,
        Work.NO_MORE,
        _PLACE,
    ),
    Rule(
        "LRU, fetched oldest",
        "as LRU, but a row that is fetched goes first, until it is picked again",
        LruOldest,
        Work.NO_MORE,
        _PLACE,
    ),
    Rule(
        "FIFO",
        "first in, first out: those that were fetched the longest time ago, however "
        "often they were picked since",
        Fifo,
        Work.NO_MORE,
        "the same scan; hits do not change the order",
    ),
    Rule(
        "clock",
        "a hand goes round the slots, and takes those that were not picked since it "
        "came by last; others it passes over once",
        Clock,
        Work.NO_MORE,
        "a mark for each slot and a hand in place of the order; a second scan where "
        "one round does not find enough",
    ),
    Rule(
        "random",
        "any, all alike",
        Random,
        Work.MORE,
        f"a random number for each slot {_SELECT}",
    ),
    Rule(
        "frequency",
        "those picked least often since they were fetched; with every step a pick "
        f"counts {Frequency.fade:g} times what it did",
        Frequency,
        Work.MORE,
        f"a count for each slot, all of them changed in every step, {_SELECT}",
    ),
    Rule(
        "score when picked",
        "those that the indexer scored lowest, each by the step that picked it last",
        ScoreThen,
        Work.MORE,
        "top-k to hand out scores with its positions, a score kept for each slot, "
        f"{_SELECT}",
    ),
    Rule(
        "LRU, ties by score",
        "as LRU, but of those picked last in the same step, the ones that it scored "
        "lowest",
        LruScoreThen,
        Work.MORE,
        "top-k to hand out scores with its positions, and a sort of each step's rows",
    ),
    Rule(
        "score now",
        "those that the indexer scores lowest in this step",
        ScoreNow,
        Work.MORE,
        "the logits of rows that were not picked, read for every slot not in use, "
        f"{_SELECT}",
    ),
    Rule(
        "LRU, low scores first",
        "those that score below the mean of all of them in this step, by LRU; then the "
        "others, by LRU",
        ScoreHalf,
        Work.MORE,
        "the logits of rows that were not picked, read for every slot not in use, a "
        "mean and a second scan",
    ),
)
OPTIMUM = Rule(
    "optimum",
    "those that will not be picked for the longest time: no rule can miss less",
    Optimum,
    Work.MORE,
    "the future: a bound, not a rule",
)
