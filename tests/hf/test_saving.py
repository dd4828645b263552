"""save_pretrained and lln.hf.from_pretrained, transformers without lln, and the Trainer."""

import json

import pytest
import torch
import transformers

import lln.hf
from lln import zoo

CASES = {
    "lln_diag": ("roberta", "lln_diag", {"block_size": 5, "matching": "entropy"}),
    "learned": ("roberta", "lln_diag", {"block_size": 5, "combine": "ratio", "share": 0.1}),
    "linformer": ("roberta", "linformer", {"rank": 6}),
    "performer": ("bert", "performer", {}),
    "tnn": ("llama", "tnn", {}),
    "cosformer": ("llama", "cosformer", {"max_len": 50}),
    "rfa": ("gpt2", "rfa", {}),
    "image": ("vit", "transformer_ls", {"rank": 4}),
}


def disturb(model):
    """Give learned parameters other values than those they start with."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mechanism." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model, batch):
    inputs = {"pixel_values": torch.ones(2, 3, 20, 20)} if "pixel" in model.main_input_name else batch
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_model_again(case, dtype, make, batch, tmp_path):
    family, attention, options = CASES[case]
    head = "ModelForMaskedLM" if family in ("roberta", "bert") else "Model" if family == "vit" else "ModelForCausalLM"
    model = disturb(lln.hf.convert(make(family, head, dtype=dtype), attention, **options))
    inputs = batch()
    model.save_pretrained(tmp_path)
    opened = lln.hf.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert opened.dtype == dtype
    assert torch.equal(logits(opened, inputs), logits(model, inputs))
    opened.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (tmp_path / "again/config.json").read_text()
    )


def test_another_head(make, batch, tmp_path):
    model = disturb(lln.hf.convert(make("roberta", "ModelForMaskedLM"), "linformer", rank=6))
    model.save_pretrained(tmp_path)
    for kind in (transformers.AutoModelForSequenceClassification, transformers.RobertaForSequenceClassification):
        opened = lln.hf.from_pretrained(tmp_path, kind, num_labels=3)
        assert type(opened) is transformers.RobertaForSequenceClassification
        assert logits(opened, batch()).shape == (3, 3)
        for name, parameter in opened.roberta.named_parameters():
            assert torch.equal(parameter, model.roberta.get_parameter(name)), name
    with pytest.raises(ValueError, match="no AutoModelForImageClassification for a roberta"):
        lln.hf.from_pretrained(tmp_path, transformers.AutoModelForImageClassification)


def test_a_generating_model(make, batch, tmp_path):
    model = lln.hf.convert(make("llama", "ModelForCausalLM"), block_size=4)
    model.save_pretrained(tmp_path)
    inputs = batch("left")
    assert torch.equal(
        lln.hf.from_pretrained(tmp_path).generate(**inputs, max_new_tokens=9),
        model.generate(**inputs, max_new_tokens=9),
    )


@pytest.mark.parametrize("attention", ["lln_diag", "performer"])
@pytest.mark.parametrize("kind", ["AutoModel", "BertModel"])
def test_no_silent_softmax(kind, attention, make, batch, tmp_path, monkeypatch):
    lln.hf.convert(make("bert"), attention).save_pretrained(tmp_path)
    model = getattr(transformers, kind).from_pretrained(tmp_path)  # where lln.hf is imported, the name is known
    with pytest.raises(ValueError, match=r"lln\.hf\.from_pretrained"):
        model(**batch())
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", {"sdpa": None})  # as if it were not
    with pytest.raises(
        ValueError, match=f'attn_implementation="{model.config._attn_implementation}"` is not supported'
    ):
        getattr(transformers, kind).from_pretrained(tmp_path)


def test_after_going_back(make, batch, tmp_path):
    model = make("bert")
    expected = logits(model, batch())
    lln.hf.convert(lln.hf.convert(model, "rfa"), "softmax").save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.AutoModel.from_pretrained(tmp_path), batch()), expected)
    with pytest.raises(ValueError, match="holds no converted model"):
        lln.hf.from_pretrained(tmp_path)


def test_refusals(make, tmp_path):
    model = lln.hf.convert(make("bert"), "rfa")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the attention it was saved with"):
        lln.hf.from_pretrained(tmp_path, attn_implementation="sdpa")
    kept = {name: x for name, x in model.state_dict().items() if ".0.attention.self.mechanism" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(ValueError, match=r"lacks parameters of its attention, encoder\.layer\.0"):
        lln.hf.from_pretrained(tmp_path)


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randint(3, 90, (32, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_trainer_saves_and_resumes(make, tmp_path):
    def train(folder, steps, resume=None):
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            lr_scheduler_type="constant",
        )
        model = lln.hf.convert(make("roberta", "ModelForMaskedLM"), "linformer", rank=6)
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
        trainer.train(resume_from_checkpoint=resume)
        return model.state_dict()

    whole = train(tmp_path / "whole", 4)
    resumed = train(tmp_path / "resumed", 4, str(tmp_path / "whole/checkpoint-2"))
    start = make("roberta", "ModelForMaskedLM")
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
    opened = lln.hf.from_pretrained(tmp_path / "whole/checkpoint-4")
    for name, tensor in opened.state_dict().items():
        assert torch.equal(whole[name], tensor), name
    assert isinstance(opened.roberta.encoder.layer[1].attention.self.mechanism, zoo.Mechanism)
    assert not torch.equal(start.get_parameter("lm_head.dense.weight"), whole["lm_head.dense.weight"])
