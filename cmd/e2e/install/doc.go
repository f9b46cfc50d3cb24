// Package install holds the tests of deploy/: that every manifest is one the API
// server takes, that mcm runs under exactly the roles there and needs all of
// them, and that NATS lets each user do what it must and nothing else.
//
// It has tests only. They share a dev cluster of their own, because they make
// objects that a cluster has once; see package e2e for how they are run.
package install
