"""What a person reads before an outage: each kind of change as a line, and nothing that is no change."""

import copy
import json

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import difference, units
from hypothesis import given, settings
from hypothesis import strategies as st

VARIANT = {
    "name": "ngram",
    "description": "drafts",
    "unit": "vllm-m-ngram.service",
    "model": {"name": "m", "path": "/srv/m", "source": None},
    "engine": {"package": "vllm", "version": "0.31.0", "venv": "/opt/e"},
    "argv": [],
    "env": {},
    "gpus": [0, 1],
    "speculative_config": {"method": "ngram"},
    "soak_s": 60,
    "drain_timeout_s": 30,
}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
FLAGS = {"host": "127.0.0.1", "max-num-seqs": "8", "enforce-eager": None, "speculative-config": json.dumps(SPECULATIVE)}
ENVIRONMENT = {"A": "1", "B": 'two "words"'}
KEY = "# Another key is another release: {}\nLoadCredential=vllm_api_key:/etc/swapgate/credentials/vllm_api_key\n"


def unit(flags=FLAGS, environment=ENVIRONMENT, more="TimeoutStopSec=90\n"):
    """A unit as the template renders it, of these flags, environment and settings."""
    argv = ["/opt/e/bin/vllm", "serve", "/srv/m"]
    for flag, value in flags.items():
        argv += ["--" + flag] + ([] if value is None else [value])
    command = " \\\n    ".join(units.exec_lines(argv))
    lines = [f"ExecStart=/usr/local/bin/swapgate supervise ngram -- \\\n    {command}"]
    lines += ["Environment=" + units.quote_environment(*item) for item in environment.items()]
    return "# rendered\n[Service]\n" + "\n".join(lines) + "\n" + more


def told(old=VARIANT, old_text=None, new=VARIANT, new_text=None):
    """The lines and the words of one change."""
    found = difference.changes(old, old_text or unit(), new, new_text or unit())
    return difference.lines(found), difference.words(found)


def without(table, name):
    """The table without one of its names."""
    return {key: value for key, value in table.items() if key != name}


@pytest.mark.parametrize(
    ("flags", "line", "words"),
    [
        ({**FLAGS, "host": "0.0.0.0"}, "--host 127.0.0.1 -> 0.0.0.0", "--host 127.0.0.1 -> 0.0.0.0"),
        (without(FLAGS, "enforce-eager"), "- --enforce-eager", "- --enforce-eager"),
        ({**FLAGS, "dtype": "float32"}, "+ --dtype float32", "+ --dtype float32"),
        (
            {**FLAGS, "speculative-config": json.dumps({**SPECULATIVE, "num_speculative_tokens": 3})},
            "--speculative-config: num_speculative_tokens 5 -> 3",
            "speculation",
        ),
        ({**FLAGS, "api-key": "hidden"}, "+ --api-key (not shown)", "+ --api-key (not shown)"),
    ],
)
def test_a_flag(flags, line, words):
    assert told(new_text=unit(flags)) == ([line], words)


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({**ENVIRONMENT, "MY_SETTING": "1"}, "+ MY_SETTING=1"),
        (without(ENVIRONMENT, "A"), "- A=1"),
        ({**ENVIRONMENT, "B": "100 %"}, 'B two "words" -> 100 %'),
        ({**ENVIRONMENT, "X_TOKEN": "hidden"}, "+ X_TOKEN (not shown)"),
        ({**ENVIRONMENT, "TOKENIZERS_PARALLELISM": "false"}, "+ TOKENIZERS_PARALLELISM=false"),
    ],
)
def test_the_environment(environment, line):
    assert told(new_text=unit(environment=environment))[0] == [line]


@pytest.mark.parametrize(
    ("over", "line", "words"),
    [
        ({"engine": {**VARIANT["engine"], "version": "0.32.0"}}, "engine vllm 0.31.0 -> vllm 0.32.0", "engine"),
        ({"model": {**VARIANT["model"], "path": "/srv/n"}}, "weights in /srv/m -> /srv/n", "model"),
        (
            {"model": {**VARIANT["model"], "source": {"repo": "o/m", "revision": "abc"}}},
            "weights from nowhere -> o/m@abc",
            "model",
        ),
        ({"gpus": [2, 3]}, "GPUs 0 1 -> 2 3", "GPUs"),
        ({"soak_s": 5}, "soak_s 60 -> 5", "soak_s 60 -> 5"),
        ({"description": "more"}, "description drafts -> more", "description drafts -> more"),
    ],
)
def test_what_no_unit_holds(over, line, words):
    assert told(new={**copy.deepcopy(VARIANT), **over}) == ([line], words)


def test_a_setting_of_the_unit_and_what_follows_from_one_is_told_once():
    assert told(new_text=unit(more="TimeoutStopSec=95\nUser=vllm\n"))[0] == ["TimeoutStopSec 90 -> 95", "+ User=vllm"]
    drained = {**VARIANT, "drain_timeout_s": 40}
    assert told(new=drained, new_text=unit(more="TimeoutStopSec=100\n"))[0] == ["drain_timeout_s 30 -> 40"]
    many = "".join(f"SystemCallFilter={word}\n" for word in ("@a", "@b", "@c"))
    assert told(old_text=unit(more=many), new_text=unit(more=many.replace("@b", "~@x")))[0] == [
        "SystemCallFilter @b -> ~@x"
    ]


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (KEY.format("11aa"), KEY.format("22bb"), ["only the API key"]),
        ("", KEY.format("22bb"), ["+ an API key"]),
        (KEY.format("11aa"), "", ["- the API key"]),
    ],
)
def test_an_api_key_is_told_and_never_shown(old, new, lines):
    assert told(old_text=unit(more=old), new_text=unit(more=new)) == (lines, "key")


def test_what_an_older_swapgate_did_not_write_is_no_change_and_neither_are_comments():
    newer = {**VARIANT, "prove_links": False, "stall_timeout_s": None, "slot": "main"}
    assert told(new=newer, new_text=unit() + "# new words\n") == (["nothing but comments of the unit"], "comments")


def test_a_unit_that_somebody_broke_is_still_compared():
    broken = unit().replace("ExecStart=", 'ExecStart="')
    assert told(old_text=broken)[0] != []
    assert difference.changes(VARIANT, "", VARIANT, unit())


def test_drop_ins_that_no_longer_hold_and_those_that_will():
    found = difference.dropins({"own.conf": "a", "both.conf": "b"}, {"both.conf": "c", "new.conf": "d"}, "x.service")
    assert difference.lines(found) == [
        "- drop-in own.conf, which does not hold for x.service",
        "+ drop-in new.conf of x.service",
        "drop-in both.conf: another text",
    ]


def test_many_changes_are_a_few_words_in_the_history():
    found = told(
        new={**VARIANT, "engine": {**VARIANT["engine"], "version": "0.32.0"}},
        new_text=unit({**FLAGS, "host": "::"}, {**ENVIRONMENT, "C": "1"}),
    )
    assert found[1] == "engine, flags, environment" and len(found[0]) == 3


@settings(deadline=None)
@given(
    st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=30).filter(
        lambda text: not text.startswith(("-", "{"))
    )
)
def test_a_value_that_did_not_change_is_never_told(value):
    with_value = unit({**FLAGS, "odd": value}, {**ENVIRONMENT, "ODD": value})
    assert difference.changes(VARIANT, with_value, VARIANT, with_value) == []
    lines, _ = told(new_text=with_value)
    assert [line.split("=")[0].split(" ")[1] for line in lines] == ["--odd", "ODD"]
