"""Real tiny bundles: a random checkpoint, quantized and staged, ready to be put into a store."""

from __future__ import annotations

from pathlib import Path

from kernels.slabs import config_to_json
from kernels.staging import load_slabs, stage_checkpoint
from quantize.checkpoint import payload_digest
from quantize.recipe import Recipe
from quantize.rtn import quantize_checkpoint
from serving.bundle import BundleParts
from serving.manifest import Evidence
from tests.tiny_models import make_tiny_qwen3


def make_parts(folder: Path, seed: int) -> BundleParts:
    """Quantize and stage a tiny Qwen3 of random weights `seed` below `folder`.

    Untied embeddings: a tied random model only repeats its last token.
    """
    source = make_tiny_qwen3(folder / "source", seed=seed)
    recipe = Recipe()
    quantize_checkpoint(source, folder / "checkpoint", recipe)
    stage_checkpoint(folder / "checkpoint", folder / "slabs")
    program = folder / "programs" / "decode_layer"
    program.mkdir(parents=True)
    (program / "program.json").write_text('{"name": "decode_layer"}')
    (folder / "reports").mkdir()
    (folder / "reports" / "quality.json").write_text("{}")
    return BundleParts(
        checkpoint_dir=folder / "checkpoint",
        slabs_dir=folder / "slabs",
        source_digest=payload_digest(source),
        recipe=recipe,
        programs={"decode_layer": "k" * 64},
        programs_dir=folder / "programs",
        reports_dir=folder / "reports",
    )


def evidence_of(parts: BundleParts, name: str = "tiny", created: str = "2026-01-01T00:00:00+00:00") -> Evidence:
    """Evidence with the model's shape."""
    config = config_to_json(load_slabs(parts.slabs_dir).config)
    return Evidence(name=name, created=created, model=config)


def flip_byte(path: Path, offset: int = -1) -> None:
    """Change one byte of a file without touching the other hard links to it."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x5A
    path.unlink()
    path.write_bytes(content)
