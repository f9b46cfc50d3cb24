#!/usr/bin/env bash
# Usage: fuzz.sh BUDGET MODULE...
# Runs every fuzz target of the modules in these folders for BUDGET, a number of inputs such as 20000x or a time such as 1m; go test
# takes one target at a time. Use a time only by hand: at its end go test may fail with "context deadline exceeded"
# although nothing was found (golang/go#75804), which never happens with a number of inputs.
set -euo pipefail
cd "$(dirname "$0")/.."
budget=$1
shift
limit=5m # for building a target and all its runs: go test has no timeout of its own when it fuzzes

format='{{$p := .}}{{range .TestGoFiles}}{{$p.Module.Dir}} {{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$p.Module.Dir}} {{$p.ImportPath}} {{$p.Dir}}/{{.}}{{"\n"}}{{end}}'
count=0
while read -r module package file; do
	[ -n "$module" ] || continue
	while read -r target; do
		echo "--- $package $target"
		timeout --kill-after=10s "$limit" go test -C "$module" -run='^$' -fuzz="^$target\$" -fuzztime="$budget" -fuzzminimizetime=1000x "$package" </dev/null || {
			[ $? != 124 ] || { echo "fuzz.sh: $target did not end within $limit" >&2; exit 1; }
			echo "fuzz.sh: $target failed; its input is kept below testdata/fuzz: mend the code and commit it as a test case" >&2
			exit 1
		}
		count=$((count + 1))
	done < <(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file")
done < <(for module in "$@"; do go list -C "$module" -f "$format" ./...; done)
[ "$count" -gt 0 ] || { echo "fuzz.sh: found no fuzz target" >&2; exit 1; }
