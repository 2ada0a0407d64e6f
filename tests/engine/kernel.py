"""Drafts of the installed engine's n-gram kernels (V2 runner), for comparing; needs torch and Triton, not the engine.

    PYTHON tests/engine/kernel.py IN.npz OUT.npz SPECULATOR.py [cuda]

SPECULATOR.py is the engine's vllm/v1/worker/gpu/spec_decode/ngram/speculator.py. Without `cuda`, Triton's interpreter
runs its kernels on the CPU: the same source, but not the compiled kernel, so it proves the rule as written and no more.
IN and OUT are those of propose.py. Standard output: where the kernels ran.
"""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

DEVICE = "cuda" if sys.argv[4:] == ["cuda"] else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language  # noqa: E402

BATCH = 256


def speculator_module(path: str) -> ModuleType:
    """The engine's file, with stand-ins for what it imports for type hints and for its empty base class."""

    def module(name: str, **names: Any) -> None:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__dict__.update(names)

    parts = ["vllm", "v1", "worker", "gpu", "spec_decode"]
    for i in range(len(parts)):
        module(".".join(parts[: i + 1]))
    module("vllm.config", VllmConfig=object)
    # On a CPU build the engine's own module says that there is no Triton.
    module("vllm.triton_utils", HAS_TRITON=True, tl=triton.language, triton=triton)
    module("vllm.v1.worker.gpu.input_batch", InputBatch=object)
    module("vllm.v1.worker.gpu.spec_decode.speculator", BaseSpeculator=object)
    spec = importlib.util.spec_from_file_location("speculator", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path}: cannot be imported, expected the engine's speculator.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def mend_interpreter() -> None:
    """Let the interpreter load with a mask that `&` of a scalar and a vector made: it holds whole numbers there."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *more)

    InterpreterBuilder.create_masked_load = masked_load


def drafts_of(module: ModuleType, text: np.ndarray, point: list[int]) -> np.ndarray:
    """Drafts after each of the text's tokens, shape (tokens, k)."""
    k, low, high, max_model_len = point
    found = []
    for first in range(1, len(text) + 1, BATCH):
        known = torch.arange(first, min(first + BATCH, len(text) + 1), dtype=torch.int32)
        rows = torch.arange(len(known))
        batch = torch.full((len(known), max_model_len), 7, dtype=torch.int32)
        batch[:, : len(text)] = torch.from_numpy(text.copy())
        # What lies beyond a request's tokens is whatever was there before.
        batch[torch.arange(max_model_len)[None, :] >= known[:, None]] = 7
        last = batch[rows, known.long() - 1].long()
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=k),
            scheduler_config=SimpleNamespace(max_num_seqs=len(known)),
            model_config=SimpleNamespace(max_model_len=max_model_len),
        )
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=batch.to(DEVICE)), total_len=SimpleNamespace(gpu=known.to(DEVICE))
        )
        one = module.NgramGPUSpeculator(config, torch.device(DEVICE), states)
        sampled = torch.ones(len(known), dtype=torch.int32, device=DEVICE)
        drafts = one.propose(
            input_batch=SimpleNamespace(num_reqs=len(known), idx_mapping=rows.to(DEVICE)),
            attn_metadata=None,
            slot_mappings=None,
            last_hidden_states=None,
            aux_hidden_states=None,
            num_sampled=sampled,
            num_rejected=sampled,
            last_sampled=last.to(DEVICE),
            next_prefill_tokens=sampled,
            temperature=sampled,
            seeds=sampled,
        )
        found.append(drafts.cpu().numpy())
    return np.concatenate(found)


def main() -> None:
    """Command line."""
    given = np.load(sys.argv[1])
    tokens, starts = given["tokens"], given["starts"]
    module = speculator_module(sys.argv[3])
    if DEVICE == "cpu":
        mend_interpreter()
    found = [
        drafts_of(module, tokens[starts[text] : starts[text + 1]][: point[3]], point)
        for text, *point in given["cases"].tolist()
    ]
    np.savez(
        sys.argv[2],
        drafts=np.concatenate([drafts.ravel() for drafts in found]).astype(np.int32),
        counts=np.concatenate([np.full(len(drafts), drafts.shape[1], np.int32) for drafts in found]),
    )
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter"
    print(f"{where}, Triton {triton.__version__}, torch {torch.__version__}")


main()
