"""Pages with parts that are made from results: what is between two marks is replaced.

A page has `<!-- table1: begin -->` and `<!-- table1: end -->` where what is called table1 belongs, and
`<!-- table5 of table5-rates: begin -->` where that is to be made from another result file.
"""

import re
from collections.abc import Callable, Mapping

MARKS = re.compile(
    r"<!-- (?P<which>(?P<name>\w+)(?: of (?P<file>[\w-]+))?): begin -->\n.*?<!-- (?P=which): end -->", re.DOTALL
)


def update(text: str, parts: Mapping[str, Callable[[str], str]]) -> str:
    """A page with what is between its marks replaced.

    Args:
        text: the page.
        parts: for each name what makes its text in Markdown from the stem of a result file, which is the name itself
            unless the mark names another.

    Returns:
        The page.

    Raises:
        ValueError: there is no mark, or no part of a name.

    Example:
        >>> update("<!-- a: begin -->\\nold<!-- a: end -->", {"a": lambda file: "new\\n"})
        '<!-- a: begin -->\\n\\nnew\\n\\n<!-- a: end -->'
    """
    if not MARKS.search(text):
        raise ValueError("the page has no place for a table: <!-- table1: begin --> and <!-- table1: end -->")

    def filled(mark: re.Match[str]) -> str:
        which, name = mark["which"], mark["name"]
        if name not in parts:
            raise ValueError(f"there is no {name}; there are: {', '.join(parts)}")
        return f"<!-- {which}: begin -->\n\n{parts[name](mark['file'] or name)}\n<!-- {which}: end -->"

    return MARKS.sub(filled, text)
