#!/usr/bin/env bash
# Usage: arch.sh MODULE...
# Checks the import rules of the modules in these folders, as ARCHITECTURE.md draws them: cmd -> mcm, driversdk -> bus -> proto.
set -euo pipefail
cd "$(dirname "$0")/.."

# One line per package: path | its imports | its tests' imports | all its dependencies.
format='{{.ImportPath}}|{{join .Imports " "}}|{{join .TestImports " "}} {{join .XTestImports " "}}|{{join .Deps " "}}'
packages=$(for module in "$@"; do go list -C "$module" -f "$format" ./... || exit 1; done)

awk -F'|' -v module="$(go list -m)" '
BEGIN {
	below["cmd"] = " mcm driversdk bus proto "
	below["mcm"] = below["driversdk"] = " bus proto "
	below["bus"] = " proto "
	longest = 7
}
{
	n = split($2, paths, " ")
	for (i = 1; i <= n; i++) check_import($1, paths[i], 0)
	n = split($3, paths, " ")
	for (i = 1; i <= n; i++) check_import($1, paths[i], 1)
	meets = 0
	n = split($4, paths, " ")
	for (i = 1; i <= n; i++) check_linked($1, paths[i])
	if (meets == 3)
		fail($1, "mcm and driversdk together", "only end-to-end tests bring the two together")
	n = split($2, paths, " ")
	for (i = 1; i <= n; i++) if (own(paths[i])) imports[$1, ++count[$1]] = paths[i]
}
END {
	for (package in count) if (depth(package) > longest) {
		chain = short(package)
		for (p = package; p in deepest; p = deepest[p]) chain = chain " -> " short(deepest[p])
		print "imports run " depth(package) " deep, more than " longest ": " chain
		failed = 1
	}
	exit failed
}

# Direct imports of a package or its tests.
function check_import(package, path, in_test,    from, to) {
	from = layer(package); to = layer(path)
	if (to != "" && to != from && !index(below[from], " " to " "))
		fail(package, path, "the layers are cmd -> mcm, driversdk -> bus -> proto")
	else if (from == "mcm" && to == "bus" && !in_test && short(package) !~ "^mcm/(dispatch|fetch)(/|$)")
		fail(package, path, "of mcm only dispatch and fetch know the bus")
	if (from == "bus" && kubernetes(path))
		fail(package, path, "bus is everything NATS and nothing Kubernetes")
}

# Dependencies of every program that imports the package.
function check_linked(package, path,    from, to) {
	from = layer(package); to = layer(path)
	if (from == "driversdk" && kubernetes(path) && short(package) !~ "^driversdk/mcmdriver(/|$)")
		fail(package, path, "driver authors carry no Kubernetes")
	if (from == "bus" && kubernetes(path)) fail(package, path, "bus is everything NATS and nothing Kubernetes")
	if (from == "driversdk" && server(path)) fail(package, path, "no driver links a NATS server")
	if (from == "bus" && server(path) && short(package) !~ "^bus/(embedded|bustest|optest)(/|$)")
		fail(package, path, "only bus/embedded and test support link a NATS server")
	if (from == "cmd" && to == "mcm" && meets % 2 == 0) meets += 1
	if (from == "cmd" && to == "driversdk" && meets < 2) meets += 2
}

# The length of the longest import path from a package within the module.
function depth(package,    i, d) {
	if (!(package in depths)) {
		depths[package] = 0
		for (i = 1; i <= count[package]; i++) {
			d = depth(imports[package, i]) + 1
			if (d > depths[package]) { depths[package] = d; deepest[package] = imports[package, i] }
		}
	}
	return depths[package]
}

function own(path) { return index(path, module "/") == 1 }
function short(path) { return own(path) ? substr(path, length(module) + 2) : path }
function layer(path) { if (!own(path)) return ""; path = short(path); sub("/.*", "", path); return path }
function server(path) { return path ~ "^github[.]com/nats-io/nats-server/" }
function kubernetes(path) { return path ~ "^(sigs[.])?k8s[.]io/" }
function fail(package, path, why) {
	if (reported[package, why]++) return # one of the many packages behind one wrong import is enough
	print short(package) " depends on " short(path) ": " why
	failed = 1
}
' <<<"$packages"
