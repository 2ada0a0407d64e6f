"""How many distinct experts a step reads, counted in the expert ids that an engine returned with its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.json_files import InputError
from scripts.replay import Transcript

LABEL = "exact from dumps"


def means(parts: Sequence[npt.NDArray[np.int32]], most: int) -> list[float | None]:
    """Mean distinct ids over every 1, 2, ... most adjacent tokens; a part has shape (tokens, layers, per token)."""
    found: list[float | None] = []
    for tokens in range(1, most + 1):
        windows = [np.lib.stride_tricks.sliding_window_view(ids, tokens, 0) for ids in parts if len(ids) >= tokens]
        sets = [np.sort(one.reshape(*one.shape[:2], -1), axis=-1) for one in windows]
        counts = [1 + (np.diff(one, axis=-1) != 0).sum(axis=-1).ravel() for one in sets]
        found.append(float(np.concatenate(counts).mean()) if counts else None)
    return found


def count(transcripts: Sequence[Transcript], most: int) -> dict[str, Any] | None:
    """Mean distinct experts of a layer for 1..most tokens; None without a dump.

    {"label", "adjacent": [of 1, of 2, ...], "classes": {name: [...]}, "different": [...]: as many tokens of different
    answers, "share": {tokens: where between one token's experts (0) and `different` (1) `adjacent` lies}}; None in a
    list where no answer is that long, or where there are not so many answers.
    """
    dumps = [(one.cls, one.experts) for one in transcripts if one.experts is not None]
    if not dumps:
        return None
    shapes = sorted({ids.shape[1:] for _, ids in dumps})
    if len(shapes) > 1:
        raise InputError(f"routed_experts: found layers and experts per token {shapes}, expected those of one model")
    near = means([ids for _, ids in dumps], most)
    shortest = min(len(ids) for _, ids in dumps)
    # Tokens at one place of answer after answer, as if they were adjacent.
    across = np.stack([ids[:shortest] for _, ids in dumps]).reshape(len(dumps), -1, shapes[0][1])
    apart = means([across], most)
    share = {
        tokens: min(1.0, max(0.0, (one - near[0]) / (other - near[0])))
        for tokens, (one, other) in enumerate(zip(near, apart), 1)
        if near[0] and one is not None and other is not None and other > near[0]
    }
    classes = {
        name: means([ids for cls, ids in dumps if cls == name], most) for name in dict.fromkeys(c for c, _ in dumps)
    }
    return {"label": LABEL, "adjacent": near, "classes": classes, "different": apart, "share": share}
