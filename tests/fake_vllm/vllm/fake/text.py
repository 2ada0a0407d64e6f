"""Tokens and answers: an exact, tiny tokenizer and a writer whose text depends on nothing but the prompt and a seed.

Ids 0-255 are bytes, ids from 256 on are WORDS, first with, then without, a leading space. Decoding what was encoded
gives the same text.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from vllm.fake import release

WORDS = (release.DATA / "words.txt").read_text(encoding="utf-8").split()
PIECES = re.compile(r" ?[A-Za-z]+|.", re.DOTALL)
IDS = {text: 256 + index for index, text in enumerate([" " + word for word in WORDS] + list(WORDS))}
TEXTS = {number: text for text, number in IDS.items()}
VOCABULARY = 256 + len(TEXTS)
EOS = 0
KNOWN = {"The capital of France is": " Paris."}
GARBAGE = "!"


def encode(text: str) -> list[int]:
    """Token ids of a text; words that are not in the list become their bytes."""
    ids: list[int] = []
    for piece in PIECES.findall(text):
        ids += [IDS[piece]] if piece in IDS else list(piece.encode("utf-8"))
    return ids


def decode(ids: list[int]) -> str:
    """The text of token ids; ids outside the vocabulary and halves of characters become replacement characters."""
    raw = b"".join(
        TEXTS[number].encode() if number in TEXTS else bytes([number]) if 0 <= number < 256 else b"\xef\xbf\xbd"
        for number in ids
    )
    return raw.decode("utf-8", errors="replace")


@dataclass
class Style:
    """How to answer: `length` in tokens or None, `kind` one of plain, loop, garbage, empty."""

    kind: str = "plain"
    length: int | None = None
    seed: int = 0


def number(*parts: int) -> int:
    """A fixed pseudo-random number of the parts; no random module, so that every process and release agrees."""
    return zlib.crc32(b"".join(part.to_bytes(8, "little", signed=True) for part in parts))


def answer(prompt: list[int], limit: int, style: Style, ignore_eos: bool = False) -> tuple[list[int], bool]:
    """(token ids, whether it ended by itself) for a prompt, at most `limit` tokens.

    The same for every variant of a model.

    The text mixes new words with passages repeated from the prompt and the answer so far, so that an n-gram proposer
    finds something.
    """
    if style.kind == "empty":
        return [], True
    if style.kind == "garbage":
        return encode(GARBAGE) * limit, False
    if style.kind == "loop":
        phrase = encode(" again and again the same")
        return (phrase * (limit // len(phrase) + 1))[:limit], False
    start = number(style.seed, len(prompt), *prompt[-64:])
    length = style.length if style.length is not None else 24 + start % 200
    known = encode(KNOWN.get(decode(prompt).strip(), "")) if style.seed == 0 else []
    wanted = limit if ignore_eos else min(limit, length)
    out = list(known[:wanted])
    while len(out) < wanted:
        draw = number(start, len(out))
        both = prompt + out
        if draw % 100 < 30 and len(both) > 8:
            at = (draw >> 8) % (len(both) - 6)
            span = both[at : at + 3 + draw % 6]
            # halves of a multi-byte character would decode to rubbish
            out += [item for item in span if item < 128 or item >= 256]
        else:
            out.append(256 + (draw >> 8) % len(WORDS))
            if draw % 11 == 0:
                out += encode(".")
    return out[:wanted], not ignore_eos and length <= limit


def ngram_drafts(context: list[int], low: int, high: int, count: int) -> list[int]:
    """Up to `count` tokens that followed the earliest earlier place where the longest suffix of `low`..`high` tokens
    occurs.
    """
    for size in range(min(high, len(context) - 1), low - 1, -1):
        suffix = context[-size:]
        for at in range(len(context) - size):
            if context[at : at + size] == suffix:
                return context[at + size : at + size + count]
    return []


def steps_by(propose: Callable[[list[int]], list[int]], prompt: list[int], out: list[int]) -> list[tuple[int, int]]:
    """(drafted, accepted) of each decode step that yields `out`, with the drafts of `propose`; the first token comes
    from prefill and is not in the list.
    """
    steps: list[tuple[int, int]] = []
    done = 1
    while done < len(out):
        drafts = propose((prompt + out[:done])[-2048:])
        accepted = 0
        while accepted < len(drafts) and done + accepted < len(out) and drafts[accepted] == out[done + accepted]:
            accepted += 1
        steps.append((len(drafts), accepted))
        done += accepted + 1
    return steps


def steps_by_rate(length: int, count: int, rate: float) -> list[tuple[int, int]]:
    """The same when each draft token is accepted with a fixed rate, in a fixed pseudo-random pattern."""
    steps: list[tuple[int, int]] = []
    done = 1
    while done < length:
        accepted = 0
        while accepted < count and number(done, accepted, count) % 10_000 < rate * 10_000:
            accepted += 1
        steps.append((count, accepted))
        done += accepted + 1
    return steps
