"""Transformers and compressed-tensors without their progress bars: what a person is shown is the caller's business."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and transformers' log below errors; everything is as before afterwards.

    compressed-tensors makes its bars with tqdm, some of them forced on, and offers no switch: so every bar made
    meanwhile is made disabled.
    """
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    shown_init = tqdm.__init__

    def hidden_init(bar: Any, *args: Any, **options: Any) -> None:
        shown_init(bar, *args, **{**options, "disable": True})

    tqdm.__init__ = hidden_init
    try:
        yield
    finally:
        tqdm.__init__ = shown_init
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
