#!/usr/bin/env python3
"""Turn one GGUF checkpoint into a Hugging Face folder of bf16 safetensors that the engine can serve.

Usage: gguf_to_hf.py MODEL.gguf TARGET_DIR

Runs on the host under the engine's own Python (torch, transformers), with `gguf` and `accelerate` importable, for
instance from a scratch folder on PYTHONPATH. The folder is built beside its target and renamed when it is whole, so
that a target that exists is always a complete one; an existing target is left alone.

Exit codes: 0 converted, or the target was there already; 2 wrong use, unreadable source or missing package;
3 the conversion failed or lost something (no weights, no chat template).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

GGUF_MAGIC = b"GGUF"
NEEDED_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
EXIT_USAGE, EXIT_FAILED = 2, 3


def source_problem(source: Path) -> str | None:
    """Why `source` cannot be converted, or None."""
    try:
        with source.open("rb") as stream:
            magic = stream.read(len(GGUF_MAGIC))
    except OSError as error:
        return f"source {source}: {error.strerror}; expected a readable .gguf file; next: ls -l {source.parent}"
    if magic != GGUF_MAGIC:
        return f"source {source}: starts with {magic!r}, expected {GGUF_MAGIC!r}; next: fetch the file again"
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"interpreter {sys.executable}: no package {', '.join(missing)}, expected {', '.join(NEEDED_PACKAGES)}; "
            f"next: uv pip install --no-deps --target SCRATCH {' '.join(missing)}, then run with PYTHONPATH=SCRATCH"
        )
    return None


def convert(source: Path, target: Path) -> None:
    """Write config, tokenizer, chat template and bf16 weights of `source` into the empty folder `target`."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    config = transformers.AutoConfig.from_pretrained(**where)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # The loaded model is marked as quantised, which save_pretrained refuses although the tensors are dense by now:
    # a plain model of the same configuration takes over the weights.
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def lost(target: Path) -> list[str]:
    """What a complete folder would have and `target` has not."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (target / name).is_file()]
    if not any(target.glob("*.safetensors")):
        missing.append("*.safetensors")
    template = target / "chat_template.jinja"
    settings = target / "tokenizer_config.json"
    if not template.is_file() and not (settings.is_file() and '"chat_template"' in settings.read_text("utf-8")):
        missing.append("a chat template")
    return missing


def open_up(target: Path) -> None:
    """Make the folder readable for the service user: saved weights may come out at mode 0600."""
    target.chmod(0o755)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main(arguments: list[str] | None = None) -> int:
    """Convert; see the module's text for the exit codes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the .gguf file")
    parser.add_argument("target", type=Path, help="the folder to make")
    options = parser.parse_args(arguments)
    source, target = options.source.absolute(), options.target.absolute()
    if target.exists():
        print(f"{target}: there already, nothing to do")
        return 0
    problem = source_problem(source)
    if problem:
        print(problem, file=sys.stderr)
        return EXIT_USAGE
    partial = target.with_name(target.name + ".partial")
    # What an interrupted run left is not worth trusting: converting again takes less than a minute.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    convert(source, partial)
    missing = lost(partial)
    if missing:
        print(
            f"conversion of {source}: {partial} has no {', '.join(missing)}; expected a complete model folder; "
            f"next: compare the versions of transformers and gguf with those that playbooks/demo_model.yml names",
            file=sys.stderr,
        )
        return EXIT_FAILED
    open_up(partial)
    partial.rename(target)
    print(f"{target}: {sum(path.stat().st_size for path in target.iterdir()) // 2**20} MiB from {source.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
