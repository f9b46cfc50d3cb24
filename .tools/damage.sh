#!/usr/bin/env bash
# Usage: damage.sh COMMAND...
# Runs cmd/dev/faults with programs that are broken on purpose, and succeeds only if it exits with 1: damage was found.
# make cannot distinguish that from a run that proves nothing, which exits with 2.
set -uo pipefail
"$@"
status=$?
case $status in
	1) echo '==> damage was found, as it must be: exit status 1' ;;
	0) echo 'damage.sh: no damage was found: exit status 0; the judge does not see what is broken' >&2; exit 1 ;;
	*) echo "damage.sh: nothing was proved: exit status $status; what went wrong stands above, or try a higher LIMIT" >&2; exit 1 ;;
esac
