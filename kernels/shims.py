"""Three arrangements that PyPTO 0.2.0 needs on a host without an NPU; imported in a program's subprocess only.

The interpreter gets its inputs by a copy from the device, which does nothing here, so it would see zeros: the host
tensors are handed to it instead. Its calculator library, built once by `kernels.calculator`, is loaded rather than
built again. And its results are taken from it by `kernels.interpreted_data` before the cost model runs, which would
be started with every argument twice. All reach into PyPTO's internals, so another version is refused.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kernels.calculator import pypto_version
from kernels.errors import ToolchainError

SUPPORTED_VERSION = "0.2.0"


def install(library: Path, *, simulate_interpreted: bool = True) -> None:
    """Load the calculator from `library`, hand host tensors to the interpreter, and take its results from it.

    A program that was interpreted goes through the cost model too only with `simulate_interpreted`; its results do
    not depend on that. Raises ToolchainError on another pypto version, or when the library cannot be loaded.
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

    from kernels.interpreted_data import take_results

    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(f"cannot load the calculator library {library}: {error}; delete it to rebuild") from None
    BuildOnlineManager().calculator_loaded = True

    def verifying() -> bool:
        return bool(pypto.get_verify_options().get("enable_pass_verify"))

    def set_host_tensors(tensors: list[Any]) -> None:
        if verifying():
            pypto_impl.SetVerifyData(entry._pto_to_tensor_data(tensors), [], _pto_verify_datas.get_data())

    run_cost_model = entry.JitCallableWrapper._run_with_cpu

    def run(wrapper: Any, tensors: list[Any], outputs: list[Any]) -> None:
        interpreted = verifying()
        if interpreted:
            take_results(tensors)
        if simulate_interpreted or not interpreted:
            run_cost_model(wrapper, tensors, outputs)

    entry.JitCallableWrapper._setup_verify_data = staticmethod(set_host_tensors)
    entry.JitCallableWrapper._run_with_cpu = run
