# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The batch of a forward pass, as the resolver needs it.

Its tensors are persistent, so that a captured graph finds the next step's values in
them. What Python decides by is a `StepShape`, made before the step's first launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

NO_ROW = -1


@dataclass(frozen=True)
class TailRequest:
    """A request of the tail, by its place in the batch.

    Attributes:
        request: Batch row.
        first: Its first token of the step.
        last: One behind its last token.
        host_pages: Pages of it that are on the host only.
    """

    request: int
    first: int
    last: int
    host_pages: int


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step.

    Attributes:
        is_mixed: Whether a request of the batch may hold a hot lease.
        tail: Requests from the first mixed one on that has more query rows than its
            hot buffer resolves at once: a prefill. Their pages are staged (D26).
    """

    is_mixed: bool
    tail: tuple[TailRequest, ...] = ()

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        is_leased: Sequence[bool],
        host_pages: Sequence[int],
        max_query_rows: int,
    ) -> "StepShape":
        """Look at a batch.

        Args:
            counts: Tokens of each request, in the order of the batch.
            is_leased: Whether it holds a hot lease.
            host_pages: Pages of it that are on the host only.
            max_query_rows: Query rows of a request that are resolved at once.
        """
        long = (n > max_query_rows for n in counts)
        starts = (i for i, pair in enumerate(zip(is_leased, long)) if all(pair))
        first = next(starts, len(counts))
        token = sum(counts[:first])
        tail = []
        for request in range(first, len(counts)):
            last = token + counts[request]
            tail.append(TailRequest(request, token, last, host_pages[request]))
            token = last
        return cls(any(is_leased), tuple(tail))

    def decoding(self) -> "StepShape":
        """The same requests with one token each, as a drafter runs them."""
        return StepShape(self.is_mixed)


# A captured graph must do whatever a later step may need.
ANY_STEP = StepShape(is_mixed=True)


class Batch:
    """Requests and tokens of the current forward pass.

    Attributes:
        state_row: int32 ``[max requests]``, -1 for padded requests.
        query_start: int32 ``[max requests + 1]``, first token of each request.
        token_request: int32 ``[max tokens]``, batch row of each token, or -1.
        host_table: int32 ``[S, P]``, host page of each page, by state row.
        num_requests: Requests, padded ones included.
        shape: What Python decides by.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, host_table: torch.Tensor
    ) -> None:
        int32 = {"dtype": torch.int32, "device": host_table.device}
        self.state_row = torch.full((max_requests,), NO_ROW, **int32)
        self.query_start = torch.zeros(max_requests + 1, **int32)
        self.token_request = torch.full((max_tokens,), NO_ROW, **int32)
        self.host_table = host_table
        self.num_requests = 0
        self.shape = ANY_STEP

    def set_requests(self, state_row: torch.Tensor, num_padded: int) -> None:
        """Take the requests of a step.

        Args:
            state_row: Integers ``[B]``.
            num_padded: B, with padded requests.
        """
        num_requests = len(state_row)
        self.state_row[:num_requests] = state_row
        self.state_row[num_requests:] = NO_ROW
        self.num_requests = num_padded

    def set_query_start(self, query_start: torch.Tensor) -> None:
        """Take the first token of each request; padded requests have no tokens.

        Args:
            query_start: Integers ``[B + 1]``.
        """
        num_starts = len(query_start)
        self.query_start[:num_starts] = query_start
        self.query_start[num_starts:] = query_start[-1:]

    def set_dummy(self, num_requests: int) -> None:
        """Take requests that are all padding, for a dummy run or a capture."""
        self.state_row.fill_(NO_ROW)
        self.num_requests = num_requests
        self.shape = ANY_STEP
