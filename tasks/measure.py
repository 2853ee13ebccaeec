"""The speed step: TPOT and TTFT of a bundle, measured over HTTP or estimated from the cost model, never mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from serving.bench import describe_machine, measure_tpot
from serving.executor import ExecutorKind
from serving.launch import launched_worker
from tasks import progress
from tasks.caching import STEP_TASK
from tasks.platforms import Platform
from tasks.steps import StepRecord, run_step, step_key, write_json

EXECUTORS: dict[str, ExecutorKind] = {"cpu": "cpu", "a2a3": "pypto"}
SIMULATED = "a2a3 simulated"


def speed_key(bundle_digest: str, platform: Platform) -> str:
    """Content key of the step: the bundle, the platform, and for measured ones the machine."""
    machine = describe_machine() if platform in EXECUTORS else {}
    return step_key("tpot", ("quantize", "kernels", "serving"), bundle=bundle_digest, platform=platform, **machine)


def measure_speed(
    work: Path, key: str, store: Path, digest: str, platform: Platform, layers: int, programs: list[dict[str, Any]]
) -> StepRecord:
    """TPOT and TTFT in milliseconds as facts, with `platform` saying how they came about.

    Measured platforms start a worker on the bundle and run the protocol of `serving.bench`; `sim` adds up the
    programs' estimates.
    """

    def build(out: Path) -> dict[str, Any]:
        if platform in EXECUTORS:
            with launched_worker(store, digest, executor=EXECUTORS[platform]) as worker:
                facts = measure_tpot(worker.url, platform_name=platform, progress=progress.advance).to_json()
        else:
            facts = simulated_tpot(layers, programs)
        out.mkdir()
        write_json(out / "tpot.json", facts)
        return facts

    return run_step(work, "tpot", key, build)


def simulated_tpot(layers: int, programs: list[dict[str, Any]]) -> dict[str, Any]:
    """Estimated time of one decode step: `layers` decode layers and the LM head, in milliseconds.

    Each program counts with the larger of its simulated time and its bytes over 1.6 TB/s (`estimate_us`), since the
    cost model has no bandwidth limit. There is no TTFT: prefill is not simulated.
    """
    times_us = {program["name"]: program["estimate_us"] for program in programs}
    step_us = layers * times_us["decode_layer"] + times_us["lm_head_greedy"]
    return {"platform": SIMULATED, "tpot_ms": step_us / 1000, "ttft_ms": None, "requests": [], "programs_us": times_us}


@task(name="measure speed", **STEP_TASK)
def speed_step(
    step: str,
    key: str,
    work: str,
    store: str,
    digest: str,
    platform: Platform,
    layers: int,
    programs: list[dict[str, Any]],
) -> StepRecord:
    """Prefect task over `measure_speed`, cached under `key`."""
    return measure_speed(Path(work), key, Path(store), digest, platform, layers, programs)
