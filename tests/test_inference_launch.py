"""Child processes: readiness, ends noticed, and nothing left behind, whoever dies."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from slipstream.errors import InferenceError
from slipstream.inference.launch.process import Child, free_port

# A server with a child that left its process group, as an engine's workers do.
FAMILY = """
import os, subprocess, sys, time, signal
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pids", os.getpid(), grandchild.pid, flush=True)
{extra}
time.sleep(600)
"""


def family(extra=""):
    return [sys.executable, "-c", FAMILY.format(extra=extra)]


async def pids_in(log):
    async with asyncio.timeout(20):
        while True:
            words = log.read_text().split() if log.exists() else []
            if len(words) >= 3:
                return [int(word) for word in words[1:3]]
            await asyncio.sleep(0.02)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids, seconds=15):
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < end, f"still running: {[p for p in pids if alive(p)]}"
        time.sleep(0.02)


async def test_stop_ends_the_whole_family(tmp_path):
    child = Child("server", family(), log=tmp_path / "log")
    await child.start()
    pids = await pids_in(child.log)
    await child.stop()
    assert not any(map(alive, [*pids, child.pid]))


async def test_stop_kills_what_ignores_the_request(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = Child("server", family(stubborn), log=tmp_path / "log", grace_seconds=0.3)
    await child.start()
    pids = await pids_in(child.log)
    await asyncio.sleep(0.3)
    await child.stop()
    assert not any(map(alive, pids))


@pytest.mark.parametrize("who", ["server", "guard"])
async def test_a_killed_server_is_noticed_and_leaves_nothing(tmp_path, who):
    child = Child("server", family(), log=tmp_path / "log")
    await child.start()
    pids = await pids_in(child.log)
    os.kill(pids[0] if who == "server" else child.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await child.exited.wait()
    assert "ended by signal 9" in child.why_ended
    if who == "server":
        assert not any(map(alive, pids))
    else:
        wait_gone(pids[:1])
        os.kill(pids[1], signal.SIGKILL)  # nobody is left to find it; the contract covers the server only
    await child.stop()


def test_children_die_with_a_killed_parent(tmp_path):
    log = tmp_path / "log"
    parent = f"""
    import asyncio, pathlib
    from slipstream.inference.launch.process import Child
    async def main():
        child = Child("server", {family()!r}, log=pathlib.Path({str(log)!r}))
        await child.start()
        await asyncio.sleep(600)
    asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)])
    pids = asyncio.run(pids_in(log))
    process.kill()
    process.wait()
    wait_gone(pids)


async def test_ready_raises_with_the_log_when_the_server_ends_first(tmp_path):
    child = Child("engine-3", [sys.executable, "-c", "print('no such model'); raise SystemExit(7)"], log=tmp_path / "l")
    await child.start()

    async def never():
        return False

    with pytest.raises(InferenceError, match=r"(?s)engine-3 ended with status 7.*no such model"):
        await child.ready(never, 30)


async def test_ready_has_a_deadline_and_stops_the_child(tmp_path):
    child = Child("engine", family(), log=tmp_path / "log")
    await child.start()
    pids = await pids_in(child.log)

    async def never():
        return False

    with pytest.raises(InferenceError, match=r"not ready after 0.2 s"):
        await child.ready(never, 0.2)
    assert not any(map(alive, pids))


async def test_a_missing_program_is_named(tmp_path):
    child = Child("engine", [str(tmp_path / "nothing")], log=tmp_path / "log")
    await child.start()
    async with asyncio.timeout(10):
        await child.exited.wait()
    assert "cannot start" in child.why_ended


async def test_an_empty_value_removes_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_TEST_GONE", "1")
    code = "import os; print('SLIPSTREAM_TEST_GONE' in os.environ, os.environ['SLIPSTREAM_TEST_NEW'])"
    env = {"SLIPSTREAM_TEST_GONE": "", "SLIPSTREAM_TEST_NEW": "here"}
    child = Child("server", [sys.executable, "-c", code], env, log=tmp_path / "log")
    await child.start()
    async with asyncio.timeout(10):
        await child.exited.wait()
    assert child.log.read_text().split() == ["False", "here"]


def test_free_ports_differ():
    assert len({free_port() for _ in range(5)}) > 1
