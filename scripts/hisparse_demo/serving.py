# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""How the demo's servers are started: model sizes, KV budget, command, environment."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from hisparse_tools.demo_settings import CONVERSATIONS, HOST, DemoSettings
from hisparse_tools.pins import Device
from tiny_glm.sizes import TinyGlmSizes

MODEL_NAME = "tiny-glm"
# The budget holds so much of what all conversations together come to: too little
# without HiSparse, and with it enough for hot buffers and for all indexers.
BUDGET_SHARE = 0.55
# Of the model's contexts on a GPU, so that these servers start as usual.
_LEAST_CUDA_CONTEXT = 4096
# The kernels for GPUs are made for the head counts and the top-k of the real models.
_CUDA_SIZES: dict[str, Any] = {
    "hidden": 512,
    "q_lora_rank": 512,
    "heads": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_heads": 32,
    "index_topk": 2048,
}


def block_size(device: Device) -> int:
    """Return the tokens of a page: on the CPU few, as its conversations are short."""
    return 64 if device is Device.CUDA else 16


def model_sizes(settings: DemoSettings) -> TinyGlmSizes:
    """Return the sizes of the model to serve, its context a whole number of pages."""
    context = 64 * math.ceil(settings.context() / 64)
    if settings.device is Device.CUDA:
        context = max(_LEAST_CUDA_CONTEXT, context)
        return TinyGlmSizes(context=context, **_CUDA_SIZES)
    return TinyGlmSizes(context=context)


def token_bytes(sizes: TinyGlmSizes) -> int:
    """Return the bytes of a token in all latents and indexers that are served.

    The drafter's layers are not: no speculation is configured.
    """
    latents = 2 * (sizes.kv_lora_rank + sizes.qk_rope_head_dim) * sizes.layers
    leaders = sum(sizes.is_leader(layer) for layer in range(sizes.layers))
    return latents + (sizes.index_head_dim + 4) * leaders


def budget_pages(settings: DemoSettings) -> int:
    """Return the pages that the device's KV cache may hold.

    On a GPU, where HiSparse is not compared, all conversations fit.
    """
    size = block_size(settings.device)
    # vLLM keeps one block for itself.
    one = math.ceil(model_sizes(settings).context / size) + 1
    if settings.device is Device.CUDA:
        return CONVERSATIONS * one
    whole = CONVERSATIONS * math.ceil(settings.context() / size)
    return max(one, math.ceil(BUDGET_SHARE * whole))


def budget_bytes(settings: DemoSettings) -> int:
    """Return the bytes that the device's KV cache may take, hot buffers included."""
    tokens = budget_pages(settings) * block_size(settings.device)
    return tokens * token_bytes(model_sizes(settings))


def host_pool_gib(settings: DemoSettings) -> float:
    """Return a host pool for all conversations and a little more."""
    sizes = model_sizes(settings)
    wanted = 1.25 * CONVERSATIONS * sizes.context * token_bytes(sizes)
    return math.ceil(100 * wanted / 2**30) / 100


def serve_command(
    settings: DemoSettings, model: Path, port: int, hisparse: bool
) -> list[str]:
    """Return ``vllm serve`` of this interpreter's environment, with its arguments."""
    # Through the interpreter: the first line of a script has a length limit.
    command = [sys.executable, str(Path(sys.executable).with_name("vllm")), "serve"]
    options: dict[str, object] = {
        "host": HOST,
        "port": port,
        "served-model-name": MODEL_NAME,
        "max-model-len": model_sizes(settings).context,
        "max-num-seqs": CONVERSATIONS,
        "block-size": block_size(settings.device),
        "kv-cache-memory-bytes": budget_bytes(settings),
    }
    if settings.device is Device.CPU:
        # What is in flight at once counts against the budget.
        options["max-num-batched-tokens"] = 128
    if hisparse:
        connector = {
            "kv_connector": "HiSparseConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"host_pool_gib": host_pool_gib(settings)},
        }
        options["kv-transfer-config"] = json.dumps(connector)
    command += [str(model), *(f"--{k}={v}" for k, v in options.items())]
    # Answers say how many tokens were cached, the log how many each step computed.
    command += ["--enable-prompt-tokens-details", "--enable-logging-iteration-details"]
    if settings.device is Device.CPU:
        # Nothing to gain from compiling, and no compiler is needed this way.
        command.append("--enforce-eager")
    return command


def server_env(folder: Path, device: Device) -> dict[str, str]:
    """Return the server's environment: this process's, less what would disturb."""
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "VLLM_LOGGING_LEVEL": "INFO"}
    for name in ("VLLM_API_KEY", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
        env.pop(name, None)
    # It imports nothing of this checkout, and three processes would otherwise compile
    # the same thousands of files at every start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if device is Device.CPU:
        # Sums in one order whatever else is in the batch: outputs can be compared.
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env
