"""Long Range Arena: five tasks of one to four thousand tokens, and a small encoder (the paper's tables 4 and 5)."""

from lln.tasks.lra.data import load
from lln.tasks.lra.examples import Examples
from lln.tasks.lra.registry import TASKS
from lln.tasks.lra.task import Data, Task

__all__ = ["TASKS", "Data", "Examples", "Task", "load"]
