"""Pathfinder: two dots, and dashed paths; do the dots end the same path? Drawn here, 32 x 32, in shades of grey.

As published (Linsley et al., with the Long Range Arena's settings for 32 x 32): two paths of 14 dashes each grow in
turn from starts that are 7 apart near the middle; a dash is 2 long, half a pixel thick and 4 from the next; the turn
between dashes has the density cos² and stays below a right angle; shorter paths distract: a third as many dashes, 20
dashes in all. One dot, of radius 1.5, is on the start of a path; the other is on the far end of the same path (label
1) or of the other one (label 0). Both kinds of picture hold the same paths, which have nothing to do with it.

The arena has three sets: 6, 9 and 14 dashes. Its hard one, 14, is what the comparisons report and what is the default.
Not as published: geometry is continuous, where the original moves on the pixel grid; and pictures are taken in pairs
of a 1 and a 0 whose dots are equally far apart (to one pixel), so that the distance is independent of the label.

Many scenes are drawn at once: all arrays begin with S, the number of scenes. Points are (row, column).
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from lln.tasks.lra.examples import Examples, Sequences
from lln.tasks.lra.generated import Arrays, in_blocks
from lln.tasks.lra.task import Generator, Task

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

SIZE = 32
DASHES = (14, 9, 6)  # the sets that were published, the default first
DASH, PITCH = 2.0, 4.0  # length of a dash, from its start to the next one's
MARGIN = 1.5  # from the picture's edge
CLEARANCE = 3.0  # between paths, and between a path and itself
END_CLEARANCE = 4.5  # between the ends of a path and all others: it must be clear to which one a dot belongs
SEED_DISTANCE = 7.0
DISTRACTING = 20  # dashes in distractors
MIDDLE = (12.0, 20.0)  # where a path may start
TURNS = 18  # directions that are tried for a dash; if none is free, a path is discarded
NOWHERE = -100.0  # the place of what could not be placed
TRIES = 12  # places tried for a distractor before the scene does without it
THICKNESS, CONTRAST, DOT_RADIUS = 0.5, 1.5, 1.5
DASH_GREY, DOT_GREY = 160, 255
BLOCK = 500
ATTEMPTS = 512  # scenes begun at once

# A path is the list of its dashes' ends: points 2 apart, so that paths which keep clear of each other's points keep
# 2.8 from each other's lines. Checked for a new dash: its ends, and the start of the next one.
_ALONG = np.array([[0.0], [DASH], [PITCH]], dtype=np.float32)
_TURNS = (np.arange(TURNS) + 0.5) * np.pi / TURNS - np.pi / 2  # the middles of sectors


def generate(count: int, *, seed: int, dashes: int = DASHES[0], workers: int | None = None) -> Examples:
    """So many pictures, as rows of pixels, and labels; as many 1 as 0 in each full block."""
    if dashes not in DASHES:
        raise ValueError(f"paths have {', '.join(map(str, sorted(DASHES)))} dashes, as published; got {dashes}")
    made = in_blocks("pathfinder", partial(_block, seed, dashes), count, size=BLOCK, workers=workers)
    return Examples((Sequences.rows(made["pictures"]),), made["labels"])


def _block(seed: int, dashes: int, index: int, count: int) -> Arrays:
    random = np.random.default_rng([seed, dashes, index])
    waiting: dict[tuple[int, int], list[NDArray[np.uint8]]] = {}  # by label and distance of the dots
    pairs: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []  # label 0, label 1
    while 2 * len(pairs) < BLOCK:
        pictures, labels, distances = scenes(random, dashes)
        for picture, label, distance in zip(pictures, labels, np.rint(distances).astype(int), strict=True):
            partners = waiting.get((1 - label, distance))
            if partners:
                partner = partners.pop(0)
                pairs.append((partner, picture) if label else (picture, partner))
            else:
                waiting.setdefault((label, distance), []).append(picture)
    drawn = np.stack([picture for pair in pairs for picture in pair])
    order = random.permutation(BLOCK)[:count]  # of a whole block even if part is wanted: fewer are the first of more
    return {"pictures": drawn[order].reshape(count, -1), "labels": (order % 2).astype(np.int64)}


def scenes(random: np.random.Generator, dashes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], Floats]:
    """Pictures (S, 32, 32), labels (S) and the distances of the dots (S), of those attempts that came out."""
    first = random.uniform(*MIDDLE, size=(ATTEMPTS, 2)).astype(np.float32)
    second = first + SEED_DISTANCE * _directions(random.uniform(0, 2 * np.pi, size=ATTEMPTS))
    paths = two_paths(random, np.stack((first, second), axis=1), dashes)
    (starts, ends), others = _dash_ends(paths), _dash_ends(distract(random, paths, length=dashes // 3))
    flat = (x.reshape(len(x), 2 * dashes, 2) for x in (starts, ends))
    pictures = draw_dashes(*(np.concatenate(pair, axis=1) for pair in zip(flat, others, strict=True)))
    every, labels = np.arange(len(paths)), random.integers(0, 2, size=len(paths))
    origin = random.integers(0, 2, size=len(paths))
    terminal = np.where(labels == 1, origin, 1 - origin)
    dots = np.stack((starts[every, origin, 0], ends[every, terminal, -1]), axis=1)
    draw_dots(pictures, dots)
    return pictures, labels, np.linalg.norm(dots[:, 0] - dots[:, 1], axis=-1).astype(np.float32)


def two_paths(random: np.random.Generator, starts: Floats, dashes: int) -> Floats:
    """Grow two paths from each pair of starts (S, 2, 2), dash by dash in turn: points (S', 2, 2 * dashes, 2)."""
    headings = random.uniform(0, 2 * np.pi, size=starts.shape[:2])
    points = np.empty((len(starts), 2, 0, 2), dtype=np.float32)
    origins = starts
    for _ in range(dashes):
        grown: list[Floats] = []
        for path in (0, 1):
            others = np.concatenate([points[:, path, :-2], points[:, 1 - path], *grown], axis=1)
            new, heading, alive = _extend(random, starts[:, path], headings[:, path], others, origins[:, [1 - path]])
            headings[:, path] = heading
            starts, headings, points, origins = starts[alive], headings[alive], points[alive], origins[alive]
            grown = [*(earlier[alive] for earlier in grown), new[alive]]
            starts[:, path] += PITCH * _directions(headings[:, path])
        points = np.concatenate((points, np.stack(grown, axis=1)), axis=2)
    far_end_to_other = np.linalg.norm(points[:, :, -1:] - points[:, ::-1], axis=-1)
    clear: Bools = (far_end_to_other > END_CLEARANCE).all(axis=(1, 2))
    return points[clear]


def distract(random: np.random.Generator, paths: Floats, *, length: int) -> Floats:
    """Short paths that keep clear of `paths` (S, 2, n, 2): points (S, m, 2); `NOWHERE` where there was no space."""
    scenes_, count, ends = len(paths), DISTRACTING // length, paths[:, :, [0, -1]].reshape(-1, 4, 2)
    taken = np.concatenate((paths[:, 0], paths[:, 1]), axis=1)
    found = np.full((scenes_, count, 2 * length, 2), NOWHERE, dtype=np.float32)
    for which in range(count):
        missing = np.arange(scenes_)
        for _ in range(TRIES):
            start = random.uniform(MARGIN, SIZE - MARGIN, size=(len(missing), 2)).astype(np.float32)
            heading = random.uniform(0, 2 * np.pi, size=len(missing))
            earlier = found[missing, :which].reshape(len(missing), which * 2 * length, 2)
            around = np.concatenate((taken[missing], earlier), axis=1)
            own = np.empty((len(missing), 0, 2), dtype=np.float32)
            alive = np.ones(len(missing), dtype=bool)
            for _ in range(length):
                others = np.concatenate((around, own[:, :-2]), axis=1)
                new, heading, free = _extend(random, start, heading, others, ends[missing])
                alive &= free
                own = np.concatenate((own, new), axis=1)
                start = start + PITCH * _directions(heading)
            found[missing[alive], which] = own[alive]
            missing = missing[~alive]
    return found.reshape(scenes_, count * 2 * length, 2)


def _extend(
    random: np.random.Generator, start: Floats, heading: NDArray[np.float64], others: Floats, ends: Floats
) -> tuple[Floats, NDArray[np.float64], Bools]:
    """The next dash from `start` (S, 2): its ends (S, 2, 2), its heading, and whether any direction was free.

    It must be inside the picture, clear of the points `others` and, by more, of the `ends` of other paths.
    """
    turns = _TURNS + random.uniform(-0.5, 0.5, size=(len(start), TURNS)) * np.pi / TURNS
    headings = heading[:, None] + turns
    points = start[:, None, None] + _ALONG * _directions(headings)[:, :, None]  # (S, TURNS, 3, 2)
    free = ((points > MARGIN) & (points < SIZE - MARGIN)).all(axis=(2, 3))
    flat = points.reshape(len(start), TURNS * len(_ALONG), 2)
    for obstacles, clearance in ((others, CLEARANCE), (ends, END_CLEARANCE)):
        # |a - b|² = |a|² + (|b|² - 2 a.b), of which the part in brackets is the least for the nearest b
        least = ((obstacles**2).sum(-1)[:, None, :] - 2 * flat @ obstacles.swapaxes(1, 2)).min(axis=2, initial=np.inf)
        clear = (flat**2).sum(-1) + least > clearance**2
        free &= clear.reshape(len(start), TURNS, len(_ALONG)).all(axis=2)
    below = (free * np.cos(turns) ** 2).cumsum(axis=1)
    choice, every = (below > below[:, -1:] * random.random((len(start), 1))).argmax(axis=1), np.arange(len(start))
    return points[every, choice, :-1], headings[every, choice], below[:, -1] > 0


def draw_dashes(starts: Floats, ends: Floats) -> NDArray[np.uint8]:
    """Pictures (S, 32, 32) of the dashes from `starts` to `ends` (S, n, 2), soft at the edges."""
    pixels, where = _around(((starts + ends) / 2).astype(np.float32), 3)
    along = (ends - starts)[:, :, None]
    reach = ((pixels - starts[:, :, None]) * along).sum(-1, keepdims=True) / DASH**2
    distance = np.linalg.norm(pixels - starts[:, :, None] - np.clip(reach, 0, 1) * along, axis=-1)
    grey = np.clip(CONTRAST * ((THICKNESS + 1) / 2 - distance), 0, 1) * DASH_GREY
    return _paint(np.zeros((len(starts), SIZE, SIZE), dtype=np.uint8), where, grey)


def draw_dots(pictures: NDArray[np.uint8], centres: Floats) -> None:
    """Paint dots at `centres` (S, n, 2) into the pictures."""
    pixels, where = _around(centres, 3)
    distance = np.linalg.norm(pixels - centres[:, :, None], axis=-1)
    _paint(pictures, where, np.clip(DOT_RADIUS + 0.5 - distance, 0, 1) * DOT_GREY)


def _around(points: Floats, reach: int) -> tuple[Floats, NDArray[np.intp]]:
    """Centres (S, n, p, 2) of the pixels in a square around each point, and their rows and columns."""
    offsets = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), axis=-1).reshape(-1, 2)
    where = np.floor(points).astype(np.intp)[:, :, None] + offsets
    return (where + 0.5).astype(np.float32), where


def _paint(pictures: NDArray[np.uint8], where: NDArray[np.intp], grey: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Make pixels at least so bright; those outside of a picture are left out."""
    inside = ((where >= 0) & (where < SIZE)).all(axis=-1)
    scene = np.broadcast_to(np.arange(len(pictures)).reshape(-1, 1, 1), inside.shape)[inside]
    row, column = where[inside].T
    np.maximum.at(pictures, (scene, row, column), np.rint(grey[inside]).astype(np.uint8))
    return pictures


def _dash_ends(points: Floats) -> tuple[Floats, Floats]:
    """The starts and the ends of the dashes along the last but one axis of `points`."""
    return points[..., ::2, :], points[..., 1::2, :]


def _directions(headings: NDArray[np.float64]) -> Floats:
    return np.stack((np.sin(headings), np.cos(headings)), axis=-1).astype(np.float32)


TASK = Task(
    name="pathfinder",
    title="Pathfinder (1k)",
    length=SIZE**2,
    symbols=256,
    classes=2,
    about="Do two dots lie on the same dashed path?",
    presets={
        "laptop": {"steps": 300, "batch_size": 16, "learning_rate": 1e-3, "examples": 16_000},
        "paper": {"batch_size": 128, "learning_rate": 2e-4, "warmup_steps": 312},
    },
    # An eighth each is held out, as published.
    generator=Generator(generate, examples=160_000, held_out=lambda train: -(-train // 8), dashes=DASHES),
    answers=("two paths", "one path"),
    is_picture=True,
)
