"""Weights that make up for what rounding their inputs loses.

A Linear of weights W reads rounded inputs x' in place of x. `W + W C`, C = `(sum (x - x') x'^T) (sum x' x'^T)^-1`, is
closest, in squared error over the tokens, to what W makes of the exact inputs; the idea is that of Li et al., "GPTAQ:
Efficient Finetuning-Free Quantization for Asymmetric Calibration" (2025), with least squares in place of their update
column by column. What rounding loses is mostly noise, which no weights can know: there C has only learnt the noise of
its own tokens, and does harm on others. But some tokens come again and again, the first of a text above all, whose keys
and values are read by all others. So a part of the windows judges, per Linear, how much of `W C` is worth having.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

JUDGES_SHARE = 8
"""One window in so many judges."""
LEAST_JUDGES_TOKENS = 256
"""Fewer would find a use in their own noise."""
LEAST_SHARE = 0.1
"""Below it a share is noise of the judges' own tokens."""


def judging_windows(windows: int, window_tokens: int) -> Tensor:
    """Which calibration windows judge, rather than be learnt from, BOOL `[windows]`; none where they are too few."""
    judging = torch.arange(windows) % JUDGES_SHARE == JUDGES_SHARE - 1
    return judging if int(judging.sum()) * window_tokens >= LEAST_JUDGES_TOKENS else torch.zeros_like(judging)


@dataclass
class Judges:
    """Tokens of one site: inputs FP32 `[tokens, k]`, the same rounded, weights FP32 `[tokens]`; added part by part."""

    parts: list[tuple[Tensor, Tensor, Tensor]]

    def add(self, inputs: Tensor, rounded: Tensor, token_weights: Tensor) -> None:
        """Keep some tokens."""
        self.parts.append((inputs, rounded, token_weights))

    def share_of(self, weight: Tensor, change: Tensor) -> float:
        """How much of `change` is worth adding to `weight` (both FP32 `[out, k]`): 0 to 1.

        The share s that minimises `sum w || W (x - x') - s D x' ||^2` over the judges' tokens, D the change.
        """
        agreement = energy = 0.0
        for inputs, rounded, token_weights in self.parts:
            made = rounded @ change.T
            missing = (inputs - rounded) @ weight.T
            agreement += float((made * missing).sum(dim=1) @ token_weights)
            energy += float(made.square().sum(dim=1) @ token_weights)
        share = agreement / energy if energy > 0 else 0.0
        return min(1.0, share) if share >= LEAST_SHARE else 0.0


def compensated(weight: Tensor, compensation: Tensor, judges: Judges) -> tuple[Tensor, float]:
    """Weights FP32 `[out, k]` with as much of `weight @ compensation` as the judges find useful, and that share."""
    change = weight @ compensation
    share = judges.share_of(weight, change)
    return (torch.add(weight, change, alpha=share) if share else weight), share
