// Package install holds the tests of deploy/: that the API server accepts every manifest,
// that mcm needs exactly the rights of its roles, and that NATS allows each user only what
// it needs.
//
// It contains only tests. They share a dev cluster of their own, because they create
// objects that exist once per cluster; see package e2e for how to run them.
package install
