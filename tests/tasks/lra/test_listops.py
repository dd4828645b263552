"""ListOps: values by hand and by another way, errors with their place, the recipe, and the published file format."""

import re
from random import Random

import numpy as np
import pytest

from lln.tasks.lra import listops
from lln.tasks.lra.listops import decode, draw, encode, evaluate, generate, read_tsv


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", 7),
        ("[MIN 4 2 8 ]", 2),
        ("[MAX 4 2 8 ]", 8),
        ("[MED 1 9 3 ]", 3),
        ("[MED 1 2 ]", 1),  # 1.5, cut
        ("[MED 9 8 7 0 ]", 7),  # 7.5, cut
        ("[SM 9 8 7 ]", 4),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM [MED 1 2 [MAX 3 8 ] ] 5 [MIN 6 [SM 9 9 ] ] ]", 3),  # 2 + 5 + 6
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
        ("(((([SM 1)(((( [MIN 5) 4) ])))3)])", 8),
        ("  [MIN\t3\n5 ]  ", 3),
    ],
)
def test_value(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "position", "what"),
    [
        ("", 1, "no expression"),
        ("( )", 1, "no expression"),
        ("]", 1, "closes nothing"),
        ("[MIN 1 2", 1, "never closed"),
        ("[MAX 1 [SM 2 3 ]", 1, "never closed"),
        ("[MAX [SM 2 3 ", 6, "never closed"),
        ("[MIN ]", 6, "without an argument"),
        ("1 2", 3, "complete"),
        ("[MIN 1 ] ]", 10, "complete"),
        ("[MIN 1 12 ]", 8, "'12'"),
        ("[MIN 1 -2 ]", 8, "'-2'"),
        ("[AVG 1 2 ]", 1, "'[AVG'"),
        ("[MIN 1 2]", 8, "'2]'"),
    ],
)
def test_malformed(expression, position, what):
    with pytest.raises(ValueError, match=rf"at character {position}: .*{re.escape(what)}"):
        evaluate(expression)


def python_value(expression):
    """Another way to the value: translated to Python and evaluated by it."""
    names = {"[MIN": "min((", "[MAX": "max((", "[MED": "med((", "[SM": "sm((", "]": ")),"}
    text = " ".join(names.get(token, f"{token},") for token in expression.split())
    med, sm = (lambda x: int(np.median(x))), (lambda x: int(np.sum(x)) % 10)
    (value,) = eval(text, {"min": min, "max": max, "med": med, "sm": sm})
    return value


def published_value(expression):
    """The published generator's way: a binary tree of partly applied operators, from the text with parentheses."""

    def parse(tokens):
        token = tokens.pop(0)
        if token != "(":
            return int(token) if token.isdigit() else token
        left, right = parse(tokens), parse(tokens)
        assert tokens.pop(0) == ")"
        return left, right

    def apply(tree):
        if not isinstance(tree, tuple):
            return tree
        left, right = apply(tree[0]), apply(tree[1])
        if isinstance(left, str):
            return left, [right]
        if right == "]":
            functions = {"[MIN": min, "[MAX": max, "[MED": np.median, "[SM": lambda x: np.sum(x) % 10}
            return int(functions[left[0]](left[1]))
        return left[0], [*left[1], right]

    return apply(parse(expression.split()))


def with_parentheses(expression):
    """As the published files are written: ( ( ( [MAX 2 ) 9 ) ] )."""
    stack = []
    for token in expression.split():
        if token.startswith("["):
            stack.append(token)
            continue
        if token == "]":
            token = f"( {stack.pop()} ] )"
        if not stack:
            return token
        stack[-1] = f"( {stack[-1]} {token} )"
    raise AssertionError(expression)


@pytest.fixture(scope="module")
def drawn():
    random = Random(0)
    return [draw(random) for _ in range(60)]


def test_values_agree_with_two_other_ways(drawn):
    for symbols, value in drawn:
        text = decode(symbols)
        published = with_parentheses(text)
        assert evaluate(text) == evaluate(published) == value
        assert python_value(text) == published_value(published) == value
        assert encode(text) == encode(published) == symbols


def test_recipe(drawn):
    depths, arguments = [], []
    for symbols, _ in drawn:
        assert 500 < len(symbols) < 2000
        depth, counts = 0, []
        for symbol in symbols:
            if symbol == listops.CLOSE:
                arguments.append(counts.pop())
                depth -= 1
                continue
            if counts:
                counts[-1] += 1
            if symbol >= 10:
                counts.append(0)
                depth += 1
            depths.append(depth)
    assert min(arguments) == 2
    assert max(arguments) == 10
    assert max(depths) == 9  # operators at depths 1 to 9; at depth 10 there are digits alone
    assert {label for _, label in drawn} == set(range(10))


def test_same_for_any_number_of_workers():
    one = generate(300, seed=5, workers=1)
    two = generate(300, seed=5, workers=2)
    fewer = generate(20, seed=5, workers=1)
    other = generate(20, seed=6, workers=1)
    assert np.array_equal(one.inputs[0].symbols, two.inputs[0].symbols)
    assert np.array_equal(one.labels, two.labels)
    assert all(np.array_equal(fewer.inputs[0][i], one.inputs[0][i]) for i in range(20))
    assert not np.array_equal(fewer.inputs[0][0], other.inputs[0][0])


def test_published_file(tmp_path):
    path = tmp_path / "basic_train.tsv"
    path.write_text("Source\tTarget\r\n( ( ( [MAX 2 ) 9 ) ] )\t9\r\n[SM 9 8 ]\t7\r\n")
    examples = read_tsv(path)
    assert examples.labels.tolist() == [9, 7]
    assert decode(examples.inputs[0][0]) == "[MAX 2 9 ]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Expression\tTarget\n1\t1\n", "line 1.*Source"),
        ("Source\tTarget\n[MIN 1 2 ]\t12\n", "line 2.*digit"),
        ("Source\tTarget\n[MIN 1 2 ]\t-1\n", "line 2.*digit"),
        ("Source\tTarget\n1\t1\n[MUL 1 2 ]\t2\n", r"line 3.*character 1: '\[MUL'"),
    ],
)
def test_bad_published_file(tmp_path, text, message):
    path = tmp_path / "basic_test.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tsv(path)
