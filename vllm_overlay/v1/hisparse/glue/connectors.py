# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Which connectors may be configured, and what becomes of them (D31).

A page of the host pool holds all layers, so the pool serves prefix hits itself. The
CPU tier of an OffloadingConnector would hold the same bytes once more: its memory joins
the host pool instead, and launch scripts with both keep working.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.logger import init_logger

from ..settings import CONNECTOR_NAME, GIB, MOST_GIB, positive_number, refusal

logger = init_logger(__name__)

ABSORBED = "OffloadingConnector"
EXTRA = "kv_connector_extra_config"

MOST_BYTES = MOST_GIB * GIB

_CPU_TIER_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def connectors(
    transfer: KVTransferConfig | None,
) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yield name and extra configuration of every connector."""
    if transfer is None or transfer.kv_connector is None:
        return
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != "MultiConnector":
        yield transfer.kv_connector, extra
        return
    for child in extra.get("connectors", []):
        role = child.get("kv_role", transfer.kv_role)
        if role != transfer.kv_role:
            raise refusal(
                f"kv_role of {child.get('kv_connector')}",
                repr(role),
                f"{transfer.kv_role!r}, that of its MultiConnector",
                f"set it to {transfer.kv_role!r}",
            )
        own = child.get(EXTRA) or {}
        if not isinstance(own, dict):
            raise refusal(
                f"{EXTRA} of {child.get('kv_connector')}",
                repr(own),
                "a JSON object",
                'write {"host_pool_gib": ...}',
            )
        yield child.get("kv_connector"), own


def with_offloading(
    transfer: KVTransferConfig, size_gib: float, backend: str
) -> KVTransferConfig:
    """Connectors with what ``--kv-offloading-size`` asks for beside ours.

    Args:
        transfer: Ours, alone or in a MultiConnector.
        size_gib: Main memory to offload to.
        backend: ``--kv-offloading-backend``; only vLLM's own can join.
    """
    if backend != "native":
        raise refusal(
            "--kv-offloading-backend",
            backend,
            "native, whose memory joins the host pool",
            "remove --kv-offloading-size, and raise host_pool_gib instead",
        )
    extra = {"cpu_bytes_to_use": size_gib * GIB}
    children = [
        {"kv_connector": own, "kv_role": transfer.kv_role, EXTRA: given}
        for own, given in connectors(transfer)
    ]
    children.append({"kv_connector": ABSORBED, "kv_role": "kv_both", EXTRA: extra})
    return replace(
        transfer,
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": children},
    )


def host_pool(
    options: dict[str, Any], transfer: KVTransferConfig | None
) -> tuple[str, Any]:
    """Name and value of the setting that gives the host pool.

    Raises:
        ValueError: the connectors cannot work together, or no pool is given.
    """
    found = list(connectors(transfer))
    ours = [extra for name, extra in found if name == CONNECTOR_NAME]
    others = [str(n) for n, _ in found if n not in (CONNECTOR_NAME, ABSORBED)]
    if len(ours) > 1:
        raise refusal(
            "kv_transfer_config",
            f"given with {len(ours)} {CONNECTOR_NAME} entries",
            "one",
            "keep one, with the sum of the pools as its host_pool_gib",
        )
    for extra in ours:
        if unknown := sorted(set(extra) - {"host_pool_gib"}):
            raise refusal(
                f"{EXTRA} of {CONNECTOR_NAME}",
                f"given with {', '.join(map(repr, unknown))}",
                "host_pool_gib",
                "correct or remove the key; device_buffer_size and transfer_timeout_s "
                "belong into --attention-config '{\"hisparse_config\": {...}}'",
            )
    if others:
        raise refusal(
            "kv_transfer_config",
            f"given with {', '.join(others)} beside HiSparse",
            f"{CONNECTOR_NAME}, and {ABSORBED} with its CPU tier",
            f"remove {', '.join(others)}; the host pool of HiSparse holds whole pages "
            "and serves prefix hits itself",
        )
    if transfer is not None and transfer.kv_role != "kv_both":
        # Blocks of a step in flight are held back for consumers only (R5).
        raise refusal(
            "kv_role", repr(transfer.kv_role), "'kv_both'", "set it to 'kv_both'"
        )
    here = "hisparse_config.host_pool_gib"
    there = f"kv_connector_extra_config.host_pool_gib of {CONNECTOR_NAME}"
    values = {here: options.get("host_pool_gib")}
    if ours:
        values[there] = ours[0].get("host_pool_gib")
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) == 2 and given[here] != given[there]:
        raise refusal(
            here,
            f"{given[here]!r}, and {there} is {given[there]!r}",
            "one value",
            "give it in one place",
        )
    if not given:
        raise refusal(
            there if ours else here,
            "missing",
            "a number of GiB above 0",
            "set it to the main memory that the host pool may take",
        )
    return next(iter(given.items()))


def absorbed_gib(transfer: KVTransferConfig | None) -> float:
    """Main memory of offloading connectors, which joins the host pool, in GiB.

    Raises:
        ValueError: one has other tiers than the CPU's, or no size.
    """
    own = (extra for name, extra in connectors(transfer) if name == ABSORBED)
    return sum(map(_cpu_tier_gib, own))


def _cpu_tier_gib(extra: dict[str, Any]) -> float:
    spec = str(extra.get("spec_name", _CPU_TIER_SPECS[0]))
    tiers = extra.get("secondary_tiers") or []
    if spec not in _CPU_TIER_SPECS or tiers:
        listed = tiers if isinstance(tiers, list) else [tiers]
        names = [str(t.get("type", t) if isinstance(t, dict) else t) for t in listed]
        names = names or [spec]
        raise refusal(
            f"{ABSORBED} beside HiSparse",
            f"given with {', '.join(names)}",
            "its CPU tier only",
            "remove the other tiers: they take pages of the device, and HiSparse has "
            "whole pages on the host only",
        )
    size = positive_number(
        f"cpu_bytes_to_use of {ABSORBED}",
        extra.get("cpu_bytes_to_use"),
        "bytes",
        "set it to the main memory that joins the host pool",
        MOST_BYTES,
    )
    return size / GIB


def keep_ours(
    transfer: KVTransferConfig | None, pool_gib: float, extra_gib: float
) -> KVTransferConfig:
    """The connectors that are left: ours, alone or in its MultiConnector.

    Args:
        transfer: What the user gave.
        pool_gib: The host pool that was asked for.
        extra_gib: What joins it.
    """
    if extra_gib:
        logger.info(
            "HiSparse: the %.2f GiB of %s join the host pool of %.2f GiB, %.2f GiB in "
            "all: a host page holds all layers, and serves prefix hits itself",
            extra_gib,
            ABSORBED,
            pool_gib,
            pool_gib + extra_gib,
        )
    elif transfer is not None and transfer.kv_connector is not None:
        return transfer
    return replace(
        transfer or KVTransferConfig(),
        kv_connector=CONNECTOR_NAME,
        kv_role="kv_both",
        kv_connector_extra_config={},
    )
