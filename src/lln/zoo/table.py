"""All records as a table: the documentation and the command line show this one."""

from lln.zoo.registry import Description, describe, names


def table() -> list[dict[str, str]]:
    """A row for each mechanism: what its record says, in words."""
    return [_row(describe(name)) for name in names()]


def markdown() -> str:
    """The table in Markdown, ending with a newline."""
    rows = table()
    header = list(rows[0])
    lines = [header, ["---"] * len(header), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _row(record: Description) -> dict[str, str]:
    return {
        "name": f"`{record.name}`",
        "mechanism": record.title,
        "paper": f"{record.paper} ({record.year})",
        "time": record.time,
        "memory": record.memory,
        "linear": _yes(record.linear),
        "causal": _yes(record.causal),
        "padding": _yes(record.padding),
        "cross": _yes(record.cross),
        "random": _yes(record.random),
        "learned": record.learned or "nothing",
        "needs max_len": _yes(record.needs_max_len),
        "checked against": record.checked_against,
        "left outside": record.left_outside or "nothing",
    }


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
