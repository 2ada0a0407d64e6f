"""The main job over real SSH: first deploy, nothing to do, swap, status, history, back, and what check mode says."""

from __future__ import annotations

import json
import re

import pytest
from throwaway import BASELINE, NGRAM, Host, Run

pytestmark = pytest.mark.host
TOLD_EVERY_S = 10


def test_the_plan_for_a_host_that_has_nothing_yet(first_plan: Run) -> None:
    assert first_plan.code == 0, first_plan.text[-3000:]
    assert "'baseline' would be the first variant" in first_plan.flat
    assert first_plan.lines[-1][1] == "left behind: nothing"


def test_first_deploy_serves_and_is_enabled(first_deploy: Run, host: Host) -> None:
    assert first_deploy.code == 0
    assert f"{host.name}: nothing -> baseline: swapped; baseline serves since this swap" in first_deploy.flat
    code, text = host.complete(prompt="The capital of France is")
    assert code == 200 and text.lstrip().startswith("Paris"), text


def test_second_identical_deploy_changes_nothing(host: Host) -> None:
    before = host.picture()
    run = host.deploy("baseline")
    assert run.code == 0, run.text[-3000:]
    assert run.recap()["changed"] == 0, run.text
    assert "baseline: unchanged" in run.flat
    assert host.picture() == before


def test_swap_to_ngram_status_history_and_back(host: Host) -> None:
    with host.knobs(load_s=25, variants=[{"when": "--port", "unless": "ngram", "load_s": 2}]):
        run = host.deploy("ngram")
    assert run.code == 0, run.text[-4000:]
    assert "baseline -> ngram: swapped; ngram serves since this swap" in run.flat

    told = run.progress()
    watching = [(when, line) for when, line in told if "| ngram | watch" in line]
    gaps = [later - sooner for (sooner, _), (later, _) in zip(told, told[1:])]
    assert max(gaps) <= 3 * TOLD_EVERY_S, told  # a poll and a module's run lie between two looks, on a busy machine
    assert watching and all(line.startswith(f"{host.name} | ngram | watch") for _, line in watching)
    assert any(re.search(r"weights \d+ % \| \d+ s elapsed \| ", line) for _, line in watching), watching

    assert host.enabled() == [NGRAM]
    assert host.active() == [NGRAM]
    assert host.run(f"test -f /etc/systemd/system/{BASELINE}").returncode == 0, "the fallback's unit file is gone"
    assert host.complete(tokens=60)[0] == 200

    status = host.ansible("playbooks/status.yml")
    assert status.code == 0
    assert re.search(
        rf"{host.name}: ngram, active \(running\), since .*, loaded in \d+ s, starts at boot, last good", status.flat
    )
    assert re.search(r"\d+ % of \d+ draft tokens accepted, acceptance length \d+\.\d+", status.flat), status.text
    assert re.search(rf"{host.name}: baseline, inactive", status.flat)
    assert re.search(r"a rollback goes to: baseline@[0-9a-f]{4}", status.flat), status.text

    known = host.status()["last_good"]["release"]
    back = host.ansible("playbooks/rollback.yml", "--check", "--diff")
    assert re.search(
        r"what changes, from what serves, ngram@\w{4} to baseline@\w{4}: - --speculative-config", back.flat
    )
    assert f"--- before: {NGRAM} (release {known})" in back.text, back.text

    back = host.ansible("playbooks/rollback.yml", allow_disruption=True, because="the drafts are slow")
    assert back.code == 0, back.text[-3000:]
    assert "ngram -> baseline: swapped" in back.flat
    assert host.enabled() == [BASELINE]
    assert host.active() == [BASELINE]

    history = host.ansible("playbooks/history.yml")
    assert history.code == 0
    swaps = re.findall(r"(\w+)(?:@\w{4})? -> (\w+)@\w{4}(?: \([^)]*\))?, (\w+)", history.flat)
    assert ("nothing", "baseline", "swapped") in swaps
    assert swaps[-2:] == [("baseline", "ngram", "swapped"), ("ngram", "baseline", "swapped")]
    assert re.search(
        r"deploy, baseline@\w{4} -> ngram@\w{4} \(speculation\), swapped, .* without service .*"
        r"rollback, ngram@\w{4} -> baseline@\w{4} \(speculation\), swapped, .*because: the drafts are slow",
        history.flat,
    ), history.text

    said = host.sh("journalctl --no-pager --output=cat --unit=swapgate-swap.service --lines=30")
    asked = (
        r"swap \w{4}: ngram@\w{4} -> baseline@\w{4} \(speculation\), a rollback, asked for by \w+: the drafts are slow"
    )
    assert re.search(asked + r"\nphase: preflight\n", said), said
    assert re.search(r"\nswap \w{4}: ngram@\w{4} -> baseline@\w{4}: swapped, \d+ s without service", said), said

    shown = host.sh("python3 -c \"import pty; pty.spawn(['swapgate', 'status'])\"")
    assert re.match(r"\S+: baseline, active \(running\), since ", shown) and "    last swap: " in shown, shown
    assert host.status()["last_good"]["variant"] == "baseline", "a caller without a terminal gets JSON"


def test_a_deploy_to_be_confirmed_ends_while_it_waits_and_a_decline_goes_back(host: Host) -> None:
    run = host.deploy("ngram", confirm_within_s=300)
    assert run.code == 0, run.text[-3000:]
    assert "baseline -> ngram: serves and waits to be confirmed, 5 min 00 s in all, until" in run.flat
    assert host.active() == [NGRAM]
    assert host.enabled() == [BASELINE], "what boots is the last good one as long as nobody confirmed"

    back = host.ansible("playbooks/confirm.yml", decline=True, because="the drafts are slow")
    assert back.code == 0, back.text[-3000:]
    assert "baseline -> ngram: rolled_back; baseline is the last good variant" in back.flat
    assert "the drafts are slow [operator, in phase confirm]" in back.flat
    assert host.active() == [BASELINE]

    late = host.ansible("playbooks/confirm.yml")
    assert late.code != 0
    assert "no swap waits to be confirmed: the last one, to 'ngram', ended rolled_back" in late.flat


def test_check_mode_says_the_plan_and_changes_nothing(host: Host) -> None:
    before = host.picture()
    staged_before = host.sh("ls /var/lib/swapgate/releases")
    run = host.deploy("ngram", "--check")
    assert run.code == 0, run.text[-3000:]
    assert re.search(rf"{host.name}: stops 'baseline' and drops its traffic until 'ngram' has loaded", run.flat), (
        run.text
    )
    assert host.picture() == before
    assert host.sh("ls /var/lib/swapgate/releases") == staged_before


def test_the_plan_names_what_changes_and_diff_shows_it_against_what_serves(host: Host) -> None:
    values = json.loads((host.inventory / "group_vars/vllm_hosts.yml").read_text())["swapgate_host"]
    changed = {**values, "env": {"MY_SETTING": "1"}, "engine_args": {"max-num-seqs": 4}}
    run = host.deploy("baseline", "--check", "--diff", swapgate_host=changed)
    assert run.code == 0, run.text[-3000:]
    plan = run.text[run.text.index("what changes, from what serves, baseline@") :]
    assert [line.strip() for line in plan.splitlines()[1:4]][:2] == ["+ --max-num-seqs 4", "+ MY_SETTING=1"], plan
    assert re.search(
        rf"{host.name}: stops 'baseline@\w{{4}}' and drops its traffic until 'baseline@\w{{4}}' has loaded", run.flat
    )
    diff = [line for line in run.text.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert sorted(diff) == ["+    --max-num-seqs 4 \\", '+Environment="MY_SETTING=1"'], run.text


def test_a_swap_under_way_is_told_at_the_first_look(host: Host) -> None:
    with host.knobs(load_s=70):
        swap_id = host.ask("ngram")
        host.await_phase(swap_id, "watch")
        other = host.deploy("baseline")
        same = host.deploy("ngram", "--check")
        assert not host.status()["swap"]["outcome"], "the swap was over before it was looked at"
        host.await_swap(swap_id, 180)
    words = rf"{host.name}: a swap to 'ngram', asked for by \w+ \d+ s ago, is in phase watch"
    assert other.code != 0 and re.search(
        words + ": a swap to 'baseline' would be refused until it has ended", other.flat
    )
    assert "Ensure facts are known" not in other.text, "it was told after minutes of roles"
    assert same.code == 0 and re.search(words + "; following it", same.flat), same.text[-3000:]


def test_an_older_host_program_still_gets_its_plan_and_its_roll_back(host: Host) -> None:
    """It knows neither `show-release` nor `ask --because`, and its status has none of the newer keys."""
    assert host.swap("ngram")["outcome"] == "swapped"
    launcher = host.sh("cat /usr/local/bin/swapgate")
    older = launcher.replace(
        "sys.exit(main())",
        "import contextlib, io, json\n"
        "if {'show-release', '--because', '--kind'} & set(sys.argv):\n"
        "    sys.exit('usage: swapgate [-h] COMMAND')\n"
        "if sys.argv[1] != 'status':\n"
        "    sys.exit(main())\n"
        "text = io.StringIO()\n"
        "with contextlib.redirect_stdout(text):\n"
        "    main()\n"
        "newer = ('way_back', 'now_unix', 'jobs')\n"
        "print(json.dumps({k: v for k, v in json.loads(text.getvalue()).items() if k not in newer}))",
    )
    assert older != launcher
    host.write("/usr/local/bin/swapgate", older, "0755")
    try:
        back = host.ansible("playbooks/rollback.yml", allow_disruption=True, because="any")
    finally:
        host.write("/usr/local/bin/swapgate", launcher, "0755")
    assert back.code == 0, back.text[-3000:]
    assert "stops 'ngram' and drops its traffic until 'baseline' has loaded" in back.flat
    assert host.active() == [BASELINE]


def test_without_consent_nothing_is_stopped(host: Host) -> None:
    before = host.picture()
    run = host.deploy("ngram", allow_disruption=False)
    assert run.code != 0
    assert f"The swap would stop baseline on {host.name} and nobody agreed" in run.flat
    assert "-e allow_disruption=true" in run.flat
    assert host.picture() == before
