"""One run of Ansible through ansible-runner, with this checkout's settings and programs."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ansible_runner
from rich.console import Console
from rich.live import Live

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 2000


def missing(inventories: Sequence[str] | None) -> str | None:
    """What is wrong with -i, which Ansible would only warn of."""
    absent = [path for path in inventories or [] if not Path(path).exists()]
    return (
        f"-i {absent[0]}: found nothing there, expected an inventory file or folder; name another one"
        if absent
        else None
    )


def run(handle: Callable[[dict[str, Any]], Any], inventories: Sequence[str] | None, **what: Any) -> tuple[str, str]:
    """(ansible-runner's status, the end of what it printed where it did not succeed).

    ``what`` goes to ansible-runner: a playbook or a module, limit, extravars, ... ``handle`` gets each of its events.
    """
    with tempfile.TemporaryDirectory(prefix="swapgate-") as folder:
        done = ansible_runner.run(
            private_data_dir=folder,
            inventory=[str(Path(path).resolve()) for path in inventories or [str(ROOT / "inventory/sandbox")]],
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
            event_handler=handle,
            quiet=True,
            **what,
        )
        status = str(done.status)
        return status, "" if status == "successful" else (done.stdout.read() or "").strip()[-SHOWN:]


def watched(view: Any, console: Console, start: Callable[[], str]) -> str:
    """The status of ``start``, with ``view`` on a terminal while it lasts; "canceled" when it was interrupted."""
    try:
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=2):
                return start()
        return start()
    except KeyboardInterrupt:
        return "canceled"  # ansible-runner's own word for it, where its handler was not in place yet


def tell(view: Any, console: Console, as_json: bool) -> None:
    """A view's failures, a line a host; and its results on standard output, where they are wanted."""
    for host, message in sorted(view.failures.items()):
        console.print(f"{host}: {message}", highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(view.results, sort_keys=True))
