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
ROOT = PLUGINS.parent
SPEC_FILE = ROOT / "roles/vllm_service/meta/argument_specs.yml"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def tables(own_variants: Any, own_models: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(variants, models): what ships in group_vars/all/, with an inventory's own laid over it. VariantError."""
    variant_table = _read(ROOT / "group_vars/all/variants.yml")["swapgate_shipped_variants"]
    model_table = _read(ROOT / "group_vars/all/models.yml")["swapgate_shipped_models"]
    return (
        variants.lay_over(variant_table, own_variants, "swapgate_variants"),
        variants.lay_over(model_table, own_models, "swapgate_models"),
    )


def _resolved(name: Any, own_variants: Any, own_models: Any, model_name: Any, host: Any) -> dict[str, Any]:
    spec = _read(SPEC_FILE)["argument_specs"]
    table, models = tables(own_variants, own_models)
    found, impossible = variants.resolve_all(table, models, model_name, host, spec)
    if name is None:
        known = ", ".join(sorted(found)) or "none"
        raise variants.VariantError(f"No variant named. Run again with -e variant=NAME; the names are {known}.")
    resolved = variants.choose(name, found, impossible, model_name)
    checked = ArgumentSpecValidator(spec["main"]["options"]["vllm_service_variant"]["options"]).validate(resolved)
    if checked.error_messages:
        raise variants.VariantError(f"variant '{name}': " + "; ".join(checked.error_messages))
    return resolved


def resolved_variant(
    name: str, own_variants: dict[str, Any], own_models: dict[str, Any], model_name: str, host: dict[str, Any]
) -> dict[str, Any]:
    """The resolved variant ``name``; its shape is vllm_service_variant of role vllm_service. Bad input is an error."""
    try:
        return _resolved(name, own_variants, own_models, model_name, host)
    except variants.VariantError as error:
        raise AnsibleFilterError(str(error)) from None  # a cause would be printed again


def resolution(
    name: Any, own_variants: Any, own_models: Any, model_name: Any, host: Any, has_key: bool
) -> dict[str, Any]:
    """What deploy.yml starts from: {"variant": resolved or null, "problem": text or null, "notice": text or null}."""
    try:
        resolved = _resolved(name, own_variants, own_models, model_name, host)
    except variants.VariantError as error:
        return {"variant": None, "problem": str(error), "notice": None}
    problem, notice = variants.exposure(resolved, has_key)
    return {"variant": resolved, "problem": problem and f"variant '{name}': {problem}", "notice": notice}


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
            "resolution": resolution,
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
