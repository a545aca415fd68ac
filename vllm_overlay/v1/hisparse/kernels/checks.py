# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Optional argument checks of the launchers.

They cost host time, so they are off unless a test or a debug run sets ``ENABLED``.
They look at shapes, dtypes and strides, and at values only where those lie in CPU
memory, never on a device (D25).
"""

import torch

ENABLED = False


def expect(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    *shape: int | None,
) -> None:
    """Check one kernel argument.

    Args:
        name: Name in the message.
        tensor: The argument.
        dtype: The dtype it must have, or several.
        shape: Wanted size of each dimension; None accepts any.

    Raises:
        ValueError: dtype, rank, a size or the stride of the last dimension differs.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtypes}")
    sizes_match = len(shape) == tensor.dim() and all(
        want is None or want == have for want, have in zip(shape, tensor.shape)
    )
    if not sizes_match:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension")


def expect_dense(name: str, tensor: torch.Tensor) -> None:
    """Check that the kernel may address a tensor by its shape alone.

    Raises:
        ValueError: The tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{name} with strides {tensor.stride()} is not contiguous")


def expect_at_most(name: str, value: int, limit: int) -> None:
    """Check a limit that an encoding imposes.

    Raises:
        ValueError: ``value`` is above ``limit``.
    """
    if value > limit:
        raise ValueError(f"{name} is {value}, the kernels' limit is {limit}")


def expect_multiple(name: str, value: int, unit: int) -> None:
    """Check an alignment.

    Raises:
        ValueError: ``value`` is not a multiple of ``unit``.
    """
    if value % unit:
        raise ValueError(f"{name} is {value}, not a multiple of {unit}")


def expect_distinct(name: str, rows: torch.Tensor) -> None:
    """Check that no row holds a value >= 0 twice; rows on a device pass unread.

    Raises:
        ValueError: A row does.
    """
    if rows.device.type == "cpu":
        ordered = rows.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if bool(twice.any()):
            row = int(twice.any(dim=1).nonzero()[0])
            value = int(ordered[row, 1:][twice[row]][0])
            raise ValueError(f"{name} row {row} holds {value} more than once")
