"""The runs behind tables and figures: what `lln reproduce` starts, one `lln train ...` for each."""

from dataclasses import dataclass

from lln.zoo import describe

# The paper's LLN+Diag.
AVERAGE = ("lln_diag", "--option", "combine=average")
# LLN+Diag whose heads learn how much they take of LLN, and begin with little.
LEARNED_SHARE = ("lln_diag", "--option", "combine=ratio", "--option", "share=0.1")
# LLN+Diag with a window, in the further forms: by the paper's average, and with shares that are estimated, not learned.
WINDOW = ("lln_diag", "--option", "near=window")
# What is compared: the name in runs, and the attention with its options.
ATTENTIONS = {
    **{name: (name,) for name in ("softmax", "lln", "elu", "performer", "nystrom", "cosformer", "linformer")},
    "lln_diag": AVERAGE,
    "lln_diag_learned": LEARNED_SHARE,
    "lln_diag_unbiased": (*WINDOW, "--option", "combine=average", "--option", "form=unbiased"),
    "lln_diag_decomposed": (*WINDOW, "--option", "combine=average", "--option", "form=decomposed"),
    "lln_diag_mass": (*WINDOW, "--option", "combine=mass", "--option", "form=unbiased"),
}
# What a table says of an attention beside the title of its mechanism.
VARIANTS = {
    "lln_diag_learned": "learned share",
    "lln_diag_unbiased": "unbiased, window",
    "lln_diag_decomposed": "decomposed, window",
    "lln_diag_mass": "unbiased, window, estimated share",
}
# float16 has no fast path on most CPUs: these runs are short, and the loss scale grows fast enough to find its limit.
SHORT_HALF = ("--precision", "fp16", "--steps", "200", "--batch-size", "4", "--scale-window", "10", "--log-every", "1")


@dataclass(frozen=True)
class Job:
    """One run: `lln train ARGUMENTS`. `after` names the run that it starts from.

    `method`, `task` and `seed` are what `lln reproduce --method ... --task ... --seed ...` chooses by.
    """

    name: str
    arguments: tuple[str, ...]
    after: str | None = None
    method: str = ""
    task: str = ""
    seed: int = 0


def vision(name: str, attention: str, *arguments: str) -> Job:
    return Job(f"vision-{name}", ("vision", "--attention", attention, *arguments), method=name)


def title_of(name: str) -> str:
    """What a table calls an attention of `ATTENTIONS`."""
    if name in VARIANTS:
        return f"{describe('lln_diag').title}, {VARIANTS[name]} (ours)"
    return describe(name).title
