"""The units that the shipped inventories render, held against the files beside this one."""

import difflib
import importlib.util
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
DECISION = REPO / "docs/decisions/0002-the-original-unit.md"
VARIANTS = yaml.safe_load((REPO / "group_vars/all/variants.yml").read_text(encoding="utf-8"))[
    "swapgate_shipped_variants"
]
ORIGINAL = "example-8gpu-pcie"
KIMI = "vllm-kimi-k25-int4.service"
KIMI_NGRAM = "vllm-kimi-k25-int4-ngram.service"

spec = importlib.util.spec_from_file_location("golden", REPO / "scripts/golden.py")
assert spec and spec.loader
golden = importlib.util.module_from_spec(spec)
sys.modules["golden"] = golden
spec.loader.exec_module(golden)

# Settings of the original unit that the rendered one has, as a line of it.
IN_THE_UNIT = {
    "--model /shared/kimi-k2.5-int4": "/opt/swapgate/engines/vllm-0.32.0/bin/vllm serve /shared/kimi-k2.5-int4",
    "--tensor-parallel-size 8": "--tensor-parallel-size 8",
    "--tool-call-parser kimi_k2": "--tool-call-parser kimi_k2",
    "--reasoning-parser kimi_k2": "--reasoning-parser kimi_k2",
    "--enable-auto-tool-choice": "--enable-auto-tool-choice",
    "--trust-remote-code": "--trust-remote-code",
    "--max-model-len 131072": "--max-model-len 131072",
    "--gpu-memory-utilization 0.95": "--gpu-memory-utilization 0.95",
    "--port 8000": "--port 8000",
    "HF_HOME": 'Environment="HF_HOME=/shared/huggingface"',
    "NCCL_PROTO": 'Environment="NCCL_PROTO=LL"',
    "NCCL_ALGO": 'Environment="NCCL_ALGO=Ring"',
    "NCCL_P2P_LEVEL": 'Environment="NCCL_P2P_LEVEL=SYS"',
    "NCCL_MAX_NCHANNELS": 'Environment="NCCL_MAX_NCHANNELS=16"',
    "NCCL_BUFFSIZE": 'Environment="NCCL_BUFFSIZE=16777216"',
    "NCCL_NTHREADS": 'Environment="NCCL_NTHREADS=512"',
    "CUDA_DEVICE_MAX_CONNECTIONS": 'Environment="CUDA_DEVICE_MAX_CONNECTIONS=1"',
    "Restart=on-failure": "Restart=on-failure",
    "RestartSec=30": "RestartSec=30",
    "LimitNOFILE=65536": "LimitNOFILE=65536",
    "LimitMEMLOCK=infinity": "LimitMEMLOCK=infinity",
    "SyslogIdentifier": "SyslogIdentifier=vllm-kimi-k25-int4",
    "starts at boot": "WantedBy=multi-user.target",
}
# Settings that are done otherwise: (text in the decision's first column, what the unit must not have,
# what the unit, the resolved variant or nothing has instead).
DONE_OTHERWISE = [
    ("load limit 2400 s", "TimeoutStartSec=2400", ("load_timeout_s", 2400)),
    ("`Type=simple`", "Type=simple", "Type=notify"),
    ("stop limit 30 s", "TimeoutStopSec=30", "--shutdown-timeout 30"),
    ("stop limit 30 s", "TimeoutStopSec=30", "TimeoutStopSec=90"),
    ("`User=root`", "User=root", "User=vllm"),
    ("every GPU under 1000 MiB", "nvidia-smi", ("free_memory_mib", 1000)),
    ("every GPU under 1000 MiB, 60 s", "ExecStartPre=", ("free_timeout_s", 60)),
    ("`rm -f /dev/shm/psm_*`", "/dev/shm/psm_", "TemporaryFileSystem=/dev/shm:mode=1777,size=75%"),
    ("`python -m vllm.entrypoints.openai.api_server`", "api_server", None),
    ("`--disable-log-requests`", "--disable-log-requests", None),
    ("`TRANSFORMERS_CACHE`", "TRANSFORMERS_CACHE", None),
    ("no `--host`", "--host 0.0.0.0", "--host 127.0.0.1"),
    ("no `Conflicts=`", "Conflicts=", None),
    ("no start limit", "StartLimitIntervalSec=0", "StartLimitBurst=3"),
    ("`LimitCORE`", "LimitCORE=infinity", "LimitCORE=0"),
]


@pytest.fixture(scope="session")
def runs():
    """What Ansible renders: each inventory as it is, and the example once more with an eighth variant in the table."""
    eighth = {"extends": "baseline", "description": "50 % of $x", "engine_args": {"max-num-seqs": 4}}
    asked = [(name, None) for name in golden.inventories()]
    asked.append((ORIGINAL, {"swapgate_variants": {**VARIANTS, "eighth": eighth}}))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: golden.render(*one), asked))
    return {"plain": dict(zip(golden.inventories(), found)), "eighth": found[-1]}


def lines_of(text):
    """The lines of a unit without indentation and continuation marks."""
    return [line.strip().removesuffix("\\").strip() for line in text.splitlines()]


def golden_text(unit):
    """One golden unit of the inventory that stands for the original."""
    return (golden.GOLDEN / ORIGINAL / unit).read_text(encoding="utf-8")


@pytest.mark.parametrize("inventory", golden.inventories())
def test_rendered_units_are_the_golden_ones_byte_for_byte(runs, inventory):
    rendered, files = runs["plain"][inventory], golden.golden_files(inventory)
    diff: list[str] = []
    for unit in sorted(set(rendered) | set(files)):
        have = files[unit].read_bytes().decode() if unit in files else ""
        want = rendered[unit]["text"] if unit in rendered else ""
        name = f"tests/golden/{inventory}/{unit}"
        diff += difflib.unified_diff(have.splitlines(True), want.splitlines(True), name, "rendered now")
        if have != want and not diff:
            diff.append(f"{name}: differs in its line ends only\n")
    assert not diff, "Units differ. If that is what you meant: make golden, and read the diff.\n" + "".join(diff)


@pytest.mark.parametrize("inventory", golden.inventories())
def test_every_variant_of_the_table_has_its_golden_unit(inventory):
    model = {"sandbox": "smollm2-135m-instruct", ORIGINAL: "kimi-k25-int4"}[inventory]
    wanted = {f"vllm-{model}.service"} | {f"vllm-{model}-{name}.service" for name in VARIANTS if name != "baseline"}
    assert set(golden.golden_files(inventory)) == wanted
    assert len(wanted) == 8


@pytest.mark.parametrize("inventory", golden.inventories())
def test_baseline_and_ngram_differ_in_name_description_identifier_and_speculative_config_only(inventory):
    files = golden.golden_files(inventory)
    base = min(files, key=len)
    ngram = next(unit for unit in files if unit.endswith("-ngram.service"))
    old, new = (lines_of(files[unit].read_text(encoding="utf-8")) for unit in (base, ngram))
    changed = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
    allowed = (
        "# vllm-",
        "Description=",
        "ExecStart=/usr/local/bin/swapgate supervise ",
        "SyslogIdentifier=",
        "--speculative-config ",
    )
    assert [line for line in changed if not line[2:].startswith(allowed)] == []
    assert [line[2:].split()[0] for line in changed if line[2:].startswith("--")] == ["--speculative-config"]
    assert len(changed) == 9  # four lines replaced, one added


def test_an_eighth_variant_changes_no_other_unit(runs):
    plain, eighth = runs["plain"][ORIGINAL], runs["eighth"]
    assert set(eighth) - set(plain) == {"vllm-kimi-k25-int4-eighth.service"}
    assert {unit: eighth[unit] for unit in plain} == plain
    text = eighth["vllm-kimi-k25-int4-eighth.service"]["text"]
    assert "    --max-num-seqs 4 \\\n" in text
    # A percent sign would start a specifier; a dollar sign is plain there.
    assert "\nDescription=vLLM kimi-k25-int4, eighth: 50 %% of $x\n" in text


@pytest.mark.parametrize("setting", IN_THE_UNIT)
@pytest.mark.parametrize("unit", [KIMI, KIMI_NGRAM])
def test_a_setting_of_the_original_is_in_the_unit(unit, setting):
    line = IN_THE_UNIT[setting]
    if setting == "SyslogIdentifier":  # one a variant
        line = "SyslogIdentifier=" + unit.removesuffix(".service")
    assert lines_of(golden_text(unit)).count(line) == 1


def test_the_original_ngram_setting_is_rendered_with_its_minimum():
    json_word = r'"{\"method\":\"ngram\",\"num_speculative_tokens\":5,\"prompt_lookup_min\":4,\"prompt_lookup_max\":4}"'
    assert f"--speculative-config {json_word}" in lines_of(golden_text(KIMI_NGRAM))
    assert "--speculative-config" not in golden_text(KIMI)


@pytest.mark.parametrize(("setting", "gone", "instead"), DONE_OTHERWISE)
def test_a_setting_that_is_done_otherwise_has_its_row_in_the_decision(runs, setting, gone, instead):
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in DECISION.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    row = next((row for row in rows if setting in row[0]), None)
    assert row, f"{DECISION}: found no row for {setting}, expected one. Next: say there where it went and why."
    assert len(row) == 3 and all(len(cell) > 3 for cell in row)
    for unit in (KIMI, KIMI_NGRAM):
        lines = lines_of(golden_text(unit))
        assert not [line for line in lines if line == gone or (not gone[-1].isdigit() and gone in line)]
        if isinstance(instead, tuple):
            assert runs["plain"][ORIGINAL][unit]["variant"][instead[0]] == instead[1]
        elif instead:
            assert instead in lines


def test_no_golden_unit_holds_a_shell_or_an_unescaped_dollar():
    for inventory in golden.inventories():
        for path in golden.golden_files(inventory).values():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\bsh -c\b|(?<!\$)\$(?!\$)", text), path.name


def test_a_table_that_does_not_resolve_is_told_and_nothing_is_written():
    broken = {"swapgate_variants": {**VARIANTS, "ngram": {"extends": "baselin"}}}
    with pytest.raises(golden.RenderError) as caught:
        golden.render("sandbox", broken)
    said = str(caught.value)
    assert said.count("variant 'baselin' does not exist. Did you mean 'baseline'?") == 1
    assert said.startswith("inventory/sandbox: ") and said.endswith("then make golden.")


def test_write_adds_changes_and_removes(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    (tmp_path / "site").mkdir()
    for name in ("stays", "goes", "changes"):
        (tmp_path / "site" / name).write_text("old\n")
    units = {
        "stays": {"variant": {}, "text": "old\n"},
        "changes": {"variant": {}, "text": "new\n"},
        "comes": {"variant": {}, "text": "x\n"},
    }
    assert golden.write("site", units) == ["site/changes", "site/comes", "site/goes (removed)"]
    assert {path.name: path.read_text() for path in (tmp_path / "site").iterdir()} == {
        "stays": "old\n",
        "changes": "new\n",
        "comes": "x\n",
    }
    assert golden.write("site", units) == []
