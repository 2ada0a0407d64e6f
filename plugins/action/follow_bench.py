"""Action `swapgate.core.follow_bench`: wait for the end of a benchmark, a recording or a probe; show it meanwhile."""

from __future__ import annotations

import json
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.swapgate.core.plugins.module_utils import bench_results

POLL_S = 3.0
TELL_S = 30.0
GONE_LIMIT_S = 20.0
UNREACHABLE_LIMIT_S = 240.0


class ActionModule(ActionBase):
    """Polls a measuring unit of the host. Of a benchmark that is also what keeps it going there."""

    _requires_connection = True
    _supports_check_mode = False

    def _command(self, words: list[str], task_vars: dict[str, Any]) -> dict[str, Any]:
        done: dict[str, Any] = self._execute_module(
            module_name="ansible.builtin.command", module_args={"argv": words}, task_vars=task_vars
        )
        return done

    def _benchmark(self, host: str, folder: str, task_vars: dict[str, Any]) -> tuple[str, int, Any] | None:
        """(line, passes done, LOAD | None); None without an answer."""
        done = self._command(["/usr/local/bin/swapgate", "bench-status", folder], task_vars)
        if done.get("rc") != 0:
            return None
        status = json.loads(done["stdout"])
        return bench_results.progress_line(host, status), (status["progress"] or {}).get("done", 0), status["load"]

    def _last(self, file: str, task_vars: dict[str, Any]) -> str | None:
        """The last line of a file of the host; None without an answer."""
        done = self._command(["tail", "-n", "1", file], task_vars)
        return str(done["stdout"]).strip() if done.get("rc") == 0 else None

    def _words(self, host: str, folder: str, verb: str, task_vars: dict[str, Any]) -> tuple[str, str] | None:
        """(line, last words) of a recording or a probe; None without an answer."""
        said = self._last(f"{folder}/said", task_vars)
        return (
            None if said is None else (f"{host} | {self._task.args.get('variant')} | {verb} | {said or 'begun'}", said)
        )

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `load`, the host's LOAD, once the benchmark in the given `folder` has ended, however it did.

        With `verb` (record or probe) and `variant`: of unit swapgate-VERB, which tells in FOLDER/said and answers in
        FOLDER/answer, return `ok`, whether it came to its end, and `said`, its last words.
        """
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        folder, verb = self._task.args.get("folder"), self._task.args.get("verb")
        if not folder:
            raise AnsibleActionFail("follow_bench: argument `folder` is missing: the one that the host's program fills")
        host, display, unit = task_vars["inventory_hostname"], Display(), f"swapgate-{verb or 'bench'}.service"
        heard = alive = time.monotonic()
        told_at, told = 0.0, -1
        while True:
            if verb:
                words = self._words(host, str(folder), verb, task_vars)
                # Every line is news of its own.
                found = (words[0], hash(words[0]), None) if words else None
            else:
                found = self._benchmark(host, str(folder), task_vars)
            now = time.monotonic()
            if found is not None:
                heard = now
                line, at, load = found
                if load:
                    return {"changed": False, "load": load}
                if at != told or now - told_at >= TELL_S:
                    display.display(line)
                    told_at, told = now, at
                if self._command(["systemctl", "is-active", unit], task_vars).get("rc") == 0:
                    alive = now
                elif verb:
                    last, said = self._words(host, str(folder), verb, task_vars) or (line, "")
                    if said and last != line:
                        display.display(last)
                    answer = self._last(f"{folder}/answer", task_vars) or ""
                    return {
                        "changed": False,
                        "ok": answer.startswith("{"),
                        "said": said or answer or "it ended without a word",
                    }
                elif now - alive > GONE_LIMIT_S:
                    raise AnsibleActionFail(
                        f"{host}: the benchmark is gone and left no result. Look at `journalctl -u {unit}` on the host."
                    )
            elif now - heard > UNREACHABLE_LIMIT_S:
                raise AnsibleActionFail(
                    f"{host}: no answer for {UNREACHABLE_LIMIT_S:.0f} s. What measures there ends by itself; run it "
                    "again."
                )
            time.sleep(POLL_S)
