"""The host program's parts that need no running systemd: its command line, preflight's rules, the engine over HTTP."""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.host_program import (
    engine_api,
    main,
    preflight,
    status,
    supervisor,
    systemd,
    transaction,
)
from ansible_collections.swapgate.core.plugins.module_utils import model_manifest, records, units

REPO = Path(__file__).resolve().parents[2]
UNIT = "vllm-tiny.service"
has_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this machine")


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The program as the role installs it: a package of two folders, and the launcher's own way of starting it."""
    root = tmp_path_factory.mktemp("lib")
    for folder in ("host_program", "module_utils"):
        shutil.copytree(
            REPO / "plugins" / folder, root / "swapgate" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    (root / "swapgate/__init__.py").touch()
    return root


def swapgate(installed, *words):
    """Run the installed program with this interpreter, isolated as the launcher does."""
    start = "from swapgate.host_program.main import main; sys.exit(main())"
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); {start}"
    return subprocess.run(
        [sys.executable, "-I", "-c", code, *words], capture_output=True, text=True, check=False, timeout=60
    )


def test_help_names_every_command_and_the_exit_codes(installed):
    done = swapgate(installed, "--help")
    assert done.returncode == 0
    for word in (
        "supervise",
        "preflight",
        "ask",
        "confirm",
        "decline",
        "swap",
        "resolve",
        "recover",
        "status",
        "way-back",
        "show-release",
        "history",
        "verify-unit",
        "exit codes:",
    ):
        assert word in done.stdout


@pytest.mark.parametrize("words", [[], ["swop"], ["preflight"], ["ask"], ["decline"], ["verify-unit"]])
def test_a_wrong_call_is_exit_code_2_and_says_what_is_expected(installed, words):
    done = swapgate(installed, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: swapgate")


def test_the_launcher_starts_this_program_from_where_the_role_puts_it():
    text = (REPO / "roles/vllm_service/files/swapgate").read_text(encoding="utf-8")
    tasks = (REPO / "roles/vllm_service/tasks/host_program.yml").read_text(encoding="utf-8")
    assert 'sys.path.insert(0, "/usr/local/lib/swapgate")' in text
    assert "path: /usr/local/lib/swapgate/swapgate" in tasks
    assert "from swapgate.host_program.main import main" in text and text.startswith("#!/usr/bin/python3 -I\n")


def test_a_broken_record_is_one_line_on_standard_error_and_exit_code_2(monkeypatch, tmp_path, capsys):
    layout = records.Layout(str(tmp_path))
    monkeypatch.setattr(records, "Layout", lambda: layout)
    layout.state_dir.mkdir(parents=True)
    layout.state.write_text("{")
    assert main.main(["way-back"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"swapgate: {layout.state}: ") and err.count("\n") == 1


def test_history_is_json_on_standard_output(monkeypatch, tmp_path, capsys):
    layout = records.Layout(str(tmp_path))
    monkeypatch.setattr(records, "Layout", lambda: layout)
    layout.state_dir.mkdir(parents=True)
    records.append_history(layout, {"id": "é"})
    assert main.main(["history"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"id": "é"}]


def test_the_same_command_is_words_on_a_terminal_and_json_for_everybody_else(installed):
    """A real pseudo-terminal, as over `ssh -t`."""
    root = Path(installed)
    start = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from swapgate.host_program.main import main; sys.exit(main())"
    )

    def on_a_terminal(*words):
        code = f"import pty, sys; sys.exit(pty.spawn([sys.executable, '-I', '-c', {start!r}, *{list(words)!r}]) >> 8)"
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout

    assert json.loads(swapgate(installed, "history").stdout) == []
    assert json.loads(on_a_terminal("history", "--json")) == []
    host = os.uname().nodename
    assert on_a_terminal("history").strip() == f"{host}: nothing to show"
    assert on_a_terminal("status").startswith(f"{host}: no variant is installed")


# --- systemd ---------------------------------------------------------------------------------------------------------


def unit_file(path, *lines):
    """A small unit of the given [Service] lines."""
    path.write_text("[Unit]\nDescription=x\n\n[Service]\n" + "".join(f"{line}\n" for line in lines))
    return str(path)


@has_analyze
def test_verify_has_nothing_to_say_about_a_good_unit(tmp_path):
    assert systemd.verify(unit_file(tmp_path / UNIT, "ExecStart=/bin/true --flag", "Restart=on-failure")) == []


@has_analyze
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RestartMode=x", "RestartMode"),
        ("Restrat=always", "Restrat"),
        ("Restart=alwys", "Failed to parse"),
        ('Environment="A=%Q"', "%Q"),
        ("ExecStartPre=/no/such/program", "/no/such/program"),
        ('ExecStartPre=/bin/echo "open', "quot"),
    ],
)
def test_verify_counts_a_warning_as_an_error(tmp_path, line, said):
    lines = systemd.verify(unit_file(tmp_path / UNIT, "ExecStart=/bin/true", line))
    assert any(said in one for one in lines), lines


@has_analyze
def test_verify_unit_is_exit_code_1_and_the_lines(installed, tmp_path):
    bad = swapgate(installed, "verify-unit", unit_file(tmp_path / UNIT, "ExecStart=/bin/true", "Restrat=always"))
    assert bad.returncode == 1 and "Restrat" in bad.stderr and bad.stdout == ""
    good = swapgate(installed, "verify-unit", unit_file(tmp_path / UNIT, "ExecStart=/bin/true"))
    assert (good.returncode, good.stderr) == (0, "")


def test_a_unit_file_that_is_not_there_is_not_passed(installed, tmp_path):
    if shutil.which("systemd-analyze"):
        assert swapgate(installed, "verify-unit", str(tmp_path / "none.service")).returncode != 0


def test_notify_reaches_a_real_socket_and_is_silent_without_one(tmp_path, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify("READY=1")
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(address)
        server.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        systemd.notify("READY=1\nSTATUS=é")
        assert server.recv(4096).decode() == "READY=1\nSTATUS=é"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        name = f"swapgate-test-{os.getpid()}"
        server.bind("\0" + name)
        server.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        systemd.notify("WATCHDOG=1")
        assert server.recv(4096) == b"WATCHDOG=1"


def test_a_systemctl_call_that_fails_is_an_error_with_its_command(tmp_path, monkeypatch):
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\necho 'Unit x not found.' >&2\nexit 5\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(systemd.SystemdError, match=r"^systemctl --no-pager start x: exit 5: Unit x not found\.$"):
        systemd.systemctl("start", "x")
    assert systemd.systemctl("start", "x", check=False) == ""
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(systemd.SystemdError, match="start x: no answer in"):
        systemd.systemctl("start", "x", limit_s=0.3)


def test_many_units_are_asked_in_one_call_and_all_but_one_disabled(tmp_path, monkeypatch):
    program = tmp_path / "systemctl"
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$2" in\n'
        '  show) printf "ActiveState=active\\n\\nActiveState=inactive\\n";;\n'
        '  is-enabled) printf "disabled\\nenabled\\n"; exit 1;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert systemd.states(["a.service", "b.service"]) == {"a.service": "active", "b.service": "inactive"}
    assert systemd.states([]) == {}
    systemd.enable_only("a.service", ["a.service", "b.service", "c.service"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        "--no-pager show a.service b.service --property=ActiveState",
        "--no-pager enable --quiet --no-reload a.service",
        "--no-pager is-enabled b.service c.service",
        "--no-pager disable --quiet --no-reload c.service",
    ]


@pytest.mark.parametrize(("told", "stale"), [(("no", "no"), False), (("no", "yes"), True)])
def test_one_changed_unit_file_is_enough_for_a_reload(tmp_path, monkeypatch, told, stale):
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\nprintf 'NeedDaemonReload={}\\n\\nNeedDaemonReload={}\\n'\n".format(*told))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert systemd.stale(["a.service", "b.service"]) is stale
    assert systemd.stale([]) is False


# --- preflight -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--load-format", "auto"], "auto"),
        (["--load-format=auto"], "auto"),
        (["--load-format"], None),
        (["--load-formats", "x"], None),
        ([], None),
    ],
)
def test_flag_value(argv, value):
    assert preflight.flag_value(argv, "--load-format") == value


@pytest.fixture
def host(tmp_path):
    """A host's files with one staged release that every rule accepts; the model and the engine are there too."""
    layout = records.Layout(str(tmp_path / "root"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    venv = tmp_path / "engines/vllm-0.32.0"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/vllm").write_text("#!/bin/sh\n")
    (venv / "bin/vllm").chmod(0o755)
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / preflight.ENGINE_MARKER).write_text("{}")
    layout.manifests.mkdir(parents=True)
    found, _ = model_manifest.list_files(str(model))
    hashes = {file.path: model_manifest.hash_file(str(model / file.path)) for file in found}
    manifest = model_manifest.build("tiny", str(model), found, hashes)
    (layout.manifests / "tiny.json").write_text(model_manifest.dump(manifest))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variant = {
        "name": "baseline",
        "unit": UNIT,
        "port": port,
        "gpus": [],
        "free_memory_mib": 1000.0,
        "accepted_risks": [],
        "env": {"PYTHONPATH": str(REPO / "tests/fake_vllm")},
        "speculative_config": None,
        "argv": [f"{venv}/bin/vllm", "serve", str(model)],
        "engine": {"package": "vllm", "version": "0.32.0", "venv": str(venv)},
        "model": {"name": "tiny", "path": str(model), "served_name": "tiny", "tensor_parallel_size": 1},
    }
    return layout, variant


def stage(layout, variant, text="[Service]\nExecStart=/bin/true\n"):
    """Stage a release of ``variant``; returns its name."""
    name = units.release_id(text, variant)
    layout.release(name).mkdir(parents=True)
    (layout.release(name) / variant["unit"]).write_text(text)
    records.write_json(layout.release(name) / "variant.json", variant)
    return name


def test_a_staged_release_is_read_back(host):
    layout, variant = host
    assert preflight.load_release(layout, stage(layout, variant)) == variant


@pytest.mark.parametrize("file", [UNIT, "variant.json"])
def test_a_release_that_was_changed_by_hand_is_not_trusted(host, file):
    layout, variant = host
    name = stage(layout, variant)
    path = layout.release(name) / file
    path.write_text(path.read_text().replace("true", "false").replace('"tiny"', '"other"'))
    with pytest.raises(records.RecordError, match=rf"release {name}: .*changed by hand\. Deploy the variant again\."):
        preflight.load_release(layout, name)


@pytest.mark.parametrize("file", [UNIT, "variant.json"])
def test_a_release_without_one_of_its_files_is_not_complete(host, file):
    layout, variant = host
    name = stage(layout, variant)
    (layout.release(name) / file).unlink()
    with pytest.raises(records.RecordError, match=f"release {name} is not complete in {layout.release(name)}"):
        preflight.load_release(layout, name)


def test_a_release_that_is_not_there_is_a_problem_and_not_a_crash(host):
    report = preflight.check(host[0], "0" * 12, [], lambda _: None)
    assert (report["ok"], [problem["check"] for problem in report["problems"]]) == (False, ["release"])


def test_what_serves_can_be_shown_and_what_it_stands_on_is_compared(host, monkeypatch):
    layout, variant = host
    name = stage(layout, variant)
    assert status.show_release(layout, status.SERVING) is None
    state = {"schema": 1, "swap": None}
    good = {"variant": "baseline", "unit": UNIT, "release": name, "identity": preflight.identity(variant, layout)}
    records.write_json(layout.state, {**state, "last_good": good})
    shown = status.show_release(layout, status.SERVING)
    assert (shown["release"], shown["serves"], shown["changed_below"]) == (name, False, [])
    assert shown["unit_text"].startswith("[Service]") and shown["variant"] == variant

    layout.units.mkdir(parents=True)
    (layout.units / UNIT).write_text("[Service]\nExecStart=/bin/edited\n")
    (layout.units / (UNIT + ".d")).mkdir()
    (layout.units / (UNIT + ".d") / "own.conf").write_text("[Service]\nNice=5\n")
    (layout.units / (UNIT + ".d") / preflight.EXCLUSION_DROPIN).write_text("# generated\n")
    records.write_json(layout.variants / "baseline.json", variant)
    monkeypatch.setattr(systemd, "show", lambda *_: {"ActiveState": "active"})
    edited = status.show_release(layout, status.SERVING)
    assert edited["serves"] and "edited" in edited["unit_text"] and edited["release"] != name
    assert edited["dropins"] == {"own.conf": "[Service]\nNice=5\n"}
    assert status.show_release(layout, name)["changed_below"] == ["drop-ins"]
    with pytest.raises(records.RecordError, match="release 000000000000 is not complete"):
        status.show_release(layout, "000000000000")


def test_a_history_says_what_a_swap_changed_and_an_unreadable_release_stops_nothing(host):
    layout, variant = host
    old = stage(layout, variant, "[Service]\nExecStart=/x -- /e serve /m --port 1\n")
    new = stage(layout, variant, "[Service]\nExecStart=/x -- /e serve /m --port 2\n")
    assert transaction.what_changes(layout, {"release": old}, new) == "--port 1 -> 2"
    assert transaction.what_changes(layout, {"release": old}, old) is None
    assert transaction.what_changes(layout, None, new) is None
    shutil.rmtree(layout.release(old))
    assert transaction.what_changes(layout, {"release": old}, new) is None


def waiting(layout, release, **over):
    """Record a swap to ``release`` in phase `confirm`, or as ``over`` says."""
    to = {"variant": "baseline", "unit": UNIT, "release": release}
    swap = {"id": "abc", "to": to, "phase": "confirm", "outcome": None, **over}
    records.write_json(layout.state, {"schema": records.SCHEMA, "last_good": None, "swap": swap})


def test_a_trial_variant_is_asked_for_only_with_a_time_to_go_back_within(host):
    layout, variant = host
    name = stage(layout, {**variant, "trial": True})
    with pytest.raises(records.RecordError, match=r"'baseline' is a trial variant: .*--confirm-within SECONDS"):
        transaction.ask(layout, name, "ann")
    assert not layout.request.exists()


def test_a_waiting_swap_is_confirmed_or_declined_and_the_answer_says_by_whom_and_why(host):
    layout, variant = host
    waiting(layout, stage(layout, variant))
    assert transaction.confirm(layout, "ann") == {"id": "abc"}
    assert records.read_json(layout.confirmation) == {"id": "abc", "by": "ann", "declined": None}
    assert transaction.decline(layout, "it is slower", "bob") == {"id": "abc"}
    assert records.read_json(layout.confirmation) == {"id": "abc", "by": "bob", "declined": "it is slower"}


def test_a_trial_variant_can_be_declined_and_never_confirmed(host):
    layout, variant = host
    waiting(layout, stage(layout, {**variant, "trial": True}))
    with pytest.raises(records.RecordError, match=r"'baseline' is a trial variant and cannot be confirmed.*decline"):
        transaction.confirm(layout, "ann")
    assert not layout.confirmation.exists()
    assert transaction.decline(layout, "measured", "ann") == {"id": "abc"}


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"phase": "soak"}, "to 'baseline', is in phase soak"),
        ({"phase": None, "outcome": "rolled_back"}, "to 'baseline', ended rolled_back"),
        (None, "none has run on this host"),
    ],
)
def test_without_a_waiting_swap_there_is_nothing_to_answer(host, over, said):
    layout, variant = host
    if over is not None:
        waiting(layout, stage(layout, variant), **over)
    for answer in (lambda: transaction.confirm(layout, "ann"), lambda: transaction.decline(layout, "x", "ann")):
        with pytest.raises(records.RecordError, match=f"no swap waits to be confirmed: .*{said}"):
            answer()


def problems(host, asked=None, **changes):
    """The preflight's problems of a changed variant, {check: text}; notes in ``asked`` whether the engine was asked."""
    layout, variant = host
    steps = []
    report = preflight.check(layout, stage(layout, {**variant, **changes}), [], steps.append)
    assert report["ok"] == (not report["problems"])
    if asked is not None:
        asked += steps
    return {problem["check"]: problem["what"] for problem in report["problems"]}


@has_analyze
def test_a_mount_that_hangs_is_a_problem_in_time(host, monkeypatch):
    back = threading.Event()
    monkeypatch.setattr(preflight, "MOUNT_LIMIT_S", 0.3)
    monkeypatch.setattr(model_manifest, "verify_headers", lambda _: [str(back.wait(20))])
    found = problems(host)
    monkeypatch.undo()
    back.set()
    assert list(found) == ["host"]
    assert found["host"].startswith(
        "{} did not answer within 0 s: a mount that hangs?".format(host[1]["model"]["path"])
    )


def test_what_a_bounded_look_raises_comes_through():
    assert preflight.within(5, "/models", lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        preflight.within(5, "/models", lambda: os.stat("/no/such/folder"))


@has_analyze
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run the engine's check as the service user")
def test_a_sound_release_passes_and_the_engine_is_not_asked_twice(host):
    layout, variant = host
    name, steps = stage(layout, variant), []
    first = preflight.check(layout, name, [], steps.append)
    assert first["problems"] == []
    assert (first["ok"], first["cached"], first["class"], first["engine_version"]) == (True, False, None, "0.32.0")
    assert first["effective"]["max_model_len"] == 64
    again = preflight.check(layout, name, [], steps.append)
    assert (again["ok"], again["cached"], again["effective"]) == (True, True, first["effective"])
    # Another engine build under the same argv is another question.
    (Path(variant["engine"]["venv"]) / preflight.ENGINE_MARKER).write_text('{"rebuilt": 1}')
    assert preflight.check(layout, name, [], steps.append)["cached"] is False


@has_analyze
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run the engine's check as the service user")
def test_what_the_engine_refuses_is_a_problem_and_not_remembered(host):
    argv = [*host[1]["argv"], "--no-such-flag"]
    for _ in range(2):
        said = problems(host, argv=argv)["engine's own parser"]
        assert "unrecognized arguments: --no-such-flag" in said
        shutil.rmtree(host[0].releases)
    assert not host[0].preflights.exists()


@has_analyze
def test_the_engines_words_and_what_to_do_are_two_sentences(host, monkeypatch):
    answer = {"ok": False, "stage": "config", "error": "ValueError: max_model_len is too long.", "version": None}
    monkeypatch.setattr(preflight, "ask_engine", lambda *_arguments: answer)
    said = problems(host)["engine's own parser"]
    assert said == "ValueError: max_model_len is too long. Correct the variant's or the model's entry."


def drafted(host, tmp_path, *argv):
    """The host's variant with a draft folder of its own, and what preflight says of its models."""
    layout, variant = host
    draft = tmp_path / "draft"
    if not draft.exists():
        shutil.copytree(variant["model"]["path"], draft)
    variant = dict(variant, speculative_config={"model": str(draft)}, argv=[*variant["argv"], *argv])
    return draft, variant, lambda: preflight._model(variant, layout)


def test_a_draft_is_held_to_the_rules_of_a_model(host, tmp_path):
    draft, variant, problems = drafted(host, tmp_path)
    # A host of an older swapgate has no manifest of a draft: no reason to refuse the way back.
    assert problems() == [] and preflight.identity(variant, host[0])["draft"] is None
    (draft / "pytorch_model.bin").write_bytes(b"x")
    assert [line for line in problems() if f"{draft}/pytorch_model.bin: found pickled weights" in line]
    (draft / "pytorch_model.bin").unlink()
    found, _ = model_manifest.list_files(str(draft))
    hashes = {file.path: model_manifest.hash_file(str(draft / file.path)) for file in found}
    name = model_manifest.draft_name("tiny", str(draft))
    manifest = model_manifest.build(name, str(draft), found, hashes)
    (host[0].manifests / f"{name}.json").write_text(model_manifest.dump(manifest))
    assert problems() == [] and preflight.identity(variant, host[0])["draft"] == manifest["id"]
    (draft / "config.json").write_text('{"model_type": "other"}')
    assert [line for line in problems() if f"model file: {draft}/config.json" in line]


def test_remote_code_that_came_after_the_manifest_is_refused(host, tmp_path):
    layout, variant = host
    Path(variant["model"]["path"], "modeling_x.py").write_text("")
    assert preflight._model(variant, layout) == []
    trusting = dict(variant, argv=[*variant["argv"], "--trust-remote-code"])
    [problem] = preflight._model(trusting, layout)
    assert "model code (trust_remote_code runs it)" in problem


@pytest.mark.parametrize("place", ["engine", "model", "draft"])
def test_what_the_engine_may_change_itself_is_refused(host, tmp_path, place):
    draft, variant, _ = drafted(host, tmp_path)
    folder = {"engine": variant["engine"]["venv"] + "/bin", "model": variant["model"]["path"], "draft": str(draft)}[
        place
    ]
    account = {"user": 4711, "group": 4711, "extra_groups": []}
    assert preflight._writable(variant, account) == []
    Path(folder).chmod(0o777)
    [problem] = preflight._writable(variant, account)
    assert problem.startswith(place) and f"{folder}: found writable by everybody" in problem


@has_analyze
def test_a_model_file_that_changed_since_its_manifest_is_refused(host):
    with (Path(host[1]["model"]["path"]) / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "model.safetensors" in problems(host)["model"]


@has_analyze
@pytest.mark.parametrize(
    ("changes", "check", "said"),
    [
        ({"engine": {"package": "vllm", "version": "0.15.0", "venv": "/v"}}, "version", "older than 0.16"),
        ({"engine": {"package": "vllm", "version": "0.21.0", "venv": "/v"}}, "version", "CVE-2026-48746"),
        ({"env": {"TRANSFORMERS_CACHE": "/x"}}, "version", "Instead: HF_HOME"),
        ({"argv": ["/no/vllm", "serve", "/m"]}, "engine", "/no/vllm is not there or not executable"),
        (
            {"gpus": [0, 1, 2], "free_memory_mib": 2048},
            "gpus",
            "tensor parallel size 1 x pipeline 1 needs 1 GPUs, swapgate_host.gpus lists 3.",
        ),
        ({"speculative_config": {"model": "/no/draft"}}, "model", "draft model /no/draft is not there"),
    ],
)
def test_a_rule_refuses_before_the_engine_is_asked(host, changes, check, said):
    asked = []
    found = problems(host, asked, **changes)
    assert said in found[check]
    assert "engine" not in asked


@has_analyze
def test_a_taken_port_is_refused_and_its_holder_named(host):
    with socket.create_server(("127.0.0.1", host[1]["port"])):
        said = problems(host)["port"]
    assert f"port {host[1]['port']} is held by pid {os.getpid()} (" in said and "not a unit of swapgate" in said


@has_analyze
def test_a_removed_flag_is_refused_with_its_successor(host):
    said = problems(host, argv=[*host[1]["argv"], "--disable-log-requests"])["version"]
    assert "no-enable-log-requests" in said


@has_analyze
def test_random_weights_are_refused(host):
    assert "serves random weights" in problems(host, argv=[*host[1]["argv"], "--load-format", "dummy"])["model"]


# --- the engine over HTTP --------------------------------------------------------------------------------------------


class Server:
    """A small HTTP server that gives one answer and remembers what it was asked."""

    def __init__(self, status, body):
        asked = self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                length = int(self.headers.get("Content-Length") or 0)
                asked.append((self.command, self.path, self.headers.get("Authorization"), self.rfile.read(length)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

            def log_message(self, *_):
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]

    def __enter__(self):
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def completion(text="Paris", tokens=3):
    """The body of a completion."""
    return json.dumps({"choices": [{"text": text}], "usage": {"completion_tokens": tokens}}).encode()


def test_a_completion_is_greedy_and_carries_the_key():
    with Server(200, completion()) as server:
        assert engine_api.complete("127.0.0.1", server.port, "tiny", 5, api_key="k") == "Paris"
    ((method, path, authorization, body),) = server.asked
    assert (method, path, authorization) == ("POST", "/v1/completions", "Bearer k")
    asked = json.loads(body)
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("tiny", 5, 0)
    assert asked["prompt"] == engine_api.PROBE_PROMPT


def test_an_engine_on_all_addresses_is_asked_on_loopback_and_without_a_key_none_is_sent():
    with Server(200, completion()) as server:
        assert engine_api.complete("0.0.0.0", server.port, "tiny") == "Paris"
    assert server.asked[0][2] is None


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"EngineDeadError", "POST /v1/completions: status 500: EngineDeadError"),
        (401, b'{"error":"Unauthorized"}', "status 401"),
        (200, b"hello", "not a completion: hello"),
        (200, b"{}", "not a completion: {}"),
        (200, b'{"choices":[],"usage":{"completion_tokens":1}}', "not a completion"),
        (200, b"[1]", "not a completion"),
        (200, completion("", 0), "an answer without a token"),
        (200, completion(tokens=1).replace(b": 1}", b": 1e999}"), "not a completion"),
        (200, b"[" * 200_000, "not a completion"),
        (500, b"\x1b]0;OWNED\x07", "status 500: \\x1b]0;OWNED\\x07"),
        (200, b" " * ((16 << 20) + 1), "an answer of more than 16 MiB"),
    ],
)
def test_anything_but_an_answer_is_an_error_that_shows_what_came(status, body, said):
    with Server(status, body) as server, pytest.raises(engine_api.EngineError) as caught:
        engine_api.complete("127.0.0.1", server.port, "tiny")
    assert said in str(caught.value)


def test_nobody_there_and_a_server_that_hangs_are_errors_within_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(engine_api.EngineSilent, match="POST /v1/completions: timed out"):
            engine_api.complete("127.0.0.1", silent.getsockname()[1], "tiny", limit_s=0.2)
        port = silent.getsockname()[1]
    with pytest.raises(engine_api.EngineError, match="refused") as caught:
        engine_api.complete("127.0.0.1", port, "tiny")
    assert not isinstance(caught.value, engine_api.EngineSilent)


def drip(server, every_s):
    """A server that answers with one more byte now and then, for as long as somebody listens."""
    link, _ = server.accept()
    with link, contextlib.suppress(OSError):
        link.recv(4096)
        link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
        while True:
            link.sendall(b"x")
            time.sleep(every_s)


def test_a_server_that_sends_a_byte_now_and_then_is_silent_when_the_whole_time_is_over():
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server, 0.1), daemon=True)
        thread.start()
        with pytest.raises(engine_api.EngineSilent, match=r"GET /metrics: timed out after 0\.5 s"):
            engine_api.request("127.0.0.1", server.getsockname()[1], "GET", "/metrics", limit_s=0.5)
        thread.join(10)
        assert not thread.is_alive(), "the connection is still open"


@pytest.mark.parametrize("key", ["schlüssel-\u4f60", "two\nlines"])
def test_a_key_that_no_header_can_hold_is_an_error_of_the_call(key):
    with Server(200, completion()) as server, pytest.raises(engine_api.EngineError):
        engine_api.complete("127.0.0.1", server.port, "tiny", api_key=key)
    assert server.asked == []


@pytest.mark.parametrize("error", [RuntimeError("x"), RecursionError(), OverflowError()])
def test_a_probe_that_breaks_is_no_answer(monkeypatch, error):
    def breaks(*_):
        raise error

    monkeypatch.setattr(engine_api, "served_names", breaks)
    probe = supervisor.Probe({"bind": "127.0.0.1", "port": 1, "model": {"served_name": "x"}}, None, 1)
    probe._thread.join(10)
    assert probe.done and probe.error, "READY without a completion"


def test_the_load_of_a_server_is_none_where_its_page_does_not_come():
    page = b'vllm:num_requests_running{m="a"} 2.0\nvllm:generation_tokens_total{m="a"} 7.0\n'
    with Server(200, page) as server:
        assert engine_api.load("127.0.0.1", server.port, 1.0) == {"running": 2.0, "waiting": None, "tokens": 7.0}
    with Server(500, b"") as server:
        assert engine_api.load("127.0.0.1", server.port, 1.0) is None
    with Server(200, b"vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n") as server:
        assert engine_api.load("127.0.0.1", server.port, 1.0) == {"running": None, "waiting": None, "tokens": None}


def test_served_names_and_metrics():
    with Server(200, b'{"data": [{"id": "a"}, {"id": "b"}]}') as server:
        assert engine_api.served_names("127.0.0.1", server.port) == ["a", "b"]
    with Server(200, b"{}") as server, pytest.raises(engine_api.EngineError, match="not a list of models"):
        engine_api.served_names("127.0.0.1", server.port)
    with Server(200, b'x{a="1"} 2\n') as server:
        assert engine_api.samples("127.0.0.1", server.port) == [("x", {"a": "1"}, 2.0)]


@pytest.mark.parametrize(
    ("trial", "runner", "refused"),
    [(True, "V2", True), (True, "V1", False), (True, None, False), (False, "V2", False)],
)
def test_a_trial_is_refused_where_the_engine_would_fix_k_at_its_start(trial, runner, refused):
    variant = {"name": "ngram_trial", **({"trial": True} if trial else {})}
    found = preflight._trial(variant, {"model_runner": runner})
    assert bool(found) is refused
    assert not refused or ("model runner V2" in found[0] and "VLLM_USE_V2_MODEL_RUNNER: 0" in found[0])
