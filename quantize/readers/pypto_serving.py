"""Rules of pypto-serving's loader for the model format `qwen3-a8w8`, which has a safetensors reader of its own."""

from __future__ import annotations

from quantize.architecture import LAYER_PROJECTIONS, LM_HEAD, layer_prefix, linear_modules
from quantize.checkpoint import CheckpointScan
from quantize.model_config import ModelConfig
from quantize.readers.common import Check, grouped, is_codes, plain_head, quantized_w8a8
from quantize.rope import DEFAULT_THETA

QWEN3_14B_SHAPE = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_layers": 40,
    "num_heads": 40,
    "num_kv_heads": 8,
    "head_dim": 128,
}


def _head_in_file(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """The loader reads `lm_head.weight` by name: tied weights are not looked up in the embedding."""
    if LM_HEAD + ".weight" in scan.infos:
        return []
    return ["lm_head.weight is missing, expected a copy of the (tied) embedding; quantize with --for pypto-serving"]


def _all_projections(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """All seven projections of a layer are read with a scale, `down_proj` too (it is dequantized to BF16)."""
    wrong = [
        layer_prefix(layer) + name
        for layer in range(config.num_layers)
        for name in LAYER_PROJECTIONS
        if not is_codes(scan, layer_prefix(layer) + name)
    ]
    if not wrong:
        return []
    return [
        f"not INT8: {grouped(wrong)}; expected all seven projections of every layer; quantize without ignoring them"
    ]


def _scale_elements(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """One scale a channel in any shape: it is flattened."""
    problems = []
    for module, (out_features, _) in linear_modules(config).items():
        scale = scan.infos.get(module + ".weight_scale")
        if is_codes(scan, module) and (scale is None or scale.shape not in ((out_features, 1), (out_features,))):
            found = "is missing" if scale is None else f"has shape {list(scale.shape)}"
            problems.append(f"{module}.weight_scale {found}, expected [{out_features}, 1] or [{out_features}]")
    return problems


def _three_dtypes(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """Its own safetensors reader knows three dtypes."""
    odd: dict[str, list[str]] = {}
    for name, info in scan.infos.items():
        if info.dtype not in ("I8", "F32", "BF16"):
            odd.setdefault(info.dtype, []).append(name)
    return [
        f"{len(names)} tensors are {dtype}, such as {names[0][:120]}, expected I8, F32 or BF16; "
        "convert the source to BF16 first"
        for dtype, names in sorted(odd.items())
    ]


def _qwen3_names(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """The loader reads QK norms and no biases: the family is Qwen3."""
    if config.family == "qwen3":
        return []
    return [f"the family is {config.family}, expected qwen3: the loader reads q_norm and k_norm and no biases"]


def _old_rope_keys(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """Only a top-level `rope_theta` is read (10,000 when absent, silently), and no scaling."""
    found = scan.raw_config.get("rope_theta", DEFAULT_THETA)
    problems = []
    if found != config.rope_theta:
        problems.append(
            f"config.json: rope_theta at the top level is {found!r}, which is all that is read, expected "
            f"{config.rope_theta!r}; quantize with --for pypto-serving, or add the key"
        )
    if config.rope_scaling is not None:
        problems.append("config.json: found rope scaling (llama3), expected none: it would be left out")
    return problems


def _head_dim_is_quotient(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """`head_dim` is not read but computed."""
    if config.head_dim * config.num_heads == config.hidden_size:
        return []
    return [
        f"head_dim is {config.head_dim}, expected hidden_size / heads = {config.hidden_size / config.num_heads:g}: the "
        "loader computes it and does not read the key"
    ]


def _kernel_shape(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """Its kernels are compiled for one shape."""
    other = {key: getattr(config, key) for key, size in QWEN3_14B_SHAPE.items() if getattr(config, key) != size}
    if not other:
        return []
    told = ", ".join(f"{key} {found} (expected {QWEN3_14B_SHAPE[key]})" for key, found in other.items())
    return [f"its A8W8 kernels are compiled for the shape of Qwen3-14B only, this model has {told}"]


def _eos_of_config(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """`generation_config.json` is not read."""
    stated = scan.raw_config.get("eos_token_id")
    ids = set(stated if isinstance(stated, list) else [stated])
    more = sorted(set(config.eos_token_ids) - ids)
    if not more:
        return []
    return [f"generation_config.json is not read there: stop ids {more} would be missed; send them as stop tokens"]


RULES: tuple[Check, ...] = (
    quantized_w8a8,
    _qwen3_names,
    _three_dtypes,
    _all_projections,
    _scale_elements,
    _head_in_file,
    plain_head,
    _old_rope_keys,
    _head_dim_is_quotient,
)
NOTES: tuple[Check, ...] = (_kernel_shape, _eos_of_config)
