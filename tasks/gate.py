"""The gates: what a release must hold to be promoted, decided from measured facts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect import task
from pydantic import BaseModel, ConfigDict

from quantize.recipe import Gates


class GateResult(BaseModel):
    """One gate: what was measured, the bound, and whether it holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    value: float | None
    bound: float
    direction: str
    passed: bool


def decide(gates: Gates, quality: Mapping[str, Any], tpot_ms: float | None) -> list[GateResult]:
    """Compare the facts with the recipe's bounds; a gate whose value was not measured does not pass.

    `quality` has `perplexity_ratio`, `mean_kl` and `top1_agreement`; `tpot_ms` is a median in milliseconds and is
    gated only if the recipe bounds it.
    """
    results = [
        _at_most("perplexity_ratio", quality.get("perplexity_ratio"), gates.max_perplexity_ratio),
        _at_most("mean_kl", quality.get("mean_kl"), gates.max_mean_kl),
        _at_least("top1_agreement", quality.get("top1_agreement"), gates.min_top1_agreement),
    ]
    if gates.max_tpot_ms is not None:
        results.append(_at_most("tpot_ms", tpot_ms, gates.max_tpot_ms))
    return results


def _at_most(name: str, value: float | None, bound: float) -> GateResult:
    # A NaN compares false, so a broken measurement fails its gate.
    return GateResult(name=name, value=value, bound=bound, direction="<=", passed=value is not None and value <= bound)


def _at_least(name: str, value: float | None, bound: float) -> GateResult:
    return GateResult(name=name, value=value, bound=bound, direction=">=", passed=value is not None and value >= bound)


@task(name="gate", persist_result=False)
def gate_step(gates: dict[str, Any], quality: dict[str, Any], tpot_ms: float | None) -> list[GateResult]:
    """Prefect task over `decide`."""
    return decide(Gates.model_validate(gates), quality, tpot_ms)
