"""A process that lets runs of itself be killed at counted moments, and prints what the last one makes of what is left.

    python -m tests.quantize.calibrated.kills SOURCE FOLDER RECIPE_JSON MOMENTS_JSON

Every run is a forked child, so that torch is imported once. A moment is a number of events from the child's start:
layers run, tensors finished, renames begun. Prints the digest of an undisturbed run, how each child ended, and the
digest of the last, undisturbed child; as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantize.calibrated import layer_step
from quantize.checkpoint_writer import TensorStream
from quantize.pipeline import quantize
from quantize.recipe import Recipe
from quantize.recipe_file import parse_recipe


def kill_at(moment: int) -> None:
    """Have this process end by SIGKILL when so many events have begun."""
    begun = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal begun
            begun += 1
            if begun == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    for owner, name in ((layer_step, "run_layer"), (TensorStream, "finish"), (Path, "replace"), (Path, "rename")):
        setattr(owner, name, counted(getattr(owner, name)))


def run_child(source: Path, out: Path, recipe: Recipe, moment: int | None) -> int:
    """Quantize in a child that is killed at `moment`; the wait status as `subprocess` spells it."""
    child = os.fork()
    if child == 0:
        if moment is not None:
            kill_at(moment)
        quantize(source, out, recipe)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(source: Path, folder: Path, recipe: Recipe, moments: list[int]) -> dict[str, Any]:
    """Run undisturbed, then with kills, then to the end."""
    from quantize.checkpoint import payload_digest

    torch.set_num_threads(1)
    quantize(source, folder / "whole", recipe)
    ends = [run_child(source, folder / "out", recipe, moment) for moment in moments]
    ends.append(run_child(source, folder / "out", recipe, None) if not (folder / "out").exists() else 0)
    return {
        "whole": payload_digest(folder / "whole"),
        "ends": ends,
        "out": payload_digest(folder / "out"),
        "left": sorted(path.name for path in folder.iterdir()),
    }


if __name__ == "__main__":
    asked = parse_recipe(json.loads(sys.argv[3]), "arguments")
    answer = main(Path(sys.argv[1]), Path(sys.argv[2]), asked, json.loads(sys.argv[4]))
    sys.stdout.write(json.dumps(answer))
