"""The ``slipstream`` command.

Owns: commands, their options and what they print.  Refuses: doing the work (each command calls a room for it), and
importing a heavy room before the command that needs it.

    slipstream quickstart
    slipstream train my.yaml schedule.steps=50
    slipstream ledger runs/run 'SELECT step, "reward/avg_raw_reward" FROM metrics'

Exit codes: 0 done, 1 a check found something, 2 an error or a refusal, 130 interrupted.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from slipstream.cli.faults import FOUND, INTERRUPTED, REFUSED, CheckGroup, FaultGroup, checking, leave

if TYPE_CHECKING:
    from slipstream.config import RunSettings
    from slipstream.ledger import QueryResult
    from slipstream.trainers.progress import RunResult

app = typer.Typer(
    cls=FaultGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language models and agents by reinforcement learning; every trained token is traceable.",
)
check_app = typer.Typer(
    cls=CheckGroup, no_args_is_help=True, help="Check an environment, a loss, another component, a run or this machine."
)
app.add_typer(check_app, name="check")

Items = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Argument(metavar="[FILE | KEY=VALUE]...", help="YAML files and overrides, native keys or SkyRL's."),
]


def main() -> None:
    """Entry point of the console script.  SIGTERM is a Ctrl-C: what is open is closed, what is done is kept."""
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except BaseException as end:
        if not checking.is_set():
            raise
        leave(end)


def _end(number: int, frame: object) -> None:
    """As a SIGINT, so that an event loop cancels its main task instead of being torn out of any line."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.raise_signal(signal.SIGINT)
    else:
        raise KeyboardInterrupt  # a background job of a shell ignores SIGINT


def _print_version(wanted: bool) -> None:
    if wanted:
        from slipstream import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SLIPSTREAM_DEBUG", help="Show the traceback of every error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""


# ---- runs


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="The longer run: 50 steps in place of 14.")] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where the run is written; by default runs/quickstart links to one directory per seed."),
    ] = None,
) -> None:
    """Train a small model to write SQL, from nothing to a report, in under 10 minutes on 2 cores."""
    from slipstream.trainers.quickstart import quickstart as run_quickstart

    result = run_quickstart(seed, full, run_dir)
    print(result.text)
    if result.finished:
        print(f"summary: {result.summary_path}\nreport:  {result.report}")
    if result.stop_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


@app.command()
def train(items: Items = None) -> None:
    """Train by reinforcement learning (after a supervised warm start when sft.steps is set); resumes run_dir."""
    from slipstream.cli.inputs import runnable

    settings = runnable(items or [])
    from slipstream.trainers.run import train as run_train

    _finish(run_train(settings), items or [], "train")


@app.command()
def sft(items: Items = None) -> None:
    """Supervised fine-tuning on data.sft only (schedule.steps=0); resumes run_dir."""
    from slipstream.cli.inputs import sft_settings

    settings = sft_settings(items or [])
    from slipstream.trainers.run import train as run_train

    _finish(run_train(settings), items or [], "sft")


def _finish(result: RunResult, items: list[str], command: str) -> None:
    """Say how a run ended; an interrupted one exits with 130."""
    named = {"start": "untrained", "sft": "after SFT", "rl": "after RL"}
    for stage, title in named.items():
        if stage in result.accuracy:
            print(f"{title}: mean evaluation score {result.accuracy[stage]:.3f}")
    print(f"{result.steps} RL steps, {result.seconds / 60:.1f} minutes, peak memory {result.peak_memory_gb:.1f} GB")
    if result.report is not None:
        print(f"report: {result.report}")
    if result.stop_reason == "interrupted":
        again = shlex.join(["slipstream", command, *items])
        print(f"interrupted; go on with the same command: {again}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if result.stop_reason is not None:
        print(f"{'RL was ended by' if result.finished else 'stopped:'} {result.stop_reason}")


@app.command("eval")
def evaluate(
    items: Items = None,
    model: Annotated[str, typer.Option(help="Model directory, hub id or bundled name (model.path).")] = "",
    out: Annotated[Path, typer.Option(help="Directory for scores.json and the ledger of the evaluation.")] = Path(
        "runs/eval"
    ),
) -> None:
    """Evaluate a model on data.eval; prints scores per source and saves them with their whole spec."""
    import asyncio

    from slipstream.cli import play

    settings = _without_training(items or [], model)
    result, record = asyncio.run(play.evaluate(settings, out))
    _table(
        ("source", "score", "pass@n", "prompts", "failed share"),
        [
            (source, *(_number(scores.get(n)) for n in ("avg_score", "pass_at_n", "num_prompts", "failed_share")))
            for source, scores in _by_source(record["scores"]).items()
        ],
    )
    print(f"mean score {result.accuracy:.4f} in {result.seconds:.1f} s; saved in {out / 'scores.json'}")


@app.command()
def generate(
    items: Items = None,
    model: Annotated[str, typer.Option(help="Model directory, hub id or bundled name (model.path).")] = "",
    output: Annotated[Path, typer.Option(help="A .jsonl or .parquet file, in the ledger's columns.")] = Path(
        "trajectories.jsonl"
    ),
    split: Annotated[
        Literal["train", "eval"], typer.Option(help="Whose prompts and sampling: data.train or data.eval.")
    ] = "train",
    limit: Annotated[Optional[int], typer.Option(min=1, help="Only the first N prompts.")] = None,  # noqa: UP045
) -> None:
    """Roll out prompts without training, and write every trajectory."""
    import asyncio

    from slipstream.cli import play

    settings = _without_training(items or [], model)
    records = asyncio.run(play.generate(settings, split, output, limit))
    rewards = [r.trajectory.total_reward for r in records if r.trajectory.votes]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "none was scored"
    print(f"{len(records)} trajectories, {len(records) - len(rewards)} without a score, {mean}; written to {output}")


def _without_training(items: list[str], model: str) -> RunSettings:
    """Settings for a command that trains nothing; what concerns training is not judged."""
    from slipstream.cli.inputs import load, quiet_loading

    settings = load(items).settings
    chosen = settings.model.model_copy(update={"path": model}) if model else settings.model
    quiet_loading(chosen.path)
    return settings.model_copy(update={"model": chosen})


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Model directory, hub id or bundled name.")] = "smollm2-135m-instruct",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="What requests call the model; default: its directory's name.")] = "",
    dtype: Annotated[
        Optional[Literal["float32", "bfloat16"]],  # noqa: UP045
        typer.Option(help="Of weights and KV cache; default: bfloat16."),
    ] = None,
    max_model_len: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=2, help="Context in tokens; default: the model's."),
    ] = None,
    threads: Annotated[Optional[int], typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,  # noqa: UP045
    settings: Annotated[str, typer.Option(help="The settings' section inference as JSON; the options go first.")] = "",
    weight_version: Annotated[str, typer.Option(help="Name of the weights that are loaded.")] = "policy/0/0",
    transfer_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Directory below which new weights may be read; without it none are taken."),
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Of the server.")] = "warning",
    return_sampling_mask: Annotated[
        bool, typer.Option("--return-sampling-mask", help="Return each token's kept set, for sampler replay.")
    ] = False,
    enable_return_routed_experts: Annotated[
        bool, typer.Option("--enable-return-routed-experts", help="Return each token's experts, for routing replay.")
    ] = False,
) -> None:
    """Serve a model over HTTP with vLLM's API, until interrupted."""
    from slipstream.inference import server

    if port:
        server.bind(host, port).close()  # a port in use is said at once, not after the model has been loaded
    from slipstream.cli.inputs import inference_section, quiet_loading

    given = {"dtype": dtype, "max_model_len": max_model_len, "threads": threads}
    section = inference_section(settings)
    section = section.model_copy(update={key: value for key, value in given.items() if value is not None})
    quiet_loading(model)
    from slipstream.inference.embedded.engine import EmbeddedEngine
    from slipstream.inference.embedded.pretrained import load_tokenizer

    tokenizer = load_tokenizer(model)
    served = name or Path(model).name
    engine = EmbeddedEngine(model, tokenizer, section, model_name=served, weight_version=weight_version)
    server.serve(
        engine,
        host,
        port,
        tokenizer=tokenizer,
        model_name=served,
        transfer_root=transfer_dir,
        log_level=log_level,
        return_sampling_mask=return_sampling_mask,
        return_routed_experts=enable_return_routed_experts,
        ready=lambda url: print(f"serving {served} on {url} (Ctrl-C ends)", flush=True),
    )


# ---- before a run


@app.command()
def plan(items: Items = None) -> None:
    """Show what a run would do (batches, length, memory, SkyRL's keys); exit code 2 when it would be refused."""
    from rich.console import Console

    from slipstream.cli.inputs import load, make_plan
    from slipstream.config import render_plan

    made = make_plan(load(items or []), count=True)
    Console(soft_wrap=False).print(render_plan(made))
    if made.errors:
        raise typer.Exit(REFUSED)


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A setting, a section, or a key of SkyRL's.")],
    items: Items = None,
) -> None:
    """Everything there is to say about one key: type, default, value, origin, who reads it, SkyRL's names."""
    from rich.console import Console

    from slipstream.cli.inputs import load
    from slipstream.config import explain as explain_key
    from slipstream.config import render_explanation

    chosen = [key] if key.startswith("algorithm.preset=") and items else []
    loaded = load([*(items or []), *chosen])
    Console().print(render_explanation(explain_key(key, loaded.settings if items else None, loaded.origins)))


def _print_findings(subject: str, findings: Sequence[Any]) -> None:
    """Findings of a check with their ``severity``, and a closing line; exits with ``FOUND`` when one is an error."""
    for finding in findings:
        print(finding)
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    print(f"{subject}: {errors} errors, {warnings} warnings" if findings else f"{subject}: nothing found")
    if errors:
        raise typer.Exit(FOUND)


@app.command()
def simulate(
    items: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[FILE | KEY=VALUE]...", help="Scenario: YAML files and overrides, later ones on top."),
    ] = None,
    from_run: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--run", help="Fit lengths, latencies, updates and publishes from a run's ledger first."),
    ] = None,
    only: Annotated[bool, typer.Option("--only", help="Only the scenario's own schedule, not all of them.")] = False,
    page: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", help="Write a page with the time lines."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON instead.")] = False,
) -> None:
    """Compare schedules by simulation: throughput, idle shares, lag.  No model, no engine, no data."""
    from slipstream.cli import simulation

    done = simulation.run(items or [], from_run, only)
    if page is not None:
        done.write(page)
    if as_json:
        print(done.as_json())
        return
    for note in done.notes:
        print(note)
    _table(done.columns, done.rows)
    print(done.picture)
    if page is not None:
        print(f"\npage: {page}")


@check_app.command("env")
def check_env(
    env: Annotated[str, typer.Argument(metavar="ID|MODULE:CLASS", help="The environment.")],
    data: Annotated[str, typer.Option(help="Rows to try: a file, a hub name or builtin:NAME.")] = "",
    module: Annotated[Optional[list[str]], typer.Option(help="Import first (env.modules).")] = None,  # noqa: UP045
    setting: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="KEY=VALUE", help="A setting of the environment (env.kwargs)."),
    ] = None,
    action: Annotated[Optional[list[str]], typer.Option(help="A further model text to try.")] = None,  # noqa: UP045
    max_turns: Annotated[int, typer.Option(min=1, help="Turn limit given to the environment.")] = 4,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 30.0,
    rows: Annotated[int, typer.Option(min=1, help="Rows that are tried.")] = 3,
) -> None:
    """Look for exceptions, hangs, wrong types, bad rewards, leaks and shared state; exit code 1 on errors."""
    from slipstream.cli.inputs import check_arguments
    from slipstream.envs.checker import check_env as run_checks

    kwargs, samples = check_arguments(env, data, module or [], setting or [], rows)
    findings = run_checks(
        env,
        samples,
        env_config=kwargs,
        actions=action or [],
        max_turns=max_turns,
        deadline_seconds=deadline,
        max_rows=rows,
    )
    _print_findings(env, findings)


@check_app.command("loss")
def check_loss(
    loss: Annotated[str, typer.Argument(metavar="NAME|MODULE:FUNCTION", help="The loss.")],
    module: Annotated[Optional[list[str]], typer.Option(help="Import first (env.modules).")] = None,  # noqa: UP045
    setting: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="KEY=VALUE", help="A setting of the loss (algorithm.loss_settings)."),
    ] = None,
) -> None:
    """Run the invariance suite on a loss: shapes, gradients, splits, order, huge ratios; exit code 1 on errors."""
    from slipstream.algorithms.loss_check import check_loss as run_checks
    from slipstream.cli.inputs import key_values
    from slipstream.envs.registration import import_modules

    import_modules(module or [])
    _print_findings(loss, run_checks(loss, key_values(setting or [])))


_MODULES = Annotated[Optional[list[str]], typer.Option("--module", help="Import first (env.modules).")]  # noqa: UP045
_BELOW = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--setting", metavar="KEY=VALUE", help="A setting of the section algorithm, without its prefix."),
]


@check_app.command("advantage")
def check_advantage(
    advantage: Annotated[str, typer.Argument(metavar="NAME|MODULE:FUNCTION", help="The estimator.")],
    module: _MODULES = None,
    setting: _BELOW = None,
) -> None:
    """Run the invariance suite on an advantage estimator: order, validity, observations; exit code 1 on errors."""
    from slipstream.algorithms.component_check import check_advantage as run_checks
    from slipstream.cli.inputs import algorithm_settings

    _print_findings(advantage, run_checks(advantage, algorithm_settings(module or [], setting or [])))


@check_app.command("filter")
def check_filter(
    name: Annotated[str, typer.Argument(metavar="NAME|MODULE:FUNCTION", help="The filter.")],
    module: _MODULES = None,
    setting: _BELOW = None,
) -> None:
    """Run the invariance suite on a filter: order, validity, state, what it records; exit code 1 on errors."""
    from slipstream.algorithms.component_check import check_filter as run_checks
    from slipstream.cli.inputs import algorithm_settings

    _print_findings(name, run_checks(name, algorithm_settings(module or [], setting or [])))


@check_app.command("reduction")
def check_reduction(
    reduction: Annotated[str, typer.Argument(metavar="NAME|MODULE:FUNCTION", help="The reduction.")],
    module: _MODULES = None,
    setting: _BELOW = None,
) -> None:
    """Run the invariance suite on a reduction: shape, order, signs; exit code 1 on errors."""
    from slipstream.algorithms.component_check import check_reduction as run_checks
    from slipstream.cli.inputs import algorithm_settings

    _print_findings(reduction, run_checks(reduction, algorithm_settings(module or [], setting or [])))


@check_app.command("run")
def check_run(
    items: Items = None,
    folder: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where the smoke job is written; must not exist. Default: check in the run's directory."),
    ] = None,
) -> None:
    """Four admission checks on a small smoke job that is killed and resumed; exit code 1 when one fails."""
    from slipstream.cli.inputs import runnable

    settings = runnable(items or [])
    from slipstream.trainers.admission import check_run as run_checks

    findings = run_checks(settings, folder or settings.run_dir / "check", lambda text: print(text, file=sys.stderr))
    for finding in findings:
        print(finding)
    failed = sum(finding.verdict == "fail" for finding in findings)
    warned = sum(finding.verdict == "warn" for finding in findings)
    print(f"verdict: {'not admitted' if failed else 'admitted'} ({failed} failed, {warned} warnings)")
    if failed:
        raise typer.Exit(FOUND)


@check_app.command("machine")
def check_machine(
    folder: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path(),
) -> None:
    """Say what this machine can do; exit code 1 when something that a run needs is missing."""
    from slipstream.cli.machine import check_machine as run_checks

    verdicts = run_checks(folder)
    for verdict in verdicts:
        print(verdict)
    if any(verdict.level == "missing" for verdict in verdicts):
        raise typer.Exit(FOUND)


# ---- after a run


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    sql: Annotated[str, typer.Argument(help="One SELECT over events, metrics, trajectories, turns, tokens.")],
    form: Annotated[Literal["table", "csv", "jsonl"], typer.Option("--format", help="How rows are printed.")] = "table",
) -> None:
    """Ask a run's ledger in SQL."""
    from slipstream.ledger import query

    _print_result(query(run, sql), form)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Repeat only this step's update, from the ledger; no engine takes part."),
    ] = None,
    into: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where the repeated run is written; default: replay in the run."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Of --step: the largest difference that is no finding.")
    ] = 1e-4,
) -> None:
    """Repeat a recorded run (exact mode) or one update, and compare; exit code 1 when they differ."""
    from slipstream.trainers.replay import replay_run, replay_update

    if step is not None:
        update = replay_update(run, step)
        _table(
            ("metric", "recorded", "repeated"),
            [(name, _number(a), _number(b)) for name, (a, b) in sorted(update.metrics.items())],
        )
        equal = "equal to the bit" if update.gap == 0 else f"largest difference {update.gap:.3g}"
        print(f"step {step} from {update.began_at} ({update.updates} updates), {update.tokens} tokens: {equal}")
        if update.gap > tolerance:
            raise typer.Exit(FOUND)
        return
    whole = replay_run(run, into)
    weights = {True: "weights equal to the bit", False: "weights DIFFER", None: "no final weights to compare"}
    print(
        f"{whole.steps} steps repeated in {whole.replayed_in}: "
        + (f"steps {list(whole.differing)} differ" if whole.differing else "every step equal to the bit")
        + (f", evaluations DIFFER: {', '.join(whole.evaluations)}" if whole.evaluations else ", evaluations equal")
        + f", {weights[whole.weights_equal]}"
    )
    if not whole.equal:
        raise typer.Exit(FOUND)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[Optional[Path], typer.Option(help="Default: report.html in the run directory.")] = None,  # noqa: UP045
    max_trajectories: Annotated[int, typer.Option(min=0, help="How many the reader in the page holds.")] = 1000,
) -> None:
    """Write a run's report: one HTML file that needs no server."""
    from slipstream.ledger import write_report

    print(write_report(run, out, max_trajectories=max_trajectories))


# ---- printing


def _print_result(result: QueryResult, form: str) -> None:
    if form == "jsonl":
        import json

        for row in result.dicts():
            print(json.dumps(row, default=str, ensure_ascii=False))
    elif form == "csv":
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(result.columns)
        writer.writerows(result.rows)
    else:
        _table(result.columns, [tuple("" if cell is None else str(cell) for cell in row) for row in result.rows])
        print(f"{len(result.rows)} rows")


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _by_source(scores: dict[str, float]) -> dict[str, dict[str, float]]:
    """``eval/<source>/<metric>`` by source, the total last."""
    found: dict[str, dict[str, float]] = {}
    for name, value in scores.items():
        parts = name.split("/")
        if parts[0] == "eval" and len(parts) >= 3:
            found.setdefault("/".join(parts[1:-1]), {})[parts[-1]] = value
    return dict(sorted(found.items(), key=lambda item: (item[0] == "all", item[0])))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
