"""Picking the next token of one sequence from its row of logits.

Every sequence has a sampler with a random stream of its own, so what it draws depends on its seed and on how many
tokens it has drawn, never on its batch mates. Rows hold real vocabulary only (executors drop padded rows), so a
padded id cannot be picked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.sampling_params import SamplingParams


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probability of the picked token, and of the most likely ones as (id, logprob), best first.

    They are of the model's own distribution: before temperature, top-k and top-p.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Sampled:
    """One picked token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        """Start the random stream at `params.seed`, or at a seed from the operating system."""
        self._params = params
        self._random = random.Random(params.seed) if params.seed is not None else random.Random()

    def sample(self, logits: Tensor) -> Sampled:
        """Pick a token from `logits` FP32 `[real_vocab]`; ties of the greatest logit go to the lowest id."""
        token_id = int(logits.argmax()) if self._params.greedy else self._draw(logits)
        if self._params.logprobs is None:
            return Sampled(token_id)
        logprobs = torch.log_softmax(logits.to(torch.float64), dim=-1)
        values, ids = logprobs.topk(min(self._params.logprobs, logits.numel()))
        top = tuple(zip((int(i) for i in ids), (float(v) for v in values), strict=True))
        return Sampled(token_id, TokenLogprobs(float(logprobs[token_id]), top))

    def _draw(self, logits: Tensor) -> int:
        """Temperature, then top-k, then top-p (Holtzman et al., 2019), then one draw by the inverse distribution."""
        params = self._params
        # The greatest logit becomes 0 first, so that the smallest temperature gives -inf and never inf - inf.
        scaled = (logits.to(torch.float64) - float(logits.max())) / params.temperature
        values, ids = torch.sort(scaled, descending=True, stable=True)
        if params.top_k:
            values, ids = values[: params.top_k], ids[: params.top_k]
        cumulative = torch.softmax(values, dim=-1).cumsum(dim=-1)
        # The nucleus is the shortest prefix that reaches top_p, so at least one token.
        nucleus = min(int((cumulative < params.top_p).sum()) + 1, cumulative.numel())
        cumulative = cumulative[:nucleus]
        target = self._random.random() * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, target, right=True))
        return int(ids[min(index, nucleus - 1)])
