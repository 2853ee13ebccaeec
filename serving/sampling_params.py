"""What a request may ask of the generation, checked once at the door."""

from __future__ import annotations

from dataclasses import dataclass

from serving.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop.

    `max_tokens` None means "to the end of the context"; 0 generates nothing and finishes with "length". `temperature`
    0 is greedy. `top_k` 0 means no limit. `seed` None draws one. `logprobs` is the number of alternatives to report
    with each token, None for none. `ignore_eos` keeps going at an end-of-sequence token, for measurements.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range with a RequestError that names the field."""
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 0 or more, or absent", "max_tokens")
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(f"temperature is {self.temperature}; it must be between 0 and 2", "temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (no limit) or more", "top_k")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS} are accepted", "stop")
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty; remove it", "stop")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"{self.logprobs} logprobs asked for; 0 to {MAX_TOP_LOGPROBS} are offered", "logprobs")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0
