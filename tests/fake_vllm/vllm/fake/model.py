"""The model folder as the engine's config step sees it: config.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.fake.errors import HFValidationError, LocalEntryNotFoundError, ValidationError, value_problem

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
TAIL = "nderer_num_workers': 1})"


def model_error(text: str) -> ValidationError:
    """An error of the model's config as a whole."""
    return ValidationError("ModelConfig", [value_problem(text, "{'model': 0", TAIL)])


def words_without_config(model: str) -> str:
    """How the loader says that a folder (or a draft's path) holds no config."""
    return (
        f"Invalid repository ID or local directory specified: {model!r}.\n"
        "Please verify the following requirements:\n"
        "1. Provide a valid Hugging Face repository ID.\n"
        "2. Specify a local directory that contains a recognized configuration file.\n"
        "   - For Hugging Face models: ensure the presence of a 'config.json'.\n"
        "   - For Mistral models: ensure the presence of a 'params.json'.\n"
    )


def read_draft(model: str) -> dict[str, Any]:
    """config.json of a draft model. The speculative config reports a missing one as its own problem."""
    if not (Path(model) / "config.json").is_file():
        text = words_without_config(model)
        raise ValidationError("SpeculativeConfig", [value_problem(text, "{'model': 0", "config_format': 'auto'})")])
    return read(model)


def missing(model: str) -> Exception:
    """The error for a folder without a config, a path that does not exist, or a repository that is not in the cache."""
    if Path(model).is_dir():
        return model_error(words_without_config(model))
    if model.startswith("/") or model.count("/") > 1:
        return HFValidationError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': {model!r}. Use `repo_type` "
            "argument if needed."
        )
    return LocalEntryNotFoundError(
        "Cannot find an appropriate cached snapshot folder for the specified revision on the local disk and "
        "outgoing traffic has "
        "been disabled. To enable repo look-ups and downloads online, pass 'local_files_only=False' as input."
    )


def read(model: str) -> dict[str, Any]:
    """config.json of a model folder. Raises the loader's error when there is none, OSError when it is no JSON."""
    file = Path(model) / "config.json"
    if not file.is_file():
        raise missing(model)
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"It looks like the config file at '{file}' is not a valid JSON file.") from error
    return content


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language part of a multi-modal model's config, or the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def context_length(config: dict[str, Any], asked: int | None) -> int:
    """Tokens of context: what was asked, or the model's own. Raises ValidationError for more than the model's."""
    text = text_config(config)
    own = next(((key, int(text[key])) for key in LENGTH_KEYS if text.get(key)), None)
    if own is None:
        return asked if asked and asked > 0 else 2048
    if not asked or asked < 0:
        return own[1]
    if asked > own[1]:
        raise model_error(
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"({own[0]}={float(own[1])} or "
            "model_max_length=None in model's config.json). To allow overriding this maximum, set the env var "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. VLLM_ALLOW_LONG_MAX_MODEL_LEN must be used with extreme caution. "
            "If the model uses "
            "relative position encoding (RoPE), positions exceeding derived_max_model_len lead to nan. If the "
            "model uses absolute "
            "position encoding, positions exceeding derived_max_model_len will cause a CUDA array out-of-bounds error."
        )
    return asked


def check_quantization(config: dict[str, Any], asked: str | None) -> None:
    """Raises ValidationError when the quantisation asked for is not the checkpoint's."""
    own = (text_config(config).get("quantization_config") or config.get("quantization_config") or {}).get(
        "quant_method"
    )
    if asked and own and asked != own:
        raise model_error(
            f"Quantization method specified in the model config ({own}) does not match the quantization method "
            "specified in the "
            f"`quantization` argument ({asked})."
        )


def check_remote_code(model: str, config: dict[str, Any], trusted: bool) -> None:
    """Raises ValidationError for a model that brings its own code without consent."""
    if config.get("auto_map") and not trusted:
        raise model_error(
            f"The repository {model} contains custom code which must be executed to correctly load the model. You "
            "can inspect the "
            f"repository content at {model} .\n You can inspect the repository content at https://hf.co/{model}.\n"
            "Please pass the argument `trust_remote_code=True` to allow custom code to be run."
        )
