"""The tasks by their names, in the order of the paper's tables; a new one is a file of this folder and a line here."""

from lln.tasks.lra import image, listops, pathfinder, retrieval, text
from lln.tasks.lra.task import Task

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (
        text,
        listops,
        retrieval,
        pathfinder,
        image,
    )
}


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}; there are: {', '.join(TASKS)}")
    return TASKS[name]
