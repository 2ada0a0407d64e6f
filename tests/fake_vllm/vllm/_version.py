"""The version that this copy claims to be; the wheel builder rewrites it."""

__version__ = "0.32.0"
