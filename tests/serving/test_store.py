"""The store: aliases and their history, rollbacks (case 27), pruning, crashes and concurrent processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serving.bundle import BundleParts, verify_bundle
from serving.errors import StoreError, SwitchError
from serving.files import locked
from serving.manifest import MANIFEST_FILE
from serving.store import RECENT_MOVES, BundleStore
from serving.switch import await_switch
from serving.worker_registry import WorkerRecord, live_workers, register
from tests.serving.bundles import evidence_of, flip_byte


def put_all(store: BundleStore, parts: list[BundleParts]) -> list[str]:
    return [store.put(one, evidence_of(one, created=f"2026-01-0{n}T00:00:00")).digest for n, one in enumerate(parts, 1)]


def test_put_is_content_addressed_and_idempotent(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    first = store.put(tiny_parts[0], evidence_of(tiny_parts[0]))
    again = store.put(tiny_parts[0], evidence_of(tiny_parts[0], name="other"))
    assert first == again
    assert first.path == store.bundle_path(first.digest)
    assert [bundle.digest for bundle in store.bundles()] == [first.digest]
    assert verify_bundle(first.path) == []


def test_put_replaces_a_bundle_with_a_broken_manifest(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    first = store.put(tiny_parts[0], evidence_of(tiny_parts[0]))
    (first.path / MANIFEST_FILE).write_text("{")
    assert store.bundles() == []
    assert store.put(tiny_parts[0], evidence_of(tiny_parts[0])) == first
    assert verify_bundle(first.path) == []


def test_put_replaces_a_bundle_with_damaged_weights(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    first = store.put(tiny_parts[0], evidence_of(tiny_parts[0]))
    flip_byte(first.slabs_dir / "slabs.safetensors")
    assert verify_bundle(first.path) != []
    assert store.put(tiny_parts[0], evidence_of(tiny_parts[0])) == first
    assert verify_bundle(first.path) == []


def test_case_27_two_rollbacks_go_one_further_back(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, c, d = put_all(store, tiny_parts)
    for digest in (a, b, c):
        store.promote(digest, reason="release")
    assert store.rollback(reason="bad").digest == b
    assert store.rollback(reason="bad too").digest == a
    with pytest.raises(StoreError, match="no earlier bundle"):
        store.rollback()
    assert store.alias("champion") == a
    store.promote(d)
    assert store.rollback().digest == a
    moves = store.history("champion")
    assert [(move.kind, move.digest) for move in moves] == [
        ("promote", a),
        ("promote", b),
        ("promote", c),
        ("rollback", b),
        ("rollback", a),
        ("promote", d),
        ("rollback", a),
    ]
    assert [move.previous for move in moves] == [None, a, b, c, b, a, d]
    assert [move.sequence for move in moves] == list(range(1, 8))
    assert moves[3].reason == "bad"


def test_rollback_during_a_promotion_moves_nothing_it_did_not_mean(
    store: BundleStore, tiny_parts: list[BundleParts]
) -> None:
    a, b, c, _ = put_all(store, tiny_parts)
    for digest in (a, b, c):
        store.promote(digest)
    with pytest.raises(StoreError, match="by now"):
        store.rollback(expected=b)
    assert store.alias("champion") == c


def test_a_rollback_nobody_can_take_up_is_undone(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, c, _ = put_all(store, tiny_parts)
    for digest in (a, b, c):
        store.promote(digest)
    move = store.rollback()
    assert move.digest == b
    back = store.move_back(move, "damaged")
    assert (back.digest, back.previous, store.alias("champion")) == (c, b, c)
    with pytest.raises(StoreError, match="moved on"):
        store.move_back(move, "damaged")
    # A promotion is undone by a rollback, as before.
    assert store.move_back(store.promote(a), "damaged").digest == c


def test_await_switch_sees_a_failed_rollback(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    store.promote(a)
    store.promote(b)
    with register(store.root, record(digest=b)) as registration:
        move = store.rollback()
        registration.update(failed_digest=a, failed_move=move.sequence, error="damaged")
        with pytest.raises(SwitchError, match="damaged"):
            await_switch(store, a, timeout_s=5)
        registration.update(failed_move=None)
        store.promote(b)
        with pytest.raises(SwitchError, match="went on to"):
            await_switch(store, a, timeout_s=5)


def test_rollback_skips_bundles_that_are_gone(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, c, _ = put_all(store, tiny_parts)
    for digest in (a, b, a, c):
        store.promote(digest)
    (store.bundle_path(a)).rename(store.root / "lost")
    assert store.rollback().digest == b
    with pytest.raises(StoreError, match="no earlier"):
        store.rollback()


def test_promote_refuses_what_it_cannot_mean(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    (a,) = put_all(store, tiny_parts[:1])
    with pytest.raises(StoreError, match="no bundle"):
        store.promote("0" * 64)
    for alias in ("Champion", "", "abc123", "a/b"):
        with pytest.raises(StoreError, match="cannot be an alias"):
            store.promote(a, alias)
    with pytest.raises(StoreError, match="names nothing"):
        store.rollback("nobody")
    first = store.promote(a)
    assert store.promote(a) == first
    assert len(store.history()) == 1


def test_aliases_are_independent(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    store.promote(a)
    store.promote(b, "candidate")
    assert store.aliases() == {"champion": a, "candidate": b}
    with pytest.raises(StoreError):
        store.rollback("candidate")
    assert store.alias("champion") == a


def test_resolve(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    store.promote(b)
    assert store.resolve("champion").digest == b
    assert store.resolve(a).digest == a
    assert store.resolve(a[:10]).digest == a
    assert store.resolve(str(store.bundle_path(a))).digest == a
    (store.bundles_dir / (a[:10] + "0" * 54)).mkdir()
    with pytest.raises(StoreError, match="2 digests"):
        store.resolve(a[:10])
    for reference in ("canary", "0000", a[:2]):
        with pytest.raises(StoreError, match="champion"):
            store.resolve(reference)


def test_torn_last_line_is_ignored_and_cut_off(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    store.promote(a)
    history = store.root / "aliases.jsonl"
    sound = history.read_bytes()
    history.write_bytes(sound + b'{"sequence": 2, "time": "20')
    assert store.alias("champion") == a
    assert store.promote(b).sequence == 2
    assert history.read_bytes().startswith(sound)
    assert [move.digest for move in store.history()] == [a, b]
    lines = history.read_bytes().split(b"\n")
    history.write_bytes(b"\n".join([lines[0][:-9], *lines[1:]]))
    with pytest.raises(StoreError, match="line 1 is damaged"):
        store.alias("champion")


def test_prune_keeps_what_is_named(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, c, d = put_all(store, tiny_parts)
    store.promote(a)
    store.promote(b)
    assert store.prune(keep=1) == [c]
    assert {bundle.digest for bundle in store.bundles()} == {a, b, d}
    assert store.prune(keep=9) == []
    # When the history has moved on, only the alias itself still protects.
    for index in range(RECENT_MOVES):
        store.promote((d, b)[index % 2])
    assert store.prune(keep=0) == [a]
    with pytest.raises(StoreError, match="keep is -1"):
        store.prune(-1)


def test_prune_keeps_what_a_worker_serves(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    with register(store.root, record(digest=a)):
        assert a not in store.prune(keep=0)
        assert not store.bundle_path(b).exists()
    assert store.prune(keep=0) == [a]


def test_leftovers_are_removed_but_not_of_a_running_assembly(store: BundleStore) -> None:
    leftover = store.bundles_dir / ".abc.xyz.partial"
    leftover.mkdir()
    with locked(store.root / ".assembly.lock", shared=True):
        BundleStore(store.root)
        assert leftover.exists()
    BundleStore(store.root)
    assert not leftover.exists()


def test_kill_during_assembly_leaves_no_bundle(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    parts = tiny_parts[0]
    code = (
        "import sys, time; from pathlib import Path\n"
        "import serving.bundle as b; from serving.store import BundleStore\n"
        "from quantize.recipe import Recipe; from serving.manifest import Evidence\n"
        "def hang(path, text): print('assembling', flush=True); time.sleep(60)\n"
        "b.write_text_atomic = hang\n"
        "parts = b.BundleParts(Path(sys.argv[2]), Path(sys.argv[3]), 's', Recipe())\n"
        "BundleStore(Path(sys.argv[1])).put(parts, Evidence(name='x', created=''))\n"
    )
    command = [sys.executable, "-c", code, str(store.root), str(parts.checkpoint_dir), str(parts.slabs_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"assembling\n"
        assert list(store.bundles_dir.glob(".*.partial"))
        assert BundleStore(store.root).bundles() == []
        assert list(store.bundles_dir.glob(".*.partial")), "a running assembly was disturbed"
        process.send_signal(signal.SIGKILL)
    assert BundleStore(store.root).bundles() == []
    assert list(store.bundles_dir.iterdir()) == []


def test_concurrent_processes_lose_no_move(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    code = (
        "import sys; from pathlib import Path; from serving.store import BundleStore\n"
        "store = BundleStore(Path(sys.argv[1]))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(20): store.promote(sys.argv[2 + n % 2], sys.argv[4])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(store.root), a, b, alias],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for alias in ("red", "blue")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    moves = store.history()
    assert [move.sequence for move in moves] == list(range(1, 41))
    assert len([move for move in moves if move.alias == "red"]) == 20


def record(**fields: object) -> WorkerRecord:
    values: dict[str, object] = {
        "pid": os.getpid(),
        "url": "http://127.0.0.1:1",
        "ref": "champion",
        "alias": "champion",
        "served_model_name": "tiny",
        "executor": "cpu",
        "state": "ready",
    }
    return WorkerRecord.model_validate({**values, **fields})


def test_worker_records_last_as_long_as_their_process(store: BundleStore) -> None:
    code = (
        "import sys, time; from pathlib import Path; from serving.worker_registry import WorkerRecord, register\n"
        "record = WorkerRecord.model_validate_json(sys.argv[2])\n"
        "with register(Path(sys.argv[1]), record): print('up', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(store.root), record(pid=1).model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert [worker.pid for worker in live_workers(store.root)] == [1]
        process.send_signal(signal.SIGKILL)
    assert live_workers(store.root) == []
    assert list((store.root / "workers").iterdir()) == []


def test_await_switch(store: BundleStore, tiny_parts: list[BundleParts]) -> None:
    a, b, _, _ = put_all(store, tiny_parts)
    with pytest.raises(SwitchError, match="never been moved"):
        await_switch(store, a, timeout_s=1)
    store.promote(a)
    assert await_switch(store, a, timeout_s=1) == []
    with register(store.root, record(digest=a)) as registration:
        assert [worker.digest for worker in await_switch(store, a, timeout_s=1)] == [a]
        move = store.promote(b)
        with pytest.raises(SwitchError, match="not every worker"):
            await_switch(store, b, timeout_s=0.2)
        registration.update(failed_digest=b, failed_move=move.sequence, error="no memory")
        with pytest.raises(SwitchError, match="no memory"):
            await_switch(store, b, timeout_s=5)
        # The same bundle promoted again is a new attempt: the old failure says nothing of it.
        store.rollback()
        store.promote(b)
        timer = threading.Timer(0.3, lambda: registration.update(digest=b))
        timer.start()
        assert [worker.digest for worker in await_switch(store, b, timeout_s=20)] == [b]
        timer.join()
        registration.update(alias=None, digest=a)
        assert await_switch(store, b, timeout_s=1) == []


def test_store_folder_is_made_on_first_use(tmp_path: Path) -> None:
    assert BundleStore(tmp_path / "deep" / "store").bundles() == []
