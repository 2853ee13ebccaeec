"""Writes a Qwen3 checkpoint of random BF16 weights, of a size to measure with: 3 GB in four shards by default.

    python benchmarks/random_checkpoint.py OUT [--layers 12] [--hidden 2560] [--inner 9728] [--vocab V] [--shards 4]

Weights are normal numbers from a generator seeded by their names, so the same arguments give the same checkpoint. Every
row has a scale of its own, so that their INT8 scales differ. It has no tokenizer: quantizers read none.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from quantize.architecture import expected_tensors
from quantize.checkpoint_writer import CheckpointWriter
from quantize.model_config import parse_model_config
from quantize.shard_layout import TensorSpec


def qwen3_config(layers: int, hidden: int, inner: int, vocab: int) -> dict[str, Any]:
    """A Qwen3 configuration, tied embeddings, 128 elements a head, four query heads a key-value head."""
    heads = max(4, hidden // 128 // 4 * 4)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor `name`: normal numbers in BF16, rows scaled apart by up to a factor of four."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 2:
        values *= (0.02 * 2 ** (2 * torch.rand(shape[0], generator=generator) - 1)).unsqueeze(1)
    return values.to(torch.bfloat16)


def make_checkpoint(out: Path, *, layers: int, hidden: int, inner: int, vocab: int, shards: int) -> int:
    """Write the checkpoint to the new directory `out`; returns the bytes of its tensors."""
    config = qwen3_config(layers, hidden, inner, vocab)
    expected = expected_tensors(parse_model_config(config))
    specs = [TensorSpec(name, "BF16", shape) for name, shape in expected.items()]
    total_bytes = sum(spec.nbytes for spec in specs)
    with CheckpointWriter(out, specs, config, max_shard_bytes=math.ceil(total_bytes / shards)) as writer:
        for name, shape in expected.items():
            writer.write(name, random_tensor(name, shape))
        writer.commit()
    return total_bytes


def main() -> int:
    """Make the checkpoint that the arguments describe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, default in (("layers", 12), ("hidden", 2560), ("inner", 9728), ("vocab", 151936), ("shards", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    print(make_checkpoint(options.pop("out"), **options), "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
