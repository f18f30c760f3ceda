"""``python -m pit_tvm``: the command ``pit-tvm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
