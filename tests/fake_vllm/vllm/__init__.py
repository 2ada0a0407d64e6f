"""A stand-in for the vLLM engine: looks like it from outside, computes nothing.

See tests/fake_vllm/README.md in the repository.
"""

from vllm._version import __version__

__all__ = ["__version__"]
