"""The verbs `release`, `serve` and `bench serve`."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import typer

from flows import console
from flows.cli.output import JSON_OPTION, STORE_OPTION, FailedError, emit_json, emit_line, emit_table
from flows.cli.programs import programs_table
from flows.settings import Store, UsageError, configure_environment, resolve_store
from kernels.kv_format import KvName


class Platform(StrEnum):
    """Choices of `--platform`."""

    cpu = "cpu"
    sim = "sim"
    a2a3 = "a2a3"


class Promote(StrEnum):
    """Choices of `--promote`."""

    auto = "auto"
    manual = "manual"
    never = "never"


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command()(release)
    app.command()(serve)
    bench = typer.Typer(help="Measure an endpoint.", no_args_is_help=True)
    bench.callback()(lambda: None)
    bench.command("serve")(bench_serve)
    app.add_typer(bench, name="bench")


def release(
    source: str = typer.Argument(..., metavar="SRC", help="Checkpoint directory or .gguf file."),
    name: str | None = typer.Option(None, help="Model name in the registry [default: SRC's name]."),
    recipe: str | None = typer.Option(None, help="Recipe file (YAML)."),
    platform: Platform = typer.Option(
        Platform.cpu, help="Where TPOT comes from: measured on `cpu` or `a2a3`, or PyPTO's cost model (`sim`)."
    ),
    store: str | None = STORE_OPTION,
    promote: Promote = typer.Option(
        Promote.auto, help="`auto`: champion when the gates pass; `manual`: candidate only; `never`: neither."
    ),
    ask: list[str] | None = typer.Option(None, help="A prompt to put to the released worker at the end (repeatable)."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Release a checkpoint: quantize, stage, verify programs, measure, gate, log and promote."""
    folder = resolve_store(store)
    configure_environment(folder)
    from flows.inputs import check_checkpoint, check_inputs

    check_inputs(source, name, recipe, platform.value)
    check_checkpoint(Path(source))
    folder.root.mkdir(parents=True, exist_ok=True)
    console.use(console.ReleaseConsole())
    from flows.prefect_server import prepare_prefect
    from flows.reaper import no_orphans

    with no_orphans():
        with console.current().step("start Prefect") as line:
            line.outcome = prepare_prefect(folder)
            with contextlib.redirect_stdout(None):
                from flows.release import release as flow
        # Called as a function, a flow gives the result of the state that it returns.
        answer = cast(
            "dict[str, Any]",
            flow(
                source=source,
                name=name,
                recipe=recipe,
                platform=platform.value,
                store=str(folder.root),
                promote=promote.value,
            ),
        )
        if not as_json:
            _print_release(answer)
        if ask:
            from flows.demo import ask_worker

            answer["answers"] = ask_worker(folder, answer["digest"], ask, show=None if as_json else emit_stream)
    if as_json:
        emit_json(answer)
    else:
        _print_where_to_look(answer, folder)
    if failed := [gate["name"] for gate in answer["gates"] if not gate["passed"]]:
        raise FailedError(
            f"gates failed: {', '.join(failed)}; the bundle {answer['digest'][:12]} is stored, not promoted"
        )


def serve(
    ref: str = typer.Argument(..., metavar="BUNDLE|ALIAS", help="A bundle folder, a digest (or its start), an alias."),
    store: str | None = STORE_OPTION,
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0 takes a free one."),
    served_model_name: str | None = typer.Option(None, help="Model name in the API [default: the bundle's name]."),
    kv: KvName = typer.Option(KvName("bf16"), help="How the cache keeps keys and values."),
) -> None:
    """Serve a bundle over an OpenAI-compatible API; an alias is followed as it moves."""
    from serving.worker import serve as run_worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    folder = resolve_store(store)
    if not folder.root.is_dir() and not Path(ref).is_dir():
        raise UsageError(f"no store at {folder.root}; make one with `pypto-deploy release`, or name it with --store")
    if run_worker(ref, folder.root, host=host, port=port, served_model_name=served_model_name, kv=kv.value) != 0:
        raise FailedError(f"{ref} did not come up; the log above says why")


def bench_serve(
    url: str = typer.Argument(..., metavar="URL", help="The endpoint, e.g. http://127.0.0.1:8000"),
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure TPOT and TTFT: one warm-up, five serial requests of 48 tokens, temperature 0."""
    from serving.bench import measure_tpot

    with console.ReleaseConsole().step("measure") as line:
        result = measure_tpot(url, progress=line.advance)
        line.outcome = f"TPOT {result.tpot_ms:.2f} ms"
    if as_json:
        emit_json(result.to_json())
    else:
        rows = [[index + 1, request.ttft_ms, request.tpot_ms] for index, request in enumerate(result.requests)]
        emit_table(f"{url}, platform {result.platform}", ["request", "TTFT ms", "TPOT ms"], rows)
        emit_line(f"median TPOT {result.tpot_ms:.2f} ms, TTFT {result.ttft_ms:.2f} ms")


def emit_stream(text: str) -> None:
    """Write a piece of a streamed answer to stdout as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_release(answer: dict[str, Any]) -> None:
    quality = answer["quality"]
    emit_line(f"\nbundle {answer['digest']}\n  at {answer['path']}\n")
    emit_table(
        f"Quality over {quality['positions']} positions of English text",
        ["", "BF16 source", "W8A8", "bound"],
        [
            ["perplexity", quality["perplexity_reference"], quality["perplexity_candidate"], "-"],
            *(
                [gate["name"], "-", gate["value"], f"{gate['direction']} {gate['bound']} {_verdict(gate)}"]
                for gate in answer["gates"]
            ),
        ],
    )
    emit_table(*programs_table(answer["programs"]))
    tpot = answer["tpot"]
    emit_table(
        f"Speed ({tpot['platform']})",
        ["", "median ms", "per request"],
        [
            [label, tpot[key], " ".join(f"{request[key]:.1f}" for request in tpot["requests"]) or "-"]
            for label, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms"))
        ],
    )
    emit_line(answer["promotion"])


def _verdict(gate: dict[str, Any]) -> str:
    return "pass" if gate["passed"] else "FAIL"


def _print_where_to_look(answer: dict[str, Any], store: Store) -> None:
    emit_line("")
    if answer["mlflow_run_id"]:
        emit_line(f"MLflow run {answer['mlflow_run_id']}:")
        page = f"{_command('mlflow')} ui --backend-store-uri {answer['mlflow_uri']} --port 5000"
        emit_line(f"  MLFLOW_DISABLE_TELEMETRY=true {page}")
    else:
        emit_line(f"MLflow: {answer['tracking_problem']}")
    emit_line(f"Prefect flow run {answer['prefect_run_id']}:")
    quiet = "PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1"
    server = f"{_command('prefect')} server start --host 127.0.0.1 --port 4200"
    emit_line(f"  {quiet} PREFECT_HOME={store.root / 'prefect'} {server}")
    emit_line(f"Report: {Path(answer['path']) / 'reports' / 'report.html'}")
    emit_line(f"Serve it: {_command('pypto-deploy')} serve champion --store {store.root}")


def _command(name: str) -> str:
    """How to call one of this environment's programs from the present shell."""
    return name if shutil.which(name) else str(Path(sys.executable).parent / name)
