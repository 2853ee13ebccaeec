"""Finding stop strings in text that arrives in pieces.

The rule: text ends before the stop string that is complete first (of two that end at the same character, the longer).
So the result does not depend on how the text is cut into tokens, and a stream and a whole answer agree.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Lets text through up to the first stop string, holding back what might be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for `stops`, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add `text`; returns the text that is safe to show, and whether a stop string was found.

        Once one was found, the returned text is the last, and the matcher must not be used again.
        """
        if not self._stops:
            return text, False
        pending = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if matches:
            self._held = ""
            return pending[: min(matches)[1]], True
        keep = self._length_to_hold(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def flush(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        for length in range(min(len(text), max(map(len, self._stops)) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
