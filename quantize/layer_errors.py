"""Where quantization hurts: the error of every decoder layer, alone and as it has grown on the way.

Reference and candidate run side by side in transformers. A candidate whose residual stream was turned by an orthogonal
matrix (rotations folded into the weights) is turned back before anything is compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantize.errors import QuantizeError
from quantize.transformers_model import TransformersModel

SAME_BASIS = 1e-2
"""Relative difference of two embeddings, aligned, up to which their residual streams are taken for the same."""


@dataclass(frozen=True)
class LayerError:
    """Signal to noise of one decoder layer's output, in dB; None where there is no error at all.

    `own_sqnr_db`: both layers get the reference's input; noise is relative to what the layer adds to the residual
    stream, so that a large stream does not hide a bad layer. `carried_sqnr_db`: each model gets what it has computed so
    far; noise is relative to the whole residual stream, as the next layer sees it.
    """

    layer: int
    own_sqnr_db: float | None
    carried_sqnr_db: float | None


def layer_errors(
    reference: TransformersModel, candidate: TransformersModel, windows: Sequence[Tensor]
) -> list[LayerError]:
    """Errors of every layer over `windows`, each ids INT64 `[tokens]`.

    The ratio of noise to signal energy is taken per token and then averaged: a few tokens (the first one above all)
    have a residual stream hundreds of times as large as the others', and would decide an average over energies alone.
    Raises QuantizeError when the models differ in depth or width, or their residual streams in more than a rotation.
    """
    if len(reference.layers) != len(candidate.layers) or reference.embedding.shape != candidate.embedding.shape:
        raise QuantizeError(
            f"found {len(candidate.layers)} layers and an embedding of {list(candidate.embedding.shape)}, expected "
            f"{len(reference.layers)} and {list(reference.embedding.shape)} as in the reference: layers of different "
            "models cannot be compared"
        )
    turn = residual_rotation(reference.embedding, candidate.embedding)
    own: list[list[Tensor]] = [[] for _ in reference.layers]
    carried: list[list[Tensor]] = [[] for _ in reference.layers]
    outputs: list[Tensor] = []

    def watch_reference(layer: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        arrived = args[0] if args else kwargs["hidden_states"]
        left = _hidden(output)
        turned = arrived if turn is None else (arrived.float() @ turn).to(arrived.dtype)
        if args:
            args = (turned, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": turned}
        # Not called as a module: its own hooks are for its own run.
        found = _back(_hidden(candidate.layers[layer].forward(*args, **kwargs)), turn)
        own[layer].append(_noise_ratio(found - left.float(), left.float() - arrived.float()))
        outputs.append(left)

    def watch_candidate(layer: int, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        expected = outputs[layer].float()
        carried[layer].append(_noise_ratio(_back(_hidden(output), turn) - expected, expected))

    for window in windows:
        outputs.clear()
        for model, watch in ((reference, watch_reference), (candidate, watch_candidate)):
            hooks = [
                # A default argument binds the layer's number at once; the hook is called much later.
                module.register_forward_hook(
                    lambda *call, layer=layer, watch=watch: watch(layer, *call), with_kwargs=True
                )
                for layer, module in enumerate(model.layers)
            ]
            try:
                model.logits(window)
            finally:
                for hook in hooks:
                    hook.remove()
    return [
        LayerError(layer, _decibels(own[layer]), _decibels(carried[layer])) for layer in range(len(reference.layers))
    ]


def residual_rotation(reference: Tensor, candidate: Tensor) -> Tensor | None:
    """The orthogonal FP32 `[hidden, hidden]` with `reference @ rotation = candidate`, of two embeddings.

    Embeddings are `[vocab, hidden]`; None when they are equal as they stand. The least-squares rotation is the
    orthogonal Procrustes solution (Schönemann, "A generalized solution of the orthogonal Procrustes problem",
    Psychometrika 31, 1966). Raises QuantizeError when no rotation brings them together.
    """
    left, right = reference.to(torch.float32), candidate.to(torch.float32)
    scale = float(left.norm())
    if float((left - right).norm()) <= SAME_BASIS * scale:
        return None
    outer, _, inner = torch.linalg.svd(left.T @ right)
    rotation: Tensor = outer @ inner
    distance = float((left @ rotation - right).norm()) / scale
    if distance > SAME_BASIS:
        raise QuantizeError(
            f"the candidate's embedding differs from the reference's by {distance:.1%} after the best rotation, "
            f"expected at most {SAME_BASIS:.0%}: their residual streams cannot be compared layer by layer"
        )
    return rotation


def _hidden(output: Any) -> Tensor:
    """The hidden states of a decoder layer's output, which some versions of transformers put into a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _back(hidden: Tensor, turn: Tensor | None) -> Tensor:
    return hidden.float() if turn is None else hidden.float() @ turn.T


def _noise_ratio(noise: Tensor, signal: Tensor) -> Tensor:
    """Noise energy over signal energy of every token, FP64 `[tokens]`; tokens without signal are left out."""
    noise_energy = noise.reshape(-1, noise.shape[-1]).double().square().sum(dim=-1)
    signal_energy = signal.reshape(-1, signal.shape[-1]).double().square().sum(dim=-1)
    usable = signal_energy > 0
    return noise_energy[usable] / signal_energy[usable]


def _decibels(ratios: Sequence[Tensor]) -> float | None:
    values = torch.cat(list(ratios))
    mean = float(values.mean()) if len(values) else 0.0
    return -10 * math.log10(mean) if mean > 0 else None
