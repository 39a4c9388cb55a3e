"""The C library's heap: shared by threads, given back after growth only."""

import subprocess
import sys
import types

import numpy as np
import pytest

from slipstream import memory

pytestmark = pytest.mark.skipif(memory._libc("mallopt") is None, reason="needs glibc")

HEAPS = """
import re, sys, threading
from slipstream.memory import one_heap
if "share" in sys.argv: one_heap()
kept, ready, done = [], threading.Barrier(5), threading.Event()
def work():
    kept.append([bytearray(100_000) for _ in range(20)])
    ready.wait()
    done.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
ready.wait()
import ctypes
ctypes.CDLL(None).malloc_stats()
done.set()
"""


@pytest.mark.parametrize("share", [True, False])
def test_threads_share_a_heap(share):
    command = [sys.executable, "-c", HEAPS, *(["share"] if share else [])]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    assert (text.count("Arena ") == 1) is share, text


def test_the_environment_decides_over_one_heap(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "_libc", lambda name: lambda *a: calls.append(a))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    memory.one_heap.__wrapped__()
    assert calls == []
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    memory.one_heap.__wrapped__()
    assert calls == [(-8, 1)]


def test_memory_goes_back_only_after_growth(monkeypatch):
    sizes, trims = iter([100, 80, 95, 97, 70]), []
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=next(sizes)))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    monkeypatch.setattr(memory, "_libc", lambda name: trims.append)
    monkeypatch.setattr(memory, "_floor", 0)
    memory.give_back(1.2)  # 100, and 80 after
    memory.give_back(1.2)  # 95: less than a fifth above 80
    assert len(trims) == 1
    memory.give_back(1.2)  # 97
    assert (len(trims), memory._floor) == (2, 70)


def test_a_growth_of_one_gives_back_always(monkeypatch):
    """Also when the process is smaller than it was: optimiser moments that were freed since must not raise the bar."""
    trims = []
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=50))
    monkeypatch.setattr(memory.psutil, "Process", lambda: process)
    monkeypatch.setattr(memory, "_libc", lambda name: trims.append)
    monkeypatch.setattr(memory, "_floor", 100)
    memory.give_back(1.0)
    memory.give_back(1.0)
    assert len(trims) == 2


def test_what_is_moved_to_huge_pages_keeps_its_contents_and_address():
    values = np.arange(1 << 20, dtype=np.float64)  # 8 MB
    address, before = values.ctypes.data, values.copy()
    made = memory.collapse([(address, values.nbytes)])
    assert 0 <= made <= 5
    assert values.ctypes.data == address
    np.testing.assert_array_equal(values, before)


def test_each_huge_page_is_asked_for_once(monkeypatch):
    asked = []

    def madvise(address, size, advice):
        asked.append((address.value, size.value, advice.value))
        return 0 if address.value else -1

    monkeypatch.setattr(memory, "_libc", lambda name: madvise)
    page = 2 << 20
    assert memory.collapse([(100, 50), (page - 1, 2), (3 * page, page), (200, 7)]) == 2
    assert [address for address, _, _ in asked] == [None, page, 3 * page]
    assert {(size, advice) for _, size, advice in asked} == {(page, 25)}
    monkeypatch.setattr(memory, "_libc", lambda name: None)
    assert memory.collapse([(100, 50)]) == 0
