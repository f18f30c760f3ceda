# Sourced by test.sh and quickstart.sh: virtual environments that are made once and reused.

# Prints a Python that the project supports: $PYTHON if set, else the first found.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c \
            'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))'; then
            command -v "$candidate"
            return
        fi
        if [ -n "${PYTHON:-}" ]; then break; fi
    done
    echo "pit-tvm needs Python 3.10 to 3.13; PYTHON=/path/to/python names one" >&2
    return 1
}

# Prints a digest of everything that decides what is installed.
environment_stamp() { # root, python, extra requirement text
    "$2" - "$@" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256("\0".join([sys.version, *sys.argv[1:]]).encode())
for name in ("setup.py", "pyproject.toml"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest())
PY
}

# Installs the project, editable, with one extra; does nothing where that was done before.
make_environment() { # root, venv, extra, hashed requirement (may be empty)
    local python stamp root="$1" venv="$2" extra="$3" hashed="$4"
    python="$(find_python)"
    stamp="$(environment_stamp "$root" "$python" "$extra" "$hashed")"
    if [ "$(cat "$venv/pit-tvm.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
    echo "installing into $venv with $python"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --no-compile --editable "$root[$extra]"
    if [ -n "$hashed" ]; then
        printf '%s\n' "$hashed" >"$venv/hashed-requirements.txt"
        "$venv/bin/python" -m pip install --quiet --no-compile --no-deps --require-hashes \
            --requirement "$venv/hashed-requirements.txt"
    fi
    # Written last, and renamed, so that an interrupted installation is done again.
    echo "$stamp" >"$venv/pit-tvm.stamp.tmp"
    mv "$venv/pit-tvm.stamp.tmp" "$venv/pit-tvm.stamp"
}
