"""Waiting for workers to take up a promoted bundle."""

from __future__ import annotations

import time

from serving.errors import SwitchError
from serving.store import CHAMPION, BundleStore
from serving.worker_registry import WorkerRecord, live_workers

POLL_S = 0.1


def await_switch(store: BundleStore, digest: str, timeout_s: float, alias: str = CHAMPION) -> list[WorkerRecord]:
    """Wait until every live worker that follows `alias` serves `digest`; returns their records (none without workers).

    Call it after `store.promote(digest, alias)`. A worker that ends meanwhile is no longer waited for. Raises
    SwitchError as soon as a worker reports that it could not take the bundle up, and after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    promotions = [move for move in store.history(alias) if move.kind == "promote" and move.digest == digest]
    if not promotions:
        raise SwitchError(f"alias {alias!r} has never been moved to {digest}; promote it first")
    move = promotions[-1].sequence
    while True:
        followers = [worker for worker in live_workers(store.root) if worker.alias == alias]
        failed = [worker for worker in followers if worker.failed_move == move]
        if failed:
            raise SwitchError(f"worker {failed[0].pid} could not take up {digest}: {failed[0].error}")
        pending = [worker for worker in followers if worker.digest != digest]
        if not pending:
            return followers
        if time.monotonic() > deadline:
            states = ", ".join(f"{worker.pid} is {worker.state} with {worker.digest}" for worker in pending)
            raise SwitchError(f"after {timeout_s:g} s not every worker serves {digest}: {states}")
        time.sleep(POLL_S)
