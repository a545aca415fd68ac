#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Write a tiny GLM (`GlmMoeDsaForCausalLM`) as a Hugging Face model folder.

    python scripts/make_tiny_glm.py OUT_DIR [--layers 6] [--dtype float32] ...

The same options give the same bytes. Nothing is downloaded.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tiny_glm.sizes import TinyGlmSizes, model_config
from tiny_glm.tokenizer import (
    CHAT_TEMPLATE,
    tokenizer_config,
    tokenizer_json,
)
from tiny_glm.weights import model_tensors, write_safetensors

_HELP = {
    "layers": "decoder layers, the MTP layers not counted",
    "mtp_layers": "multi-token-prediction layers",
    "dense_layers": "leading layers with a dense MLP instead of experts",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "q_lora_rank": "width of the query latent",
    "kv_lora_rank": "width of a KV row without its rotary part",
    "qk_nope_head_dim": "width of a head's key without its rotary part",
    "qk_rope_head_dim": "rotary part of a key, and of a KV row",
    "v_head_dim": "width of a head's value",
    "experts": "routed experts per layer",
    "experts_per_token": "routed experts per token",
    "expert_width": "inner width of an expert",
    "dense_width": "inner width of a dense MLP",
    "index_topk": "rows that sparse attention selects per token",
    "index_topk_freq": "IndexShare: one layer in so many owns an indexer",
    "index_skip_topk_offset": "IndexShare: leading layers that own an indexer",
    "index_heads": "heads of an indexer",
    "index_head_dim": "width of an indexer's key",
    "context": "largest context in tokens",
    "dtype": "float32 or bfloat16",
    "seed": "seed of the weights",
}


def make_tiny_glm(out_dir: str | os.PathLike[str], **settings: int | str) -> Path:
    """Write the model folder and return its path.

    Args:
        out_dir: the folder to write; it is created where missing, and a model already
            in it is overwritten.
        **settings: fields of `TinyGlmSizes`.

    Raises:
        ValueError: a setting is out of range; nothing has been written then.
        OSError: the folder cannot be written.
    """
    sizes = TinyGlmSizes(**settings)  # type: ignore[arg-type]
    out = Path(out_dir)
    config = model_config(sizes)
    generation = {
        "do_sample": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    out.mkdir(parents=True, exist_ok=True)
    with _replacing(out / "model.safetensors") as path:
        write_safetensors(path, model_tensors(sizes), sizes.dtype)
    _write(out / "tokenizer.json", _json(tokenizer_json()))
    _write(out / "tokenizer_config.json", _json(tokenizer_config(sizes.context)))
    _write(out / "chat_template.jinja", CHAT_TEMPLATE)
    _write(out / "generation_config.json", _json(generation))
    # Last: a folder with a configuration is complete.
    _write(out / "config.json", _json(config))
    return out


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes `path` only if that succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with _replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _number(text: str) -> int | str:
    """An integer where it is one; `TinyGlmSizes` names the range where it is not."""
    try:
        return int(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make_tiny_glm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out_dir", type=Path, help="folder to write")
    for field in dataclasses.fields(TinyGlmSizes):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=_number if isinstance(field.default, int) else str,
            default=field.default,
            metavar="N" if isinstance(field.default, int) else "NAME",
            help=f"{_HELP[field.name]} (default {field.default})",
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    settings = vars(_parser().parse_args(argv))
    out_dir = settings.pop("out_dir")
    try:
        out = make_tiny_glm(out_dir, **settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"error: {error.filename} cannot be written: {error.strerror}\n"
            "remedy: name a folder that can be written, on a disk with room",
            file=sys.stderr,
        )
        return 1
    size = (out / "model.safetensors").stat().st_size
    print(f"wrote {out} ({size / 1e6:.1f} MB of weights)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
