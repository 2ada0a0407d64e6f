"""Action `swapgate.core.follow_swap`: wait for the end of a swap and show it while it runs."""

from __future__ import annotations

import json
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.swapgate.core.plugins.module_utils import progress

POLL_S = 2.0
# With the poll and the call over SSH this stays below ten seconds.
TELL_S = 5.0
NOT_BEGUN_LIMIT_S = 60.0
UNREACHABLE_LIMIT_S = 300.0


class ActionModule(ActionBase):
    """Polls `swapgate status` on the host; the swap itself goes on whether anybody looks or not."""

    _requires_connection = True
    _supports_check_mode = False

    def _status(self, task_vars: dict[str, Any]) -> dict[str, Any] | None:
        done = self._execute_module(
            module_name="ansible.builtin.command",
            module_args={"_raw_params": "/usr/local/bin/swapgate status"},
            task_vars=task_vars,
        )
        if done.get("rc") != 0:
            return None
        status: dict[str, Any] = json.loads(done["stdout"])
        return status

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `status` once the swap with the given `id` has an outcome; changed when it swapped.

        With `may_wait`, also when it waits to be confirmed: the new variant serves then, and the outcome is null.
        """
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        swap_id = self._task.args.get("id")
        may_wait = bool(self._task.args.get("may_wait", False))
        if not swap_id:
            raise AnsibleActionFail("follow_swap: argument `id` is missing: the id that `swapgate ask` printed")
        host, display = task_vars["inventory_hostname"], Display()
        begun, heard, told_at, told = time.monotonic(), time.monotonic(), 0.0, ""
        unknown_told = False
        while True:
            status = self._status(task_vars)
            now = time.monotonic()
            if status is None:
                if now - heard > UNREACHABLE_LIMIT_S:
                    raise AnsibleActionFail(
                        f"{host}: no status for {UNREACHABLE_LIMIT_S:.0f} s. The swap goes on without us: run the same "
                        "deploy again to look at it."
                    )
            else:
                heard = now
                swap = status["swap"]
                if swap and swap["id"] == swap_id:
                    if swap["outcome"]:
                        return {"changed": swap["outcome"] in ("swapped", "rolled_back", "recovered"), "status": status}
                    if may_wait and swap["phase"] == "confirm":
                        return {"changed": True, "status": status}
                    line = progress.line(host, status, time.time(), unknown_told)
                    phase = progress.SEPARATOR.join(line.split(progress.SEPARATOR)[:3])
                    if phase != told or now - told_at >= TELL_S:
                        display.display(line)
                        told, told_at = phase, now
                        unknown_told = unknown_told or progress.UNKNOWN in line
                elif now - begun > NOT_BEGUN_LIMIT_S:
                    raise AnsibleActionFail(
                        f"{host}: swap {swap_id} has not begun after {NOT_BEGUN_LIMIT_S:.0f} s. Look at "
                        "`journalctl -u swapgate-swap.service` on the host."
                    )
            time.sleep(POLL_S)
