"""What checking a program found, as data: per check and per program, JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

TIMELINE_FILE = "timeline.json"
"""Name of the simulated timeline among a report's artifacts."""
HBM_BYTES_PER_US = 1.6e6
"""HBM bandwidth of the Ascend 910B2, 1.6 TB/s: the cost model has no such limit, so the bound is computed apart."""


@dataclass(frozen=True)
class CheckResult:
    """One check of a program at one shape, in one subprocess.

    `kind` is "small" and "own width" (verified against the golden) or "simulated" (cost model only). `outputs` holds
    the largest absolute difference of every output from its golden, `tolerances` what was allowed; `passes` are the
    compiler passes whose graph was executed and compared, the tensor graph first; `rows` counts the comparisons made in
    them. `simulated_us` is the cost model's end-to-end time. `note` says how the check is reduced, if it is.
    """

    kind: str
    key: str
    shape: dict[str, Any]
    ok: bool
    error: str = ""
    note: str = ""
    passes: tuple[str, ...] = ()
    rows: int = 0
    outputs: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, str] = field(default_factory=dict)
    simulated_us: float | None = None
    hbm_bytes: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    cached: bool = False
    artifacts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CheckResult:
        """Read back `to_json`; raises ValueError naming unknown or missing fields."""
        known = _known_fields(cls, values)
        return cls(**{**known, "passes": tuple(known["passes"]), "artifacts": tuple(known["artifacts"])})


@dataclass(frozen=True)
class ProgramReport:
    """The verdict on one program of a model.

    `status` is READY when every check passed. `passes` are those verified at the small shape; each of `checks` lists
    its own. `simulated_us` is the cost model's time at the simulated shape, `hbm_bound_us` the bytes moved there at
    1.6 TB/s, and `estimate_us` the larger of the two. `artifacts` are paths of files worth keeping: the compiled
    program and its simulated timeline.
    """

    name: str
    key: str
    status: Literal["READY", "FAILED"]
    passes: tuple[str, ...]
    checks: tuple[dict[str, Any], ...]
    simulated_us: float | None
    hbm_bytes: int
    hbm_bound_us: float
    estimate_us: float | None
    error: str
    seconds: float
    cached: bool
    artifacts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProgramReport:
        """Read back `to_json`; raises ValueError naming unknown or missing fields."""
        known = _known_fields(cls, values)
        return cls(**{**known, **{name: tuple(known[name]) for name in ("passes", "checks", "artifacts")}})


def summarize(name: str, key: str, results: list[CheckResult]) -> ProgramReport:
    """Join the checks of one program into its report."""
    verified = [result for result in results if result.kind != "simulated"]
    simulated = next((result for result in results if result.kind == "simulated" and result.ok), None)
    passes = verified[0].passes if verified else ()
    hbm_bytes = simulated.hbm_bytes if simulated else 0
    bound_us = round(hbm_bytes / HBM_BYTES_PER_US, 2)
    simulated_us = simulated.simulated_us if simulated else None
    failed = [f"{result.kind}: {result.error}" for result in results if not result.ok]
    return ProgramReport(
        name=name,
        key=key,
        status="FAILED" if failed else "READY",
        passes=passes,
        checks=tuple(result.to_json() for result in results),
        simulated_us=simulated_us,
        hbm_bytes=hbm_bytes,
        hbm_bound_us=bound_us,
        estimate_us=None if simulated_us is None else max(simulated_us, bound_us),
        error="; ".join(failed),
        seconds=round(sum(result.seconds for result in results), 2),
        cached=all(result.cached for result in results),
        artifacts=tuple(path for result in results for path in result.artifacts),
    )


def _known_fields(cls: type[CheckResult] | type[ProgramReport], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {entry.name for entry in fields(cls)}
    if set(values) != names:
        raise ValueError(f"{cls.__name__}: fields {sorted(set(values) ^ names)} are unknown or missing")
    return dict(values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """`values` as JSON would give them back: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
