"""Promotion: move an alias in the store, wait for the workers that follow it, and mirror the move in MLflow."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from prefect import task
from pydantic import BaseModel, ConfigDict

from serving.bundle import read_bundle, verify_bundle
from serving.errors import StoreError, SwitchError
from serving.store import CHAMPION, BundleStore
from serving.switch import await_switch
from tasks.errors import TasksError, TrackingError
from tasks.track import mirror_alias
from tasks.tracking import Tracking

logger = logging.getLogger(__name__)

CANDIDATE = "candidate"
SWITCH_TIMEOUT_S = 600.0


class Promotion(BaseModel):
    """What became of an alias: whether it names the digest now, which workers took it up, and a sentence for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    alias: str
    digest: str
    moved: bool
    promoted: bool
    workers: list[str]
    message: str


def promote_bundle(
    store: Path, digest: str, alias: str, reason: str, tracking: Tracking | None, *, force: bool = False
) -> Promotion:
    """Point `alias` at `digest` and wait until every live worker that follows it serves the bundle.

    When a worker cannot take it up, the alias goes back and the answer says so (`promoted` false). A champion must
    have passed its gates unless `force`, and any bundle must be sound; raises `TasksError` otherwise. A tracking
    outage is logged, not raised.
    """
    bundles = BundleStore(store)
    bundle = bundles.resolve(digest)
    if problems := verify_bundle(bundle.path):
        raise TasksError("\n  - ".join([f"{bundle.path} is damaged; release its source again:", *problems]))
    if alias == CHAMPION and not force:
        _require_gates(bundle.path)
    before = bundles.alias(alias)
    move = bundles.promote(bundle.digest, alias, reason)
    moved = before != bundle.digest
    try:
        workers = await_workers(bundles, bundle.digest, alias) if moved else []
    except SwitchError as error:
        _put_back(bundles, alias, move.digest, before, str(error))
        return Promotion(
            alias=alias,
            digest=bundle.digest,
            moved=False,
            promoted=False,
            workers=[],
            message=f"{alias} went back to {(before or 'nothing')[:12]}: {error}",
        )
    mirror(tracking, bundle.digest, alias)
    message = f"{alias} is {bundle.digest[:12]}" + (f", was {before[:12]}" if before and moved else "")
    if workers:
        message += f"; taken up by {', '.join(workers)}"
    return Promotion(alias=alias, digest=bundle.digest, moved=moved, promoted=True, workers=workers, message=message)


def rollback_alias(store: Path, alias: str, reason: str, tracking: Tracking | None) -> Promotion:
    """Point `alias` at the bundle before the present one, wait for the workers, mirror it in MLflow."""
    bundles = BundleStore(store)
    before = bundles.alias(alias)
    move = bundles.rollback(alias, reason)
    message = f"{alias} is {move.digest[:12]} again, was {(before or 'nothing')[:12]}"
    workers: list[str] = []
    try:
        workers = await_workers(bundles, move.digest, alias)
    except SwitchError as error:
        message = f"{alias} was to be {move.digest[:12]} again and is {(bundles.alias(alias) or '-')[:12]}: {error}"
    now = bundles.alias(alias) or move.digest
    mirror(tracking, now, alias)
    held = now == move.digest
    return Promotion(alias=alias, digest=now, moved=held, promoted=held, workers=workers, message=message)


def await_workers(bundles: BundleStore, digest: str, alias: str) -> list[str]:
    """URLs of the live workers that follow `alias`, once each serves `digest`; raises SwitchError when one fails."""
    return [worker.url for worker in await_switch(bundles, digest, SWITCH_TIMEOUT_S, alias)]


def mirror(tracking: Tracking | None, digest: str, alias: str) -> None:
    """Point MLflow's alias at the same digest; an outage is logged, since the store is the truth."""
    if tracking is None:
        return
    try:
        mirror_alias(tracking, digest, alias)
    except TrackingError as error:
        logger.warning("the alias %s moved in the store, and not in MLflow: %s", alias, error)


def _require_gates(path: Path) -> None:
    evidence = read_bundle(path).manifest.evidence
    failed = [gate["name"] for gate in evidence.gates if not gate["passed"]]
    if failed:
        raise TasksError(
            f"{path.name[:12]} failed its gates ({', '.join(failed)}), so it cannot become champion; "
            "use --force to promote it all the same"
        )
    if not evidence.gates:
        raise TasksError(
            f"{path.name[:12]} has no gate results: its release did not end. Run the release again, or use --force"
        )


def _put_back(bundles: BundleStore, alias: str, digest: str, before: str | None, reason: str) -> None:
    if before is None or bundles.alias(alias) != digest:
        return
    try:
        bundles.rollback(alias, reason, expected=digest)
    except StoreError as error:
        logger.error("the alias %s was not moved back: %s", alias, error)


@task(name="promote", persist_result=False)
def promote_step(
    store: str, digest: str, alias: Literal["candidate", "champion"], reason: str, tracking: dict[str, Any] | None
) -> Promotion:
    """Prefect task over `promote_bundle`; `tracking` is None when MLflow is known to be away."""
    return promote_bundle(
        Path(store), digest, alias, reason, None if tracking is None else Tracking.model_validate(tracking)
    )
