"""Quoting for systemd, by a model of how it reads words and by a real systemd; exclusions; the name of a release."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import unit_text, units
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parents[2]
SANDBOX = REPO / "scripts/sandbox.py"
GOLDEN = REPO / "tests/golden"
HOST, SSH_PORT = "quoting", 2291
# A shared machine is slow at times; only a wrong answer is a failure.
properties = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NASTY = [
    "",
    ";",
    "; rm",
    "a;b",
    "\\;",
    "\\\\;",
    "$x",
    "${x}",
    "$",
    "$$",
    "$$x",
    "a$x",
    "a${x}b",
    "$(id)",
    "`id`",
    "%i",
    "%",
    "%%",
    "%%i",
    "50 %",
    "\\",
    "\\\\",
    "\\n",
    "\\x41",
    "\\$x",
    '"',
    '""',
    "'",
    "''",
    "it's",
    '"quoted"',
    'half "',
    "tab\there",
    "line\nbreak",
    "\n",
    "ends in a break\n",
    "break\n",
    "\r\n",
    "\v\f",
    "\x01",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\xa0",
    " lead",
    "trail ",
    " ",
    "-dash",
    "--",
    "-",
    "--flag=a b",
    "--json",
    "@x",
    ":",
    "+",
    "!",
    "|",
    "||",
    "&&",
    ">",
    "*",
    "?",
    "[a]",
    "~",
    "~root",
    "#c",
    "a#b",
    "a=b",
    "é ü 漢字 😀",
    "\u2028",
    "\ufeffmark",
    '{"method":"ngram","a b":[1,2.5,null],"c":"$x %i \\\\ \\" \\u00e9"}',
    '{"deep":{"quote":"it\'s \\"x\\"","percent":"100%"}}',
    "a" * 5000,
]
NASTY_ENVIRONMENT = {
    "PLAIN": "1",
    "EMPTY": "",
    "DOLLAR": "$x ${x} $$ $(id)",
    "PERCENT": "%i %% 100 %",
    "QUOTES": "\" ' \\ \\n \\x41",
    "JSON": '{"a b": "c", "d": "\\""}',
    "SPACES": "  two  words  ",
    "BREAKS": "tab\tline\nbreak\n",
    "SEMICOLON": "a; b",
    "HASH": "#x",
    "UNICODE": "é 漢字 😀",
    "EQUALS": "a=b=c",
    "BACKSLASH_END": "x\\",
}

ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=30)


# --- a model of how systemd reads a setting --------------------------------------------------------------------------


def split_words(text):
    """systemd's words of a setting: blanks part them, quotes hold them together, C escapes count inside and outside."""
    words, word, quote, place = [], None, "", 0
    while place < len(text):
        char = text[place]
        place += 1
        if char == "\\":
            escape = text[place]
            if escape == "x":
                word = (word or "") + chr(int(text[place + 1 : place + 3], 16))
                place += 3
            else:
                word = (word or "") + ESCAPES[escape]
                place += 1
        elif quote:
            if char == quote:
                quote = ""
            else:
                word += char
        elif char in "\"'":
            quote, word = char, word or ""
        elif char in " \t\n\r":
            if word is not None:
                words.append(word)
            word = None
        else:
            assert char != ";" or word is not None, "a bare semicolon parts two commands"
            word = (word or "") + char
    assert not quote, "a quote that does not close"
    return words if word is None else [*words, word]


def expand_specifiers(word):
    """``%%`` is a percent sign; any other specifier would be replaced, which no word of ours wants."""
    parts = re.split("%%", word)
    assert not any("%" in part for part in parts), f"a specifier in {word!r}"
    return "%".join(parts)


def expand_variables(word):
    """``$$`` is a dollar sign; any other dollar would be replaced."""
    parts = word.split("$$")
    assert not any("$" in part for part in parts), f"a variable in {word!r}"
    return "$".join(parts)


def exec_words(text):
    """The argv that systemd makes of an Exec line's text."""
    return [expand_variables(expand_specifiers(word)) for word in split_words(text)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b", ["a", "b"]),
        ('"a b" c', ["a b", "c"]),
        ("''", [""]),
        ('a"b c"d', ["ab cd"]),
        (r"\x41\n", ["A\n"]),
        ("%%i $$x", ["%i", "$x"]),
        (r'"\"\\"', ['"\\']),
    ],
)
def test_the_model_reads_words_as_systemd_documents_it(text, words):
    assert exec_words(text) == words


@pytest.mark.parametrize("text", ["$x", "${x}", "%i", "a ; b", '"open'])
def test_the_model_refuses_what_systemd_would_replace(text):
    with pytest.raises(AssertionError):
        exec_words(text)


# --- quoting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", NASTY)
def test_a_quoted_word_comes_back_from_the_model(word):
    quoted = units.quote(word)
    assert exec_words(quoted) == [word]
    assert not re.search(r"[\x00-\x1f\x7f]", quoted)


@properties
@given(TEXT)
@example("abc\n")
def test_any_word_comes_back_from_the_model(word):
    assert exec_words(units.quote(word)) == [word]


@properties
@given(st.lists(TEXT, min_size=1, max_size=6))
def test_any_argv_comes_back_from_lines_joined_as_the_template_joins_them(argv):
    text = " \\\n    ".join(units.exec_lines(argv))
    assert "\n" not in text.replace(" \\\n    ", "")
    assert exec_words(text.replace("\\\n", " ")) == argv


@properties
@given(TEXT)
@example("abc\n")
def test_any_environment_value_comes_back_from_the_model(value):
    assignment = units.quote_environment("NAME", value)
    assert [expand_specifiers(word) for word in split_words(assignment)] == ["NAME=" + value]
    assert not re.search(r"[\x00-\x1f\x7f]", assignment)


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("--port", "--port"),
        ("8000", "8000"),
        ("/srv/a-b_c.d", "/srv/a-b_c.d"),
        ("a=b:c,d@e+f", "a=b:c,d@e+f"),
        ("100%", "100%%"),
        ("$x", "$$x"),
        ("", '""'),
        (";", '";"'),
        ("a b", '"a b"'),
        ('{"a":1}', r'"{\"a\":1}"'),
        ("\n", r'"\x0a"'),
    ],
)
def test_quotes_stand_only_where_they_are_needed(word, quoted):
    assert units.quote(word) == quoted


def test_a_unit_shows_a_flag_a_line():
    argv = ["/bin/vllm", "serve", "/srv/m", "--port", "8000", "--trust-remote-code", "--stop", "a", "b c"]
    assert units.exec_lines(argv) == ["/bin/vllm serve /srv/m", "--port 8000", "--trust-remote-code", '--stop a "b c"']
    assert units.exec_lines(["--a", "--b"]) == ["--a", "--b"]


# --- quoting, by a real systemd --------------------------------------------------------------------------------------


def sandbox(*words, text=None):
    """Run scripts/sandbox.py; returns its standard output."""
    done = subprocess.run(
        [sys.executable, str(SANDBOX), *words], input=text, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"sandbox.py {' '.join(words)}: exit {done.returncode}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def host():
    """A throwaway systemd host; a function that runs one command line there, with a text on its standard input."""
    sandbox("up", HOST, "--ssh-port", str(SSH_PORT), "--bind-ro", f"{GOLDEN}:/golden")
    yield lambda command, text=None: sandbox("ssh", HOST, "--", command, text=text)
    sandbox("destroy", HOST)


DUMP = """\
import json, os, sys
json.dump({"argv": sys.argv[1:], "environment": {key: os.environ[key] for key in os.environ}}, sys.stdout)
"""


@pytest.mark.host
def test_nasty_words_reach_a_program_unchanged_through_a_real_systemd(host):
    flags = [word for nasty in NASTY for word in ("--next", nasty)]
    argv = ["/usr/bin/python3", "/opt/dump.py", *NASTY, *flags]
    unit = "[Service]\nType=oneshot\nStandardOutput=truncate:/run/dump.json\nExecStart={}\n{}".format(
        " \\\n    ".join(units.exec_lines(argv)),
        "".join(f"Environment={units.quote_environment(*item)}\n" for item in NASTY_ENVIRONMENT.items()),
    )
    host("cat > /opt/dump.py", DUMP)
    host("cat > /etc/systemd/system/quoting.service", unit)
    said = host("systemd-analyze verify --man=no /etc/systemd/system/quoting.service 2>&1")
    host("systemctl daemon-reload && systemctl start quoting.service")
    got = json.loads(host("cat /run/dump.json"))
    assert got["argv"] == argv[2:]
    assert {key: got["environment"].get(key) for key in NASTY_ENVIRONMENT} == NASTY_ENVIRONMENT
    assert [line for line in said.splitlines() if "quoting" in line] == []


@pytest.mark.host
def test_systemd_has_nothing_to_say_about_the_golden_units(host):
    host("mkdir -p /usr/local/bin && ln -sf /bin/true /usr/local/bin/swapgate")
    said = host(
        "for unit in /golden/*/*.service; do systemd-analyze verify --man=no $unit 2>&1 | grep -F ${unit##*/};"
        " echo exit ${PIPESTATUS[0]} $unit; done"
    )
    units_ = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*.service"))
    assert len(units_) == 16
    assert said.splitlines() == [f"exit 0 /golden/{unit}" for unit in units_]


# --- what excludes what ----------------------------------------------------------------------------------------------


def variant(unit, port, gpus=()):
    """The keys of a resolved variant that exclusions look at."""
    return {"unit": unit + ".service", "port": port, "gpus": list(gpus)}


@pytest.mark.parametrize(
    ("variants", "shares"),
    [
        ([], {}),
        ([variant("a", 1)], {"a": ""}),
        ([variant("a", 1), variant("b", 1)], {"a": "b", "b": "a"}),
        ([variant("a", 1), variant("b", 2)], {"a": "", "b": ""}),
        ([variant("a", 1, [0, 1]), variant("b", 2, [1, 2]), variant("c", 3, [2])], {"a": "b", "b": "ac", "c": "b"}),
        ([variant("a", 1, [0]), variant("b", 2, [1])], {"a": "", "b": ""}),
        ([variant("c", 1), variant("a", 1), variant("b", 1)], {"a": "bc", "b": "ac", "c": "ab"}),
        ([variant("a", 1), variant("a", 1)], {"a": ""}),
    ],
)
def test_exclusions(variants, shares):
    wanted = {unit + ".service": [other + ".service" for other in others] for unit, others in shares.items()}
    assert units.exclusions(variants) == wanted


VARIANT = st.builds(variant, st.sampled_from("abcde"), st.integers(1, 3), st.lists(st.integers(0, 3), max_size=3))


@properties
@given(st.lists(VARIANT, max_size=5, unique_by=lambda one: one["unit"]))
def test_exclusions_are_symmetric_and_among_sharers_only(variants):
    by_unit = {one["unit"]: one for one in variants}
    shares = units.exclusions(variants)
    assert set(shares) == set(by_unit)
    for unit, one in by_unit.items():
        for other_unit, other in by_unit.items():
            sharing = one["port"] == other["port"] or bool(set(one["gpus"]) & set(other["gpus"]))
            assert (other_unit in shares[unit]) is (sharing and unit != other_unit)
            assert (other_unit in shares[unit]) is (unit in shares[other_unit])


def test_the_drop_in_orders_and_excludes():
    assert units.exclusion_dropin(["a.service", "b.service"]) == (
        units.EXCLUSION_HEADER + "\n[Unit]\nConflicts=a.service b.service\nAfter=a.service b.service\n"
    )
    assert units.exclusion_dropin([]) == units.EXCLUSION_HEADER + "\n"


# --- the name of a release -------------------------------------------------------------------------------------------


def test_a_release_is_named_by_its_text_and_data():
    name = units.release_id("text", {"a": 1, "b": [2]})
    assert re.fullmatch("[0-9a-f]{12}", name)
    assert name == units.release_id("text", {"b": [2], "a": 1})
    assert len({name, units.release_id("text ", {"a": 1, "b": [2]}), units.release_id("text", {"a": 1, "b": [3]})}) == 3


def test_a_release_keeps_its_name_from_one_version_of_swapgate_to_the_next():
    # Another hash here would make every staged release of every host look changed by hand.
    assert units.release_id("[Unit]\n", {"name": "é", "port": 8000}) == "ac001b353c99"


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line_of_a_unit(separator):
    text = f"[Unit]\nDescription=x{separator}[Service]{separator}User=root\n[Service]\nUser=vllm\n"
    assert [(key, value) for section, key, value in unit_text.parse(text) if section == "Service"] == [("User", "vllm")]
