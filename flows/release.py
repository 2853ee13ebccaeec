"""The release flow: a source checkpoint in, a measured, gated and promoted bundle out.

Every step is a Prefect task whose result is cached by the content that went in; a rerun, after a kill or a month
later, does again only what has changed. The flow reads like its table of contents.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import console
from flows.settings import NAME_PATTERN, check_environment, check_name, resolve_store
from tasks.steps import StepRecord, find_record

logger = logging.getLogger(__name__)

Platform = Literal["cpu", "sim", "a2a3"]
Promote = Literal["auto", "manual", "never"]


@flow(name="release", persist_result=False, log_prints=False, validate_parameters=True)
def release(
    source: Annotated[str, Field(min_length=1)],
    name: Annotated[str, Field(pattern=NAME_PATTERN.pattern)] | None = None,
    recipe: dict[str, Any] | str | None = None,
    platform: Platform = "cpu",
    store: str | None = None,
    promote: Promote = "auto",
    quality_tokens: Annotated[int, Field(ge=64)] = 2048,
) -> dict[str, Any]:
    """Release `source` (a checkpoint directory or `.gguf` file) to the store; returns the release as JSON values.

    `recipe` is a file path or the recipe itself. `platform` says where TPOT comes from: `cpu` and `a2a3` are measured
    over HTTP, `sim` is PyPTO's cost model. `promote`: `auto` moves the champion when the gates pass, `manual` stops at
    the candidate, `never` only stores the bundle. A failed gate is in the answer (`promoted` false); bad input and a
    program that fails to verify raise.
    """
    # Heavy libraries are imported here and not at the top: a deployment's start is dominated by imports.
    from flows.reaper import no_orphans
    from quantize.recipe import read_recipe
    from tasks import bundle, gate, measure, promote as promotion, quality, quantize, source as sources, stage, track
    from tasks import programs as program_tasks
    from tasks.errors import ProgramsFailedError

    check_environment()
    root = resolve_store(store)
    chosen = read_recipe(recipe)
    measure.check_platform(platform)
    release_name = check_name(name or Path(source).resolve().name.removesuffix(".gguf"))
    tracking = track.Tracking.of_store(root.root)
    work = str(root.work)
    with no_orphans():
        with console.current().step("check source") as line:
            origin = sources.identify_source(source, work)
            line.outcome = f"digest {origin.digest[:12]}"

        checkpoint = cached_step(
            quantize.quantize_step,
            root.work,
            "quantize",
            quantize.quantize_key(origin, chosen),
            source=origin.path,
            recipe=chosen.model_dump(mode="json"),
        )
        slabs = cached_step(
            stage.stage_step,
            root.work,
            "stage",
            stage.stage_key(checkpoint.facts["digest"], chosen.down),
            checkpoint=str(checkpoint.out),
            down=chosen.down,
        )
        programs = cached_step(
            program_tasks.programs_step,
            root.work,
            "programs",
            program_tasks.key_of_checkpoint(checkpoint.out, chosen.down),
            checkpoint=str(checkpoint.out),
            down=chosen.down,
        )
        measured_quality = cached_step(
            quality.quality_step,
            root.work,
            "quality",
            quality.quality_key(origin.digest, slabs.facts["digest"], quality_tokens),
            source=origin.path,
            slabs=str(slabs.out),
            max_tokens=quality_tokens,
        )
    return {}


def cached_step(task: Any, work: Path, step: str, key: str, **parameters: Any) -> StepRecord:
    """Run a step task, or reuse what it left under `key` after checking that the files are what was recorded."""
    with console.current().step(step) as line:
        whole = find_record(work, step, key) is not None
        state = task.with_options(refresh_cache=not whole)(
            step=step, key=key, work=str(work), **parameters, return_state=True
        )
        record: StepRecord = state.result()
        reused = state.name == "Cached" or whole
        line.outcome = f"{'reused' if reused else 'done'}, {record.digest[:12]}"
    return record
