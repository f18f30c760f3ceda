"""Where torch and transformers cannot be imported, as in the process that loads a file."""

#: The beginning of a program there, which knows `load`.
WITHOUT_TORCH = """
import sys
import numpy as np

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Nowhere())
from pit_tvm.model import load
"""
