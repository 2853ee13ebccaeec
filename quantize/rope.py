"""Rotary settings of a parsed `config.json`: one theta and one scaling, from whichever spelling holds them.

transformers writes `rope_parameters`; older checkpoints have `rope_theta` beside `rope_scaling`, whose type may be
called `type`. Readers disagree on which wins when they contradict each other (transformers 5 takes `rope_scaling`, then
`rope_parameters`; readers of the old spelling know only `rope_theta`), so a contradiction is refused rather than one of
the two models chosen. Plain rotary embedding and `llama3` scaling are implemented; other types are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_THETA = 10_000.0
ROPE_TYPES = ("default", "llama3")
HOLDERS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class RopeScaling:
    """`llama3` frequency scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended.

    The bounds are `original_max_position_tokens` divided by `low_freq_factor` and by `high_freq_factor`; see
    `numerics.rope_tables` for the arithmetic.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_tokens: int


@dataclass(frozen=True)
class RopeSettings:
    """Base of the frequencies, and how they are scaled (None: not at all)."""

    theta: float
    scaling: RopeScaling | None


def _show(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def positive_number(value: Any) -> float | None:
    """The value as a positive finite float, or None when it is not one (a huge JSON integer has no float)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if number > 0 and math.isfinite(number) else None


def _rope_type(rope: Mapping[str, Any], key: str, problems: list[str]) -> str | None:
    found = rope.get("rope_type", rope.get("type", "default"))
    if "rope_type" in rope and "type" in rope and rope["type"] != found:
        problems.append(
            f"config.json: {key}: rope_type {_show(found)} and type {_show(rope['type'])} contradict each other; "
            "keep the one the model was trained with"
        )
        return None
    if found not in ROPE_TYPES:
        problems.append(
            f"config.json: {key}: rope type {_show(found)} is not supported, expected one of {', '.join(ROPE_TYPES)}; "
            "use a checkpoint without context extension"
        )
        return None
    return str(found)


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any], key: str, problems: list[str]) -> RopeScaling | None:
    """The `llama3` numbers; an absent original length is the model's longest context, as in transformers."""
    values: dict[str, float] = {}
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        number = positive_number(rope.get(name))
        if number is None:
            found = _show(rope[name]) if name in rope else "nothing"
            problems.append(f"config.json: {key}.{name}: found {found}, expected a positive number (llama3 needs it)")
        else:
            values[name] = number
    length_key = "original_max_position_embeddings"
    lengths = [holder[length_key] for holder in (rope, config) if holder.get(length_key) is not None]
    length = lengths[0] if lengths else config.get("max_position_embeddings")
    if any(other != length for other in lengths[1:]):
        problems.append(f"config.json: {length_key} is {_show(length)} in {key} and {_show(lengths[1])} beside it")
    elif not isinstance(length, int) or isinstance(length, bool) or not 0 < length < 2**40:
        problems.append(f"config.json: {key}.{length_key}: found {_show(length)}, expected a positive integer")
        length = None
    if len(values) < 3 or length is None:
        return None
    if values["factor"] < 1 or values["high_freq_factor"] <= values["low_freq_factor"]:
        problems.append(
            f"config.json: {key}: found factor {values['factor']:g}, low_freq_factor {values['low_freq_factor']:g} and "
            f"high_freq_factor {values['high_freq_factor']:g}, expected a factor of at least 1 and low below high"
        )
        return None
    return RopeScaling(**values, original_max_position_tokens=length)


def _read_holder(config: Mapping[str, Any], key: str, problems: list[str]) -> tuple[Any, RopeScaling | None] | None:
    """Theta (unchecked, None when absent) and scaling of one spelling; None when it is not there or not usable."""
    rope = config.get(key)
    if not rope:
        return None
    if not isinstance(rope, Mapping):
        problems.append(f"config.json: {key}: found {_show(rope)}, expected an object or null")
        return None
    nested = sorted(str(name) for name, value in rope.items() if isinstance(value, Mapping))
    if nested:
        problems.append(f"config.json: {key}: per-layer-type settings ({', '.join(nested)[:80]}) are not supported")
        return None
    kind = _rope_type(rope, key, problems)
    scaling = _scaling(config, rope, key, problems) if kind == "llama3" else None
    return rope.get("rope_theta"), scaling


def parse_rope(config: Mapping[str, Any], problems: list[str]) -> RopeSettings:
    """Read the rotary settings of a parsed `config.json`; appends to `problems` what cannot be honoured.

    Accepts `rope_parameters`, `rope_scaling` with `rope_theta`, or both when they agree.
    """
    for where in (config, *(config.get(key) for key in HOLDERS)):
        factor = where.get("partial_rotary_factor") if isinstance(where, Mapping) else None
        if factor is not None and factor != 1:
            problems.append(
                f"config.json: partial_rotary_factor: found {_show(factor)}, expected 1 (all dimensions rotate)"
            )
    before = len(problems)
    found = {key: settings for key in HOLDERS if (settings := _read_holder(config, key, problems)) is not None}
    thetas = {f"{key}.rope_theta": theta for key, (theta, _) in found.items() if theta is not None}
    if config.get("rope_theta") is not None or (not thetas and "rope_theta" in config):
        thetas["rope_theta"] = config["rope_theta"]
    numbers = {key: positive_number(theta) for key, theta in thetas.items()}
    problems += [
        f"config.json: {key}: found {_show(thetas[key])}, expected a positive number"
        for key, number in numbers.items()
        if number is None
    ]
    if len(set(numbers.values())) > 1:
        told = " and ".join(f"{key} {_show(theta)}" for key, theta in thetas.items())
        problems.append(f"config.json: {told} contradict each other; keep the one the model was trained with")
    scalings = [scaling for _, scaling in found.values()]
    if len(problems) == before and any(scaling != scalings[0] for scaling in scalings):
        problems.append(
            "config.json: rope_scaling and rope_parameters contradict each other; "
            "keep the one the model was trained with"
        )
    theta = next((number for number in numbers.values() if number is not None), DEFAULT_THETA)
    return RopeSettings(theta, scalings[0] if scalings else None)


def both_spellings(config: Mapping[str, Any], settings: RopeSettings) -> dict[str, Any]:
    """The rotary keys of `config.json` for readers of either spelling: old and new side by side, and in agreement."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.theta}
    old: dict[str, Any] = {"rope_theta": settings.theta}
    if settings.scaling is not None:
        numbers = {
            "factor": settings.scaling.factor,
            "low_freq_factor": settings.scaling.low_freq_factor,
            "high_freq_factor": settings.scaling.high_freq_factor,
            "original_max_position_embeddings": settings.scaling.original_max_position_tokens,
        }
        rope = {"rope_type": "llama3", "rope_theta": settings.theta, **numbers}
        old["rope_scaling"] = {"rope_type": "llama3", **numbers}
    return {**{key: value for key, value in config.items() if key not in HOLDERS}, "rope_parameters": rope, **old}
