"""Teams of OpenMP workers end when their thread waits for work."""

import os
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from slipstream.openmp import end_idle_workers  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def in_a_thread_of_its_own(work):
    """Run ``work(counts)`` where no team exists yet; returns what it counted."""
    counts: list[int] = []
    thread = threading.Thread(target=work, args=(counts,))
    thread.start()
    thread.join()
    return counts


def parallel_region() -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).mul_(2)


def test_a_team_ends_and_the_next_region_starts_it_again():
    def work(counts):
        counts.append(threads())
        parallel_region()
        counts.append(threads())
        end_idle_workers()
        counts.append(threads())
        parallel_region()
        counts.append(threads())
        end_idle_workers()

    before, during, after, again = in_a_thread_of_its_own(work)
    if during == before:
        pytest.skip("this build of torch has no OpenMP teams")
    # A first region may start other threads too, which stay.
    assert (during - after, again - after) == (1, 1)


def test_a_thread_without_a_team_has_nothing_to_end():
    def work(counts):
        counts.append(threads())
        end_idle_workers()
        counts.append(threads())

    before, after = in_a_thread_of_its_own(work)
    assert after == before
