"""Long Range Arena: five tasks of one to four thousand tokens, a small encoder, and the paper's tables 4 and 5."""

from lln.tasks.lra.data import load
from lln.tasks.lra.examples import TASKS, Data, Examples, Task

__all__ = ["TASKS", "Data", "Examples", "Task", "load"]
