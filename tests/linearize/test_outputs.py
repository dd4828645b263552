import copy

import pytest
import torch

import lln.hf
from lln.linearize import outputs
from lln.linearize.losses import output_loss
from lln.linearize.outputs import SMALLEST_SHARE, fit_outputs, fit_shares, output_layers, restore_outputs
from lln.linearize.stages import calibrate_heads
from lln.linearize.teacher import converted_modules, make_teacher, observing


def words(samples=4, tokens=24):
    return {"input_ids": torch.randint(5, 80, (samples, tokens), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize(
    ("family", "head", "last"),
    [
        ("bert", "Model", "attention.output.dense"),
        ("distilbert", "Model", "attention.out_lin"),
        ("gpt2", "ModelForCausalLM", "attn.c_proj"),
        ("llama", "ModelForCausalLM", "self_attn.o_proj"),
    ],
)
def test_output_layers_are_found_by_what_they_are_given(make, family, head, last):
    names = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}}
    names["distilbert"] = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}
    teacher = make_teacher(make(family, head, **names.get(family, {})))
    layers = output_layers(teacher, words())
    assert len(layers) == 2
    assert all(name.endswith(last) for name in layers.values())


@pytest.mark.parametrize(("family", "head"), [("bert", "Model"), ("gpt2", "ModelForCausalLM")])
def test_a_student_without_error_gets_the_weights_of_its_teacher(make, family, head):
    names = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64} if family == "gpt2" else {}
    teacher = make_teacher(make(family, head, **names))
    layers, student = output_layers(teacher, words()), copy.deepcopy(teacher)
    with torch.no_grad():
        for name in layers.values():
            student.get_submodule(name).weight.normal_()
    fit_outputs(student, teacher, words(), layers)
    for name in layers.values():
        for key in ("weight", "bias"):
            expected = getattr(teacher.get_submodule(name), key)
            torch.testing.assert_close(getattr(student.get_submodule(name), key), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "head"), [("bert", "Model"), ("gpt2", "ModelForCausalLM")])
def test_restored_projections_are_those_of_the_teacher_to_the_bit(make, family, head):
    names = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64} if family == "gpt2" else {}
    model = make(family, head, **names)
    teacher, student = make_teacher(model), lln.hf.convert(copy.deepcopy(model), "lln")
    layers = output_layers(teacher, words())
    fit_outputs(student, teacher, words(), layers)
    weights = {name: student.get_submodule(name).weight for name in layers.values()}
    assert not any(torch.equal(x, teacher.get_submodule(name).weight) for name, x in weights.items())
    restore_outputs(student, teacher, layers)
    for name, weight in weights.items():
        assert torch.equal(weight, teacher.get_submodule(name).weight)
        assert weight.data_ptr() != teacher.get_submodule(name).weight.data_ptr()


@pytest.mark.parametrize(("family", "head"), [("bert", "Model"), ("llama", "ModelForCausalLM")])
def test_the_fit_solves_the_penalised_least_squares(make, family, head):
    """Of the first layer, whose inputs do not depend on other fits: no step away from the solution is better."""
    model, ridge = make(family, head), 0.5
    teacher, student = make_teacher(model), lln.hf.convert(copy.deepcopy(model), "lln")
    layers = output_layers(teacher, words())
    fit_outputs(student, teacher, words(), layers, ridge=ridge)
    name = next(iter(layers.values()))
    found = {}
    for who, network in (("teacher", teacher), ("student", student)):
        hook = network.get_submodule(name).register_forward_hook(
            lambda _, given, output, who=who: found.__setitem__(who, (given[0], output))
        )
        with torch.no_grad():
            network(**words())
        hook.remove()
    x, y = (z.flatten(0, 1).double() for z in (found["student"][0], found["teacher"][1]))
    layer, start = student.get_submodule(name), teacher.get_submodule(name)
    pull = ridge * x.square().mean()

    def cost(weight, bias):
        error = x @ weight.mT - y + (0.0 if bias is None else bias)
        return error.square().mean(dim=0).sum() + pull * (weight - start.weight.double()).square().sum()

    weight, bias = layer.weight.double(), None if layer.bias is None else layer.bias.double()
    best = cost(weight, bias)
    assert best < cost(start.weight.double(), None if start.bias is None else start.bias.double())
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        step = 1e-2 * torch.randn(weight.shape, generator=generator, dtype=torch.double)
        assert cost(weight + step, bias) > best
        if bias is not None:
            assert cost(weight, bias + step[:, 0]) > best


@torch.no_grad()
def error(mechanism, seen):
    return float(output_loss(mechanism, seen))


@pytest.mark.parametrize("combine", ["ratio", "gate"])
def test_shares_are_the_best_ones(make, combine):
    teacher = make_teacher(make("bert"))
    student = lln.hf.convert(make("bert"), "lln_diag", combine=combine, block_size=8, near="window")
    with observing(teacher) as found, torch.no_grad():
        teacher(**words())
    for name, module in converted_modules(student).items():
        mechanism, [seen] = module.mechanism, found[name]
        fit_shares(mechanism, seen)
        share = mechanism.ratio_logit.sigmoid().tolist()
        best = error(mechanism, seen)
        for head in range(2):
            for other in (share[head] - 0.02, share[head] + 0.02):
                if SMALLEST_SHARE < other < 1 - SMALLEST_SHARE:
                    with torch.no_grad():
                        mechanism.ratio_logit[head] = torch.tensor(other).logit()
                    assert error(mechanism, seen) > best
            with torch.no_grad():
                mechanism.ratio_logit[head] = torch.tensor(share[head]).logit()


@pytest.mark.parametrize("combine", ["gate", "replace"])
def test_all_that_a_share_depends_on_is_fitted_to_the_output(make, combine, monkeypatch):
    model = make("bert")
    with torch.no_grad():  # so that queries differ in how much lies far
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                weight.mul_(4)
    teacher = make_teacher(model)
    options = {"statistics": "learned", "form": "decomposed", "projection": True, "signed": True}
    student = lln.hf.convert(copy.deepcopy(model), "lln_diag", combine=combine, block_size=8, near="window", **options)
    batch = words(samples=64) | {"attention_mask": torch.ones(64, 24, dtype=torch.long)}
    batch["attention_mask"][:9, 15:] = 0
    with observing(teacher) as found, torch.no_grad():
        teacher(**batch)
    for name, module in converted_modules(student).items():
        mechanism, [seen] = module.mechanism, found[name]
        calibrate_heads(mechanism, seen, torch.arange(24))
        with monkeypatch.context() as patch:
            patch.setattr(outputs, "SHARE_STEPS", 0)
            fit_shares(mechanism, seen)
        offset_alone = error(mechanism, seen)
        fit_shares(mechanism, seen)
        assert error(mechanism, seen) < 0.95 * offset_alone


def test_a_plain_average_has_no_share_to_fit(make):
    teacher, student = make_teacher(make("bert")), lln.hf.convert(make("bert"), "lln_diag", block_size=8)
    with observing(teacher) as found, torch.no_grad():
        teacher(**words())
    for name, module in converted_modules(student).items():
        before = copy.deepcopy(module.mechanism.state_dict())
        fit_shares(module.mechanism, found[name][0])
        assert module.mechanism.state_dict().keys() == before.keys()
