# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""The tiny GLM's folder: the same bytes every time, the right tensors, clear errors."""

import hashlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest

import make_tiny_glm as command
from make_tiny_glm import main, make_tiny_glm
from tiny_glm.sizes import TinyGlmSizes

SMALL = {"hidden": 32, "experts": 2, "layers": 3, "dense_width": 32}


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


def _tensors(folder: Path) -> dict[str, dict]:
    with (folder / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    del header["__metadata__"]
    return header


def _layers_with(names: dict[str, dict], part: str) -> set[int]:
    return {int(name.split(".")[2]) for name in names if part in name}


def test_the_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    first = _digests(make_tiny_glm(tmp_path / "a", **SMALL))
    random.seed(1)
    np.random.seed(1)
    assert _digests(make_tiny_glm(tmp_path / "b", **SMALL)) == first


def test_the_default_weights_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """A change here is a change of every recorded output: make it on purpose."""
    digest = _digests(make_tiny_glm(tmp_path))["model.safetensors"]
    assert digest == "7acfb3d2cc98c6c170de36eddedafc0a70dfc5b5de3dbd17b22cca45bf18e8bf"


def test_another_seed_gives_other_weights_and_nothing_else(tmp_path: Path) -> None:
    one = _digests(make_tiny_glm(tmp_path / "1", seed=1, **SMALL))
    two = _digests(make_tiny_glm(tmp_path / "2", seed=2, **SMALL))
    assert {name for name in one if one[name] != two[name]} == {"model.safetensors"}


def test_a_model_already_there_is_overwritten(tmp_path: Path) -> None:
    fresh = _digests(make_tiny_glm(tmp_path / "fresh", seed=2, **SMALL))
    make_tiny_glm(tmp_path / "used", seed=1, **SMALL)
    assert _digests(make_tiny_glm(tmp_path / "used", seed=2, **SMALL)) == fresh


@pytest.mark.parametrize(
    ("freq", "offset", "leaders"),
    [
        (1, 2, {0, 1, 2, 3, 4, 5, 6, 7, 8}),
        (4, 2, {0, 1, 5, 8}),
        (4, 3, {0, 1, 2, 6, 8}),
        (3, 1, {0, 3, 6, 8}),
    ],
)
def test_leaders_and_mtp_layers_have_an_indexer_and_followers_none(
    tmp_path: Path, freq: int, offset: int, leaders: set[int]
) -> None:
    """GLM-5.3's own schedule is (4, 3): leaders 0, 1, 2, 6, 10, ..."""
    settings = SMALL | {"layers": 8}
    make_tiny_glm(
        tmp_path, index_topk_freq=freq, index_skip_topk_offset=offset, **settings
    )
    assert _layers_with(_tensors(tmp_path), ".indexer.") == leaders
    config = json.loads((tmp_path / "config.json").read_text())
    full = {i for i, kind in enumerate(config["indexer_types"]) if kind == "full"}
    assert full == leaders - {8}


@pytest.mark.parametrize("mtp_layers", [0, 1, 2])
def test_mtp_layers_follow_the_decoder_layers(tmp_path: Path, mtp_layers: int) -> None:
    make_tiny_glm(tmp_path, mtp_layers=mtp_layers, **SMALL)
    found = _layers_with(_tensors(tmp_path), ".eh_proj.")
    assert found == set(range(3, 3 + mtp_layers))


def test_dense_layers_have_no_experts(tmp_path: Path) -> None:
    make_tiny_glm(tmp_path, dense_layers=2, mtp_layers=0, **SMALL)
    assert _layers_with(_tensors(tmp_path), ".experts.") == {2}


@pytest.mark.parametrize(("dtype", "name"), [("float32", "F32"), ("bfloat16", "BF16")])
def test_weights_have_the_asked_dtype_but_for_the_router_bias(
    tmp_path: Path, dtype: str, name: str
) -> None:
    make_tiny_glm(tmp_path, dtype=dtype, **SMALL)
    tensors = _tensors(tmp_path)
    biases = {n: t for n, t in tensors.items() if n.endswith("correction_bias")}
    assert {t["dtype"] for t in biases.values()} == {"F32"}
    assert {t["dtype"] for n, t in tensors.items() if n not in biases} == {name}


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("layers", 0, "from 1 to 128"),
        ("mtp_layers", -1, "from 0 to 4"),
        ("hidden", 100, "a multiple of 32"),
        ("index_head_dim", 64, "from 128 to 512"),
        ("index_topk", "many", "from 1 to 1048576"),
        ("seed", 1.5, "from 0 to"),
        ("dtype", "float16", "'float32' and 'bfloat16'"),
        ("dense_layers", 7, "at most layers, which is 6"),
        ("experts_per_token", 9, "at most experts, which is 8"),
    ],
)
def test_a_bad_value_is_refused_with_setting_value_range_and_remedy(
    tmp_path: Path, setting: str, value: object, allowed: str
) -> None:
    out = tmp_path / "model"
    with pytest.raises(ValueError) as caught:
        make_tiny_glm(out, **{setting: value})
    for part in (f"{setting} is {value!r}", allowed, "remedy: "):
        assert part in str(caught.value)
    assert not out.exists()


def test_the_remedy_of_a_bad_size_is_itself_allowed() -> None:
    with pytest.raises(ValueError, match="remedy: use 96") as caught:
        TinyGlmSizes(hidden=100)
    assert "hidden" in str(caught.value)
    assert TinyGlmSizes(hidden=96).hidden == 96


def test_the_command_prints_an_error_and_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "model"), "--layers", "six"]) == 1
    assert capsys.readouterr().err == (
        "error: layers is 'six'; allowed is an integer from 1 to 128\n"
        "remedy: use 1, for instance\n"
    )


def test_the_command_writes_what_the_function_writes(tmp_path: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main([str(tmp_path / "command"), *options]) == 0
    make_tiny_glm(tmp_path / "function", **SMALL)
    assert _digests(tmp_path / "command") == _digests(tmp_path / "function")


def test_a_failed_write_leaves_no_part_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(path: Path, *args: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(command, "write_safetensors", fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        make_tiny_glm(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []
