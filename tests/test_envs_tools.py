"""SkyRL's search and Python tools: what they answer, and what a program or a server can do to the run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from slipstream.envs import PythonCodeExecutorToolGroup, SearchToolGroup, python_tool, search
from slipstream.envs.python_tool import PythonLimits, run_python, sandbox_works
from slipstream.errors import EnvironmentFault

# ---- search

PASSAGES = [[{"document": {"contents": " Oslo is a city. "}, "score": 1}, {"document": {"contents": "Norway"}}], []]


class Retrieval(BaseHTTPRequestHandler):
    asked: list[dict[str, object]] = []  # noqa: RUF012 - the server makes the instances
    answers: list[tuple[int, str]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, text = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(search, "_FIRST_PAUSE", 0.0)
    Retrieval.asked.clear()
    Retrieval.answers.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retrieval)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()
    thread.join()


def test_passages_come_numbered_and_a_busy_server_is_asked_again(url: str) -> None:
    Retrieval.answers += [(503, ""), (200, json.dumps({"result": PASSAGES}))]
    group = SearchToolGroup(url, topk=2)
    assert json.loads(group.execute_tool("search", " capital of Norway ")) == {
        "result": "Doc 1: Oslo is a city.\nDoc 2: Norway\n\n---\n"
    }
    assert Retrieval.asked == [{"query": "capital of Norway", "topk": 2, "return_scores": True}] * 2
    assert group.get_tool_names() == ["search"]
    assert group.search(None) == ""


def test_nothing_found(url: str) -> None:
    Retrieval.answers += [(200, json.dumps({"result": []}))]
    assert json.loads(SearchToolGroup(url).search("x")) == {"result": "No search results found."}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, ""), "check search_url"),
        ((200, "<html>"), "answers no JSON"),
        ((200, '{"hits": []}'), "a retrieval server answers"),
        ((200, '{"result": [[{"text": "x"}]]}'), "a retrieval server answers"),
    ],
)
def test_a_server_that_answers_something_else_is_a_fault_that_names_it(
    url: str, answer: tuple[int, str], words: str
) -> None:
    Retrieval.answers.append(answer)
    with pytest.raises(EnvironmentFault, match=words) as caught:
        SearchToolGroup(url).search("x")
    assert url in str(caught.value)


def test_a_server_that_is_gone_is_a_fault_and_no_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_FIRST_PAUSE", 0.0)
    with pytest.raises(EnvironmentFault, match=r"does not answer .*3 attempts"):
        SearchToolGroup("http://127.0.0.1:9/retrieve", attempts=3).search("x")


# ---- Python

sandboxed = pytest.mark.skipif(not sandbox_works(), reason="bubblewrap is missing or may not make namespaces")


@sandboxed
def test_the_tool_answers_as_skyrl_does() -> None:
    group = PythonCodeExecutorToolGroup(timeout=5)
    assert group.execute_tool("python", "import math\nprint(math.factorial(5))") == "120"
    assert group.python("pass") == ""
    assert "ZeroDivisionError" in group.python("1 / 0")
    assert group.python("1 / 0").startswith("Error executing Python code: ")
    assert "status 3" in group.python("raise SystemExit(3)")
    assert "SyntaxError" in group.python("def")


@sandboxed
def test_a_program_that_does_not_end_is_ended_and_gone() -> None:
    started = time.monotonic()
    assert run_python("marker_of_this_test = 1\nwhile 1: 0", PythonLimits(wall_seconds=1.0)).kind == "timeout"
    assert time.monotonic() - started < 5
    deadline = time.monotonic() + 5
    while left := [p for p in psutil.Process().children(recursive=True) if "bwrap" in " ".join(p.cmdline())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@sandboxed
def test_a_program_has_threads_and_no_processes() -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('in a thread',))\nt.start()\nt.join()"
    assert run_python(code).text == "in a thread"
    for starts in (
        "os.fork()",
        "subprocess.run(['true'])",
        "os.system('true') and 1 / 0",
        "os.posix_spawn('/bin/true', ['true'], {})",
    ):
        result = run_python(f"import os, subprocess\n{starts}")
        assert result.kind == "error", (starts, result)


@sandboxed
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("open('{path}', 'w')", "Error"),
        ("print(open('{secret}').read())", "No such file"),
        ("import socket; socket.create_connection(('127.0.0.1', {port}), 2)", "refused|unreachable"),
        ("import os; os.kill({pid}, 9)", "No such process"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("print('a' * (4 << 20), flush=True)", "too large|File size"),
        ("f = open('x', 'wb')\nf.write(b'a' * (4 << 20))", "too large|File size"),
        ("open('/dev/shm/x', 'w')", "Read-only"),
        ("import os\nwhile True: os.fork()", "Resource temporarily unavailable"),
    ],
)
def test_a_program_gets_at_nothing(code: str, words: str, tmp_path: Path, url: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    port = url.split(":")[2].split("/")[0]
    pid = psutil.Process().pid
    filled = code.format(path=tmp_path / "made", secret=secret, port=port, pid=pid)
    result = run_python(filled, PythonLimits(wall_seconds=4.0))
    assert result.kind != "ok"
    assert any(word in result.text for word in words.split("|")), result
    assert not (tmp_path / "made").exists()
    assert Retrieval.asked == []


@sandboxed
def test_a_program_sees_no_environment_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert "secret" not in run_python("import os; print(dict(os.environ))").text
    assert run_python("open('kept', 'w').write('x'); print(open('kept').read())").text == "x"
    assert run_python("import os, tempfile; print(os.listdir('.'), tempfile.gettempdir())").text == "[] /scratch"


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "_PROGRAM", "no-such-bwrap")
    with pytest.raises(EnvironmentFault, match="apt install bubblewrap"):
        PythonCodeExecutorToolGroup().python("print(1)")


def test_a_sandbox_that_cannot_be_made_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(python_tool, "_PROGRAM", str(fake))
    with pytest.raises(EnvironmentFault, match="allow unprivileged user namespaces"):
        run_python("print(1)")


@sandboxed
def test_a_program_cannot_pass_for_a_broken_sandbox() -> None:
    result = run_python("import sys; sys.stderr.write('bwrap: No permissions')")
    assert (result.kind, result.text) == ("error", "bwrap: No permissions")
