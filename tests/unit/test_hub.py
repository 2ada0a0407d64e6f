"""Fetching a model: the stand-in hub against plain HTTP, and the fetch program against the stand-in.

The program needs huggingface_hub: in this interpreter, or in the one that SWAPGATE_HUB_PYTHON names.
"""

import hashlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import model_manifest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = REPO / "roles/model_cache/files/fetch_model.py"
NAME = "acme/tiny"
# Larger than the 10 MiB that huggingface_hub hands over at a time, so that a cut leaves something to go on from.
LARGE = 24 * 2**20
CUT = 21 * 2**20
DEADLINE_S = 60
TOKEN = {"HF_TOKEN": "hf_secret"}

spec = importlib.util.spec_from_file_location("fetch_model", PROGRAM)
assert spec and spec.loader
fetch_model = importlib.util.module_from_spec(spec)
sys.modules["fetch_model"] = fetch_model
spec.loader.exec_module(fetch_model)


def hub_python() -> str | None:
    """An interpreter with huggingface_hub, or None."""
    named = os.environ.get("SWAPGATE_HUB_PYTHON")
    if named:
        return named
    return sys.executable if importlib.util.find_spec("huggingface_hub") else None


needs_client = pytest.mark.skipif(hub_python() is None, reason="needs huggingface_hub (or SWAPGATE_HUB_PYTHON)")


@pytest.fixture
def root(tmp_path):
    """A hub's folder with one model of two weight files, a pickle and a dotfile."""
    folder = tmp_path / "hub" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "empty.txt").write_text("")
    (folder / "model-1.safetensors").write_bytes(os.urandom(LARGE))
    (folder / "model-2.safetensors").write_bytes(os.urandom(5000))
    (folder / "pytorch_model.bin").write_bytes(bytes(5000))
    (folder / ".gitattributes").write_text("*")
    return tmp_path / "hub"


@contextmanager
def hub(root, **options):
    """The stand-in as a process; yields what it printed, plus `requests()`."""
    log = root.parent / f"requests-{time.monotonic_ns()}.jsonl"
    extra = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    command = [sys.executable, str(REPO / "tests/hub/serve.py"), "--root", str(root), "--log", str(log), *extra]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        served = json.loads(process.stdout.readline())
        served["commit"] = served["repos"][NAME]
        served["requests"] = lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        try:
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0


def get(served, path, method="GET", **headers):
    request = urllib.request.Request(served["endpoint"] + path, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return answer.status, dict(answer.headers), answer.read()


def refused(served, path, **headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(served, path, **headers)
    with caught.value as error:
        return error.code, error.headers.get("X-Error-Code")


def command_of(served, path, *more):
    words = [hub_python(), str(PROGRAM), "--repo", NAME, "--revision", served["commit"]]
    return [*words, "--endpoint", served["endpoint"], "--path", str(path), *more]


def fetch(served, path, *more, **environment):
    done = subprocess.run(
        command_of(served, path, *more),
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_the_stand_in_lists_in_pages_and_serves_parts(root):
    with hub(root, page=2) as served:
        commit = served["commit"]
        assert json.loads(get(served, f"/api/models/{NAME}")[2])["sha"] == commit
        assert json.loads(get(served, f"/api/models/{NAME}/revision/main")[2])["sha"] == commit
        _status, headers, body = get(served, f"/api/models/{NAME}/tree/{commit}?recursive=true")
        assert len(json.loads(body)) == 2
        assert headers["Link"].endswith('rel="next"')
        _status, headers, body = get(served, f"/{NAME}/resolve/{commit}/model-2.safetensors", method="HEAD")
        content = (root / NAME / "model-2.safetensors").read_bytes()
        assert headers["ETag"] == f'"{hashlib.sha256(content).hexdigest()}"'
        assert (headers["Content-Length"], headers["X-Repo-Commit"], body) == ("5000", commit, b"")
        part = get(served, f"/{NAME}/resolve/{commit}/model-2.safetensors", Range="bytes=4990-")
        assert (part[0], part[1]["Content-Range"], part[2]) == (206, "bytes 4990-4999/5000", content[4990:])


def test_the_stand_in_refuses_as_the_hub_does(root):
    (root / NAME / ".gated").write_text("hf_secret\n")
    with hub(root) as served:
        path = f"/{NAME}/resolve/{served['commit']}/config.json"
        assert refused(served, "/api/models/acme/none") == (404, "RepoNotFound")
        assert refused(served, path) == (401, "GatedRepo")
        assert refused(served, path, Authorization="Bearer other") == (403, "GatedRepo")
        token = {"Authorization": "Bearer hf_secret"}
        assert get(served, path, **token)[0] == 200
        assert refused(served, f"/{NAME}/resolve/main/none.json", **token) == (404, "EntryNotFound")
        assert refused(served, f"/{NAME}/resolve/{'0' * 40}/config.json", **token) == (404, "RevisionNotFound")
        assert refused(served, path, Range="bytes=99-", **token) == (416, None)


def test_what_is_fetched_and_what_never():
    names = ["config.json", "model.safetensors", "pytorch_model.BIN", "x.pt", "flax.msgpack", ".cache/a", "onnx/m.onnx"]
    files = [fetch_model.Remote(name, 1, "", None) for name in names]
    chosen, skipped = fetch_model.choose(files, "acme/tiny@0")
    assert [file.path for file in chosen] == names[:2]
    assert skipped == names[2:]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["config.json", "pytorch_model.bin"],
            "found only pickled weights (pytorch_model.bin), expected *.safetensors",
        ),
        (["config.json"], "found no weights, expected *.safetensors"),
        (["../../etc/x", "m.safetensors"], "found a path out of the folder"),
        (["/etc/x", "m.safetensors"], "found a path out of the folder"),
    ],
)
def test_a_repo_that_cannot_be_used_is_refused(names, expected):
    with pytest.raises(fetch_model.Problem) as caught:
        fetch_model.choose([fetch_model.Remote(name, 1, "", None) for name in names], "acme/tiny@0")
    assert expected in str(caught.value)


def test_the_program_and_the_manifest_agree_on_names():
    assert fetch_model.PICKLE_SUFFIXES == model_manifest.PICKLE_SUFFIXES
    assert fetch_model.SOURCE_FILE == model_manifest.SOURCE_FILE
    assert fetch_model.WEIGHTS_SUFFIX == model_manifest.WEIGHTS_SUFFIX


@pytest.mark.parametrize("revision", ["main", "abc123", "A" * 40, "0" * 41])
def test_a_revision_that_can_move_is_refused(revision, capsys, tmp_path):
    assert fetch_model.main(["--repo", NAME, "--revision", revision, "--path", str(tmp_path / "m")]) == 1
    assert f"found {revision}, expected 40 hexadecimal digits as revision" in capsys.readouterr().err


@needs_client
def test_a_model_is_fetched_once_with_its_hashes(root, tmp_path):
    target = tmp_path / "models" / "tiny"
    with hub(root, page=2) as served:
        code, report, _error = fetch(served, target, "--plan")
        assert (code, report["state"], target.parent.exists()) == (0, "missing", False)
        code, report, error = fetch(served, target)
        assert (code, report["state"]) == (0, "fetched"), error
        assert sorted(report["skipped"]) == [".gitattributes", "pytorch_model.bin"]
        asked = len(served["requests"]())
        code, report, _error = fetch(served, target)
        assert (code, report["state"], len(served["requests"]())) == (0, "present", asked)
        assert not any("pytorch_model.bin" in request["path"] for request in served["requests"]())
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    for path in target.iterdir():
        assert path.stat().st_mode & 0o777 == 0o644
        if path.name != model_manifest.SOURCE_FILE:
            assert path.read_bytes() == (root / NAME / path.name).read_bytes()
    found, _problems = model_manifest.list_files(str(target))
    record = json.loads((target / model_manifest.SOURCE_FILE).read_text())
    assert model_manifest.plan_hashes(found, model_manifest.known_hashes(str(target), [record]))[1] == []


@needs_client
def test_a_cut_connection_goes_on_in_the_same_run(root, tmp_path):
    with hub(root, cut_after=CUT) as served:
        code, _report, error = fetch(served, tmp_path / "tiny")
        assert code == 0, error
        ranges = [request["range"] for request in served["requests"]() if request["path"].endswith("-1.safetensors")]
    assert len(ranges) == 2
    assert ranges[1].startswith("bytes=")
    assert int(ranges[1][6:-1]) >= 10 * 2**20
    assert (tmp_path / "tiny/model-1.safetensors").read_bytes() == (root / NAME / "model-1.safetensors").read_bytes()


@needs_client
def test_a_killed_fetch_goes_on_where_it_was(root, tmp_path):
    target = tmp_path / "tiny"
    with hub(root, stall_after=CUT) as served:
        partial = tmp_path / f"tiny.{served['commit'][:12]}.partial"
        growing = partial / "model-1.safetensors.incomplete"
        with subprocess.Popen(command_of(served, target), stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + DEADLINE_S
            while not (growing.exists() and growing.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            second_code, _report, second_error = fetch(served, target)
            process.kill()
        assert (second_code, "found another fetch under way" in second_error) == (1, True)
        assert not target.exists()
        had = growing.stat().st_size
        assert had >= 10 * 2**20
    with hub(root) as served:
        code, report, error = fetch(served, target)
        assert (code, report["state"]) == (0, "fetched"), error
        assert report["resumed_mib"] >= had // 2**20
        asked = [request for request in served["requests"]() if "resolve" in request["path"]]
    # The small files came whole the first time; of the large one only the rest is asked for.
    assert [(request["path"].rsplit("/", 1)[1], request["range"]) for request in asked] == [
        ("model-1.safetensors", f"bytes={had}-")
    ]
    assert (target / "model-1.safetensors").read_bytes() == (root / NAME / "model-1.safetensors").read_bytes()


@needs_client
def test_damage_in_an_interrupted_fetch_is_found_and_fetched_anew(root, tmp_path):
    target = tmp_path / "tiny"
    with hub(root) as served:
        partial = tmp_path / f"tiny.{served['commit'][:12]}.partial"
        partial.mkdir()
        (partial / "model-1.safetensors.incomplete").write_bytes(bytes(CUT))
        code, _report, error = fetch(served, target)
        assert code == 1
        assert f"fetched file: {partial}/model-1.safetensors: found other content" in error
        assert not target.exists()
        code, report, error = fetch(served, target)
        assert (code, report["state"]) == (0, "fetched"), error


@needs_client
def test_what_lies_at_the_path_is_never_replaced(root, tmp_path):
    target = tmp_path / "tiny"
    target.mkdir()
    with hub(root) as served:
        code, _report, error = fetch(served, target)
        assert (code, "found a folder that was not fetched from a hub" in error) == (1, True)
        record = {"repo": NAME, "revision": "1" * 40, "files": []}
        (target / model_manifest.SOURCE_FILE).write_text(json.dumps(record))
        code, _report, error = fetch(served, target)
        assert (code, f"found {NAME}@{'1' * 40}, expected {NAME}@{served['commit']}" in error) == (1, True)
        assert served["requests"]() == []


@needs_client
def test_each_refusal_is_one_line(root, tmp_path):
    (root / NAME / ".gated").write_text("hf_secret")
    target = tmp_path / "tiny"
    with hub(root) as served:
        lines = {
            "found a gated repo, expected access to it": fetch(served, target),
            "found no such repo": fetch(served, target, "--repo", "acme/none"),
            "found no such revision": fetch(served, target, "--revision", "0" * 40, **TOKEN),
            "MiB free, expected 25 MiB": fetch(served, target, "--min-free-mib", "999999999", **TOKEN),
        }
        for expected, (code, report, error) in lines.items():
            assert (code, report, error.count("\n")) == (1, None, 1), error
            assert expected in error
            assert "next: " in error
        assert not target.exists()
        assert fetch(served, target, **TOKEN)[0] == 0


def plain_order(tmp_path, endpoint):
    return fetch_model.Order(NAME, "0" * 40, endpoint, tmp_path / "tiny", 0)


def test_a_token_is_never_sent_in_the_clear(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(fetch_model.Problem, match=r"a token for http://mirror\.example\.org, expected") as refusal:
        fetch_model.run(plain_order(tmp_path, "http://mirror.example.org"), plan=True)
    assert "hf_secret" not in str(refusal.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example.org")
    with pytest.raises(fetch_model.Problem, match="a token for"):
        fetch_model.check_transport(plain_order(tmp_path, None))


def test_hashes_that_came_in_the_clear_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    [notice] = fetch_model.check_transport(plain_order(tmp_path, "http://u:pw@mirror.example.org"))
    assert "http://mirror.example.org is not encrypted" in notice and "pw" not in notice
    for endpoint in ("https://hub.example.org", "http://127.0.0.1:18765", None):
        assert fetch_model.check_transport(plain_order(tmp_path, endpoint)) == []


def test_the_token_is_taken_from_stdin(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hf_secret\n"))
    words = ["--repo", NAME, "--revision", "0" * 40, "--path", "/srv/models/tiny", "--token-stdin"]
    fetch_model.order_from(words)
    assert os.environ["HF_TOKEN"] == "hf_secret"
