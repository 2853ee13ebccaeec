"""The bundle store: content-addressed bundles and the aliases that name them.

    bundles/<digest>/   complete bundles
    aliases.jsonl       every move of every alias (`alias_history`)
    workers/            one record for each live worker (`worker_registry`)

The store is the truth for serving: it needs no server and no tracking. Promotion and rollback move a name; nothing is
rebuilt. Safe for many processes at once: moves are made under a file lock, bundles appear by rename.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from pathlib import Path

from serving.alias_history import AliasMove, alias_stacks, append_move, read_moves
from serving.bundle import Bundle, BundleParts, assemble_bundle, identify, read_bundle, verify_bundle
from serving.errors import BundleError, StoreError
from serving.files import locked, sync_directory
from serving.manifest import Evidence
from serving.worker_registry import live_workers

logger = logging.getLogger(__name__)

CHAMPION = "champion"
CANDIDATE = "candidate"
RECENT_MOVES = 10
"""Bundles that the last moves name are never pruned: they are what a rollback may need."""
MIN_PREFIX = 4
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]+")


class BundleStore:
    """A store rooted at a folder, made on first use."""

    def __init__(self, root: Path) -> None:
        """Open the store and clear what killed processes left behind."""
        self.root = root
        self.bundles_dir = root / "bundles"
        self.bundles_dir.mkdir(parents=True, exist_ok=True)
        self._history_file = root / "aliases.jsonl"
        self._alias_lock = root / ".aliases.lock"
        self._assembly_lock = root / ".assembly.lock"
        self.reconcile()

    def bundle_path(self, digest: str) -> Path:
        """Where the bundle of `digest` is, or would be."""
        return self.bundles_dir / digest

    def put(self, parts: BundleParts, evidence: Evidence) -> Bundle:
        """Assemble the bundle of `parts` in the store, or return the equal one that is there already.

        What is there is hashed again first: releasing its source once more is how a damaged bundle is repaired.
        """
        identity = identify(parts)
        path = self.bundle_path(identity.digest())
        # Held shared by every assembler: while anybody assembles, partial folders are not leftovers.
        with locked(self._assembly_lock, shared=True):
            if path.exists():
                problems = verify_bundle(path)
                if not problems:
                    return read_bundle(path)
                logger.warning("replacing the damaged bundle %s: %s", path, "; ".join(problems))
                self._remove(path)
            try:
                return assemble_bundle(path, parts, evidence, identity)
            except (OSError, BundleError):
                # Another process may have put the same bundle in place meanwhile; then that one is as good.
                if not path.exists():
                    raise
                return read_bundle(path)

    def bundles(self) -> list[Bundle]:
        """All readable bundles, oldest first; a damaged one is logged and left out."""
        found = []
        for path in self.bundles_dir.iterdir():
            if _DIGEST.fullmatch(path.name):
                try:
                    found.append(read_bundle(path))
                except BundleError as error:
                    logger.warning("skipping a damaged bundle: %s", error)
        return sorted(found, key=lambda bundle: (bundle.manifest.evidence.created, bundle.digest))

    def history(self, alias: str | None = None) -> list[AliasMove]:
        """All moves, oldest first; of one alias only when it is given."""
        return [move for move in read_moves(self._history_file) if alias in (None, move.alias)]

    def aliases(self) -> dict[str, str]:
        """Every alias and the digest it names."""
        return {alias: stack[-1] for alias, stack in alias_stacks(self.history()).items() if stack}

    def alias(self, name: str) -> str | None:
        """The digest that alias `name` names, None when it names none."""
        return self.aliases().get(name)

    def last_move(self, alias: str) -> AliasMove | None:
        """The latest move of `alias`: watch its `sequence` to notice every change."""
        moves = self.history(alias)
        return moves[-1] if moves else None

    def promote(self, digest: str, alias: str = CHAMPION, reason: str = "") -> AliasMove:
        """Point `alias` at `digest`; no move is recorded when it does already. StoreError for an unknown bundle."""
        if not _ALIAS.fullmatch(alias) or _HEX.fullmatch(alias):
            raise StoreError(
                f"{alias!r} cannot be an alias: use lower-case letters, digits, '-' and '_', and not only hex digits"
            )
        with locked(self._alias_lock):
            if not self.bundle_path(digest).is_dir():
                raise StoreError(f"no bundle {digest} in {self.root}; see the list of bundles for what is there")
            last = self.last_move(alias)
            if last is not None and last.digest == digest:
                return last
            previous = last.digest if last else None
            return append_move(self._history_file, alias, "promote", digest, previous, reason)

    def rollback(self, alias: str = CHAMPION, reason: str = "", expected: str | None = None) -> AliasMove:
        """Point `alias` at the bundle it named before the present one; bundles that are gone are skipped.

        With `expected`, only if the alias names that digest still (StoreError otherwise). StoreError when there is no
        earlier bundle.
        """
        with locked(self._alias_lock):
            stack = alias_stacks(self.history()).get(alias, [])
            if not stack:
                raise StoreError(f"alias {alias!r} names nothing, so it cannot be rolled back")
            present = stack.pop()
            if expected is not None and present != expected:
                raise StoreError(f"alias {alias!r} names {present} by now, not {expected}; it is left there")
            while stack and not (self.bundle_path(stack[-1]).is_dir() and stack[-1] != present):
                stack.pop()
            if not stack:
                raise StoreError(f"alias {alias!r} names {present} and no earlier bundle: nothing to roll back to")
            return append_move(self._history_file, alias, "rollback", stack[-1], present, reason)

    def move_back(self, move: AliasMove, reason: str) -> AliasMove:
        """Undo `move`, which nobody could take up: its alias names again what it named before, and that is good.

        After a rollback that is the bundle rolled back from, not one further back. StoreError when the alias has moved
        on meanwhile or there is nothing to go back to.
        """
        if move.kind == "promote":
            return self.rollback(move.alias, reason, expected=move.digest)
        with locked(self._alias_lock):
            last = self.last_move(move.alias)
            if last is None or last.sequence != move.sequence:
                raise StoreError(f"alias {move.alias!r} has moved on since move {move.sequence}; it is left there")
            if move.previous is None or not self.bundle_path(move.previous).is_dir():
                raise StoreError(f"alias {move.alias!r} cannot go back to {move.previous}, which is gone")
            return append_move(self._history_file, move.alias, "promote", move.previous, move.digest, reason)

    def resolve(self, reference: str) -> Bundle:
        """The bundle that `reference` means: an alias, a digest or its unique beginning, or the path of a folder."""
        digest = self.alias(reference)
        if digest is not None:
            return read_bundle(self.bundle_path(digest))
        if len(reference) >= MIN_PREFIX and _HEX.fullmatch(reference):
            found = sorted(path.name for path in self.bundles_dir.iterdir() if path.name.startswith(reference))
            if len(found) == 1:
                return read_bundle(self.bundles_dir / found[0])
            if found:
                raise StoreError(f"{reference!r} is the beginning of {len(found)} digests: {', '.join(found)}")
        path = Path(reference)
        if path.is_dir():
            return read_bundle(path)
        known = ", ".join(sorted(self.aliases())) or "none yet"
        raise StoreError(
            f"{reference!r} is no alias ({known}), no digest (of {MIN_PREFIX} digits or more) in {self.root} "
            "and no bundle folder"
        )

    def prune(self, keep: int) -> list[str]:
        """Remove old bundles but the newest `keep`, and never one that an alias, recent history or a worker names.

        Returns the digests removed.
        """
        if keep < 0:
            raise StoreError(f"keep is {keep}; give the number of newest bundles to keep, 0 or more")
        with locked(self._alias_lock):
            moves = self.history()
            protected = set(self.aliases().values())
            protected |= {digest for move in moves[-RECENT_MOVES:] for digest in (move.digest, move.previous) if digest}
            protected |= {worker.digest for worker in live_workers(self.root) if worker.digest}
            bundles = self.bundles()
            old = bundles[: max(0, len(bundles) - keep)]
            removed = [bundle.digest for bundle in old if bundle.digest not in protected]
            for digest in removed:
                self._remove(self.bundle_path(digest))
        return removed

    def reconcile(self) -> list[str]:
        """Remove partial folders of killed assemblies, unless one is running now; returns the names removed."""
        removed = []
        with locked(self._assembly_lock, blocking=False) as alone:
            if alone:
                for folder in self.bundles_dir.glob(".*.partial"):
                    logger.info("removing %s, left by an interrupted run", folder)
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(folder.name)
        return removed

    def _remove(self, path: Path) -> None:
        """Take a bundle out of sight at once, then delete its files."""
        aside = self.bundles_dir / f".{uuid.uuid4().hex}.partial"
        path.rename(aside)
        sync_directory(self.bundles_dir)
        shutil.rmtree(aside, ignore_errors=True)
