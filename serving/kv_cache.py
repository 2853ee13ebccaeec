"""Pages of the KV cache: who holds them, and which of them a later prompt may reuse.

A page holds the keys and values of 128 consecutive tokens. It is *held* while sequences refer to it, *cached* when no
sequence does but its content is known, and *free* otherwise. Cached pages are handed out again, least recently used
first, once no free page is left, so a cached page never costs a request anything.

The prefix cache is a map from a chained digest (the digest of the page before, then this page's tokens) to a page. A
digest only finds a candidate: the tokens are compared before it is used. Only *confirmed* pages are published: full
ones whose forward pass has succeeded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from serving.executor.base import PAGE_TOKENS
from serving.sequence import Sequence, pages_for


def chain_digest(parent: bytes, token_ids: Ids[int]) -> bytes:
    """Digest of a page's tokens after the pages digested in `parent`; does not depend on the process."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


@dataclass(frozen=True)
class _Published:
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


@dataclass
class CacheCounters:
    """Running totals of the prefix cache: tokens asked for, tokens found, pages thrown out to make room."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


class PagePool:
    """Reference-counted pages with a prefix cache over them."""

    def __init__(self, num_pages: int, prefix_cache: bool = True) -> None:
        """Manage pages `0 .. num_pages - 1`; without `prefix_cache` nothing is ever reused."""
        self.num_pages = num_pages
        self.prefix_cache = prefix_cache
        self.counters = CacheCounters()
        self._free: deque[int] = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._published: dict[int, _Published] = {}
        self._by_digest: dict[bytes, int] = {}

    @property
    def available_pages(self) -> int:
        """Pages that no sequence holds: free and cached ones together."""
        return len(self._free) + len(self._cached)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Published pages that hold the leading tokens of `sequence`, in order; takes no reference.

        At least the last token is left out, because its logits have to be computed: a prompt of exactly n pages finds
        at most n - 1 of them.
        """
        found: list[int] = []
        if not self.prefix_cache:
            return found
        parent = b""
        for index in range((sequence.num_tokens - 1) // PAGE_TOKENS):
            tokens = tuple(sequence.token_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS))
            digest = chain_digest(parent, tokens)
            page = self._by_digest.get(digest)
            if page is None:
                break
            entry = self._published[page]
            if entry.token_ids != tokens or entry.parent != parent:
                break
            found.append(page)
            parent = digest
        return found

    def can_admit(self, sequence: Sequence, spare_pages: int = 0) -> bool:
        """Whether pages for all present tokens of `sequence` can be had now and `spare_pages` be left over."""
        reused = self.find_prefix(sequence)
        taken_from_cached = sum(1 for page in reused if self._references[page] == 0)
        needed = pages_for(sequence.num_tokens) - len(reused)
        return needed + spare_pages <= self.available_pages - taken_from_cached

    def admit(self, sequence: Sequence) -> None:
        """Give `sequence` pages for all its present tokens, reusing published ones; `can_admit` must be true."""
        reused = self.find_prefix(sequence)
        for page in reused:
            self._cached.pop(page, None)
            self._references[page] += 1
        sequence.pages = [*reused, *(self._take() for _ in range(pages_for(sequence.num_tokens) - len(reused)))]
        sequence.computed_tokens = len(reused) * PAGE_TOKENS
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed_tokens
        sequence.published_pages = len(reused)
        sequence.chain_digest = self._published[reused[-1]].digest if reused else b""
        self.counters.queried_tokens += sequence.num_tokens
        self.counters.hit_tokens += sequence.computed_tokens

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether `sequence` has, or can get, the page that its last token belongs to."""
        return pages_for(sequence.num_tokens) - len(sequence.pages) <= self.available_pages

    def grow(self, sequence: Sequence) -> None:
        """Give `sequence` the pages its tokens have grown into; `can_grow` must be true."""
        while len(sequence.pages) < pages_for(sequence.num_tokens):
            sequence.pages.append(self._take())

    def publish(self, sequence: Sequence) -> None:
        """Offer the full, computed pages of `sequence` to later prompts; call after their forward pass succeeded."""
        if not self.prefix_cache:
            return
        for index in range(sequence.published_pages, sequence.computed_tokens // PAGE_TOKENS):
            tokens = tuple(sequence.token_slice(index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS))
            parent = sequence.chain_digest
            digest = chain_digest(parent, tokens)
            page = sequence.pages[index]
            # When two sequences computed the same page at once, the first one stays published.
            if digest not in self._by_digest:
                self._by_digest[digest] = page
                self._published[page] = _Published(digest, parent, tokens)
            sequence.chain_digest = digest
            sequence.published_pages = index + 1

    def release(self, sequence: Sequence) -> None:
        """Take back all pages of `sequence` and reset it; published pages stay findable until they are needed."""
        # Last page first: when room is needed, the ends of prefixes go before their beginnings.
        for page in reversed(sequence.pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._published:
                    self._cached[page] = None
                else:
                    self._free.append(page)
        sequence.reset()

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._cached.popitem(last=False)
            entry = self._published.pop(page)
            del self._by_digest[entry.digest]
            self.counters.evicted_pages += 1
        self._references[page] = 1
        return page
