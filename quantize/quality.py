"""What quantization cost: a candidate's next-token distributions against the BF16 source's, on English prose.

Both models are functions from a window of token ids to logits, so that anything that computes can be compared: the
transformers reference, an executor, another checkpoint. Sums are FP64. This module knows nothing of executors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quantize.confidence import Interval, confidence
from quantize.errors import QuantizeError
from quantize.transformers_model import LogitsFn

DEFAULT_WINDOW_TOKENS = 512
ROWS_AT_A_TIME = 32
"""Positions compared at a time: an FP64 copy of a whole window's logits would be 0.6 GB for a vocabulary of 150,000."""
TOP_TOKENS = 3
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class QualityReport:
    """A candidate against a reference over `positions` predicted tokens.

    Perplexities are `exp(mean negative log-likelihood)` of the text's own next tokens; the ratio is candidate over
    reference. KL is `sum p_ref * log(p_ref / p_cand)` in nats, its mean, median and 99th percentile over positions.
    `top1_agreement` is the share of positions with the same likeliest token.
    """

    perplexity_reference: float
    perplexity_candidate: float
    perplexity_ratio: float
    mean_kl: float
    p50_kl: float
    p99_kl: float
    top1_agreement: float
    positions: int


@dataclass(frozen=True)
class PositionFigures:
    """What was found at every predicted position, in the order of the text; n positions.

    `token` is the index of the predicted token among the ids; losses are its negative log-likelihoods and `kl` the
    divergence, in nats, FP64 `[n]`; `agrees` says whether both models' likeliest tokens are one. The three likeliest
    ids and their probabilities are `[n, 3]` (fewer in a smaller vocabulary).
    """

    token: Tensor
    loss_reference: Tensor
    loss_candidate: Tensor
    kl: Tensor
    agrees: Tensor
    top_reference: Tensor
    top_reference_p: Tensor
    top_candidate: Tensor
    top_candidate_p: Tensor


def evaluate(
    tokens: Tensor, reference: LogitsFn, candidate: LogitsFn, window_tokens: int = DEFAULT_WINDOW_TOKENS
) -> QualityReport:
    """Compare `candidate` with `reference` on ids INT64 `[tokens]`: `summarize` of `compare`."""
    return summarize(compare(tokens, reference, candidate, window_tokens))


def summarize(figures: PositionFigures, index: Tensor | None = None) -> QualityReport:
    """The report over all positions, or over those that `index` INT64 `[m]` names (with repetitions)."""
    chosen = slice(None) if index is None else index
    reference = float(figures.loss_reference[chosen].mean())
    candidate = float(figures.loss_candidate[chosen].mean())
    kl = figures.kl[chosen]
    p50_kl, p99_kl = torch.quantile(kl, torch.tensor([0.5, 0.99], dtype=kl.dtype)).tolist()
    return QualityReport(
        perplexity_reference=_perplexity(reference),
        perplexity_candidate=_perplexity(candidate),
        perplexity_ratio=_perplexity(candidate - reference),
        mean_kl=float(kl.mean()),
        p50_kl=p50_kl,
        p99_kl=p99_kl,
        top1_agreement=float(figures.agrees[chosen].to(torch.float64).mean()),
        positions=len(kl),
    )


def quality_intervals(figures: PositionFigures) -> dict[str, Interval]:
    """Every figure of `summarize` but `positions`, with its 95 % interval (`confidence.confidence` says how)."""

    def statistics(index: Tensor) -> dict[str, float]:
        return {name: value for name, value in asdict(summarize(figures, index)).items() if name != "positions"}

    return confidence(statistics, len(figures.kl))


def compare(
    tokens: Tensor,
    reference: LogitsFn,
    candidate: LogitsFn,
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    progress: Progress | None = None,
) -> PositionFigures:
    """Compare `candidate` with `reference` on ids INT64 `[tokens]`, cut into windows that know nothing of each other.

    One window's logits of both models are in memory at a time; a window of n tokens counts n - 1 positions, and a last
    window of one token none. `progress(done_tokens, total_tokens)` follows each window. Raises QuantizeError for fewer
    than two tokens, windows of fewer than two, and for logits that are not finite, have another shape than the window
    asks for, or differ in their vocabularies.
    """
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or len(tokens) < 2 or window_tokens < 2:
        raise QuantizeError(
            f"found {tokens.dtype} ids of shape {tuple(tokens.shape)} and windows of {window_tokens}; expected INT64 "
            "[tokens] with two tokens or more, and windows of two or more, to predict one token from another"
        )
    columns: list[tuple[Tensor, ...]] = []
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
            p_argmax, q_argmax = p_logits[rows].argmax(dim=-1), q_logits[rows].argmax(dim=-1)
            p = torch.log_softmax(p_logits[rows].to(torch.float64), dim=-1)
            q = torch.log_softmax(q_logits[rows].to(torch.float64), dim=-1)
            p_top, q_top = (x[rows].topk(min(TOP_TOKENS, x.shape[1]), dim=-1).indices for x in (p_logits, q_logits))
            columns.append(
                (
                    torch.arange(len(targets)) + start + row + 1,
                    -p.gather(1, targets)[:, 0],
                    -q.gather(1, targets)[:, 0],
                    (p.exp() * (p - q)).sum(dim=-1),
                    p_argmax == q_argmax,
                    p_top,
                    p.gather(1, p_top).exp(),
                    q_top,
                    q.gather(1, q_top).exp(),
                )
            )
        if progress is not None:
            progress(start + len(window), len(tokens))
    return PositionFigures(*(torch.cat(column) for column in zip(*columns, strict=True)))


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


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two continuations part, or None when they are equal as far as both go."""
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
