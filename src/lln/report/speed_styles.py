"""Labels, colours and lines of what `lln bench` compares."""

from lln.report.plot import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, CurveStyle

ATTENTION_STYLES = {
    "softmax": CurveStyle("softmax (SDPA)", BLACK, "-", "o"),
    "softmax_explicit": CurveStyle("softmax, explicit matrix", GREY, ":", "o"),
    "paper": CurveStyle("the paper's formula, plain torch", ORANGE, "-.", "v"),
    "elu": CurveStyle("elu", VERMILLION, ":", "D"),
    "performer": CurveStyle("Performer", PURPLE, ":", "P"),
    "nystrom": CurveStyle("Nyströmformer", GREEN, ":", "X"),
    "lln_torch": CurveStyle("LLN, plain torch", SKY, "--", "s"),
    "lln": CurveStyle("LLN", BLUE, "-", "s"),
    "lln_diag": CurveStyle("LLN+Diag", PURPLE, "-", "^"),
    "floor": CurveStyle("the matrix products alone", GREEN, "--", "_"),
    "lln_compiled": CurveStyle("LLN, plain torch, compiled", SKY, "-.", "s"),
    "fla": CurveStyle("flash-linear-attention", VERMILLION, "-", "D"),
}
MODEL_STYLES = {
    "eager": ATTENTION_STYLES["softmax_explicit"],
    "sdpa": ATTENTION_STYLES["softmax"],
    "nystrom": CurveStyle("Nyströmformer", GREEN, "--", "X"),
    "lln": ATTENTION_STYLES["lln"],
    "lln_diag": ATTENTION_STYLES["lln_diag"],
}
DECODE_STYLES = {
    "lln": ATTENTION_STYLES["lln"],
    "lln_diag": ATTENTION_STYLES["lln_diag"],
    "cache": CurveStyle("softmax, cache allocated beforehand", BLACK, "-", "o"),
    "cache_cat": CurveStyle("softmax, cache copied to grow", GREY, ":", "o"),
}


def attention_style(name: str) -> CurveStyle:
    """That of a mechanism of `lln bench attention`, which may be any of the zoo."""
    return ATTENTION_STYLES.get(name, CurveStyle(name, GREY, "--"))


def attention_label(name: str) -> str:
    return attention_style(name).label
