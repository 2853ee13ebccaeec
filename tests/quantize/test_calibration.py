"""Calibration text: what is read, what is refused and how, and which windows come of it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from quantize.calibration import MAX_CHARACTERS, MAX_LINE_BYTES, calibration_windows, check_windows, data_digest
from quantize.errors import CalibrationError
from quantize.model_config import load_model_config
from quantize.recipe import Calibration
from tests.quantize.files import copy_checkpoint, edit_json

PROSE = "the end of the way and on the other hand a thing in it. " * 40
MESSAGES = [{"role": "user", "content": "the way " * 30}, {"role": "assistant", "content": "on the other hand " * 30}]


def windows(source: Path, data: Path | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    values = {"data": None if data is None else str(data), "tokens": 128, "window_tokens": 16, **settings}
    return calibration_windows(source, Calibration.model_validate(values))


def write_lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def text_of(source: Path, found: Tensor) -> str:
    text: str = AutoTokenizer.from_pretrained(source).decode(found.reshape(-1))
    return text


def test_the_package_s_text_is_the_default(tiny_qwen3: Path) -> None:
    chosen, held_out = windows(tiny_qwen3)
    assert (chosen.shape, chosen.dtype) == ((8, 16), torch.int64)
    assert held_out.shape == (0, 16)


def test_the_seed_decides_and_nothing_else(tiny_qwen3: Path) -> None:
    chosen, held_out = windows(tiny_qwen3, held_out_tokens=40)
    again, held_again = windows(tiny_qwen3, held_out_tokens=40)
    assert torch.equal(chosen, again)
    assert torch.equal(held_out, held_again)
    assert held_out.shape == (3, 16)
    assert not torch.equal(windows(tiny_qwen3, seed=1)[0], windows(tiny_qwen3)[0])


@pytest.mark.parametrize("seed", range(5))
def test_held_out_windows_are_never_calibrated_on(tiny_qwen3: Path, tmp_path: Path, seed: int) -> None:
    """Even when the text has hardly more than they need: every window is one or the other."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} " for number in range(400)))
    chosen, held_out = windows(tiny_qwen3, path, tokens=10_000, held_out_tokens=300, seed=seed)
    rows = [tuple(row) for row in (*chosen.tolist(), *held_out.tolist())]
    assert len(rows) == len(set(rows))
    assert len(held_out) == 19
    ids = AutoTokenizer.from_pretrained(tiny_qwen3)(path.read_text())["input_ids"]
    assert len(rows) == len(ids) // 16


def test_files_folders_and_lines_read_alike(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    plain = tmp_path / "plain.txt"
    plain.write_text(PROSE)
    (folder / "deeper" / "b.MD").write_text(PROSE[:500])
    write_lines(folder / "a.jsonl", {"text": PROSE[500:]})
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    whole = windows(tiny_qwen3, plain, tokens=10_000)[0]
    lines = windows(tiny_qwen3, write_lines(tmp_path / "all.JSONL", {"text": PROSE}), tokens=10_000)[0]
    assert torch.equal(whole, lines)
    assert text_of(tiny_qwen3, windows(tiny_qwen3, folder, tokens=10_000)[0]).startswith(PROSE[500:540])


def test_conversations_go_through_the_template(tiny_qwen3: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", {"messages": MESSAGES, "id": 7}, {"text": PROSE})
    rendered = text_of(tiny_qwen3, windows(tiny_qwen3, path, tokens=10_000)[0])
    assert rendered.startswith("<|im_start|>user\nthe way the way")
    assert "<|im_end|>\n<|im_start|>assistant\non the" in rendered
    plain = text_of(tiny_qwen3, windows(tiny_qwen3, path, tokens=10_000, chat_template=False)[0])
    assert plain.startswith("the way the way")
    assert "<|im_" not in plain


def test_special_tokens_come_from_the_template_alone(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Of a tokenizer that starts every text with one, as Llama's does."""
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")

    def add_bos(content: dict[str, Any]) -> None:
        single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        }

    edit_json(source / "tokenizer.json", add_bos)
    chat = windows(source, write_lines(tmp_path / "chat.jsonl", {"messages": MESSAGES}), tokens=10_000)[0]
    text = windows(source, write_lines(tmp_path / "text.jsonl", {"text": PROSE}), tokens=10_000)[0]
    assert int((chat == 0).sum()) == 0
    assert int(text[0, 0]) == 0


def test_a_conversation_without_a_template_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    (source / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(source / "tokenizer_config.json", lambda content: content.pop("chat_template", None))
    path = write_lines(tmp_path / "chat.jsonl", {"messages": MESSAGES})
    with pytest.raises(CalibrationError, match=r"line 1: .* no chat template; add one, or set chat_template to false"):
        windows(source, path)
    assert len(windows(source, path, chat_template=False)[0]) > 0
    (source / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CalibrationError, match=r"line 1: the chat template refuses it: roles must alternate"):
        windows(source, path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not JSON", "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b"[" * 1_000_000, "not valid JSON"),
        (b'{"text": 5}', r"found \['text'\], expected an object with a string `text`"),
        (b'{"txt": "a"}', r"found \['txt'\]"),
        (b"[1]", "found list"),
        (b"17" * 5000, "not valid JSON"),
        (b'{"messages": []}', "expected an object"),
        (b'{"messages": "a"}', "expected an object"),
        (b'{"messages": [{"role": "user", "content": ["a"]}]}', "objects with strings `role` and `content`"),
        (b'{"messages": [{"content": "a"}]}', "objects with strings"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "half of a surrogate pair"),
        (b'{"text": "' + b"a" * MAX_LINE_BYTES + b'"}', f"longer than {MAX_LINE_BYTES} bytes"),
    ],
)
def test_bad_lines_are_refused_by_number(tiny_qwen3: Path, tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"text": "the first"}\n\n' + line + b"\n")
    with pytest.raises(CalibrationError, match=words) as caught:
        windows(tiny_qwen3, path)
    assert "lines.jsonl, line 3: " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_unreadable_text_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"absent: there is no such file or folder"):
        windows(tiny_qwen3, tmp_path / "absent")
    with pytest.raises(CalibrationError, match=r"holds no file that ends in \.txt, \.md, \.jsonl"):
        windows(tiny_qwen3, tiny_qwen3 / ".." / "qwen3")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(CalibrationError, match="byte 3 is not UTF-8"):
        windows(tiny_qwen3, tmp_path / "latin.txt")


@pytest.mark.parametrize(("held_out", "least"), [(0, 16), (20, 48)])
def test_too_short_a_text_is_refused_with_the_least(
    tiny_qwen3: Path, tmp_path: Path, held_out: int, least: int
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a b c")
    with pytest.raises(CalibrationError, match=f"short.txt: found 3 tokens, expected at least {least}"):
        windows(tiny_qwen3, path, held_out_tokens=held_out)


def test_a_checkpoint_without_a_usable_tokenizer_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    """transformers makes up an empty tokenizer where there is none."""
    source = copy_checkpoint(tiny_qwen3, tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    with pytest.raises(CalibrationError, match="it has no tokenizer; calibration reads text"):
        windows(source)
    for content in ("{", "[]", '{"version": "1.0", "model": {"type": "none"}}'):
        (source / "tokenizer.json").write_text(content)
        with pytest.raises(CalibrationError, match="its tokenizer cannot be loaded"):
            windows(source)


def test_ids_and_windows_must_fit_the_model(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    check_windows(torch.full((1, 2048), 319), tiny_qwen3, config)
    check_windows(torch.empty((0, 16), dtype=torch.int64), tiny_qwen3, config)
    with pytest.raises(CalibrationError, match="gives id 320, but the model has 320 rows"):
        check_windows(torch.full((1, 4), 320), tiny_qwen3, config)
    with pytest.raises(CalibrationError, match=r"window_tokens is 2049, but the model's context has 2048 tokens"):
        check_windows(torch.zeros((1, 2049), dtype=torch.int64), tiny_qwen3, config)


def test_the_digest_of_text_is_over_its_bytes(tmp_path: Path) -> None:
    assert data_digest(Calibration()) is None
    path = tmp_path / "a.txt"
    path.write_text("one")
    one = data_digest(Calibration(data=str(path)))
    path.write_text("two")
    assert data_digest(Calibration(data=str(path))) != one
    path.write_text("one")
    assert data_digest(Calibration(data=str(path))) == one == data_digest(Calibration(data=str(tmp_path)))
    with pytest.raises(CalibrationError, match="no such file"):
        data_digest(Calibration(data=str(tmp_path / "b.txt")))


def test_a_pipe_and_a_huge_text_are_refused_at_once(tiny_qwen3: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    with pytest.raises(CalibrationError, match="neither a file nor a folder"):
        windows(tiny_qwen3, pipe)
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as file:
        file.truncate(4 * MAX_CHARACTERS + 1)
    with pytest.raises(CalibrationError, match="give a part of it"):
        windows(tiny_qwen3, huge)
    (tmp_path / "long.txt").write_text("a" * (MAX_CHARACTERS + 1))
    with pytest.raises(CalibrationError, match=f"more than {MAX_CHARACTERS} characters"):
        windows(tiny_qwen3, tmp_path / "long.txt")


def test_less_text_than_asked_for_is_said(tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    with caplog.at_level(logging.WARNING):
        chosen, _ = windows(tiny_qwen3, tmp_path / "text.txt", tokens=100_000)
    assert f"gives {chosen.numel()} tokens to calibrate on, the recipe asks for 100000" in caplog.text
