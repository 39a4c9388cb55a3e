"""Where rows come from: files, hub datasets, and built-in tasks.

Owns: turning a source string into rows that remember where they stood; the registry of built-in row providers.
Refuses: knowing what a row means.

Sources: a path to ``.parquet``, ``.json`` (a list of objects) or ``.jsonl``; a directory of such files; a hub name
(``owner/name`` or ``owner/name:split``) when the ``datasets`` library is installed; ``builtin:NAME`` or
``builtin:NAME/PART?option=value&...`` for a registered provider.

>>> register_builtin("two", lambda part, options: [{"prompt": "1+1?"}, {"prompt": part or "2+2?"}])
>>> [where for where, _ in read_source("builtin:two")]
['builtin:two row 1', 'builtin:two row 2']
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from slipstream.errors import DataError

Row = dict[str, Any]
Provider = Callable[[str, Mapping[str, str]], Iterable[Row]]
"""``(part, options) -> rows``; raises ``DataError`` for a part or an option that it does not know."""

_SUFFIXES = (".parquet", ".json", ".jsonl")
_HUB = re.compile(r"[\w.-]+/[\w.-]+(:[\w\[\]%:.-]+)?")
_BUILTIN: dict[str, Provider] = {}


def register_builtin(name: str, provider: Provider) -> None:
    """Make ``builtin:NAME`` a source; a later registration of the same name replaces the earlier one."""
    if not re.fullmatch(r"[\w-]+", name):
        raise DataError(f"builtin name {name!r}: use letters, digits, '-' and '_'")
    _BUILTIN[name] = provider


def read_source(source: str) -> Iterator[tuple[str, Row]]:
    """``(where, row)`` for each row of a source; ``where`` names file and row for error messages."""
    if source.startswith("builtin:"):
        yield from _builtin(source)
        return
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise DataError(f"{path}: no {', '.join(_SUFFIXES)} file in this directory")
        for file in files:
            yield from _file(file)
    elif path.is_file():
        yield from _file(path)
    elif path.suffix not in _SUFFIXES and not path.is_absolute() and _HUB.fullmatch(source):
        yield from _hub(source)
    else:
        raise DataError(f"{source}: no such file; give a path, owner/name of a hub dataset, or builtin:NAME")


def _builtin(source: str) -> Iterator[tuple[str, Row]]:
    address, _, query = source.removeprefix("builtin:").partition("?")
    name, _, part = address.partition("/")
    provider = _BUILTIN.get(name)
    if provider is None:
        near = difflib.get_close_matches(name, _BUILTIN, 1)
        hint = f"; did you mean builtin:{near[0]}?" if near else ""
        raise DataError(f"{source}: no such built-in data (there are {', '.join(sorted(_BUILTIN))}){hint}")
    for i, row in enumerate(provider(part, dict(parse_qsl(query, keep_blank_values=True))), 1):
        yield f"{source} row {i}", dict(row)


def _file(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix == ".parquet":
        yield from _numbered(path, _parquet(path))
    elif path.suffix == ".json":
        yield from _numbered(path, _json(path))
    elif path.suffix == ".jsonl":
        yield from _jsonl(path)
    else:
        raise DataError(f"{path}: unknown kind of file; use {', '.join(_SUFFIXES)}")


def _numbered(path: Path, rows: Iterable[Any]) -> Iterator[tuple[str, Row]]:
    for i, row in enumerate(rows, 1):
        yield f"{path} row {i}", _object(row, f"{path} row {i}")


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object with columns, got {type(row).__name__}")
    return row


def _parquet(path: Path) -> Sequence[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_table(path).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as UTF-8 text ({error})") from error


def _json(path: Path) -> Sequence[Any]:
    try:
        rows = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error}); one object per line belongs in a .jsonl file") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: a .json file must hold a list of rows, got {type(rows).__name__}")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    # Not splitlines(): it also splits at U+2028 and the like, which JSON allows inside strings.
    for i, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {i}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error})") from error
        yield where, _object(row, where)


def _hub(source: str) -> Iterator[tuple[str, Row]]:
    name, _, split = source.partition(":")
    try:
        from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise DataError(
            f"{source}: not a file here, and reading hub datasets needs 'pip install datasets'; "
            "or give a .parquet, .json or .jsonl file"
        ) from None
    try:
        rows = load_dataset(name, split=split or "train")
    except Exception as error:  # fault boundary: the hub library raises many kinds
        raise DataError(f"{source}: could not be loaded ({type(error).__name__}: {error})") from error
    for i, row in enumerate(rows, 1):
        yield f"{source} row {i}", dict(row)


# ---- the bundled tasks


def _options(name: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise DataError(f"builtin:{name}: unknown option {key!r} (there are {', '.join(known)})")


def _number(name: str, options: Mapping[str, str], key: str, default: int) -> int:
    try:
        return int(options.get(key, default))
    except ValueError:
        raise DataError(f"builtin:{name}: option {key}={options[key]!r} must be a whole number") from None


def _count(name: str, options: Mapping[str, str], key: str, default: int) -> int:
    count = _number(name, options, key, default)
    if count < 0:
        raise DataError(f"builtin:{name}: option {key}={count} must be at least 0")
    return count


def _text2sql(part: str, options: Mapping[str, str]) -> Iterable[Row]:
    """``text2sql/train|eval|eval_unseen|sft``.

    Options: style, levels, families; for sft n and seed, for the others limit (0 is none) and repair_percent.
    """
    from slipstream.envs import sql_questions

    part = part or "train"
    if part not in ("train", "eval", "eval_unseen", "sft"):
        raise DataError(f"builtin:text2sql/{part}: the parts are train, eval, eval_unseen and sft")
    style = options.get("style", "plain")
    if style not in ("plain", "fewshot"):
        raise DataError(f"builtin:text2sql: style={style!r} must be plain or fewshot")
    families = options["families"].split(",") if "families" in options else None
    try:
        levels = [int(level) for level in options["levels"].split(",")] if "levels" in options else None
    except ValueError:
        raise DataError(f"builtin:text2sql: levels={options['levels']!r} must be numbers with commas") from None
    more: dict[str, Any] = {"style": style, "families": families, "levels": levels}
    if part == "sft":
        _options("text2sql/sft", options, ("style", "levels", "families", "n", "seed"))
        name = "text2sql/sft"
        return sql_questions.sft_rows(_count(name, options, "n", 400), _number(name, options, "seed", 0), **more)
    _options(f"text2sql/{part}", options, ("style", "levels", "families", "limit", "repair_percent"))
    more |= {"limit": _count("text2sql", options, "limit", 0) or None}
    more |= {"repair_percent": _number("text2sql", options, "repair_percent", 100)}
    return sql_questions.question_rows(part, **more)  # type: ignore[arg-type]


def _arithmetic(part: str, options: Mapping[str, str]) -> Iterable[Row]:
    """``arithmetic/train|eval``; options n and seed.  Parts draw from different seeds."""
    from slipstream.envs.arithmetic import arithmetic_rows

    part = part or "train"
    if part not in ("train", "eval"):
        raise DataError(f"builtin:arithmetic/{part}: the parts are train and eval")
    _options("arithmetic", options, ("n", "seed"))
    seed = 2 * _number("arithmetic", options, "seed", 0) + (part == "eval")
    rows: Iterable[Row] = arithmetic_rows(_count("arithmetic", options, "n", 256), seed)
    return rows


register_builtin("text2sql", _text2sql)
register_builtin("arithmetic", _arithmetic)
