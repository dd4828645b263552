"""Functions run in new processes, each forked from a server that has torch imported, which saves seconds a process.

This file is also the server: it reads jobs, forks, and lets the child answer. The server imports nothing of this
library and never computes, so that a child has all its threads and is as fresh as a process that was started.
"""

import atexit
import importlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar

import torch

Result = TypeVar("Result")

# What a reply is: the child's result, the child's exception, or how a child ended (reported by the server at the end).
RESULT, ERROR, ENDED = "result", "error", "ended"

_server: subprocess.Popen[bytes] | None = None


def in_new_process(function: Callable[..., Result], *arguments: object, preload: Sequence[str] = ()) -> Result:
    """What `function` returns in a process that has done nothing before, with as many threads as this one.

    Args:
        function: a function of a module, since it is pickled.
        arguments: its arguments.
        preload: modules that the server imports once for all processes: such that take long and belong to other
            libraries.

    Raises:
        MemoryError: the process ended without an answer, as the system ends one that takes too much memory.
        ChildProcessError: the server has ended.
        Exception: what the function raised.

    Example:
        >>> in_new_process(os.getpid) == os.getpid()
        False
    """
    server = _running_server()
    assert server.stdin is not None
    assert server.stdout is not None
    job = pickle.dumps((torch.get_num_threads(), dict(os.environ), function, arguments))
    try:
        _write((list(preload), job), server.stdin)
        kind, answer = pickle.load(server.stdout)
        if kind != ENDED:
            pickle.load(server.stdout)
    except BaseException as error:  # above all an interrupt: nothing waits for the result any more
        stop_server()
        if isinstance(error, (BrokenPipeError, EOFError)):
            raise ChildProcessError("the process that starts measurements has ended; repeat the command") from error
        raise
    if kind == ENDED:
        raise MemoryError(
            f"a process that ran {getattr(function, '__name__', function)} ended without an answer "
            f"(status {answer}), probably out of memory"
        )
    if kind == ERROR:
        raise answer
    result: Result = answer
    return result


def stop_server() -> None:
    """End the server and what it has started; the next job starts another."""
    global _server
    if _server is not None:
        if _server.poll() is None:
            os.killpg(_server.pid, signal.SIGKILL)
        _server.communicate()
        _server = None


def _running_server() -> subprocess.Popen[bytes]:
    global _server
    if _server is None or _server.poll() is not None:
        # -P: this folder is not a place to import from. A session of its own: an interrupt from the terminal is for the
        # process that waits.
        _server = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(stop_server)
    return _server


def _serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            preload, job = pickle.load(jobs)
        except EOFError:
            return
        for module in preload:
            importlib.import_module(module)
        child = os.fork()
        if child == 0:
            _answer(job, answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        _write((ENDED, status), answers)


def _answer(job: bytes, answers: BinaryIO) -> None:
    try:
        threads, environment, function, arguments = pickle.loads(job)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        answer: tuple[str, Any] = (RESULT, function(*arguments))
    except Exception as error:
        answer = (ERROR, error)
    _write(answer, answers)


def _write(message: object, stream: Any) -> None:
    stream.write(pickle.dumps(message))
    stream.flush()


if __name__ == "__main__":
    # What a library prints must not get between the answers.
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    importlib.import_module("torch._dynamo")  # which torch imports late, and which takes as long as the rest of it
    _serve(sys.stdin.buffer, stream)
