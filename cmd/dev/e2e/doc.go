// Package e2e holds the end-to-end tests: the built programs as processes, a real
// API server, a real nats-server, and a cloud that counts its instances.
//
// Its gates are proxies before the API server and the cloud. A gate stops one chosen
// request, on its way there, or its answer on the way back. So mcm stands at a known
// point when a test kills it, without a hook in the product.
//
// It contains only tests. `make test-e2e` builds the programs and runs them.
// All tests share one dev cluster; each has a namespace, a bus, a cloud and a
// control plane of its own, and its logs below .out/run/e2e. E2E_BIN names
// another folder of programs than .out/bin.
package e2e
