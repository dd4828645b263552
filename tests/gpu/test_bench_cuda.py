"""`lln bench attention --device cuda` and the choice of stages, with a GPU that is not there."""

import json
import sys
from types import ModuleType

import pytest
import torch

import helpers
from lln.bench import attention, candidates
from lln.bench.peak import Peak, random_heads

pytest.importorskip("triton", reason="triton is not installed, see make test-triton")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where its compiler is imported


@pytest.fixture
def gpu(monkeypatch):
    """torch says that there is a GPU; inputs stay on the CPU, and memory is not measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 34, 1 << 34))
    monkeypatch.setattr(candidates, "random_inputs", lambda setting, tokens: random_heads(tokens, heads=2, head_dim=16))
    monkeypatch.setattr(attention, "in_new_process", lambda *_: Peak(1, 1))


@pytest.fixture
def fla(monkeypatch):
    """A module with the signature of flash-linear-attention 0.6's function, and its plain formula."""

    def chunk_linear_attn(
        q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None
    ):
        assert q.shape[1] >= q.shape[2], "heads before tokens"
        assert all(x.is_contiguous() for x in (q, k, v)), "it would copy them"
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        states = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(dim=1)
        output = torch.einsum("bthk,bthkv->bthv", q * scale, states)
        if normalize:
            output = output / ((q * scale * k.cumsum(1)).sum(-1, keepdim=True) + 1e-10)
        return output, None

    module = ModuleType("fla.ops.linear_attn")
    module.chunk_linear_attn = chunk_linear_attn
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", module)
    return module


def rows_of(**options):
    setting = candidates.Setting(device="cuda", **options)
    names = candidates.GPU_MECHANISMS
    return list(attention.compare_attention((70,), names, setting, passes=attention.PASSES, seconds=0.01))


def test_every_mechanism_of_a_gpu_is_measured(gpu, fla, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = rows_of(causal=True)
    assert [row["mechanism"] for row in rows] == [*candidates.GPU_MECHANISMS] * 2
    assert not [row for row in rows if "milliseconds" not in row]


def test_what_cannot_run_is_left_out_with_the_reason(gpu, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setitem(sys.modules, "fla", None)
    reasons = {row["mechanism"]: row["skipped"] for row in rows_of() if "skipped" in row}
    assert reasons == {"fla": "cannot run: flash-linear-attention is not installed"}


def test_results_name_what_computes_causal_attention():
    """Heads of 128 run in the kernels, but not causal ones."""
    for causal, answer in ((False, "triton: yes"), (True, "triton: no, causal attention of head dimension 128")):
        setting = candidates.Setting(heads=1, head_dim=128, causal=causal, device=helpers.GPU or "cpu")
        assert answer in attention.kernel_in_use(setting)["explained"]


def test_flash_linear_attention_is_called_with_tokens_first(fla):
    setting = candidates.Setting(heads=2, head_dim=16, causal=True)
    q, k, v = (x.abs() for x in random_heads(70, heads=2, head_dim=16))
    (found,) = candidates.make_call("fla", setting, (q, k, v), backward=False).run()
    weights = (q @ k.mT).tril()
    torch.testing.assert_close(found, weights / weights.sum(dim=-1, keepdim=True) @ v, rtol=1e-3, atol=1e-4)
    with pytest.raises(candidates.CannotRunError, match="causal only"):
        candidates.make_call("fla", candidates.Setting(heads=2, head_dim=16), (q, k, v), backward=False)


def test_the_plain_path_compiles_to_one_graph():
    torch._dynamo.reset()
    inputs = random_heads(70, heads=2, head_dim=16)
    compiled = torch.compile(candidates.lln_attention, fullgraph=True, backend="aot_eager")
    found = candidates._compiled_lln(compiled, *inputs, is_causal=False)
    torch.testing.assert_close(found, candidates.lln_attention(*inputs), rtol=1e-4, atol=1e-5)


def test_the_fastest_number_of_stages_is_kept_for_other_processes(gpu, monkeypatch, tmp_path):
    from lln.backends.triton import tuning

    monkeypatch.setenv("LLN_CACHE", str(tmp_path))
    tuning._known.cache_clear()
    milliseconds = {1: 3.0, 2: 2.0, 3: 1.0}
    measured = []

    def measure(function):
        measured.append(function.keywords["num_stages"])
        return milliseconds[measured[-1]]

    monkeypatch.setattr(tuning, "_milliseconds", measure)
    short, call = (
        tuning.Call("recall_kernel", (1,), (64, 64), torch.float16, {"tokens": tokens}) for tokens in (64, 4096)
    )
    assert tuning.fastest_stages(short, torch.device("cuda"), lambda **_: None) == 2
    assert not measured
    for _ in range(2):  # the second is another process
        assert tuning.fastest_stages(call, torch.device("cuda"), lambda **_: None) == 3
        tuning._known.cache_clear()
    assert sorted(measured) == [1, 2, 3]
    assert list(json.loads((tmp_path / tuning.FILE).read_text()).values()) == [3]


def test_a_kernel_runs_on_the_gpu_of_its_tensors(gpu, monkeypatch):
    """Triton launches on the current GPU, which may be another one than that of the tensors."""
    from lln.backends.triton import tuning

    entered = []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor)

        def __exit__(self, *_):
            entered.clear()

    class Kernel:
        arg_names = ()

        def __getitem__(self, grid):
            return lambda query, **_: ran.append(list(entered) == [query])

    ran = []
    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    monkeypatch.setattr(tuning, "kernels", lambda: {"recall_kernel": Kernel()})
    tuning.run("recall_kernel", (1,), (64, 64), torch.float16, {"query": torch.zeros(1)})
    assert ran == [True]
    assert not entered
