# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""A byte-level tokenizer: the id of a byte is its value, specials come after.

Without merges, every text is its UTF-8 bytes, so any text survives a round trip and a
prompt of n bytes has n tokens.
"""

_NAMED_SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
BYTE_COUNT = 256
VOCAB_SIZE = 320
# The vocabulary is padded with named tokens, not with holes: sampling may pick any id,
# and every id has to decode.
_SPECIALS = _NAMED_SPECIALS + tuple(
    f"<|unused_{i}|>" for i in range(VOCAB_SIZE - BYTE_COUNT - len(_NAMED_SPECIALS))
)
SPECIAL_IDS = {name: BYTE_COUNT + i for i, name in enumerate(_SPECIALS)}
END_OF_TEXT = "<|endoftext|>"

# GLM's shape: a fixed head, a role token and a line break before each message. What a
# turn was generated from is a prefix of what the next turn sends.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' + message['content'] }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""


def printable_ids() -> list[int]:
    """Ids of the bytes that print as one ASCII character, the space included."""
    return list(range(0x20, 0x7F))


def _byte_symbols() -> list[str]:
    """One printable character per byte, as byte-level BPE has them since GPT-2."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in kept}
    others = [byte for byte in range(BYTE_COUNT) if byte not in symbols]
    symbols |= {byte: chr(BYTE_COUNT + i) for i, byte in enumerate(others)}
    return [symbols[byte] for byte in range(BYTE_COUNT)]


def tokenizer_json() -> dict[str, object]:
    """The content of tokenizer.json, in the format of the `tokenizers` library."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": id_, "content": name, **flags, "special": True}
        for name, id_ in SPECIAL_IDS.items()
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbol: byte for byte, symbol in enumerate(_byte_symbols())},
            "merges": [],
        },
    }


def tokenizer_config(context: int) -> dict[str, object]:
    """The content of tokenizer_config.json for a context of `context` tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
