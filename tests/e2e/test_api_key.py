"""The API key reaches the engine and nobody else."""

from __future__ import annotations

import re

import pytest
from throwaway import BASELINE, Host

pytestmark = pytest.mark.host
KEY = "sk-e2e-5up3r-s3cr3t"
FILE = "/etc/swapgate/credentials/vllm_api_key"


def test_the_key_is_needed_and_can_be_read_nowhere(host: Host) -> None:
    run = host.deploy("baseline", vllm_service_api_key=KEY)
    try:
        assert run.code == 0, run.text[-3000:]
        assert KEY not in run.text
        assert host.complete()[0] == 401
        assert host.complete(key=KEY)[0] == 200

        asked = f"systemctl show {BASELINE}; systemctl cat {BASELINE}; ps axww -o args; journalctl --no-pager"
        assert KEY not in host.sh(f"runuser -u nobody -- sh -c '{asked}' 2>&1; {asked}", limit_s=60)
        for found in host.sh(
            "find /etc /var /run /opt /usr/local /srv /tmp /home -xdev -type f -size -4M "
            f"-exec grep -lF {KEY} {{}} + 2>/dev/null || true"
        ).split():
            assert host.run(f"runuser -u nobody -- cat {found}").returncode != 0, f"nobody can read the key in {found}"
        assert host.sh(f"stat -c '%U %a' {FILE}") == "root 600"
        environ = host.sh(f"pgrep -f 'bin/vllm serve' | head -1; tr '\\0' '\\n' < /proc/{host.pid(BASELINE)}/environ")
        assert KEY not in environ, "the supervisor's own environment holds it"
        assert host.status()["acceptance"] is None
        for log in ("-u swapgate-swap.service", f"-u {BASELINE}"):
            assert KEY not in host.sh(f"journalctl --no-pager {log}")
    finally:
        without = host.deploy("baseline")
    assert without.code == 0, without.text[-3000:]
    assert re.search(r"baseline@\w{4} -> baseline@\w{4}: swapped", without.flat), without.flat
    assert host.run(f"test -e {FILE}").returncode != 0
    assert host.complete()[0] == 200
