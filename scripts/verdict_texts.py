"""What a text looks like: whether it ends in a loop, whether anybody wrote it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

JUDGED_WORDS = 80
# A word is a run of letters and digits; scripts written without spaces count by sign.
WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_]+")


def loops(sequence: Sequence[int], least: int = 32, times: int = 4, longest: int = 128) -> bool:
    """Whether a sequence of token ids ends in a loop.

    That is: its end, of at least `least` elements and a quarter of the whole, repeats one period of at most `longest`
    elements at least `times` times.
    """
    ids = np.asarray(sequence, np.int64)
    need = max(least, len(ids) // 4)
    for period in range(1, min(longest, len(ids) // times) + 1):
        differs = ids[period:][::-1] != ids[:-period][::-1]
        run = int(np.argmax(differs)) if differs.any() else len(differs)
        if run and run + period >= max(need, times * period):
            return True
    return False


def loops_text(text: str) -> bool:
    """Whether a text ends in a loop: as `loops`, by character, with lengths about those of so many tokens."""
    return loops([ord(sign) for sign in text.rstrip()], least=128, longest=400)


def looks_synthetic(text: str) -> str | None:
    """Why a text of 80 words or more looks generated at random, or None.

    Written language and code repeat their words: of the first 300 words usually a quarter or more occur twice.
    Random tokens of a vocabulary hardly do; random words of a small vocabulary do, but no ten of them stand out.
    """
    words = [word.casefold() for word in WORD.findall(text)][:300]
    if len(words) < JUDGED_WORDS:
        return None
    counts = Counter(words)
    repeated = sum(count for count in counts.values() if count > 1) / len(words)
    top = sum(count for _, count in counts.most_common(10)) / len(words)
    if repeated < 0.08:
        return f"random tokens: {repeated:.0%} of its words occur more than once, in written text 25 % and more"
    if len(words) >= 250 and top < 0.12:
        return f"random words: its ten commonest make {top:.0%}, in written text 15 % and more"
    if len(counts) <= 0.05 * len(words):
        return f"one phrase repeated: {len(counts)} different words among {len(words)}"
    return None


def synthetic_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """By prompt id why it looks synthetic. Texts too short to tell are judged joined, and named together."""
    found = {name: why for name, text in texts.items() if (why := looks_synthetic(text))}
    short = {name: text for name, text in texts.items() if len(WORD.findall(text)) < JUDGED_WORDS}
    why = looks_synthetic("\n".join(short.values()))
    if why and "phrase" not in why:  # a template before each short question is no loop
        found.update(dict.fromkeys(short, why))
    return found
