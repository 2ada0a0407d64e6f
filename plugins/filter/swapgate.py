"""Filters of swapgate: each a few lines over a tested pure function."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible_collections.swapgate.core.plugins.module_utils import (
    bench_results,
    kernel_times,
    nvidia_packages,
    progress,
    units,
    variants,
)

PLUGINS = Path(__file__).resolve().parents[1]
SPEC_FILE = Path(__file__).resolve().parents[2] / "roles/vllm_service/meta/argument_specs.yml"


def _spec() -> dict[str, Any]:
    specs: dict[str, Any] = yaml.safe_load(SPEC_FILE.read_text(encoding="utf-8"))["argument_specs"]
    return specs


def resolved_variant(
    name: str, table: dict[str, Any], models: dict[str, Any], model_name: str, host: dict[str, Any]
) -> dict[str, Any]:
    """The resolved variant ``name``; its shape is vllm_service_variant of role vllm_service. Bad input is an error."""
    spec = _spec()
    try:
        problems = variants.contradictions([variants.resolve(n, table, models, model_name, host, spec) for n in table])
        resolved = variants.resolve(name, table, models, model_name, host, spec)
    except variants.VariantError as error:
        raise AnsibleFilterError(str(error)) from error
    checked = ArgumentSpecValidator(spec["main"]["options"]["vllm_service_variant"]["options"]).validate(resolved)
    problems += checked.error_messages
    if problems:
        raise AnsibleFilterError(f"variant '{name}': " + "; ".join(problems))
    return resolved


def python_sources(folders: list[str]) -> dict[str, str]:
    """Relative path to text of the Python files in these folders of `plugins/`."""
    files = [file for folder in folders for file in sorted((PLUGINS / folder).glob("*.py"))]
    return {str(file.relative_to(PLUGINS)): file.read_text(encoding="utf-8") for file in files}


class FilterModule:
    """Names the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filter name to function."""
        return {
            "resolved_variant": resolved_variant,
            "exec_lines": units.exec_lines,
            "quote_environment": lambda environment: [units.quote_environment(*item) for item in environment.items()],
            "release_id": units.release_id,
            "python_sources": python_sources,
            "swap_report": lambda status, host: progress.report(host, status),
            "swap_plan": lambda status, host, variant, release: progress.plan(host, status, variant, release),
            "status_table": lambda status, host: progress.status_table(host, status),
            "profile_table": kernel_times.table,
            "profile_chart": kernel_times.chart,
            "gpu_table": lambda report, host: progress.gpu_table(host, report),
            "collective_table": lambda report, host: progress.collective_table(host, report),
            "topology_table": lambda report, host: progress.topology_table(host, report),
            "history_table": progress.history_table,
            "preflight_report": progress.preflight_report,
            "bench_plan": lambda plan, host: bench_results.plan_text(host, plan),
            "nvidia_plan": nvidia_packages.plan,
        }
