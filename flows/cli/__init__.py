"""The command line `pypto-deploy`: one module per group of verbs, over the flows and the layers below."""

from flows.cli.app import main

__all__ = ["main"]
