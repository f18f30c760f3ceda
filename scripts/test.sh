#!/usr/bin/env bash
# Makes a virtual environment, installs the project for development, lints, checks types, tests.
# Arguments go to pytest. PYTHON names the interpreter, PIT_TVM_VENV the environment's folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${PIT_TVM_VENV:-$root/.venv-test}"
. "$root/scripts/venv.sh"
make_environment "$root" "$venv" dev ""
venv="$(cd "$venv" && pwd)"
python="$venv/bin/python"
cd "$root"

# Compiled once, beside the environment: tests start many processes, each of which would compile
# torch, TVM and this project anew where the user has Python write no bytecode.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$venv/bytecode"

echo "ruff"
"$python" -m ruff check .
"$python" -m ruff format --check .

echo "mypy"
# mypy knows a module by its place, so it gets a view in which schedules/ is inside pit_tvm/.
view="$venv/mypy-view"
rm -rf "$view"
mkdir -p "$view/pit_tvm"
ln -s "$root"/pit_tvm/* "$root/schedules" "$view/pit_tvm/"
ln -s "$root/scripts" "$root/setup.py" "$view/"
# Beside it, on another core, what tests import is compiled: two processes would do so at once.
"$python" -m pytest -m "not gpu" -q --collect-only >/dev/null 2>&1 &
(cd "$view" && "$python" -m mypy --config-file "$root/pyproject.toml" .)
wait

echo "pytest"
# Two at a time: most tests use one thread. Fixtures of a file are made once.
# Idle threads of a library do not spin, which took a tenth of the other's time.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TVM_THREAD_POOL_SPIN_COUNT="${TVM_THREAD_POOL_SPIN_COUNT:-100}"
# torch remembers the shapes that operators gave while it traces a model, which pays where layers
# are many: models of a layer or two take a quarter longer to trace with it.
export TORCH_FAKE_TENSOR_DISPATCH_CACHE="${TORCH_FAKE_TENSOR_DISPATCH_CACHE:-0}"
# torch.compile believes what the processor says of itself, and tries no instructions: it would
# compile and start a program for each of them.
export TORCHINDUCTOR_VEC_ISA_OK="${TORCHINDUCTOR_VEC_ISA_OK:-1}"
"$python" -m pytest -m "not gpu" -q -n 2 --dist loadfile "$@"
