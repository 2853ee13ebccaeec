"""What quantization cost: a candidate's next-token distributions against the BF16 source's, on English prose.

Both models are functions from a window of token ids to logits, so that anything that computes can be compared: the
transformers reference, an executor, another checkpoint. Sums are FP64. This module knows nothing of executors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantize.checkpoint import CheckpointReader
from quantize.errors import CheckpointError, QuantizeError
from quantize.quiet import quiet_transformers

DEFAULT_WINDOW_TOKENS = 512
ROWS_AT_A_TIME = 32
"""Positions compared at a time: an FP64 copy of a whole window's logits would be 0.6 GB for a vocabulary of 150,000."""

LogitsFn = Callable[[Tensor], Tensor]
"""Maps ids INT64 `[tokens]` of one window to logits FP32 `[tokens, vocab]`, each row seeing the ids up to its own."""


@dataclass(frozen=True)
class QualityReport:
    """A candidate against a reference over `positions` predicted tokens.

    Perplexities are `exp(mean negative log-likelihood)` of the text's own next tokens; the ratio is candidate over
    reference. KL is `sum p_ref * log(p_ref / p_cand)` in nats, its mean and 99th percentile over positions.
    `top1_agreement` is the share of positions with the same likeliest token.
    """

    perplexity_reference: float
    perplexity_candidate: float
    perplexity_ratio: float
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    positions: int


def evaluate(
    tokens: Tensor, reference: LogitsFn, candidate: LogitsFn, window_tokens: int = DEFAULT_WINDOW_TOKENS
) -> QualityReport:
    """Compare `candidate` with `reference` on ids INT64 `[tokens]`, cut into windows that know nothing of each other.

    One window's logits of both models are in memory at a time; a window of n tokens counts n - 1 positions, and a last
    window of one token none. Raises QuantizeError for fewer than two tokens, windows of fewer than two, and for logits
    that are not finite, have another shape than the window asks for, or differ in their vocabularies.
    """
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or len(tokens) < 2 or window_tokens < 2:
        raise QuantizeError(
            f"found {tokens.dtype} ids of shape {tuple(tokens.shape)} and windows of {window_tokens}; expected INT64 "
            "[tokens] with two tokens or more, and windows of two or more, to predict one token from another"
        )
    loss_reference = loss_candidate = 0.0
    divergences: list[Tensor] = []
    agreeing = 0
    for start in range(0, len(tokens), window_tokens):
        window = tokens[start : start + window_tokens]
        if len(window) < 2:
            continue
        p_logits, q_logits = _logits("reference", reference, window), _logits("candidate", candidate, window)
        if p_logits.shape != q_logits.shape:
            raise QuantizeError(
                f"the reference has a vocabulary of {p_logits.shape[1]} and the candidate one of {q_logits.shape[1]}; "
                "only models of one tokenizer can be compared"
            )
        for row in range(0, len(window) - 1, ROWS_AT_A_TIME):
            targets = window[1:][row : row + ROWS_AT_A_TIME, None]
            rows = slice(row, row + len(targets))
            agreeing += int((p_logits[rows].argmax(dim=-1) == q_logits[rows].argmax(dim=-1)).sum())
            p = torch.log_softmax(p_logits[rows].to(torch.float64), dim=-1)
            q = torch.log_softmax(q_logits[rows].to(torch.float64), dim=-1)
            loss_reference -= float(p.gather(1, targets).sum())
            loss_candidate -= float(q.gather(1, targets).sum())
            divergences.append((p.exp() * (p - q)).sum(dim=-1))
    divergence = torch.cat(divergences)
    positions = len(divergence)
    return QualityReport(
        perplexity_reference=_perplexity(loss_reference / positions),
        perplexity_candidate=_perplexity(loss_candidate / positions),
        perplexity_ratio=_perplexity((loss_candidate - loss_reference) / positions),
        mean_kl=float(divergence.mean()),
        p99_kl=float(divergence.quantile(0.99)),
        top1_agreement=agreeing / positions,
        positions=positions,
    )


def _logits(role: str, model: LogitsFn, window: Tensor) -> Tensor:
    """The model's logits of a window, refused by name when they cannot be compared."""
    logits = model(window)
    if logits.dim() != 2 or len(logits) != len(window):
        raise QuantizeError(
            f"the {role} gave logits of shape {tuple(logits.shape)}, expected [{len(window)}, vocabulary]"
        )
    if int(window.min()) < 0 or int(window.max()) >= logits.shape[1]:
        raise QuantizeError(
            f"ids {int(window.min())} to {int(window.max())} do not fit the {role}'s vocabulary of {logits.shape[1]}"
        )
    finite = torch.isfinite(logits).all(dim=1)
    if not bool(finite.all()):
        raise QuantizeError(f"the {role} gave a logit that is not finite at position {int((~finite).nonzero()[0])}")
    return logits


def _perplexity(mean_loss: float) -> float:
    """`exp`, infinite where it leaves the range of FP64."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


def reference_logits_fn(directory: Path, dtype: torch.dtype = torch.bfloat16) -> LogitsFn:
    """Logits of the checkpoint in `directory` (a source, or W8A8) as transformers computes them in `dtype`.

    A W8A8 checkpoint runs through compressed-tensors, with activations quantized (and dequantized) per token in
    `dtype`. Raises CheckpointError for a directory that holds no usable checkpoint.
    """
    CheckpointReader(directory).close()
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True).eval()
            with (
                torch.inference_mode()
            ):  # compressed-tensors unpacks the weights at the first call, with a bar of its own
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{directory}: transformers cannot load it: {str(error)[:200]}") from error

    def logits(window: Tensor) -> Tensor:
        with torch.inference_mode():
            output: Tensor = model(input_ids=window.unsqueeze(0), use_cache=False).logits[0]
        return output.to(torch.float32)

    return logits


def greedy_continuation(model: LogitsFn, prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """The `tokens` ids that the model continues `prompt_ids` with, always taking the likeliest (lowest id on ties).

    Runs the whole sequence anew for every token, so that any logits function will do; ends of text are ids like others.
    """
    ids = list(prompt_ids)
    if not ids:
        raise QuantizeError("the prompt is empty; at least one token is needed to continue from")
    for _ in range(tokens):
        ids.append(int(model(torch.tensor(ids, dtype=torch.int64))[-1].argmax()))
    return ids[len(prompt_ids) :]
