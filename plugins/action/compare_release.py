"""Action `swapgate.core.compare_release`: what a swap to a release would change, for the plan and `--diff`."""

from __future__ import annotations

import json
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.swapgate.core.plugins.module_utils import progress

PROGRAM = "/usr/local/bin/swapgate"


class ActionModule(ActionBase):
    """Asks the host what serves; compares here, since in check mode the release is not on the host."""

    _requires_connection = True
    _supports_check_mode = True
    _supports_diff = True

    def _ask(self, task_vars: dict[str, Any], *words: str) -> dict[str, Any]:
        done: dict[str, Any] = self._execute_module(
            module_name="ansible.builtin.command",
            module_args={"_raw_params": " ".join([PROGRAM, *words]), "_uses_shell": False},
            task_vars=task_vars,
        )
        return done

    def _shown(self, task_vars: dict[str, Any], release: str) -> dict[str, Any] | None:
        """A release as `swapgate show-release` prints it; None from an older host program, which cannot."""
        done = self._ask(task_vars, "show-release", release)
        if done.get("rc") == 0:
            shown: dict[str, Any] | None = json.loads(done["stdout"])
            return shown
        said = str(done.get("stderr", ""))
        if release == "serving" or said.startswith("usage:"):
            return None
        raise AnsibleActionFail(said.strip() or str(done.get("msg")))

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `before`: the host's status, with `difference` for filter `swap_plan`; null where no swapgate is.

        `release` is compared with what serves; `staged` is it as role vllm_service gives it ("release", "variant",
        "unit_text"), or empty where it is on the host already. `records_why` tells whether the host program knows
        `swapgate ask --because`.
        """
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        release, staged = self._task.args["release"], self._task.args.get("staged") or {}
        check, self._task.check_mode = self._task.check_mode, False  # the questions below change nothing
        try:
            status = self._ask(task_vars, "status")
            if status.get("rc") != 0:  # a host that never had swapgate has no such command, which is an answer
                return dict(result, changed=False, before=None, records_why=False)
            before = json.loads(status["stdout"])
            old = self._shown(task_vars, "serving")
            ours = staged.get("release") == release
            new = dict(staged, dropins=None) if ours else self._shown(task_vars, release)
        finally:
            self._task.check_mode = check
        before["difference"] = progress.comparison(old, new)
        result.update(changed=False, before=before, records_why="way_back" in before)
        if new and new["release"] != (old or {}).get("release"):
            result["changed"] = check or self._task.diff
            result["diff"] = {
                "before_header": "{unit} (release {release})".format(unit=old["variant"]["unit"], **old)
                if old
                else "nothing",
                "before": old["unit_text"] if old else "",
                "after_header": "{unit} (release {release})".format(unit=new["variant"]["unit"], **new),
                "after": new["unit_text"],
            }
        return result
