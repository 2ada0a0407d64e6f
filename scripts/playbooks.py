"""One run of Ansible through ansible-runner, with this checkout's settings and programs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ansible_runner
from rich.console import Console
from rich.live import Live

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "collections")]

from ansible_collections.swapgate.core.plugins.module_utils import text  # noqa: E402

SHOWN = 2000
# Ansible ends its workers itself when it is asked to; killed at once, it leaves them behind.
END_WITHIN_S = 10.0
# ansible-runner gives Ansible a terminal that nobody sees: a question there would wait for ever.
QUESTIONS = {
    "--ask-pass": "ANSIBLE_ASK_PASS",
    "--ask-become-pass": "ANSIBLE_BECOME_ASK_PASS",
    "--ask-vault-pass": "ANSIBLE_ASK_VAULT_PASS",
}
OPTIONS_HELP = "options after -- go to ansible-playbook as they are: -- --vault-password-file FILE --forks 20 -vv"


def missing(inventories: Sequence[str] | None) -> str | None:
    """What is wrong with -i, which Ansible would only warn of."""
    absent = [path for path in inventories or [] if not Path(path).exists()]
    return (
        f"-i {absent[0]}: found nothing there, expected an inventory file or folder; name another one"
        if absent
        else None
    )


def split(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """(our own words, those after ``--``, which are ansible-playbook's)."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def hidden_question(options: Sequence[str]) -> str | None:
    """What is wrong with options, or the environment, that have Ansible ask for a password."""
    short = {"-k": "--ask-pass", "-K": "--ask-become-pass", "-J": "--ask-vault-pass"}
    asked = [short.get(word, word) for word in options]
    asked += [f"{name}={os.environ[name]}" for name in QUESTIONS.values() if _is_yes(os.environ.get(name))]
    for word in asked:
        if word.startswith(tuple(QUESTIONS)) or word.endswith("@prompt") or word.startswith(tuple(QUESTIONS.values())):
            return (
                f"{word}: Ansible's own questions cannot be shown here. Use --connection-password-file, "
                "--become-password-file or --vault-password-file after --, or run ansible-playbook itself"
            )
    return None


def _is_yes(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


def literal(said: str) -> dict[str, str]:
    """A text as an extra variable that Ansible never takes for a template."""
    return {"__ansible_unsafe": said}


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of ending this program at once."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    handle: Callable[[dict[str, Any]], Any],
    inventories: Sequence[str] | None,
    options: Sequence[str] = (),
    **what: Any,
) -> tuple[str, str]:
    """(ansible-runner's status, the end of what it printed where it did not succeed).

    ``what`` goes to ansible-runner: a playbook or a module, limit, extravars, ... ``options`` to its command line;
    ``handle`` gets each event. Ctrl-C and SIGTERM end it, with status "canceled" and no process of Ansible left.
    """
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_interrupts())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="swapgate-"))
        leader: list[int] = []
        asked: list[float] = []

        def seen(event: dict[str, Any]) -> None:
            if not leader and event.get("pid"):
                leader.append(event["pid"])
            handle(event)

        def given_up() -> bool:
            """Whether ansible-runner is to kill Ansible, which was asked to end and did not."""
            if not stopped.is_set():
                return False
            if not leader:
                return True  # no worker was started yet
            if not asked:
                asked.append(time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leader[0], signal.SIGINT)
            return time.monotonic() - asked[0] > END_WITHIN_S

        done = ansible_runner.run(
            private_data_dir=folder,
            project_dir=os.getcwd(),  # where Ansible runs: a file named on the command line is looked for here
            # Without one it is ANSIBLE_INVENTORY's, or else that of ansible.cfg, as for ansible-playbook.
            inventory=[str(Path(path).resolve()) for path in inventories] if inventories else None,
            envvars={
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "ANSIBLE_NOCOLOR": "1",
                # ansible-runner would switch it off.
                "ANSIBLE_HOST_KEY_CHECKING": os.environ.get("ANSIBLE_HOST_KEY_CHECKING", "True"),
            },
            settings={"pexpect_timeout": 1},  # how often it looks at cancel_callback
            cmdline=shlex.join(options),
            event_handler=seen,
            cancel_callback=given_up,
            quiet=True,
            **what,
        )
        status = "canceled" if stopped.is_set() else str(done.status)
        if status in ("successful", "canceled"):
            return status, ""
        with done.stdout as printed:
            return status, printed.read().strip()[-SHOWN:]


def watched(view: Any, console: Console, start: Callable[[], str]) -> str:
    """The status of ``start``, with ``view`` on a terminal while it lasts; "canceled" when it was interrupted."""
    try:
        if console.is_terminal:
            with Live(view, console=console, refresh_per_second=2):
                return start()
        return start()
    except KeyboardInterrupt:
        return "canceled"  # ansible-runner's own word for it, where its handler was not in place yet


def can_ask() -> bool:
    """Whether somebody sees a question, and can answer it."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(question: str) -> bool:
    """Whether the person at the terminal types yes. What was typed before the question is no answer."""
    termios.tcflush(sys.stdin, termios.TCIFLUSH)
    print(f"{text.printable(question, SHOWN)} Type yes to go on: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() == "yes"


def show(console: Console, said: str) -> None:
    """Lines of a host's or of Ansible's, of which a terminal gets the letters and nothing that it acts on."""
    for line in said.splitlines():
        console.print(text.printable(line, SHOWN), highlight=False, markup=False, soft_wrap=True)


def tell(view: Any, console: Console, as_json: bool) -> None:
    """A view's failures, a line a host; and its results on standard output, where they are wanted."""
    for host, message in sorted(view.failures.items()):
        show(console, f"{host}: {message}")
    if as_json:
        print(json.dumps(view.results, sort_keys=True))
