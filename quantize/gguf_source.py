"""A GGUF file as a source: unpacked through transformers' reader into an ordinary BF16 checkpoint.

The weights keep what the file's own quantization left of them; everything after treats the result as a source
checkpoint like any other. Needs the `gguf` and `accelerate` packages (transformers asks for both).
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from quantize.checkpoint import scan_checkpoint
from quantize.checkpoint_writer import CheckpointWriter
from quantize.errors import CheckpointError
from quantize.gguf_header import read_gguf_header
from quantize.json_files import read_json_object
from quantize.model_config import parse_model_config
from quantize.quiet import quiet_transformers
from quantize.shard_layout import TensorSpec
from quantize.staging_folder import check_target

ARCHITECTURES = ("qwen3", "qwen2", "llama")
"""GGUF's names of what can be converted; it calls Mistral `llama`, as its structure is the same."""
ROPE_FACTORS = "rope_freqs.weight"
UNSTABLE_CONFIG_KEYS = ("_name_or_path", "_model_name_or_path")
logger = logging.getLogger(__name__)


def check_gguf(path: Path) -> str:
    """Check that a GGUF file is sound and can be converted, from its header alone; returns its architecture."""
    header = read_gguf_header(path)
    architecture = str(header.metadata.get("general.architecture"))
    problems: list[str] = []
    if architecture not in ARCHITECTURES:
        problems.append(f"architecture {architecture[:80]!r}, expected one of {', '.join(ARCHITECTURES)}")
    # transformers would pass over both and compute with unscaled frequencies.
    scaling = header.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or ROPE_FACTORS in header.tensors:
        named = f"type {scaling!r}" if scaling != "none" else f"tensor {ROPE_FACTORS}"
        problems.append(f"RoPE scaling ({named}), expected none: use the model's original safetensors checkpoint")
    if problems:
        raise CheckpointError(f"{path}: this GGUF file cannot be converted", problems)
    return architecture


def _load(path: Path) -> tuple[Any, Any]:
    """The dequantized BF16 model and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(path.parent)
    with quiet_transformers():
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    # What is missing would keep random initial values, with nothing but a logged warning.
    lacking = sorted({*loading["missing_keys"], *(str(key) for key in loading["mismatched_keys"])})
    if model.config.tie_word_embeddings and "lm_head.weight" in lacking:
        lacking.remove("lm_head.weight")
    if lacking:
        raise CheckpointError(f"{path}: tensors are missing or of the wrong shape in this GGUF file", lacking)
    return model, tokenizer


def convert_gguf(path: Path, out: Path) -> Path:
    """Convert a GGUF file to a BF16 safetensors checkpoint in the new directory `out`; returns `out`.

    Deterministic: the same file gives the same payload digest. Raises CheckpointError when `out` holds something, for a
    file that is no GGUF, is damaged or lacks tensors, and for an architecture or RoPE scaling that is not supported;
    nothing is left behind then.
    """
    check_target(out)
    architecture = check_gguf(path)
    logger.info("unpacking %s (%s)", path.name, architecture)
    try:
        model, tokenizer = _load(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: transformers cannot read it: {str(error)[:200]}") from error
    with tempfile.TemporaryDirectory() as folder:
        side = Path(folder)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(side)
        model.generation_config.save_pretrained(side)
        tokenizer.save_pretrained(side)
        config = read_json_object(side / "config.json")
        for key in UNSTABLE_CONFIG_KEYS:
            config.pop(key, None)
        config["dtype"] = "bfloat16"
        parsed = parse_model_config(config)
        tensors = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if not (parsed.tie_word_embeddings and name == "lm_head.weight")
        }
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        with CheckpointWriter(out, specs, config, scan_checkpoint(side).sidecars) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.commit()
    return out
