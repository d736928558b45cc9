"""Operations on groups of rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from demo_lm.single.common import bars, features, report, text


def mean_pooling() -> None:
    data = text(60)
    words = data.split(b" ")
    sizes = [len(w) + 1 for w in words]
    cu = np.cumsum([0, *sizes])
    cu[-1] = len(data)
    x = features(data, 1, 16, 0)[0, :, 0]
    wide = np.asarray(x, np.float64)
    exact = np.stack([wide[a:b].mean(0) for a, b in pairwise(cu)])
    print("words     " + "|".join(w.decode().replace("\n", " ") for w in words))
    print("|mean|    " + bars(np.linalg.norm(exact, axis=1)) + "   one mark a word")
    report("mean_pooling", exact, x, cu.astype(np.int32))


def grouped_matmul() -> None:
    """Bytes sorted by class, each class with its own matrix, as a mixture of experts does."""
    data = np.frombuffer(text(60), np.uint8)
    kind = np.select([np.char.isalpha(data.view("S1")), data == 32], [0, 1], 2)
    order = np.argsort(kind, kind="stable")
    sizes = np.bincount(kind, minlength=3).astype(np.int32)
    lhs = features(data.tobytes(), 1, 16, 0)[0, :, 0][order]
    rhs = np.random.default_rng(1).standard_normal((3, 16, 24)).astype(np.float32)
    wide = np.asarray(lhs, np.float64)
    exact = np.concatenate(
        [part @ rhs[i] for i, part in enumerate(np.split(wide, np.cumsum(sizes)[:-1]))]
    )
    for name, size in zip(("letters", "spaces", "others"), sizes, strict=True):
        print(f"{name:>8}  {'#' * int(size)} {size} rows")
    report("grouped_matmul", exact, lhs, rhs, sizes)
