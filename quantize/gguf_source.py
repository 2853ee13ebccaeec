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
from quantize.checkpoint_writer import CheckpointWriter, TensorSpec
from quantize.errors import CheckpointError
from quantize.model_config import FAMILIES, parse_model_config, read_json_object
from quantize.quiet import quiet_transformers

MAGIC = b"GGUF"
UNSTABLE_CONFIG_KEYS = ("_name_or_path", "_model_name_or_path")
logger = logging.getLogger(__name__)


def gguf_architecture(path: Path) -> str:
    """The architecture a GGUF file states; raises CheckpointError when it is no readable GGUF file."""
    from gguf import GGUFReader

    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it starts with {magic!r}, expected {MAGIC!r})")
    try:
        field = GGUFReader(path).get_field("general.architecture")
        architecture = field.contents() if field is not None else None
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path}: damaged or truncated GGUF file: {str(error)[:120]}") from error
    return str(architecture)


def _load(path: Path) -> tuple[Any, Any]:
    """The dequantized BF16 model and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(path.parent)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return model, tokenizer


def convert_gguf(path: Path, out: Path) -> Path:
    """Convert a GGUF file to a BF16 safetensors checkpoint in the new directory `out`; returns `out`.

    Deterministic: the same file gives the same payload digest. Raises CheckpointError for a file that is no GGUF, is
    damaged, or has an architecture that is not supported; then `out` does not exist.
    """
    architecture = gguf_architecture(path)
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported, expected one of {', '.join(FAMILIES)}"
        )
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
