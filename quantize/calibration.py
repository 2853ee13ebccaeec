"""The token windows that calibrated algorithms run through the model: from text to ids, the same for the same seed."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.checkpoint import file_sha256
from quantize.errors import CalibrationError
from quantize.model_config import ModelConfig
from quantize.recipe import Calibration
from quantize.texts import calibration_text

MAX_LINE_BYTES = 16 * 2**20
MAX_CHARACTERS = 16 * 2**20
"""Text that is tokenized at most: a few million tokens, a few seconds."""
NEEDS_TOKENIZER = "calibration reads text, so the checkpoint needs its tokenizer files. Algorithm rtn needs none"
SUFFIXES = (".txt", ".md", ".jsonl")
logger = logging.getLogger(__name__)


def calibration_windows(checkpoint: Path, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Windows of ids INT64 `[windows, window_tokens]` to calibrate on, and others to judge on.

    The text is tokenized by `checkpoint`'s tokenizer document by document, joined, and cut into windows; a permutation
    by the seed picks which are used. Windows held out are never among the others, whatever recipe asks for them.
    Raises CalibrationError for text that cannot be read or is too short for one window of each kind; a text that is
    merely shorter than asked for gives fewer windows.
    """
    if calibration.data is not None:
        _files(Path(calibration.data))  # refuses what is not there before anything heavy is imported
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"{checkpoint}: its tokenizer cannot be loaded ({str(error)[:120]}); {NEEDS_TOKENIZER}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes up an empty one where there are no files.
        raise CalibrationError(f"{checkpoint}: it has no tokenizer; {NEEDS_TOKENIZER}")
    ids: list[int] = []
    characters = 0
    for document, rendered in _documents(calibration, tokenizer):
        characters += len(document)
        if characters > MAX_CHARACTERS:
            raise CalibrationError(
                f"{calibration.data}: more than {MAX_CHARACTERS} characters of text, all of which would be tokenized "
                "to pick windows from; give a part of it"
            )
        # A chat template writes the special tokens itself.
        ids.extend(tokenizer(document, add_special_tokens=not rendered, verbose=False)["input_ids"])
    size = calibration.window_tokens
    windows = len(ids) // size
    held_out = -(-calibration.held_out_tokens // size)
    if windows < held_out + 1:
        raise CalibrationError(
            f"{calibration.data or 'the calibration text'}: found {len(ids)} tokens, expected at least "
            f"{(held_out + 1) * size} ({held_out + 1} windows of {size}); give more text or a smaller window_tokens"
        )
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(calibration.seed))
    chosen = order[held_out : held_out + max(1, calibration.tokens // size)]
    if len(chosen) * size < calibration.tokens - size:
        logger.warning(
            "%s gives %d tokens to calibrate on, the recipe asks for %d",
            calibration.data or "the package's text",
            len(chosen) * size,
            calibration.tokens,
        )
    whole = torch.tensor(ids[: windows * size], dtype=torch.int64).view(windows, size)
    return whole[chosen.sort().values], whole[order[:held_out].sort().values]


def check_windows(windows: Tensor, directory: Path, config: ModelConfig) -> None:
    """Ids must be rows of the embedding, windows must fit the context; raises CalibrationError otherwise."""
    if windows.numel() and int(windows.max()) >= config.vocab_size:
        raise CalibrationError(
            f"{directory}: its tokenizer gives id {int(windows.max())}, but the model has {config.vocab_size} rows in "
            "its embedding; use the tokenizer the model was trained with"
        )
    if windows.shape[1] > config.max_position_tokens:
        raise CalibrationError(
            f"calibration.window_tokens is {windows.shape[1]}, but the model's context has "
            f"{config.max_position_tokens} tokens; use at most that"
        )


def data_digest(calibration: Calibration) -> str | None:
    """sha256 (hex) over names and bytes of the recipe's own text; None when it is the package's.

    Raises CalibrationError for text that is not there or cannot be read.
    """
    if calibration.data is None:
        return None
    digest = hashlib.sha256()
    for file in _files(Path(calibration.data)):
        try:
            digest.update(f"{file.name}\0{file_sha256(file)}\n".encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise CalibrationError(f"{file}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    """The file itself, or the text files of a folder in the order of their names."""
    if not path.exists():
        raise CalibrationError(f"{path}: there is no such file or folder; calibration.data names text to calibrate on")
    if not path.is_dir() and not path.is_file():
        raise CalibrationError(
            f"{path}: found neither a file nor a folder; calibration.data names text to calibrate on"
        )
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise CalibrationError(f"{path}: the folder holds no file that ends in {', '.join(SUFFIXES)}")
    return files


def _documents(calibration: Calibration, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Every document, and whether a chat template has rendered it."""
    if calibration.data is None:
        yield calibration_text(), False
        return
    for file in _files(Path(calibration.data)):
        if file.suffix.lower() == ".jsonl":
            yield from _json_lines(file, calibration, tokenizer)
        else:
            yield _read(file), False


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > 4 * MAX_CHARACTERS:
            raise CalibrationError(f"{path}: {size} bytes, expected at most {4 * MAX_CHARACTERS}; give a part of it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: byte {error.start} is not UTF-8; expected text in UTF-8") from error


def _json_lines(path: Path, calibration: Calibration, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """One document a line: `text`, or a conversation in `messages` (OpenAI's shape)."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise CalibrationError(f"{where}: longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield _document(line, where, calibration, tokenizer)
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from error


def _document(line: bytes, where: str, calibration: Calibration, tokenizer: Any) -> tuple[str, bool]:
    """One line's text, checked to be encodable, and whether a chat template has rendered it."""
    text, rendered = _line_text(line, where, calibration, tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(f"{where}: holds half of a surrogate pair, which is no text; remove it") from error
    return text, rendered


def _line_text(line: bytes, where: str, calibration: Calibration, tokenizer: Any) -> tuple[str, bool]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not valid JSON: {str(error)[:80]}") from error
    found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
    text = entry.get("text") if isinstance(entry, dict) else None
    if isinstance(text, str):
        return text, False
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise CalibrationError(
            f"{where}: found {str(found)[:80]}, expected an object with a string `text`, or with `messages`: objects "
            "with strings `role` and `content`"
        )
    if not calibration.chat_template:
        return "\n".join(message["content"] for message in messages), False
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{where}: a conversation, but the checkpoint has no chat template; add one, or set chat_template to false"
        )
    from jinja2 import TemplateError

    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError as error:
        raise CalibrationError(f"{where}: the chat template refuses it: {str(error)[:120]}") from error
    return rendered, True


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
