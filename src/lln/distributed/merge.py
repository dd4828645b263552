"""What the processes keep of their keys, merged: every row of a state by one process, its owner.

A state has a row for each sample, head and feature l, (L_l, S_l), and rows are independent of each other. So each
process owns a part of the rows: it receives them from all others, merges them, and sends back what each needs. That is
twice the size of a state sent by each process, whatever their number, and one code for all that is needed:

    which processes' rows count for process r          full attention: all; causal: those before r;
                                                       packed sequences: those that hold the same sequence

Shapes: P processes, B batch, R rows of which this process owns some, W their width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.backends.torch.summary import KeySummary, mask_value
from lln.distributed.ranks import Pending, Ranks


class Layout:
    """Which processes hold parts of the same sequence, and how many kept tokens.

    Args:
        ranks: the processes.
        tokens: (P, 2, B) kept queries and kept keys of every process, on the CPU.
        segments: (P, B) the number of the sequence that a process holds a part of in each sample; -1: none. None: each
            sample is one sequence.
    """

    def __init__(self, ranks: Ranks, tokens: Tensor, segments: Tensor | None = None) -> None:
        self.ranks, self.tokens = ranks, tokens
        size, batch = tokens.shape[0], tokens.shape[2]
        if segments is None:
            segments = torch.zeros(size, batch, dtype=torch.int64)
            is_free = torch.ones(size, 1, dtype=torch.bool)
        else:
            is_free = ((segments >= 0).sum(dim=1) == 1)[:, None]
        self.together = (segments[:, None] == segments) & (segments >= 0)  # (P, P, B)
        place = torch.arange(size)
        self.before = self.together & (place[:, None] > place)[..., None]
        # A process with parts of two sequences owns no rows of one that three or more hold: so what it sends of both is
        # no more than what others send of one. Two share the rows.
        together = self.together[ranks.rank]
        free = together & is_free
        self.owners = torch.where(free.any(dim=0) & (together.sum(dim=0) > 2), free, together)  # (P, B)
        self.shared: dict[int, Rows] = {}

    def total(self, side: int) -> Tensor:
        """(B,) kept queries (0) or keys (1) of the sequences that this process holds parts of."""
        return self._sum(self.together, side)

    def start(self, side: int) -> Tensor:
        """(B,) kept queries (0) or keys (1) before this process."""
        return self._sum(self.before, side)

    def starts(self) -> Tensor:
        """(P, B) kept keys before each process."""
        return (self.before * self.tokens[:, 1]).sum(dim=1)

    def _sum(self, which: Tensor, side: int) -> Tensor:
        return (which[self.ranks.rank] * self.tokens[:, side]).sum(dim=0)

    # Rows and their owners

    def to_owners(self, x: Tensor) -> Pending:
        """Send rows (R, W) to their owners; what comes is (P, own rows, W), zeros of processes without these rows."""
        rows = self.rows(x.shape[0])
        pending = self.ranks.exchange(x[rows.order.to(x.device)], rows.sizes, rows.received)

        def wait() -> Tensor:
            found = x.new_zeros(*rows.holders.shape, *x.shape[1:])
            found[rows.holders.to(x.device)] = pending.wait()
            return found

        return Pending(wait)

    def from_owners(self, x: Tensor, rows: int) -> Tensor:
        """What the owners made of the rows for this process, (R, W), where `x` (P, own rows, W) is for each process."""
        own = self.rows(rows)
        found = x.new_zeros(rows, *x.shape[2:])
        found[own.order.to(x.device)] = self.ranks.exchange(x[own.holders.to(x.device)], own.received, own.sizes).wait()
        return found

    def rows(self, number: int) -> "Rows":
        """Who owns which of a number of rows, as many of each sample."""
        if number not in self.shared:
            self.shared[number] = Rows.share(number, self.owners, self.together[:, self.ranks.rank], self.ranks.rank)
        return self.shared[number]

    # Sums

    def sum(self, x: Tensor, which: Tensor) -> Tensor:
        """The sum of x (B, ...) over the processes that count for this one, `which` (P, P, B)."""
        number = x.numel()
        found = self.to_owners(x.reshape(number, 1)).wait()
        if which is self.together:  # of the own rows, all that has come
            total = found.sum(dim=0).expand_as(found)
        else:
            total = _masked_sum(which[:, :, self.rows(number).samples].to(x.device), found)
        return self.from_owners(total, number).view(x.shape)


@dataclass(frozen=True)
class Rows:
    """The owners of rows (R,) of a process, and which of all rows it owns itself."""

    order: Tensor  # (R or fewer,) the rows that this process shares with others, those of the first owner first
    sizes: list[int]  # (P,) how many of them each process owns
    places: Tensor  # (own rows,) which rows this process owns
    samples: Tensor  # (own rows,) the sample that each of these belongs to
    holders: Tensor  # (P, own rows) which processes hold a part of its sequence
    received: list[int]  # (P,) how many rows of each process this one owns

    @classmethod
    def share(cls, number: int, owners: Tensor, together: Tensor, rank: int) -> "Rows":
        """Divide the rows of each sample evenly among `owners` (P, B), of processes that are `together` (P, B)."""
        size, batch = owners.shape
        each = number // batch
        owner = torch.full((batch, each), size)
        for sample, of_sample in enumerate(owners.T):
            found = of_sample.nonzero()[:, 0]
            if len(found):
                owner[sample] = found[torch.arange(each) * len(found) // max(each, 1)]
        owner = owner.flatten()
        sizes = owner.bincount(minlength=size + 1)[:size]
        places = (owner == rank).nonzero()[:, 0]
        samples = places // max(each, 1)
        holders = together[:, samples]
        order = owner.argsort(stable=True)[: int(sizes.sum())]
        return cls(order, sizes.tolist(), places, samples, holders, holders.sum(dim=1).tolist())


def _masked_sum(allowed: Tensor, x: Tensor) -> Tensor:
    """For each process r the sum of x (P, rows, W) over those that are `allowed` (P, P, rows); no 0 times NaN."""
    return torch.stack([x.where(row[..., None], 0.0).sum(dim=0) for row in allowed])


def refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "lln.distributed has no gradients of gradients; leave create_graph=True out, or use lln.lln_attention in "
            "one process"
        )


class Merge:
    """The summaries of the keys of all processes on the way to their owners, and back as what this process needs.

    Full attention needs the summary of all keys, causal attention that of the keys before this process.
    """

    def __init__(self, layout: Layout, own: KeySummary, *, is_causal: bool) -> None:
        self.layout, self.is_causal = layout, is_causal
        self.shape = own.values.shape
        self.rows = own.mass.numel()
        self.pending = layout.to_owners(torch.cat((own.mass[..., None], own.values), dim=-1).flatten(0, 2))

    def finish(self) -> KeySummary:
        found = self.pending.wait()
        which = self.layout.before if self.is_causal else self.layout.together
        self.allowed = which[:, :, self.layout.rows(self.rows).samples].to(found.device)
        mass, values = found[..., 0], found[..., 1:]
        self.mass, means = merge_all(mass, values, self.allowed)  # of each process: which the backward pass needs
        self.after = torch.logaddexp(self.mass, mass)
        merged = self.layout.from_owners(torch.cat((self.mass[..., None], means), dim=-1), self.rows)
        merged = merged.view(*self.shape[:3], -1)
        return KeySummary(merged[..., 0].contiguous(), merged[..., 1:].contiguous())

    def gradients(self, summary: KeySummary, d_mass: Tensor, d_values: Tensor) -> tuple[Tensor, Tensor]:
        """What the keys of this process get, dS (B, H, D, V) and dL - sum over V of S dS (B, H, D), in units of the
        mass of the summary that the keys are part of: in full attention the merged one, in causal attention that after
        this process.
        """
        shift = d_mass - (summary.values * d_values).sum(dim=-1)
        x = self.layout.to_owners(torch.cat((shift[..., None], d_values), dim=-1).flatten(0, 2)).wait()
        if not self.is_causal:
            total = x.sum(dim=0).expand_as(x)
        else:
            later = self.allowed.transpose(0, 1)  # (P, P, rows): those that come after each process
            # A key's share of a later mass, at most 1.
            share = (self.after[:, None] - self.mass).clamp(max=0.0).exp().masked_fill(~later, 0.0)
            total = _mix(share, x, later)
        found = self.layout.from_owners(total, self.rows).view(*self.shape[:3], -1)
        return found[..., 1:].contiguous(), found[..., 0].contiguous()


def merge_all(mass: Tensor, values: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """For each process the merged mass (P, rows) and mean values (P, rows, V) of those that are allowed."""
    dtype = mass.dtype
    masses = mass.expand(allowed.shape).masked_fill(~allowed, mask_value(dtype))
    merged = masses.logsumexp(dim=1)
    share = (masses - merged[:, None]).exp().masked_fill(~allowed, 0.0)
    return merged, _mix(share, values, allowed)


def _mix(share: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """sum over s of share (r, s, rows) values (s, rows, V), in which what is not finite counts where it is allowed."""
    finite = values.isfinite()
    by_row = values.where(finite, 0.0).transpose(0, 1)  # (rows, P, V)
    mixed = (share.permute(2, 0, 1) @ by_row).transpose(0, 1)
    if bool(finite.all()):
        return mixed
    return mixed + _masked_sum(allowed, values.where(~finite, 0.0))


def rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Tensors (B, ...) side by side, (B, entries)."""
    return torch.cat([x.flatten(1) for x in parts], dim=1)
