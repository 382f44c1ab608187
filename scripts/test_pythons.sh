#!/usr/bin/env bash
# Runs the unit and contract tests on each Python from 3.11 to 3.14 that is found here, each in an environment without torch.
# Pythons are looked for on PATH, in pyenv's folder and by `uv python find`. The others are skipped by name.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in "python3.$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$1".*/bin/python \
    "$(command -v uv >/dev/null && uv python find --offline "3.$1" 2>/dev/null)"; do
    if [ "$("$candidate" -c 'import sys; print(sys.version_info.minor)' 2>/dev/null)" = "$1" ]; then
      echo "$candidate"
      return
    fi
  done
}

run_tests() {
  local environment=".venv-3.$1" started=$SECONDS
  if [ ! -e "$environment/.dev" ] || [ pyproject.toml -nt "$environment/.dev" ]; then
    rm -rf "$environment"
    "$2" -m venv "$environment" &&
      "$environment/bin/python" -m pip install -qq --upgrade pip &&
      "$environment/bin/python" -m pip install -qq -e ".[igzip,dev]" &&
      touch "$environment/.dev" || return 1
  fi
  echo "environment ready after $((SECONDS - started)) s"
  "$environment/bin/python" -m pytest -q -n 2 --dist loadfile -p no:cacheprovider tests/unit tests/contract "${@:3}"
}

status=0 ran=() skipped=() failed=()
for minor in 11 12 13 14; do
  python=$(find_python "$minor")
  if [ -z "$python" ]; then
    skipped+=("3.$minor")
    continue
  fi
  echo "── Python 3.$minor: $python"
  if run_tests "$minor" "$python" "$@"; then ran+=("3.$minor"); else failed+=("3.$minor") status=1; fi
done
echo "passed on Python: ${ran[*]:-none}; failed on: ${failed[*]:-none}; not found here, skipped: ${skipped[*]:-none}"
exit $status
