"""The residual stream between two layers, kept on disk: bounded memory, and the place where a killed run goes on.

Two streams per layer boundary, FP32 `[windows, tokens, hidden]` each: what the source computes, and what the layers
quantized so far compute. Two boundaries are kept, the one read and the one written; a small file that is replaced in
one step says up to which layer all is done.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantize.errors import WriteError
from quantize.staging_folder import fsync_path

STATE_NAME = "state.json"
FREE_SPACE_MARGIN_BYTES = 64 * 2**20


class Activations:
    """The streams of one run in `folder`, for `shape` `[windows, tokens, hidden]`; `key` is all that they depend on."""

    def __init__(self, folder: Path, key: str, shape: tuple[int, int, int]) -> None:
        self._folder = folder
        self._key = key
        self._shape = shape
        self.next_layer = -1
        """The first layer that is not done; -1 until the embedding is."""
        self.facts: list[dict[str, Any]] = []
        if not self._resume():
            shutil.rmtree(folder, ignore_errors=True)
            needed = 4 * 4 * math.prod(shape)
            try:
                folder.mkdir(parents=True)
                free = shutil.disk_usage(folder).free
            except OSError as error:
                raise WriteError(f"{folder}: cannot be written: {error.strerror}") from error
            if free < needed + FREE_SPACE_MARGIN_BYTES:
                raise WriteError(
                    f"{folder}: activations of {shape[0] * shape[1]} calibration tokens need {needed} bytes of disk "
                    f"and {FREE_SPACE_MARGIN_BYTES} to spare, {free} are free; calibrate on fewer tokens or make room"
                )

    def _resume(self) -> bool:
        try:
            state = json.loads((self._folder / STATE_NAME).read_bytes())
            layer = state["next_layer"]
            sizes = {self._file(layer, role).stat().st_size for role in ("source", "quantized")}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if state.get("key") != self._key or sizes != {4 * math.prod(self._shape)}:
            return False
        self.next_layer, self.facts = layer, state["facts"]
        return True

    def restart(self) -> None:
        """Forget what is done: the next layer is the embedding again."""
        self.next_layer, self.facts = -1, []

    def _file(self, layer: int, role: str) -> Path:
        return self._folder / f"{role}-{layer % 2}.f32"

    def _map(self, layer: int, role: str, *, fresh: bool) -> Tensor:
        path = self._file(layer, role)
        count = math.prod(self._shape)
        if fresh:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 4 * count)
        return torch.from_file(str(path), shared=True, size=count, dtype=torch.float32).view(self._shape)

    def inputs(self, layer: int) -> tuple[Tensor, Tensor]:
        """What layer `layer` reads: the source's stream and the quantized one."""
        return self._map(layer, "source", fresh=False), self._map(layer, "quantized", fresh=False)

    def outputs(self, layer: int) -> tuple[Tensor, Tensor]:
        """Where what layer `layer` gives is to be written (-1: the embedding); raises WriteError on a full disk."""
        try:
            return self._map(layer + 1, "source", fresh=True), self._map(layer + 1, "quantized", fresh=True)
        except OSError as error:
            raise WriteError(f"{self._folder}: cannot be written: {error.strerror}") from error

    def finish(self, layer: int, facts: dict[str, Any] | None = None) -> None:
        """Record that `layer` (-1: the embedding) is done: its outputs are written and its tensors stored."""
        for role in ("source", "quantized"):
            # The file that says they are done must not reach the disk before them.
            fsync_path(self._file(layer + 1, role))
        self.next_layer = layer + 1
        if facts is not None:
            self.facts.append(facts)
        state = {"key": self._key, "next_layer": self.next_layer, "facts": self.facts}
        fresh = self._folder / (STATE_NAME + ".new")
        try:
            fresh.write_text(json.dumps(state))
            fsync_path(fresh)
            fresh.replace(self._folder / STATE_NAME)
        except OSError as error:
            raise WriteError(f"{self._folder}: cannot be written: {error.strerror}") from error
