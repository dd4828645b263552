import os
import zlib

# Some virtual machines report AMX but do not allow its instructions, so that torch's bfloat16 products end the process.
# Read when torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

import helpers
import lln.backends

# Many small tensors: a second thread costs more than it gives, and each pytest worker has a core.
torch.set_num_threads(1)


if helpers.IS_INTERPRETED:
    import inspect

    import triton.language as tl
    from triton.runtime import interpreter

    BUILTINS = {}

    def patch_builtin(package, builder, scope):
        """As Triton's, which looks for the builtins of its language again for each call of each function."""
        if package not in BUILTINS:
            BUILTINS[package] = [name for name, x in inspect.getmembers(package) if tl.core.is_builtin(x)]
        for name in BUILTINS[package]:
            if tl.core.is_builtin(x := getattr(package, name)):
                interpreter._patch_attr(package, name, x, builder, scope)

    interpreter._patch_builtin = patch_builtin

    def create_fma(_, x, y, z):
        """Rounded once, as on a GPU; Triton's is not."""
        exact = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype)

    interpreter.InterpreterBuilder.create_fma = create_fma


def pytest_addoption(parser):
    parser.addoption("--one-case", action="store_true", help="run one case of each test that -k and -m leave")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """With --one-case, the name of a test determines which of its cases runs: not the first of all of them."""
    if helpers.IS_INTERPRETED:
        for item in items:  # numpy computes there, and warns of what is not finite
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
    if not config.getoption("one_case"):
        return
    cases = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {id(found[zlib.crc32(name.encode()) % len(found)]) for name, found in cases.items()}
    config.hook.pytest_deselected(items=[x for x in items if id(x) not in chosen])
    items[:] = [x for x in items if id(x) in chosen]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=helpers.BACKENDS)
def backend(request):
    """The name of each backend in turn, which computes all attention of the test; what it cannot is skipped."""
    with lln.backends.use(request.param):
        yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except lln.backends.UnsupportedError as error:
        if "backend" not in pyfuncitem.fixturenames:
            raise
        pytest.skip(str(error).partition(";")[0])


@pytest.fixture
def wide(backend):
    """The widest dtype that the backend has: rounding hides little of a mistake in a formula."""
    return helpers.widest(backend)


@pytest.fixture
def four_threads():
    """More threads than heads: the fused code cuts the tokens of a head into chunks."""
    with helpers.threads(4):
        yield


@pytest.fixture
def new_cache(tmp_path, monkeypatch):
    """LLN_CACHE, with nothing in it but the C code, which each process of a test would compile again."""
    return helpers.empty_cache(tmp_path, monkeypatch)


@pytest.fixture
def tokens():
    """Makes query (B, H, N, D), key (B, H_k, M, D) and value (B, H_k, M, Dv), off-centre so that means matter."""

    def make(B=2, H=4, N=65, D=16, *, Hk=None, M=None, Dv=None, dtype=torch.float64, scale=1.0, grad=False):
        shapes = (B, H, N, D), (B, Hk or H, M or N, D), (B, Hk or H, M or N, Dv or D)
        offsets = (0.1, -0.3, 0.2)
        return [
            (scale * (torch.randn(shape, dtype=torch.float64) + offset)).to(dtype).requires_grad_(grad)
            for shape, offset in zip(shapes, offsets, strict=True)
        ]

    return make
