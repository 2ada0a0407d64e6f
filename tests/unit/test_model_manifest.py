"""The manifest of a model folder, the checks of the folder, and the module that runs them on a host."""

import json
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import model_manifest as mm

REPO = Path(__file__).resolve().parents[2]
SERVICE_USER = "nobody"


def weights(path: Path, **tensors: int) -> None:
    """A sound safetensors file with U8 tensors of the given sizes in bytes."""
    header, position = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(position))


@pytest.fixture
def model(tmp_path):
    """A model of two shards in a folder that everybody may enter."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weights(folder / "model-1.safetensors", a=10, b=20)
    weights(folder / "model-2.safetensors", c=30)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in [*tmp_path.parents, tmp_path]:
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o055)
    return folder


def manifest_of(folder: Path) -> mm.Manifest:
    found, problems = mm.list_files(str(folder))
    assert problems == []
    return mm.build("tiny", str(folder), found, {entry.path: mm.hash_file(f"{folder}/{entry.path}") for entry in found})


def test_a_manifest_names_the_content_not_the_times(model):
    before = manifest_of(model)
    assert [entry["path"] for entry in before["files"]] == sorted(path.name for path in model.iterdir())
    os.utime(model / "config.json", (1, 1))
    touched = manifest_of(model)
    assert touched["id"] == before["id"]
    assert touched != before
    (model / "config.json").write_text('{"model_type": "other"}')
    assert manifest_of(model)["id"] != before["id"]


def test_dotfiles_are_no_part_of_the_model(model):
    before = manifest_of(model)["id"]
    (model / ".cache").mkdir()
    (model / ".cache" / "x").write_text("x")
    (model / mm.SOURCE_FILE).write_text("{}")
    assert manifest_of(model)["id"] == before


def test_a_manifest_comes_back_from_its_text(model):
    manifest = manifest_of(model)
    assert mm.load(mm.dump(manifest), "m.json") == manifest


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda _text: "[]",
        lambda _text: '{"name": "x"}',
        lambda text: text.replace('"size": 23', '"size": 24'),
        lambda text: text.replace('"name": "tiny"', '"name": 3'),
    ],
)
def test_a_damaged_manifest_is_refused_with_the_way_out(model, damage):
    text = mm.dump(manifest_of(model))
    assert damage(text) != text
    with pytest.raises(ValueError, match=r"manifest: m\.json: found .*next: rm m\.json"):
        mm.load(damage(text), "m.json")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"repo": 1, "revision": "", "files": []}',
        '{"repo": "a", "revision": "b", "files": [1]}',
        '{"repo": "a", "revision": "b", "files": [{"path": "a", "size": 1, "sha256": "0"}]}',
    ],
)
def test_a_damaged_fetch_record_is_refused_with_the_way_out(text):
    with pytest.raises(ValueError, match=r"fetch record: s\.json: found .*next: rm s\.json"):
        mm.load_source(text, "s.json")


def test_only_files_of_another_size_or_time_are_hashed_again(model):
    manifest = manifest_of(model)
    found, _problems = mm.list_files(str(model))
    known = mm.known_hashes(str(model), [None, manifest])
    assert mm.plan_hashes(found, known) == ({entry["path"]: entry["sha256"] for entry in manifest["files"]}, [])
    os.utime(model / "config.json", (1, 1))
    found, _problems = mm.list_files(str(model))
    kept, to_hash = mm.plan_hashes(found, known)
    assert [entry.path for entry in to_hash] == ["config.json"]
    assert "config.json" not in kept
    assert len(mm.plan_hashes(found, known, everything=True)[1]) == len(found)
    assert mm.known_hashes("/elsewhere", [manifest]) == {}


def test_weights_that_change_are_a_problem_other_files_are_a_difference(model):
    before = manifest_of(model)
    (model / "config.json").write_text('{"model_type": "other"}')
    (model / "README.md").write_text("new")
    differences = mm.changes(before, manifest_of(model))
    assert [(change.kind, change.path) for change in differences] == [
        ("added", "README.md"),
        ("content", "config.json"),
    ]
    assert mm.change_problems(str(model), differences, "m.json", False) == []
    (model / "model-2.safetensors").unlink()
    content = bytearray((model / "model-1.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model-1.safetensors").write_bytes(content)
    problems = mm.change_problems(str(model), mm.changes(before, manifest_of(model)), "m.json", False)
    assert [line.split(": found ")[0] for line in problems] == [
        f"model weights: {model}/model-1.safetensors",
        f"model weights: {model}/model-2.safetensors",
    ]
    assert "rm m.json" in problems[0]
    assert mm.changes(None, before) == []


def test_fetched_weights_must_stay_what_the_hub_had(model):
    manifest = manifest_of(model)
    source = {"repo": "acme/tiny", "revision": "0" * 40, "files": json.loads(json.dumps(manifest["files"]))}
    assert mm.source_problems(str(model), manifest, source, False) == []
    for entry in source["files"]:
        entry["sha256"] = "f" * 64
    problems = mm.source_problems(str(model), manifest, source, False)
    assert len(problems) == 2  # the two shards: config and index may be edited
    assert "as fetched from acme/tiny at 000000000000" in problems[0]


def test_the_quick_check_compares_sizes_and_times(model):
    manifest = manifest_of(model)
    assert mm.quick_check(manifest, os.stat) == []
    with (model / "model-1.safetensors").open("ab") as stream:
        stream.write(b"x")
    os.utime(model / "config.json", (1, 1))
    (model / "model-2.safetensors").unlink()
    problems = mm.quick_check(manifest, os.stat)
    assert [line.split(": ")[2].split(",")[0] for line in problems] == [
        "found modified since the manifest (mtime_ns 1000000000)",
        f"found {(model / 'model-1.safetensors').stat().st_size} bytes",
        "found No such file or directory",
    ]


def test_the_quick_check_looks_only_at_size_and_time():
    manifest = {"name": "x", "path": "/m", "files": [{"path": "a", "size": 3, "mtime_ns": 5, "sha256": ""}]}
    assert mm.quick_check(manifest, lambda _path: SimpleNamespace(st_size=3, st_mtime_ns=5)) == []


def test_a_sound_folder_has_no_problem(model):
    assert mm.verify_headers(str(model)) == []


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda m: os.truncate(m / "model-1.safetensors", 20), "safetensors header: {m}/model-1.safetensors: found"),
        (
            lambda m: os.truncate(m / "model-1.safetensors", (m / "model-1.safetensors").stat().st_size - 1),
            "safetensors size: {m}/model-1.safetensors: found 29 bytes of tensors (1 bytes too short)",
        ),
        (lambda m: (m / "model-2.safetensors").unlink(), "found no such file, expected model-2.safetensors"),
        (lambda m: weights(m / "model-2.safetensors", d=30), "found 1 tensors not in model-2.safetensors (first: c)"),
        (lambda m: (m / "model.safetensors.index.json").write_text("{"), "safetensors index: {m}/model.safetensors"),
        (lambda m: (m / "model.safetensors.index.json").write_bytes(b"\xff"), "safetensors index: {m}/model.safetens"),
        (lambda m: (m / "config.json").write_text("{"), "model config: {m}/config.json: found no JSON"),
        (lambda m: (m / "config.json").write_text("[]"), "model config: {m}/config.json: found a JSON list"),
        (lambda m: (m / "config.json").write_text('{"x": 1}'), "expected architectures or model_type"),
        (lambda m: (m / "config.json").write_bytes(b"\xff"), "model file: {m}/config.json: found UnicodeDecodeError"),
        (lambda m: (m / "config.json").unlink(), "found no config.json"),
        (lambda m: (m / "pytorch_model.bin").write_text("x"), "{m}/pytorch_model.bin: found pickled weights"),
        (lambda m: (m / "x.pt").write_text("x"), "{m}/x.pt: found pickled weights"),
        (lambda m: (m / "lost.json").symlink_to("/nowhere"), "{m}/lost.json: found No such file or directory (a link"),
        (lambda m: os.mkfifo(m / "pipe"), "{m}/pipe: found no regular file"),
    ],
)
def test_each_damage_of_a_folder_is_one_line(model, damage, expected):
    damage(model)
    problems = mm.verify_headers(str(model))
    assert len(problems) == 1, problems
    assert expected.format(m=model) in problems[0]
    assert "next: " in problems[0]


def test_a_folder_without_weights_is_no_model(model):
    for path in model.glob("*.safetensors*"):
        path.unlink()
    assert "expected a *.safetensors file" in mm.verify_headers(str(model))[0]


def test_an_index_below_the_folder_names_files_beside_itself(model):
    below = model / "draft"
    below.mkdir()
    weights(below / "x.safetensors", t=4)
    index = below / "x.safetensors.index.json"
    index.write_text('{"weight_map": {"t": "x.safetensors"}}')
    assert mm.verify_headers(str(model)) == []
    index.write_text('{"weight_map": {"t": "model-1.safetensors"}}')
    assert "expected model-1.safetensors" in mm.verify_headers(str(model))[0]


def test_many_unreadable_files_are_counted_not_listed():
    failures = [(f"/m/{number}", "Permission denied") for number in range(9)]
    problems = mm.access_problems("vllm", failures, {"/m/0": "file of root, mode 0600"})
    assert len(problems) == mm.SHOWN_UNREADABLE + 1
    assert "found Permission denied for user vllm (file of root, mode 0600)" in problems[0]
    assert "next: chmod o+r /m/0" in problems[0]
    assert "found 4 more such paths" in problems[-1]


def run_module(folder: Path, manifests: Path, check: bool = False, **options: object) -> dict:
    """Run the module as Ansible does, in a process of its own."""
    arguments = {"name": "tiny", "path": str(folder), "user": SERVICE_USER, "manifest_dir": str(manifests), **options}
    arguments |= {"_ansible_check_mode": check, "_ansible_diff": True}
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.swapgate.core.plugins.modules.model_manifest"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": str(REPO / "collections"), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try to read as another user")


@needs_root
def test_the_module_writes_once_and_then_reads_nothing(model, tmp_path):
    manifests = tmp_path / "manifests"
    dry = run_module(model, manifests, check=True)
    assert (dry["changed"], manifests.exists()) == (True, False)
    first = run_module(model, manifests)
    assert (first["changed"], len(first["hashed_files"])) == (True, 4)
    written = mm.load((manifests / "tiny.json").read_text(), "tiny.json")
    assert written == manifest_of(model)
    assert written["id"] == first["id"] == dry["id"]
    second = run_module(model, manifests)
    assert (second["changed"], second["hashed_files"]) == (False, [])
    assert run_module(model, manifests, rehash=True)["changed"] is False
    assert sorted(path.name for path in manifests.iterdir()) == ["tiny.json"]


@needs_root
def test_the_module_takes_the_hashes_of_its_own_fetch_alone(model, tmp_path):
    files = manifest_of(model)["files"]
    record = {"repo": "acme/tiny", "revision": "0" * 40, "files": files}
    (model / mm.SOURCE_FILE).write_text(json.dumps(record))
    assert run_module(model, tmp_path / "manifests", fetched=True)["hashed_files"] == []
    # The same record in a folder that was copied, with the times kept and other weights.
    record["files"][1]["sha256"] = "f" * 64
    (model / mm.SOURCE_FILE).write_text(json.dumps(record))
    copied = run_module(model, tmp_path / "others")
    assert f"{model}/model-1.safetensors: found sha256" in copied["msg"] and copied["failed"]


@needs_root
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda m: (m / "model-1.safetensors").chmod(0o600), "{m}/model-1.safetensors: found Permission denied"),
        (
            lambda m: m.chmod(0o700),
            "model access: {m}: found cannot be entered for user nobody (folder of root, mode 07",
        ),
        (lambda m: m.parent.chmod(0o700), "model access: {m.parent}: found cannot be entered for user nobody"),
        (
            lambda m: m.chmod(0o711),
            "model access: {m}: found Permission denied for user nobody (folder of root, mode 0",
        ),
    ],
)
def test_the_module_reads_as_the_service_user(model, tmp_path, damage, expected):
    assert pwd.getpwnam(SERVICE_USER).pw_uid != 0
    damage(model)
    result = run_module(model, tmp_path / "manifests")
    assert result["failed"] is True
    assert len(result["problems"]) == 1, result
    assert expected.format(m=model) in result["msg"]
    assert "next: chmod o+r" in result["msg"]
    assert not (tmp_path / "manifests").exists()


@needs_root
def test_the_module_refuses_what_it_cannot_answer_for(model, tmp_path):
    manifests = tmp_path / "manifests"
    missing = run_module(tmp_path / "none", manifests)
    assert f"model tiny: {tmp_path}/none: found no such folder, expected the model's folder; next: " in missing["msg"]
    assert "service user: nosuch: found no such user" in run_module(model, manifests, user="nosuch")["msg"]
    run_module(model, manifests)
    before = (manifests / "tiny.json").read_text()
    content = bytearray((model / "model-1.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model-1.safetensors").write_bytes(content)
    flipped = run_module(model, manifests)
    assert f"model weights: {model}/model-1.safetensors: found sha256" in flipped["msg"]
    assert (manifests / "tiny.json").read_text() == before
    (manifests / "tiny.json").write_text("{")
    assert "manifest: " in run_module(model, manifests)["msg"]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("pytorch_model.BIN", b"x", "pickled weights"),
        ("medusa.joblib", b"x", "pickled weights"),
        ("model.weights", b"PK\x03\x04rest", "an archive as torch.save writes it"),
        ("extra.dat", b"\x80\x04\x95rest", "a pickle of protocol 4"),
        ("old.dat", b"cos\nsystem\n(S'id'\n", "a pickle of protocol 0"),
        (".h/x.bin", b"x", "pickled weights by its name"),
        (".cache/blob", b"\x80\x02}q", "a pickle of protocol 2"),
    ],
)
def test_a_pickle_is_known_by_its_content_in_any_folder(model, name, content, found):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(content)
    [problem] = mm.verify_headers(str(model))
    assert problem.startswith(f"model file: {model}/{name}: found {found}")


def test_code_that_the_engine_runs_is_pinned(model):
    code = model / "modeling_x.py"
    code.write_text("x = 1")
    manifest = manifest_of(model)
    times = (code.stat().st_atime_ns, code.stat().st_mtime_ns)
    code.write_text("x = 2")
    os.utime(code, ns=times)
    assert mm.quick_check(manifest, os.stat) == []  # size and time say nothing
    [changed] = mm.code_problems(manifest, mm.hash_file)
    assert f"model code (trust_remote_code runs it): {code}: found sha256" in changed
    differences = mm.changes(manifest, manifest_of(model))
    assert mm.change_problems(str(model), differences, "m.json", False) == []
    assert len(mm.change_problems(str(model), differences, "m.json", True)) == 1
    code.write_text("x = 1")
    (model / "sub").mkdir()
    (model / "sub/new.py").write_text("")
    [added] = mm.code_problems(manifest, mm.hash_file)
    assert f"{model}/sub/new.py" in added and "expected no such file" in added
    source = {"repo": "acme/tiny", "revision": "0" * 40, "files": [{"path": "modeling_x.py", "sha256": "f" * 64}]}
    assert mm.source_problems(str(model), manifest, source, False) == []
    assert len(mm.source_problems(str(model), manifest, source, True)) == 1


@pytest.mark.parametrize(
    ("auto_map", "count"), [({"AutoModel": "m.X"}, 0), ({"A": "o/r--m.X", "B": ["o/r--t.Y", None]}, 2)]
)
def test_code_of_another_repo_is_refused(auto_map, count):
    assert len(mm.foreign_code_problems("c", json.dumps({"auto_map": auto_map}))) == count


def test_a_changed_tokenizer_is_a_notice(model):
    before = manifest_of(model)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "README.md").write_text("new")
    [notice] = mm.change_notices(str(model), mm.changes(before, manifest_of(model)))
    assert notice.startswith(f"{model}/tokenizer_config.json: added since the last manifest")


@needs_root
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda m: os.chown(m, pwd.getpwnam(SERVICE_USER).pw_uid, 0), "{m}: found writable by its owner"),
        (lambda m: (m / "config.json").chmod(0o666), "{m}/config.json: found writable by everybody (mode 0666)"),
        (lambda m: m.parent.chmod(0o757), "{m.parent}: found writable by everybody (mode 0757)"),
    ],
)
def test_a_model_that_the_engine_may_write_is_refused(model, tmp_path, damage, found):
    damage(model)
    result = run_module(model, tmp_path / "manifests")
    assert result["failed"] is True and len(result["problems"]) == 1, result
    assert found.format(m=model) in result["msg"] and "expected writable by root alone; next: chown" in result["msg"]


@needs_root
def test_the_module_warns_of_a_changed_template_and_refuses_changed_code(model, tmp_path):
    (model / "modeling_x.py").write_text("x = 1")
    run_module(model, tmp_path / "manifests", trust_remote_code=True)
    (model / "chat_template.jinja").write_text("{{ x }}")
    said = run_module(model, tmp_path / "manifests", trust_remote_code=True)
    assert "chat_template.jinja: added" in str(said["warnings"])
    (model / "modeling_x.py").write_text("x = 12")
    assert (
        "model code (trust_remote_code runs it)"
        in run_module(model, tmp_path / "manifests", trust_remote_code=True)["msg"]
    )
