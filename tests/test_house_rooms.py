"""The rooms: import order, torch-free imports, size caps."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "slipstream"
FLOORS = {
    "download": 0, "errors": 0, "memory": 0, "openmp": 0, "paths": 0,
    "config": 1, "trajectory": 1, "envs": 1, "inference": 1,
    "data": 2, "schedule": 2, "ledger": 2, "rollout": 2, "algorithms": 2, "weights": 2,
    "training": 3, "simulate": 3, "agents": 3,
    "cluster": 4,
    "trainers": 5, "tinker": 5,
    "cli": 6,
}  # fmt: skip
TORCH_FREE = ["config", "trajectory", "envs", "data", "schedule", "ledger", "inference", "rollout", "simulate", "cli"]
FILE_CAP, FUNCTION_CAP = 800, 120


def _sources() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def _room(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0].removesuffix(".py")


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(name.split(".")[1] for name in names if name.startswith("slipstream."))
    return found


def test_every_room_is_on_a_floor() -> None:
    rooms = {_room(p) for p in _sources() if p.name != "__init__.py" or p.parent != SRC}
    assert rooms <= set(FLOORS), f"rooms without a floor: {sorted(rooms - set(FLOORS))}"


def test_a_lower_room_never_imports_a_higher_one() -> None:
    wrong = []
    edges: dict[str, set[str]] = {}
    for path in _sources():
        room = _room(path)
        if room == "__init__":
            continue
        for other in _imports(ast.parse(path.read_text())) & set(FLOORS):
            if other == room:
                continue
            edges.setdefault(room, set()).add(other)
            if FLOORS[other] > FLOORS[room]:
                wrong.append(f"{path.relative_to(SRC)} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})")
    assert not wrong, "\n".join(wrong)
    for room in edges:
        assert not _reaches(edges, room, room), f"import cycle through {room}"


def _reaches(edges: dict[str, set[str]], start: str, goal: str) -> bool:
    seen, todo = set(), list(edges.get(start, ()))
    while todo:
        room = todo.pop()
        if room == goal:
            return True
        if room not in seen:
            seen.add(room)
            todo.extend(edges.get(room, ()))
    return False


def test_torch_free_rooms_import_without_torch() -> None:
    modules = []
    for path in _sources():
        room = _room(path)
        if room in TORCH_FREE and "embedded" not in path.parts:
            dotted = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
            modules.append(dotted.removesuffix(".__init__"))
    # The schedule's and the ledger's records name batches and rewards, never tensors.
    code = (
        "import sys, importlib\n"
        "for heavy in ('torch', 'transformers', 'peft'): sys.modules[heavy] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", _sources(), ids=lambda p: str(p.relative_to(SRC)))
def test_sizes_stay_under_the_cap(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_CAP, f"{path} is longer than {FILE_CAP} lines: split it by what it owns"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_CAP, f"{path}:{node.lineno} {node.name} has {length} lines (cap {FUNCTION_CAP})"


def test_size_percentiles_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(len(p.read_text().splitlines()) for p in _sources())
    functions = sorted(
        (n.end_lineno or n.lineno) - n.lineno + 1
        for p in _sources()
        for n in ast.walk(ast.parse(p.read_text()))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    with capsys.disabled():
        for name, sizes in (("files", files), ("functions", functions)):
            middle, high = sizes[len(sizes) // 2], sizes[int(len(sizes) * 0.9)]
            print(f"\nlines of {name}: median {middle}, p90 {high}, max {sizes[-1]}")
    assert files
    assert functions


def test_no_bare_tasks_and_no_pickle() -> None:
    """A task without an owner loses its errors; a pickle executes what it loads."""
    wrong = []
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name = ast.unparse(node.value.func)
                if name.endswith(("create_task", "ensure_future")):
                    wrong.append(f"{path.relative_to(SRC)}:{node.lineno} drops the task of {name}")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                if {"pickle", "cloudpickle", "dill"} & set(names):
                    wrong.append(f"{path.relative_to(SRC)}:{node.lineno} imports a pickler")
    assert not wrong, "\n".join(wrong)
