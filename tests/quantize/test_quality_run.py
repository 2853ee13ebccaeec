"""A whole comparison on tiny models: findings, their JSON, and the report made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quantize.errors import CheckpointError, QuantizeError
from quantize.quality import evaluate
from quantize.quality_findings import continuation
from quantize.quality_report import write_quality_report
from quantize.quality_run import Candidate, QualityOptions, load_tokenizer, measure, text_tokens
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from quantize.texts import evaluation_text
from quantize.transformers_model import LogitsFn, reference_logits_fn
from tests.tiny_models import byte_tokenizer, make_tiny_llama

OPTIONS = QualityOptions(evaluation_text(), "the evaluation text", max_tokens=300, window_tokens=100)
PNG_START = b"\x89PNG"


@pytest.fixture(scope="module")
def w8a8(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quality") / "w8a8"
    quantize_checkpoint(tiny_llama, out, Recipe())
    return out


def test_two_candidates_are_measured_on_the_same_positions(tiny_llama: Path, w8a8: Path) -> None:
    steps: list[tuple[int, int]] = []
    findings = measure(
        tiny_llama,
        [Candidate("first", w8a8), Candidate("second", w8a8)],
        OPTIONS,
        progress=lambda done, total: steps.append((done, total)),
    )
    first, second = findings.candidates
    assert first.figures == second.figures
    assert (findings.tokens, findings.positions) == (300, 297)
    assert steps == [(count, 600) for count in (100, 200, 300, 400, 500, 600)]
    tokens = text_tokens(load_tokenizer(tiny_llama), evaluation_text(), 300)
    report = evaluate(
        tokens, reference_logits_fn(tiny_llama, torch.float32), reference_logits_fn(w8a8, torch.float32), 100
    )
    for name, interval in first.figures.items():
        assert interval.value == pytest.approx(getattr(report, name), rel=1e-6)
    assert findings.perplexity.value == pytest.approx(report.perplexity_reference)
    assert len(first.layers) == 2
    assert len(first.weights) == 14
    assert len(findings.activations) == 8
    assert [worst.kl for worst in first.worst] == sorted((worst.kl for worst in first.worst), reverse=True)
    assert first.kl_curve[-1] == (first.worst[0].kl, pytest.approx(1 / 297))
    assert first.kl_curve[0][1] == 1.0


def test_a_candidate_may_be_run_by_something_else(tiny_llama: Path, w8a8: Path) -> None:
    opened: list[str] = []

    @contextmanager
    def own() -> Iterator[LogitsFn]:
        opened.append("open")
        yield reference_logits_fn(tiny_llama, torch.float32)
        opened.append("closed")

    findings = measure(tiny_llama, [Candidate("own", w8a8, own, ran_as="an engine")], OPTIONS)
    assert opened == ["open", "closed"]
    found = findings.candidates[0]
    assert found.ran_as == "an engine"
    assert found.figures["mean_kl"].value == 0.0
    assert found.greedy is not None
    assert found.greedy.diverges_at is None
    assert not found.layers
    assert found.layers_note is not None
    assert "no hidden states" in found.layers_note


def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(
    tiny_llama: Path, w8a8: Path, tmp_path: Path
) -> None:
    def refused(source: Path, candidate: Path, options: QualityOptions = OPTIONS) -> str:
        notes: list[str] = []
        with pytest.raises(QuantizeError) as caught:
            measure(source, [Candidate("x", candidate)], options, note=notes.append)
        assert not notes
        return str(caught.value)

    assert "found a quantized checkpoint" in refused(w8a8, w8a8)
    other = make_tiny_llama(tmp_path / "other", vocab_size=352)
    assert "found a vocabulary of 352, expected 320" in refused(tiny_llama, other)
    assert "absent" in refused(tiny_llama, tmp_path / "absent")
    assert "found windows of 4096 tokens" in refused(tiny_llama, w8a8, QualityOptions("text", "t", window_tokens=4096))
    with pytest.raises(QuantizeError, match="found no candidate"):
        measure(tiny_llama, [], OPTIONS)


def test_a_source_without_tokenizer_or_text_without_tokens_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(QuantizeError, match="found 1 tokens to evaluate on"):
        text_tokens(byte_tokenizer(), "a")


def test_continuations_split_where_they_part() -> None:
    tokenizer = byte_tokenizer()
    left, right = (tokenizer(text)["input_ids"] for text in ("one two six", "one two ten"))
    found = continuation(left, right, tokenizer)
    assert found.text == "one two ten"
    assert found.same + found.own == found.text
    assert found.same.startswith("one two")
    assert not found.own.startswith("one")
    assert continuation(left, left, tokenizer).diverges_at is None


def test_the_report_is_complete_self_contained_and_escaped(tiny_llama: Path, w8a8: Path, tmp_path: Path) -> None:
    findings = measure(tiny_llama, [Candidate("plain <rtn>", w8a8), Candidate("other", w8a8)], OPTIONS).to_json()
    files = {path.name: path for path in write_quality_report(tmp_path / "report", findings)}
    plots = {"perplexity", "kl", "layer_output_own", "layer_output_carried", "activations"}
    assert {f"{name}.png" for name in plots | {"layer_error_1", "layer_error_2"}} | {
        "quality.json",
        "quality.html",
    } == set(files)
    assert json.loads(files["quality.json"].read_text()) == findings
    page = files["quality.html"].read_text()
    assert "plain &lt;rtn&gt;" in page
    assert "<rtn>" not in page
    # Nothing is fetched: no address of a host anywhere, and every image is in the page.
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"base64,[A-Za-z0-9+/=]+", "", page))
    assert not re.search(r"<(script|link|iframe|object)\b|@import|url\(", page)
    assert page.count("<img ") == page.count('src="data:image/png;base64,') == 7
    for name, path in files.items():
        if name.endswith(".png"):
            assert path.read_bytes().startswith(PNG_START)


def test_a_report_without_error_and_with_infinite_figures_can_be_drawn(tiny_llama: Path, tmp_path: Path) -> None:
    def certain(window: torch.Tensor) -> torch.Tensor:
        """Sure of token 0, against everything the text says."""
        logits = torch.full((len(window), 320), -3e4)
        logits[:, 0] = 3e4
        return logits

    @contextmanager
    def own() -> Iterator[LogitsFn]:
        yield certain

    findings = measure(tiny_llama, [Candidate("certain", tiny_llama, own)], OPTIONS).to_json()
    assert findings["candidates"][0]["figures"]["perplexity_candidate"]["value"] is None
    assert findings["candidates"][0]["weights"] == []
    files = write_quality_report(tmp_path / "report", findings)
    assert "not measured" in (tmp_path / "report" / "quality.html").read_text()
    assert {"quality.json", "quality.html", "kl.png"} <= {path.name for path in files}
