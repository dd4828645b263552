"""All descriptions as a table: the documentation and the command line show this one."""

from lln.zoo.registry import Description, describe, names


def table() -> list[dict[str, str]]:
    """A row for each mechanism: its description as text."""
    return [_row(describe(name)) for name in names()]


def markdown() -> str:
    """The table in Markdown, ending with a newline."""
    rows = table()
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _row(description: Description) -> dict[str, str]:
    return {
        "name": f"`{description.name}`",
        "mechanism": description.title,
        "paper": f"{description.paper} ({description.year})",
        "time": description.time,
        "memory": description.memory,
        "linear": _yes(description.linear),
        "causal": _yes(description.causal),
        "padding": _yes(description.padding),
        "cross": _yes(description.cross),
        "random": _yes(description.random),
        "learned": description.learned or "nothing",
        "needs max_len": _yes(description.needs_max_len),
        "checked against": description.checked_against,
        "left outside": description.left_outside or "nothing",
    }


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
