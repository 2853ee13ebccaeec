"""Text to ids and back: the checkpoint's own tokenizer and chat template, and decoding token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from serving.errors import RequestError, TokenizerError

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
MAX_HELD_REPLACEMENTS = MAX_CHARACTER_BYTES - 1
"""At most three bytes of an unfinished character can stand at the end of a text, so no more marks need be held."""


class Tokenizer:
    """The tokenizer of a checkpoint, as transformers loads it."""

    def __init__(self, transformers_tokenizer: Any) -> None:
        """Wrap a transformers tokenizer; it must have a fast (Rust) backend."""
        backend = getattr(transformers_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, FastTokenizer):
            raise TokenizerError(
                f"{type(transformers_tokenizer).__name__} has no fast tokenizer; serving needs a tokenizer.json"
            )
        self._transformers = transformers_tokenizer
        self._fast = backend

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer files of `directory`; TokenizerError says what is missing. Runs no code from there."""
        # Imported here: transformers takes seconds to import, and most users of this package never tokenize.
        from transformers import AutoTokenizer

        if not (directory / "tokenizer.json").is_file():
            raise TokenizerError(
                f"no tokenizer.json in {directory}; save the tokenizer beside the checkpoint with save_pretrained"
            )
        try:
            loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # Damaged files surface as whatever their first use raises inside transformers.
            raise TokenizerError(
                f"cannot load the tokenizer in {directory}: {type(error).__name__}: {error}; "
                "tokenizer.json and tokenizer_config.json must be those that save_pretrained wrote"
            ) from error
        return cls(loaded)

    def check_chat_template(self) -> None:
        """Render a short conversation; TokenizerError when the chat template is broken or refuses it."""
        self.encode_chat([{"role": "user", "content": "Hello"}])

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id, one of several places where one can be stated."""
        value = self._transformers.eos_token_id
        return None if value is None else int(value)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return bool(self._transformers.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with the special tokens that the tokenizer itself adds to a plain prompt.

        Raises RequestError for text that no encoding can hold (JSON can smuggle in half a surrogate pair).
        """
        return self._encode(text, "prompt", add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, ending where the assistant's answer begins.

        Raises RequestError when there is no template or when it refuses the messages (say, their order of roles).
        """
        if not self.has_chat_template:
            raise RequestError("this model has no chat template; use /v1/completions instead", "messages")
        try:
            text = self._transformers.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        return self._encode(str(text), "messages", add_special_tokens=False)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} of the text is half a surrogate pair", param) from error
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; an id that has no token stands for no text."""
        return self._fast.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special ones included; "" for an id that has no token."""
        return self._fast.decode([token_id], skip_special_tokens=False)


class IncrementalDecoder:
    """Decodes a growing list of ids; what it returns, joined, is the decoding of the whole list.

    (One exception: bytes that are no text, in a tokenizer with byte fallback, change what was shown before them.)

    Decoding restarts from a window that begins at a place where the text was complete, because the text of a token
    may depend on the one before it (leading spaces, characters of several byte tokens).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""
        self._complete_tokens = 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that it settled, "" while a character is unfinished."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        settled = len(text)
        while len(text) - settled < MAX_HELD_REPLACEMENTS and text[:settled].endswith(REPLACEMENT):
            settled -= 1
        unfinished = len(self._window) - self._complete_tokens < MAX_CHARACTER_BYTES
        if not text.startswith(self._shown) and unfinished:
            # Decoders with byte fallback turn a whole run of byte tokens into marks until its last character is whole.
            return ""
        delta = text[len(self._shown) : settled]
        self._shown = text[: max(len(self._shown), settled)]
        # A window of tokens without text (special ones, say) is no context: a leading space would be lost after it.
        if delta and settled == len(text):
            self._slide()
        return delta

    def flush(self) -> str:
        """The rest of the text, once no more tokens can come; an unfinished character shows as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        delta = text[len(self._shown) :]
        self._shown = text
        return delta

    def _slide(self) -> None:
        """Drop the tokens before the last complete place, keeping those after it as context for what comes."""
        self._window = self._window[self._complete_tokens :]
        self._complete_tokens = len(self._window)
        self._shown = self._tokenizer.decode(self._window)


def check_tokenizer(directory: Path) -> bool:
    """Refuse a checkpoint whose tokenizer or chat template does not work, since no worker could serve it.

    Returns whether there is a chat template: without one a worker answers completions and refuses chat. Raises
    TokenizerError.
    """
    tokenizer = Tokenizer.load(directory)
    if tokenizer.has_chat_template:
        tokenizer.check_chat_template()
    return tokenizer.has_chat_template
