"""The command lines that README.md and docs/ print, each with the decision on how a test tries it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "roles").glob("*/README.md"))

# Programs that people type and this machine need not have; what it has on its PATH counts by itself.
PROGRAMS = re.compile(
    "ansible(-[a-z]+)?|curl|docker|dnf|journalctl|kubectl|nvidia-smi|podman|pytest|sudo|swapgate|system(ctl|d-analyze)|vllm"
)
BEFORE = re.compile(r"(?:[A-Z_]+=\S+ |nice |sudo |\.\.\. )*")

AS_IT_IS, HELP, PLAYBOOK, TARGETS, VERB, EXISTS, NAMED = range(7)
# The first pattern that fits decides. A command that none fits fails tests/unit/test_as_typed.py: add its pattern here.
DECISIONS = (
    # Run as it stands: it takes seconds and changes nothing.
    (r"^\. \.venv/bin/activate$|^ansible-doc ", AS_IT_IS),
    # Only named in running text, or somebody else's program with nothing to try here.
    (r"^(?:systemctl|systemd-analyze|findmnt|apt-get|vllm|ansible-galaxy|git submodule|python3 \.\.\.) ", NAMED),
    (r"^journalctl (?:-u \S+|-b -1)$|^curl http://ADDRESS:PORT/", NAMED),
    (r"^cd roles/\w+ && \.\./\.\./\.venv/bin/molecule test$", NAMED),
    # Its options are looked for in its --help, here and not on a host.
    (r"(?:^|\| )(?:python3? )?scripts/\w+\.py", HELP),
    # Modules of the host, and programs that want a GPU or an engine as soon as they are imported.
    (r"^(?:python3? )?(?:plugins|benchmarks|tests)/|^pytest .* tests/", EXISTS),
    # --syntax-check, and the names of its variables, here; tests/e2e/test_as_typed.py runs it on a host.
    (r"^ansible-playbook (?:-i \S+ )?(?:swapgate/)?playbooks/", PLAYBOOK),
    (r"^make ", TARGETS),
    # tests/e2e/test_as_typed.py asks the host's own program.
    (r"^swapgate ", VERB),
)


def _as_typed(shown: str) -> str:
    """What is typed of a line that is shown: without its remark, [optional] words included, short forms written out."""
    typed = re.sub(r"\s+#.*|\s{4,}\S.*", "", shown.strip()).rstrip("\\ ").replace("\\|", "|")
    typed = re.sub(r"\[((?:-\S+) [^\]]*)\]", r"\1", typed)
    first = typed.split(" ")[0]
    if first.endswith(".yml") and (ROOT / "playbooks" / first).exists():
        return "ansible-playbook playbooks/" + typed
    if first.endswith(".py") and "/" not in first:
        found = [*(ROOT / "scripts").glob(first), *(ROOT / "benchmarks").rglob(first), *(ROOT / "plugins").rglob(first)]
        return typed.replace(first, str(found[0].relative_to(ROOT)), 1) if found else typed
    return re.sub(r" +", " ", BEFORE.sub("", typed, count=1))


def _is_command(typed: str) -> bool:
    first = typed.split(" ")[0]
    if first in ("time", "trial:", "...") or not re.fullmatch(r"[\w./-]+", first):
        return False
    here = first == "." or ("/" in first and first.endswith(".py"))
    return here or bool(PROGRAMS.fullmatch(first)) or shutil.which(first) is not None


def commands() -> dict[str, str]:
    """Each command once, to the place where it is printed first."""
    found: dict[str, str] = {}
    for page in PAGES:
        data = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith("```"):
                data = not data and line not in ("```", "```sh", "```console")
            block = re.match(r" {4,}\S", line) and not line.lstrip().startswith(("- ", "* ", "> "))
            # A program's name alone, in running text, is no command line.
            shown = [line] if block else [one for one in re.findall(r"`([^`]+)`", line) if " " in one]
            for typed in map(_as_typed, [] if data else shown):
                if _is_command(typed):
                    found.setdefault(typed, f"{page.relative_to(ROOT)}:{number}")
    return found


def decision(typed: str) -> int | None:
    """How the command is tried; None when nobody has decided yet."""
    return next((way for pattern, way in DECISIONS if re.search(pattern, typed)), None)
