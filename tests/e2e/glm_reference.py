# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Hybrid HiSparse project
"""transformers' own GlmMoeDsa: the other implementation of the same model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GlmMoeDsaForCausalLM


def load_reference(folder: Path) -> GlmMoeDsaForCausalLM:
    """The model in float32, in evaluation mode, without its MTP layers.

    Raises:
        AssertionError: the checkpoint lacks a tensor of the model, or has one that
            belongs neither to the model nor to an MTP layer.
    """
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    mtp_prefix = f"model.layers.{model.config.num_hidden_layers}."
    strange = [n for n in info["unexpected_keys"] if not n.startswith(mtp_prefix)]
    assert not info["missing_keys"] and not strange, info
    return model.eval()


@torch.no_grad()
def all_logprobs(model: GlmMoeDsaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] after each token of one sequence."""
    return model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)


class FixedSelection:
    """Makes the reference's leaders select given rows instead of scoring them.

    A context manager; the reference's own indexers are back afterwards.
    """

    def __init__(
        self, model: GlmMoeDsaForCausalLM, rows: Mapping[int, torch.Tensor]
    ) -> None:
        """Take the selection.

        Args:
            model: the reference.
            rows: for each leader's layer index, int [tokens, topk]: the rows that each
                token attends to, -1 where there are fewer than topk.
        """
        leaders = {
            i for i, kind in enumerate(model.config.indexer_types) if kind == "full"
        }
        assert leaders == set(rows), (leaders, set(rows))
        self._model, self._rows = model, rows
        self._handles: list[Any] = []

    def __enter__(self) -> "FixedSelection":
        for layer, rows in self._rows.items():
            # Row 0 stands in for -1: a token with free places has all rows already.
            fixed = rows.clamp(min=0).unsqueeze(0).to(torch.int32)
            indexer = self._model.model.layers[layer].self_attn.indexer
            self._handles.append(
                indexer.register_forward_hook(lambda *_, fixed=fixed: fixed)
            )
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
