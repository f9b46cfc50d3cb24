#!/usr/bin/env bash
# Usage: release.sh VERSION MODULE...
# Writes VERSION, such as v0.2.0, into the go.mod files of the modules in these folders, wherever one requires another;
# commits that, and tags the commit once for each module. It pushes nothing, and prints the command that does.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-}
shift || true
[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] \
	|| { echo "release.sh: version '$version' is not one of Go's: want one such as v0.2.0" >&2; exit 1; }
[ -z "$(git status --porcelain)" ] || { echo "release.sh: commit or remove your changes first: git status lists them" >&2; exit 1; }

tags=()
for module in "$@"; do
	tag=$version
	[ "$module" = . ] || tag=$module/$version
	! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || { echo "release.sh: tag $tag is there already" >&2; exit 1; }
	tags+=("$tag")
done
for module in "$@"; do
	for other in "$@"; do
		path=$(go list -C "$other" -m)
		if go mod edit -C "$module" -json | grep -q "\"Path\": \"$path\"" && [ "$module" != "$other" ]; then
			go mod edit -C "$module" -require="$path@$version"
		fi
	done
done
git diff --quiet || git commit --quiet --all --message "Release $version"
for tag in "${tags[@]}"; do git tag "$tag"; done
echo "tagged $(git rev-parse --short HEAD); publish it with: git push origin HEAD ${tags[*]}"
