"""Tiny valid checkpoints for mutation, written without torch or transformers: sources in one file and in shards."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from quantize.architecture import expected_tensors
from quantize.model_config import parse_model_config
from tests.quantize.files import safetensors_bytes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "<s>"}],
}
TINY_BYTES = b"\x00\x3c\x80\xbc\xc0\x3d\x10\xbe"
"""Four small BF16 numbers, to be drawn from."""


def _shard(names: list[str], shapes: dict[str, tuple[int, ...]], rng: random.Random) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name in names:
        count = 1
        for size in shapes[name]:
            count *= size
        start = len(data)
        for _ in range(count):
            pick = 2 * rng.randrange(len(TINY_BYTES) // 2)
            data += TINY_BYTES[pick : pick + 2]
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [start, len(data)]}
    return safetensors_bytes(header, data)


def write_source(directory: Path, *, shards: int = 1, seed: int = 0) -> Path:
    """Write a valid BF16 source checkpoint of some 20 kB; returns `directory`."""
    directory.mkdir(parents=True)
    rng = random.Random(seed)
    shapes = expected_tensors(parse_model_config(CONFIG))
    names = list(shapes)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "X", "chat_template": "{{ x }}"}))
    (directory / "LICENSE").write_text("none\n")
    if shards == 1:
        (directory / "model.safetensors").write_bytes(_shard(names, shapes, rng))
        return directory
    weight_map = {}
    for number in range(shards):
        shard = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number::shards]
        (directory / shard).write_bytes(_shard(part, shapes, rng))
        weight_map |= dict.fromkeys(part, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
