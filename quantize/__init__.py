"""From a Hugging Face checkpoint to a W8A8 one: configuration, numerics, algorithms and quality metrics."""
