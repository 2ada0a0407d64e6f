#!/usr/bin/env python3
"""The main job on a throwaway host: install the real engine, serve `baseline`, swap to `ngram`, show one answer.

    scripts/demo.py [--host NAME]

Each stage is a command that you could type; it is printed before it runs, and its minutes at the end. Exit code 0 when
every stage did its work, else that of the stage that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# An answer that repeats the question's text, so that n-gram finds drafts.
QUESTION = (
    "Repeat this text word for word, three times: The quick brown fox jumps over the lazy dog, and the lazy dog looks "
    "at the quick brown fox and goes back to sleep."
)
ANSWER_LIMIT_S = 180
ANSWER_TOKENS = 120


def playbook(name: str, host: str, *words: str) -> list[str]:
    """The command line of one of our playbooks."""
    inventories = ["-i", "inventory/sandbox", "-i", f".sandbox/{host}/inventory.yml"]
    # inventory/sandbox has the host `sandbox`, which may not be there when another is asked for.
    only = [] if host == "sandbox" else ["--limit", host]
    return [str(BIN / "ansible-playbook"), *inventories, *only, f"playbooks/{name}.yml", *words]


def run(command: list[str]) -> None:
    """Print a command and run it; CalledProcessError when it fails."""
    print("\n$ " + " ".join(word.replace(f"{BIN}/", "") for word in command), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def ask(port: int, served_name: str) -> str:
    """One greedy answer of the engine over its HTTP API."""
    body = {
        "model": served_name,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def show_answer() -> None:
    """Ask the serving variant and print what it says."""
    print(f"\n> {QUESTION}\n{ask(8100, 'smollm2')}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the stages and print their minutes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--host", default="sandbox", help="name of the throwaway host (default: sandbox)")
    parser.add_argument("--ssh-port", default="2222", help="its SSH port on loopback, where it is new (default: 2222)")
    args = parser.parse_args(argv)
    host = args.host
    stages = [
        ("throwaway host", [str(BIN / "python"), "scripts/sandbox.py", "up", host, "--ssh-port", args.ssh_port]),
        ("engine", playbook("demo_engine", host)),
        ("model", playbook("demo_model", host)),
        ("baseline", playbook("deploy", host, "-e", "variant=baseline")),
        ("ngram", playbook("deploy", host, "-e", "variant=ngram")),
        ("answer", None),
        ("status", playbook("status", host)),
    ]
    minutes: list[tuple[str, float]] = []
    code = 0
    for name, command in stages:
        started = time.monotonic()
        try:
            if command is None:
                show_answer()
            else:
                run(command)
        except subprocess.CalledProcessError as error:
            code = error.returncode
        except OSError as error:
            print(f"demo: {name}: {error}", file=sys.stderr)
            code = 1
        minutes.append((name, (time.monotonic() - started) / 60))
        if code:
            print(f"\ndemo: stage '{name}' failed, exit {code}; what it printed is above.", file=sys.stderr)
            break
    print(
        "\nminutes: "
        + ", ".join(f"{name} {spent:.1f}" for name, spent in minutes)
        + f"; {sum(spent for _, spent in minutes):.1f} in all",
        flush=True,
    )
    if not code:
        print(
            f"Swap back: ansible-playbook playbooks/deploy.yml -e variant=baseline; remove the host: "
            f"scripts/sandbox.py destroy {host}"
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
