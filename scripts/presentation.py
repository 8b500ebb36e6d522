"""How commands show results: tables in Markdown, figures as PNG."""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from runtime.files import atomic_write


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table."""
    columns = list(columns)
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [columns, ["---"] * len(columns), *rows])


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG."""
    with atomic_write(path) as partial:
        figure.savefig(partial, format="png")
