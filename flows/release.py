"""The release flow: a source checkpoint in, a measured, gated and promoted bundle out.

Every long step is a Prefect task whose result is cached by the content that went in; a rerun, after a kill or a month
later, does again only what has changed. The flow reads like its table of contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import State, flow
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from flows import console
from flows.reaper import no_orphans
from flows.settings import NAME_PATTERN, resolve_store
from tasks.platforms import Platform
from tasks.steps import StepRecord, find_record

Promote = Literal["auto", "manual", "never"]


@flow(name="release", flow_run_name="{source}", persist_result=False, log_prints=False, validate_parameters=True)
def release(
    source: Annotated[str, Field(min_length=1)],
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")] | None = None,
    recipe: dict[str, Any] | str | None = None,
    platform: Platform = "cpu",
    store: str | None = None,
    promote: Promote = "auto",
    quality_tokens: Annotated[int, Field(ge=64)] = 2048,
) -> State[dict[str, Any]]:
    """Release `source` (a checkpoint directory or `.gguf` file) to the store; the result is the release as JSON values.

    `recipe` is a file path or the recipe itself. `platform` says where TPOT comes from: `cpu` and `a2a3` are measured
    over HTTP, `sim` is PyPTO's cost model. `promote`: `auto` moves the champion when the gates pass, `manual` stops at
    the candidate, `never` only stores the bundle. A failed gate ends the run in the state "Rejected" (`promoted` is
    false in the result); bad input and a program that fails to verify raise.
    """
    # The layers below are imported here and not at the top: a deployment's start is dominated by imports.
    from flows.inputs import check_inputs
    from serving.store import CHAMPION
    from tasks import bundle, evidence, gate, measure, programs, quality, quantize, stage, track
    from tasks import promote as promotion
    from tasks import source as sources
    from tasks.errors import ProgramsFailedError
    from tasks.tracking import Tracking

    inputs = check_inputs(source, name, recipe, platform)
    release_name, chosen = inputs.name, inputs.recipe
    folder = resolve_store(store)
    tracking = Tracking.of_store(folder.root)
    recipe_json = chosen.model_dump(mode="json")
    lines = console.current()
    with no_orphans():
        with lines.step("check source") as line:
            origin = sources.identify_source(source, str(folder.work))
            line.outcome = f"digest {origin.digest[:12]}"
        checkpoint = cached(
            quantize.quantize_step,
            folder.work,
            "quantize",
            quantize.quantize_key(origin, chosen),
            source=origin.path,
            recipe=recipe_json,
        )
        slabs = cached(
            stage.stage_step,
            folder.work,
            "stage",
            stage.stage_key(checkpoint.facts["digest"], chosen.down),
            checkpoint=str(checkpoint.out),
            down=chosen.down,
        )
        try:
            verified = cached(
                programs.programs_step,
                folder.work,
                "programs",
                programs.key_of_checkpoint(checkpoint.out, chosen.down),
                checkpoint=str(checkpoint.out),
                down=chosen.down,
            )
        except ProgramsFailedError as error:
            track.log_failure(tracking, evidence.failed_programs(release_name, origin, chosen, error.reports))
            raise
        measured_quality = cached(
            quality.quality_step,
            folder.work,
            "quality",
            quality.quality_key(origin.digest, slabs.facts["digest"], quality_tokens),
            source=origin.path,
            slabs=str(slabs.out),
            max_tokens=quality_tokens,
        )
        with lines.step("bundle") as line:
            stored = bundle.bundle_step(
                str(folder.root), release_name, origin.digest, recipe_json, checkpoint, slabs, verified
            )
            line.outcome = f"{'reused' if stored.existed else 'done'}, digest {stored.digest[:12]}"
        speed = cached(
            measure.speed_step,
            folder.work,
            "tpot",
            measure.speed_key(stored.digest, platform),
            store=str(folder.root),
            digest=stored.digest,
            platform=platform,
            layers=stored.layers,
            programs=verified.facts["programs"],
        )
        with lines.step("gate") as line:
            gates = gate.gate_step(recipe_json["gates"], measured_quality.facts, speed.facts["tpot_ms"])
            failed = [result.name for result in gates if not result.passed]
            line.outcome = f"{len(gates) - len(failed)} of {len(gates)} hold" + (
                f"; failed: {', '.join(failed)}" if failed else ""
            )
        run_id = flow_run.get_id()
        found = evidence.collect(
            evidence.Findings(
                name=release_name,
                digest=stored.digest,
                platform=platform,
                source=origin,
                recipe=chosen,
                quantize=checkpoint.facts,
                slab_bytes=slabs.facts["bytes"],
                programs=verified.facts["programs"],
                quality=measured_quality.facts,
                tpot=speed.facts,
                gates=gates,
                prefect_run_id=run_id,
            )
        )
        with lines.step("log to MLflow") as line:
            reports = Path(stored.path) / "reports"
            bundle.make_reports(found, reports, measured_quality.out / quality.FINDINGS_FILE, verified.out)
            tracked = track.track_step(tracking, found, str(reports))
            line.outcome = f"run {tracked.run_id}" if tracked.run_id else "not available; the evidence is kept"
            bundle.evidence_step(stored.path, found, tracked.run_id)
        # An MLflow that did not answer a moment ago is not asked again; its aliases follow when the evidence is logged.
        mirrored = None if tracked.problem else tracking.model_dump()
        with lines.step("promote") as line:
            moved = [
                promotion.promote_step(str(folder.root), stored.digest, alias, f"release {run_id}", mirrored)
                for alias in aliases_to_move(promote, passed=found["passed"])
            ]
            outcome = "; ".join(step.message for step in moved) or why_not(promote, failed)
            line.outcome = outcome
    champion = moved[-1] if moved and moved[-1].alias == CHAMPION else None
    answer = {
        "digest": stored.digest,
        "name": release_name,
        "path": stored.path,
        "promoted": champion is not None and champion.promoted,
        "promotion": outcome,
        "gates": found["gates"],
        "quality": measured_quality.facts,
        "programs": verified.facts["programs"],
        "platform": platform,
        "tpot": speed.facts,
        "tpot_ms": speed.facts["tpot_ms"],
        "ttft_ms": speed.facts["ttft_ms"],
        "mlflow_run_id": tracked.run_id,
        "mlflow_model_version": tracked.model_version,
        "mlflow_uri": tracking.uri,
        "tracking_problem": tracked.problem,
        "prefect_run_id": run_id,
    }
    name_of_state = "Rejected" if failed else "Completed"
    return Completed(name=name_of_state, message=outcome, data=answer)


def cached(task: Any, work: Path, step: str, key: str, **parameters: Any) -> StepRecord:
    """Run a step task, or reuse what it left under `key` after checking that the files are what was recorded."""
    with console.current().step(step) as line:
        whole = find_record(work, step, key) is not None
        state = task.with_options(refresh_cache=not whole)(
            step=step, key=key, work=str(work), **parameters, return_state=True
        )
        record: StepRecord = state.result()
        line.outcome = f"{'reused' if whole else 'done'}, {str(record.facts.get('digest', record.digest))[:12]}"
    return record


def aliases_to_move(promote: Promote, *, passed: bool) -> list[Literal["candidate", "champion"]]:
    """Which aliases a release moves, in order: both, the candidate alone, or none."""
    if not passed or promote == "never":
        return []
    return ["candidate", "champion"] if promote == "auto" else ["candidate"]


def why_not(promote: Promote, failed_gates: list[str]) -> str:
    """Why nothing was promoted, for people."""
    if failed_gates:
        return f"not promoted: {', '.join(failed_gates)} failed"
    return "not promoted: asked for --promote never" if promote == "never" else "not promoted"
