# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Batch invariance on the CPU: every row computed as if it were alone.

Matrix libraries choose another summation order for another number of rows, so the
same token gets other last bits in another batch. With ``VLLM_BATCH_INVARIANT=1``
the CPU platform multiplies one row at a time, and runs MoE layers, routing
included, one token at a time (``sigmoid`` differs between its vector body and its
scalar tail). It is slow, and meant for tests that compare log-probabilities bit
for bit.
"""

import functools
from collections.abc import Callable

import torch

import vllm.envs as envs

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Keeps the registrations alive; set once, by `enable`.
_library: torch.library.Library | None = None


def _is_exact(tensor: torch.Tensor) -> bool:
    """Whether products of `tensor` may be left to the library.

    The reference indexer multiplies fp8 values in fp64, which is exact in any
    order; nothing else on the path uses fp64.
    """
    return tensor.dtype == torch.float64


def _mm(kernel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[0] <= 1 or _is_exact(a):
        return kernel.call_boxed(_CPU_KEYS, a, b)
    rows = [kernel.call_boxed(_CPU_KEYS, row, b) for row in a.split(1)]
    return torch.cat(rows)


def _addmm(
    kernel, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta=1, alpha=1
) -> torch.Tensor:
    call = functools.partial(kernel.call_boxed, _CPU_KEYS, beta=beta, alpha=alpha)
    if a.shape[0] <= 1 or _is_exact(a):
        return call(bias, a, b)
    bias = bias.expand(a.shape[0], b.shape[1])
    pairs = zip(bias.split(1), a.split(1))
    return torch.cat([call(row_bias, row, b) for row_bias, row in pairs])


def _bmm(kernel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape[1] <= 1 or _is_exact(a):
        return kernel.call_boxed(_CPU_KEYS, a, b)
    # A copy: the library may look at the strides of a batch of rows.
    rows = [kernel.call_boxed(_CPU_KEYS, r.contiguous(), b) for r in a.split(1, dim=1)]
    return torch.cat(rows, dim=1)


_ROW_WISE: dict[str, Callable[..., torch.Tensor]] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
}


def _out_variant(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def with_out(*args, out: torch.Tensor, **kwargs) -> torch.Tensor:
        return out.copy_(function(*args, **kwargs))

    return with_out


def enable() -> None:
    """Replace the CPU's matrix products by row-wise ones, for this process.

    Idempotent.
    """
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for name, function in _ROW_WISE.items():
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        row_wise = functools.partial(function, kernel)
        functools.update_wrapper(row_wise, function)
        _library.impl(name, row_wise, "CPU", allow_override=True)
        _library.impl(f"{name}.out", _out_variant(row_wise), "CPU", allow_override=True)


def row_at_a_time(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorate a MoE ``apply`` so that it sees one token at a time.

    Args:
        apply: Method whose first argument is ``hidden_states [T, hidden]`` and
            whose argument ``router_logits`` is ``[T, experts]``.

    Returns:
        The method itself in effect, unless batch invariance is on.
    """

    @functools.wraps(apply)
    def wrapper(self, hidden_states, *args, router_logits, **kwargs) -> torch.Tensor:
        if not envs.VLLM_BATCH_INVARIANT or hidden_states.shape[0] <= 1:
            return apply(
                self, hidden_states, *args, router_logits=router_logits, **kwargs
            )
        pairs = zip(hidden_states.split(1), router_logits.split(1))
        return torch.cat(
            [
                apply(self, row, *args, router_logits=logits, **kwargs)
                for row, logits in pairs
            ]
        )

    return wrapper
