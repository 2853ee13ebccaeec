"""A checkpoint as transformers runs it: logits of a window, and the decoder layers for whoever wants to look inside.

Serves BF16 sources and W8A8 checkpoints alike; the latter run through compressed-tensors, which quantizes (and
dequantizes) the activations of every INT8 Linear per token, in the dtype that the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError
from quantize.quiet import quiet_transformers

LogitsFn = Callable[[Tensor], Tensor]
"""Maps ids INT64 `[tokens]` of one window to logits FP32 `[tokens, vocab]`, each row seeing the ids up to its own."""


class TransformersModel:
    """The checkpoint in `directory`, loaded whole, computing in `dtype` without gradients.

    Raises CheckpointError for a directory that holds no usable checkpoint.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        CheckpointReader(directory).close()
        from transformers import AutoModelForCausalLM

        self.directory = directory
        with quiet_transformers():
            try:
                self.module: Any = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=dtype, local_files_only=True
                ).eval()
                # compressed-tensors unpacks the weights at the first call, with a bar of its own.
                self.logits(torch.zeros(1, dtype=torch.int64))
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                raise CheckpointError(f"{directory}: transformers cannot load it: {str(error)[:200]}") from error

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers, first to last."""
        return list(self.module.model.layers)

    @property
    def embedding(self) -> Tensor:
        """The embedding's weight `[vocab, hidden]` in the model's dtype."""
        weight: Tensor = self.module.get_input_embeddings().weight.detach()
        return weight

    def logits(self, window: Tensor) -> Tensor:
        """Logits FP32 `[tokens, vocab]` of ids INT64 `[tokens]`."""
        with torch.inference_mode():
            output: Tensor = self.module(input_ids=window.unsqueeze(0), use_cache=False).logits[0]
        return output.to(torch.float32)


def reference_logits_fn(directory: Path, dtype: torch.dtype = torch.bfloat16) -> LogitsFn:
    """Logits of the checkpoint in `directory` (a source, or W8A8) as transformers computes them in `dtype`.

    Raises CheckpointError for a directory that holds no usable checkpoint.
    """
    return TransformersModel(directory, dtype).logits
