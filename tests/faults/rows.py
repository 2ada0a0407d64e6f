"""The rows of the matrix. What a row's keys mean: row.py; what its actions do: actions.py; the engine's knobs: tests/fake_vllm."""

from __future__ import annotations

from typing import Any

from .actions import SWAP_UNIT
from .bed import ENGINE, MODEL, NEWER, OLDER
from .host import OTHER_PORT, PORT
from .row import Row

BASE_UNIT = "vllm-tiny.service"
NGRAM_UNIT = "vllm-tiny-ngram.service"
STATE = "/var/lib/swapgate/state.json"
VENV = f"/opt/swapgate/engines/vllm-{ENGINE}"
OLDER_VENV = f"/opt/swapgate/engines/vllm-{OLDER}"
UNIT_FILE = f"/etc/systemd/system/{BASE_UNIT}"
PHASES = ("preflight", "way back", "stop", "install", "free", "start", "watch", "probe", "soak", "commit")
BACK_PHASES = ("rollback-stop", "rollback-install", "rollback-free", "rollback-start", "rollback-watch", "rollback-probe")
# Until the stop nothing was touched, so that there is nothing to come back from.
UNTOUCHED = ("preflight", "way back")
HEAL_ENGINES = "sh rm -rf /opt/swapgate/engines && cp -a /opt/faults/engines /opt/swapgate/engines"


def ngram(**knobs: Any) -> dict[str, Any]:
    """Knobs for the target's starts alone."""
    return {"variants": [{"when": '"method":"ngram"', **knobs}]}


def both(base: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Knobs for the starts of `baseline` and of `ngram`."""
    return {**base, "variants": [{"when": '"method":"ngram"', **target}]}


def in_state(statement: str) -> str:
    """An action that edits the state file: ``statement`` works on the dict `s`."""
    return f"""sh python3 -c 'import json; p="{STATE}"; s=json.load(open(p)); {statement}; json.dump(s, open(p,"w"))'"""


CRASH = ngram(crash_at="30%", crash_with="cuda_oom")
OOM = r"out of memory"

REFUSED = [
    Row("name-unknown", "a release that was never staged is asked for", ("refused",), "000000000000.*(not complete|not staged|no such)",
        "1", target="000000000000", ci=True),
    Row("flag-unknown", "a flag that the installed engine does not know", ("refused",), "no-such-flag", "2", target="unknown_flag",
        ci=True),
    Row("flag-removed", "a flag that this engine no longer has", ("refused",), "disable-log-requests", "2", target="removed_flag"),
    Row("method-unknown", "a speculative method that does not exist", ("refused",), "ngramm", "3", target="bad_method"),
    Row("parser-unknown", "a tool parser that does not exist", ("refused",), "no_such_parser", "3", target="bad_parser"),
    Row("context-too-long", "max_model_len beyond the model's own", ("refused",), "max_model_len|99999999", "3", target="too_long"),
    Row("draft-missing", "the draft model is not there", ("refused",), "draft model /srv/models/tiny-eagle3", "3", target="no_draft"),
    Row("version-vulnerable", "an engine version with a known hole", ("refused",), "CVE|GHSA|0\\.10\\.0", "4", target="vulnerable"),
    Row("venv-missing", "the target's virtualenv is not there", ("refused",), "vllm-0.29.0", "4", target="no_venv", ci=True),
    Row("venv-wrong-version", "another engine version in the target's virtualenv than its name says", ("refused",),
        f"{OLDER}.*{NEWER}|{NEWER}.*{OLDER}", "4", target="older", after=(HEAL_ENGINES,),
        before=(f"sh {OLDER_VENV}/bin/pip install -q --no-index --find-links /opt/wheels-of-the-matrix vllm=={NEWER}",)),
    Row("venv-import-error", "the target's engine cannot be imported", ("refused",), "no_such_library", "4", target="older",
        before=(f"sh echo import no_such_library >> $(echo {OLDER_VENV}/lib/python3*/site-packages/vllm/__init__.py)",),
        after=(HEAL_ENGINES,)),
    Row("venv-sigill", "the engine's interpreter dies of SIGILL (built for another CPU)", ("refused",), "signal 4|SIGILL", "4",
        target="older", after=(HEAL_ENGINES,), simulated="the interpreter is a script that sends itself SIGILL", before=(
            f"sh rm {OLDER_VENV}/bin/python && printf '#!/bin/sh\\nkill -ILL $$\\n' > {OLDER_VENV}/bin/python && "
            f"chmod +x {OLDER_VENV}/bin/python",)),
    Row("weights-missing", "a weight file is gone", ("refused",), "model-2.safetensors", "5",
        before=(f"sh rm {MODEL}/model-2.safetensors",)),
    Row("weights-truncated", "a weight file lost its end", ("refused",), "model-1.safetensors", "5", ci=True,
        before=(f"sh truncate -s -100 {MODEL}/model-1.safetensors",)),
    Row("weights-flipped", "one byte of a weight file was flipped", ("refused",), "model-1.safetensors", "5", before=(
        f"sh printf X | dd of={MODEL}/model-1.safetensors bs=1 seek=2000 conv=notrunc status=none",)),
    Row("model-config-gone", "config.json of the model is gone", ("refused",), "config.json", "5",
        before=(f"sh rm {MODEL}/config.json",)),
    Row("mount-missing", "the model's mount is not there: an empty folder", ("refused",), MODEL, "6",
        before=(f"sh mount -t tmpfs tmpfs {MODEL}",), simulated="an empty tmpfs lies over the model's folder"),
    Row("mount-unreadable", "the model's folder cannot be read by the service user", ("refused",), f"{MODEL}|ermission", "6",
        before=(f"sh mount -t tmpfs -o mode=0700 tmpfs {MODEL} && cp -p /opt/faults/good/model/* {MODEL}/",),
        simulated="a tmpfs with mode 0700 over the model's folder"),
    Row("disk-full-cache", "no room for the compile cache", ("refused",), "/var/cache.*free", "7",
        before=("sh mount -t tmpfs -o size=100m tmpfs /var/cache",), simulated="a small tmpfs over /var/cache"),
    Row("driver-mismatch", "user space and kernel module of the driver differ", ("refused",), "mismatch", "8", target="gpu",
        before=('nvidia {"exit": 18, "text": "Failed to initialize NVML: Driver/library version mismatch\\nNVML library '
                'version: 580.95"}',), simulated="a stand-in nvidia-smi"),
    Row("driver-changed", "another driver than the last good variant served on", ("refused",), "driver", "8", before=(
        "sh mount -t tmpfs tmpfs /sys/module && mkdir /sys/module/nvidia && echo 590.10 > /sys/module/nvidia/version",
        in_state('s["last_good"]["identity"]["driver"]="580.95"')), simulated="a tmpfs over /sys/module"),
    Row("gpu-missing", "fewer GPUs than the variant uses", ("refused",), "GPU", "9", target="gpu",
        before=('nvidia {"text": "No devices were found", "exit": 6}',), simulated="a stand-in nvidia-smi"),
    Row("gpu-wedged", "a GPU at 100 % with no process on it", ("refused",), "100 ?%|spinning|wedged|no process", "9", target="gpu",
        before=('nvidia {"gpus": [{"memory.used": "624 MiB", "utilization.gpu": "100 %", "power.draw": "120.00 W"}]}',),
        simulated="a stand-in nvidia-smi"),
    Row("gpu-needs-reset", "a GPU waits for a reset after an uncorrectable error", ("refused",), "reset", "9", target="gpu",
        before=('nvidia {"gpus": [{"gpu_recovery_action": "Reset", "memory.used": "[GPU requires reset]"}]}',),
        simulated="a stand-in nvidia-smi"),
    Row("gpu-tool-missing", "nvidia-smi is not there for a variant with GPUs", ("refused",), "nvidia-smi", "9", target="gpu"),
    Row("unit-edited", "the serving unit's file was edited by hand", ("refused",), BASE_UNIT, "10", ci=True,
        before=(f"sh sed -i '/^ExecStart=/i Nice=5' {UNIT_FILE}; systemctl daemon-reload",)),
    Row("unit-edited-no-reload", "the same, without a daemon-reload", ("refused",), BASE_UNIT, "10",
        before=(f"sh sed -i '/^ExecStart=/i Nice=5' {UNIT_FILE}",)),
    Row("unit-dropin", "a drop-in by hand changes the serving unit", ("refused",), BASE_UNIT, "10", before=(
        f"sh mkdir -p {UNIT_FILE}.d; printf '[Service]\\nNice=5\\n' > {UNIT_FILE}.d/99-hand.conf; systemctl daemon-reload",)),
    Row("data-edited", "the serving variant's data file was edited by hand", ("refused",), "baseline.json", "10",
        before=("sh sed -i s/8741/8799/ /etc/swapgate/variants/baseline.json",)),
    Row("release-edited", "the staged target was edited by hand", ("refused",), "changed by hand", "10", ci=True,
        before=("sh sed -i '/^ExecStart=/i Nice=5' /var/lib/swapgate/releases/*/vllm-tiny-ngram.service",)),
    Row("two-enabled", "two variants start at boot", ("refused",), "enabled", "11", before=(
        f"sh cp /var/lib/swapgate/releases/*/{NGRAM_UNIT} /etc/systemd/system/; cd /var/lib/swapgate/releases; "
        f"cp $(dirname */{NGRAM_UNIT})/variant.json /etc/swapgate/variants/ngram.json; "
        f"systemctl daemon-reload; systemctl enable -q {NGRAM_UNIT}",),
        after=(f"sh systemctl disable -q {NGRAM_UNIT}",), serves="baseline*"),
    Row("way-back-venv-gone", "the last good variant's virtualenv is gone", ("refused",), f"way back.*{VENV}|{VENV}", "12",
        target="older", before=(f"sh mv {VENV} {VENV}.away",), after=(f"sh mv {VENV}.away {VENV}",), ci=True),
    Row("way-back-upgraded", "the last good variant's virtualenv was upgraded in place", ("refused",), "way back.*engine|engine.*changed",
        "12", target="older", after=(HEAL_ENGINES,),
        before=(f"sh {VENV}/bin/pip install -q --no-index --find-links /opt/wheels-of-the-matrix vllm=={NEWER}",)),
    Row("way-back-release-gone", "the last good release's folder is gone", ("refused",), "release .* is not complete|gone", "12",
        before=("sh cd /var/lib/swapgate/releases; rm -r $(python3 -c 'import json; print(json.load(open(\""
                + STATE + "\"))[\"last_good\"][\"release\"])')",)),
    Row("port-foreign", "a foreign process answers 200 on the target's port", ("refused",), f"port {OTHER_PORT}", "24",
        target="elsewhere", before=(f"foreign {OTHER_PORT} 30", "sleep 0.7"), ci=True),
    Row("directive-unknown", "a unit with a directive that this systemd does not know", ("refused",), "RestartSteps", "41",
        target="directive", before=("stage-directive RestartSteps=4",)),
    Row("operators-two", "another operator's swap runs", ("swapped",), "", "32", knobs=ngram(load_s=3), serves="ngram",
        at={"watch": ("ask baseline2 second",)}, says="exit 3:.*matrix since", ci=True),
    Row("lock-held", "somebody holds the lock", ("refused",), "running|lock", "32", before=(
        "bg lock exec flock /run/swapgate/swap.lock sleep 20", "sleep 0.5"), after=("sh systemctl stop fault-lock",)),
    Row("state-corrupt", "the state file is half a file", ("refused",), "state.json", ci=True,
        before=(f"sh head -c 100 {STATE} > {STATE}.x; mv {STATE}.x {STATE}",)),
    Row("state-empty", "the state file is empty", ("refused",), "state.json", before=(f"sh truncate -s 0 {STATE}",)),
    Row("state-newer", "the state file is a newer release's", ("refused",), "schema", before=(in_state('s["schema"]=99'),)),
    Row("state-not-ours", "the state file holds JSON of another shape", ("refused",), "state.json", before=(f"sh echo [] > {STATE}",)),
    Row("state-temporary", "a power cut left a half-written file beside the state", ("swapped",), serves="ngram",
        before=("sh head -c 50 /var/lib/swapgate/state.json > /var/lib/swapgate/.state.jsonab12cd",)),
    Row("history-cut", "the last line of the history was cut", ("swapped",), serves="ngram",
        before=("sh printf '{\"id\": \"x' >> /var/lib/swapgate/history.jsonl",)),
    Row("state-gone-crash", "the state file is gone and the target crashes", ("refused", "rolled_back"), OOM + "|state", knobs=CRASH,
        before=(f"sh rm {STATE}",), moment="line:OutOfMemory"),
]

LOADS = [
    Row("crash-early", "the engine crashes at the beginning of its load", ("rolled_back",), OOM, "13",
        knobs=ngram(load_s=2, crash_at=0.5), moment="line:OutOfMemory", never_ready=True, ci=True),
    Row("crash-late", "the engine crashes at 80 % of its load", ("rolled_back",), OOM, "14", knobs=ngram(load_s=3, crash_at="80%"),
        moment="line:OutOfMemory", never_ready=True),
    Row("crash-compile", "the engine dies without a word in its compilation", ("rolled_back",), "compil|ended (of|with)",
        knobs=ngram(load_s=2, crash_at="compile", crash_with="silent"), moment="start+0.8", never_ready=True),
    Row("crash-segfault", "a worker ends of a segmentation fault", ("rolled_back",), "segmentation|SIGSEGV|signal 11",
        knobs=ngram(load_s=2, crash_at="60%", crash_with="segfault"), moment="line:egmentation|SIGSEGV", never_ready=True),
    Row("crash-import", "an import of the engine fails only at start", ("rolled_back",), "import",
        knobs=ngram(load_s=1, crash_at="engine", crash_with="import_error"), moment="line:ImportError", never_ready=True),
    Row("crash-nccl", "the collective's watchdog ends a worker", ("rolled_back",), "nccl|collective|watchdog",
        knobs=ngram(load_s=2, crash_at="50%", crash_with="nccl_watchdog"), moment="line:[Ww]atchdog", never_ready=True),
    Row("crash-kv", "no room for the KV cache", ("rolled_back",), "kv cache",
        knobs=ngram(load_s=2, crash_at="kv_cache", crash_with="kv_cache"), moment="line:KV cache", never_ready=True),
    Row("crash-shm", "/dev/shm is full", ("rolled_back",), "shm|shared memory|no space",
        knobs=ngram(load_s=2, crash_at="30%", crash_with="shm_full"), moment="line:shm|No space", never_ready=True),
    Row("crash-signal", "the API server ends of a signal during the load", ("rolled_back",), "signal 9|SIGKILL|killed",
        knobs=ngram(load_s=2, crash_at="50%", crash_signal=9), moment="start+1.3", never_ready=True),
    Row("crash-exit0", "the engine fails during its load and exits 0", ("rolled_back",), OOM + "|status 0", "19",
        knobs=ngram(load_s=2, crash_at="50%", exit_code=0), moment="line:OutOfMemory", never_ready=True),
    Row("crash-oom-killer", "the kernel's OOM killer takes the engine core", ("rolled_back",), "oom|killed|signal 9|died",
        knobs=ngram(load_s=4), at={"watch+1.5": (f"signal 9 {NGRAM_UNIT} VLLM::EngineCore",)}, moment="action", never_ready=True,
        simulated="no memory controller: SIGKILL of the engine core"),
    Row("crash-supervisor", "the unit's own main process is killed during the load", ("rolled_back",), "signal|killed|supervis|died|result",
        knobs=ngram(load_s=4), at={"watch+1.5": (f"signal 9 {NGRAM_UNIT} swapgate",)}, moment="action", never_ready=True),
    Row("stall", "the load stalls", ("rolled_back",), "stall", "15", knobs=ngram(load_s=3, hang_at="50%"), moment="start+1.8",
        never_ready=True, ci=True),
    Row("stall-collective", "the ranks hang in their first collective", ("rolled_back",), "stall.*|distributed", "15",
        knobs=ngram(load_s=3, hang_at="distributed"), moment="start+1.0", never_ready=True),
    Row("load-slow", "a load far slower than any before, yet moving", ("swapped",), "", "16", serves="ngram",
        knobs=ngram(load_s=2, shards=10, slow_shards=1.2)),
    Row("load-noisy", "a healthy load full of lines that look like failures", ("swapped",), "", serves="ngram",
        knobs=ngram(load_s=2, noise=True)),
    Row("load-over-cap", "a load that moves but outlasts load_timeout_s", ("rolled_back",), "load_timeout_s|longer than", "16",
        knobs=ngram(load_s=2, shards=40, slow_shards=1.5), moment="start+40", never_ready=True, limit_s=110),
    Row("early-health", "/health is 200 during the load, then the engine crashes", ("rolled_back",), OOM,
        knobs=ngram(load_s=3, bind_early=True, crash_at="80%"), moment="line:OutOfMemory", never_ready=True),
    Row("name-wrong", "the server answers to another model name", ("rolled_back",), "somebody-else",
        knobs=ngram(wrong_served_name="somebody-else"), moment="start+0.9", never_ready=True, ci=True),
    Row("first-completion", "the first completion kills the engine (between health and completion)", ("rolled_back",),
        "completion|died|ended|enginedead|engine core", "21", knobs=ngram(die_on_first_completion=True), moment="start+1",
        never_ready=True, ci=True),
    Row("completions-hang", "/health is 200, completions never come", ("rolled_back",), "completion|probe|answer", "20",
        knobs=ngram(completions_hang=True), moment="start+1", never_ready=True, limit_s=120),
    Row("health-lies", "the engine is dead right after its load, /health stays 200", ("rolled_back",), "completions?|engine",
        "20", knobs=ngram(health_ok_but_engine_dead=True), moment="start+1", never_ready=True, limit_s=120),
    Row("answer-garbage", "completions are garbage (wrong quantisation)", ("rolled_back",), "!!!!|answer", "22",
        knobs=ngram(completions_garbage=True), moment="probe", never_ready=True, ci=True),
    Row("answer-other", "another answer to the fixed prompt than this model gave before", ("rolled_back",), "answer", "22",
        knobs=ngram(answer_seed=7), moment="probe", never_ready=True),
    Row("answer-loop", "the same phrase for ever", ("rolled_back",), "answer", "22", knobs=ngram(loop_output=True), moment="probe",
        never_ready=True),
    Row("answer-empty", "an answer without a token", ("rolled_back",), "empty|without a token|no answer|token", "22",
        knobs=ngram(empty_answer=True), moment="start+1", never_ready=True, limit_s=120),
    Row("port-race", "a foreign process takes the target's port after the preflight", ("rolled_back",), f"port {OTHER_PORT}", "24",
        target="elsewhere", at={"stop": (f"foreign {OTHER_PORT} 40",)}, moment="action", never_ready=True, limit_s=90),
    Row("port-old-server", "the old server still answers on the port after its unit stopped", ("rolled_back",), f"port {PORT}", "24",
        before=(f"foreign {PORT} 14",), moment="stop", never_ready=True, limit_s=90,
        simulated="a process outside the unit takes the port the moment it is free and holds it for a while"),
    Row("gpu-not-freed", "GPU memory stays in use after the stop", ("rolled_back",), "GPU 0.*MiB|60000", "25", target="gpu", before=(
        'nvidia {"gpus": [{}]}',), at={"stop": (
            'nvidia {"gpus": [{"memory.used": "60000 MiB"}], "apps": ["GPU-0, 4242, old-engine, 60000 MiB"]}',)},
        moment="action", never_ready=True, simulated="a stand-in nvidia-smi"),
    Row("soak-death", "ready, then dead in its soak", ("rolled_back",), "died|ended|soak", "17",
        knobs=ngram(die_after_ready_s=1.2), moment="probe+1.0", ci=True),
    Row("soak-exit0", "ready, then a worker dies in the soak and the engine exits 0", ("rolled_back",), "died|ended|status 0|soak", "19",
        knobs=ngram(exit0_after_ready_s=0.8, engine_death_exit_s=0.3), moment="probe+0.8"),
    Row("soak-oom-killer", "the OOM killer takes the engine core in the soak", ("rolled_back",), "died|ended|signal|killed|soak", "17",
        at={"soak+0.3": (f"signal 9 {NGRAM_UNIT} VLLM::EngineCore",)}, moment="action",
        simulated="no memory controller: SIGKILL of the engine core"),
    Row("soak-supervisor", "the unit's main process is killed in the soak", ("rolled_back",), "died|ended|signal|killed|soak", "17",
        at={"soak+0.3": (f"signal 9 {NGRAM_UNIT} /usr/local/bin/swapgate",)}, moment="action"),
    Row("soak-hang", "a worker is stopped in the soak: /health 200, completions hang", ("rolled_back",), "answer|completion|probe", "20",
        at={"soak+0.3": (f"signal 19 {NGRAM_UNIT} VLLM::Worker",)}, moment="action", limit_s=200),
    Row("health-flaps", "/health flaps, completions work", ("swapped",), "", "23", serves="ngram",
        knobs=ngram(health_flaps={"period_s": 1.0, "up": 0.5})),
]

STOPS = [
    Row("drain-too-long", "a stream outlasts its drain time, then the server hangs", ("swapped",), "", "27", serves="ngram", restart=True,
        knobs=both({"tokens_per_s": 20}, {}), before=("stream 2000",), limit_s=90),
    Row("stop-ignored", "the old engine ignores SIGTERM", ("swapped",), "", "26", serves="ngram", restart=True,
        knobs=both({"ignore_sigterm": True}, {"ignore_sigterm": False}), limit_s=90),
    Row("stop-orphans", "the old engine leaves workers behind in sessions of their own", ("swapped",), "", "25", serves="ngram",
        restart=True, knobs=both({"orphan_workers": True}, {"orphan_workers": False}), limit_s=90),
    Row("stop-unkillable", "the old engine cannot be killed (D state)", ("failed", "rolled_back"), "still|stop|not free", "26",
        before=("shim-systemctl",), limit_s=150, moment="stop",
        simulated="a systemctl in front of the real one refuses the stop of the old unit"),
    Row("target-ignores-stop", "the target stalls and ignores SIGTERM", ("rolled_back",), "stall", "45",
        knobs=ngram(load_s=3, hang_at="50%", ignore_sigterm=True), moment="start+1.8", never_ready=True, limit_s=90),
    Row("target-orphans", "the target crashes and leaves workers behind", ("rolled_back",), OOM,
        knobs=ngram(load_s=2, crash_at="80%", orphan_workers=True), moment="line:OutOfMemory", never_ready=True, limit_s=90),
    Row("abort-in-load", "the swap is stopped by hand during a load: the engine swallows the first SIGTERM", ("recovered", "rolled_back"),
        "watch", "45", knobs=ngram(load_s=6), at={"watch+1.5": (f"sh systemctl stop --no-block {SWAP_UNIT}",)}, moment="action",
        never_ready=True, limit_s=90, ci=True),
    Row("hand-stop-load", "an operator stops the target's unit during its load", ("rolled_back",), "stop|inactive|did not start|asked", "33",
        knobs=ngram(load_s=6), at={"watch+1.5": (f"sh systemctl stop --no-block {NGRAM_UNIT}",)}, moment="action", never_ready=True,
        limit_s=90),
    Row("hand-stop-soak", "an operator stops the target's unit in its soak", ("rolled_back",), "stop|died|soak", "33",
        at={"soak+0.2": (f"sh systemctl stop {NGRAM_UNIT}",)}, moment="action"),
    Row("hand-start-old", "an operator starts the old unit during the load", ("rolled_back", "swapped"), "", "33", serves="last good",
        knobs=ngram(load_s=4), at={"watch+1.5": (f"sh systemctl start --no-block {BASE_UNIT}",)}, moment="action", limit_s=90),
    Row("hand-restart-soak", "an operator restarts the target in its soak", ("rolled_back", "swapped"), "", "33", serves="last good",
        at={"soak+0.2": (f"sh systemctl restart --no-block {NGRAM_UNIT}",)}, moment="action", limit_s=90),
    Row("rollback-fails", "the roll back's own start fails", ("failed",), OOM + ".*rollback_cause.*" + OOM, "34", serves="", limit_s=90,
        knobs=both({"crash_at": "50%", "load_s": 1}, {}), moment="line:OutOfMemory", never_ready=True, settle_s=1, ci=True),
    Row("rollback-retries", "the roll back's first start fails, systemd's second try works", ("rolled_back",), OOM, "34",
        knobs=both({"crash_at": "50%", "load_s": 1}, {}), at={"rollback-watch+0.9": ("knobs {}",)}, moment="line:OutOfMemory",
        never_ready=True, limit_s=90),
    Row("rollback-port", "the port is taken while it rolls back, and stays so", ("failed",), f"port {PORT}", "34", serves="",
        before=(f"foreign {PORT} 35",), moment="stop", limit_s=90, settle_s=1, never_ready=True),
    Row("start-limit", "the target's unit is at its start limit from before", ("swapped",), "", "44", serves="ngram", before=(
        f"sh cp /var/lib/swapgate/releases/*/{NGRAM_UNIT} /etc/systemd/system/; cd /var/lib/swapgate/releases; "
        f"cp $(dirname */{NGRAM_UNIT})/variant.json /etc/swapgate/variants/ngram.json; systemctl daemon-reload; "
        f"for n in 1 2 3 4; do systemctl start {NGRAM_UNIT}; done; systemctl is-failed {NGRAM_UNIT}",), says="failed"),
]

AROUND = [
    Row("same-again", "the same deploy once more while it runs", ("swapped",), "", serves="ngram", knobs=ngram(load_s=3),
        at={"watch+0.5": ("ask ngram second",)}, says='"attached": true', ci=True),
    Row("same-after", "the same deploy once more after it served", ("unchanged",), "", target="baseline", ci=True),
    Row("changed-same-name", "a changed release of the serving variant crashes", ("rolled_back",), OOM, target="baseline2",
        knobs={"variants": [{"when": "--max-num-seqs 16", "load_s": 2, "crash_at": "50%"}]}, moment="line:OutOfMemory",
        never_ready=True, ci=True),
    Row("changed-same-name-good", "a changed release of the serving variant works", ("swapped",), "", target="baseline2",
        serves="baseline2"),
    Row("journal-vacuumed", "the journal is rotated and vacuumed during the load, which then fails", ("rolled_back",), OOM, "35",
        knobs=ngram(load_s=4, crash_at="90%"), moment="start+4",
        at={"watch+1.5": ("sh journalctl --rotate; journalctl --vacuum-time=1s",)}, never_ready=True),
    Row("journal-killed", "journald is killed during the load", ("swapped",), "", "36", knobs=ngram(load_s=4), serves="ngram",
        at={"watch+1.5": ("sh systemctl kill -s KILL systemd-journald",)}),
    Row("clock-forward", "the wall clock jumps an hour ahead during the swap", ("swapped",), "", "37", serves="ngram",
        before=("shim-clock 3600",), simulated="the host program's wall clock alone, in its own process"),
    Row("clock-back", "the wall clock jumps an hour back during the swap", ("swapped",), "", "37", serves="ngram",
        before=("shim-clock -3600",), simulated="the host program's wall clock alone, in its own process"),
    Row("clock-back-crash", "the wall clock jumps an hour back and the target crashes", ("rolled_back",), OOM, "37", knobs=CRASH,
        before=("shim-clock -3600",), simulated="the host program's wall clock alone, in its own process",
        moment="line:OutOfMemory", never_ready=True),
    Row("daemon-reload", "daemon-reload again and again during the swap", ("swapped",), "", "40", serves="ngram", before=(
        "bg reload while sleep 0.5; do systemctl daemon-reload; done",), after=("sh systemctl stop fault-reload",)),
    Row("daemon-reexec", "systemd re-executes itself during the load", ("swapped",), "", "40", knobs=ngram(load_s=4), serves="ngram",
        at={"watch+1": ("sh systemctl daemon-reexec",)}),
    Row("mount-readonly", "the model's mount is read-only", ("swapped",), "", "6", serves="ngram",
        before=(f"sh mount --bind {MODEL} {MODEL} && mount -o remount,bind,ro {MODEL}",)),
    Row("disk-full-state", "the disk of the state fills up during the load, which then crashes", ("rolled_back", "recovered", "failed"),
        "", "7", knobs=ngram(load_s=4, crash_at="90%"), before=("small-state",), at={"watch+1": ("fill-state",)}, moment="start+3.8",
        simulated="a tmpfs under the state folder, shrunk to what it holds", limit_s=40, settle_s=30,
        after=("sh umount -l /var/lib/swapgate",), serves="baseline*"),
    Row("disk-full-run", "/run fills up during the load", ("swapped", "rolled_back"), "", "7", serves="last good", knobs=ngram(load_s=4),
        at={"watch+1": ("sh mount -o remount,size=$(df -k --output=used /run | tail -1)k /run",)},
        after=("sh mount -o remount,size=50% /run",), simulated="the tmpfs of /run is shrunk to what it holds"),
    Row("dies-next-day", "the last good variant's engine dies in service and exits 0", ("recovered",), "", "18, 19", target="",
        at={"end": (f"signal 9 {BASE_UNIT} VLLM::Worker", "sleep 2.5")}, settle_s=25, ci=True),
    Row("supervisor-dies", "the last good variant's main process is killed in service", ("recovered",), "", "18", target="",
        at={"end": (f"signal 9 {BASE_UNIT} /usr/local/bin/swapgate", "sleep 1")}, settle_s=25),
    Row("crash-loop", "the last good variant crashes at every start", ("failed",), "", "18", target="", serves="", at={"end": (
        'knobs {"crash_at": 0.2}', f"signal 9 {BASE_UNIT} VLLM::Worker", "sleep 14",
        f"sh systemctl show {BASE_UNIT} --property=ActiveState,NRestarts,Result")},
        says="ActiveState=failed", settle_s=1, after=("knobs {}",)),
    Row("state-corrupt-boot", "the state file is corrupt at boot", ("recovered", "unchanged"), "state.json", target="",
        at={"end": (f"sh truncate -s 30 {STATE}", "reboot")}, settle_s=25),
    Row("boot", "a reboot between two swaps", ("recovered", "unchanged"), "", target="", at={"end": ("reboot",)}, settle_s=25),
]


def killed(phase: str) -> Row:
    """The swap's main process is killed in a phase."""
    expect = {"preflight": ("refused", "recovered"), "way back": ("refused", "recovered"),
              "commit": ("recovered", "swapped")}.get(phase, ("recovered",))
    back = phase.startswith("rollback-")
    return Row(f"kill-{phase.replace(' ', '-')}", f"kill -9 of the swap in phase {phase}", expect, "" if phase == "commit" else phase, "30",
               knobs=CRASH if back else {}, at={phase: ("kill-swap",)}, moment="action", limit_s=90,
               serves="last good" if phase == "commit" else "baseline", ci=phase in ("stop", "watch", "commit"))


def power(phase: str, verb: str) -> Row:
    """Power cut or reboot in a phase."""
    expect = ("recovered", "swapped") if phase == "commit" else ("recovered", "refused") if phase in UNTOUCHED else ("recovered",)
    if verb == "reboot" and phase != "commit":
        expect = (*expect, "rolled_back")
    what = {"power-cut": "power cut", "reboot": "reboot"}[verb]
    return Row(f"{verb}-{phase.replace(' ', '-')}", f"{what} in phase {phase}", expect, "" if phase == "commit" else phase, "31",
               knobs=CRASH if phase.startswith("rollback-") else {}, at={phase: (verb,)}, moment="action", limit_s=120, settle_s=30,
               serves="last good" if phase == "commit" else "baseline", ci=(verb, phase) == ("power-cut", "watch"))


def dropped(phase: str) -> Row:
    """The connection of whoever asked breaks in a phase."""
    return Row(f"ssh-{phase.replace(' ', '-')}", f"SSH drops in phase {phase}", ("swapped",), "", "28, 29", serves="ngram",
               at={phase: ("drop-ssh",)}, ci=phase == "watch")


DOUBLE = [
    Row("kill-resolve-too", "kill -9 of the swap in its watch, and of the resolve that follows", ("recovered",), "watch", "30",
        at={"watch": ("kill-swap-and-resolve",)}, moment="action", limit_s=90, settle_s=30),
    Row("power-cut-twice", "a power cut in the watch, and another while the next boot starts the last good one", ("recovered",), "watch", "31",
        at={"watch": ("power-cut",), "end": ("sh true", "power-cut")}, moment="action", limit_s=120, settle_s=30),
]

ROWS: list[Row] = [
    *REFUSED, *LOADS, *STOPS, *AROUND,
    *[killed(phase) for phase in (*PHASES, *BACK_PHASES)],
    *DOUBLE,
    *[power(phase, "power-cut") for phase in (*PHASES, "rollback-stop", "rollback-watch")],
    *[power(phase, "reboot") for phase in PHASES],
    *[dropped(phase) for phase in PHASES if phase not in ("preflight",)],
]


def find(row_id: str) -> Row:
    """The row of that id. KeyError names the ids that exist."""
    for row in ROWS:
        if row.id == row_id:
            return row
    raise KeyError(f"no row '{row_id}'; there are: {', '.join(row.id for row in ROWS)}")
