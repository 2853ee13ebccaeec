"""The command line's answers: JSON alone on stdout, one clear message for bad input, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.support import environment, run_cli, run_json
from tests.tiny_models import make_tiny_llama

VERBS = ("release", "quantize", "stage", "programs", "serve", "bundles", "promote", "rollback", "status", "bench")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w8a8") / "out"
    run_json("quantize", str(source), str(out))
    return out


def test_help_lists_every_verb() -> None:
    stdout, _ = run_cli("--help")
    for verb in (*VERBS, "inspect", "sample-model", "doctor"):
        assert f"  {verb} " in stdout


def test_quantize_answers_with_digest_and_sizes(source: Path, tmp_path: Path) -> None:
    first = run_json("quantize", str(source), str(tmp_path / "a"))
    again = run_json("quantize", str(source), str(tmp_path / "b"))
    compat = run_json("quantize", str(source), str(tmp_path / "c"), "--arithmetic", "compat")
    assert first["digest"] == again["digest"] != compat["digest"]
    assert compat["arithmetic"] == "compat"
    assert 0 < first["bytes_out"] < first["bytes_in"]
    assert {"tensors", "seconds"} <= first.keys()


def test_quantize_takes_bounds_of_memory_workers_and_shards(source: Path, tmp_path: Path) -> None:
    plain = run_json("quantize", str(source), str(tmp_path / "a"))
    options = ("--memory", "1G", "--workers", "3", "--max-shard-size", "40K")
    bounded = run_json("quantize", str(source), str(tmp_path / "b"), *options)
    assert bounded["digest"] == plain["digest"]
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert (plain["resumed"], bounded["resumed"]) == (0, 0)


def test_stage_answers_with_digest_and_tensors(checkpoint: Path, tmp_path: Path) -> None:
    answer = run_json("stage", str(checkpoint), str(tmp_path / "slabs"))
    assert answer["tensors"]["wq"]["dtype"] == "INT8"
    assert (tmp_path / "slabs" / "slabs.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "absent", "OUT"], ["absent"]),
        (["quantize", "SOURCE", "EXISTING"], ["exists"]),
        (["quantize", "CHECKPOINT", "OUT"], ["already quantized"]),
        (["quantize", "SOURCE", "OUT", "--recipe", "BAD_RECIPE"], ["ignored", "recipe"]),
        (["quantize", "SOURCE", "OUT", "--recipe", "absent.yaml"], ["absent.yaml"]),
        (["quantize", "SOURCE", "OUT", "--memory", "1"], ["1 bytes", "expected at least"]),
        (["quantize", "SOURCE", "OUT", "--memory", "lots"], ["'lots' is no size", "600M"]),
        (["quantize", "SOURCE", "OUT", "--max-shard-size", "0"], ["'0' is no size"]),
        (["quantize", "SOURCE", "OUT", "--arithmetic", "fp8"], ["fp8", "compat"]),
        (["stage", "SOURCE", "OUT"], ["q_proj"]),
        (["stage", "CHECKPOINT", "OUT", "--down", "bf16"], ["down"]),
        (["release", "absent", "--store", "STORE"], ["found nothing", "expected"]),
        (["release", "SOURCE", "--store", "STORE", "--name", "a b"], ["name 'a b'"]),
        (["release", "SOURCE", "--store", "STORE", "--platform", "a2a3"], ["torch_npu", "--platform sim"]),
        (["release", "SOURCE", "--store", "EXISTING/file"], ["is a file"]),
        (["release", "EXISTING", "--store", "STORE"], ["without config.json"]),
        (["programs", "list", "--model", "gpt-5"], ["gpt-5", "qwen3-14b"]),
        (["programs", "simulate", "--program", "nope"], ["nope", "decode_layer"]),
        (["serve", "champion", "--store", "STORE"], ["no store at"]),
        (["bundles", "list", "--store", "STORE"], ["no store at"]),
        (["rollback", "--store", "EXISTING"], ["nothing"]),
        (["promote", "abcdef", "--store", "EXISTING"], ["abcdef"]),
        (["promote", "abcdef", "--alias", "best", "--store", "EXISTING"], ["best", "champion"]),
        (["bench", "serve", "http://127.0.0.1:9"], ["cannot be measured"]),
        (["frobnicate"], ["No such command"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], words: list[str], source: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "existing").mkdir()
    (tmp_path / "existing" / "file").write_text("")
    (tmp_path / "bad.yaml").write_text("ignored: [lm_head]\n")
    places = {
        "SOURCE": source,
        "CHECKPOINT": checkpoint,
        "OUT": tmp_path / "out",
        "EXISTING/file": tmp_path / "existing" / "file",
        "EXISTING": tmp_path / "existing",
        "BAD_RECIPE": tmp_path / "bad.yaml",
        "STORE": tmp_path / "store",
    }
    stdout, stderr = run_cli(*(str(places.get(word, word)) for word in arguments), code=2)
    assert stdout == ""
    for word in words:
        assert word in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_a_prefect_server_that_does_not_answer_is_named(source: Path, tmp_path: Path) -> None:
    arguments = ["release", str(source), "--store", str(tmp_path / "store"), "--name", "tiny"]
    _, stderr = run_cli(*arguments, code=2, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "PREFECT_API_URL is http://127.0.0.1:9/api" in stderr
    assert "Traceback" not in stderr


def test_an_error_with_json_is_an_object_too(tmp_path: Path) -> None:
    stdout, _ = run_cli("quantize", "absent", str(tmp_path / "out"), "--json", code=2)
    assert json.loads(stdout)["exit_code"] == 2


def test_doctor_names_what_this_machine_has() -> None:
    checks = {check["name"]: check for check in run_json("doctor")["checks"]}
    assert checks["pypto"]["status"] == "ok"
    assert checks["cpu"]["found"]
    assert checks["npu"]["status"] in {"ok", "absent"}
    assert "GiB free" in checks["disk"]["found"]


def test_doctor_names_a_server_that_does_not_answer() -> None:
    _, stderr = run_cli("doctor", code=1, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert "missing: mlflow" in stderr


def test_programs_list_names_shapes() -> None:
    programs = run_json("programs", "list", "--model", "qwen3-14b")["programs"]
    names = [program["name"] for program in programs]
    assert names[:3] == ["decode_layer", "lm_head_greedy", "decode_step"]
    assert {"prefill_layer", "prefill_step", "greedy_sample", "topk_select", "embedding_gather"} < set(names)
    assert {"turboquant_encode", "turboquant_attention"} < set(names)
    assert {f"{name}_bf16" for name in ("decode_layer", "decode_step", "prefill_layer", "prefill_step")} < set(names)


def test_hugging_faces_kernels_distribution_is_refused(tmp_path: Path) -> None:
    metadata = tmp_path / "kernels-0.9.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n")
    run = subprocess.run(
        [sys.executable, "-m", "flows.cli", "status"],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "pip uninstall kernels" in run.stderr
