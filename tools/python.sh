#!/bin/sh
# Prints the first Python that is >= 3.11, < 3.14 and really works (a version manager's shim may exist and fail).
check='import sys, ssl, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14)); '
for name in "$@" python3.13 python3.12 python3.11 python3 python; do
  path=$(command -v "$name" 2>/dev/null) || continue
  if real=$("$path" -c "import sys; print(sys.executable)" 2>/dev/null) && "$path" -c "$check" >/dev/null 2>&1; then
    echo "$real"
    exit 0
  fi
done
exit 1
