"""Scores as a table for a terminal, a page in Markdown, or a paper in LaTeX."""

from pathlib import Path

from runtime.schema import as_text
from scoring.results import summary

TITLES = {"fid": "FID", "sfid": "sFID", "inception_score": "IS", "precision": "P", "recall": "R", "kid": "KID",
          "kdd": "KDD", "mind": "MIND", "fdr": "FDr", "fd_dinov2": "FD-DINOv2", "mind_dinov2": "MIND-DINOv2"}
FORMS = ("text", "markdown", "latex")


def with_mean_fdr(rows: list[dict]) -> dict:
    """Makes one row of those of several networks, with FDr as the mean over them (arXiv 2604.28190).

    A metric of each network, as precision, is the first one's; the others' bear the network's name, or its file's.
    """
    if len(rows) == 1:
        return rows[0]
    metrics: dict[str, float | None] = {}
    for row in rows:
        network = row["extractor"]["name"]
        network = Path(row["extractor"]["weights"]).stem if network == "torchscript" else network
        for name, value in row["metrics"].items():
            is_shared = name in metrics or name in ("fdr", "floor")
            metrics[f"{name} {network}" if is_shared else name] = value
    ratios = [row["metrics"]["fdr"] for row in rows if "fdr" in row["metrics"]]
    if ratios:
        metrics["fdr"] = None if None in ratios else sum(ratios) / len(ratios)
    return rows[0] | {"metrics": metrics}


def as_table(rows: list[dict], form: str = "text") -> str:
    """Writes rows as a table with a line each, and below it what a paper has to say of them."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    weights = [row["source"].get("weights") or "" for row in rows]
    lines = [["weights", "guidance", *(TITLES.get(name, name) for name in names)]]
    for row, which in zip(rows, weights, strict=True):
        values = [row["metrics"].get(name) for name in names]
        lines.append([which, guided(row), *("" if value is None else f"{value:.5g}" for value in values)])
    if len({*weights}) == 1:  # which stands below the table
        lines = [cells[1:] for cells in lines]
    said = list(dict.fromkeys(summary(row["source"], row["images"]) for row in rows))
    columns = f"{'l' * (len(lines[0]) - len(names))}{'r' * len(names)}"
    if form == "latex":
        head, *body = (" & ".join(cells).replace("_", r"\_") + r" \\" for cells in lines)
        below = [f"% {line}" for line in said]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body,
                          r"\bottomrule", r"\end{tabular}", *below])
    if form == "markdown":
        lines.insert(1, ["---:" if column == "r" else "---" for column in columns])
        return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", *said])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
                      for cells in lines] + said)


def guided(row: dict) -> str:
    guidance = row["source"].get("guidance")
    return ", ".join(f"{key} {as_text(value)}" for key, value in guidance.items() if value) if guidance else "none"
