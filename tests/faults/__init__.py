"""The fault matrix: what the swap on a host does when something breaks, on a real systemd over real SSH."""

import sys
from pathlib import Path

# Whoever imports this package, a test or a script, also finds the scripts and the collection by their one name.
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / place) for place in ("", "collections")]
