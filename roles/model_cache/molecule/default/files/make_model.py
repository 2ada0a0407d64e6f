#!/usr/bin/env python3
"""Make a tiny model folder: config.json, two sound safetensors files, an index; with --pickle also pytorch_model.bin.

Usage: make_model.py FOLDER LARGE_BYTES [--pickle]. The content is always the same, so a stand-in hub's commit is too.
"""

import json
import struct
import sys
from pathlib import Path


def weights(path: Path, tensor: str, size: int) -> None:
    """A safetensors file with one U8 tensor of `size` bytes."""
    header = json.dumps({tensor: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for number in range(size // 1024):
            stream.write(number.to_bytes(4, "little") * 256)
        stream.write(bytes(size % 1024))


def main() -> None:
    """Make the folder, its mark of completeness (the index) last."""
    folder, large = Path(sys.argv[1]), int(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}\n')
    weights(folder / "model-1.safetensors", "a", large)
    weights(folder / "model-2.safetensors", "b", 100)
    if "--pickle" in sys.argv:
        (folder / "pytorch_model.bin").write_bytes(bytes(10_000))
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}) + "\n")


if __name__ == "__main__":
    main()
