"""What the product finds on a host, laid out below a folder: engine, model, manifest, variants, releases.

The variants come from group_vars/all/variants.yml through the product's own resolver. The engine folder holds two
small scripts that start the given interpreter, so that an engine installed anywhere looks like one of role python_env.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.swapgate.core.plugins.module_utils import (  # noqa: E402
    model_manifest,
    records,
    units,
    variants,
)

JsonDict = dict[str, Any]

MODEL_NAME = "proof"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ASK_LIMIT_S = 300.0
# The engine's virtualenv has a YAML reader, the host's own Python need not have one.
_TO_JSON = "import json, sys, yaml; print(json.dumps([yaml.safe_load(open(name)) for name in sys.argv[1:]]))"
_VERSION = "import importlib.metadata as m, platform; print(m.version('vllm'), platform.python_version())"
YAML_FILES = {
    "variants": "group_vars/all/variants.yml",
    "spec": "roles/vllm_service/meta/argument_specs.yml",
    "signatures": "roles/vllm_service/files/signatures.yml",
}


class BedError(Exception):
    """The machine lacks what the proof needs; the text says what and what to do."""


class Bed:
    """A host below ``root``; ``host`` is the inventory's swapgate_host without its engine."""

    def __init__(self, root: Path, python: str, model: Path, host: Mapping[str, Any], max_model_len: int) -> None:
        self.root, self.python, self.model_path = root, python, model
        self.layout = records.Layout(str(root))
        self.max_model_len = max_model_len
        self.files = dict(zip(YAML_FILES, self._yaml([str(REPO / name) for name in YAML_FILES.values()])))
        engines = root / "opt/swapgate/engines"
        home, cache = self.layout.home, root / "var/cache/vllm"
        for folder in (engines, home, cache, self.layout.state_dir, self.layout.runtime):
            folder.mkdir(parents=True, exist_ok=True)
        self.env = {"HOME": str(home), "VLLM_CACHE_ROOT": str(cache), **host.get("env", {})}
        self.versions = self._engine_version()
        version = self.versions["vllm"].split("+")[0]
        self.host = {
            **host,
            "engine": {"package": "vllm", "version": version},
            "engines_root": str(engines),
            "env": self.env,
        }
        self.venv = engines / f"vllm-{version}"
        self._engine_folder()
        records.write_json(self.layout.signatures, self.files["signatures"])
        self.manifest(MODEL_NAME, model)

    # --- engine ----------------------------------------------------------------------------------------------------

    def _run(self, words: list[str], env: Mapping[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False, env=dict(env) if env else None
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BedError(f"cannot run {words[0]}: {error}. Give the engine's interpreter with --python.") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
            raise BedError(f"{words[0]} ended with status {done.returncode}: {last}. Is vLLM installed for it?")
        return done.stdout

    def environment(self) -> dict[str, str]:
        """What a unit's process starts with, and nothing else of this shell."""
        return {"PATH": PATH, **variants.ENGINE_ENVIRONMENT, **self.env}

    def _yaml(self, names: list[str]) -> list[Any]:
        return list(json.loads(self._run([self.python, "-c", _TO_JSON, *names])))

    def _engine_version(self) -> dict[str, str]:
        vllm, python = self._run([self.python, "-c", _VERSION], self.environment()).split()
        return {"vllm": vllm, "python": python}

    def _engine_folder(self) -> None:
        (self.venv / "bin").mkdir(parents=True, exist_ok=True)
        # A virtualenv finds its packages whatever the environment; so must this, for a load generator with its own.
        where = self.env.get("PYTHONPATH")
        found = f"export PYTHONPATH={shlex.quote(where)}\n" if where else ""
        for name, words in {"python": "", "vllm": "-m vllm.entrypoints.cli.main "}.items():
            script = self.venv / "bin" / name
            script.write_text(f'#!/bin/sh\n{found}exec {self.python} {words}"$@"\n', encoding="utf-8")
            script.chmod(0o755)
        records.write_json(self.venv / "swapgate-env.json", self.versions)

    # --- model -----------------------------------------------------------------------------------------------------

    def manifest(self, name: str, folder: Path) -> None:
        """Write the manifest of a model folder as role model_cache does."""
        found, hashes = [], {}
        for path in sorted(folder.iterdir()):
            if path.is_file():
                stat = path.stat()
                found.append(model_manifest.Found(path.name, stat.st_size, stat.st_mtime_ns))
                hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest = model_manifest.build(name, str(folder), found, hashes)
        records.write_atomic(self.layout.manifests / (name + ".json"), model_manifest.dump(manifest))

    def changed_model(self, name: str, change: Mapping[str, Any]) -> Path:
        """A model folder like the given one but for keys of its config.json; the weights are links."""
        folder = self.root / "srv/models" / name
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.model_path.iterdir():
            link = folder / path.name
            if path.name != "config.json" and not link.exists():
                link.symlink_to(path)
        config = json.loads((self.model_path / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
        return folder

    # --- variants --------------------------------------------------------------------------------------------------

    def resolve(
        self,
        name: str,
        entry: Mapping[str, Any] | None = None,
        model: Path | None = None,
        host: Mapping[str, Any] | None = None,
        parallel: int = 1,
    ) -> JsonDict:
        """The resolved variant ``name`` of the table, or of another entry; VariantError as on the controller."""
        table = self.files["variants"]["swapgate_shipped_variants"]
        if entry is not None:
            table = {**table, name: dict(entry)}
        model_name = MODEL_NAME if model is None else name
        models = {
            model_name: {
                "path": str(model or self.model_path),
                "served_name": "proof",
                "max_model_len": self.max_model_len,
                "tensor_parallel_size": parallel,
                "drafts": {"draft_model": str(self.root / "srv/models/none")},
            }
        }
        spec = self.files["spec"]["argument_specs"]
        return variants.resolve(name, table, models, model_name, {**self.host, **(host or {})}, spec)

    def install(self, variant: JsonDict) -> None:
        """Put the variant's data where its supervisor looks for it."""
        records.write_json(self.layout.data(variant["unit"]), variant)

    def stage(self, variant: JsonDict) -> str:
        """Stage a release as role vllm_service does; returns its hash. The unit's text is the least that is one."""
        text = "[Unit]\nDescription={}\n\n[Service]\nUser=root\nExecStart={}\n".format(
            variant["name"], " \\\n    ".join(units.exec_lines(variant["argv"]))
        )
        release = units.release_id(text, variant)
        folder = self.layout.release(release)
        records.write_json(folder / "variant.json", variant)
        records.write_atomic(folder / variant["unit"], text)
        return release


def kept_environment(names: list[str], pairs: list[str]) -> dict[str, str]:
    """Variables of this shell that the engine needs (where they are set), and NAME=VALUE pairs."""
    kept = {name: os.environ[name] for name in names if name in os.environ}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise BedError(f"--env {pair}: expected NAME=VALUE")
        kept[name] = value
    return kept


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every program here asks about the machine; `bed_of` reads it."""
    parser.add_argument("--python", required=True, help="interpreter of an installed vLLM")
    parser.add_argument("--model", required=True, type=Path, help="model folder with safetensors")
    parser.add_argument("--out", required=True, type=Path, help="folder for everything that is written")
    parser.add_argument("--port", type=int, default=8123, help="the next port is used too (default: %(default)s)")
    parser.add_argument("--gpus", default="0", help="index of the GPU, or empty on a machine without (default: 0)")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=JSON", help="engine_args of the host")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="the engine's environment")
    parser.add_argument("--keep", action="append", default=[], metavar="NAME", help="a variable of this shell for it")
    parser.add_argument("--commit", help="commit of this checkout, where git is not there to ask")


def bed_of(options: argparse.Namespace) -> Bed:
    """The bed below OUT/root that the options of `add_options` describe."""
    arguments = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in options.engine_arg)}
    host = {
        "gpus": [int(word) for word in options.gpus.split(",") if word],
        "port": options.port,
        "engine_args": arguments,
        "env": kept_environment(options.keep, options.env),
    }
    return Bed(options.out / "root", options.python, options.model, host, options.max_model_len)
