"""The documents: examples run, links lead somewhere, and what is named exists."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
PROMISED = {"README.md", "trajectory.md", "environments.md", "algorithms.md"}
"""Pages whose examples must be there, and run."""

_BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_INDENTED = re.compile(r"^(?: {4}.+\n?)+", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line number and text of each fenced block of a language."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 1, m[2]) for m in _BLOCK.finditer(text) if m[1] == language]


def code_of(page: Path) -> str:
    """Everything that stands as code: fenced and indented blocks, and code spans."""
    text = page.read_text()
    fenced = [m[2] for m in _BLOCK.finditer(text)]
    prose = _BLOCK.sub("", text)
    return "\n".join([*fenced, *_INDENTED.findall(prose), *_CODE_SPAN.findall(prose)])


def run_blocks(page: Path) -> int:
    """Run a page's Python blocks in order, in one namespace; returns how many there were."""
    namespace: dict[str, Any] = {"__name__": "documentation"}
    found = blocks(page, "python")
    for line, code in found:
        if ">>>" not in code:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(code, namespace, f"{page.name}:{line}", str(page), line)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        failed, _ = runner.run(test, out=report.append, clear_globs=False)
        assert not failed, "".join(report)
        namespace.update(test.globs)
    return len(found)


@pytest.fixture
def clean_registries():
    """Examples register names; the rest of the suite must not see them."""
    from slipstream.algorithms.advantages import ADVANTAGES
    from slipstream.algorithms.filters import FILTERS
    from slipstream.algorithms.losses import LOSSES
    from slipstream.algorithms.reduce import REDUCTIONS
    from slipstream.envs import registry

    kept = [
        (items, dict(items)) for items in (*(r._items for r in (ADVANTAGES, FILTERS, LOSSES, REDUCTIONS)), registry)
    ]
    yield
    for items, before in kept:
        items.clear()
        items.update(before)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(page: Path, clean_registries: None) -> None:
    run_blocks(page)


def test_promised_pages_have_examples() -> None:
    assert {p.name for p in PAGES if blocks(p, "python")} >= PROMISED


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "wrong.md"
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    with pytest.raises(AssertionError, match="Expected"):
        run_blocks(page)


def test_sql_examples_run(tmp_path: Path) -> None:
    from ledger_synthetic import make_run
    from slipstream.ledger import query

    run = make_run(tmp_path / "run", steps=2, prompts=2, size=4, eval_prompts=4)
    statements = [code for _, code in blocks(DOCS / "ledger.md", "sql")]
    assert len(statements) >= 5
    for statement in statements:
        assert query(run, statement).columns
    curve, fates = query(run, statements[0]), query(run, statements[1])
    assert len(curve.rows) == 2
    assert sum(row[1] for row in fates.rows) == 2 * 2 * 4


# ---- links


def anchors(page: Path) -> set[str]:
    """Heading ids as mkdocs makes them (GitHub makes the same of these headings)."""
    headings = re.findall(r"^#{1,6} (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_internal_links_resolve(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken, f"{name_of(page)}: {broken}"


def test_documents_name_no_outside_address() -> None:
    """Pages must be readable without a network: images and scripts are local."""
    wrong = [name_of(p) for p in PAGES if re.search(r"!\[[^\]]*\]\(https?:|<script|<img", p.read_text())]
    assert not wrong


# ---- what is named exists


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def command_tree() -> dict[str, Any]:
    """Every command by its full name, such as ``check env``."""
    from slipstream.cli.main import app

    found: dict[str, Any] = {}

    def walk(prefix: str, command: Any) -> None:
        for name, child in getattr(command, "commands", {}).items():
            full = f"{prefix} {name}".strip()
            found[full] = child
            walk(full, child)

    walk("", typer.main.get_command(app))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_make_targets_exist(page: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code_of(page)))
    assert named <= make_targets()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_commands_exist(page: Path) -> None:
    commands = command_tree()
    for line in code_of(page).splitlines():
        for call in re.findall(r"(?:^|[\s/])slipstream ((?:[a-z]+ ?)+)", line):
            words = call.split()
            assert words[0] in commands, f"{name_of(page)}: slipstream {call}"
            if hasattr(commands[words[0]], "commands"):
                assert " ".join(words[:2]) in commands, f"{name_of(page)}: slipstream {call}"


def test_readme_and_cli_page_name_every_command() -> None:
    leaves = {name for name, command in command_tree().items() if not hasattr(command, "commands")}
    for page in (ROOT / "README.md", DOCS / "cli.md"):
        missing = {name for name in leaves if f"slipstream {name}" not in code_of(page)}
        assert not missing, f"{name_of(page)} does not name {sorted(missing)}"


def test_cli_page_names_exactly_the_options() -> None:
    options = {
        option
        for command in command_tree().values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    } | {"--debug", "--version"}
    named = set(re.findall(r"--[a-z][a-z-]*", (DOCS / "cli.md").read_text())) - {"--help"}
    assert named == options - {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    spans = _CODE_SPAN.findall(_BLOCK.sub("", page.read_text()))
    named = [
        word for span in spans for word in span.split() if re.fullmatch(r"(src|tests|docs|examples)/[\w./-]+", word)
    ]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_reading_order_has_six_files() -> None:
    order = (ROOT / "README.md").read_text().partition("## Read the code in this order")[2]
    files = re.findall(r"\]\((src/[^)]+)\)", order.partition("## Licence")[0])
    assert len(files) == 6


def test_documents_name_only_settings_that_exist() -> None:
    from slipstream.config.settings import RunSettings
    from slipstream.config.skyrl import TABLE
    from slipstream.config.tree import leaves, sections

    known = {*leaves(), *sections(), *TABLE}
    tops = "|".join(name for name in RunSettings.model_fields if name in sections())
    wrong = []
    for page in PAGES:
        if page.name == "configuration.md" or page.parent.name == "api":
            continue
        for span in _CODE_SPAN.findall(_BLOCK.sub("", page.read_text())):
            for key in re.findall(rf"(?:^|\s)((?:{tops})\.[a-z_.]*[a-z_])(?=[=,]|$|\s)", span):
                is_module = (ROOT / "src" / "slipstream" / key.replace(".", "/")).exists()
                is_file = key.endswith(".jsonl")
                if key not in known and not key.startswith("algorithm.loss_settings.") and not is_module | is_file:
                    wrong.append(f"{name_of(page)}: {key}")
    assert not wrong


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs the documentation tools")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    loaded = re.compile(r"""(?:src=|<link[^>]+href=|@import\s+|url\()["']?(https?:)?//""")
    outside = [str(p) for p in pages if loaded.search(re.sub(r'<link rel="canonical"[^>]*>', "", p.read_text()))]
    assert not outside
