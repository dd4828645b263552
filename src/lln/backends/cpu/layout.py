"""The structs of the C code (`src/job.h`) and the constants that it shares with Python, compared when it is loaded."""

import ctypes
from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

# What tiles and the arrays of a step can hold.
MAX_WIDTH, MAX_BLOCK = 256, 1024
FLOAT32, BFLOAT16, FLOAT16 = range(3)
PAPER, UNBIASED, DECOMPOSED = range(3)
CONSTANTS = {
    "MAX_WIDTH": MAX_WIDTH,
    "MAX_BLOCK": MAX_BLOCK,
    "FLOAT32": FLOAT32,
    "BFLOAT16": BFLOAT16,
    "FLOAT16": FLOAT16,
    "PAPER": PAPER,
    "UNBIASED": UNBIASED,
    "DECOMPOSED": DECOMPOSED,
}


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Tensor(Structure):
    _fields_ = [("data", c_void_p), *_fields(c_int64, "batch head token")]


class Scale(Structure):
    _fields_ = [("data", c_void_p), *_fields(c_int64, "batch head token")]


class Job(Structure):
    _fields_ = [
        *_fields(c_int64, "batch heads key_heads queries keys width value_width"),
        *_fields(c_int64, "type threads is_causal block_size with_lln match_alpha match_beta"),
        *_fields(Tensor, "query key value output"),
        *_fields(c_void_p, "keep_query keep_key"),
        *_fields(Scale, "alpha beta"),
        *_fields(c_void_p, "mass values curve"),
        *_fields(c_int64, "curve_rows curve_columns"),
        *_fields(c_double, "log_start log_ratio log_first_count log_count_ratio line_a line_b"),
        *_fields(Tensor, "grad_output grad_query grad_key grad_value"),
        *_fields(c_void_p, "grad_alpha grad_beta"),
        ("is_window", c_int64),
        ("key_weight", Scale),
        ("grad_weight", c_void_p),
        *_fields(c_int64, "form sample_centers"),
        *_fields(Tensor, "center_query center_key"),
        *_fields(c_void_p, "near_lse grad_lse"),
    ]


class State(Structure):
    _fields_ = _fields(c_void_p, "mass values count query_sums key_sums recent_key recent_value")


class Advance(Structure):
    _fields_ = [
        ("job", Job),
        *_fields(Tensor, "near near_query near_key"),
        *_fields(c_int64, "near_width far_type output_type"),
        *_fields(State, "before after"),
    ]


STRUCTS: tuple[type[Structure], ...] = (Tensor, Scale, Job, State, Advance)


class _Fact(Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", c_int64)]


def format_of(kind: Any) -> str:
    """The fields of a struct for `struct.Struct`, which fills one in faster than ctypes."""
    if issubclass(kind, Structure):
        return "".join(format_of(field[1]) for field in kind._fields_)
    return "d" if kind is c_double else "q"


def difference(library: ctypes.CDLL) -> str | None:
    """What differs between a library and this file; None if nothing does."""
    try:
        address = ctypes.addressof(_Fact.in_dll(library, "lln_facts"))
    except ValueError:
        return "it does not describe its structs"
    found: dict[str, int] = {}
    while (fact := _Fact.from_address(address + len(found) * ctypes.sizeof(_Fact))).name is not None:
        found[fact.name.decode()] = fact.value
    expected = dict(CONSTANTS)
    for kind in STRUCTS:
        expected[kind.__name__] = ctypes.sizeof(kind)
        for name, *_ in kind._fields_:
            expected[f"{kind.__name__}.{name}"] = getattr(kind, name).offset
    differs = [name for name in expected | found if expected.get(name) != found.get(name)]
    if not differs:
        return None
    shown = (f"{name} is {found.get(name)} in C and {expected.get(name)} in Python" for name in differs[:3])
    return "; ".join(shown)
