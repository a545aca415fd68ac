# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""What tests ask of the ranks of a tensor-parallel engine; imported by its workers."""

from typing import Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

# gloo sleeps where the communicator over shared memory spins: a rank that spins takes
# the core from the one it waits for wherever cores are few. Both add the same numbers.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class RankHooks:
    """Methods that `worker_extension_cls` adds to each rank's worker."""

    model_runner: Any

    @property
    def _hisparse(self) -> Any:
        return self.model_runner.kv_connector.kv_connector.worker

    def hisparse_delay(self, steps_by_rank: tuple[int, ...]) -> None:
        """Let each rank's copies complete late by its own number of steps."""
        copier = self._hisparse.copier
        for queue in (copier.to_host, copier.to_device):
            queue.delay_steps = steps_by_rank[self._hisparse.rank]

    def hisparse_leave_out(self, is_on: bool) -> None:
        """Let each rank end a part of its due copies in a step, each another part."""
        copier, rank = self._hisparse.copier, self._hisparse.rank
        for queue in (copier.to_host, copier.to_device):

            def leaves_out(transfer_id: int, queue: Any = queue) -> bool:
                return is_on and (transfer_id + rank + queue._step) % 3 == 0

            queue.never = leaves_out

    def hisparse_misses(self) -> int:
        """Rows that this rank fetched from the host pool so far."""
        return int(self._hisparse.buffers.counters[..., 1].sum())

    def hisparse_host_file(self) -> tuple[str, str]:
        """Device and inode of the file that this rank's host pool lies in."""
        address = self._hisparse.host.buffer.data_ptr()
        with open("/proc/self/maps") as maps:
            for line in maps:
                area, _, _, device, inode, *_ = line.split()
                start, end = (int(place, 16) for place in area.split("-"))
                if start <= address < end:
                    return device, inode
        raise AssertionError("the host pool is not mapped")

    def hisparse_written_layers(self) -> list[str]:
        """Layers whose pages this rank writes back."""
        return sorted(self._hisparse.host.own_layers)
