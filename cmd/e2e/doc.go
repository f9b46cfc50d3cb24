// Package e2e holds the end-to-end tests: the built programs as processes, a real
// API server, a real nats-server, and a cloud that counts its instances.
//
// It contains only tests. `make test-e2e` builds the programs and runs them.
// All tests share one dev cluster; each has a namespace, a bus, a cloud and a
// control plane of its own, and its logs below .out/run/e2e. E2E_BIN names
// another folder of programs than .out/bin.
package e2e
