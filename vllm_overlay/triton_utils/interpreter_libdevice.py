# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Device-library functions for Triton's interpreter.

The functions of ``triton.language.extra.libdevice`` are declarations that the
compiler binds to a GPU's math library; in the interpreter they return None. Those
that vLLM's model runner uses are written here with Triton's own operations.
"""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """``log(1 + x)``, accurate also where ``1 + x`` rounds.

    The error of ``u = 1 + x`` cancels in ``log(u) / (u - 1)``.

    Args:
        x: fp32 or fp64 block, > -1.
    """
    u = 1.0 + x
    rounded = u - 1.0
    is_small = rounded == 0.0
    return tl.where(is_small, x, tl.log(u) * (x / tl.where(is_small, 1.0, rounded)))
