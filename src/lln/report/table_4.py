"""Table 4: what training on the Long Range Arena costs, the published numbers beside ours."""

from lln.tasks.lra.tables import table_4 as make

__all__ = ["make"]
