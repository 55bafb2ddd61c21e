"""Plain tables for people, the same on a terminal and in a file."""

from rich.box import ASCII2
from rich.console import Console
from rich.table import Table

__all__ = ["bytes_text", "render", "shown", "table"]


def bytes_text(count: float) -> str:
    """Return a byte count in decimal units: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the last unit returns")


def table(title: str, *columns: str) -> Table:
    """Return an empty table; the first column is left-aligned, the others right-aligned."""
    made = Table(title=title, title_justify="left", box=ASCII2, show_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", overflow="fold")
    return made


def render(made: Table, width: int = 120) -> str:
    """Return the table as plain text."""
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def shown(text: str) -> str:
    """Return untrusted text made harmless and visible: control, format and bidirectional characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
