"""Moving averages of the moments of each head: `statistics="running"` of the modules, as BatchNorm keeps them."""

from collections.abc import Callable

import torch
from torch import Tensor

from lln.forms import token_mean
from lln.masks import read_paddings
from lln.matching.curves import Form
from lln.matching.moments import Scope, measure_moments
from lln.mechanism import Mechanism

AVERAGES = ("sigma_q", "sigma_k", "row_variance", "num_keys")
CENTERS = ("center_q", "center_k")


class RunningAverages(Mechanism):
    """A mechanism with such averages as buffers, if `_register_averages` was called."""

    num_key_heads: int
    form: Form
    scope: Scope
    momentum: float

    sigma_q: Tensor
    sigma_k: Tensor
    row_variance: Tensor
    num_keys: Tensor
    center_q: Tensor
    center_k: Tensor
    num_batches_tracked: Tensor

    def _register_averages(self) -> None:
        """Begin with those of a standard Gaussian and 1,024 tokens."""
        for name in AVERAGES:
            self.register_buffer(name, torch.ones(self.num_heads))
        self.num_keys.fill_(1024.0)
        if self.form == "decomposed":
            self.register_buffer("center_q", torch.zeros(self.num_heads, self.head_dim))
            self.register_buffer("center_k", torch.zeros(self.num_key_heads, self.head_dim))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def _track(self, query: Tensor, key: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
        weight = torch.where(self.num_batches_tracked == 0, 1.0, self.momentum)
        query, key = query.detach(), key.detach()
        keep_query, keep_key = read_paddings(query, key, key_mask, query_mask)
        if self.form == "decomposed":
            for name, x, keep in zip(CENTERS, (query, key), (keep_query, keep_key), strict=True):
                mean = token_mean(x, keep)
                real = torch.ones_like(mean[:, :1, :1]) if keep is None else keep.any(dim=1).to(mean)[:, None, None]
                new = (mean * real).sum(dim=0) / real.sum(dim=0).clamp(min=1)
                self._update(name, new, real.any(), weight)
            query, key = (x - token_mean(x, keep)[:, :, None] for x, keep in ((query, keep_query), (key, keep_key)))
        moments = measure_moments(
            query, key, scope=self.scope, key_padding_mask=keep_key, query_padding_mask=keep_query
        )
        real = (moments.num_keys > 0).expand_as(moments.sigma_q)  # a sample without kept tokens does not count
        for name in AVERAGES:
            values = getattr(moments, name).expand_as(moments.sigma_q)
            new = values.where(real, 0.0).sum(dim=0) / real.sum(dim=0).clamp(min=1)
            self._update(name, new, real.any(dim=0), weight)
        self.num_batches_tracked.add_(1)

    def _update(self, name: str, new: Tensor, real: Tensor, weight: Tensor) -> None:
        average = getattr(self, name)
        average.lerp_(torch.where(real, new.to(average.dtype), average), weight.to(average.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningAverages":
        """Moves as any module, but keeps the running averages in float32, because a variance overflows float16."""
        before = {name: getattr(self, name) for name in (*AVERAGES, *CENTERS) if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, average in before.items():
            moved = getattr(self, name)
            self._buffers[name] = average.to(moved.device, torch.promote_types(moved.dtype, torch.float32))
        return self
