"""Squared rounding error of a checkpoint's weights by `compat` (compressed-tensors'), the default, and with clipping.

    python benchmarks/weight_error.py CHECKPOINT

Errors are computed in FP64 from the files that were written, over every quantized weight. Prints one JSON object; exits
with 1 unless the default is at least 8 % below `compat` and clipping below the default.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantize.checkpoint import CheckpointReader
from quantize.recipe_file import parse_recipe
from quantize.rtn import quantize_checkpoint

RECIPES: dict[str, dict[str, Any]] = {"compat": {"arithmetic": "compat"}, "default": {}, "clip": {"clip": "mse"}}
BLOCK_ROWS = 1024
LEAST_GAIN = 0.08


def squared_error(source: Path, quantized: Path) -> float:
    """The sum of squared differences over all quantized weights, FP64."""
    total = 0.0
    with CheckpointReader(source) as before, CheckpointReader(quantized) as after:
        for name in (name for name, info in after.infos.items() if info.dtype == "I8"):
            weight, codes, scale = before.tensor(name), after.tensor(name), after.tensor(name + "_scale")
            for start in range(0, weight.shape[0], BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                total += float((weight[rows].double() - codes[rows].double() * scale[rows].double()).square().sum())
    return total


def main() -> int:
    """Quantize three ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    checkpoint = parser.parse_args().checkpoint
    errors: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=checkpoint.resolve().parent) as folder:
        for name, recipe in RECIPES.items():
            quantize_checkpoint(checkpoint, Path(folder) / name, parse_recipe(recipe, name))
            errors[name] = squared_error(checkpoint, Path(folder) / name)
    shares = {name: round(error / errors["compat"], 4) for name, error in errors.items()}
    print(json.dumps({"squared_error": errors, "share_of_compat": shares}, indent=2))
    return 0 if shares["default"] <= 1 - LEAST_GAIN and errors["clip"] < errors["default"] else 1


if __name__ == "__main__":
    sys.exit(main())
