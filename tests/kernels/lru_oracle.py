# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What the hot buffer of one request must do, written with an OrderedDict.

It shares no code and no data layout with the kernels or their references.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class Step:
    """Result of one step.

    Attributes:
        index: Hot index of each position that is not resident.
        fetched: Positions to fetch, in the order of the plan.
        hits: Distinct positions that were hot already.
        shared: Misses of a query row that an earlier row had too.
    """

    index: dict[int, int]
    fetched: list[int]
    hits: int
    shared: int


class HotBuffer:
    """Exact LRU over query rows that arrive together."""

    def __init__(self, hot_rows: int) -> None:
        self.hot_rows = hot_rows
        # Slot to position, least recently used first.
        self.slots: OrderedDict[int, int | None] = OrderedDict(
            (slot, None) for slot in range(hot_rows)
        )

    def step(self, rows: list[list[int]]) -> Step:
        """Resolve the host-only positions of each query row."""
        slot_of = {pos: slot for slot, pos in self.slots.items() if pos is not None}
        wanted = list(OrderedDict.fromkeys(pos for row in rows for pos in row))
        index = {pos: slot_of[pos] for pos in wanted if pos in slot_of}
        in_use = set(index.values())
        missed = [pos for pos in wanted if pos not in slot_of]
        victims = [slot for slot in self.slots if slot not in in_use]
        recent = [slot for slot in self.slots if slot in in_use]
        for pos, slot in zip(missed, victims):
            self.slots[slot] = pos
            self.slots.move_to_end(slot)
            index[pos] = slot
        for overflow_row, pos in enumerate(missed[len(victims) :]):
            index[pos] = self.hot_rows + overflow_row
        for slot in recent:
            self.slots.move_to_end(slot)
        occurrences = sum(pos not in slot_of for row in rows for pos in row)
        return Step(index, missed, len(in_use), occurrences - len(missed))
