# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Numbers on a benchmark's command line, with the range that each may have."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def in_range(
    kind: Callable[[str], Number],
    least: Number,
    most: Number | None = None,
    why: str = "",
) -> Callable[[str], Number]:
    """What argparse is to make of an option's text; argparse names the option.

    Args:
        kind: int or float.
        least: Smallest value allowed.
        most: Largest one; None: there is none.
        why: Of the range, if it needs a reason.
    """
    allowed = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"
    reason = f" ({why})" if why else ""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        fits = value is not None and math.isfinite(value) and value >= least
        if value is None or not fits or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"it is {text}; give {allowed}{reason}")
        return value

    return read
