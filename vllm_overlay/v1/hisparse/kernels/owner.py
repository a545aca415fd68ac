# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Whose a query token is; how every kernel over tokens begins."""

import triton
import triton.language as tl


@triton.jit
def owner_of(token_request_ptr, state_row_ptr, token, in_step, num_requests):
    """Batch row and state row of tokens, -1 for those that belong to nobody.

    A padded token's request may be garbage, or a padded request.
    """
    request = tl.load(token_request_ptr + token, mask=in_step, other=-1)
    in_batch = (request >= 0) & (request < num_requests)
    state = tl.load(state_row_ptr + request, mask=in_batch, other=-1)
    return request, state
