# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""Write stand-ins for the models that upstream's tests name.

Each is an entry of a Hugging Face cache with a configuration (models.json) and a tiny
tokenizer, and no weights, so that nothing is downloaded.

    python stand_ins.py HF_HOME
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

REVISION = "0" * 39 + "1"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
QWEN_VL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def _tokenizer(folder: Path, extra: Sequence[str] = (), **settings: Any) -> Tokenizer:
    """Write a byte-level tokenizer without merges, and return it."""
    words = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    if extra:
        tokenizer.add_special_tokens(list(extra))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{key}_token": token for key, token in names.items()},
            "model_max_length": 2048,
            **settings,
        },
    )
    return tokenizer


def _llava(folder: Path, config: dict[str, Any]) -> None:
    tokenizer = _tokenizer(
        folder,
        ["<image>"],
        image_token="<image>",
        extra_special_tokens={"image_token": "<image>"},
        processor_class="LlavaProcessor",
    )
    config["image_token_index"] = tokenizer.token_to_id("<image>")
    flags = ("center_crop", "convert_rgb", "normalize", "rescale", "resize")
    _write(
        folder / "preprocessor_config.json",
        {
            "crop_size": {"height": 336, "width": 336},
            **{f"do_{flag}": True for flag in flags},
            "image_mean": MEAN,
            "image_std": STD,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": 336},
        },
    )
    _write(
        folder / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    )


def _qwen_vl(folder: Path) -> None:
    _tokenizer(folder, QWEN_VL)
    _write(
        folder / "preprocessor_config.json",
        {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": MEAN,
            "image_std": STD,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
    )


def main(home: Path) -> None:
    """Write every model of models.json into a Hugging Face home folder."""
    table = json.loads(Path(__file__).with_name("models.json").read_text())
    for name, config in table.items():
        root = home / "hub" / f"models--{name.replace('/', '--')}"
        folder = root / "snapshots" / REVISION
        folder.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(REVISION)
        config["transformers_version"] = "4.45.0"
        if "llava" in name:
            _llava(folder, config)
        elif "-VL-" in name or "Qwen3.5" in name:
            _qwen_vl(folder)
        else:
            _tokenizer(folder)
        _write(folder / "config.json", config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
