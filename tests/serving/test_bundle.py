"""Bundles: what the digest covers, that they appear whole or not at all, and that damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from quantize.checkpoint import CONFIG_NAME
from quantize.recipe import Gates, Recipe
from serving.bundle import (
    Bundle,
    BundleParts,
    assemble_bundle,
    bundle_digest,
    read_bundle,
    update_evidence,
    verify_bundle,
)
from serving.errors import BundleError
from serving.manifest import MANIFEST_FILE
from tests.serving.bundles import evidence_of, flip_byte


@pytest.fixture
def bundle(tiny_parts: list[BundleParts], tmp_path: Path) -> Bundle:
    return assemble_bundle(tmp_path / "bundle", tiny_parts[0], evidence_of(tiny_parts[0]))


def test_assembled_bundle_reads_back_and_verifies(bundle: Bundle, tiny_parts: list[BundleParts]) -> None:
    again = read_bundle(bundle.path)
    assert again == bundle
    assert again.digest == bundle_digest(tiny_parts[0])
    assert verify_bundle(bundle.path) == []
    assert (bundle.reports_dir / "quality.json").is_file()
    assert sorted(bundle.manifest.program_files) == ["decode_layer/program.json"]


def test_files_are_hard_links_where_possible(bundle: Bundle, tiny_parts: list[BundleParts]) -> None:
    for name in ("slabs.safetensors", "slabs.json"):
        assert (bundle.slabs_dir / name).samefile(tiny_parts[0].slabs_dir / name)


def test_digest_does_not_depend_on_times_names_or_gates(bundle: Bundle, tiny_parts: list[BundleParts]) -> None:
    parts = replace(tiny_parts[0], recipe=Recipe(gates=Gates(max_mean_kl=0.5)))
    other = assemble_bundle(
        bundle.path.with_name("other"), parts, evidence_of(parts, name="renamed", created="2027-01-01T00:00:00+00:00")
    )
    assert other.digest == bundle.digest


def test_digest_does_not_depend_on_safetensors_header_bytes(tiny_parts: list[BundleParts], tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(tiny_parts[0].checkpoint_dir, copy)
    shard = next(copy.glob("*.safetensors"))
    before = shard.read_bytes()
    with safe_open(shard, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, shard, metadata={"format": "pt", "note": "written again"})
    assert shard.read_bytes() != before
    assert bundle_digest(replace(tiny_parts[0], checkpoint_dir=copy)) == bundle_digest(tiny_parts[0])


def test_everything_in_the_identity_changes_the_digest(tiny_parts: list[BundleParts], tmp_path: Path) -> None:
    parts = tiny_parts[0]
    copy = tmp_path / "checkpoint"
    shutil.copytree(parts.checkpoint_dir, copy)
    config = json.loads((copy / CONFIG_NAME).read_text())
    (copy / CONFIG_NAME).write_text(json.dumps({**config, "pad_token_id": 1}))
    variants = [
        parts,
        replace(parts, source_digest="0" * 64),
        replace(parts, recipe=Recipe(arithmetic="compat")),
        replace(parts, programs={"decode_layer": "other"}),
        replace(parts, programs={}),
        replace(parts, checkpoint_dir=copy),
        replace(parts, slabs_dir=tiny_parts[1].slabs_dir),
        tiny_parts[1],
    ]
    assert len({bundle_digest(variant) for variant in variants}) == len(variants)


def _remove_a_program(bundle: Bundle) -> None:
    (bundle.programs_dir / "decode_layer" / "program.json").unlink()


def _add_a_program(bundle: Bundle) -> None:
    (bundle.programs_dir / "stray.json").write_text("{}")


def _damage_slab(bundle: Bundle) -> None:
    flip_byte(bundle.slabs_dir / "slabs.safetensors")


def _damage_weight(bundle: Bundle) -> None:
    flip_byte(next(bundle.checkpoint_dir.glob("*.safetensors")))


def _damage_tokenizer(bundle: Bundle) -> None:
    path = bundle.checkpoint_dir / "tokenizer.json"
    content = path.read_text().replace('"type"', '"type" ', 1)
    path.unlink()
    path.write_text(content)


def _swap_slabs_for_another_models(bundle: Bundle) -> None:
    # Sound by themselves, but not the slabs of this bundle.
    shutil.rmtree(bundle.slabs_dir)
    shutil.copytree(bundle.path.parent / "other-slabs", bundle.slabs_dir)


def _change_identity(bundle: Bundle) -> None:
    file = bundle.path / MANIFEST_FILE
    content = json.loads(file.read_text())
    content["identity"]["source_digest"] = "0" * 64
    file.write_text(json.dumps(content))


def _truncate_slab(bundle: Bundle) -> None:
    path = bundle.slabs_dir / "slabs.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_remove_a_program, "program.json is missing"),
        (_add_a_program, "stray.json is not recorded"),
        (_damage_slab, "slabs/"),
        (_truncate_slab, "truncated"),
        (_damage_weight, "checkpoint/ tensor .* has changed"),
        (_damage_tokenizer, "checkpoint/tokenizer.json has changed"),
        (_swap_slabs_for_another_models, "slabs/ slab .* has changed"),
        (_change_identity, "does not belong to the identity"),
    ],
)
def test_verify_names_each_kind_of_damage(
    bundle: Bundle, tiny_parts: list[BundleParts], damage: Callable[[Bundle], None], expected: str
) -> None:
    shutil.copytree(tiny_parts[1].slabs_dir, bundle.path.parent / "other-slabs")
    damage(bundle)
    problems = verify_bundle(bundle.path)
    assert problems
    with pytest.raises(BundleError, match=expected):
        raise BundleError("damaged", problems)


def test_verify_lists_all_problems_at_once(bundle: Bundle) -> None:
    _remove_a_program(bundle)
    _damage_tokenizer(bundle)
    _damage_slab(bundle)
    assert len(verify_bundle(bundle.path)) == 3


def test_unreadable_manifests_say_why(bundle: Bundle, tmp_path: Path) -> None:
    file = bundle.path / MANIFEST_FILE
    content = json.loads(file.read_text())
    for text, pattern in (
        (json.dumps({**content, "schema_version": 2}), "schema version 2"),
        ("{", "not valid JSON"),
        (json.dumps({**content, "extra": 1}), "extra"),
        (json.dumps([]), "schema version None"),
    ):
        file.write_text(text)
        with pytest.raises(BundleError, match=pattern):
            read_bundle(bundle.path)
        assert len(verify_bundle(bundle.path)) == 1
    with pytest.raises(BundleError, match="is not a bundle"):
        read_bundle(tmp_path)


def test_evidence_can_be_completed_without_changing_the_digest(bundle: Bundle) -> None:
    updated = update_evidence(bundle.path, tpot={"tpot_ms": 1.5}, mlflow_run_id="abc")
    assert updated == read_bundle(bundle.path)
    assert updated.digest == bundle.digest
    assert updated.manifest.evidence.tpot == {"tpot_ms": 1.5}
    assert updated.manifest.evidence.model == bundle.manifest.evidence.model
    assert verify_bundle(bundle.path) == []
    with pytest.raises(ValueError, match="no_such"):
        update_evidence(bundle.path, no_such=1)


def test_failed_assembly_leaves_nothing(tiny_parts: list[BundleParts], tmp_path: Path) -> None:
    parts, evidence = tiny_parts[0], evidence_of(tiny_parts[0])
    out = tmp_path / "work" / "bundle"
    for broken, pattern in (
        (replace(parts, programs_dir=tmp_path / "none"), "programs"),
        (replace(parts, slabs_dir=tmp_path), "cannot be bundled"),
        (replace(parts, checkpoint_dir=tmp_path), "cannot be bundled"),
    ):
        with pytest.raises(BundleError, match=pattern):
            assemble_bundle(out, broken, evidence)
        assert not out.parent.exists() or list(out.parent.iterdir()) == []
    assemble_bundle(out, parts, evidence)
    with pytest.raises(BundleError, match="already exists"):
        assemble_bundle(out, parts, evidence)
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
