"""Two arrangements that PyPTO 0.2.0 needs on a host without an NPU; imported in a program's subprocess only.

The interpreter gets its inputs by a copy from the device, which does nothing here, so it would see zeros: the host
tensors are handed to it instead. And its calculator library, built once by `kernels.calculator`, is loaded rather than
built again. Both reach into PyPTO's internals, so another version is refused.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.calculator import pypto_version
from kernels.errors import ToolchainError

SUPPORTED_VERSION = "0.2.0"


def install(library: Path) -> None:
    """Load the calculator from `library` and hand host tensors to the interpreter.

    Raises ToolchainError on another pypto version, or when the library cannot be loaded.
    """
    version = pypto_version()
    if version != SUPPORTED_VERSION:
        raise ToolchainError(
            f"pypto {version} is installed; the host interpreter is arranged for {SUPPORTED_VERSION} only: "
            f"`pip install pypto=={SUPPORTED_VERSION}`"
        )
    import pypto  # the library's symbols resolve against pypto's own
    from pypto import pypto_impl
    from pypto._utils import BuildOnlineManager
    from pypto.frontend.parser import entry
    from pypto.runtime import _pto_verify_datas

    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"cannot load the calculator library {library}: {error}; delete it to rebuild") from None
    BuildOnlineManager().calculator_loaded = True

    def set_host_tensors(tensors: list[Any]) -> None:
        if pypto.get_verify_options().get("enable_pass_verify"):
            pypto_impl.SetVerifyData(entry._pto_to_tensor_data(tensors), [], _pto_verify_datas.get_data())

    entry.JitCallableWrapper._setup_verify_data = staticmethod(set_host_tensors)
