"""Which tensors and modules a supported family has, as data; names are those of transformers' checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from quantize.model_config import ModelConfig
from quantize.safetensors_header import TensorInfo

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LM_HEAD = "lm_head"
LAYER_PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Buffers that older checkpoints carry and no reader needs.
IGNORED_TENSOR = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER_NAME = re.compile(r"model\.layers\.([0-9]{1,9})\.(.+)")


def layer_prefix(layer: int) -> str:
    """The name prefix of a layer's modules, ending in a dot."""
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """The layer number in a tensor or module name, or None."""
    match = _LAYER_NAME.fullmatch(name)
    return int(match[1]) if match else None


def projection_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """`[out, in]` of each projection of a layer, by its name within the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "self_attn.q_proj": (config.q_size, hidden),
        "self_attn.k_proj": (config.kv_size, hidden),
        "self_attn.v_proj": (config.kv_size, hidden),
        "self_attn.o_proj": (hidden, config.q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def linear_modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Every Linear module of the model with its `[out, in]`, layer by layer, `lm_head` last (tied or not)."""
    shapes = projection_shapes(config)
    modules = {
        layer_prefix(layer) + name: shapes[name] for layer in range(config.num_layers) for name in LAYER_PROJECTIONS
    }
    modules[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return modules


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an unquantized checkpoint: embedding, layers, final norm, untied LM head."""
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING + ".weight": (config.vocab_size, config.hidden_size)}
    shapes = projection_shapes(config)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        tensors[prefix + "input_layernorm.weight"] = (config.hidden_size,)
        for name in LAYER_PROJECTIONS:
            tensors[f"{prefix}{name}.weight"] = shapes[name]
            if config.qkv_bias and name.startswith(("self_attn.q", "self_attn.k", "self_attn.v")):
                tensors[f"{prefix}{name}.bias"] = (shapes[name][0],)
        if config.qk_norm:
            tensors[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            tensors[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        tensors[prefix + "post_attention_layernorm.weight"] = (config.hidden_size,)
    tensors[FINAL_NORM + ".weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD + ".weight"] = (config.vocab_size, config.hidden_size)
    return tensors


def is_optional(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be there without being used: old rotary buffers, and the LM head of a tied model."""
    return IGNORED_TENSOR.fullmatch(name) is not None or (config.tie_word_embeddings and name == LM_HEAD + ".weight")


def _few(names: Sequence[str], limit: int = 20) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def by_layer(names: Iterable[str]) -> list[str]:
    """Group names as `layer 3: a, b`, with the names outside layers first; long lists are cut with a count."""
    outside: list[str] = []
    layers: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _LAYER_NAME.fullmatch(name)
        if match:
            layers.setdefault(int(match[1]), []).append(match[2][:120])
        else:
            outside.append(name[:120])
    groups = [_few(outside)] if outside else []
    return groups + [f"layer {layer}: {_few(layers[layer])}" for layer in sorted(layers)]


def compare_tensors(
    infos: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> list[str]:
    """Problems of a checkpoint's names and shapes against `expected`, grouped per layer; empty when it fits."""
    problems = [f"missing, {group}" for group in by_layer(set(expected) - set(infos))]
    extra = {name for name in set(infos) - set(expected) if not is_optional(name, config)}
    problems += [f"unexpected, {group}" for group in by_layer(extra)]
    if problems:
        problems.append(f"these names are those expected of the family {config.family} with {config.num_layers} layers")
    for name in sorted(set(expected) & set(infos)):
        found, wanted = infos[name].shape, tuple(expected[name])
        if found != wanted:
            hint = " (transposed?)" if found == wanted[::-1] else ""
            problems.append(f"{name} has shape {list(found)}, config.json asks for {list(wanted)}{hint}")
    return problems
