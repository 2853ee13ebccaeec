"""The toolchain around the programs: verdicts, cache, content keys, timeouts, concurrent processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kernels.calculator
import kernels.source_closure
from kernels.calculator import build_calculator, default_cache_dir, system_cmake
from kernels.catalog import BUILTIN_NAMES, SERVED_NAMES, Check, builtin_config, programs_for
from kernels.check_cache import RESULT_FILE, CheckCache
from kernels.errors import ContractError, ProgramError, ToolchainError
from kernels.programs.lm_head import LmHeadGreedy, LmHeadSpec
from kernels.report import CheckResult, ProgramReport, summarize
from kernels.runner_process import run_request, runner_folder
from kernels.source_closure import closure_digest, imported_modules, module_path
from kernels.toolchain import check_key, run_check, validate
from kernels.verdict import ALL_PASSES, read_error_log, read_simulated_us, read_verification
from quantize.model_config import ModelConfig
from tests.kernels.programs_support import full_check, head_program, layer_program, sabotage
from tests.serving.golden_executor import CONFIG

HEADER = "passName,verifyType,loopInfo,ioflag,verifyResult,errorCount,maxAbsDiff"


def verifier_files(
    folder: Path, *, drop: str = "", edit: tuple[str, str] = ("", ""), log: str = "body result PASS\n"
) -> Path:
    """Files as the verifier leaves them for one output and two loop bodies; rows that start with `drop` are missing."""
    rows = ["tensor_graph,f,i=0,output1,PASS,0,0.0"]
    for index, name in enumerate(ALL_PASSES):
        rows += [f"Pass_{index:02}_{name},f,i={body},output0,PASS,0,0.0" for body in range(2)]
    rows = [row.replace(*edit) if edit[0] else row for row in rows if not (drop and row.startswith(drop))]
    target = folder / "output_1" / "verify_1"
    target.mkdir(parents=True)
    (target / "verify_result_brief.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    (target / "verify_exception.log").write_text(log)
    return folder


def problems(output: Path, goldens: int = 1, units: int = 2) -> str:
    return "; ".join(read_verification(output, ALL_PASSES, goldens, units).problems)


def test_complete_files_are_accepted(tmp_path: Path) -> None:
    verification = read_verification(verifier_files(tmp_path), ALL_PASSES, goldens=1, units=2)
    assert verification.problems == ()
    assert verification.passes == ("tensor_graph", *ALL_PASSES)
    assert verification.rows == 13


def test_a_pass_without_rows_is_not_verified(tmp_path: Path) -> None:
    output = verifier_files(tmp_path, drop="Pass_01_SplitK")
    assert problems(output) == "SplitK: not compared; SplitK: 0 loop bodies compared, expected 2"
    assert "SplitK" not in read_verification(output, ALL_PASSES, 1, 2).passes


def test_a_loop_body_without_rows_is_noticed(tmp_path: Path) -> None:
    output = verifier_files(tmp_path, drop="Pass_03_InferDynShape,f,i=1")
    assert problems(output) == "InferDynShape: 1 loop bodies compared, expected 2"


def test_a_missing_golden_is_noticed(tmp_path: Path) -> None:
    assert "1 outputs compared, expected 2" in problems(verifier_files(tmp_path), goldens=2)


def test_one_element_out_of_tolerance_fails_though_the_verifier_says_pass(tmp_path: Path) -> None:
    output = verifier_files(tmp_path, edit=("tensor_graph,f,i=0,output1,PASS,0,0.0", "tensor_graph,f,i=0,o,PASS,1,9.5"))
    assert "1 elements out of tolerance, largest difference 9.5" in problems(output)


def test_an_exception_in_the_interpreter_fails(tmp_path: Path) -> None:
    output = verifier_files(tmp_path, log="body result PASS\n[VERIFY] Pass_04\nErrcode: FB200B!\n")
    assert "the interpreter raised: [VERIFY] Pass_04 Errcode: FB200B!" in problems(output)


def test_no_files_at_all_fail(tmp_path: Path) -> None:
    assert "found 0" in problems(tmp_path)


def test_simulated_time_comes_from_the_summary_or_from_the_cycles(tmp_path: Path) -> None:
    report = tmp_path / "output_1" / "CostModelSimulationOutput" / "x.stat.report.txt"
    report.parent.mkdir(parents=True)
    report.write_text("Total Cycles....:    900000\nTotal Cycles: 7\n")
    assert read_simulated_us("AICore End-to-End Time: 12.5\n", tmp_path) == 12.5
    assert read_simulated_us("nothing\n", tmp_path) == 500.0
    report.unlink()
    with pytest.raises(ToolchainError, match="left no time"):
        read_simulated_us("nothing\n", tmp_path)


def test_the_error_log_yields_the_reason_and_not_the_noise(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[ERROR] MACHINE:noise\n[INFO] PASS:fine\n[ERROR] PYPTO [x][PASS]:exceeds MEM_L1\n")
    assert read_error_log(tmp_path) == "[ERROR] PYPTO [x][PASS]:exceeds MEM_L1"


def result(key: str = "k1", **changes: object) -> CheckResult:
    values = {"kind": "small", "key": key, "shape": {"a": 1}, "ok": True, "passes": ("tensor_graph",)}
    return CheckResult(**{**values, **changes})  # type: ignore[arg-type]


def test_cache_keeps_results_with_their_artifacts(tmp_path: Path) -> None:
    artifact = tmp_path / "timeline.json"
    artifact.write_text("{}")
    cache = CheckCache(tmp_path / "cache")
    assert cache.get("k1") is None
    kept = cache.put(result(artifacts=(str(artifact),), outputs={"out": 0.5}))
    artifact.unlink()
    found = cache.get("k1")
    assert found is not None
    assert found.cached
    assert found.artifacts == kept.artifacts
    assert Path(found.artifacts[0]).read_text() == "{}"
    assert found.outputs == {"out": 0.5}
    assert not list((tmp_path / "cache").glob(".new-*"))


@pytest.mark.parametrize("damage", ["truncated", "edited", "artifact", "other key", "not json"])
def test_a_damaged_entry_is_dropped_with_a_note(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = tmp_path / "timeline.json"
    artifact.write_text("{}")
    cache = CheckCache(tmp_path / "cache")
    cache.put(result(artifacts=(str(artifact),)))
    entry = tmp_path / "cache" / "k1" / RESULT_FILE
    text = entry.read_text()
    if damage == "artifact":
        (entry.parent / "timeline.json").write_text("{ }")
    elif damage == "other key":
        entry.parent.rename(tmp_path / "cache" / "k2")
    else:
        entry.write_text(
            {"truncated": text[:-20], "edited": text.replace('"ok": true', '"ok": false')}.get(damage, "no")
        )
    assert cache.get("k2" if damage == "other key" else "k1") is None
    assert "is damaged" in caplog.text
    assert cache.put(result()).ok
    assert cache.get("k1") is not None


def test_a_cache_that_cannot_be_written_only_means_that_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CheckCache(tmp_path / "file" / "cache")
    with cache.locked("k1"):
        assert cache.get("k1") is None
        kept = cache.put(result(artifacts=(str(tmp_path / "file"),)))
    assert kept.ok
    assert kept.artifacts == ()
    assert "cannot keep check" in caplog.text


def test_reports_survive_json() -> None:
    report = summarize("p", "k", [result(), result("k2", kind="simulated", simulated_us=4.0, hbm_bytes=16_000_000)])
    assert report.status == "READY"
    assert (report.simulated_us, report.hbm_bound_us, report.estimate_us) == (4.0, 10.0, 10.0)
    assert ProgramReport.from_json(json.loads(json.dumps(report.to_json()))).to_json() == report.to_json()
    with pytest.raises(ValueError, match="typo"):
        ProgramReport.from_json({**report.to_json(), "typo": 1})


def test_one_failed_check_fails_the_program() -> None:
    report = summarize("p", "k", [result(), result("k2", kind="own width", ok=False, error="boom")])
    assert (report.status, report.error) == ("FAILED", "own width: boom")


def test_the_source_closure_follows_imports_and_nothing_else() -> None:
    found = imported_modules(module_path("kernels.programs.decode_stages").read_bytes())
    assert {"kernels.programs.blocks", "kernels.programs.decode_layer", "kernels.goldens"} <= found
    assert "kernels.programs.lm_head" not in found
    assert imported_modules(b"import torch\nfrom serving import worker\nfrom . import x\n") == set()


def test_sources_may_be_followed_by_several_threads_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: closure_digest("kernels.programs.decode_step"), range(24)))
    assert len(found) == 1


def test_keys_change_with_content_and_not_with_file_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, head = full_check(layer_program()), full_check(head_program())
    before = {"layer": check_key(layer), "head": check_key(head)}
    copies: dict[str, Path] = {}

    def copied(name: str) -> Path:
        if name not in copies:
            copies[name] = Path(shutil.copyfile(module_path(name), tmp_path / name))
        return copies[name]

    monkeypatch.setattr(kernels.source_closure, "module_path", copied)
    assert {"layer": check_key(layer), "head": check_key(head)} == before
    for path in copies.values():
        os.utime(path, (1, 1))
    assert {"layer": check_key(layer), "head": check_key(head)} == before
    kernel = copies["kernels.programs.lm_head_kernel"]
    kernel.write_text(kernel.read_text() + "\n# one line more\n")
    assert check_key(layer) == before["layer"]
    assert check_key(head) != before["head"]
    golden = copies["kernels.goldens"]
    golden.write_text(golden.read_text() + "\n# one line more\n")
    assert check_key(layer) != before["layer"]


def test_keys_change_with_shape_and_passes() -> None:
    keys = {
        check_key(full_check(head_program())),
        check_key(full_check(head_program(batch_rows=2))),
        check_key(Check("small", head_program(), ALL_PASSES[:3])),
        check_key(Check("own width", head_program(), ALL_PASSES)),
    }
    assert len(keys) == 4
    assert closure_digest("kernels.tiles") == closure_digest("kernels.tiles")


def test_a_check_is_run_once_and_a_damaged_entry_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check, cache = full_check(head_program(batch_rows=1)), CheckCache(tmp_path)
    first = run_check(check, cache, default_cache_dir(), 240)
    second = run_check(check, cache, default_cache_dir(), 240)
    assert (first.ok, first.cached) == (True, False)
    assert (second.ok, second.cached) == (True, True)
    (tmp_path / first.key / RESULT_FILE).write_text("torn")
    third = run_check(check, cache, default_cache_dir(), 240)
    assert (third.ok, third.cached) == (True, False)
    assert "is damaged" in caplog.text


def test_two_processes_at_once_run_a_check_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from kernels.calculator import default_cache_dir\n"
        "from kernels.check_cache import CheckCache\n"
        "from kernels.toolchain import run_check\n"
        "from tests.kernels.programs_support import full_check, head_program\n"
        "r = run_check(full_check(head_program()), CheckCache(Path(sys.argv[1])), default_cache_dir(), 240)\n"
        "sys.stdout.write(f'{r.ok} {r.cached}')\n"
    )
    build_calculator()
    command = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate(timeout=240)[0] for process in running) == ["True False", "True True"]


def test_an_overrun_is_killed_with_everything_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = "sleeping-for-the-timeout-test"
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', 'sleep 120; : {mark}'])"
    sabotage(monkeypatch, tmp_path / "site", code)
    check = full_check(head_program())
    overrun = run_check(check, CheckCache(tmp_path / "cache"), default_cache_dir(), timeout_s=2)
    assert not overrun.ok
    assert "did not end within 2 s and was killed" in overrun.error
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listing.splitlines() if mark in line]


def test_the_folder_of_a_killed_caller_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with runner_folder() as held:
        abandoned = tmp_path / "pypto-run-abandoned"
        abandoned.mkdir()
        (abandoned / "owner.lock").touch()
        (tmp_path / "another").mkdir()
        for folder in (held, abandoned, tmp_path / "another"):
            os.utime(folder, (1, 1))
        with runner_folder():
            assert held.is_dir()
            assert not abandoned.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["another"]


def test_the_calculator_needs_a_native_cmake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.calculator, "system_cmake", lambda: None)
    with pytest.raises(ToolchainError, match="no native cmake on PATH"):
        build_calculator(tmp_path)
    script = tmp_path / "bin" / "cmake"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(script.parent))
    assert system_cmake() != script


def test_a_failed_compilation_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import kernels.tiles
kernels.tiles.check_cube_tile = lambda tile, element_bytes: None
right = kernels.tiles.choose_cube_tile
def wrong(*args, **kwargs):
    tile = right(*args, **kwargs)
    return kernels.tiles.CubeTile(tile.m, tile.k_l0, tile.k_l0 + 16, tile.k_right, tile.n)
kernels.tiles.choose_cube_tile = wrong
"""
    sabotage(monkeypatch, tmp_path / "site", code)
    failed = run_check(full_check(head_program()), CheckCache(tmp_path / "cache"), default_cache_dir(), 240)
    assert not failed.ok
    assert "FC4000" in failed.error


def test_an_unknown_request_is_an_error_of_the_program(tmp_path: Path) -> None:
    program = {"name": "no_such_program", "spec": {}}
    request = {"kind": "check", "program": program, "verify": True, "library": str(build_calculator())}
    with runner_folder() as folder, pytest.raises(ProgramError, match="no_such_program"):
        run_request(folder, request, timeout_s=60)
    assert not folder.exists()


def test_unknown_program_names_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no program is called attention; the programs are decode_layer"):
        validate(CONFIG, names=["attention"], cache_dir=tmp_path)


def test_a_model_that_no_program_covers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="hidden_size 100 is not a multiple of 32"):
        validate(_changed(CONFIG, hidden_size=100), cache_dir=tmp_path)
    with pytest.raises(ContractError, match="num_kv_heads"):
        validate(_changed(CONFIG, num_kv_heads=3), cache_dir=tmp_path)


def test_the_catalog_lists_14b_at_its_own_widths_and_at_the_serving_shape() -> None:
    assert "qwen3-14b" in BUILTIN_NAMES
    layer, head, step, *others = programs_for(builtin_config("qwen3-14b"))
    small, own, simulated = layer.checks
    assert small.passes == ALL_PASSES
    assert (own.program.spec.to_json()["hidden_size"], simulated.program.spec.to_json()["batch_rows"]) == (5120, 16)
    assert "passes up to L1CopyInReuseMerge" in own.note
    assert [check.kind for check in step.checks] == ["small", "simulated"]
    assert "2 of 40 layers" in step.checks[1].note
    by_name = {case.name: case for case in others}
    assert {"prefill_layer", "prefill_step", "greedy_sample", "topk_select", "embedding_gather"} < set(by_name)
    assert {"turboquant_encode", "turboquant_attention"} < set(by_name)
    for name in ("decode_layer_bf16", "decode_step_bf16", "prefill_layer_bf16", "prefill_step_bf16"):
        spec = by_name[name].checks[0].program.spec.to_json()
        assert spec.get("layer", spec)["weights"] == "bf16"
    assert {"decode_layer", "lm_head_greedy"} == set(SERVED_NAMES)
    described = head.describe()
    assert "of 151936 ids" in described["own width"]
    assert "real_vocab=151936" in described["simulated"]
    with pytest.raises(KeyError, match="qwen3-14b"):
        builtin_config("qwen3-15b")


@pytest.mark.slow
def test_validate_a_tiny_model_end_to_end(tmp_path: Path) -> None:
    seen: list[str] = []
    names = ["decode_layer", "lm_head_greedy"]
    reports = validate(CONFIG, names=names, cache_dir=_cache_with_calculator(tmp_path), progress=seen.append)
    assert [(report.name, report.status, report.error) for report in reports] == [
        ("decode_layer", "READY", ""),
        ("lm_head_greedy", "READY", ""),
    ]
    assert len(seen) == 6
    for report in reports:
        assert report.passes == ("tensor_graph", *ALL_PASSES)
        assert report.simulated_us is not None
        assert report.simulated_us > 0
        assert {Path(path).name for path in report.artifacts} == {"program.json.gz", "timeline.json"}
    again = validate(CONFIG, names=names, cache_dir=tmp_path)
    assert all(report.cached for report in again)
    assert [report.key for report in again] == [report.key for report in reports]
    simulated = validate(CONFIG, cache_dir=tmp_path, names=["lm_head_greedy"], kinds=["simulated"])
    assert [(report.name, report.passes, report.cached) for report in simulated] == [("lm_head_greedy", (), True)]


def _cache_with_calculator(folder: Path) -> Path:
    """An empty cache folder that shares the calculator library, which takes half a minute to build."""
    library = build_calculator()
    shutil.copytree(library.parent, folder / "calculator" / library.parent.name)
    return folder


def _changed(config: ModelConfig, **changes: object) -> ModelConfig:
    return ModelConfig(**{**config.__dict__, **changes})


def test_the_head_of_a_large_vocabulary_has_ids_below_the_exact_fp32_range() -> None:
    spec = LmHeadSpec.of(builtin_config("qwen3-14b"), batch_rows=16)
    assert LmHeadGreedy(spec).units() == 2 + spec.chunks
    assert spec.real_vocab < 2**24
