"""What the tests of the core share: which backends there are, calls, comparisons and states."""

import functools
import itertools
import os
from contextlib import contextmanager

import pytest
import torch

import lln
import lln.backends
from lln import LLNState, reference
from lln.cache import cache_folder
from lln.problem import Problem

# A GPU if there is one, for the tests of tests/gpu; LLN_TEST_DEVICE=cuda runs all others there, too.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = "cuda" if torch.cuda.is_available() and not IS_INTERPRETED else None
torch.set_default_device(os.environ.get("LLN_TEST_DEVICE"))


def reason_against(name, dtype=torch.float32):
    """Why a backend cannot run on this machine, found with a problem that is easy for each; None if it can."""
    (backend,) = (x for x in lln.backends.BACKENDS if x.name == name)
    return backend.why_not(Problem.make(*torch.zeros(3, 1, 1, 16, 16, dtype=dtype), far=True))


@functools.cache
def widest(name):
    """The widest dtype that a backend has."""
    return torch.float64 if reason_against(name, torch.float64) is None else torch.float32


ALL_BACKENDS = [x.name for x in lln.backends.BACKENDS]
BACKENDS = [name for name in ALL_BACKENDS if reason_against(name) is None]
FUNCTIONS = ["lln_attention", "block_diagonal_attention", "lln_diag_attention"]
FORMS = ["paper", "unbiased", "decomposed"]
MATCHINGS = ["linear", "variance", "entropy"]
# Every part of attention, with sizes that fill blocks, windows and vectors only in part.
CALLS = {
    "lln": ("lln_attention", {}),
    "given": ("lln_attention", {"alpha": 1.3, "beta": 0.7}),
    "unbiased": ("lln_attention", {"form": "unbiased"}),
    "decomposed": ("lln_attention", {"form": "decomposed"}),
    "diag": ("lln_diag_attention", {"block_size": 16}),
    "diag-odd": ("lln_diag_attention", {"block_size": 23}),
    "diag-window": ("lln_diag_attention", {"block_size": 16, "near": "window"}),
    "decomposed-window": ("lln_diag_attention", {"block_size": 16, "near": "window", "form": "decomposed"}),
    "blocks": ("block_diagonal_attention", {"block_size": 16}),
    "blocks-large": ("block_diagonal_attention", {"block_size": 70}),
    "window": ("block_diagonal_attention", {"block_size": 17, "near": "window"}),
}
# What a state keeps for softmax attention among neighbours.
NEARS = {"far": {}, "blocks": {"block_size": 7}} | {
    f"window{size}": {"block_size": size, "near": "window"} for size in (1, 7, 64, 200)
}

causal_or_full = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
all_calls = pytest.mark.parametrize("call", CALLS)
all_functions = pytest.mark.parametrize("name", FUNCTIONS)
new_forms = pytest.mark.parametrize("form", FORMS[1:])
half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Of threads, chunks and roundings that only the fused code has.
only_cpu = pytest.mark.parametrize("backend", [x for x in BACKENDS if x == "cpu"], indirect=True)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason=f"no fused code: {reason_against('cpu')}")


def empty_cache(parent, monkeypatch):
    """Set LLN_CACHE to a new folder in `parent` that holds the compiled C code and nothing else."""
    kernels = cache_folder() / "kernels"
    folder = parent / "cache"
    folder.mkdir()
    if kernels.exists():
        (folder / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv("LLN_CACHE", str(folder))
    return folder


def centers_of(form, heads, key_heads, width):
    """Frozen centres, where a form has them."""
    return (
        {"centers": (torch.randn(heads, width) / 2, torch.randn(key_heads, width) / 2)} if form == "decomposed" else {}
    )


def options_of(call, is_causal, inputs):
    """The name of the function of a call and its options; causal attention of the decomposed form needs centres."""
    name, options = CALLS[call]
    query, key, _ = inputs
    more = centers_of(options.get("form") if is_causal else None, query.shape[1], key.shape[1], query.shape[3])
    return name, options | more | {"is_causal": is_causal}


def in_dtype(options, dtype):
    """Options with all floating point tensors in a dtype."""

    def convert(x):
        if isinstance(x, tuple):
            return tuple(y.to(dtype) for y in x)
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return {name: convert(x) for name, x in options.items()}


def relative(got, want, floor=1e-2):
    """The largest error, in units of the largest entry or of `floor`."""
    return float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max().clamp(min=floor))


def run(function, inputs, gradient, dtype=None):
    """The output and the gradients of the inputs."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def random_gradient(inputs):
    return torch.randn(*inputs[0].shape[:3], inputs[2].shape[3])


def compare(ours, theirs, inputs, *, limit=2e-6, floor=1e-2):
    """Output and gradients against those of the formula in float64; gradients may be five times as wrong.

    One token alone has gradients that vanish by cancellation: they are judged by the largest of all gradients.
    """
    gradient = random_gradient(inputs)
    found, expected = run(ours, inputs, gradient), run(theirs, inputs, gradient, torch.float64)
    floors = [floor] * len(expected)
    if inputs[0].shape[2] == 1:
        floors[1:] = [max(float(x.abs().max()) for x in expected[1:]) or 1.0] * len(inputs)
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        error, allowed = relative(x, y, floors[i]), limit if i == 0 else 5 * limit
        assert error < allowed, f"{'output' if i == 0 else f'gradient {i}'} is off by {error:.1e}"
    return found


def both(name, **options):
    """A function of `lln` and of the reference."""
    return (functools.partial(getattr(module, name), **options) for module in (lln, reference))


def compare_call(name, inputs, **options):
    """Output and gradients of a function against those of the reference; returns ours."""
    ours = functools.partial(getattr(lln, name), **options)
    theirs = functools.partial(getattr(reference, name), **in_dtype(options, torch.float64))
    return compare(ours, theirs, inputs)


def assert_as_exact(got, want, *, rtol=1e-9, atol=1e-10, limit=2e-6):
    """float64 agrees to `rtol` and `atol`; narrower results to within a few of their roundings, `limit`."""
    if got.dtype == torch.float64:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    else:
        assert relative(got, want.double()) < limit


def assert_low_precision(ours, theirs, inputs, gradient):
    """Against float64 at most twice as wrong as the plain formula in the same dtype, gradients three times."""
    dtype = inputs[0].dtype
    exact = run(theirs, inputs, gradient, torch.float64)
    plain, found = run(theirs, inputs, gradient), run(ours, inputs, gradient)
    for i, (x, y, z) in enumerate(zip(found, plain, exact, strict=True)):
        assert x.dtype == dtype
        error, allowed = ((got.double() - z).abs().max() for got in (x, y))
        assert error <= (2 if i == 0 else 3) * allowed + 1e-12, f"{i}: {error:.2e} against {allowed:.2e}"


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def state_options(form, near, H=4, Hk=2, D=16):
    """Options of a state of a form; the centres of the decomposed one are the same in every call."""
    torch.manual_seed(5)
    return NEARS[near] | centers_of(form, H, Hk, D) | {"form": form}


def empty_for(q, k, v, **options):
    """The state before these tokens."""
    return LLNState.empty(
        q.shape[0], q.shape[1], q.shape[3], v.shape[3], key_heads=k.shape[1], dtype=v.dtype, **options
    )


def feed(state, inputs, cuts, mask=None, *, in_place=False, **options):
    """The outputs of tokens that arrive in pieces, and the state after the last."""
    outputs = []
    for start, end in itertools.pairwise(cuts):
        keep = None if mask is None else mask[:, start:end]
        more = {name: x[:, :, start:end] for name, x in options.items()}
        piece = (x[:, :, start:end] for x in inputs)
        output, state = state.prefill(*piece, key_padding_mask=keep, in_place=in_place, **more)
        outputs.append(output)
    return torch.cat(outputs, 2), state


def assert_kernel(module, query, key, value, kernel, *, is_causal, padded):
    """A module weighs its values by an explicit kernel (B, H, N, N), with each row divided by its sum."""
    keep = torch.rand(kernel.shape[0], kernel.shape[-1]) > 0.3 if padded else None
    if keep is not None:
        keep[:, 0] = True
        kernel = kernel * keep[:, None, None, :]
    if is_causal:
        kernel = kernel.tril()
    expected = kernel @ value / kernel.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(module(query, key, value, is_causal=is_causal, key_padding_mask=keep), expected)


def random_transformer(family, head, settings, *, factor):
    """A random model of transformers with weights `factor` times as large as by default, so that attention matters."""
    import transformers

    torch.manual_seed(settings.get("seed", 0))
    config = transformers.AutoConfig.for_model(family, **{name: x for name, x in settings.items() if name != "seed"})
    model = getattr(transformers, f"Auto{head}").from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model.eval()
