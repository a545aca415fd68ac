# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Tests inside the patched vLLM, without an engine."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="needs the patched vLLM")

from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.envs import disable_envs_cache  # noqa: E402

from launch_recorder import LaunchRecorder  # noqa: E402

if TYPE_CHECKING:
    from bare_server import Server
    from decoding import Decoding


@pytest.fixture(scope="package", autouse=True)
def as_in_a_new_process() -> None:
    """Undo what the engines of other tests in this process have set up."""
    disable_envs_cache()
    cleanup_dist_env_and_memory()


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Callable[..., Decoding]]":
    """Makes ranks on a device without values, on which launches do not run."""
    from decoding import Decoding

    with LaunchRecorder(run=False):
        yield partial(Decoding, monkeypatch)


@pytest.fixture(scope="session")
def dsa_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a configuration with sparse attention."""
    from hisparse_configs import write_model

    return write_model(tmp_path_factory.mktemp("dsa-model"))


@pytest.fixture
def server(dsa_model: str) -> "Iterator[Server]":
    """A scheduler with HiSparse, without a model."""
    from bare_server import Server

    server = Server(dsa_model)
    yield server
    server.scheduler.shutdown()
