"""Serving: bundles and their store, the engine, executors, the OpenAI-compatible API, the worker and its bench."""
