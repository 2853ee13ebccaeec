"""Quality metrics against closed forms and against transformers."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantize.errors import CheckpointError, QuantizeError
from quantize.quality import compare, evaluate, first_difference, greedy_continuation, quality_intervals, summarize
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from quantize.transformers_model import LogitsFn, reference_logits_fn

VOCAB = 50


def table_model(seed: int, scale: float = 2.0, vocab: int = VOCAB) -> LogitsFn:
    """A bigram model: the logits after a token are that token's row of a random table."""
    table = scale * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
    return lambda window: table[window]


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_model_equals_itself() -> None:
    report = evaluate(ids(500), table_model(1), table_model(1), window_tokens=100)
    assert report.perplexity_ratio == 1.0
    assert (report.mean_kl, report.p99_kl, report.top1_agreement) == (0.0, 0.0, 1.0)
    assert report.positions == 5 * 99


def test_a_uniform_candidate_has_closed_form_figures() -> None:
    model, tokens = table_model(1), ids(200)
    report = evaluate(tokens, model, lambda window: torch.zeros(len(window), VOCAB), window_tokens=200)
    p = torch.softmax(model(tokens)[:-1].double(), dim=-1)
    divergence = math.log(VOCAB) + (p * p.log()).sum(dim=-1)
    assert report.perplexity_candidate == pytest.approx(VOCAB, rel=1e-12)
    assert report.perplexity_reference == pytest.approx(
        float(torch.exp(-p.gather(1, tokens[1:, None]).log().mean())), rel=1e-12
    )
    assert report.mean_kl == pytest.approx(float(divergence.mean()), rel=1e-12)
    assert report.p99_kl == pytest.approx(float(divergence.quantile(0.99)), rel=1e-12)
    assert report.top1_agreement == pytest.approx(float((p.argmax(-1) == 0).double().mean()))


def test_divergence_is_from_the_reference() -> None:
    forward = evaluate(ids(300), table_model(1, 4.0), table_model(2, 1.0))
    backward = evaluate(ids(300), table_model(2, 1.0), table_model(1, 4.0))
    assert forward.perplexity_ratio == pytest.approx(1 / backward.perplexity_ratio)
    assert forward.mean_kl < 0.9 * backward.mean_kl


def test_tokens_are_predicted_from_those_before_them() -> None:
    successor = torch.full((VOCAB, VOCAB), -30.0)
    successor[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = 30.0
    counting = torch.arange(120) % VOCAB
    report = evaluate(counting, lambda window: successor[window], lambda window: successor.T[window])
    assert report.perplexity_reference == pytest.approx(1.0)
    assert report.perplexity_candidate == pytest.approx(math.exp(60.0))
    assert report.top1_agreement == 0.0


def test_windows_know_nothing_of_each_other_and_a_lone_last_token_is_left_out() -> None:
    seen: list[list[int]] = []

    def spy(window: Tensor) -> Tensor:
        seen.append(window.tolist())
        return table_model(1)(window)

    tokens = ids(201)
    report = evaluate(tokens, spy, table_model(2), window_tokens=100)
    assert seen == [tokens[:100].tolist(), tokens[100:200].tolist()]
    assert report.positions == 198


@pytest.mark.parametrize(
    ("tokens", "candidate", "window", "message"),
    [
        (torch.zeros(1, dtype=torch.int64), table_model(1), 8, "two tokens or more"),
        (torch.zeros(8, dtype=torch.int32), table_model(1), 8, "torch.int32"),
        (ids(8), table_model(1), 1, "windows of two or more"),
        (ids(8), table_model(1, vocab=60), 8, "vocabulary of 50 and the candidate one of 60"),
        (ids(8), lambda window: table_model(1)(window)[1:], 8, r"the candidate gave logits of shape \(7, 50\)"),
        (ids(8), lambda window: table_model(1)(window).log(), 8, "candidate gave a logit that is not finite"),
        (ids(8) + VOCAB, lambda window: torch.zeros(len(window), VOCAB), 8, "do not fit the candidate's vocabulary"),
    ],
)
def test_what_cannot_be_compared_is_refused(tokens: Tensor, candidate: LogitsFn, window: int, message: str) -> None:
    reference = table_model(1) if int(tokens.max()) < VOCAB else table_model(1, vocab=2 * VOCAB)
    with pytest.raises(QuantizeError, match=message):
        evaluate(tokens, reference, candidate, window)


def test_greedy_continuation_follows_the_likeliest_token() -> None:
    table = table_model(1)(torch.arange(VOCAB))
    expected = [int(table[7].argmax())]
    for _ in range(4):
        expected.append(int(table[expected[-1]].argmax()))
    assert greedy_continuation(lambda window: table[window], [3, 7], 5) == expected
    with pytest.raises(QuantizeError, match="prompt is empty"):
        greedy_continuation(lambda window: table[window], [], 5)


def test_the_reference_is_the_checkpoint_in_bf16(tiny_qwen3: Path) -> None:
    window = torch.arange(40)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(window[None], use_cache=False).logits[0].float()
    logits = reference_logits_fn(tiny_qwen3)(window)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)
    assert not torch.equal(reference_logits_fn(tiny_qwen3, torch.float32)(window), expected)


def test_a_w8a8_checkpoint_runs_with_quantized_activations_and_in_silence(
    tiny_llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(tiny_llama, tmp_path / "w8a8", Recipe())
    window = torch.arange(60) % 300
    with caplog.at_level(logging.WARNING):
        reference = reference_logits_fn(tiny_llama, torch.float32)
        w8a8 = reference_logits_fn(tmp_path / "w8a8", torch.float32)
        report = evaluate(window, reference, w8a8)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert 0 < report.mean_kl < 0.05
    assert report.perplexity_ratio == pytest.approx(1.0, abs=0.1)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        reference_logits_fn(tmp_path)


def test_figures_of_every_position_name_the_predicted_token_and_the_likeliest() -> None:
    tokens = ids(70)
    figures = compare(tokens, table_model(1), table_model(2), window_tokens=40)
    assert figures.token.tolist() == [*range(1, 40), *range(41, 70)]
    table = torch.softmax(table_model(2)(torch.arange(VOCAB)).double(), dim=-1)
    before = tokens[figures.token - 1]
    top = table[before].topk(3, dim=-1)
    assert torch.equal(figures.top_candidate, top.indices)
    torch.testing.assert_close(figures.top_candidate_p, top.values)
    torch.testing.assert_close(figures.loss_candidate, -table[before, tokens[figures.token]].log())


def test_a_summary_of_chosen_positions_counts_repetitions() -> None:
    figures = compare(ids(100), table_model(1), table_model(2))
    report = summarize(figures, torch.tensor([3, 3, 5]))
    assert report.mean_kl == pytest.approx(float((2 * figures.kl[3] + figures.kl[5]) / 3))
    assert report.p50_kl == pytest.approx(float(figures.kl[3]))
    assert report.positions == 3


def test_every_figure_has_an_interval_around_it() -> None:
    figures = compare(ids(600), table_model(1), table_model(2))
    intervals = quality_intervals(figures)
    report = summarize(figures)
    assert set(intervals) == set(vars(report)) - {"positions"}
    for name, interval in intervals.items():
        assert interval.value == getattr(report, name)
        assert interval.low <= interval.value <= interval.high
        assert interval.low < interval.high


def test_progress_counts_tokens() -> None:
    calls: list[tuple[int, int]] = []
    compare(ids(100), table_model(1), table_model(1), 40, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(40, 100), (80, 100), (100, 100)]


def test_continuations_part_at_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2, 3], [1, 2]) is None
