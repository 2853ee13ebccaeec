"""Which sequences run in the next step, and how many tokens of each.

Policy: sequences in decoding come first, one token each; what is left of the token budget goes to prefills, oldest
first, cut into chunks. When pages run out, the sequence that arrived last gives its pages back and is recomputed later
from its tokens, generated ones included, so nothing is lost and no text changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from serving.kv_cache import PagePool
from serving.sequence import Sequence, Status


@dataclass(frozen=True)
class ScheduledChunk:
    """The next `num_tokens` uncomputed tokens of `sequence` run in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def completes(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that a new one is sampled after it."""
        return self.num_tokens == self.sequence.remaining_tokens


class Scheduler:
    """Holds the waiting and the running sequences and picks each step's work."""

    def __init__(self, pool: PagePool, max_batch_tokens: int, max_running: int) -> None:
        """Schedule at most `max_batch_tokens` tokens a step over at most `max_running` sequences."""
        self.pool = pool
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind those that wait."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands, and release its pages."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.pool.release(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> list[ScheduledChunk]:
        """Pick the next step's chunks; empty only when there is no work.

        `running` stays in order of arrival: that is the order of service, and its reverse the order of preemption.
        """
        budget = self.max_batch_tokens
        chunks: list[ScheduledChunk] = []
        for sequence in [sequence for sequence in self.running if sequence.decoding]:
            # A sequence may have been preempted for an older one earlier in this loop.
            if budget == 0 or sequence.status is not Status.RUNNING or not self._make_room(sequence):
                continue
            chunks.append(ScheduledChunk(sequence, 1))
            budget -= 1
        for sequence in self.running:
            if budget > 0 and not sequence.decoding:
                chunk = ScheduledChunk(sequence, min(budget, sequence.remaining_tokens))
                chunks.append(chunk)
                budget -= chunk.num_tokens
        while budget > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            # One page is kept back while others run: without it a newcomer could take the last page and be preempted
            # in the very next step, its prefill wasted.
            if not self.pool.can_admit(sequence, spare_pages=1 if self.running else 0):
                break
            self.waiting.popleft()
            self.pool.admit(sequence)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            chunk = ScheduledChunk(sequence, min(budget, sequence.remaining_tokens))
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def _make_room(self, sequence: Sequence) -> bool:
        """Give `sequence` the page for its last token, preempting later arrivals (itself last of all) if need be."""
        while not self.pool.can_grow(sequence):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self.pool.grow(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1
