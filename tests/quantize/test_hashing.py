"""Two hashes at a time are those of hashlib, however their bytes are cut."""

from __future__ import annotations

import hashlib
import random

import pytest

from quantize import hashing
from quantize.hashing import PairedHash, new_hash, update_both

needs_pairs = pytest.mark.skipif(not isinstance(new_hash(), PairedHash), reason="this CPU has no SHA instructions")


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


@needs_pairs
@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_any_length_give_hashlibs_digests(seed: int) -> None:
    generator = random.Random(seed)
    lengths = [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 5000]
    first, second, expected = new_hash(), new_hash(), (hashlib.sha256(), hashlib.sha256())
    for _ in range(generator.randint(1, 6)):
        left, right = (view(generator.randbytes(generator.choice(lengths))) for _ in range(2))
        update_both(first, left, second, right)
        expected[0].update(left)
        expected[1].update(right)
        assert first.hexdigest() == expected[0].hexdigest()  # asking does not disturb what follows
    single = generator.randbytes(generator.choice(lengths))
    second.update(view(single))
    expected[1].update(single)
    assert (first.hexdigest(), second.hexdigest()) == tuple(each.hexdigest() for each in expected)


@needs_pairs
@pytest.mark.parametrize("length", range(0, 200))
def test_every_padding(length: int) -> None:
    data = bytes(range(length))
    one, other = new_hash(), new_hash()
    update_both(one, view(data), other, view(data[::-1]))
    assert one.hexdigest() == hashlib.sha256(data).hexdigest()
    assert other.hexdigest() == hashlib.sha256(data[::-1]).hexdigest()


def test_without_the_library_hashlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_library", lambda: None)
    first, second = new_hash(), new_hash()
    assert not isinstance(first, PairedHash)
    update_both(first, view(b"a"), second, view(b"bc"))
    assert first.hexdigest() == hashlib.sha256(b"a").hexdigest()
    assert second.hexdigest() == hashlib.sha256(b"bc").hexdigest()
