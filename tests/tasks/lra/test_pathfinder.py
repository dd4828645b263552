"""Pathfinder: geometry of the paths, fair labels, no simple statistics that give the label."""

import numpy as np
import pytest

from lln.tasks.lra import pathfinder
from lln.tasks.lra.pathfinder import CLEARANCE, DASH, END_CLEARANCE, MARGIN, PITCH, SIZE, distract, generate, two_paths


def grown(dashes, attempts=300):
    random = np.random.default_rng(1)
    first = random.uniform(*pathfinder.MIDDLE, size=(attempts, 2)).astype(np.float32)
    second = first + 7 * pathfinder._directions(random.uniform(0, 2 * np.pi, size=attempts))
    return random, two_paths(random, np.stack((first, second), axis=1), dashes)


@pytest.mark.parametrize("dashes", [6, 14])
def test_paths_keep_apart(dashes):
    random, paths = grown(dashes)
    scenes = len(paths)
    assert scenes > 5
    assert paths.shape == (scenes, 2, 2 * dashes, 2)
    lengths = np.linalg.norm(paths[:, :, 1::2] - paths[:, :, ::2], axis=-1)
    gaps = np.linalg.norm(paths[:, :, 2::2] - paths[:, :, 1:-1:2], axis=-1)
    assert np.allclose(lengths, DASH, atol=1e-4)
    assert np.allclose(gaps, PITCH - DASH, atol=1e-4)
    assert paths.min() > MARGIN
    assert paths.max() < SIZE - MARGIN
    between = np.linalg.norm(paths[:, 0, :, None] - paths[:, 1, None], axis=-1)
    assert between.min() > CLEARANCE - 1e-3
    ends = between[:, [0, -1]].min(), between[:, :, [0, -1]].min()
    assert min(ends) > END_CLEARANCE - 1e-3
    directions = paths[:, :, 1::2] - paths[:, :, ::2]
    turns = (directions[:, :, 1:] * directions[:, :, :-1]).sum(-1) / DASH**2
    assert turns.min() > -1e-3  # no more than a right angle

    others = distract(random, paths, length=dashes // 3).reshape(scenes, -1, 1, 2)
    placed = others[..., 0] != pathfinder.NOWHERE
    assert placed.mean() > 0.1
    distance = np.linalg.norm(others - paths.reshape(scenes, 1, -1, 2), axis=-1)
    assert distance.min() > CLEARANCE - 1e-3


def test_dots_agree_with_the_label():
    """Follow the dashes of the picture's paths from dot to dot, without knowing how the label was drawn."""
    random = np.random.default_rng(2)
    kept = {}
    original = pathfinder.two_paths

    def remember(*args):
        kept["paths"] = original(*args)
        return kept["paths"]

    pathfinder.two_paths = remember
    try:
        pictures, labels, distances = pathfinder.scenes(random, 9)
    finally:
        pathfinder.two_paths = original
    assert set(labels) == {0, 1}
    for picture, label, distance, paths in zip(pictures, labels, distances, kept["paths"], strict=True):
        ends = paths[:, [0, -1]]  # (path, start or far end, 2)
        bright = np.array([[_brightness(picture, point) for point in pair] for pair in ends])
        dots = bright > 0.9
        assert dots.sum() == 2
        (path_a, _), (path_b, _) = np.argwhere(dots)
        assert (path_a == path_b) == bool(label)
        a, b = ends[dots]
        assert np.isclose(np.linalg.norm(a - b), distance, atol=1e-3)


def _brightness(picture, point):
    row, column = np.floor(point).astype(int)
    return picture[row, column] / 255


@pytest.fixture(scope="module")
def made():
    return generate(1000, seed=0, dashes=6, workers=1)


def test_balanced_and_of_full_range(made):
    assert made.labels.mean() == 0.5
    pictures = made.inputs[0].symbols.reshape(-1, 32, 32)
    assert pictures.max() == 255
    assert (pictures == 0).mean() > 0.5


def test_simple_statistics_do_not_give_the_label(made):
    """Logistic regression on brightness, its spread and quarters, and the places and distance of the dots."""
    pictures = made.inputs[0].symbols.reshape(-1, 32, 32).astype(float) / 255
    bright = pictures > 0.9
    rows, columns = np.mgrid[:32, :32]
    features = [
        pictures.mean((1, 2)),
        (pictures > 0).mean((1, 2)),
        pictures.std((1, 2)),
        bright.sum((1, 2)),
        *[pictures[:, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16].mean((1, 2)) for i in (0, 1) for j in (0, 1)],
    ]
    for grid in (rows, columns):
        mean = (bright * grid).sum((1, 2)) / bright.sum((1, 2))
        features += [mean, ((bright * (grid - mean[:, None, None]) ** 2).sum((1, 2)) / bright.sum((1, 2))) ** 0.5]
    x = np.stack(features, axis=1)
    x = (x - x.mean(0)) / x.std(0)
    x = np.concatenate((np.ones((len(x), 1)), x), axis=1)
    train, test, y = slice(0, 600), slice(600, None), made.labels
    weights = np.zeros(x.shape[1])
    for _ in range(20):  # Newton's method
        p = 1 / (1 + np.exp(-x[train] @ weights))
        hessian = (x[train] * (p * (1 - p))[:, None]).T @ x[train] + 1e-2 * np.eye(x.shape[1])
        weights -= np.linalg.solve(hessian, x[train].T @ (p - y[train]) + 1e-2 * weights)
    accuracy = ((x[test] @ weights > 0) == y[test]).mean()
    assert abs(accuracy - 0.5) < 0.1  # four standard deviations of a coin over 400 examples


def test_reproducible(made):
    few = generate(40, seed=0, dashes=6, workers=1)
    assert np.array_equal(few.inputs[0].symbols, made.part(0, 40).inputs[0].symbols)
    assert np.array_equal(few.labels, made.labels[:40])


def test_only_published_lengths():
    with pytest.raises(ValueError, match="6, 9, 14 dashes"):
        generate(10, seed=0, dashes=7)
