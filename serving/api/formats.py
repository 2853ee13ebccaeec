"""Answers of the two generation endpoints, whole and in chunks, as OpenAI's clients read them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serving.engine import TokenEvent
from serving.tokenizer import Tokenizer


@dataclass
class Choice:
    """What one prompt has produced so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, event: TokenEvent) -> None:
        """Take up an event of the request."""
        self.text += event.text
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
        self.events.append(event)
        self.finish_reason = event.finish_reason


def usage(last_events: Sequence[TokenEvent]) -> dict[str, Any]:
    """Token counts over the choices of a request, from each one's last event."""
    prompt = sum(event.prompt_tokens for event in last_events)
    completion = sum(event.completion_tokens for event in last_events)
    cached = sum(event.cached_tokens for event in last_events)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class AnswerFormat(Protocol):
    """How an endpoint words its answers."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def chunks(self, index: int, event: TokenEvent, first: bool) -> list[dict[str, Any]]:
        """The stream chunks for one event of choice `index`; `first` for the choice's first event."""
        ...

    def usage_chunk(self, last_events: Sequence[TokenEvent]) -> dict[str, Any]:
        """The chunk of token counts that ends a stream when asked for."""
        ...


class CompletionFormat:
    """Bodies of `/v1/completions`."""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, token_ids: bool) -> None:
        self._envelope = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """One object with every choice's text."""
        bodies = [self._choice(index, c.text, c.events, c.finish_reason) for index, c in enumerate(choices)]
        return {**self._envelope, "choices": bodies, "usage": usage([c.events[-1] for c in choices])}

    def chunks(self, index: int, event: TokenEvent, first: bool) -> list[dict[str, Any]]:
        """One chunk an event, also when its text is empty: clients can time every token."""
        return [{**self._envelope, "choices": [self._choice(index, event.text, [event], event.finish_reason)]}]

    def usage_chunk(self, last_events: Sequence[TokenEvent]) -> dict[str, Any]:
        """Token counts and no choice."""
        return {**self._envelope, "choices": [], "usage": usage(last_events)}

    def _choice(self, index: int, text: str, events: Sequence[TokenEvent], finish: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish, "logprobs": None}
        if self._logprobs:
            body["logprobs"] = self._logprob_table(events)
        if self._token_ids:
            body["token_ids"] = [event.token_id for event in events if event.token_id is not None]
        return body

    def _logprob_table(self, events: Sequence[TokenEvent]) -> dict[str, Any]:
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for event in events:
            if event.token_id is None or event.logprobs is None:
                continue
            token = self._tokenizer.token_text(event.token_id)
            table["tokens"].append(token)
            table["token_logprobs"].append(event.logprobs.logprob)
            table["top_logprobs"].append({self._tokenizer.token_text(i): value for i, value in event.logprobs.top})
            table["text_offset"].append(offset)
            offset += len(token)
        return table


class ChatFormat:
    """Bodies of `/v1/chat/completions`."""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, token_ids: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._token_ids = token_ids

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """One object with the assistant's message."""
        bodies = [
            self._choice(index, "message", {"role": "assistant", "content": c.text}, c.events, c.finish_reason)
            for index, c in enumerate(choices)
        ]
        return {**self._envelope("chat.completion"), "choices": bodies, "usage": usage([c.events[-1] for c in choices])}

    def chunks(self, index: int, event: TokenEvent, first: bool) -> list[dict[str, Any]]:
        """The role first, then a delta for each event, then the finish reason with an empty delta."""
        deltas: list[dict[str, Any]] = [self._choice(index, "delta", {"content": event.text}, [event], None)]
        if first:
            deltas.insert(0, self._choice(index, "delta", {"role": "assistant", "content": ""}, [], None))
        if event.finish_reason is not None:
            deltas.append(self._choice(index, "delta", {}, [], event.finish_reason))
        return [{**self._envelope("chat.completion.chunk"), "choices": [delta]} for delta in deltas]

    def usage_chunk(self, last_events: Sequence[TokenEvent]) -> dict[str, Any]:
        """Token counts and no choice."""
        return {**self._envelope("chat.completion.chunk"), "choices": [], "usage": usage(last_events)}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(
        self, index: int, key: str, content: dict[str, Any], events: Sequence[TokenEvent], finish: str | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index, key: content, "finish_reason": finish, "logprobs": None}
        if self._logprobs and events:
            body["logprobs"] = {"content": [entry for event in events for entry in self._logprob_entries(event)]}
        if self._token_ids:
            body["token_ids"] = [event.token_id for event in events if event.token_id is not None]
        return body

    def _logprob_entries(self, event: TokenEvent) -> list[dict[str, Any]]:
        if event.token_id is None or event.logprobs is None:
            return []
        top = [self._logprob_entry(token_id, value) for token_id, value in event.logprobs.top]
        return [{**self._logprob_entry(event.token_id, event.logprobs.logprob), "top_logprobs": top}]

    def _logprob_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._tokenizer.token_text(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
