"""Cases 11 and 12: names match as compressed-tensors matches them; others' sections are read as far as they hold."""

from __future__ import annotations

import copy
import json
import re
import time
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import is_match

from quantize.errors import QuantizeError
from quantize.quantization_config import matches, matches_pattern, parse_quantization, w8a8_quantization_config

MODULES = [
    "lm_head",
    *(f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")),
]


def changed(path: str, value: Any) -> dict[str, Any]:
    """Our own section with one field replaced; `path` is dotted within group_0, or starts with a slash at the top."""
    section = copy.deepcopy(w8a8_quantization_config(["lm_head"]))
    holder: Any = section if path.startswith("/") else section["config_groups"]["group_0"]
    *parents, last = path.removeprefix("/").split(".")
    for parent in parents:
        holder = holder[parent]
    holder[last] = value
    return {"quantization_config": section}


def test_ours_reads_back_and_names_exactly_what_was_ignored() -> None:
    read = parse_quantization(
        {"quantization_config": w8a8_quantization_config(["lm_head", "model.layers.0.mlp.down_proj"])}
    )
    assert read is not None
    assert read.problems == ()
    assert [name for name in MODULES if not read.is_quantized(name)] == ["lm_head", "model.layers.0.mlp.down_proj"]
    assert read.unmatched_targets(MODULES) == []


def test_ours_is_a_valid_section_for_compressed_tensors() -> None:
    theirs = QuantizationConfig.model_validate(w8a8_quantization_config(["lm_head"]))
    scheme = theirs.config_groups["group_0"]
    assert (theirs.format, theirs.ignore) == ("int-quantized", ["lm_head"])
    assert scheme.weights.strategy == "channel"
    assert (scheme.input_activations.strategy, scheme.input_activations.dynamic) == ("token", True)


def test_no_section_is_no_quantization() -> None:
    assert parse_quantization({}) is None
    assert parse_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    "entry",
    [
        "lm_head",
        "re:.*down_proj$",
        "re:down_proj",
        r"re:model\.layers\.1\.",
        "Linear",
        "q_proj",
        "re:.*",
        "head",
        "re:lm",
    ],
)
def test_names_match_as_in_compressed_tensors(entry: str) -> None:
    module = torch.nn.Linear(1, 1)
    for name in MODULES:
        assert matches(entry, name) == is_match(name, module, entry), name


FULL = QuantizationConfig.model_validate(w8a8_quantization_config(["lm_head"])).model_dump(mode="json")
TOLERATED = {
    "what compressed-tensors itself dumps": {"quantization_config": FULL},
    "unknown keys": changed("/future", {"x": 1}),
    "unknown keys in the weights": changed("weights.future", 3),
    "observer null": changed("weights.observer", None),
    "observer minmax": changed("weights.observer", "minmax"),
    "another group name": {
        "quantization_config": {
            **w8a8_quantization_config([]),
            "config_groups": {"W8A8": w8a8_quantization_config([])["config_groups"]["group_0"]},
        }
    },
    "a preset": {"quantization_config": {**w8a8_quantization_config([]), "config_groups": {"W8A8": ["Linear"]}}},
    "no quant_method": {
        "quantization_config": {k: v for k, v in w8a8_quantization_config([]).items() if k != "quant_method"}
    },
    "ignore null": changed("/ignore", None),
    "naive-quantized": changed("/format", "naive-quantized"),
    "group format": changed("format", "int-quantized"),
    "compression_config": {"compression_config": w8a8_quantization_config([])},
    "nested compression_config": {
        "compression_config": {
            "quantization_config": w8a8_quantization_config([]),
            "sparsity_config": {"format": "dense"},
        }
    },
    "dense sparsity": changed("/sparsity_config", {"format": "dense"}),
    "empty sparsity": changed("/sparsity_config", {}),
    "kv_cache_scheme null": changed("/kv_cache_scheme", None),
}


@pytest.mark.parametrize("name", TOLERATED)
def test_harmless_differences_are_tolerated(name: str) -> None:
    read = parse_quantization(TOLERATED[name])
    assert read is not None
    assert read.problems == ()
    assert read.is_quantized("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("weights.num_bits", 4),
        ("weights.type", "float"),
        ("weights.symmetric", False),
        ("weights.strategy", "group"),
        ("weights.strategy", "tensor"),
        ("weights.dynamic", True),
        ("input_activations.dynamic", False),
        ("input_activations.dynamic", "local"),
        ("input_activations.dynamic", 1),
        ("input_activations.symmetric", False),
        ("input_activations.strategy", "tensor"),
        ("weights", None),
        ("input_activations", None),
        ("output_activations", {"num_bits": 8}),
        ("format", "pack-quantized"),
        ("targets", []),
        ("targets", "Linear"),
        ("targets", ["re:("]),
        ("/quant_method", "gptq"),
        ("/format", "pack-quantized"),
        ("/kv_cache_scheme", {"num_bits": 8}),
        ("/transform_config", {"a": 1}),
        ("/config_groups", {}),
        ("/config_groups", {"W4A16": ["Linear"]}),
        ("/ignore", "lm_head"),
        ("/ignore", ["re:["]),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_field(path: str, value: Any) -> None:
    read = parse_quantization(changed(path, value))
    assert read is not None
    field = "W4A16" if "W4A16" in json.dumps(value) else path.removeprefix("/")
    assert any(field in problem for problem in read.problems), read.problems


@pytest.mark.parametrize(
    "section", [True, [], [1], "int8", {}, {"config_groups": 3}, {"quant_method": 3}, {"quant_method": {}}]
)
def test_a_section_of_any_form_is_answered_with_problems(section: Any) -> None:
    read = parse_quantization({"quantization_config": section})
    assert read is not None
    assert read.problems


def test_a_sparse_checkpoint_is_refused() -> None:
    read = parse_quantization(changed("/sparsity_config", {"format": "sparse-24-bitmask"}))
    assert read is not None
    assert any("sparsity_config" in problem for problem in read.problems)


def test_a_target_that_matches_nothing_is_reported() -> None:
    read = parse_quantization(changed("targets", ["Linear", "re:.*experts.*"]))
    assert read is not None
    assert read.unmatched_targets(MODULES) == ["re:.*experts.*"]


ENDLESS = r"re:(([a-z]|[a-z_.0-9]|\w|\.)*)*[^a-z]$"


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        (ENDLESS, "takes more than"),
        ("re:" + "a" * 501, "501 characters, expected at most 500"),
        ("re:" + "(" * 400, "not a valid pattern"),
        ("re:" + "(?:" * 160, "not a valid pattern"),
        ("re:[", "not a valid pattern"),
    ],
)
def test_a_pattern_without_end_or_sense_is_refused_in_bounded_time(pattern: str, told: str) -> None:
    started = time.process_time()
    quantization = parse_quantization({"quantization_config": {**w8a8_quantization_config([]), "ignore": [pattern]}})
    assert quantization is not None
    assert told in quantization.problems[0]
    assert time.process_time() - started < 10
    with pytest.raises((QuantizeError, re.error)):
        matches(pattern, "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    "pattern", [r".*down_proj$", r"model\.layers\.\d+\.(self_attn|mlp)\..*", r"(?i)LM_HEAD", r"[^m]"]
)
def test_bounded_matching_is_that_of_re(pattern: str) -> None:
    for name in ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.12.self_attn.q_proj", ""):
        assert matches_pattern(pattern, name) == (re.match(pattern, name) is not None)
