"""Waiting for workers to take up a promoted bundle."""

from __future__ import annotations

import time

from serving.errors import SwitchError
from serving.store import CHAMPION, BundleStore
from serving.worker_registry import WorkerRecord, live_workers

POLL_S = 0.1


def await_switch(store: BundleStore, digest: str, timeout_s: float, alias: str = CHAMPION) -> list[WorkerRecord]:
    """Wait until every live worker that follows `alias` serves `digest`; returns their records (none without workers).

    Call it after `store.promote(digest, alias)` or a rollback to it. A worker that ends meanwhile is no longer waited
    for. Raises SwitchError as soon as a worker reports that it could not take the bundle up or the alias names another
    bundle, and after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    moves = [move for move in store.history(alias) if move.digest == digest]
    if not moves:
        raise SwitchError(f"alias {alias!r} has never been moved to {digest}; promote it first")
    move = moves[-1].sequence
    while True:
        followers = [worker for worker in live_workers(store.root) if worker.alias == alias]
        failed = [worker for worker in followers if worker.failed_move == move]
        if failed:
            raise SwitchError(f"worker {failed[0].pid} could not take up {digest}: {failed[0].error}")
        pending = [worker for worker in followers if worker.digest != digest]
        if not pending:
            return followers
        last = store.last_move(alias)
        if last is not None and last.digest != digest:
            raise SwitchError(f"alias {alias!r} went on to {last.digest} meanwhile: {last.reason}")
        if time.monotonic() > deadline:
            states = ", ".join(f"{worker.pid} is {worker.state} with {worker.digest}" for worker in pending)
            raise SwitchError(f"after {timeout_s:g} s not every worker serves {digest}: {states}")
        time.sleep(POLL_S)
