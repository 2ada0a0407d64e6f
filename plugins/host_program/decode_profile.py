"""Where the time of a decode step goes, on the engine that serves: its own torch profiler around a few steps.

One stream is asked for; once it decodes, the profiler is switched on, and off again after some steps, so that no
prefill is in the trace. The engine slows down meanwhile, and everything else that it serves is in the trace too.
The report is kernel_times.combine's with "variant", "unit", "release", "asked_steps" and "traces".
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..module_utils import kernel_times, records, units
from . import engine_api
from .installed import active_units, api_key, managed_variants
from .preflight import flag_json

JsonDict = dict[str, Any]

PROMPT = "Count from one upwards, with commas: 1, 2, 3, 4, 5,"
# Steps before the profiler starts: the first ones compile and warm up.
SKIP_STEPS = 8
# More than is profiled: while a call to the profiler is under way the engine goes on.
SPARE_STEPS = 400
# Writing the traces of a large model takes minutes.
STOP_LIMIT_S = 900.0
STREAM_LIMIT_S = 120.0
TRACES = "*.pt.trace.json*"


class ProfileError(records.RecordError):
    """No profile came of it; the text says why and what to do."""


def _serving(layout: records.Layout) -> tuple[JsonDict, Path]:
    """The variant that serves, and the folder of its profiler."""
    running = active_units(layout)
    variant = next((one for one in managed_variants(layout) if one["unit"] in running), None)
    if variant is None:
        raise ProfileError("nothing serves. Deploy a variant with `profiler: true`.")
    folder = (flag_json(variant["argv"], "--profiler-config") or {}).get("torch_profiler_dir")
    if not folder:
        raise ProfileError(
            "'{0}' serves without a profiler, which is switched on at the start only. Add a variant that extends '{0}' "
            "with `profiler: true`, and deploy that.".format(variant["name"])
        )
    return variant, Path(folder)


def _stream(variant: JsonDict, key: str | None, tokens: int) -> Iterator[int]:
    """The number of each piece of one stream as it comes. Raises EngineError."""
    connection = engine_api.connect(variant["bind"], variant["port"], STREAM_LIMIT_S)
    body = {"model": variant["model"]["served_name"], "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    body.update(stream=True, ignore_eos=True)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), engine_api.headers(key))
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise engine_api.EngineError(f"POST /v1/completions: status {answer.status}: {answer.read()[:200]!r}")
        number = 0
        for line in answer:
            if line.startswith(b"data: {"):
                number += 1
                yield number
    except (OSError, http.client.HTTPException) as error:
        raise engine_api.EngineError(f"POST /v1/completions: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _written(folder: Path, before: set[str]) -> list[Path]:
    """The traces that were not there before."""
    return sorted(path for path in folder.rglob(TRACES) if str(path) not in before)


def profile(layout: records.Layout, steps: int, keep: bool) -> JsonDict:
    """Profile about ``steps`` decode steps of what serves; ``keep`` leaves the traces where the engine wrote them."""
    variant, folder = _serving(layout)
    text = (layout.units / variant["unit"]).read_text(encoding="utf-8")
    return {
        **profile_unit(variant, folder, api_key(layout), steps, keep),
        "schema": records.SCHEMA,
        "variant": variant["name"],
        "unit": variant["unit"],
        "release": units.release_id(text, variant),
    }


def profile_unit(variant: JsonDict, folder: Path, key: str | None, steps: int, keep: bool) -> JsonDict:
    """The same of this variant, whose profiler writes into ``folder``, without what is known of its release."""
    before = {str(path) for path in folder.rglob(TRACES)}

    def switch(what: str, limit_s: float) -> None:
        engine_api.request(variant["bind"], variant["port"], "POST", what, api_key=key, limit_s=limit_s)

    started = stopped = False
    try:
        for number in _stream(variant, key, SKIP_STEPS + steps + SPARE_STEPS):
            if number == SKIP_STEPS:
                switch("/start_profile", STREAM_LIMIT_S)
                started = True
            elif number >= SKIP_STEPS + steps:
                break
        if started:
            switch("/stop_profile", STOP_LIMIT_S)
            stopped = True
    except engine_api.EngineError as error:
        raise ProfileError(f"{error}. Look at `journalctl -u {variant['unit']}`.") from error
    finally:
        if started and not stopped:  # a profiler that stays on slows the engine down for good
            with contextlib.suppress(engine_api.EngineError):
                switch("/stop_profile", STOP_LIMIT_S)
    paths = _settled(folder, before)
    if not paths:
        raise ProfileError(
            f"{variant['unit']} wrote no trace into {folder}. Look at `journalctl -u {variant['unit']}`."
        )
    try:
        ranks = [kernel_times.shares(kernel_times.read(path)) for path in paths]
    except kernel_times.TraceError as error:
        raise ProfileError(str(error)) from error
    if not keep:
        for path in paths:
            path.unlink()
    return {
        **kernel_times.combine(ranks),
        "asked_steps": steps,
        "traces": [str(path) for path in paths] if keep else [],
    }


def _settled(folder: Path, before: set[str], limit_s: float = 60.0) -> list[Path]:
    """The new traces once they grow no more."""
    deadline = time.monotonic() + limit_s
    sizes: dict[Path, int] = {}
    while time.monotonic() < deadline:
        now = {path: path.stat().st_size for path in _written(folder, before)}
        if now and now == sizes:
            break
        sizes = now
        time.sleep(1.0)
    return sorted(sizes)
