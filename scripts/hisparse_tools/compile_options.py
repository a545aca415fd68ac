# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Options of the session that compiles all kernels."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .errors import ToolError

_NEWEST, _WRITE = "--newest", "--write"


def parse(argv: Sequence[str], description: str | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ToolError: The options exclude each other.
    """
    parser = argparse.ArgumentParser(prog="nox -s compile --", description=description)
    parser.add_argument(_NEWEST, action="store_true", help="with the newer Triton")
    parser.add_argument(
        _WRITE, action="store_true", help="put the table into docs/kernels.md"
    )
    args = parser.parse_args(argv)
    if args.newest and args.write:
        raise ToolError(
            "docs/kernels.md is about the Triton that serves, not the newest",
            f"leave out {_WRITE} or {_NEWEST}",
        )
    return args
