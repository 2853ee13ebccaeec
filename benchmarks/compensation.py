"""What making up for rounded inputs does to a layer's Linears, on text that nothing was learnt from.

    python benchmarks/compensation.py SOURCE [--layer 7] [--tokens 4096]

Calibrates on the text that ships (16,384 tokens) and measures on the first tokens of the evaluation text (another
work), both through the source's own layers. For each Linear the squared error of its outputs that rounding the inputs
causes, tokens weighted as in calibration, relative to that of the source's weights: with all of the least-squares
change, and with the share of it that the judges leave. Weights are not rounded here. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from quantize.calibrated.compensation import Judges, compensated, judging_windows
from quantize.calibrated.decoder import SITES, fake_quantize, run_layer
from quantize.calibrated.gptq import InputMoments, factor_hessian
from quantize.calibrated.token_weights import site_weights
from quantize.calibrated.weights import load_layer
from quantize.calibration import calibration_windows
from quantize.checkpoint import CheckpointReader
from quantize.numerics import rope_tables
from quantize.quality_run import load_tokenizer, text_tokens
from quantize.recipe import Calibration, Gptq
from quantize.texts import evaluation_text

WINDOW_TOKENS = 512
CHUNK_WINDOWS = 8


def site_inputs(
    reader: CheckpointReader, layer_number: int, windows: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs FP32 `[windows, tokens, k]` and token weights `[windows, tokens]` of each site of a source's layer."""
    config = reader.config
    rope = rope_tables(config.head_dim, config.rope_theta, windows.shape[1], config.rope_scaling)
    stream = reader.tensor("model.embed_tokens.weight")[windows].to(torch.float32)
    inputs: dict[str, list[Tensor]] = {site: [] for site in SITES}
    weights: dict[str, list[Tensor]] = {site: [] for site in SITES}
    for number in range(layer_number + 1):
        layer = load_layer(reader, number)
        for start in range(0, len(windows), CHUNK_WINDOWS):
            chunk = slice(start, start + CHUNK_WINDOWS)
            if number < layer_number:
                stream[chunk] = run_layer(layer, stream[chunk], config, rope)
                continue
            output = run_layer(
                layer,
                stream[chunk],
                config,
                rope,
                observe=lambda site, values: inputs[site].append(values.clone()),
            )
            for site, found in site_weights(layer, stream[chunk], output, config, rope).items():
                weights[site].append(found)
    return (
        {site: torch.cat(parts) for site, parts in inputs.items()},
        {site: torch.cat(parts) for site, parts in weights.items()},
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--layer", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    with CheckpointReader(options.source) as reader, torch.no_grad():
        learnt, _ = calibration_windows(options.source, Calibration())
        unseen = text_tokens(load_tokenizer(options.source), evaluation_text(), options.tokens)
        unseen = unseen[: len(unseen) // WINDOW_TOKENS * WINDOW_TOKENS].view(-1, WINDOW_TOKENS)
        inputs, weights = site_inputs(reader, options.layer, torch.cat([learnt, unseen]))
        linears = load_layer(reader, options.layer).weights
        print(f"| Linear of layer {options.layer} | share | error with all of the change | with the share |")
        print("|---|---|---|---|")
        for site, names in SITES.items():
            rounded, judging = fake_quantize(inputs[site]), judging_windows(*learnt.shape)
            moments, judges = InputMoments(inputs[site].shape[-1]), Judges([])
            for window in range(len(learnt)):
                taker = judges if judging[window] else moments
                taker.add(inputs[site][window], rounded[window], weights[site][window])
            factor = factor_hessian(moments, Gptq().damping, Gptq().act_order, site)
            exact, read = inputs[site][len(learnt) :].flatten(0, 1), rounded[len(learnt) :].flatten(0, 1)
            counts = weights[site][len(learnt) :].reshape(-1, 1)
            for name in names:
                weight = linears[name]
                if factor.compensation is None:
                    raise SystemExit(f"{site}: nothing was learnt")
                found, share = compensated(weight, factor.compensation, judges)
                wanted, whole = exact @ weight.T, weight + weight @ factor.compensation
                errors = [
                    float(((wanted - read @ candidate.T).square() * counts).sum())
                    for candidate in (weight, whole, found)
                ]
                ratios = " | ".join(f"{error / errors[0]:.3f}" for error in errors[1:])
                print(f"| {name} | {share:.2f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
