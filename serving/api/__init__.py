"""The OpenAI-compatible HTTP API over an engine."""
