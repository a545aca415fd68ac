# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Settings of HiSparse once they are checked, and the form of a refusal (D20, D31).

Pure Python, standard library only.
"""

from dataclasses import dataclass
from math import inf

CONNECTOR_NAME = "HiSparseConnector"
"""Name in `--kv-transfer-config`."""

MAX_HOT_ROWS = 32_767
"""Hot slots are kept as int16 (D21)."""

MAX_SELECTED_ROWS = 32_766
"""Query rows * top-k of a request: claims are kept as negative int16 (D21)."""

DEFAULT_TRANSFER_TIMEOUT_S = 60.0

GIB = 1 << 30

MOST_GIB = 1 << 40
"""More than any machine has; beyond it numbers stop being exact."""


@dataclass(frozen=True)
class HiSparseSettings:
    """What the user chose, with the defaults filled in.

    Attributes:
        host_pool_gib: host pool of one data-parallel replica, in GiB.
        device_buffer_size: rows of a hot buffer in each layer.
        topk: rows that one query token selects, of the model.
        transfer_timeout_s: seconds after which a copy of a page between host and device
            is not waited for any more.
    """

    host_pool_gib: float
    device_buffer_size: int
    topk: int
    transfer_timeout_s: float = DEFAULT_TRANSFER_TIMEOUT_S

    @property
    def host_pool_bytes(self) -> int:
        """The host pool of one data-parallel replica, in bytes."""
        return int(self.host_pool_gib * GIB)


def refusal(setting: str, value: object, allowed: str, remedy: str) -> ValueError:
    """Error for a setting that cannot work: setting, value, range and remedy (D20)."""
    return ValueError(
        f"HiSparse: {setting} is {value}; allowed: {allowed}. Remedy: {remedy}."
    )


def positive_number(
    setting: str, value: object, unit: str, remedy: str, most: float = inf
) -> float:
    """A setting that is a number above 0, and no more than `most`.

    Raises:
        ValueError: it is none; a boolean is none either.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= most:  # type: ignore[operator]
        raise refusal(setting, repr(value), f"a number of {unit} above 0", remedy)
    return float(value)  # type: ignore[arg-type]
