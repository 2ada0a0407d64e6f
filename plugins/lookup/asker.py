"""Lookup `swapgate.core.asker`: who runs this play, for the host's record."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from typing import Any

from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: asker
short_description: Who runs this play
description:
  - The person behind a CI job where the CI system names one, who called sudo, the user's name from the environment, and
    else the name of the process's user. Never empty.
author:
  - The swapgate contributors (@swapgate)
"""

# Of GitHub and Gitea, GitLab, Jenkins, Azure.
CI = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN", "BUILD_USER_ID", "BUILD_REQUESTEDFOR")


def asker(environment: Mapping[str, str], uid: int) -> str:
    """Who asks, from the environment and the process's user id."""
    for name in (*CI, "SUDO_USER", "USER", "LOGNAME"):
        if environment.get(name, "").strip():
            return environment[name].strip() + (" (CI)" if name in CI else "")
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


class LookupModule(LookupBase):
    """Gives the one name."""

    def run(self, terms: Any, variables: Any = None, **kwargs: Any) -> list[str]:
        """A list of the name alone; takes no terms."""
        return [asker(os.environ, os.getuid())]
