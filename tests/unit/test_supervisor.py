"""What the supervisor passes on of its engine's output."""

import collections
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.host_program import engine_api, supervisor
from ansible_collections.swapgate.core.plugins.module_utils import records, signatures

ROOT = Path(__file__).resolve().parents[2]
KNOWN = signatures.load_signatures(yaml.safe_load((ROOT / "roles/vllm_service/files/signatures.yml").read_text()))
OWN = b'127.0.0.1:40001 - "GET /metrics HTTP/1.1" 200'


def access(port, path="GET /metrics", status="200 OK"):
    return f'(APIServer pid=7) INFO:     127.0.0.1:{port} - "{path} HTTP/1.1" {status}\n'.encode()


@pytest.fixture
def serving(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_api, "asked", collections.deque([OWN], maxlen=32))
    variant = {"name": "v", "unit": "vllm-v.service", "gpus": [], "port": 1}
    one = supervisor.Supervisor(variant, ["x"], records.Layout(str(tmp_path)), KNOWN)
    one.state = "ready"
    return one


def test_our_own_checks_are_left_out_once_and_everything_else_stays(serving):
    others = access(40002) + access(40001, "POST /v1/completions") + access(40001, status="500 Error")
    assert serving._without_own(others) == others
    assert serving._without_own(b"a\n" + access(40001) + b"b\n") == b"a\nb\n"
    assert serving._without_own(access(40001)) == access(40001), "a later client may get the same port"


def test_a_line_in_two_parts_is_one_line_and_none_is_lost(serving):
    line = access(40001)
    assert serving._without_own(b"x\n" + line[:30]) == b"x\n"
    assert serving._without_own(line[30:] + b"y") == b""
    serving.state = "stopping"
    assert serving._without_own(b"z\n") == b"yz\n"


def test_a_line_without_end_is_not_kept_back_for_ever(serving):
    endless = b"#" * (supervisor.LONGEST_LINE + 1)
    assert serving._without_own(endless) == endless and serving.held == b""


def test_a_load_is_passed_on_as_it_comes(serving):
    serving.state = "loading"
    assert serving._without_own(b"Loading: 10%\r") == b"Loading: 10%\r"
    assert serving._without_own(access(40001)) == access(40001)
