"""Packaging of pit-tvm. All metadata is here; pyproject.toml holds tool settings only."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version that pit_tvm/__init__.py states, read without importing it."""
    text = (ROOT / "pit_tvm" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("pit_tvm/__init__.py states no __version__")
    return found.group(1)


def read_description() -> str:
    """README.md, which is also the project's page on a package index."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


RPC = ["tornado", "cloudpickle", "psutil"]
PLOT = ["matplotlib"]

EXTRAS = {
    "torch": ["torch>=2.11,<2.14"],
    "transformers": ["transformers>=5", "torch>=2.11,<2.14"],
    "onnx": ["onnx"],
    "plot": PLOT,
    "rpc": RPC,
    # What quickstart and bench_cpu run and measure against.
    "quickstart": [
        "torch==2.13.0",
        "transformers>=5",
        "tokenizers",
        "safetensors",
        "scipy",
        *PLOT,
    ],
    "dev": [
        # Findings and formatting differ between releases of these two.
        "ruff==0.17.5",
        "mypy==2.4.1",
        "pytest>=8",
        # scripts/test.sh runs two files at a time.
        "pytest-xdist>=3",
        "hypothesis>=6",
        "ml_dtypes",
        # The release that the results were measured with.
        "torch==2.13.0",
        # The quickstart's own parts are tested too.
        "tokenizers",
        "safetensors",
        "scipy",
        # Whole models are compared with its own.
        "transformers>=5",
        # Whole models come from there too.
        "onnx",
        # tests/test_packaging.py builds without network, so the backend must be here.
        "setuptools>=77",
        *RPC,
    ],
}

setup(
    name="pit-tvm",
    version=read_version(),
    description="Sparse and padded tensor operators compiled with TVM by permutation invariance",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    # schedules/ and tuning_logs/ are top-level folders that install inside the package.
    packages=[
        *find_packages(include=["pit_tvm", "pit_tvm.*"]),
        "pit_tvm.schedules",
        *(f"pit_tvm.schedules.{name}" for name in find_packages("schedules")),
        "pit_tvm.tuning_logs",
    ],
    package_dir={"pit_tvm.schedules": "schedules", "pit_tvm.tuning_logs": "tuning_logs"},
    package_data={"pit_tvm": ["py.typed"], "pit_tvm.tuning_logs": ["**/*.json"]},
    include_package_data=False,
    install_requires=[
        "apache-tvm==0.27.0.post1",
        # 0.1.15 crashes inside Schedule.tensorize and when a trace or database is written as JSON.
        "apache-tvm-ffi==0.1.14.post1",
        # 2.1 is the first to export read-only arrays through DLPack.
        "numpy>=2.1",
        # MetaSchedule's cost model.
        "xgboost>=3.0,<4",
        "tqdm",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["pit-tvm = pit_tvm.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
