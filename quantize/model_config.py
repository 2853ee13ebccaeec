"""The shape of a model, read once from `config.json` and trusted from there on.

Whatever changes a model's arithmetic and is not implemented here is refused by name. Defaults of absent keys are those
of transformers' configuration classes; what differs between families is in `families`, rotary settings in `rope`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.errors import CheckpointError
from quantize.families import FAMILIES, Family
from quantize.json_files import read_json_object
from quantize.rope import RopeScaling, parse_rope, positive_number

MAX_LAYERS = 10**4


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder of a supported family (a name of `families.FAMILIES`).

    Sizes are element counts; `eos_token_ids` is the union over config and generation config; `max_position_tokens`
    is the longest context the checkpoint states; `rope_scaling` is None for plain rotary embedding.
    """

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_tokens: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    rope_scaling: RopeScaling | None = None

    @property
    def q_size(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of one of the key and value projections: kv heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one key/value head (the GQA ratio)."""
        return self.num_heads // self.num_kv_heads


DTYPES = ("bfloat16", "float16", "float32")
_ABSENT = object()


class _Fields:
    """Typed access to a JSON object that collects problems instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], problems: list[str]) -> None:
        self.values = values
        self.problems = problems

    def say(self, key: str, expected: str) -> None:
        found = f"found {json.dumps(self.values[key], default=str)[:80]}" if key in self.values else "the key is absent"
        self.problems.append(f"config.json: {key}: {found}, expected {expected}")

    def positive_int(
        self, key: str, default: int | None = None, *, null_is_default: bool = False, limit: int = 2**40
    ) -> int:
        value = self.values.get(key, _ABSENT)
        if default is not None and (value is _ABSENT or (value is None and null_is_default)):
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
            self.say(key, f"a positive integer below {limit}")
            return 1
        return value

    def positive_float(self, key: str, default: float) -> float:
        value = self.values.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        number = positive_number(value)
        if number is None:
            self.say(key, "a positive number")
            return default
        return number

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.say(key, "true or false")
            return default
        return value

    def exactly(self, key: str, expected: Any, why: str) -> None:
        """Complain unless the key is absent, null or equal to `expected`."""
        if self.values.get(key) is not None and self.values[key] != expected:
            self.say(key, f"{json.dumps(expected)} ({why})")


def _family(config: Mapping[str, Any], problems: list[str]) -> Family | None:
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if architectures is None:
        found: Any = model_type
        matches = [family for family in FAMILIES.values() if family.name == model_type]
    else:
        found = architectures
        matches = [family for family in FAMILIES.values() if architectures == [family.architecture]]
    if not matches:
        problems.append(
            f"config.json: architecture {json.dumps(found)[:80]} is not supported, expected one of {supported}"
        )
        return None
    if model_type not in (None, matches[0].name):
        problems.append(
            f"config.json: model_type {json.dumps(model_type)[:80]} does not go with {matches[0].architecture}, "
            f'expected "{matches[0].name}"'
        )
        return None
    return matches[0]


def _check_attention(config: Mapping[str, Any], family: Family, num_layers: int, problems: list[str]) -> None:
    """Refuse sliding windows, biases and activations that the kernels do not implement."""
    fields = _Fields(config, problems)
    window = config.get("sliding_window", family.default_window)
    if family.window == "set":
        slides = window is not None
    else:
        starts_at = config.get("max_window_layers", 28)
        late = isinstance(starts_at, int) and starts_at >= num_layers
        slides = window is not None and config.get("use_sliding_window") is True and not late
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        fields.say("layer_types", "a list of layer types or null")
        layer_types = []
    odd_types = sorted({str(kind)[:40] for kind in layer_types} - {"full_attention"})
    if slides:
        absent = "" if "sliding_window" in config else f" (the default of {family.architecture} when the key is absent)"
        problems.append(
            f"config.json: sliding_window {json.dumps(window)[:80]}{absent} is not supported, expected full attention "
            'in every layer ("sliding_window": null)'
        )
    if odd_types:
        problems.append(
            f"config.json: layer_types {', '.join(odd_types)[:120]} is not supported, expected full_attention"
        )
    fields.exactly("hidden_act", "silu", "the only activation implemented")
    if not family.qkv_bias:
        fields.exactly("attention_bias", False, f"the family {family.name} has no biases here")
    fields.exactly("mlp_bias", False, "MLP biases are not implemented")


def _head_dim(fields: _Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" in fields.values:
        head_dim = fields.positive_int("head_dim")
    elif family.default_head_dim is not None:
        head_dim = family.default_head_dim
    elif hidden_size % num_heads:
        fields.problems.append(
            f"config.json: head_dim is absent and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}; state head_dim"
        )
        return 2
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2 and head_dim != 1:
        fields.problems.append(f"config.json: head_dim {head_dim} is odd; rotary embedding needs an even one")
    return head_dim


def _token_ids(holder: Mapping[str, Any], where: str, key: str, vocab_size: int, problems: list[str]) -> set[int]:
    value = holder.get(key)
    if value is None:
        return set()
    ids = value if isinstance(value, list) else [value]
    bad = [entry for entry in ids if not isinstance(entry, int) or isinstance(entry, bool) or entry < 0]
    if bad:
        problems.append(f"{where}: {key}: found {json.dumps(value)[:80]}, expected token ids (integers from 0)")
        return set()
    outside = [entry for entry in ids if entry >= vocab_size]
    if outside:
        problems.append(f"{where}: {key}: ids {outside} are outside the vocabulary of {vocab_size}")
        return set()
    return set(ids)


def parse_model_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a parsed `config.json` (and `generation_config.json`); raises CheckpointError naming every problem."""
    problems: list[str] = []
    family = _family(config, problems)
    if family is None:
        raise CheckpointError("the model's configuration cannot be used", problems)
    fields = _Fields(config, problems)
    hidden_size = fields.positive_int("hidden_size")
    # Every layer's tensor names are listed before a weight is looked at, so the count itself must be believable.
    num_layers = fields.positive_int("num_hidden_layers", limit=MAX_LAYERS)
    num_heads = fields.positive_int("num_attention_heads")
    # An absent count has the family's default; null is as many as query heads in all of them.
    absent = "num_key_value_heads" not in config
    default_kv_heads = family.default_kv_heads if absent and family.default_kv_heads else num_heads
    num_kv_heads = fields.positive_int("num_key_value_heads", default_kv_heads, null_is_default=True)
    vocab_size = fields.positive_int("vocab_size")
    if num_heads % num_kv_heads:
        problems.append(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    _check_attention(config, family, num_layers, problems)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        problems.append(f"config.json: dtype {dtype!r} is not supported, expected one of {', '.join(DTYPES)}")
    defaults = {"eos_token_id": family.default_eos, "bos_token_id": family.default_bos}
    with_defaults = {**({} if generation_config else defaults), **config}
    eos = _token_ids(with_defaults, "config.json", "eos_token_id", vocab_size, problems)
    eos |= _token_ids(generation_config or {}, "generation_config.json", "eos_token_id", vocab_size, problems)
    bos = _token_ids(with_defaults, "config.json", "bos_token_id", vocab_size, problems)
    rope = parse_rope(config, problems)
    parsed = ModelConfig(
        family=family.name,
        architecture=family.architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        vocab_size=vocab_size,
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        max_position_tokens=fields.positive_int("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        dtype=dtype,
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=min(bos) if bos else None,
        rope_scaling=rope.scaling,
    )
    if problems:
        raise CheckpointError("the model's configuration cannot be used", problems)
    return parsed


def load_model_config(directory: Path) -> ModelConfig:
    """Read `config.json` and, when present, `generation_config.json` of a checkpoint directory."""
    generation = directory / "generation_config.json"
    generation_config = read_json_object(generation) if generation.exists() else None
    return parse_model_config(read_json_object(directory / "config.json"), generation_config)
