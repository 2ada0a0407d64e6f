"""Print where this host's pip looks for packages, since uv reads no pip.conf.

Run by an interpreter whose environment has pip. Prints one JSON object: no_index, index (empty: the public one),
extra_indexes, find_links and insecure_hosts. Addresses may hold passwords: never shown. What pip says last wins: a
variable over the user's file over the system's file.
"""

import ast
import json
import subprocess
import sys


def settings(listing):
    """pip's settings (key without its section: value) out of the text of `pip config list`."""
    found = {}
    # pip prints the merged files in rising priority, but variables (:env:) first, although these win.
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in (":env:", "global", "install"):
            found[key] = str(ast.literal_eval(value))
    return found


def sources(found):
    """Where packages come from, as role python_env writes it down for uv, from pip's settings."""
    return {
        "no_index": found.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        "index": found.get("index-url", ""),
        "extra_indexes": found.get("extra-index-url", "").split(),
        "find_links": found.get("find-links", "").split(),
        "insecure_hosts": found.get("trusted-host", "").split(),
    }


def main():
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(json.dumps(sources(settings(listing))))


if __name__ == "__main__":
    main()
