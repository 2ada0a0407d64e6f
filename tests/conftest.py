"""Puts the in-repo collection on the import path, under the one name that playbooks, scripts and tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "collections"))
