"""Cases 1 to 3: rotary settings in both spellings, head_dim, stop ids; everything unsupported is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from quantize.errors import CheckpointError
from quantize.families import FAMILIES
from quantize.json_files import MAX_JSON_BYTES, read_json_object
from quantize.model_config import load_model_config, parse_model_config
from quantize.rope import RopeScaling, both_spellings, parse_rope
from tests.tiny_models import VOCAB_SIZE

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
}
CLASSES = {name: family.architecture for name, family in FAMILIES.items()}
THEIRS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "mistral": MistralConfig}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def of_family(family: str, **changes: Any) -> dict[str, Any]:
    window = {"sliding_window": None} if family == "mistral" else {}
    return {**BASE, **window, "architectures": [CLASSES[family]], "model_type": family, **changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def problems(config: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(config, generation)
    return str(caught.value)


@pytest.mark.parametrize("family", CLASSES)
def test_tiny_models_read_as_they_were_made(family: str, request: pytest.FixtureRequest) -> None:
    config = load_model_config(request.getfixturevalue(f"tiny_{family}"))
    assert (config.family, config.architecture) == (family, CLASSES[family])
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.q_per_kv) == (4, 2, 2)
    assert config.head_dim == (16 if family == "qwen2" else 32)
    assert (config.q_size, config.kv_size) == (4 * config.head_dim, 2 * config.head_dim)
    assert (config.qk_norm, config.qkv_bias) == (family == "qwen3", family == "qwen2")
    assert config.tie_word_embeddings == (family == "llama")
    assert (config.dtype, config.rope_theta, config.eos_token_ids) == ("bfloat16", 10000.0, (2,))
    assert config.rope_scaling is None


def test_a_tiny_llama3_reads_as_it_was_made(tiny_llama3: Path) -> None:
    assert load_model_config(tiny_llama3).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 256)


@pytest.mark.parametrize("theta", [10_000, 1_000_000.0, 500_000.5])
def test_both_rope_spellings_give_the_same_model(theta: float) -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        {"rope_parameters": {"rope_theta": theta}},
        {"rope_theta": theta},
        {"rope_theta": theta, "rope_scaling": None},
        {"rope_theta": theta, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": theta, "rope_scaling": {"type": "default"}},
        {"rope_theta": theta, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        {"rope_scaling": {"type": "default", "rope_theta": theta}, "rope_parameters": {"rope_theta": theta}},
    ]
    assert {parse_model_config({**BASE, **spelling}).rope_theta for spelling in spellings} == {float(theta)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 123.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 456.0}},
        {"rope_theta": 456.0, "rope_parameters": {"rope_type": "default", "rope_theta": 456.0}},
        {"rope_theta": 789.0, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_theta_is_that_of_transformers(changes: dict[str, Any]) -> None:
    theirs = Qwen3Config.from_dict({**BASE, **changes})
    assert parse_model_config({**BASE, **changes}).rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta 5.0 and rope_theta 7.0 contradict",
        ),
        (
            {"rope_scaling": {"type": "default", "rope_theta": 3.0}, "rope_parameters": {"rope_theta": 4.0}},
            "rope_scaling.rope_theta 3.0 and rope_parameters.rope_theta 4.0 contradict",
        ),
        ({"rope_scaling": dict(LLAMA31), "rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_param"),
        (
            {"rope_scaling": dict(LLAMA31), "rope_parameters": {**LLAMA31, "factor": 4.0}},
            "rope_scaling and rope_parameters contradict",
        ),
        ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, 'rope_type "default" and type "yarn" contradict'),
        (
            {"rope_scaling": dict(LLAMA31), "original_max_position_embeddings": 512},
            "original_max_position_embeddings is 8192 in rope_scaling and 512 beside it",
        ),
    ],
)
def test_rotary_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], told: str) -> None:
    """transformers 5 silently prefers one of the two, readers of the older spelling the other: two models."""
    assert told in problems({**BASE, **changes})


def test_the_contradiction_is_real_transformers_takes_the_newer_spelling() -> None:
    changes = {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert Qwen3Config.from_dict({**BASE, **changes}).rope_parameters["rope_theta"] == 5.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {**LLAMA31, "rope_theta": 5e5}},
        {"rope_scaling": dict(LLAMA31), "rope_theta": 5e5},
        {
            "rope_scaling": {**{k: v for k, v in LLAMA31.items() if k != "rope_type"}, "type": "llama3"},
            "rope_theta": 5e5,
        },
        {"rope_scaling": dict(LLAMA31), "rope_parameters": {**LLAMA31, "rope_theta": 5e5}, "rope_theta": 5e5},
    ],
)
def test_llama3_scaling_is_read_from_every_spelling_as_transformers_reads_it(changes: dict[str, Any]) -> None:
    content = of_family("llama", max_position_embeddings=131072, **changes)
    config = parse_model_config(content)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    theirs = LlamaConfig.from_dict(json.loads(json.dumps(content))).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("llama3", 5e5)
    assert {key: theirs[key] for key in LLAMA31} == LLAMA31


def test_an_absent_original_length_is_the_longest_context_as_in_transformers() -> None:
    rope = {key: value for key, value in LLAMA31.items() if key != "original_max_position_embeddings"}
    config = parse_model_config(of_family("llama", rope_scaling=rope))
    assert config.rope_scaling is not None
    theirs = LlamaConfig.from_dict(of_family("llama", rope_scaling=dict(rope)))
    assert config.rope_scaling.original_max_position_tokens == 2048
    assert theirs.rope_parameters["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"factor": None}, "rope_scaling.factor: found null"),
        ({"factor": "8"}, 'rope_scaling.factor: found "8"'),
        ({"factor": 10**400}, "rope_scaling.factor"),
        ({"factor": 0.5}, "factor 0.5"),
        ({"low_freq_factor": 4.0}, "low below high"),
        ({"high_freq_factor": float("nan")}, "high_freq_factor"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings: found 0"),
        ({"original_max_position_embeddings": True}, "original_max_position_embeddings: found true"),
    ],
)
def test_llama3_numbers_are_checked(changes: dict[str, Any], named: str) -> None:
    assert named in problems(of_family("llama", rope_scaling={**LLAMA31, **changes}))


def test_both_spellings_read_back_as_the_same_settings() -> None:
    for rope in ({"rope_theta": 1e6}, {**LLAMA31, "rope_theta": 5e5}):
        content = of_family("llama", rope_parameters=rope)
        settings = parse_rope(content, [])
        doubled = both_spellings(content, settings)
        assert parse_model_config(doubled) == parse_model_config(content)
        old = {key: value for key, value in doubled.items() if key != "rope_parameters"}
        assert parse_model_config(old) == parse_model_config(content)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "linear", "longrope", "proportional", None, 5])
@pytest.mark.parametrize(
    "keys", [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
)
def test_an_unsupported_rope_type_is_refused_by_name(kind: Any, keys: tuple[str, str]) -> None:
    message = problems({**BASE, keys[0]: {keys[1]: kind, "factor": 4.0, "rope_theta": 1e6}})
    assert f"rope type {json.dumps(kind)}" in message
    assert keys[0] in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"head_dim": None}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 31}, "odd"),
        ({"head_dim": 32.0}, "head_dim"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "1"}, "sliding_window"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"dtype": "float8"}, "dtype"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [1, 1000]}, "1000"),
        ({"bos_token_id": -1}, "bos_token_id"),
    ],
)
def test_unsupported_settings_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in problems({**BASE, **changes})


def test_every_problem_is_in_one_message() -> None:
    message = problems(
        {**without(BASE, "vocab_size"), "head_dim": None, "hidden_act": "relu", "rope_scaling": {"type": "yarn"}}
    )
    for named in ("vocab_size: the key is absent", "head_dim: found null", '"relu"', "yarn"):
        assert named in message


@pytest.mark.parametrize(
    ("architectures", "model_type"),
    [
        (["MixtralForCausalLM"], "mixtral"),
        (["Qwen3MoeForCausalLM"], "qwen3_moe"),
        (["Qwen3ForCausalLM"], "llama"),
        (["Qwen3ForCausalLM", "LlamaForCausalLM"], "qwen3"),
        ([], "qwen3"),
        ("Qwen3ForCausalLM", "qwen3"),
        (None, None),
        (None, ["qwen3"]),
    ],
)
def test_other_architectures_are_refused(architectures: Any, model_type: Any) -> None:
    message = problems({**BASE, "architectures": architectures, "model_type": model_type})
    assert "expected" in message


def test_a_window_that_is_switched_off_is_no_window() -> None:
    for changes in ({"use_sliding_window": False, "sliding_window": 128}, {"sliding_window": None}):
        parse_model_config({**BASE, **changes})
    theirs = Qwen3Config.from_dict({**BASE, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2})
    assert set(theirs.layer_types) == {"full_attention"}
    parse_model_config({**BASE, "use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2})


@pytest.mark.parametrize(
    ("family", "window", "refused"),
    [
        ("mistral", {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ("mistral", {}, "sliding_window 4096 (the default of MistralForCausalLM when the key is absent)"),
        ("mistral", {"sliding_window": None}, None),
        ("llama", {"sliding_window": 128}, "sliding_window 128"),
        ("llama", {}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "sliding_window 128"),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 1}, None),
    ],
)
def test_a_sliding_window_is_refused_by_name(family: str, window: dict[str, Any], refused: str | None) -> None:
    content = {**without(of_family(family), "sliding_window"), **window}
    if refused is None:
        parse_model_config(content)
    else:
        assert refused in problems(content)


def test_transformers_also_windows_a_mistral_that_does_not_say_null() -> None:
    assert MistralConfig.from_dict(without(of_family("mistral"), "sliding_window")).sliding_window == 4096
    assert MistralConfig.from_dict(of_family("mistral")).sliding_window is None


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    kind: Any = THEIRS[family]
    required = {"hidden_size": 4096, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 32}
    content = {"architectures": [CLASSES[family]], "model_type": family, "vocab_size": 320, **required}
    content["max_position_embeddings"] = 2048
    if family == "mistral":
        content["sliding_window"] = None
    theirs, ours = kind.from_dict(dict(content)), parse_model_config(content)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def test_absent_head_dim_is_128_for_qwen3_and_the_quotient_elsewhere() -> None:
    content = without(BASE, "head_dim")
    assert parse_model_config(content).head_dim == 128
    assert parse_model_config(without(of_family("qwen2"), "head_dim")).head_dim == 16
    for family in ("llama", "mistral"):
        assert parse_model_config(without(of_family(family), "head_dim")).head_dim == 16
    uneven = of_family("llama", num_attention_heads=6)
    assert "state head_dim" in problems(without(uneven, "head_dim"))


@pytest.mark.parametrize(
    ("in_config", "in_generation", "union"),
    [
        ([3, 7], 5, (3, 5, 7)),
        (2, [2, 3], (2, 3)),
        (None, 5, (5,)),
        ([7, 3, 7], None, (3, 7)),
    ],
)
def test_stop_ids_are_the_union_of_both_files(in_config: Any, in_generation: Any, union: tuple[int, ...]) -> None:
    parsed = parse_model_config({**BASE, "eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert parsed.eos_token_ids == union


def test_a_bad_stop_id_names_its_file() -> None:
    assert "generation_config.json: eos_token_id" in problems(BASE, {"eos_token_id": [True]})


def test_torch_dtype_is_read_like_dtype() -> None:
    new, old = parse_model_config({**BASE, "dtype": "float16"}), parse_model_config({**BASE, "torch_dtype": "float16"})
    assert new == old == dataclasses.replace(parse_model_config(BASE), dtype="float16")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "absent"),
        (b"", "not valid JSON"),
        (b"[1]", "a JSON list"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
    ],
)
def test_unreadable_json_is_refused_by_file(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=named) as caught:
        read_json_object(path)
    assert str(path) in str(caught.value)


def test_a_huge_json_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match="at most"):
        read_json_object(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="not a JSON file"):
        read_json_object(tmp_path / "folder")


def test_a_layer_count_beyond_belief_is_refused_at_once() -> None:
    assert "num_hidden_layers: found 1000000000, expected a positive integer below" in problems(
        {**BASE, "num_hidden_layers": 10**9}
    )
