"""Identify the source of a release: a Hugging Face directory as it is, or a GGUF file converted to one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import BaseModel, ConfigDict

from quantize.checkpoint import payload_digest
from quantize.gguf_source import convert_gguf
from quantize.preflight import check_source
from serving.tokenizer import check_tokenizer
from tasks import progress
from tasks.steps import file_digest, run_step, step_key

logger = logging.getLogger(__name__)


class Source(BaseModel):
    """A source checkpoint: the directory to read, and the digest of all it holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    digest: str
    origin: str


def identify(source: Path, work: Path) -> Source:
    """Check the source (all problems in one `CheckpointError`, no weight read first) and digest its content.

    A `.gguf` file is converted to a BF16 checkpoint under `work`, cached by the file's digest.
    """
    if source.is_file() and source.suffix == ".gguf":
        key = step_key("gguf", ("quantize",), gguf=file_digest(source))
        progress.note(f"converting {source.name} to a BF16 checkpoint")

        def build(out: Path) -> dict[str, Any]:
            convert_gguf(source, out)
            return {}

        directory = run_step(work, "gguf", key, build).out
    else:
        directory = source
    check_source(directory).close()
    if not check_tokenizer(directory):
        logger.warning("%s has no chat template: the worker will answer completions, and refuse chat", directory)
    return Source(path=str(directory.resolve()), digest=payload_digest(directory), origin=str(source))


@task(name="identify source", persist_result=False)
def identify_source(source: str, work: str) -> Source:
    """Prefect task over `identify`; never cached, since only reading the content tells whether it changed."""
    return identify(Path(source), Path(work))
