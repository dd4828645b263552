"""What a process sends does not grow with the length, and stays below what is promised."""

from functools import partial

import torch
import torch.distributed as dist
from distributed_world import report, run_world

from lln import distributed


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


def check_bound(group, function, **options):
    H, D = 12, 64
    messages, sent_bytes = sent(group, function, tokens=1024, heads=H, width=D, **options)
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


def traffic_cases():
    for causal in (False, True):
        options = {"is_causal": causal}
        for form in ("paper", "unbiased", "decomposed"):
            given = {"form": form}
            if causal and form == "decomposed":
                given["centers"] = (torch.zeros(12, 64), torch.zeros(12, 64))
            yield f"{form} causal={causal}", partial(check_bound, function="lln_attention", **given, **options)
        yield f"blocks at borders, causal={causal}", partial(check_bound, function="lln_diag_attention", **options)
        window = {"near": "window", "block_size": 64}
        yield f"window, causal={causal}", partial(check_bound, function="lln_diag_attention", **window, **options)
    yield "same", partial(check_same, function="lln_attention", longest=1_048_576)
    for name, options in {"causal": {"is_causal": True}, "window": {"near": "window", "block_size": 64}}.items():
        yield f"same, {name}", partial(check_same, function="lln_diag_attention", longest=65_536, **options)
    yield "by hand", check_by_hand


def test_traffic_does_not_grow_with_the_length():
    failed = run_world(4, traffic_cases)
    assert not failed, report(failed)
