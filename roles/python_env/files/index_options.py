"""Print this host's pip index settings as uv's options, for uv reads no pip.conf.

Run by an interpreter whose environment has pip. Prints one JSON object: `options`, the words for uv's command line, and
`places`, the same for a person ("index https://...", "folder /..."). What pip says last wins: a variable over the
user's file over the system's file.
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


def options(found):
    """(uv's options, places for a person) for pip's settings."""
    words = []
    places = []
    if found.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        words.append("--no-index")
    else:
        if found.get("index-url"):
            words += ["--default-index", found["index-url"]]
        places.append("index " + found.get("index-url", "of the Python Package Index"))
        for url in found.get("extra-index-url", "").split():
            words += ["--index", url]
            places.append("index " + url)
    for place in found.get("find-links", "").split():
        words += ["--find-links", place]
        places.append("folder " + place)
    for host in found.get("trusted-host", "").split():
        words += ["--allow-insecure-host", host]
    return words, places


def main():
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    words, places = options(settings(listing))
    print(json.dumps({"options": words, "places": places}))


if __name__ == "__main__":
    main()
