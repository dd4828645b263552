import random

import pytest

from helpers import random_transformer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from lln.linearize import LinearizeConfig  # noqa: E402

WORDS = 80
SIZES = {
    "vocab_size": WORDS + 5,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer():
    """A word for each number, and BERT's special tokens around a text."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "[MASK]": 4} | {f"w{i}": i + 5 for i in range(WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    )


@pytest.fixture(scope="session")
def texts():
    """Documents in which a word is often followed by the next one."""
    chance = random.Random(0)
    documents = []
    for _ in range(40):
        words = [chance.randrange(WORDS)]
        for _ in range(120):
            words.append((words[-1] + 1) % WORDS if chance.random() < 0.6 else chance.randrange(WORDS))
        documents.append(" ".join(f"w{x}" for x in words))
    return documents


@pytest.fixture
def make():
    """A tiny random model whose attention matters."""

    def build(family, head="Model", **settings):
        return random_transformer(family, head, SIZES | settings, factor=12.0)

    return build


@pytest.fixture
def quick():
    """Settings for a run of a second."""

    def build(**changes):
        small = {"length": 48, "tokens": 3000, "batch_tokens": 192, "calibration_tokens": 480, "eval_passages": 6}
        steps = {"align_steps": 6, "join_steps": 3, "distil_steps": 4, "rows": 16, "cost_tokens": 0}
        return LinearizeConfig(**small | steps | changes)

    return build
