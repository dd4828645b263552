"""What a process sends does not grow with the length; what it sends and what it holds stay below what is promised."""

import gc
import weakref
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_world import report, run_world

from lln import distributed
from lln.bench.measure import peak_bytes, reset_peak
from lln.bench.peak import give_back_what_is_freed
from lln.distributed import statistics
from lln.report import distributed as model


def sent(group, function, *, tokens, heads, width, **options):
    """Messages and bytes that this process sends, forward and backward."""
    part = tokens // dist.get_world_size(group)
    q, k, v = (torch.randn(1, heads, part, width).requires_grad_() for _ in range(3))
    with distributed.record_traffic() as traffic:
        getattr(distributed, function)(q, k, v, group=group, **options).sum().backward()
    return traffic.messages, traffic.sent_bytes


def check_same(group, function, longest, **options):
    found = [sent(group, function, tokens=n, heads=1, width=8, **options) for n in (4096, longest)]
    assert found[0] == found[1], f"{found[0]} at 4,096 tokens and {found[1]} at {longest:,}"


def check_bound(group, function, tokens=1024, **options):
    H, D = 12, 64
    messages, sent_bytes = sent(group, function, tokens=tokens, heads=H, width=D, **options)
    limit = 4 * H * (D * D + D * D + 3 * D)
    assert messages > 0
    assert sent_bytes / 4 <= limit, f"{sent_bytes / 4:,.0f} numbers of {limit:,}"


def check_by_hand(group):
    """The rows of the state are sent twice in each direction, but to the process itself; statistics are given."""
    H, D, P = 8, 32, dist.get_world_size(group)
    messages, sent_bytes = sent(group, "lln_attention", tokens=256, heads=H, width=D, alpha=1.0, beta=1.0)
    state = H * D * (D + 1) * 4
    header, counts = (P - 1) * 6 * 8, (P - 1) * 2 * 8
    assert sent_bytes == 4 * state * (P - 1) // P + header + counts
    assert messages == 6 * (P - 1)


def check_neighbors(group):
    """Halos are messages to the processes on both sides, twice; a collective would send to all of them."""
    collectives = []
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def count(*arguments, **options):
        collectives.append("all to all")
        return all_to_all(*arguments, **options)

    def count_messages(operations):
        collectives.append([(x.op, x.group_peer) for x in operations])
        return batch(operations)

    H, D, window, rank, last = 2, 8, 16, dist.get_rank(group), dist.get_world_size(group) - 1
    dist.all_to_all_single, dist.batch_isend_irecv = count, count_messages
    try:
        options = {"tokens": 256, "heads": H, "width": D, "near": "window", "block_size": window}
        messages, sent_bytes = sent(group, "block_diagonal_attention", **options)
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
    sides = [x for x in (rank - 1, rank + 1) if 0 <= x <= last]
    around = [*((dist.isend, x) for x in sides), *((dist.irecv, x) for x in sides)]
    assert collectives == ["all to all", "all to all", around, around]
    header, counts = last * 6 * 8, last * 2 * 8
    # To the left what is to the right of its windows, and the other way round; back, the gradients of what came.
    before, after = (window // 2 if rank > 0 else 0), (window - 1 - window // 2 if rank < last else 0)
    came = (window - 1 - window // 2 if rank > 0 else 0) + (window // 2 if rank < last else 0)
    assert sent_bytes == (before + after + came) * 2 * H * D * 4 + header + counts
    assert messages == 2 * last + 2 * len(sides)


def check_halo(group):
    """Windows add the tokens at both borders, forward and backward, to what LLN attention sends, and nothing more."""
    H, D, size = 4, 16, 64
    P, rank = dist.get_world_size(group), dist.get_rank(group)
    options = {"tokens": 256, "heads": H, "width": D, "near": "window", "block_size": size}
    _, sent_bytes = sent(group, "lln_diag_attention", **options)
    borders = [rank > 0, rank < P - 1]
    forward = sum(n for n, is_border in zip((size // 2, size - 1 - size // 2), borders, strict=True) if is_border)
    backward = sum(n for n, is_border in zip((size - 1 - size // 2, size // 2), borders, strict=True) if is_border)
    assert sent_bytes == 4 * (model.traffic(256, P, H, D)["lln"][2] + (forward + backward) * H * 2 * D)


def check_memory(group, tokens=1 << 17, width=64, dtype=torch.float32, **options):
    """At most 0.3 of what one process has for query, key, value, output and all gradients of them."""
    part = tokens // dist.get_world_size(group)
    give_back_what_is_freed()
    for n in (64, part):
        reset_peak()
        before = peak_bytes()
        q, k, v = (torch.randn(1, 1, n, width, dtype=dtype).requires_grad_() for _ in range(3))
        slope = torch.randn_like(v)
        output = distributed.lln_diag_attention(q, k, v, group=group, **options)
        torch.autograd.grad(output, (q, k, v), slope)
    share = (peak_bytes() - before) / (8 * tokens * width * dtype.itemsize)
    assert share < 0.3, f"{share:.3f} of one process"


def check_nothing_stays(group):
    """Without a backward pass the input goes with the output, and does not wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        inputs = [torch.randn(1, 1, 40, 8).requires_grad_() for _ in range(3)]
        kept = [weakref.ref(x) for x in inputs]
        output = distributed.lln_diag_attention(*inputs, group=group, near="window", block_size=8)
        del inputs, output
        assert not any(x() is not None for x in kept)
    finally:
        gc.enable()


def check_packed(group):
    """A process with parts of two sequences that lie across borders sends no more than others do of one."""
    H, D, rank, P = 4, 16, dist.get_rank(group), dist.get_world_size(group)
    q, k, v = (torch.randn(1, H, 64, D).requires_grad_() for _ in range(3))
    for starts in ([0, 40, 100, 170, 210, 256], [0, 40, 210, 256], [0, 20, 230, 256]):
        found = {}
        for given in ({"alpha": 1.0, "beta": 1.0}, {}):
            with distributed.record_traffic() as traffic:
                options = {"cu_seqlens": torch.tensor(starts), "group": group}
                distributed.lln_attention(q, k, v, **options, **given).sum().backward()
            found[bool(given)] = traffic.sent_bytes
        across = [(x // 64, (y - 1) // 64) for x, y in pairwise(starts) if x // 64 < (y - 1) // 64]
        of_two = [r for r in range(P) if sum(x <= r <= y for x, y in across) == 2]
        rows = H * D
        sent = (P - 1) * (16 + 4 * (len(of_two) > 0))  # header and counts, of two samples if there are two
        for first, last in across:
            members = range(first, last + 1)
            if rank in members:
                owners = [r for r in members if r not in of_two or len(members) == 2]
                own = rows // len(owners) if rank in owners else 0
                sent += 2 * (D + 1) * (rows - own + own * (len(members) - 1))
        assert found[True] == 4 * sent
        assert found[True] <= 4 * (4 * rows * (D + 1) + 20 * (P - 1))
        assert found[False] <= 4 * 4 * H * (D * D + D * D + 3 * D)


def check_beyond(group):
    """A state to owners and back and one to each neighbour, and the halo, all of it there and as gradients back."""
    H, F, V, size, rank, P = 4, 16, 16, 8, dist.get_rank(group), dist.get_world_size(group)
    for tokens in (64, 256):
        a, b, value = (torch.randn(1, H, tokens, F).requires_grad_() for _ in range(3))
        with distributed.record_traffic() as traffic:
            options = {"near": "window", "block_size": size, "group": group}
            output, ratio = distributed.beyond_neighbors(a, b, value, **options)
            (output.sum() + ratio.sum()).backward()
        state, sides = H * F * (V + 1), (rank > 0) + (rank < P - 1)
        halo = sides * (size - 1)  # what goes there from one side comes back as gradients from the other
        assert traffic.sent_bytes == 4 * (
            4 * state * (P - 1) // P + 2 * sides * state + halo * H * (F + V) + 16 * (P - 1)
        )


def check_many(group):
    """Small sums as with many processes: the same scales, and what `lln bench distributed` counts."""
    H, D, P = 4, 16, dist.get_world_size(group)
    q, k, v = (torch.randn(1, H, 50, D) for _ in range(3))
    expected = distributed.lln_attention(q, k, v, group=group)
    few, statistics.FEW, model.FEW = statistics.FEW, 2, 2
    try:
        found = distributed.lln_attention(q, k, v, group=group)
        _, sent_bytes = sent(group, "lln_attention", tokens=256, heads=H, width=D)
        assert sent_bytes == 4 * model.traffic(256, P, H, D)["lln"][2]
    finally:
        statistics.FEW = model.FEW = few
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


def traffic_cases():
    for causal in (False, True):
        options = {"is_causal": causal}
        for form in ("paper", "unbiased", "decomposed"):
            given = {"form": form}
            if causal and form == "decomposed":
                given["centers"] = (torch.zeros(12, 64), torch.zeros(12, 64))
            yield f"{form} causal={causal}", partial(check_bound, function="lln_attention", **given, **options)
        for where, tokens in ("at borders", 1024), ("across borders", 1000):
            given = {"function": "lln_diag_attention", "tokens": tokens, "block_size": 64}
            yield f"blocks {where}, causal={causal}", partial(check_bound, **given, **options)
        window = {"near": "window", "block_size": 64}
        yield f"window, causal={causal}", partial(check_bound, function="lln_diag_attention", **window, **options)
    yield "same", partial(check_same, function="lln_attention", longest=1_048_576)
    for name, options in {"causal": {"is_causal": True}, "window": {"near": "window", "block_size": 64}}.items():
        yield f"same, {name}", partial(check_same, function="lln_diag_attention", longest=65_536, **options)
    yield "by hand", check_by_hand
    yield "neighbours", check_neighbors
    yield "many", check_many
    yield "halo", check_halo
    yield "packed", check_packed
    yield "beyond the neighbours", check_beyond
    yield "nothing stays", check_nothing_stays
    if Path("/proc/self/clear_refs").exists():
        yield "memory", check_memory
        yield "memory, causal", partial(check_memory, is_causal=True)
        yield "memory, window", partial(check_memory, near="window")
        yield "memory, unbiased", partial(check_memory, form="unbiased")
        yield "memory, decomposed", partial(check_memory, form="decomposed", near="window")
        low = {"dtype": torch.bfloat16, "form": "decomposed"}
        yield "memory, bfloat16", partial(check_memory, tokens=1 << 19, **low)
        frozen = (torch.ones(1, 64), torch.ones(1, 64))
        causal = {"form": "decomposed", "centers": frozen, "is_causal": True}
        yield "memory, decomposed, causal", partial(check_memory, tokens=1 << 18, **causal)


def test_traffic_and_memory():
    failed = run_world(4, traffic_cases)
    assert not failed, report(failed)
