"""Action `swapgate.core.verb`: run a verb of the host program, and fail with its own sentence when it fails."""

from __future__ import annotations

import errno
import json
import shlex
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

PROGRAM = "/usr/local/bin/swapgate"
NOT_INSTALLED = "nothing of swapgate is installed; next: ansible-playbook playbooks/deploy.yml -e variant=NAME"


class ActionModule(ActionBase):
    """`ansible.builtin.command` for `swapgate VERB`: same results, nothing changed, one sentence when it fails."""

    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return `rc`, `stdout` and `stderr`, and `json`, standard output where it is JSON.

        `words` is the verb with its arguments, a text or a list; `exits` are the exit codes that are no failure. With
        `needed: false` a host without swapgate is no failure either: `installed` is false then, and `msg` says so.
        """
        super().run(tmp, task_vars)
        words, exits = self._task.args.get("words"), self._task.args.get("exits", [0])
        if not words:
            raise AnsibleActionFail("verb: argument `words` is missing: a verb of `swapgate --help`")
        argv = shlex.split(words) if isinstance(words, str) else [str(word) for word in words]
        done: dict[str, Any] = self._execute_module(
            module_name="ansible.builtin.command", module_args={"argv": [PROGRAM, *argv]}, task_vars=task_vars
        )
        if done.get("skipped") or done.get("unreachable"):
            return done
        done["changed"] = False
        said = [line.strip() for line in str(done.get("stderr", "")).splitlines() if line.strip()]
        if done.get("rc") in exits and "cmd" in done and "start" in done:
            done["failed"] = False  # said, since Ansible takes an exit code that is not 0 for a failure
            done["installed"] = True
            try:
                done["json"] = json.loads(done["stdout"])
            except ValueError:
                done["json"] = None
            return done
        host = (task_vars or {}).get("inventory_hostname", "")
        if "start" not in done and done.get("rc") == errno.ENOENT:
            said = [NOT_INSTALLED]
            if not self._task.args.get("needed", True):
                return {"changed": False, "installed": False, "msg": f"{host}: {NOT_INSTALLED}"}
        last = said[-1] if said else str(done.get("msg") or f"swapgate {argv[0]}: exit {done.get('rc')}")
        # The sentence alone: the command's own fields would bury it.
        return {"failed": True, "rc": done.get("rc"), "changed": False, "msg": f"{host}: {last}"}
