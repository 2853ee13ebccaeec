"""The verbs on the store: `bundles list|show|verify|prune`, `promote`, `rollback`, `status`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flows.cli.output import JSON_OPTION, STORE_OPTION, FailedError, emit_json, emit_line, emit_table
from flows.settings import Store, UsageError, configure_environment, resolve_store

if TYPE_CHECKING:
    from serving.bundle import Bundle
    from serving.store import BundleStore

REF_ARGUMENT = typer.Argument(..., metavar="BUNDLE|ALIAS", help="A digest (or its start), an alias, or a folder.")
ALIAS_OPTION = typer.Option("champion", "--alias", help="The alias to move: candidate or champion.")
ALIASES = ("candidate", "champion")


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    group = typer.Typer(help="Bundles of the store: list, show, verify, prune.", no_args_is_help=True)
    group.command("list")(list_bundles)
    group.command()(show)
    group.command()(verify)
    group.command()(prune)
    app.add_typer(group, name="bundles")
    app.command()(promote)
    app.command()(rollback)
    app.command()(status)


def list_bundles(store: str | None = STORE_OPTION, as_json: bool = JSON_OPTION) -> None:
    """List the bundles, oldest first."""
    bundles = _open(resolve_store(store))
    rows = [_summary(bundle, bundles) for bundle in bundles.bundles()]
    if as_json:
        emit_json({"bundles": rows})
    else:
        emit_table(
            f"Bundles in {bundles.root}",
            ["digest", "name", "created", "aliases", "perplexity ratio", "TPOT ms", "platform", "gates"],
            [
                [
                    row["digest"][:12],
                    row["name"],
                    row["created"],
                    ", ".join(row["aliases"]),
                    row["perplexity_ratio"],
                    row["tpot_ms"],
                    row["platform"],
                    {True: "pass", False: "FAIL", None: None}[row["gates_passed"]],
                ]
                for row in rows
            ],
        )


def show(ref: str = REF_ARGUMENT, store: str | None = STORE_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Show the manifest of a bundle."""
    bundles = _open(resolve_store(store))
    bundle = bundles.resolve(ref)
    summary = _summary(bundle, bundles)
    if as_json:
        emit_json({**summary, "path": str(bundle.path), "manifest": bundle.manifest.model_dump(mode="json")})
        return
    identity = bundle.manifest.identity
    rows: list[list[object]] = [
        [key, ", ".join(value) or None if isinstance(value, list) else value] for key, value in summary.items()
    ]
    rows += [
        ["path", bundle.path],
        ["source", identity.source_digest],
        ["contract", f"{identity.contract.name} {identity.contract.version}, down {identity.contract.down}"],
        ["tensors", f"{len(identity.checkpoint_tensors)} in checkpoint/, {len(identity.slabs)} in slabs/"],
        ["programs", ", ".join(identity.programs)],
        ["MLflow run", bundle.manifest.evidence.mlflow_run_id],
    ]
    emit_table(f"Bundle {bundle.digest[:12]}", ["", ""], rows)


def verify(ref: str = REF_ARGUMENT, store: str | None = STORE_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Hash everything in a bundle again and compare with its manifest."""
    from serving.bundle import verify_bundle

    bundle = _open(resolve_store(store)).resolve(ref)
    problems = verify_bundle(bundle.path)
    if as_json:
        emit_json({"digest": bundle.digest, "sound": not problems, "problems": problems})
    else:
        emit_line(f"{bundle.digest}: {'sound' if not problems else 'DAMAGED'}")
    if problems:
        raise FailedError("\n  - ".join([f"{bundle.path} is damaged; release its source again:", *problems]))


def prune(
    keep: int = typer.Option(5, min=0, help="How many of the newest bundles to keep beside the protected ones."),
    work: bool = typer.Option(False, "--work", help="Remove the cached step outputs too."),
    store: str | None = STORE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Remove old bundles; never one that an alias, recent history or a worker names."""
    folder = resolve_store(store)
    bundles = _open(folder)
    bundles.reconcile()
    removed = bundles.prune(keep)
    outputs = 0
    if work:
        configure_environment(folder)
        from tasks.bundle import remove_work

        outputs = remove_work(folder.work)
    if as_json:
        emit_json({"removed": removed, "step_outputs_removed": outputs})
    else:
        emit_line(f"removed {len(removed)} bundles and {outputs} step outputs" + "".join(f"\n  {d}" for d in removed))


def promote(
    digest: str = typer.Argument(..., metavar="DIGEST", help="A digest, or its start."),
    alias: str = ALIAS_OPTION,
    force: bool = typer.Option(False, "--force", help="Promote though gates failed or are missing."),
    store: str | None = STORE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Point an alias at a bundle; running workers take it up."""
    folder = resolve_store(store)
    _check_alias(alias)
    _open(folder)
    configure_environment(folder)
    from tasks.promote import promote_bundle
    from tasks.tracking import Tracking

    answer = promote_bundle(folder.root, digest, alias, "promoted by hand", Tracking.of_store(folder.root), force=force)
    _answer(answer.model_dump(), as_json)
    if not answer.promoted:
        raise FailedError(answer.message)


def rollback(alias: str = ALIAS_OPTION, store: str | None = STORE_OPTION, as_json: bool = JSON_OPTION) -> None:
    """Point an alias at the bundle before; running workers take it up."""
    folder = resolve_store(store)
    _check_alias(alias)
    _open(folder)
    configure_environment(folder)
    from tasks.promote import rollback_alias
    from tasks.tracking import Tracking

    answer = rollback_alias(folder.root, alias, "rolled back by hand", Tracking.of_store(folder.root))
    _answer(answer.model_dump(), as_json)
    if not answer.promoted:
        raise FailedError(answer.message)


def status(
    store: str | None = STORE_OPTION,
    log_pending: bool = typer.Option(False, "--log-pending", help="Log to MLflow what could not be logged before."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Show aliases, their history, live workers, and evidence that MLflow has not seen."""
    folder = resolve_store(store)
    bundles = _open(folder)
    configure_environment(folder)
    from serving.worker_registry import live_workers
    from tasks.promote import mirror
    from tasks.track import flush_pending, pending
    from tasks.tracking import Tracking

    tracking = Tracking.of_store(folder.root)
    logged = [tracked.run_id for tracked in flush_pending(tracking)] if log_pending else []
    if logged:
        # The aliases moved while MLflow did not know the versions yet.
        for alias, digest in bundles.aliases().items():
            mirror(tracking, digest, alias)
    answer: dict[str, Any] = {
        "store": str(folder.root),
        "aliases": bundles.aliases(),
        "workers": [worker.model_dump() for worker in live_workers(folder.root)],
        "history": [move.model_dump() for move in bundles.history()],
        "mlflow_uri": tracking.uri,
        "mlflow_pending": [str(path) for path in pending(tracking)],
        "mlflow_logged_now": logged,
    }
    if as_json:
        emit_json(answer)
        return
    emit_table(f"Aliases in {folder.root}", ["alias", "digest"], [list(item) for item in answer["aliases"].items()])
    emit_table(
        "Workers",
        ["pid", "url", "serves", "follows", "state"],
        [[w["pid"], w["url"], (w["digest"] or "-")[:12], w["alias"], w["state"]] for w in answer["workers"]],
    )
    emit_table(
        "Moves",
        ["time", "alias", "move", "digest", "before", "reason"],
        [
            [m["time"], m["alias"], m["kind"], m["digest"][:12], (m["previous"] or "-")[:12], m["reason"]]
            for m in answer["history"]
        ],
    )
    if answer["mlflow_pending"]:
        emit_line("Not in MLflow yet (log with --log-pending):\n  " + "\n  ".join(answer["mlflow_pending"]))


def _open(folder: Store) -> BundleStore:
    if not folder.root.is_dir():
        raise UsageError(f"no store at {folder.root}; make one with `pypto-deploy release`, or name it with --store")
    from serving.store import BundleStore

    return BundleStore(folder.root)


def _check_alias(alias: str) -> None:
    if alias not in ALIASES:
        raise UsageError(f"--alias {alias!r}: expected one of {', '.join(ALIASES)}")


def _summary(bundle: Bundle, bundles: BundleStore) -> dict[str, Any]:
    evidence = bundle.manifest.evidence
    quality, tpot = evidence.quality or {}, evidence.tpot or {}
    return {
        "digest": bundle.digest,
        "name": bundle.name,
        "created": evidence.created,
        "aliases": sorted(alias for alias, digest in bundles.aliases().items() if digest == bundle.digest),
        "perplexity_ratio": quality.get("perplexity_ratio"),
        "tpot_ms": tpot.get("tpot_ms"),
        "platform": tpot.get("platform"),
        "gates_passed": all(gate["passed"] for gate in evidence.gates) if evidence.gates else None,
    }


def _answer(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(answer)
    else:
        emit_line(answer["message"])
