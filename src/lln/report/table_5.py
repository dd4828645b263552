"""Table 5: accuracy on the Long Range Arena, the published numbers beside ours."""

from lln.tasks.lra.tables import table_5 as make

__all__ = ["make"]
