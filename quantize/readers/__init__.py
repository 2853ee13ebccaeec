"""What other programs accept, as data: rules over a checkpoint's headers and configuration, no weight read.

A reader is a row: its rules, and notes on what it leaves out. Each rule is a function from a scan to problems that
name what was found, what is expected and what to do. The rules restate, in our words, what the loaders of vLLM,
vllm-ascend and pypto-serving do (`docs/checkpoints.md` says where it was read); none of those programs runs here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantize.architecture import EMBEDDING
from quantize.checkpoint import CheckpointScan
from quantize.readers import pypto_serving, vllm
from quantize.readers.common import Check

__all__ = ["READERS", "Acceptance", "Reader", "acceptance"]


@dataclass(frozen=True)
class Reader:
    """A program that loads W8A8 checkpoints: `rules` that it enforces or relies on, `notes` on what it leaves out."""

    name: str
    title: str
    rules: tuple[Check, ...]
    notes: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Acceptance:
    """Whether a reader takes a checkpoint: `problems` keep it from doing so, `notes` are what a user should know."""

    reader: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


READERS: Mapping[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("vllm", "vLLM, compressed-tensors W8A8 INT8", vllm.RULES),
        Reader("vllm-ascend", "vllm-ascend, compressed-tensors W8A8_DYNAMIC", vllm.RULES),
        Reader("pypto-serving", "pypto-serving, qwen3-a8w8", pypto_serving.RULES, pypto_serving.NOTES),
    )
}


def acceptance(scan: CheckpointScan, reader: str) -> Acceptance:
    """Whether the reader of this name (a key of `READERS`) takes the scanned checkpoint, with every reason at once.

    A checkpoint that cannot be understood at all is not accepted; its own problems are then the reasons.
    """
    row = READERS[reader]
    if scan.config is None or not scan.infos:
        return Acceptance(reader, tuple(scan.problems) or ("the checkpoint cannot be read",), ())
    problems = list(scan.problems)
    if EMBEDDING + ".weight" not in scan.infos:
        problems.append(f"{EMBEDDING}.weight is missing")
    problems += [problem for check in row.rules for problem in check(scan, scan.config)]
    notes = [note for check in row.notes for note in check(scan, scan.config)]
    return Acceptance(reader, tuple(dict.fromkeys(problems)), tuple(notes))
