# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The one error type a user sees, and the wrapper that prints it."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


class ToolError(Exception):
    """Something the user can mend.

    Attributes:
        what: One line (or a few) that says what is wrong, with names and values.
        remedy: What to do about it.
        before: Lines to print first, such as the end of a log: whatever comes last
            is what a reader sees.
    """

    def __init__(self, what: str, remedy: str, before: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.before = before


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


# What the user's folders, not the code, can be the cause of.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def _explain(error: OSError) -> str:
    """Return the two lines for a failed file operation, or raise it again."""
    name = error.filename2 or error.filename or "a file"
    if error.errno in _NO_SPACE:
        return (
            f"error: no space left while writing {name}\n"
            "remedy: free some space (a build needs about 1 GB in the cache and in "
            "dist/), or set HISPARSE_CACHE to a folder on a larger disk"
        )
    if error.errno in _NOT_WRITABLE:
        return (
            f"error: {name}: {error.strerror}\n"
            "remedy: name a folder that can be made and written (--out, "
            "HISPARSE_CACHE), or make this one writable"
        )
    raise error


def run_command(
    main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run a command's ``main`` and exit with its status.

    A `ToolError` is printed as two lines and becomes exit status 1; Ctrl-C and
    SIGTERM become 130 after every ``with`` block has cleaned up.

    Args:
        main: Takes the arguments without the program name, returns the status.
        argv: Arguments; those of the process when omitted.
    """
    # A terminated build must clean up exactly as an interrupted one does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except ToolError as error:
        sys.stdout.flush()
        text = f"{error.before}error: {error.what}\nremedy: {error.remedy}"
        print(text, file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        sys.stdout.flush()
        print("\ninterrupted: nothing half-written was left behind", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 1
    except OSError as error:
        print(_explain(error), file=sys.stderr)
        status = 1
    sys.exit(status)
