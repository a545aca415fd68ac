# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Free blocks of the device pool (D7)."""

from collections import deque
from collections.abc import Iterable

NULL_BLOCK = 0


class BlockAllocator:
    """Hands out block ids of one pool; block 0 is the null block and never leaves.

    Blocks come back in the order in which they are taken again last: a block that
    was freed a moment ago may still be read by a step in flight (R5), so the ones
    that have been free for longest go first.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; the pool needs at least 2: the null "
                "block and one to hand out"
            )
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._is_free = bytearray(b"\1" * num_blocks)

    def __len__(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks, those that have been free for longest first."""
        assert count <= len(self._free), (count, len(self._free))
        blocks = tuple(self._free.popleft() for _ in range(count))
        for block in blocks:
            self._is_free[block] = False
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool."""
        for block in blocks:
            assert NULL_BLOCK < block < self.num_blocks, block
            assert not self._is_free[block], f"block {block} is freed twice"
            self._is_free[block] = True
            self._free.append(block)

    def free_blocks(self) -> set[int]:
        """The free block ids, for integrity checks."""
        return set(self._free)
