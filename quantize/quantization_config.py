"""The `quantization_config` of compressed-tensors: ours written minimally, others' read as far as it can be honoured.

One scheme is honoured: W8A8, static INT8 weights symmetric per output channel, dynamic INT8 activations symmetric per
token, stored as `int-quantized`. Keys that do not change the arithmetic are tolerated; those that do are refused by
name. Matching of `ignore` and `targets` follows compressed-tensors: an exact module name, `re:` and a pattern matched
from the start of the name, or the class name `Linear`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex

from quantize.errors import QuantizeError

CONFIG_KEYS = ("quantization_config", "compression_config")
HONOURED_FORMATS = ("int-quantized", "naive-quantized")
MAX_PATTERN_CHARACTERS = 500
MATCH_TIMEOUT_S = 0.5
PROBES = ("", "model.layers.000.self_attn.q_proj", "model.layers.000.mlp.down_proj", "lm_head")
"""Names that a pattern is tried on when it is read, so that one without end is refused there."""
HONOURED_PRESETS = ("W8A8", "INT8")


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a regular expression matches `name` from its start, as `re.match` has it.

    Patterns come from files, and some take exponential time: matching is bounded. Raises re.error for a pattern that is
    not valid, too long or nested too deeply, QuantizeError for one that does not finish.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise re.error(f"it has {len(pattern)} characters, expected at most {MAX_PATTERN_CHARACTERS}")
    try:
        re.compile(pattern)  # the syntax is that of compressed-tensors, which uses `re`
        return regex.match(pattern, name, timeout=MATCH_TIMEOUT_S) is not None
    except TimeoutError:
        raise QuantizeError(
            f"the pattern {pattern[:80]!r} takes more than {MATCH_TIMEOUT_S} s on {name[:80]!r}; "
            "write it without nested repetitions"
        ) from None
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise re.error(str(error) or type(error).__name__) from None


def matches(entry: str, module: str) -> bool:
    """Whether an `ignore` or `targets` entry means the Linear module `module`; raises as `matches_pattern` does."""
    if entry.startswith("re:"):
        return matches_pattern(entry.removeprefix("re:"), module)
    return entry in (module, "Linear")


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint says it is quantized; `problems` is empty when it is the W8A8 scheme honoured here."""

    method: str
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())

    def is_quantized(self, module: str) -> bool:
        """Whether the Linear module of this name is stored as INT8."""
        return any(matches(entry, module) for entry in self.targets) and not any(
            matches(entry, module) for entry in self.ignore
        )

    def unmatched_targets(self, modules: Iterable[str]) -> list[str]:
        """Targets that match none of `modules`."""
        names = list(modules)
        return [entry for entry in self.targets if not any(matches(entry, name) for name in names)]


def w8a8_quantization_config(ignore: Sequence[str]) -> dict[str, Any]:
    """The minimal `quantization_config` of a W8A8 checkpoint whose modules `ignore` (exact names) are not quantized."""
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": list(ignore),
    }


def _strings(value: Any, path: str, problems: list[str]) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        problems.append(f"{path}: found {json.dumps(value)[:80]}, expected a list of names")
        return ()
    for entry in value:
        try:
            for probe in PROBES:
                matches(entry, probe)
        except (re.error, QuantizeError) as error:
            problems.append(f"{path}: {entry[:80]!r} is not a valid pattern: {error}")
            return ()
    return tuple(value)


def _check_args(args: Any, expected: Mapping[str, Any], path: str, problems: list[str]) -> None:
    """Compare the settings of weights or activations; absent keys have compressed-tensors' defaults."""
    if not isinstance(args, Mapping):
        problems.append(f"{path}: found {json.dumps(args)[:80]}, expected the settings of an INT8 scheme")
        return
    defaults: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    for key, wanted in expected.items():
        found = args.get(key, defaults.get(key))
        if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
            problems.append(f"{path}.{key}: found {json.dumps(found)[:80]}, expected {json.dumps(wanted)}")


def _read_group(name: str, group: Any, path: str, problems: list[str]) -> tuple[str, ...]:
    """Check one config group; returns its targets."""
    if isinstance(group, list):  # a preset: {"W8A8": ["Linear"]}
        if name.upper() not in HONOURED_PRESETS:
            problems.append(f"{path}: preset {name[:40]!r} is not supported, expected W8A8")
        return _strings(group, path, problems)
    if not isinstance(group, Mapping):
        problems.append(f"{path}: found {json.dumps(group)[:80]}, expected a scheme")
        return ()
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    _check_args(group.get("weights"), {**common, "strategy": "channel", "dynamic": False}, f"{path}.weights", problems)
    activations = {**common, "strategy": "token", "dynamic": True}
    _check_args(group.get("input_activations"), activations, f"{path}.input_activations", problems)
    if group.get("output_activations") is not None:
        problems.append(f"{path}.output_activations: quantized outputs are not supported, expected null")
    if group.get("format") not in (None, *HONOURED_FORMATS):
        problems.append(f"{path}.format: found {json.dumps(group['format'])[:80]}, expected int-quantized")
    targets = _strings(group.get("targets"), f"{path}.targets", problems)
    if not targets:
        problems.append(f'{path}.targets: nothing is named, expected for instance ["Linear"]')
    return targets


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization of a parsed `config.json`; None when the checkpoint is not quantized.

    Accepts `quantization_config` and the older `compression_config` (fields directly or one level down). Never
    raises: what cannot be honoured is in `problems`, each naming the field.
    """
    key = next((key for key in CONFIG_KEYS if config.get(key) is not None), None)
    if key is None:
        return None
    section: Any = config[key]
    if isinstance(section, Mapping) and isinstance(section.get("quantization_config"), Mapping):
        section, sparsity = section["quantization_config"], section.get("sparsity_config")
        key += ".quantization_config"
    else:
        sparsity = section.get("sparsity_config") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping):
        return Quantization("unknown", problems=(f"{key}: found {json.dumps(section)[:80]}, expected an object",))
    method = section.get("quant_method") or ("compressed-tensors" if "config_groups" in section else "unknown")
    if method != "compressed-tensors":
        return Quantization(
            str(method)[:40],
            problems=(f'{key}.quant_method: found {json.dumps(method)[:80]}, expected "compressed-tensors"',),
        )
    problems: list[str] = []
    if section.get("format", "int-quantized") not in HONOURED_FORMATS:
        problems.append(f'{key}.format: found {json.dumps(section["format"])[:80]}, expected "int-quantized"')
    for unsupported in ("kv_cache_scheme", "transform_config"):
        if section.get(unsupported):
            problems.append(f"{key}.{unsupported}: found {json.dumps(section[unsupported])[:80]}, expected null")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        problems.append(f"{key}.sparsity_config.format: found {json.dumps(sparsity['format'])[:80]}, expected dense")
    groups = section.get("config_groups")
    targets: list[str] = []
    if not isinstance(groups, Mapping) or not groups:
        problems.append(f"{key}.config_groups: found {json.dumps(groups)[:80]}, expected at least one group")
    else:
        for name, group in groups.items():
            targets += _read_group(str(name), group, f"{key}.config_groups.{name}", problems)
    ignore = _strings(section.get("ignore"), f"{key}.ignore", problems)
    return Quantization("compressed-tensors", tuple(targets), ignore, tuple(problems))
