"""Quantization that looks at activations: smoothing, rotation, GPTQ, and the search over them, a layer at a time."""
