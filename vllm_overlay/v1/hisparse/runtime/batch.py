# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The batch of the current step, as the resolver needs it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Requests and tokens of one forward pass.

    Attributes:
        state_row: int32 ``[B]``, -1 for padded requests.
        query_start: int32 ``[B + 1]``, first token of each request.
        host_table: int32 ``[B, P]``, host page of each page of a request.
        token_request: int32 ``[T]``, batch row of each token.
    """

    state_row: torch.Tensor
    query_start: torch.Tensor
    host_table: torch.Tensor
    token_request: torch.Tensor

    @classmethod
    def build(
        cls,
        state_row: torch.Tensor,
        query_start: torch.Tensor,
        host_table: torch.Tensor,
    ) -> "Batch":
        """Derive each token's batch row."""
        lengths = query_start.diff()
        request = torch.arange(len(lengths), dtype=torch.int32)
        return cls(
            state_row=state_row,
            query_start=query_start,
            host_table=host_table,
            token_request=torch.repeat_interleave(request, lengths),
        )


@dataclass(frozen=True)
class TokenGroup:
    """Tokens that are resolved and attended to together.

    Attributes:
        tokens: Long ``[n]``, indices of the step's tokens.
        token_request: int32 ``[n]``, batch row of each.
        query_start: int32 ``[B + 1]`` into `tokens`.
        is_mixed: Whether the tokens' requests hold hot leases.
    """

    tokens: torch.Tensor
    token_request: torch.Tensor
    query_start: torch.Tensor
    is_mixed: bool


def split_tokens(
    batch: Batch, mixed: torch.Tensor, max_query_rows: int
) -> list[TokenGroup]:
    """Split a batch into tokens of resident requests and small groups of the others.

    A request's rows of one group share its hot buffer, so a group has at most
    `max_query_rows` of them; a prefill chunk of a mixed request takes several groups,
    one after the other.

    Args:
        batch: The step's batch.
        mixed: bool ``[B]``, whether a request holds a hot lease.
        max_query_rows: Query rows of a request that one group may have.
    """
    is_mixed = mixed[batch.token_request.long()]
    index_in_request = torch.arange(len(batch.token_request), dtype=torch.int32)
    index_in_request -= batch.query_start[batch.token_request.long()]
    turn = torch.where(is_mixed, index_in_request // max_query_rows, -1)
    groups = []
    for number in turn.unique().tolist():
        tokens = (turn == number).nonzero().squeeze(1)
        token_request = batch.token_request[tokens]
        counts = torch.bincount(token_request.long(), minlength=len(mixed))
        query_start = torch.zeros(len(mixed) + 1, dtype=torch.int32)
        query_start[1:] = counts.cumsum(0)
        groups.append(TokenGroup(tokens, token_request, query_start, number >= 0))
    return groups
