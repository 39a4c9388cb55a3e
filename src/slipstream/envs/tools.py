"""Tools that an environment offers to the model, shaped like skyrl-gym's.

Owns: the ``tool`` decorator, ``ToolGroup``, and the sandboxed SQL tool.  Refuses: parsing the model's text.

    class Weather(ToolGroup):
        def __init__(self):
            super().__init__(name="Weather")   # collects the tools; set attributes first

        @tool
        def temperature(self, city):
            return "21"

    Weather().execute_tool("temperature", "Oslo")   # '21'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipstream.envs.sqldb import SqlLimits, SqlResult, shared_sandbox


class tool:
    """Marks a method of a ``ToolGroup`` as a tool; its name is the method's name."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = func.__name__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return lambda *args, **kwargs: self.func(instance, *args, **kwargs)


class ToolGroup:
    """Tools that belong together; subclasses set their attributes, then call ``super().__init__(name=...)``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tool_registry: dict[str, Callable[..., Any]] = {}
        self._register_tools()

    def _register_tools(self) -> None:
        for attribute in dir(type(self)):
            # Looked up on the class: there the descriptor itself is found.
            declared = getattr(type(self), attribute, None)
            if isinstance(declared, tool):
                self._tool_registry[declared.name] = getattr(self, attribute)

    def get_name(self) -> str:
        """The group's name."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """A tool by name, or None."""
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """Names of all tools."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a tool; raises ``ValueError`` when the group has none of that name."""
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"Tool '{name}' not found in group '{self.name}'.")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Tool name to this group's name, for every tool."""
        return dict.fromkeys(self._tool_registry, self.name)


# Sized for the databases of the public Text-to-SQL collections, which are larger than the bundled one.
LARGE_LIMITS = SqlLimits(
    max_ops=200_000_000, max_rows=200_000, max_bytes=20_000_000, wall_seconds=30.0, heap_bytes=512 << 20,
    address_space_bytes=1 << 30,
)  # fmt: skip

_OBSERVATION_CHARS = 9000
_OBSERVATION_ROWS = 50


def format_rows(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as right-aligned text under column numbers, as pandas prints a frame without its index."""
    if not rows:
        return "Empty DataFrame\nColumns: []\nIndex: []"
    cells = [[str(i) for i in range(len(rows[0]))], *([str(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


class SQLCodeExecutorToolGroup(ToolGroup):
    """SkyRL's SQL tool, executed in the read-only sandbox.

    Args:
        db_file_path: folder that holds ``<db_id>/<db_id>.sqlite``.
    """

    def __init__(self, db_file_path: str | Path) -> None:
        self.db_path = Path(db_file_path)
        super().__init__(name="SQLCodeExecutorToolGroup")

    def _file(self, db_id: str) -> Path:
        return self.db_path / db_id / f"{db_id}.sqlite"

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        """Run a query and wrap rows or error as an observation with a reminder of the turns left.

        Duplicate rows are shown once; output past 9,000 characters is cut to 50 rows.
        """
        if sql is None:
            text = (
                "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, "
                "and try again."
            )
        else:
            sandbox = shared_sandbox(self._file(db_id), LARGE_LIMITS)
            text = self._show(sql, sandbox.execute(sql, wall_seconds=timeout))
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{text}\n{reminder}</observation>\n\n"

    @staticmethod
    def _show(sql: str, result: SqlResult) -> str:
        if result.kind in ("budget", "killed"):
            return f"SQL Timeout:\n{sql}"
        if not result.ok:
            return f"Error executing SQL: {result.error}"
        rows = list(dict.fromkeys(result.rows))
        text = format_rows(rows)
        if len(text) > _OBSERVATION_CHARS:
            text = "Truncated to 50 lines since returned response too long: " + format_rows(rows[:_OBSERVATION_ROWS])
        return text
