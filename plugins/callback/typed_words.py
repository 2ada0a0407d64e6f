"""Gives the words of `-e NAME=VALUE` the types that their specs declare, before a task sees them.

`-e` makes every value a text, validation of a role's arguments converts only for itself, and a condition on the text
'false' is an error or, worse, true. Nothing but the extra variables themselves can be given another value: whatever a
play or a role sets anew loses against them. So it is done here, once, for all roles and playbooks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: typed_words
type: aggregate
short_description: Give the words of -e the types that the specs declare
description:
  - Converts extra variables that are texts to the type that C(roles/*/meta/argument_specs.yml) or
    C(playbooks/vars/words.yml) declares for them. A value that cannot be one ends the run before the first task.
  - C(playbooks/callback_plugins) leads here, so that every run of a playbook of that folder has it.
"""

ROOT = Path(__file__).resolve().parents[2]


def options() -> dict[str, dict[str, Any]]:
    """Every word that a playbook or a role of this repository takes, with its option of an argument spec."""
    found: dict[str, dict[str, Any]] = {}
    for file in [*sorted(ROOT.glob("roles/*/meta/argument_specs.yml")), ROOT / "playbooks/vars/words.yml"]:
        for name, entry in yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"].items():
            # Entry points that are no file of tasks are shapes of a value.
            if name == "words" or (file.parents[1] / f"tasks/{name}.yml").exists():
                found.update(entry["options"])
    return found


def typed(name: str, value: Any, option: dict[str, Any]) -> Any:
    """``value`` as ``option`` wants it. ValueError says what was found and expected.

    Only a text is looked at, and none that is a template or is meant as a text.
    """
    kind = option["type"]
    if not isinstance(value, str) or "{{" in value or (kind in ("str", "path", "raw") and "choices" not in option):
        return value
    given: Any = value
    if kind in ("list", "dict") and value.lstrip().startswith(("[", "{")):
        try:
            given = json.loads(value)
        except ValueError:
            raise ValueError(f"-e {name}={value}: expected a {kind} as JSON, such as {name}=[1,4].") from None
    rules = {key: option[key] for key in ("type", "elements", "choices", "options") if key in option}
    checked = ArgumentSpecValidator({name: rules}).validate({name: given})
    if checked.error_messages:
        wanted = kind + (f" of {option['elements']}" if "elements" in option else "")
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(kind, wanted)
        if "choices" in option:
            wanted = "one of " + ", ".join(map(str, option["choices"]))
        raise ValueError(f"-e {name}={value}: expected {wanted}.")
    return checked.validated_parameters[name]


class CallbackModule(CallbackBase):
    """Runs in the controller's own process, where the extra variables are kept."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "swapgate.core.typed_words"
    CALLBACK_NEEDS_ENABLED = False

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Convert all words; they are typed already from the second play on."""
        words = play.get_variable_manager().extra_vars
        known = options()
        wrong = []
        if "_raw_params" in words:  # where Ansible keeps words without a name, and then forgets them
            wrong.append(
                f"-e: found the words {str(words['_raw_params'])!r} without a name, expected NAME=VALUE. Quote a value "
                "of several words once more: -e \"because='two words'\"."
            )
        for name in sorted(set(words) & set(known)):
            try:
                words[name] = typed(name, words[name], known[name])
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            # What a callback raises is only warned of, and the run would go on with a word that it does not understand.
            self._display.error("\n".join([*wrong, "Nothing was touched. Correct it and run again."]), wrap_text=False)
            sys.exit(2)
