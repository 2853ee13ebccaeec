"""Request bodies of the OpenAI-compatible API, and what they mean to the engine.

Fields that would change the answer and are not offered are refused when set to anything but their neutral value; fields
that only label a request are accepted and ignored; unknown fields are refused by name. `top_k`, `ignore_eos` and
`return_token_ids` are extensions.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

from serving.errors import RequestError
from serving.sampling_params import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion; a chat answer may go on to the end of the context."""


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(BaseModel):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: StrictInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: StrictInt | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    n: StrictInt | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def refuse_unsupported(self) -> None:
        """Raise RequestError naming the first field that asks for something not offered."""
        neutral: dict[str, tuple[Any, ...]] = {
            "n": (None, 1),
            "presence_penalty": (None, 0.0),
            "frequency_penalty": (None, 0.0),
            "logit_bias": (None, {}),
            **self.neutral_values(),
        }
        for name, allowed in neutral.items():
            if getattr(self, name) not in allowed:
                values = " or ".join(repr(value) for value in allowed if value is not None) or "absent"
                raise RequestError(f"{name}={getattr(self, name)!r} is not supported; it must be {values}", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", "stream_options")

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """Fields of the concrete endpoint that are accepted only with these values."""
        return {}

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters; null counts as absent. Raises RequestError for a value out of range."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k is None else self.top_k,
            seed=self.seed,
            stop=stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`: a text or ids, or a list of either for one choice each."""

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    logprobs: StrictInt | None = None
    best_of: StrictInt | None = None
    echo: bool | None = None
    suffix: str | None = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """No search, no echo, no filling in."""
        return {"best_of": (None, 1), "echo": (None, False), "suffix": (None, "")}

    def params(self) -> SamplingParams:
        """Sampling parameters with the endpoint's default length."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(limit, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each choice; RequestError when there is none or one is empty."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompts: list[Any] = [prompt]
        else:
            prompts = list(prompt)
        if not prompts or any(len(one) == 0 for one in prompts):
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        return prompts


class ContentPart(BaseModel):
    """A part of a message; only text can be served, but others are read to be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None

    def text(self, index: int) -> str:
        """The message's text, parts joined as they are; RequestError when it has none or has other parts."""
        where = f"messages[{index}].content"
        if self.content is None:
            raise RequestError(f"{where} is null; give a text", where)
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise RequestError(f"{where} has a part of type {part.type!r}; this model reads text only", where)
        if not self.content:
            raise RequestError(f"{where} is an empty list; give a text", where)
        return "".join(part.text or "" for part in self.content)


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    def neutral_values(self) -> dict[str, tuple[Any, ...]]:
        """Text in, text out, no tools."""
        return {
            "tools": (None, []),
            "tool_choice": (None, "none", "auto"),
            "response_format": (None, {"type": "text"}),
            "modalities": (None, ["text"]),
        }

    def params(self) -> SamplingParams:
        """Sampling parameters; `max_completion_tokens` wins over the older `max_tokens`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(limit, (self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, str]]:
        """Messages as the chat template expects them: role and text, `developer` read as `system`."""
        return [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text(index)}
            for index, message in enumerate(self.messages)
        ]
