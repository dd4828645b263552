"""The processes that hold the parts of a sequence: their exchanges, and the errors when one is missing.

All communication is one collective of torch.distributed, `all_to_all_single`, or messages between neighbours alone,
where a collective would send an empty one to every other process. Before each, a process writes to the store of the
group how many it has begun. When one fails or runs into the time-out of the group, the store shows which processes have
not begun it.
"""

import atexit
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh
SIZES = 4  # in the header of a call, the same number for all calls: gloo ends a process that receives too much
EXIT_GRACE = 0.1  # seconds before the interpreter ends
GRACE = 2.0  # seconds in which others report that an exchange failed for them too


@functools.cache
def _wait_at_exit() -> None:
    """Let gloo's threads release the tensors of the last exchanges before the interpreter ends.

    They need the interpreter lock for that, and a thread that takes it during finalization aborts the process:
    without the wait one in ten processes that end right after an exchange has the exit code 134.
    """
    atexit.register(time.sleep, EXIT_GRACE)


class MissingRankError(RuntimeError):
    """A collective failed because processes of the group did not take part in it."""


@dataclass
class Traffic:
    """What this process has sent to others."""

    messages: int = 0
    sent_bytes: int = 0


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Count the messages and bytes that attention in this process sends to other processes.

    Returns:
        A context manager that gives the `Traffic` of its block.

    Example:
        >>> with lln.distributed.record_traffic() as traffic:
        ...     output = lln.lln_attention(*torch.randn(3, 1, 2, 20, 16))
        >>> traffic.sent_bytes
        0
    """
    traffic = Traffic()
    _recording.append(traffic)
    try:
        yield traffic
    finally:
        _recording.remove(traffic)


_recording: list[Traffic] = []
_ranks: dict[int, "Ranks"] = {}


def find_ranks(group: Group) -> "Ranks":
    """The processes of a group, or of a dimension of a device mesh.

    Raises:
        TypeError, ValueError: it is neither, a mesh of several dimensions, or a group without this process.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ("a name",)
            raise ValueError(
                f"group must be one dimension of a mesh, got a mesh with {group.ndim}; use mesh[{names[-1]!r}]"
            )
        group = group.get_group()
    other: Any = dist.GroupMember.NON_GROUP_MEMBER  # what dist.new_group returns to a process outside
    if group == other:
        raise ValueError("this process is not in the group; call with a group of which it is a member")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup or a dimension of a DeviceMesh, got {type(group).__name__}"
        )
    found = _ranks.get(id(group))
    if found is None or found.group is not group:
        found = _ranks[id(group)] = Ranks(group)
    return found


class Pending:
    """A collective under way."""

    def __init__(self, wait: Callable[[], Tensor], sent: Tensor | None = None) -> None:
        self.wait = wait
        self.sent = sent  # which must stay until it is sent


class Ranks:
    """The processes of a group, in the order of the parts that they hold."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.store = distributed_c10d.PrefixStore(f"lln/{group.group_name}/", distributed_c10d._get_default_store())
        self.begun = 0

    def header_device(self, device: torch.device) -> torch.device:
        """Where a few numbers are exchanged that the CPU reads: there, if the group can."""
        types = {x.type for x in self.group._device_types}
        return torch.device("cpu") if "cpu" in types else device

    def gather(self, x: Tensor) -> Tensor:
        """(P, ...) what all processes give, of the same shape on all of them; for a few numbers."""
        return self.exchange(x.expand(self.size, *x.shape), [1] * self.size, [1] * self.size).wait()

    def broadcast(self, x: Tensor) -> Tensor:
        """What the last process gives, where `x` has the same shape on all of them; for what is small."""
        is_last, others = self.rank == self.size - 1, self.size - 1
        rows = x.expand(self.size if is_last else 0, *x.shape)
        return self.exchange(rows, [int(is_last)] * self.size, [0] * others + [1]).wait()[0]

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int], *, sparse: bool = False) -> Pending:
        """Send `send[r]` rows of `x` to each process r, and receive `receive[r]` rows from it.

        `sparse`: few processes have anything for each other, and none for itself.
        """
        assert sum(send) == x.shape[0]
        assert len(send) == len(receive) == self.size
        found, x = x.new_empty(sum(receive), *x.shape[1:]), x.contiguous()
        row = _bytes(x[:1]) if x.shape[0] else 0
        others = [n for r, n in enumerate(send) if r != self.rank and n and row]
        for traffic in _recording:
            traffic.sent_bytes += sum(others) * row
            traffic.messages += len(others)
        _wait_at_exit()
        self.begun += 1
        number, began = self.begun, time.monotonic()
        try:
            self.store.set(f"begun/{self.rank}", str(number))
            if sparse:
                works = self._send_messages(found, x, send, receive)
            else:
                works = [dist.all_to_all_single(found, x, list(receive), list(send), group=self.group, async_op=True)]
        except RuntimeError as error:
            self._report(number, began, error)

        def wait() -> Tensor:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._report(number, began, error)
            return found

        return Pending(wait, x)

    def _send_messages(self, found: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> list[Any]:
        assert send[self.rank] == receive[self.rank] == 0
        messages = [
            dist.P2POp(operation, part, group=self.group, group_peer=r)
            for operation, tensor, sizes in ((dist.isend, x, send), (dist.irecv, found, receive))
            for r, part in enumerate(torch.split(tensor, list(sizes)))
            if part.numel()
        ]
        return dist.batch_isend_irecv(messages) if messages else []

    def check(self, what: str, description: Mapping[str, Any], sizes: Sequence[int], device: torch.device) -> Tensor:
        """Refuse calls that do not fit together; returns the sizes (P, sizes) of all processes.

        Args:
            what: the name of the function.
            description: what must be the same on all processes; under "error", what is wrong with this one's call.
            sizes: up to four integers of this process.

        Raises:
            ValueError: on every process alike, with the ranks that differ.
        """
        words = {"function": what} | {name: str(value) for name, value in description.items()}
        digest = int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "big", signed=True)
        padded = [*sizes, *[0] * (SIZES - len(sizes))]
        header = torch.tensor([digest, "error" in words, *padded], device=self.header_device(device))
        found = self.gather(header).cpu()
        if bool((found[:, 0] == found[0, 0]).all()) and not bool(found[:, 1].any()):
            return found[:, 2 : 2 + len(sizes)]
        text = torch.tensor([*json.dumps(words).encode()], dtype=torch.uint8, device=self.header_device(device))
        lengths = self.gather(torch.tensor(len(text), device=text.device)).tolist()
        texts = self.exchange(text.repeat(self.size), [len(text)] * self.size, lengths).wait()
        everyone = [json.loads(bytes(x.tolist())) for x in torch.split(texts, lengths)]
        raise ValueError(_differences(what, everyone, self.global_ranks))

    def _report(self, number: int, began: float, error: BaseException) -> NoReturn:
        seconds = time.monotonic() - began
        own = self.global_ranks[self.rank]
        try:
            self.store.set(f"failed/{number}/{self.rank}", "1")
            others = [r for r in range(self.size) if r != self.rank]
            missing = [r for r in others if self._begun(r) < number]
            deadline = time.monotonic() + GRACE
            # Where several are behind, some of them have failed in an earlier exchange because of the others.
            silent = others if not missing else missing if len(missing) > 1 else []
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [r for r in silent if not self._has_failed(r, number)]
            missing = silent or missing
        except RuntimeError:  # the process that keeps the store has ended
            raise MissingRankError(
                f"rank {own}: exchange {number} of the group failed after {seconds:.1f} s, and the store of the group "
                f"cannot be reached: the process that keeps it, rank 0 unless a launcher does, has ended "
                f"({_brief(error)})"
            ) from error
        names = ", ".join(str(self.global_ranks[r]) for r in missing)
        who = (
            f"rank{'s' if len(missing) > 1 else ''} {names} did not take part: ended, stuck, or at another call"
            if missing
            else "all processes took part, so the connection between them failed"
        )
        raise MissingRankError(
            f"rank {own}: exchange {number} of the group failed after {seconds:.1f} s: {who} ({_brief(error)})"
        ) from error

    def _has_failed(self, rank: int, number: int) -> bool:
        """Whether a process has reported the failure of this exchange, or of the last one that it has begun."""
        return self.store.check([f"failed/{min(number, self._begun(rank))}/{rank}"])

    def _begun(self, rank: int) -> int:
        key = f"begun/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _brief(error: BaseException) -> str:
    text = str(error).split("\n")[0]
    return text if len(text) <= 160 else text[:157] + "..."


def _differences(what: str, everyone: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """Which processes differ in what: "dtype: float32 on ranks 0, 2; float16 on rank 1"."""
    errors = [f"rank {r}: {x['error']}" for r, x in zip(ranks, everyone, strict=True) if "error" in x]
    if errors:
        return f"{what} cannot run: {'; '.join(errors)}"
    parts = []
    for name in dict.fromkeys(key for x in everyone for key in x):
        places: dict[str, list[int]] = {}
        for r, x in zip(ranks, everyone, strict=True):
            places.setdefault(x.get(name, "nothing"), []).append(r)
        if len(places) > 1:
            shown = (
                f"{value} on rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
                for value, found in places.items()
            )
            parts.append(f"{name}: {'; '.join(shown)}")
    return f"the parts of {what} do not fit together; these must be the same on all processes. {'. '.join(parts)}"
