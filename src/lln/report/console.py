"""Terminal output of all verbs of `lln`.

Much of what is printed is not ours: paths, options, names of models, contents of files, exceptions. So text is printed
as it is, without reading markup or emoji codes in it, and without breaking a line, so that a path can be copied.
"""

from rich.console import Console
from rich.text import Text


def plain_console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


console, errors = plain_console(), plain_console(stderr=True)


def print_error(message: object) -> None:
    errors.print(Text.assemble(("Error:", "red"), f" {message}"))
