"""Two models with a variant of the same name on one host, and a host on which an older swapgate lost one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from throwaway import BASELINE, NGRAM, Host, until

pytestmark = pytest.mark.host
OTHER = "vllm-other.service"
# What an older swapgate would have left: the second model's data in the place of the first one's, both units enabled,
# no unit excluded from one that it had forgotten, and records that name no model.
OLDER = """set -e
cd /etc/swapgate/variants
rm -f vllm-tiny.json; mv vllm-other.json baseline.json; mv vllm-tiny-ngram.json ngram.json
cd /etc/systemd/system
ln -sf /etc/systemd/system/vllm-tiny.service multi-user.target.wants/vllm-tiny.service
sed -i s/vllm-tiny.service// vllm-*.service.d/50-swapgate-exclusive.conf
systemctl daemon-reload
python3 - <<'END'
import json, pathlib
file = pathlib.Path("/var/lib/swapgate/state.json")
state = json.loads(file.read_text())
for record in (state["last_good"], state["swap"]["from"], state["swap"]["to"]):
    for key in ("model", "slot"):
        (record or {}).pop(key, None)
file.write_text(json.dumps(state))
END
"""


def models(host: Host) -> dict[str, Any]:
    """The inventory's models and one more, of the same files."""
    table = host.inventory_value("swapgate_models")
    return {**table, "other": {**table["tiny"], "served_name": "other"}}


def exclusive(host: Host, unit: str) -> str:
    return host.sh(f"cat /etc/systemd/system/{unit}.d/50-swapgate-exclusive.conf")


@pytest.fixture
def two(host: Host) -> Iterator[Host]:
    """The host with `baseline` of a second model serving, both variants of the first one installed."""
    assert host.swap("ngram")["outcome"] == "swapped"
    run = host.deploy("baseline", swapgate_model="other", swapgate_models=models(host))
    assert run.code == 0, run.text[-3000:]
    yield host
    host.ensure_serving("baseline")
    host.sh(
        f"systemctl disable -q {OTHER}; rm -rf /etc/systemd/system/{OTHER}* /etc/swapgate/variants/vllm-other.json "
        "/var/lib/swapgate/manifests/other.json; systemctl daemon-reload; systemctl reset-failed"
    )


def test_both_are_known_exclude_each_other_and_the_first_is_one_roll_back_away(two: Host) -> None:
    assert two.active() == two.enabled() == [OTHER]
    assert two.complete(model="other")[0] == 200
    status = two.status()
    # Tests before this one may have left more variants on the host.
    assert {(one["model"], one["variant"], one["unit"]) for one in status["units"]} >= {
        ("other", "baseline", OTHER),
        ("tiny", "baseline", BASELINE),
        ("tiny", "ngram", NGRAM),
    }
    assert status["last_good"]["model"] == "other"
    swap = two.swapgate("history")[-1]
    assert (swap["from"]["model"], swap["to"]["model"]) == ("tiny", "other")
    assert OTHER in exclusive(two, BASELINE) and BASELINE in exclusive(two, OTHER)

    # By hand, and against all advice: systemd ends the one that serves, and each writes into its own record.
    two.sh(f"systemctl start --no-block {BASELINE}")
    until(lambda: two.active() == [BASELINE], 60, "the first model's unit, started by hand")
    loads = {one["unit"]: one["load"] for one in two.status()["units"]}
    assert (loads[BASELINE]["unit"], loads[BASELINE]["state"]) == (BASELINE, "ready")
    assert (loads[OTHER]["unit"], loads[OTHER]["state"]) == (OTHER, "stopped"), "another unit wrote into its record"
    assert two.complete(model="tiny")[0] == 200

    # `tiny/ngram` was good before; what somebody started by hand was never proven.
    assert two.swapgate("way-back")["model"] == "other", "the last good one does not serve"
    two.sh(f"systemctl start --no-block {OTHER}")
    until(lambda: two.active() == [OTHER], 60, "the second model's unit")
    back = two.ansible("playbooks/rollback.yml", allow_disruption=True)
    assert back.code == 0, back.text[-3000:]
    assert two.active() == two.enabled() == [NGRAM]


def test_a_host_that_lost_a_model_is_mended_by_its_next_swap(two: Host) -> None:
    two.sh(OLDER)
    before = two.status()
    known = {one["unit"] for one in before["units"]}
    assert {OTHER, NGRAM} <= known and BASELINE not in known, "the first model's unit is not known"
    assert sorted(two.enabled()) == [OTHER, BASELINE], "both would start at boot"

    assert two.swap("ngram")["outcome"] == "swapped"
    assert two.active() == two.enabled() == [NGRAM]
    files = two.sh("ls /etc/swapgate/variants").split()
    assert {"vllm-other.json", "vllm-tiny-ngram.json", "vllm-tiny.json"} <= set(files) and "baseline.json" not in files
    assert {one["unit"] for one in two.status()["units"]} >= {OTHER, BASELINE, NGRAM}
    assert BASELINE in exclusive(two, OTHER) and OTHER in exclusive(two, BASELINE)
    assert two.swapgate("history")[-1]["from"]["model"] == "other"
    state = json.loads(two.sh("cat /var/lib/swapgate/state.json"))
    assert (state["last_good"]["model"], state["last_good"]["slot"]) == ("tiny", "main")
