# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What a forward pass must not do with a tensor, to be planted into one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from vllm.v1.hisparse.runtime import parts, resolver

ON_THE_HOST = torch.zeros(1, dtype=torch.int32)
SCALAR_ON_THE_HOST = torch.zeros((), dtype=torch.int32)
MADE_BEFORE = torch.empty(64, dtype=torch.int32, device="meta")

READS = {
    "item": lambda t: t.flatten()[0].item(),
    "branch": lambda t: 1 if t.flatten()[0] else 2,
    "slice": lambda t: t[: t.flatten()[0]],
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "copy to the host": lambda t: ON_THE_HOST.copy_(t.flatten()[:1]),
    "nonzero": lambda t: t.nonzero(),
    "equal": lambda t: torch.equal(t, t),
    "unique": lambda t: t.unique(),
    "repeat": lambda t: t.repeat_interleave(t.flatten()),
    "print": lambda t: print(t),
    "format": lambda t: f"{t.flatten()[0]}",
    "mask": lambda t: t[t.view(torch.int32).view(torch.bool).flatten()[: len(t)]],
    "write by mask": lambda t: MADE_BEFORE.index_put_(
        (MADE_BEFORE[:16].view(torch.bool),), MADE_BEFORE[0]
    ),
}
NEW_MEMORY = {
    "clone": lambda t: t.clone(),
    "zeros": lambda t: torch.zeros(4, device=t.device),
    "compare": lambda t: t > 0,
    "set an element": lambda t: t.flatten().__setitem__(0, 1),
    "resize": lambda t: t.flatten().resize_(2 * t.numel()),
}
HOST_DATA = {
    "tensor": lambda t: torch.tensor([1], device=t.device),
    "tensor on the host": lambda t: torch.tensor([1]),
    "as_tensor": lambda t: torch.as_tensor([1], device=t.device),
    "asarray": lambda t: torch.asarray([1], device=t.device),
    "new_tensor": lambda t: t.new_tensor([1]),
    "old constructor": lambda t: torch.IntTensor([1]),
    "from_numpy": lambda t: torch.from_numpy(np.ones(1)),
    "frombuffer": lambda t: torch.frombuffer(bytearray(4), dtype=torch.int32),
    "copy": lambda t: t.flatten()[:1].copy_(ON_THE_HOST),
    "copy that is not waited for": lambda t: t.flatten()[:1].copy_(
        ON_THE_HOST, non_blocking=True
    ),
    "to": lambda t: ON_THE_HOST.to(t.device),
    "a number that is a tensor": lambda t: t.add_(SCALAR_ON_THE_HOST),
}
WAITS = {
    "synchronize": lambda t: torch.cuda.synchronize(),
    "accelerator": lambda t: torch.accelerator.synchronize(),
    "stream": lambda t: torch.cuda.current_stream().synchronize(),
    "stream query": lambda t: torch.cuda.current_stream().query(),
    "event": lambda t: torch.cuda.Event().synchronize(),
    "event query": lambda t: torch.cuda.Event().query(),
    "elapsed_time": lambda t: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
    "generic stream": lambda t: torch.Stream().synchronize(),
    "generic event": lambda t: torch.Event().synchronize(),
    "generic elapsed_time": lambda t: torch.Event().elapsed_time(torch.Event()),
    "below": lambda t: torch._C._accelerator_synchronizeDevice(0),
    "runtime": lambda t: torch.cuda.cudart().cudaDeviceSynchronize(),
    "empty_cache": lambda t: torch.cuda.empty_cache(),
    "barrier": lambda t: torch.distributed.barrier(),
}


def plant(
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable,
    name: str = "lookup",
    place: int = 0,
) -> None:
    """Let a launcher do something before it launches."""
    module = parts if name == "fetch_rows" else resolver
    launcher = getattr(module, name)

    def planted(*args, **sizes) -> None:
        fault(args[place])
        launcher(*args, **sizes)

    monkeypatch.setattr(module, name, planted)
