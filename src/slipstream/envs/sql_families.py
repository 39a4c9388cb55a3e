"""Families of questions over Chinook, as tables of templates.

Owns: what is asked, in which words, and the gold SQL of each question.  Refuses: which questions are kept and which
split they go to (see ``sql_questions``).

A template is a gold query with slots ``{0}``, ``{1}``..., several phrasings with the same slots, and the slots'
values: explicit tuples, or a query over the original database that lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

Slots = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """One gold query with its phrasings; ``values`` are slot tuples or a query that lists them."""

    sql: str
    phrasings: tuple[str, ...]
    values: str | tuple[Slots, ...] = ((),)


@dataclass(frozen=True, slots=True)
class Family:
    """Templates of one kind.  ``level`` rises with difficulty (1 to 4); an unseen family is never trained on."""

    name: str
    level: int
    templates: tuple[Template, ...]
    unseen: bool = False


# Table -> plural noun.
_TABLES = {
    "artist": "artists",
    "album": "albums",
    "genre": "genres",
    "track": "tracks",
    "playlist": "playlists",
    "employee": "employees",
    "customer": "customers",
    "invoice": "invoices",
    "invoice_line": "invoice lines",
    "media_type": "media types",
}
# (table, column, noun, noun in the plural): text columns that people ask for by name.
_COLUMNS = (
    ("customer", "country", "country", "countries"),
    ("customer", "city", "city", "cities"),
    ("customer", "company", "company", "companies"),
    ("customer", "last_name", "last name", "last names"),
    ("employee", "title", "title", "titles"),
    ("employee", "city", "city", "cities"),
    ("employee", "last_name", "last name", "last names"),
    ("invoice", "country", "country", "countries"),
    ("invoice", "city", "city", "cities"),
    ("track", "composer", "composer", "composers"),
    ("genre", "name", "name", "names"),
    ("playlist", "name", "name", "names"),
    ("media_type", "name", "name", "names"),
)
# (table, column, noun)
_NUMBERS = (
    ("track", "milliseconds", "milliseconds"),
    ("track", "price", "price"),
    ("invoice", "total", "total"),
    ("invoice_line", "price", "price"),
    ("invoice_line", "quantity", "quantity"),
)
_AGGREGATES = (
    ("AVG", ("average",)),
    ("SUM", ("sum of the",)),
    ("MIN", ("lowest", "smallest", "minimum")),
    ("MAX", ("highest", "largest", "maximum")),
)
# Joins by foreign key: (child, parent, key, parent's name column)
_JOINS = (
    ("album", "artist", "artist_id", "name"),
    ("track", "album", "album_id", "title"),
    ("track", "genre", "genre_id", "name"),
    ("track", "media_type", "media_type_id", "name"),
    ("invoice", "customer", "customer_id", "last_name"),
    ("customer", "employee", "employee_id", "last_name"),
)


def _whole_table() -> Iterator[Template]:
    for table, plural in _TABLES.items():
        yield Template(
            f"SELECT COUNT(*) FROM {table}",
            (f"How many {plural} are there?", f"Count all {plural}.", f"What is the number of {plural}?"),
        )
    for table, column, noun, nouns in _COLUMNS:
        plural = _TABLES[table]
        yield Template(
            f"SELECT COUNT(DISTINCT {column}) FROM {table}",
            (
                f"How many different {nouns} do the {plural} have?",
                f"Count the distinct {nouns} of {plural}.",
                f"How many distinct values of {noun} are there for {plural}?",
            ),
        )
        yield Template(
            f"SELECT DISTINCT {column} FROM {table}",
            (f"List the different {nouns} of {plural}.", f"Show each distinct {noun} of the {plural} once."),
        )
        yield Template(
            f"SELECT {column} FROM {table}",
            (f"List the {noun} of every {table.replace('_', ' ')}.", f"Show all {nouns} of the {plural}."),
        )


def _lookup() -> Iterator[Template]:
    unique = "SELECT {1} FROM {0} GROUP BY {1} HAVING COUNT(*) = 1"
    for table, columns in (
        ("customer", ("email", "city", "country", "first_name", "company", "employee_id")),
        ("employee", ("email", "title", "city", "first_name", "id")),
    ):
        for column in columns:
            noun = column.replace("_", " ")
            yield Template(
                f"SELECT {column} FROM {table} WHERE last_name = '{{0}}'",
                (
                    f"What is the {noun} of the {table} with last name {{0}}?",
                    f"Find the {noun} of {table} {{0}}.",
                    f"Give the {noun} for the {table} whose last name is {{0}}.",
                ),
                unique.format(table, "last_name"),
            )
    for column in ("milliseconds", "composer", "price"):
        yield Template(
            f"SELECT {column} FROM track WHERE name = '{{0}}'",
            (f"What is the {column} of the track {{0}}?", f"Find the {column} of track {{0}}."),
            unique.format("track", "name"),
        )
    for column in ("total", "date", "country"):
        yield Template(
            f"SELECT {column} FROM invoice WHERE id = {{0}}",
            (f"What is the {column} of invoice {{0}}?", f"Find the {column} of the invoice with id {{0}}."),
            tuple((str(i),) for i in range(2, 400, 7)),
        )
    yield Template(
        "SELECT id FROM artist WHERE name = '{0}'",
        ("What is the id of the artist {0}?", "Find the id of artist {0}."),
        unique.format("artist", "name"),
    )
    yield Template(
        "SELECT artist_id FROM album WHERE title = '{0}'",
        ("What is the artist id of the album {0}?", "Find the artist id of album {0}."),
        unique.format("album", "title"),
    )


def _count_where() -> Iterator[Template]:
    for table, column, phrase in (
        ("customer", "country", "live in {0}"),
        ("customer", "city", "live in the city {0}"),
        ("employee", "city", "live in the city {0}"),
        ("employee", "title", "have the title {0}"),
        ("invoice", "country", "went to the country {0}"),
        ("invoice", "city", "went to the city {0}"),
        ("track", "composer", "have the composer {0}"),
        ("invoice", "customer_id", "belong to customer id {0}"),
        ("album", "artist_id", "belong to artist id {0}"),
        ("track", "album_id", "belong to album id {0}"),
        ("track", "genre_id", "belong to genre id {0}"),
    ):
        plural = _TABLES[table]
        value = "{0}" if column.endswith("_id") else "'{0}'"
        minimum = 3 if column == "composer" else 1
        yield Template(
            f"SELECT COUNT(*) FROM {table} WHERE {column} = {value}",
            (
                f"How many {plural} {phrase}?",
                f"Count the {plural} that {phrase}.",
                f"What is the number of {plural} that {phrase}?",
            ),
            f"SELECT {column} FROM {table} GROUP BY {column} HAVING COUNT(*) >= {minimum}",
        )


def _list_where() -> Iterator[Template]:
    for table, want, column, phrase in (
        ("customer", "last_name", "country", "who live in {0}"),
        ("customer", "email", "country", "who live in {0}"),
        ("customer", "city", "country", "who live in {0}"),
        ("customer", "last_name", "city", "who live in the city {0}"),
        ("employee", "last_name", "title", "with the title {0}"),
        ("employee", "email", "city", "who live in the city {0}"),
        ("track", "name", "composer", "with the composer {0}"),
        ("track", "name", "album_id", "of album id {0}"),
        ("album", "title", "artist_id", "of artist id {0}"),
        ("invoice", "total", "city", "that went to the city {0}"),
        ("invoice", "date", "customer_id", "of customer id {0}"),
        ("invoice", "total", "customer_id", "of customer id {0}"),
    ):
        plural, noun = _TABLES[table], want.replace("_", " ")
        value = "{0}" if column.endswith("_id") else "'{0}'"
        yield Template(
            f"SELECT {want} FROM {table} WHERE {column} = {value}",
            (
                f"List the {noun} of the {plural} {phrase}.",
                f"Show the {noun} of all {plural} {phrase}.",
                f"What is the {noun} of each of the {plural} {phrase}?",
            ),
            f"SELECT {column} FROM {table} GROUP BY {column} HAVING COUNT(*) BETWEEN 1 AND 40",
        )


def _aggregate() -> Iterator[Template]:
    for (table, column, noun), (function, words) in product(_NUMBERS, _AGGREGATES):
        plural = _TABLES[table]
        yield Template(
            f"SELECT {function}({column}) FROM {table}",
            (
                *(f"What is the {word} {noun} of all {plural}?" for word in words),
                f"Find the {words[0]} {noun} over all {plural}.",
            ),
        )
    filters = (
        ("invoice", "total", "country", "that went to the country {0}"),
        ("invoice", "total", "city", "that went to the city {0}"),
        ("invoice", "total", "customer_id", "of customer id {0}"),
        ("track", "milliseconds", "composer", "with the composer {0}"),
        ("track", "milliseconds", "album_id", "of album id {0}"),
        ("track", "milliseconds", "genre_id", "of genre id {0}"),
    )
    for (table, column, key, phrase), (function, words) in product(filters, _AGGREGATES):
        value = "{0}" if key.endswith("_id") else "'{0}'"
        yield Template(
            f"SELECT {function}({column}) FROM {table} WHERE {key} = {value}",
            (
                *(f"What is the {word} {column} of the {_TABLES[table]} {phrase}?" for word in words),
                f"Find the {words[0]} {column} over the {_TABLES[table]} {phrase}.",
            ),
            f"SELECT {key} FROM {table} GROUP BY {key} HAVING COUNT(*) >= 3",
        )


def _range() -> Iterator[Template]:
    limits = {
        ("track", "milliseconds"): tuple(range(60000, 600000, 20000)),
        ("invoice", "total"): tuple(range(1, 20)),
        ("invoice", "customer_id"): tuple(range(5, 56, 5)),
        ("track", "album_id"): tuple(range(20, 340, 40)),
        ("album", "artist_id"): tuple(range(10, 270, 20)),
    }
    for ((table, column), numbers), (sign, words) in product(
        limits.items(), ((">", ("above", "greater than")), ("<", ("below", "less than")))
    ):
        noun, plural = column.replace("_", " "), _TABLES[table]
        yield Template(
            f"SELECT COUNT(*) FROM {table} WHERE {column} {sign} {{0}}",
            (
                f"How many {plural} have {noun} {words[0]} {{0}}?",
                f"Count the {plural} whose {noun} is {words[1]} {{0}}.",
            ),
            tuple((str(n),) for n in numbers),
        )


def _top() -> Iterator[Template]:
    counts = tuple((str(n),) for n in range(2, 9))
    for table, want, column, words in (
        ("track", "name", "milliseconds", ("longest", "shortest")),
        ("track", "name", "bytes", ("largest", "smallest")),
        ("invoice", "id", "total", ("largest", "smallest")),
    ):
        for word, direction in zip(words, ("DESC", "ASC"), strict=True):
            order = f"{column} DESC" if direction == "DESC" else column
            plural = _TABLES[table]
            yield Template(
                f"SELECT {want} FROM {table} ORDER BY {order} LIMIT {{0}}",
                (
                    f"What is the {want} of the {{0}} {word} {plural} by {column}?",
                    f"List the {want} of the {{0}} {word} {plural}, ordered by {column}.",
                ),
                counts,
            )
    for table, want, key, column, words in (
        ("track", "name", "album_id", "milliseconds", ("longest", "shortest")),
        ("track", "name", "genre_id", "bytes", ("largest", "smallest")),
        ("invoice", "date", "customer_id", "total", ("largest", "smallest")),
    ):
        for word, direction in zip(words, (" DESC", ""), strict=True):
            plural, owner = _TABLES[table], key.replace("_", " ")
            yield Template(
                f"SELECT {want} FROM {table} WHERE {key} = {{0}} ORDER BY {column}{direction} LIMIT {{1}}",
                (
                    f"What is the {want} of the {{1}} {word} {plural} of {owner} {{0}} by {column}?",
                    f"List the {want} of the {{1}} {word} {plural} of {owner} {{0}}, ordered by {column}.",
                ),
                f"SELECT a, n FROM (SELECT {key} AS a FROM {table} GROUP BY {key} HAVING COUNT(*) >= 4), "
                "(SELECT value AS n FROM json_each('[1, 2, 3]'))",
            )
    for table, column in (
        ("artist", "name"),
        ("album", "title"),
        ("customer", "last_name"),
        ("customer", "email"),
        ("employee", "last_name"),
        ("genre", "name"),
        ("track", "name"),
    ):
        noun, plural = column.replace("_", " "), _TABLES[table]
        yield Template(
            f"SELECT {column} FROM {table} ORDER BY {column} LIMIT {{0}}",
            (
                f"List the first {{0}} {plural} in alphabetical order of {noun}.",
                f"Show the {noun} of the first {{0}} {plural} in alphabetical order.",
            ),
            counts,
        )
        yield Template(
            f"SELECT {column} FROM {table} ORDER BY {column} DESC LIMIT {{0}}",
            (
                f"List the last {{0}} {plural} in alphabetical order of {noun}.",
                f"Show the {noun} of the {{0}} {plural} that come last in alphabetical order.",
            ),
            counts,
        )


_GROUPS = (
    ("customer", "country", "country"),
    ("customer", "city", "city"),
    ("customer", "employee_id", "employee id"),
    ("employee", "title", "title"),
    ("employee", "city", "city"),
    ("invoice", "country", "country"),
    ("invoice", "city", "city"),
    ("invoice", "customer_id", "customer id"),
    ("track", "genre_id", "genre id"),
    ("track", "album_id", "album id"),
    ("track", "composer", "composer"),
    ("track", "media_type_id", "media type id"),
    ("album", "artist_id", "artist id"),
    ("invoice_line", "track_id", "track id"),
    ("playlist_track", "playlist_id", "playlist id"),
)


def _group() -> Iterator[Template]:
    for table, column, noun in _GROUPS:
        plural = _TABLES.get(table, "playlist tracks")
        yield Template(
            f"SELECT {column}, COUNT(*) FROM {table} GROUP BY {column}",
            (
                f"How many {plural} are there for each {noun}? Give {noun} and count.",
                f"Count the {plural} per {noun}; show {noun} and count.",
            ),
        )
        yield Template(
            f"SELECT {column} FROM {table} GROUP BY {column} HAVING COUNT(*) > {{0}}",
            (
                f"Which {noun} has more than {{0}} {plural}?",
                f"List each {noun} that has more than {{0}} {plural}.",
            ),
            tuple((str(n),) for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 60, 100)),
        )
    for (table, column, noun), (function, words) in product(
        (("invoice", "country", "country"), ("invoice", "city", "city"), ("invoice", "customer_id", "customer id")),
        _AGGREGATES,
    ):
        yield Template(
            f"SELECT {column}, {function}(total) FROM {table} GROUP BY {column}",
            tuple(f"What is the {word} total of invoices for each {noun}? Give {noun} and value." for word in words),
        )


def _named_parent(child: str, parent: str, name: str) -> str:
    """A query for parent names that are unique and have between 1 and 40 children."""
    key = next(key for c, p, key, _ in _JOINS if (c, p) == (child, parent))
    return (
        f"SELECT {name} FROM {parent} JOIN (SELECT {key} AS k FROM {child} GROUP BY {key} HAVING COUNT(*) < 400) "
        f"ON k = id GROUP BY {name} HAVING COUNT(*) = 1"
    )


def _parent_phrase(parent: str) -> str:
    label = parent.replace("_", " ")
    return {
        "customer": "of the customer with last name {0}",
        "employee": "of the employee with last name {0}",
    }.get(parent, f"of the {label} {{0}}")


def _join_count() -> Iterator[Template]:
    for child, parent, key, name in _JOINS:
        plural, phrase = _TABLES[child], _parent_phrase(parent)
        yield Template(
            f"SELECT COUNT(*) FROM {child} JOIN {parent} ON {child}.{key} = {parent}.id "
            f"WHERE {parent}.{name} = '{{0}}'",
            (f"How many {plural} {phrase} are there?", f"Count the {plural} {phrase}."),
            _named_parent(child, parent, name),
        )


def _join_list() -> Iterator[Template]:
    for child, parent, key, name, want in (
        ("album", "artist", "artist_id", "name", "title"),
        ("track", "album", "album_id", "title", "name"),
        ("track", "genre", "genre_id", "name", "name"),
        ("invoice", "customer", "customer_id", "last_name", "total"),
        ("invoice", "customer", "customer_id", "last_name", "date"),
        ("customer", "employee", "employee_id", "last_name", "email"),
    ):
        plural, phrase = _TABLES[child], _parent_phrase(parent)
        yield Template(
            f"SELECT {child}.{want} FROM {child} JOIN {parent} ON {child}.{key} = {parent}.id "
            f"WHERE {parent}.{name} = '{{0}}'",
            (f"List the {want} of the {plural} {phrase}.", f"Show the {want} of each of the {plural} {phrase}."),
            _named_parent(child, parent, name),
        )
    for child, want, parent, key, source in (
        ("album", "title", "artist", "artist_id", "name"),
        ("track", "name", "album", "album_id", "title"),
        ("track", "name", "genre", "genre_id", "name"),
    ):
        yield Template(
            f"SELECT {parent}.{source} FROM {parent} JOIN {child} ON {child}.{key} = {parent}.id "
            f"WHERE {child}.{want} = '{{0}}'",
            (
                f"What is the {source} of the {parent} of the {child} {{0}}?",
                f"Find the {parent} {source} for the {child} {{0}}.",
            ),
            f"SELECT {want} FROM {child} GROUP BY {want} HAVING COUNT(*) = 1",
        )


def _join_top() -> Iterator[Template]:
    counts = tuple((str(n),) for n in range(1, 9))
    for child, parent, key, name in (*_JOINS, ("invoice_line", "track", "track_id", "name")):
        plural, parents, noun = _TABLES[child], _TABLES[parent], name.replace("_", " ")
        for word, order in (("most", "COUNT(*) DESC"), ("fewest", "COUNT(*)")):
            yield Template(
                f"SELECT {parent}.{name} FROM {child} JOIN {parent} ON {child}.{key} = {parent}.id "
                f"GROUP BY {parent}.id ORDER BY {order} LIMIT {{0}}",
                (
                    f"What is the {noun} of the {{0}} {parents} with the {word} {plural}?",
                    f"List the {noun} of the top {{0}} {parents} by {word} {plural}.",
                ),
                counts,
            )
    for function, word in (("SUM", "total sum"), ("AVG", "average total"), ("MAX", "highest total")):
        yield Template(
            f"SELECT customer.last_name FROM invoice JOIN customer ON invoice.customer_id = customer.id "
            f"GROUP BY customer.id ORDER BY {function}(invoice.total) DESC LIMIT {{0}}",
            (
                f"What is the last name of the {{0}} customers with the highest {word} of invoices?",
                f"List the last name of the top {{0}} customers by {word} of their invoices.",
            ),
            counts,
        )


def _nested() -> Iterator[Template]:
    for (table, column, noun), (sign, word) in product(
        (*_NUMBERS, ("track", "bytes", "bytes")), ((">", "above"), ("<", "below"))
    ):
        yield Template(
            f"SELECT COUNT(*) FROM {table} WHERE {column} {sign} (SELECT AVG({column}) FROM {table})",
            (f"How many {_TABLES[table]} have {noun} {word} the average?",),
        )
    for child, parent, key, name in _JOINS:
        plural, parents, noun = _TABLES[child], _TABLES[parent], name.replace("_", " ")
        yield Template(
            f"SELECT COUNT(*) FROM {parent} WHERE id NOT IN (SELECT {key} FROM {child})",
            (f"How many {parents} have no {plural}?", f"Count the {parents} without any {plural}."),
        )
        yield Template(
            f"SELECT {name} FROM {parent} WHERE id IN (SELECT {key} FROM {child} GROUP BY {key} "
            f"HAVING COUNT(*) > {{0}})",
            (f"List the {noun} of {parents} that have more than {{0}} {plural}.",),
            tuple((str(n),) for n in (2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100, 200)),
        )
    for table, want, column, key in (
        ("track", "name", "milliseconds", "album_id"),
        ("invoice", "id", "total", "customer_id"),
    ):
        yield Template(
            f"SELECT {want} FROM {table} WHERE {key} = {{0}} AND {column} > (SELECT AVG({column}) FROM {table})",
            (
                f"List the {want} of the {_TABLES[table]} of {key.replace('_', ' ')} {{0}} with {column} above the "
                "average of all.",
            ),
            f"SELECT {key} FROM {table} GROUP BY {key} HAVING COUNT(*) > 4",
        )


def _two_conditions() -> Iterator[Template]:
    pairs = (
        ("invoice", "country = '{0}'", "that went to the country {0}", "total > {1}", "a total above {1}", 2),
        ("invoice", "customer_id = {0}", "of customer id {0}", "total > {1}", "a total above {1}", 1),
        ("track", "genre_id = {0}", "of genre id {0}", "milliseconds > {1}", "milliseconds above {1}", 8),
        ("track", "album_id = {0}", "of album id {0}", "milliseconds < {1}", "milliseconds below {1}", 8),
    )
    for table, first, phrase, second, condition, minimum in pairs:
        column = first.split(" ")[0]
        numbers = "1, 3, 5, 8" if table == "invoice" else "200000, 240000, 280000, 320000"
        yield Template(
            f"SELECT COUNT(*) FROM {table} WHERE {first} AND {second}",
            (
                f"How many {_TABLES[table]} {phrase} have {condition}?",
                f"Count the {_TABLES[table]} {phrase} with {condition}.",
            ),
            f"SELECT a, n FROM (SELECT {column} AS a FROM {table} GROUP BY {column} HAVING COUNT(*) >= {minimum}), "
            f"(SELECT value AS n FROM json_each('[{numbers}]'))",
        )


def _join_aggregate() -> Iterator[Template]:
    for (child, column, parent, key, name), (function, words) in product(
        (
            ("track", "milliseconds", "genre", "genre_id", "name"),
            ("track", "milliseconds", "album", "album_id", "title"),
            ("invoice", "total", "customer", "customer_id", "last_name"),
        ),
        _AGGREGATES,
    ):
        phrase = _parent_phrase(parent)
        yield Template(
            f"SELECT {function}({child}.{column}) FROM {child} JOIN {parent} ON {child}.{key} = {parent}.id "
            f"WHERE {parent}.{name} = '{{0}}'",
            tuple(f"What is the {word} {column} of the {_TABLES[child]} {phrase}?" for word in words),
            _named_parent(child, parent, name),
        )


FAMILIES: tuple[Family, ...] = (
    Family("whole_table", 1, tuple(_whole_table())),
    Family("lookup", 1, tuple(_lookup())),
    Family("count_where", 1, tuple(_count_where())),
    Family("list_where", 1, tuple(_list_where())),
    Family("aggregate", 2, tuple(_aggregate())),
    Family("range", 2, tuple(_range())),
    Family("top", 2, tuple(_top())),
    Family("group", 3, tuple(_group())),
    Family("join_count", 3, tuple(_join_count())),
    Family("join_list", 3, tuple(_join_list())),
    Family("join_top", 4, tuple(_join_top())),
    Family("nested", 4, tuple(_nested())),
    Family("two_conditions", 2, tuple(_two_conditions()), unseen=True),
    Family("join_aggregate", 4, tuple(_join_aggregate()), unseen=True),
)
"""All families, easiest first; the two marked ``unseen`` are for evaluation only."""
