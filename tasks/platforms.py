"""Where a release's speed comes from, and whether this machine can tell it; cheap to import."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from tasks.errors import PlatformError

Platform = Literal["cpu", "sim", "a2a3"]


def check_platform(platform: Platform) -> None:
    """Refuse a platform that this machine does not have, before any work; raises `PlatformError`."""
    if platform != "a2a3":
        return
    missing = [] if os.environ.get("ASCEND_HOME_PATH") else ["ASCEND_HOME_PATH is not set (source CANN's set_env.sh)"]
    if importlib.util.find_spec("torch_npu") is None:
        missing.append("torch_npu is not installed")
    if missing:
        raise PlatformError(
            f"--platform a2a3 needs an Ascend NPU here: {'; '.join(missing)}. "
            "Use --platform cpu (measured) or --platform sim (PyPTO's cost model)"
        )
