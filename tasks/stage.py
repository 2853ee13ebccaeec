"""The stage step: W8A8 checkpoint in, kernel-ready slabs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from kernels.contract import DownDtype, fingerprint
from kernels.staging import stage_checkpoint
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.steps import StepRecord, run_step, step_key


def stage_key(checkpoint_digest: str, down: DownDtype) -> str:
    """Content key of the step: the checkpoint's payload digest, the variant and the contract's fingerprint."""
    return step_key(
        "stage", ("quantize", "kernels"), checkpoint=checkpoint_digest, down=down, contract=fingerprint(down)
    )


def stage_weights(work: Path, key: str, checkpoint: Path, down: DownDtype) -> StepRecord:
    """Stage `checkpoint` into slabs; facts: slab digest, the table of tensors, bytes."""

    def build(out: Path) -> dict[str, Any]:
        result = stage_checkpoint(checkpoint, out, down=down, progress=progress.advance)
        return {"digest": result.digest, "tensors": result.tensors, "bytes": result.bytes, "seconds": result.seconds}

    return run_step(work, "stage", key, build)


@task(name="stage", **STEP_TASK)
def stage_step(step: str, key: str, work: str, checkpoint: str, down: DownDtype) -> StepRecord:
    """Prefect task over `stage_weights`, cached under `key`."""
    return stage_weights(Path(work), key, Path(checkpoint), down)
