"""Rules of vLLM and vllm-ascend for compressed-tensors W8A8, INT8 weights and dynamic INT8 inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quantize.architecture import LAYER_PROJECTIONS, layer_prefix, linear_modules
from quantize.checkpoint import CheckpointScan
from quantize.model_config import ModelConfig
from quantize.quantization_config import HONOURED_FORMATS, Quantization, matches, matches_pattern
from quantize.readers.common import Check, grouped, is_codes, plain_head, quantized_w8a8, section_of

FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Linears that vLLM joins into one, by the joint name within a layer: one scheme for all members."""
_UNFUSED = tuple(name for name in LAYER_PROJECTIONS if not any(name in members for members in FUSED.values()))


def _explicit_section(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """vLLM chooses the loader by `quant_method` and the scheme by `format`; a group must be spelled out."""
    section = section_of(scan)
    if not section:
        return []
    problems = []
    if section.get("quant_method") != "compressed-tensors":
        problems.append(
            f'quantization_config.quant_method: found {section.get("quant_method")!r}, expected "compressed-tensors"; '
            "add the key"
        )
    groups = section.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            problems.append(
                f"quantization_config.config_groups.{str(name)[:40]}: found a preset, expected weights and "
                "input_activations spelled out; quantize again from the original checkpoint"
            )
        elif (group.get("format") or section.get("format")) not in HONOURED_FORMATS:
            problems.append(
                f"quantization_config.format: found {str(section.get('format'))[:40]!r}, expected one of "
                f"{', '.join(HONOURED_FORMATS)}; add the key"
            )
    return problems


def _names(entry: str, name: str) -> bool:
    """Whether an `ignore` entry names a module as vLLM reads it: exactly or by pattern, never by class."""
    if entry.startswith("re:"):
        return matches_pattern(entry.removeprefix("re:"), name)
    return entry == name


def _fused_groups(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """Members of a joint Linear share one scheme, in the file and in what `ignore` says."""
    problems = []
    for layer in range(config.num_layers):
        for joint, members in FUSED.items():
            modules = [layer_prefix(layer) + member for member in members]
            codes = [module for module in modules if is_codes(scan, module)]
            if codes and len(codes) < len(modules):
                rest = sorted(set(modules) - set(codes))
                problems.append(
                    f"layer {layer}: {joint} joins {', '.join(members)}: found {', '.join(codes)} in INT8 and "
                    f"{', '.join(rest)} not, expected one scheme; quantize all of them or none"
                )
    return problems


def _vllm_linears(config: ModelConfig) -> Iterator[tuple[str, str, list[str]]]:
    """Every Linear as vLLM builds it: its name, its class, and the checkpoint's modules that it joins."""
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for joint, members in FUSED.items():
            kind = "QKVParallelLinear" if joint.endswith("qkv_proj") else "MergedColumnParallelLinear"
            yield prefix + joint, kind, [prefix + member for member in members]
        for name in _UNFUSED:
            yield prefix + name, "RowParallelLinear", [prefix + name]


def _vllm_scheme(quantization: Quantization, name: str, kind: str, members: list[str]) -> bool | None:
    """Whether vLLM takes a Linear as quantized; None where it would find no scheme, or two."""
    ignored = {any(_names(entry, member) for entry in quantization.ignore) for member in members}
    if len(members) > 1 and name in quantization.ignore:
        ignored = {True}
    if len(ignored) > 1:
        return None
    if ignored == {True}:
        return False
    for target in quantization.targets:
        by_class = matches(target, kind) if target.startswith("re:") else target.lower() in kind.lower()
        if by_class or _names(target, name):
            return True
    targeted = all(any(_names(target, member) for target in quantization.targets) for member in members)
    return True if targeted else None


def _listed_by_name(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """`ignore` and `targets`, read by names (fused ones too) and its own classes, agree with what the file holds."""
    quantization = scan.quantization
    if quantization is None or quantization.problems:
        return []
    unlisted: list[str] = []
    unquantized: list[str] = []
    for name, kind, members in _vllm_linears(config):
        scheme = _vllm_scheme(quantization, name, kind, members)
        stored = {is_codes(scan, member) for member in members}
        if len(stored) == 1 and scheme is not stored.pop():
            (unquantized if scheme is False else unlisted).extend(members)
    problems = []
    if unlisted:
        problems.append(
            f"quantization_config: {grouped(unlisted)}: found neither INT8 weights under a target nor an ignore entry "
            "by name, expected one of the two for every Linear; name them in ignore (exactly, or by `re:` pattern)"
        )
    if unquantized:
        problems.append(f"quantization_config.ignore names {grouped(unquantized)}, whose weights are INT8; remove it")
    return problems


def _channel_scales(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """One scale a channel, stored `[out, 1]` as the parameter it is copied into."""
    problems = []
    for module, (out_features, _) in linear_modules(config).items():
        if not is_codes(scan, module):
            continue
        scale = scan.infos.get(module + ".weight_scale")
        if scale is None:
            problems.append(f"{module}.weight_scale is missing, expected [{out_features}, 1]; quantize again")
        elif scale.shape != (out_features, 1):
            problems.append(
                f"{module}.weight_scale has shape {list(scale.shape)}, expected [{out_features}, 1]; quantize again"
            )
    return problems


def _no_zero_points(scan: CheckpointScan, config: ModelConfig) -> list[str]:
    """Symmetric means no zero points or offsets, and dynamic means no stored input scales."""
    suffixes = (".weight_zero_point", ".weight_offset", ".input_scale", ".input_zero_point", ".weight_g_idx")
    found = [name for name in scan.infos if name.endswith(suffixes)]
    if not found:
        return []
    return [f"found {grouped(found)}, expected symmetric weights and dynamic inputs only; quantize again"]


RULES: tuple[Check, ...] = (
    quantized_w8a8,
    _explicit_section,
    _fused_groups,
    _listed_by_name,
    _channel_scales,
    _no_zero_points,
    plain_head,
)
