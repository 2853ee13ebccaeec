"""The registered kernel contracts, by ABI, family and quantization, and the match of a checkpoint with one of them.

A match reads `config.json` and nothing else: a model that no kernels will take is refused before a weight is touched.
"""

from __future__ import annotations

from pathlib import Path

from kernels import abi_pypto_lib, contract_decoder
from kernels.contract import DownDtype
from kernels.errors import ContractError
from kernels.stage_contract import Contract
from quantize.checkpoint import CONFIG_NAME
from quantize.errors import QuantizeError
from quantize.json_files import read_json_object
from quantize.model_config import ModelConfig, load_model_config
from quantize.quantization_config import parse_quantization

__all__ = ["ABIS", "CONTRACTS", "down_of", "find_contract", "match_checkpoint"]

CONTRACTS: tuple[Contract, ...] = (*contract_decoder.DECODER_CONTRACTS, abi_pypto_lib.PYPTO_LIB_QWEN3_A8W8)
ABIS = tuple(dict.fromkeys(contract.abi for contract in CONTRACTS))


def find_contract(abi: str, family: str, down: DownDtype) -> Contract:
    """The contract of `abi` for `family` with the down projection in `down`.

    Raises ContractError that says which ABIs, families and quantizations are registered instead.
    """
    of_abi = [contract for contract in CONTRACTS if contract.abi == abi]
    if not of_abi:
        raise ContractError(f"no kernel contract for ABI {abi!r}; registered are {', '.join(ABIS)}")
    of_family = [contract for contract in of_abi if contract.family == family]
    if not of_family:
        families = ", ".join(dict.fromkeys(contract.family for contract in of_abi))
        raise ContractError(f"ABI {abi} has no contract for family {family}; it has {families}")
    for contract in of_family:
        if contract.down == down:
            return contract
    takes = " or ".join(contract.down for contract in of_family)
    raise ContractError(
        f"ABI {abi} takes down_proj of family {family} in {takes}, and this checkpoint has it in {down}: "
        f"quantize the source again with `down: {takes}` in the recipe"
    )


def down_of(directory: Path, config: ModelConfig) -> DownDtype:
    """How the checkpoint's `config.json` says its down projections are stored.

    Raises ContractError when it is not quantized, not in a scheme that is read here, or not the same in every layer.
    """
    path = directory / CONFIG_NAME
    quantization = parse_quantization(read_json_object(path))
    if quantization is None:
        raise ContractError(f"{path} has no quantization_config; expected a W8A8 checkpoint: quantize it first")
    if quantization.problems:
        raise ContractError(f"{path}: {'; '.join(quantization.problems)}")
    try:
        quantized = [
            quantization.is_quantized(f"model.layers.{layer}.mlp.down_proj") for layer in range(config.num_layers)
        ]
    except QuantizeError as error:
        raise ContractError(f"{path}: {error}") from error
    if len(set(quantized)) > 1:
        raise ContractError(
            f"{path}: down_proj is quantized in {sum(quantized)} of {config.num_layers} layers; expected all or none: "
            "a slab has one dtype, quantize again"
        )
    return "int8" if quantized[0] else "bf16"


def match_checkpoint(directory: Path, abi: str) -> tuple[Contract, ModelConfig]:
    """The contract of `abi` that the W8A8 checkpoint in `directory` fits, from its `config.json` alone.

    Raises ContractError naming every rule broken with both numbers, or quantize's CheckpointError when the file cannot
    be read or used.
    """
    config = load_model_config(directory)
    contract = find_contract(abi, config.family, down_of(directory, config))
    contract.check(config)
    return contract, config
