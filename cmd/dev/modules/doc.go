// Package modules holds the tests that keep the modules of a release apart: a driver's author
// gets proto, bus and driversdk, and none of what only mcm needs.
package modules
