"""The report in a real browser, and what must hold without one."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from ledger_synthetic import Synth, make_run
from slipstream.errors import LedgerError
from slipstream.ledger import Ledger, LedgerReader, write_report
from slipstream.ledger.report_data import choose
from slipstream.trajectory import Origin

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def browse(page: Path, profile: Path, *extra: str) -> tuple[str, str]:
    """``(DOM, console lines)`` of the page once its script has settled."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--window-size=1360,2400",
        "--virtual-time-budget=20000", *extra, "--dump-dom", page.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, console


def marker(dom: str, name: str) -> str | None:
    match = re.search(rf'<html[^>]*\bdata-{name}="([^"]*)"', dom)
    return match[1] if match else None


def embedded(page: Path) -> dict[str, Any]:
    body = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page.read_text("utf-8"))
    assert body is not None
    loaded: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(body[1])))
    return loaded


class Static(HTMLParser):
    """What a reader without JavaScript gets: text and tags outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._muted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._muted += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._muted -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._muted:
            self.words.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "run", steps=6, prompts=2, size=4, eval_prompts=10)


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_report(run)


@needs_browser
def test_a_thousand_trajectories_open_in_a_browser_without_errors(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=28, prompts=4, size=8, eval_prompts=20)
    page = write_report(run)
    assert page.stat().st_size < 15_000_000
    dom, console = browse(page, tmp_path / "profile")
    assert console == ""
    assert marker(dom, "error") is None
    assert marker(dom, "ready") == "yes"
    assert int(marker(dom, "trajectories") or 0) == 1000
    rows = dom.count('role="option"')
    assert 8 <= rows <= 60, "the list draws what is in view, not everything"
    assert int(marker(dom, "tokens") or 0) > 50
    assert "1,000 of 1,016" in dom


@needs_browser
def test_filters_colours_and_keys_work_in_the_browser(page: Path, tmp_path: Path) -> None:
    script = """
      const wait = setInterval(() => {
        if (document.documentElement.dataset.ready !== "yes") return;
        clearInterval(wait);
        const out = {};
        const set = (id, value) => {
          const select = document.getElementById(id);
          select.value = value;
          select.dispatchEvent(new Event("change"));
        };
        const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
        const count = () => parseInt(document.getElementById("count").textContent.replace(",", ""));
        const chosen = () => document.querySelector('.item[aria-selected="true"]').id;
        out.all = count();
        set("f-phase", "train"); out.train = count();
        set("sort", "Largest |advantage|");
        out.first = chosen(); press("j"); out.second = chosen(); press("k"); out.back = chosen();
        const colours = () => new Set([...document.querySelectorAll("#view .t")].map((t) => t.style.background)).size;
        out.modes = [];
        for (let i = 0; i < 6; i += 1) {
          out.modes.push([document.querySelector('.seg [aria-pressed="true"]').textContent, colours(),
                          document.getElementById("keys").children.length]);
          press("c");
        }
        const few = document.querySelectorAll("#view .prompt .t").length;
        press("p"); out.prompt = document.querySelectorAll("#view .prompt .t").length > few;
        const token = document.querySelector("#view .t.sampled");
        token.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
        out.tip = document.getElementById("tip").textContent;
        set("f-reward", "missing"); out.missing = count();
        document.documentElement.dataset.out = encodeURIComponent(JSON.stringify(out));
      }, 20);
    """
    copy = tmp_path / "driven.html"
    copy.write_text(page.read_text("utf-8").replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    dom, console = browse(copy, tmp_path / "profile")
    assert console == ""
    out = json.loads(unquote(marker(dom, "out") or "null"))
    assert out["train"] == 48 < out["all"]
    assert (out["first"], out["second"], out["back"]) == ("item-0", "item-1", "item-0")
    assert [m[0] for m in out["modes"]] == ["Origin", "Trained", "Advantage", "Log-prob", "Log-prob gap", "Version"]
    assert all(colours >= 2 and keys >= 1 for _, colours, keys in out["modes"])
    assert out["prompt"] is True
    assert "log-prob -" in out["tip"]
    assert "sampled by policy/0/" in out["tip"]
    assert "trainer -" in out["tip"]
    assert out["missing"] == sum(
        r.trajectory.rewards == () for r in LedgerReader(page.parent).trajectories(phase="train")
    )


@needs_browser
def test_text_from_a_run_is_never_markup(tmp_path: Path) -> None:
    evil = '</script><img src=x onerror="document.documentElement.dataset.error=1">'
    synth = Synth()
    record = synth.step(1, prompts=1, size=2)
    turn = record.groups[0].members[0].turns[0]
    members = [
        replace(m, prompt=({"role": "user", "content": evil},), data_source=evil,
                turns=(replace(turn, observations=({"role": "user", "content": evil},)), *m.turns[1:]))
        for m in record.groups[0].members
    ]  # fmt: skip
    record = replace(record, groups=[replace(record.groups[0], members=tuple(members))])
    with Ledger(tmp_path / "run", 0) as ledger:
        ledger.event("run_started", settings={"model": {"path": evil}})
        ledger.event("warning", message=evil)
        ledger.record_step(record)
    page = write_report(tmp_path / "run", decode=lambda i: f"{evil}{i}")
    dom, _ = browse(page, tmp_path / "profile")
    assert marker(dom, "ready") == "yes"
    assert marker(dom, "error") is None
    assert "<img" not in dom


def test_headline_charts_and_tables_need_no_javascript(page: Path) -> None:
    static = Static()
    static.feed(page.read_text("utf-8"))
    text = " ".join(" ".join(static.words).split())
    assert re.search(r"Held out score (rose|fell|shows no clear change:) from [\d.]+ % to [\d.]+ %", text)
    assert "points from reinforcement learning alone, in 6 steps" in text
    assert "The supervised warm start before it" in text
    assert sum(tag == "svg" and "chart" in (attrs.get("class") or "") for tag, attrs in static.tags) >= 10
    for wanted in ("group_by", "untouched model", "smollm2-135m-instruct", "policy/0/6", "top_n is still at 0.3"):
        assert wanted in text


def test_the_page_asks_the_network_for_nothing(page: Path) -> None:
    static = Static()
    static.feed(page.read_text("utf-8"))
    links = [v for _, attrs in static.tags for k, v in attrs.items() if k in ("src", "href", "action", "data") and v]
    assert all(link.startswith(("#", "data:")) for link in links)
    style = re.sub(r"<script.*?</script>", "", page.read_text("utf-8"), flags=re.S)
    assert "@import" not in style
    assert "url(" not in style


def test_embedded_tokens_are_the_ledgers(run: Path, page: Path) -> None:
    data = embedded(page)
    text = dict(zip(data["ids"], data["texts"], strict=True))
    stored = {r.trajectory.trajectory_id: r for r in LedgerReader(run).trajectories()}
    assert {t["id"] for t in data["trajectories"]} == set(stored)
    for shown in data["trajectories"]:
        record = stored[shown["id"]]
        ids = [i for origin, _, body, *_ in shown["rows"][0][2] for i in (body if origin == 1 else data["pool"][body])]
        assert ids == record.trajectory.row_tokens(0)
        assert shown["fate"] == record.disposition
        sampled = next(record.trajectory.sampled_spans())
        first = next(span for span in shown["rows"][0][2] if data["origins"][span[0]] == Origin.SAMPLED)
        assert first[3] == [round(x, 3) for x in sampled.logprobs]  # type: ignore[union-attr]
        assert "".join(text[i] for i in sampled.token_ids).startswith("<sql>SELECT")


def test_a_decoder_wins_over_stored_texts_and_ids_are_the_last_resort(run: Path, tmp_path: Path) -> None:
    decoded = embedded(write_report(run, tmp_path / "a.html", decode=lambda i: f"w{i}"))
    assert decoded["texts"][:2] == ["w0", "w1"]
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    (bare / "tokens.json").unlink()
    assert embedded(write_report(bare))["texts"][0] == "⟨0⟩"


@pytest.mark.parametrize("limit", [1, 20, 60])
def test_beyond_the_limit_whole_groups_are_chosen_evenly(run: Path, limit: int) -> None:
    chosen = choose(run, limit)
    ids = {t for members in chosen.values() for t in members}
    groups: dict[str, int] = {}
    for record in LedgerReader(run).trajectories():
        if record.trajectory.trajectory_id in ids:
            groups[record.trajectory.group_id] = groups.get(record.trajectory.group_id, 0) + 1
    sizes = {r.trajectory.group_id: r.group_size for r in LedgerReader(run).trajectories()}
    assert all(groups[g] == sizes[g] for g in groups)
    assert 0 < len(ids) <= max(limit, 8)


def test_superseded_work_is_not_shown(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.record_step(Synth(1).step(1, prompts=1, size=2))
        ledger.record_step(Synth(2).step(2, prompts=1, size=2))
    with Ledger(tmp_path, 1) as ledger:
        ledger.rewind(1)
    page = write_report(tmp_path)
    assert {t["step"] for t in embedded(page)["trajectories"]} == {1}
    assert "resumed after step 1; 1 later steps" in page.read_text("utf-8")


def test_a_run_that_sampled_ahead_shows_lags_mixtures_queues_and_idle_time(tmp_path: Path) -> None:
    ahead = {
        "schedule/lag_mean": 1.0, "schedule/lag_max": 2.0, "schedule/lag_0": 1.0, "schedule/lag_2": 1.0,
        "async/staleness_mean": 1.0, "async/mixed_version_share": 0.5, "schedule/queue_seconds_mean": 2.0,
        "perf/trainer_idle_share": 0.25, "perf/engine_idle_share": 0.125,
    }  # fmt: skip
    titles = [
        "Lag of trained groups in steps", "Lag of trained tokens in versions", "Trajectories of several versions",
        "Seconds a finished group waits", "Steps between start and training, per group",
    ]  # fmt: skip
    idle = ["Trainer waits for groups", "Nothing is asked of the engine", "Version lag per sampled token"]
    for name, metrics in (("level", {}), ("ahead", ahead)):
        synth = Synth()
        with Ledger(tmp_path / name, 0) as ledger:
            ledger.event("run_started", settings={})
            for step in (1, 2):
                record = synth.step(step, prompts=2, size=2)
                shares = {k: v for k, v in ahead.items() if k.startswith("perf/")}
                ledger.record_step(replace(record, metrics={**record.metrics, **shares, **metrics}))
        text = write_report(tmp_path / name).read_text("utf-8")
        assert all(title in text for title in idle)
        assert [title in text for title in titles] == [name == "ahead"] * len(titles)


def test_a_run_that_has_just_started_has_a_report(tmp_path: Path) -> None:
    with Ledger(tmp_path, 0) as ledger:
        ledger.event("run_started", settings={})
    text = write_report(tmp_path).read_text("utf-8")
    assert "No result yet" in text
    assert "unfinished" in text


def test_no_ledger_no_report(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is this a run directory"):
        write_report(tmp_path)


@pytest.mark.parametrize("place", ["file/report.html", "folder"])
def test_a_report_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    with Ledger(tmp_path / "run", 0) as ledger:
        ledger.event("run_started", settings={})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(LedgerError, match=rf"cannot write {tmp_path / place}: .*choose another file"):
        write_report(tmp_path / "run", tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "run"]
