"""A sequence: the tokens of one request, how far they are computed, and where they live in the cache.

Everything the scheduler and the engine know of a request while it runs is here, and nothing else is: no text rules, no
sampling, no policy.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal

from serving.executor.base import PAGE_TOKENS
from serving.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class Status(enum.Enum):
    """Where a sequence stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def pages_for(tokens: int) -> int:
    """How many cache pages hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


@dataclass
class Sequence:
    """One request's tokens and cache pages.

    `computed_tokens` counts the leading tokens whose keys and values are in `pages`; `cached_tokens` those that
    the prefix cache gave when the sequence was first admitted (None before); `published_pages` the leading
    pages already offered to the prefix cache, whose chained digest is `chain_digest`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    pages: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    cached_tokens: int | None = None
    published_pages: int = 0
    chain_digest: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 in plain decoding."""
        return self.num_tokens - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the token sampled last is still to be computed."""
        return bool(self.output_ids) and self.remaining_tokens == 1

    def token_slice(self, start: int, stop: int) -> Ids[int]:
        """Tokens `start .. stop - 1` of prompt and output seen as one list."""
        prompt_len = len(self.prompt_ids)
        if stop <= prompt_len:
            return self.prompt_ids[start:stop]
        output = self.output_ids[max(0, start - prompt_len) : stop - prompt_len]
        return [*self.prompt_ids[start:], *output] if start < prompt_len else output

    def reset(self) -> None:
        """Forget all computed state (its pages have been released): the sequence will be recomputed from its tokens."""
        self.pages = []
        self.computed_tokens = 0
        self.published_pages = 0
        self.chain_digest = b""
