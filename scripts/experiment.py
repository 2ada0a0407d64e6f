#!/usr/bin/env python3
"""Measure variants of one host against its base, load by load, and put back what served before.

    scripts/experiment.py plan.yml                 says what it costs and what it can find, asks, then measures
    scripts/experiment.py --resume RUN             goes on after an interruption; finished arms are not measured again
    scripts/experiment.py --restore RUN            only puts back what served before

The plan's keys are in experiment_plan.py, an example in docs/experiment.md. Everything is in the run folder (default
runs/ID): experiment.json says how far it came.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.swapgate.core.plugins.filter import swapgate as filters  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import progress, records, variants  # noqa: E402

from scripts import experiment_plan as plans  # noqa: E402
from scripts import playbooks, run_folder, verdict  # noqa: E402
from scripts.json_files import InputError  # noqa: E402

OK, NOT_FINISHED, REFUSED, NO_SERVICE, INTERRUPTED = 0, 1, 2, 3, 130
STATE = "experiment.json"
# Of a load, what is the host's and not the variant's.
HOST_KEYS = ("engine_package", "driver", "gpus", "host_facts", "nccl_env")
STATE_KEYS = ("id", "host", "inventories", "plan", "base", "table", "served_before", "steps", "outcome")
SPEC = ROOT / "roles/vllm_service/meta/argument_specs.yml"
# A swap that waits to be confirmed goes back by itself after this many times what its measurement should take.
CONFIRM_FACTOR, CONFIRM_LEAST_S = 3.0, 3600.0
POLL_S = 5.0
SWAP_LIMIT_S = 3 * 3600.0

EPILOG = """exit codes:
  0    finished: every arm was measured or is recorded with its cause, and what served before serves again
  1    not finished, what served before serves again; --resume goes on
  2    refused: bad input, a failed preflight, over the budget, or no consent; nothing that serves was touched
  3    what served before could not be put back: look at `playbooks/status.yml`, then --restore
  130  interrupted (Ctrl-C, SIGTERM); what served before serves again; --resume goes on
"""

JsonDict = dict[str, Any]


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class Failed(Exception):
    """The experiment cannot go on; the text says why."""


class NoService(Failed):
    """What served before does not serve, and could not be brought back."""


class Host:
    """The one host of the experiment, reached by Ansible only."""

    def __init__(self, inventories: Sequence[str], name: str, say: Callable[[str], None]) -> None:
        self.inventories = [str(Path(path).resolve()) for path in inventories]
        self.name, self.say = name, say
        self.stop = threading.Event()

    def _run(self, **what: Any) -> tuple[list[JsonDict], list[str]]:
        """(results of its tasks, why it failed: empty when it did not)."""
        results: list[JsonDict] = []
        failures: list[str] = []

        def handle(event: JsonDict) -> None:
            data = event.get("event_data") or {}
            result = data.get("res") or {}
            kind = event.get("event")
            if kind == "verbose":
                for text in str(event.get("stdout", "")).splitlines():
                    if progress.parse(text):
                        self.say(text.strip())
            elif kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
                results.append(result)
                if kind != "runner_on_ok" and not data.get("ignore_errors"):
                    said = [result.get("msg"), result.get("stderr")]
                    failures.append(" ".join(str(part).strip() for part in said if part) or str(result))

        if self.stop.is_set():
            raise Interrupted
        status, said = playbooks.run(handle, self.inventories, **what)
        if status == "canceled":
            raise Interrupted
        if status != "successful" and not failures:
            failures.append(said or "ansible failed without a word")
        return results, failures if status != "successful" else []

    def play(self, playbook: str, **extra: Any) -> tuple[list[JsonDict], list[str]]:
        """Run one of our playbooks on this host."""
        extra = {"allow_disruption": True, **extra}
        # What a host once said, such as the name of its variant, is never a template here.
        given = {key: playbooks.literal(value) if isinstance(value, str) else value for key, value in extra.items()}
        return self._run(playbook=str(ROOT / "playbooks" / playbook), limit=self.name, extravars=given)

    def ask(self, command: str) -> Any:
        """The JSON that one command of the host program prints. Failed when it cannot be had."""
        module = {"module": "ansible.builtin.command", "module_args": f"/usr/local/bin/swapgate {command}"}
        results, failures = self._run(host_pattern=self.name, options=["--become"], **module)
        if failures:
            raise Failed(f"{self.name}: swapgate {command}: {failures[0]}")
        said = results[-1].get("stdout") if results else None
        try:
            return json.loads(said or "")
        except ValueError as error:
            raise Failed(
                f"{self.name}: swapgate {command}: found {said!r:.80}, expected JSON; stage it anew"
            ) from error

    def end_measuring(self) -> None:
        """End what a controller that is gone left behind: it would measure beside us."""
        words = "systemctl stop swapgate-bench.service swapgate-record.service"
        self._run(host_pattern=self.name, options=["--become"], module="ansible.builtin.command", module_args=words)

    def variables(self) -> JsonDict:
        """The host's variables as the inventory has them. Failed when they cannot be had."""
        words = [word for path in self.inventories for word in ("-i", path)]
        command = [str(Path(sys.executable).parent / "ansible-inventory"), *words, "--host", self.name]
        done = subprocess.run(
            [*command, "--playbook-dir", str(ROOT / "playbooks")],
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Failed(f"ansible-inventory: {done.stderr.strip()[-1000:]}")
        found: JsonDict = json.loads(done.stdout)
        return found


def the_host(inventories: Sequence[str], limit: str | None) -> str:
    """The name of the one host. Failed, with the names, when that is not clear."""
    words = [word for path in inventories for word in ("-i", str(Path(path).resolve()))]
    program = str(Path(sys.executable).parent / "ansible")
    done = subprocess.run(
        [program, *words, "vllm_hosts", "--list-hosts", *(["--limit", limit] if limit else [])],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.strip() for line in done.stdout.splitlines()[1:] if line.strip()]
    if len(found) != 1 or done.returncode != 0:
        asked = f"--limit {limit}" if limit else ", ".join(inventories)
        names = ", ".join(found) or "none"
        said = " ".join(line for line in done.stderr.splitlines() if "ERROR" in line and not found)
        raise Failed(
            f"{asked}: found the hosts {names} in vllm_hosts, expected one. Name it with --limit. {said}".strip()
        )
    return found[0]


def serving(status: JsonDict) -> str | None:
    """The variant that serves, by `swapgate status`."""
    return next((unit["variant"] for unit in status["units"] if unit["active"] == "active"), None)


def load_of(status: JsonDict, variant: str) -> JsonDict:
    """What the host knows of the load that serves."""
    return next((unit for unit in status["units"] if unit["variant"] == variant), {})


class Experiment:
    """A run folder and its host: `carry_out` does the steps that are left, `restore` brings the host home."""

    def __init__(self, run: Path, host: Host, state: JsonDict, say: Callable[[str], None]) -> None:
        self.run, self.host, self.state, self.say = run, host, state, say
        self.plan = plans.read_plan(state["plan"], str(run / STATE))
        self.steps: list[JsonDict] = state["steps"]
        self.base: str = state["base"]
        self.table: JsonDict = state["table"]
        self.known_s: dict[str, float] = {}
        self.new: dict[str, str] = {}  # files of a run folder that is not there yet

    def create(self) -> None:
        """Write the run folder of a new experiment."""
        run_folder.make_private(self.run)
        for name, text in self.new.items():
            records.write_atomic(self.run / name, text)
        self.save()

    def save(self) -> None:
        """The state, atomically: a kill at any point leaves the one before or this one."""
        records.write_json(self.run / STATE, self.state)

    # --- what it costs ----------------------------------------------------------------------------------------------

    def measure_s(self) -> dict[str, float]:
        """Seconds of a measurement by kind of step, from those that are done here."""
        times: dict[str, list[float]] = {}
        for one in self.steps:
            if one["state"] == "done" and one["seconds"]:
                times.setdefault(one["kind"], []).append(one["seconds"])
        found = {kind: max(values) for kind, values in times.items()}
        if "arm" in found and "trial" not in found and self.plan.trial:
            passes = 1 + len(self.plan.concurrency) * (self.plan.repeats + 1)
            recordings = (len(self.plan.trial["grid"]) + 1) * (self.plan.trial["repeats"] + plans.WARM_UP)
            found["trial"] = found["arm"] / passes * recordings
        return found

    def cost(self, status: JsonDict) -> JsonDict:
        """The budget of what is left."""
        return plans.budget(self.steps, self.known_s, serving(status), self.measure_s(), self.plan.load_minutes)

    def check_budget(self, status: JsonDict) -> None:
        """Failed when what is left, and what was spent, is more than the plan allows."""
        cost = self.cost(status)
        spent = sum(one.get("wall_s", 0.0) for one in self.steps)
        left = (cost["load_s"] or 0.0) + (cost["measure_s"] or 0.0)
        if spent + left > self.plan.budget_minutes * 60:
            raise Failed(
                f"over the budget: {plans.minutes(spent)} spent and at least {plans.minutes(left)} to come "
                f"({cost['loads']} loads), the plan has budget_minutes: {self.plan.budget_minutes:g}. Take fewer arms, "
                "boots, prompts or repeats, or raise it."
            )

    # --- one step ---------------------------------------------------------------------------------------------------

    def settle(self) -> JsonDict:
        """Wait until no swap moves: it has ended, or waits to be confirmed. Returns the status."""
        deadline = time.monotonic() + SWAP_LIMIT_S
        while True:
            status: JsonDict = self.host.ask("status")
            swap = status["swap"]
            if not swap or swap["outcome"] or swap["phase"] == "confirm":
                return status
            if time.monotonic() > deadline:
                raise Failed(f"{self.host.name}: the swap to {swap['to']['variant']} does not end")
            self.say(progress.line(self.host.name, status, time.time()))
            self.host.stop.wait(POLL_S)

    def decline(self, because: str) -> None:
        """Send the variant that waits back, and wait until the one before serves."""
        _, failures = self.host.play("confirm.yml", decline=True, because=because)
        if failures:
            self.settle()

    def swap_to(self, variant: str, stays: bool) -> str | None:
        """Have a variant serve; returns why it does not. One that does not stay goes back by itself in the end."""
        measure = self.measure_s()
        wait = max(CONFIRM_LEAST_S, CONFIRM_FACTOR * max(measure.values(), default=0.0))
        extra = {} if stays else {"confirm_within_s": round(wait)}
        results, failures = self.host.play("deploy.yml", variant=variant, swapgate_variants=self.table, **extra)
        if not failures:
            return None
        ended = [result["status"]["swap"] for result in results if (result.get("status") or {}).get("swap")]
        if not ended:
            raise Failed(f"'{variant}' was not swapped to: {failures[0]}")
        cause = ended[-1]["cause"] or {}
        said = str(cause.get("root_cause") or cause.get("what") or failures[0])
        if ended[-1]["outcome"] == "failed":
            raise NoService(f"'{variant}' failed ({said}), and so did the way back. Look at playbooks/status.yml.")
        return said

    def bring(self, one: JsonDict) -> str | None:
        """Have the step's variant serve; returns why it cannot."""
        status = self.settle()
        waits = bool(status["swap"]) and status["swap"]["outcome"] is None
        if serving(status) == one["variant"] and (waits or one["arm"] == "A"):
            return None
        if waits:
            self.decline(f"experiment {self.state['id']}: next is {one['variant']}")
            status = self.settle()
        if one["arm"] == "A":
            if serving(status) == self.base:
                return None
            return self.swap_to(self.base, stays=True)
        trial = one["kind"] == "trial"
        return self.swap_to(one["variant"], stays=self.plan.order == "fewest" and not trial)

    def loads(self) -> list[JsonDict]:
        """The loads that the run folder has."""
        found: list[JsonDict] = run_folder.read_run(self.run)["loads"]
        return found

    def measure(self, one: JsonDict) -> str | None:
        """Measure what serves into the run folder; returns why that failed on the engine's side."""
        if one["kind"] == "trial":
            return self.trial(one)
        _, failures = self.host.play(
            "benchmark.yml",
            run=str(self.run),
            arm=one["arm"],
            prompts=str(self.run / "prompts.jsonl"),
            concurrency=list(self.plan.concurrency),
            repeats=self.plan.repeats,
            cache=self.plan.cache,
        )
        load = next((load for load in self.loads() if load["boot"] == one["boot"]), None)
        if load is None:
            raise Failed(f"'{one['variant']}' was not measured: {failures[0] if failures else 'nobody said why'}")
        return None if load["outcome"] == "measured" else str(load["cause"])

    def note_failure(self, one: JsonDict, cause: str) -> None:
        """An arm that did not come to serve is a result: a load of the run folder without a request."""
        about = run_folder.read_run(self.run)
        load: JsonDict = dict.fromkeys(run_folder.LOAD_KEYS)
        load.update(arm=one["arm"], boot=one["boot"], variant=one["variant"], outcome="failed", cause=cause, changes=[])
        load.update(speculative_config=self.table[one["variant"]].get("speculative_config"), ended_unix=time.time())
        place = self.run / "raw" / f"{one['arm']}-{one['boot']}"
        records.write_json(place / "load.json", load)
        records.write_json(place / "request.json", {"prompts": []})
        about["loads"] = [*(other for other in about["loads"] if other["boot"] != one["boot"]), load]
        records.write_json(self.run / "run.json", about)

    def trial(self, one: JsonDict) -> str | None:
        """Record the whole grid on one load, and judge it: RUN/trial becomes a run folder of its own."""
        assert self.plan.trial
        points = self.plan.trial["grid"]
        folder = self.run / "trial"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        prompts = run_folder.read_lines(self.run / "prompts.jsonl")
        request = {
            "variant": one["variant"],
            "prompts": prompts,
            "repeats": self.plan.trial["repeats"] + plans.WARM_UP,
            "settings": plans.trial_settings(points),
            "seed": 1,
            "salt": self.state["id"] if self.plan.cache == "cold" else None,
        }
        records.write_json(folder / "request.json", request, 0o600)
        status = self.host.ask("status")
        started = time.time()
        recorded = folder / "raw" / "recorded.jsonl"
        recorded.parent.mkdir()
        _, failures = self.host.play("record.yml", request=str(folder / "request.json"), out=str(recorded))
        lines = run_folder.read_lines(recorded)
        if failures and not lines:
            raise Failed(f"the trial was not recorded: {failures[0]}")
        if failures:
            return failures[0]
        arms = plans.trial_arms(points)
        run_folder.write_lines(folder / "raw.jsonl", plans.trial_lines(lines, arms, one["variant"]))
        run_folder.write_lines(folder / "transcripts.jsonl", plans.transcripts(lines, arms, one["variant"]), 0o600)
        unit = load_of(status, one["variant"])
        base = next((load for load in self.loads() if load["arm"] == "A" and load["outcome"] == "measured"), {})
        load = {
            # The recorder says nothing of the host: it is the base's.
            **{key: base.get(key) for key in HOST_KEYS},
            "engine_version": self.table[one["variant"]].get("engine_version") or base.get("engine_version"),
            "variant": one["variant"],
            "boot": 1,
            "release": unit.get("release"),
            "unit": unit.get("unit"),
            "changes": (unit.get("load") or {}).get("changes") or [],
            "load_s": (unit.get("load") or {}).get("ready_after_s"),
            "speculative_config": self.table[one["variant"]].get("speculative_config"),
            "outcome": "measured",
            "cause": None,
            "started_unix": started,
            "ended_unix": time.time(),
        }
        about = dict(run_folder.read_run(self.run), kind="trial", ended_unix=time.time())
        about["settings"] = {**about["settings"], "concurrency": [1], "trial": self.plan.trial}
        about["loads"] = [
            {**dict.fromkeys(run_folder.LOAD_KEYS), **load, "arm": arm, "setting": name} for name, arm in arms.items()
        ]
        records.write_json(folder / "run.json", about)
        for name in ("prompts.jsonl", "prediction.json"):
            if (self.run / name).exists():
                shutil.copyfile(self.run / name, folder / name)
        (folder / "request.json").unlink()
        self.check_prediction(folder, lines)
        self.judge(folder)
        return None

    def check_prediction(self, folder: Path, recorded: Sequence[JsonDict]) -> None:
        """trial/prediction-check.json: which term of the prediction failed, where it lies beside its own answers."""
        told = records.read_if_there(folder / "prediction.json")
        if told is None or not self.state.get("prediction"):
            return
        source = Path(self.state["prediction"]).parent / "prediction"
        needs = {name: source / name for name in ("transcripts.jsonl", "probe.json", "variant.json")}
        if not all(file.exists() for file in needs.values()):
            return
        counted = folder / "raw" / "counted.jsonl"
        run_folder.write_lines(counted, [line for line in recorded if line["repeat"] >= plans.WARM_UP], 0o600)
        words = [
            sys.executable,
            str(ROOT / "scripts/predict.py"),
            "check",
            str(needs["transcripts.jsonl"]),
            str(counted),
        ]
        words += ["--probe", str(needs["probe.json"]), "--variant", str(needs["variant.json"]), "--json"]
        if told.get("fixed_cost"):  # then it was against the plain base, else against drafting switched off
            plain = folder / "raw" / "plain.jsonl"
            mine = [line for line in run_folder.read_lines(self.run / "raw.jsonl") if line["arm"] == "A"]
            mine = [{**line, "id": line["prompt_id"]} for line in mine if line.get("concurrency") == 1]
            run_folder.write_lines(plain, mine, 0o600)
            parts = [told["fixed_cost"], told["fixed_cost"].get("drafting") or {}]
            cost = ",".join(str(part[key]) for part in parts for key in ("value", "low", "high") if part)
            words += ["--plain", str(plain), "--fixed-cost", cost]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode in (0, 1) and done.stdout:
            records.write_atomic(folder / "prediction-check.json", done.stdout)
        else:
            self.say(f"the prediction was not checked: {done.stderr.strip()[-500:]}")

    def carry_out(self) -> None:
        """Every step that is left, each written down before and after."""
        while (at := plans.next_step(self.steps)) is not None:
            one = self.steps[at]
            self.save()
            status = self.settle()
            self.check_budget(status)
            cost = self.cost(status)
            left = cost["load_s"], cost["measure_s"]
            told = "not known yet" if None in left else "about " + plans.minutes(sum(part or 0.0 for part in left))
            self.say(f"step {at + 1} of {len(self.steps)}: {one['arm']} is '{one['variant']}'; time left: {told}")
            begun = time.time()
            if one["state"] == "measuring":
                self.host.end_measuring()
            one["boot"] = 1 + max((load["boot"] for load in self.loads()), default=0)
            one["state"] = "pending"
            cause = self.bring(one)
            if cause is None:
                one.update(state="measuring", started_unix=time.time())
                self.save()
                cause = self.measure(one)
                one["seconds"] = round(time.time() - one["started_unix"], 1)
            if cause is not None and one["arm"] != "A" and (one["kind"] == "trial" or one["state"] == "pending"):
                self.note_failure(one, cause)
            one["wall_s"] = round(one.get("wall_s", 0.0) + time.time() - begun, 1)
            if cause is not None and one["arm"] == "A":
                one.update(state="pending")
                self.save()
                raise NoService(f"the base '{self.base}' does not serve or cannot be measured: {cause}")
            one.update(state="failed" if cause else "done", cause=cause, ended_unix=time.time())
            self.save()
            self.say(f"{one['arm']} '{one['variant']}': {'failed: ' + cause if cause else 'measured'}")
            if one["kind"] == "trial" and not cause:
                self.after_trial()

    def after_trial(self) -> None:
        """Say who won, and take it as an arm where the plan wants that."""
        assert self.plan.trial
        points = self.plan.trial["grid"]
        file = self.run / "trial/verdict.json"
        found = json.loads(file.read_text(encoding="utf-8"))["verdicts"] if file.exists() else []
        for result in found:
            self.say(f"trial: {result['sentence']}")
        name = plans.winner_of(found, plans.trial_arms(points))
        if name is None:
            self.say("trial: no setting is faster than drafting switched off on the same load")
            return
        point = next(point for point in points if plans.setting_name(point) == name)
        variant, entry = plans.setting_variant(point, self.base)
        same = [
            other for other, has in self.table.items() if has.get("speculative_config") == entry["speculative_config"]
        ]
        variant = next((other for other in same if not self.table[other].get("trial")), variant)
        self.state["winner"] = variant
        if self.plan.confirm_winner:
            self.table.setdefault(variant, entry)
            self.steps[:] = plans.add_winner(self.steps, variant, self.base)
            self.say(f"trial: {name} won and is measured as '{variant}', a unit of its own")
        else:
            shown = "" if variant in self.table else yaml.safe_dump({variant: entry}, sort_keys=False)
            self.say(
                f"trial: {name} won against drafting switched off, which is not the plain base. Confirm it as a unit "
                f"of its own, by a plan with variants: [{variant}]"
                f"{', after this entry in group_vars/all/variants.yml:' if shown else ''}"
            )
            for line in shown.splitlines():
                self.say("  " + line)

    # --- the end ----------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Have exactly what served before serve again. NoService when that cannot be done."""
        before = self.state["served_before"]
        status = self.settle()
        if status["swap"] and status["swap"]["outcome"] is None:
            self.decline(f"experiment {self.state['id']}: over or interrupted")
            status = self.settle()
        now = load_of(status, serving(status) or "")
        if now.get("release") != before["release"]:
            self.say(f"putting '{before['variant']}' back")
            _, failures = self.host.play("rollback.yml", release=before["release"], variant=before["variant"])
            status = self.settle()
            now = load_of(status, serving(status) or "")
            if now.get("release") != before["release"]:
                raise NoService(failures[0] if failures else f"'{before['variant']}' does not serve")
        self.state["restored_unix"] = time.time()
        self.say(f"{self.host.name}: '{before['variant']}' serves, as before")

    def take_in(self) -> None:
        """After an interruption: a load that is in the run folder whole is measured, whatever the state says."""
        run_folder.rebuild(self.run)
        for one in self.steps:
            if one["state"] == "measuring" and one["kind"] == "arm":
                load = next((load for load in self.loads() if load["boot"] == one["boot"]), None)
                if load and load["arm"] == one["arm"] and load["outcome"] == "measured":
                    one.update(state="done", seconds=round(load["ended_unix"] - load["started_unix"], 1))
        self.save()

    def judge(self, folder: Path) -> None:
        """verdict.json of a run folder, and its report."""
        self.say(run_folder.judge(folder)["sentence"])
        words = [sys.executable, str(ROOT / "scripts/report.py"), str(folder)]
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.say(f"no report: {made.stderr.strip()[-500:]}")

    def finish(self) -> None:
        """All steps are done: write the results, say the verdicts."""
        self.state["outcome"] = "finished"
        self.save()
        for one in self.steps:
            if one["state"] == "failed":
                self.say(f"{one['arm']} '{one['variant']}' failed: {one['cause']}")
        for line in run_folder.table(self.run):
            self.say(line)
        if any(one["arm"] != "A" and (one["kind"] == "arm" or one["state"] == "failed") for one in self.steps):
            self.judge(self.run)
        self.say(f"results: {self.run}")


# --- from a plan to an experiment ------------------------------------------------------------------------------------


def trial_problem(table: JsonDict, plan: plans.Plan) -> str | None:
    """Why the plan's trial cannot be had with these variants."""
    if plan.trial is None:
        return None
    entry = table.get(plan.trial["variant"]) or {}
    if not entry.get("trial"):
        return f"trial: '{plan.trial['variant']}' is no trial variant (it has no `trial: true`). Name one that is."
    loaded = (entry.get("speculative_config") or {}).get("num_speculative_tokens", 0)
    most = max(point["k"] for point in plan.trial["grid"])
    if most > loaded:
        return f"trial: the grid's k goes to {most}, '{plan.trial['variant']}' loads {loaded}. Raise its number there."
    return None


def tables_of(values: JsonDict) -> tuple[JsonDict, JsonDict]:
    """(variants, models) of a host: the inventory's laid over those that ship. Failed says what is wrong with them."""
    try:
        return filters.tables(values.get("swapgate_variants", {}), values.get("swapgate_models", {}))
    except variants.VariantError as error:
        raise Failed(str(error)) from error


def check_variants(table: JsonDict, names: Sequence[str], values: JsonDict) -> JsonDict:
    """Every arm by its name, resolved; none but the trial is a trial. Failed says which does not resolve."""
    resolved: JsonDict = {}
    spec = yaml.safe_load(SPEC.read_text(encoding="utf-8"))["argument_specs"]
    _, models = tables_of(values)
    for name in names:
        try:
            found = variants.resolve(name, table, models, values["swapgate_model"], values["swapgate_host"], spec)
        except (variants.VariantError, KeyError) as error:
            raise Failed(f"plan: {error}") from error
        if found.get("trial"):
            raise Failed(f"plan: '{name}' is a trial variant. It goes under `trial`, not among the arms.")
        resolved[name] = found
    return resolved


def plan_of(file: str) -> plans.Plan:
    """The plan of a YAML file. Failed or PlanError says what is wrong with it."""
    try:
        return plans.read_plan(yaml.safe_load(Path(file).read_text(encoding="utf-8")), file)
    except OSError as error:
        raise Failed(f"{file}: cannot be read: {error.strerror}; expected a plan, see docs/experiment.md") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise Failed(f"{file}: not YAML: {' '.join(str(error).split())}; see docs/experiment.md") from error


def prediction_of(file: Path) -> JsonDict:
    """A prediction. Failed or FolderError when it is none."""
    found = run_folder.read_object(file, "what playbooks/predict.yml wrote", "predict anew, or leave it out")
    rows = found.get("settings")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Failed(f"{file}: found no list of settings, expected what playbooks/predict.yml wrote; predict anew")
    return found


def begin(args: argparse.Namespace, plan: plans.Plan, host: Host, say: Callable[[str], None]) -> Experiment:
    """A new run folder from a plan; nothing of the host is touched. Failed or InputError when it cannot be."""
    run = Path(args.run or ROOT / "runs" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())).resolve()
    if (run / STATE).exists():
        raise Failed(f"{run} holds an experiment already. Go on with it by --resume {run}, or name another folder.")
    foretold = args.prediction or plan.prediction
    prediction = prediction_of(Path(foretold)) if foretold else None
    given = verdict.read_prompts(verdict.lines_of(plan.prompts), plan.prompts)
    values = host.variables()
    status: JsonDict = host.ask("status")
    now = serving(status)
    swap = status["swap"]
    if now is None or (swap and swap["outcome"] is None):
        raise Failed(f"{host.name}: found {now or 'nothing'} serving, expected a variant that stays. Deploy the base.")
    base = plan.base or now
    table, _ = tables_of(values)
    left_out = plans.to_skip(plan, prediction, table)
    if plan.skip_predicted:
        plan = plans.without(plan, left_out)
    for point in plan.grid:
        table.setdefault(*plans.setting_variant(point, base))
    resolved = check_variants(table, list(plans.arms_of(plan, base).values()), values)
    problem = trial_problem(table, plan)
    if problem:
        raise Failed(f"plan: {problem}")
    texts = [
        {"id": one.id, "class": one.kind, "messages": list(one.messages), "max_tokens": one.max_tokens} for one in given
    ]
    chosen = plans.chosen_prompts(texts, plan.first_prompts, plan.max_tokens)
    kept = {one["id"] for one in chosen}
    methods = [(arm.get("speculative_config") or {}).get("method") for arm in resolved.values()]
    methods += ["ngram"] if plan.trial else []
    run_folder.must_fit(
        [one for one in given if one.id in kept], list(dict.fromkeys(filter(None, methods))), plan.prompts
    )
    prompt_lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in chosen)
    unit = load_of(status, now)
    state = {
        "schema": 1,
        "id": run.name,
        "host": host.name,
        "inventories": host.inventories,
        "plan": plans.as_json(plan),
        "base": base,
        "table": table,
        "served_before": {"variant": now, "release": unit["release"]},
        "steps": plans.steps_of(plan, base),
        "winner": None,
        "count": len(chosen),
        "classes": len({one["class"] for one in chosen}),
        "restored_unix": None,
        "outcome": None,
        "prediction": str(Path(foretold).resolve()) if foretold else None,
    }
    about = {
        "schema": 1,
        "kind": "experiment",
        "id": run.name,
        "host": host.name,
        "model": values["swapgate_model"],
        "started_unix": time.time(),
        "ended_unix": None,
        "commit": run_folder.commit(),
        "prompts": {
            "file": plan.prompts,
            "sha256": plans.sha256(prompt_lines.encode()),
            "count": len(chosen),
        },
        "settings": {
            "concurrency": list(plan.concurrency),
            "repeats": plan.repeats,
            "cache": plan.cache,
            "temperature": 0,
        },
        "loads": [],
    }
    found = Experiment(run, host, state, say)
    found.new = {"prompts.jsonl": prompt_lines, "run.json": json.dumps(about, indent=1)}
    if prediction is not None:
        found.new["prediction.json"] = json.dumps(prediction, indent=1) + "\n"
    found.known_s = plans.load_seconds(host.ask("history"))
    for name in left_out:
        so = "left out" if plan.skip_predicted else "`skip_predicted: true` leaves it out"
        say(f"prediction: {name} is not worth a measurement; {so}")
    say_cost(found, status, say)
    found.check_budget(status)
    return found


def say_cost(found: Experiment, status: JsonDict, say: Callable[[str], None]) -> None:
    """The reload budget and what the plan can find, before anything is done."""
    plan, cost = found.plan, found.cost(status)
    other = plans.read_plan({**found.state["plan"], "order": "fewest"}, "plan")
    fewest = plans.budget(plans.steps_of(other, found.base), found.known_s, serving(status), {}, plan.load_minutes)
    say(
        f"order: {' '.join(one['arm'] for one in found.steps)}, with "
        + ", ".join(f"{letter} = '{variant}'" for letter, variant in plans.arms_of(plan, found.base).items())
        + (f", {plans.TRIAL} = '{plan.trial['variant']}' with {len(plan.trial['grid'])} settings" if plan.trial else "")
    )
    home = " and back" if found.base != found.state["served_before"]["variant"] else ""
    say(
        f"loads: {cost['loads']}{home}, {plans.minutes(cost['load_s'])} by this host's history"
        + (
            f" (never loaded here: {', '.join(cost['unknown'])}; assumed as long as the longest)"
            if cost["unknown"]
            else ""
        )
    )
    if fewest["loads"] < cost["loads"]:
        say(
            f"  `order: fewest` takes {fewest['loads']} loads: the base only at both ends, so drift between arms "
            "is not seen, and the host does not come back by itself when this program is gone"
        )
    say(
        f"measuring: {plans.minutes(cost['measure_s'])}; the base is measured first, while it serves, and the budget "
        f"of {plan.budget_minutes:g} min is looked at again before anything stops"
    )
    count, classes = found.state["count"], found.state["classes"]
    for trial in (False, True):
        if plan.trial if trial else len(plans.arms_of(plan, found.base)) > 1:
            try:
                weighed = verdict.smallest_range(verdict.parse_plan(plans.power_words(plan, count, trial)), classes)
            except InputError as error:
                raise Failed(f"plan: {str(error).removeprefix('--plan: ')}") from error
            say(("trial: " if trial else "arms: ") + weighed["sentence"])


def preflight(found: Experiment) -> None:
    """Everything that can be said against any arm, while the base serves. Failed names the first."""
    for name in dict.fromkeys(one["variant"] for one in found.steps):
        if name != found.state["served_before"]["variant"]:
            found.say(f"preflight of '{name}'")
            _, failures = found.host.play("preflight.yml", variant=name, swapgate_variants=found.table)
            if failures:
                raise Failed(failures[0])


def agreed(yes: bool, say: Callable[[str], None]) -> bool:
    """Whether a person agrees to the disruption."""
    if yes:
        return True
    if not playbooks.can_ask():
        say("nobody to ask here: run again with --yes. Nothing was touched.")
        return False
    return playbooks.agreed("This stops what serves, as often as said above, and drops its traffic.")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("plan", nargs="?", help="a plan, YAML")
    what.add_argument("--resume", metavar="RUN", help="go on with the experiment of this run folder")
    what.add_argument("--restore", metavar="RUN", help="only put back what served before it")
    parser.add_argument("-i", "--inventory", action="append", metavar="PATH", help="default: ansible.cfg's")
    parser.add_argument("-l", "--limit", metavar="HOST", help="the host, where the inventory has several")
    parser.add_argument("--run", metavar="DIR", help="the new run folder; default runs/ID")
    parser.add_argument("--prediction", metavar="FILE", help="what predict.yml found; instead of the plan's own")
    parser.add_argument("--yes", action="store_true", help="consent to stopping what serves")
    parser.add_argument("--check", action="store_true", help="only say what the plan costs and can find")
    return parser


def say_line(text: str, error: bool = False) -> None:
    """One line of progress, or an error. A reader that has gone, or a full disk under it, stops nothing."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def opened(args: argparse.Namespace) -> Experiment:
    """The experiment of --resume or --restore."""
    run = Path(args.resume or args.restore).resolve()
    then = "name the run folder of an experiment"
    state = run_folder.read_object(run / STATE, "the state of an experiment", then)
    absent = [key for key in STATE_KEYS if key not in state]
    if absent:
        raise Failed(f"{run / STATE}: found no {', '.join(absent)}, expected the state of an experiment; {then}")
    run_folder.read_run(run)
    host = Host(args.inventory or state["inventories"], state["host"], say_line)
    found = Experiment(run, host, state, say_line)
    found.take_in()
    found.known_s = plans.load_seconds(host.ask("history"))
    return found


def prepared(args: argparse.Namespace) -> Experiment:
    """The experiment to begin or to go on with; nothing that serves was touched."""
    if not args.plan:
        return opened(args)
    plan = plan_of(args.plan)
    inventories = args.inventory or [str(ROOT / "inventory/sandbox")]
    missing = playbooks.missing(inventories)
    if missing:
        raise Failed(missing)
    found = begin(args, plan, Host(inventories, the_host(inventories, args.limit), say_line), say_line)
    if not args.check:
        preflight(found)
    return found


def told(error: BaseException) -> str:
    """An error in words; of one that nobody foresaw, its kind as well."""
    known = isinstance(error, (Failed, plans.PlanError, InputError, records.RecordError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def carried_out(found: Experiment) -> int:
    """The exit code of the steps that are left. Whatever ends them, the caller puts back what served before."""
    try:
        if found.new:
            found.create()
        say_line(f"run folder: {found.run}")
        if found.state["outcome"] != "finished":
            found.carry_out()
    except Interrupted:
        say_line("interrupted; putting back what served before (a second Ctrl-C leaves that to --restore)")
        return INTERRUPTED
    except Exception as error:  # also one that nobody foresaw, such as a full disk: an arm must not stay
        say_line(f"experiment.py: {told(error)}", error=True)
        return NOT_FINISHED
    return OK


def main(argv: list[str] | None = None) -> int:
    """Begin, resume or restore, and leave the host as it was."""
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = prepared(args)
        if args.check:
            return OK
        if args.plan and not agreed(args.yes, say_line):
            return REFUSED
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: found.host.stop.set())
    except (KeyboardInterrupt, Interrupted):
        say_line("interrupted; nothing that serves was touched")
        return INTERRUPTED
    except (Failed, plans.PlanError, InputError, OSError) as error:
        say_line(f"experiment.py: {error}", error=True)
        return REFUSED
    code = OK if args.restore else carried_out(found)
    found.host.stop.clear()
    try:
        found.restore()
    except Exception as error:  # Interrupted has no words of its own
        said = told(error) if str(error) else "interrupted"
        say_line(
            f"experiment.py: {said}: '{found.state['served_before']['variant']}' is not back. Next: "
            f"scripts/experiment.py --restore {found.run}",
            error=True,
        )
        return NO_SERVICE
    try:
        found.save()
        if code == OK and not args.restore and found.state["outcome"] != "finished":
            found.finish()
    except (OSError, InputError) as error:
        say_line(f"experiment.py: {told(error)}", error=True)
        code = code or NOT_FINISHED
    if code != OK:
        say_line(f"go on with: scripts/experiment.py --resume {found.run}")
    return code


if __name__ == "__main__":
    sys.exit(main())
