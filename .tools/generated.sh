#!/usr/bin/env bash
# Usage: generated.sh check|write FRESH
# Compares the tree's generated files with new ones below the folder FRESH (check), or replaces them (write). Both
# include leftovers of removed sources.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=$1 fresh=$2

generated_in() { # folder
	(cd "$1" && find . -name '.?*' -prune -o -type f \
		\( -name '*.pb.go' -o -name 'zz_generated.*.go' -o -path './deploy/crds/*.yaml' \) -print)
}

stale=0
while read -r file; do
	cmp -s "$file" "$fresh/$file" && continue
	stale=1
	if [ "$mode" = check ]; then
		diff -Nu "$file" "$fresh/$file" | head -n 20 || true
	elif [ -f "$fresh/$file" ]; then
		mkdir -p "$(dirname "$file")"
		cp "$fresh/$file" "$file"
		echo "wrote ${file#./}"
	else
		rm "$file"
		echo "removed ${file#./}"
	fi
done < <({ generated_in .; generated_in "$fresh"; } | sort -u)
[ "$mode" = write ] || exit "$stale"
