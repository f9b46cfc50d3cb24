#!/usr/bin/env bash
# Usage: release.sh VERSION MODULE...
# Commits and tags a release of the modules in these folders; a module stands after those that it requires. It pushes
# nothing, and prints the command that does.
# The tagged commit has VERSION, such as v0.2.0, wherever one of the modules requires another, and no `replace` lines:
# `go install` refuses a module that has some. Its go.sum files have the sums of the release. The next commit brings the
# `replace` lines back.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-}
shift || true
fail() { echo "release.sh: $*" >&2; exit 1; }
[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?$ ]] || fail "version '$version' is not one of Go's: want one such as v0.2.0"
[ -z "$(git status --porcelain)" ] || fail "commit or remove your changes first: git status lists them"

# tag_of MODULE prints the name of its tag.
tag_of() { if [ "$1" = . ]; then echo "$version"; else echo "$1/$version"; fi; }
# path_of MODULE prints its path.
path_of() { go list -C "$1" -m; }
# requires MODULE PATH succeeds if the module's go.mod names the path.
requires() { go mod edit -C "$1" -json | grep -q "\"Path\": \"$2\""; }

tags=() paths=()
for module in "$@"; do
	tag=$(tag_of "$module")
	! git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null || fail "tag $tag is there already"
	tags+=("$tag")
	paths+=("$(path_of "$module")")
done
before=$(git rev-parse HEAD)

# The release is made in a clone first: a module's sum needs its tag, and this tree stays as it is if something fails.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet . "$scratch/tree"
in_scratch() { git -C "$scratch/tree" -c user.name=release -c user.email=release@localhost -c commit.gpgSign=false -c tag.gpgSign=false "$@"; }

repository=https://$(path_of .)

# sums PATH prints a released module's lines of go.sum. It runs outside of the modules, whose replace lines would count.
sums() {
	GOWORK=off GOFLAGS=-modcacherw GOMODCACHE=$scratch/modules GOPRIVATE=$1 GOPROXY=direct \
		GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=url.$scratch/tree.insteadOf GIT_CONFIG_VALUE_0=$repository \
		go mod download -C "$scratch" -json "$1@$version" \
		| awk -F'"' -v of="$1 $version" '$2 == "Sum" { print of " " $4 } $2 == "GoModSum" { print of "/go.mod " $4 }'
}

released=()
for module in "$@"; do
	folder=$scratch/tree/$module
	for path in "${released[@]}"; do
		requires "$folder" "$path" || continue
		go mod edit -C "$folder" -dropreplace="$path" -require="$path@$version"
		sums "$path" >>"$folder/go.sum"
	done
	go mod edit -C "$folder" -json | grep -q '"Replace": null' \
		|| fail "module $module has a replace line: remove it, or name the module that it is about before this one"
	in_scratch add --all
	in_scratch commit --quiet --allow-empty --message "$module"
	in_scratch tag "$(tag_of "$module")"
	released+=("$(path_of "$folder")")
done

git fetch --quiet --no-tags "$scratch/tree" HEAD
git checkout --quiet FETCH_HEAD -- .
git diff --quiet HEAD || git commit --quiet --all --message "Release $version"
release=$(git rev-parse HEAD)
for tag in "${tags[@]}"; do git tag "$tag"; done

git diff --name-only -z "$before" "$release" | xargs -0 -r git checkout --quiet "$before" --
for module in "$@"; do
	for path in "${paths[@]}"; do
		if requires "$module" "$path" && [ "$(path_of "$module")" != "$path" ]; then
			go mod edit -C "$module" -require="$path@$version"
		fi
	done
done
git diff --quiet HEAD || git commit --quiet --all --message "Back to the modules of this tree, after $version"
echo "tagged $(git rev-parse --short "$release"); publish it with: git push origin HEAD ${tags[*]}"
