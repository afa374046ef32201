#!/bin/sh
# Prints the first Python that is >= 3.11, < 3.14 and really works (a version manager's shim may exist and fail).
# With a name or path as argument, that one or none.
check='import sys, ssl, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
[ $# -gt 0 ] || set -- python3.13 python3.12 python3.11 python3 python
for name in "$@"; do
  path=$(command -v "$name" 2>/dev/null) || continue
  if "$path" -c "$check" >/dev/null 2>&1; then
    "$path" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
exit 1
