// Package mutants holds seeded mistakes in the protocol code, and the test that runs the tests of package bus against
// each. It shows that they would see a missing part of the argument in bus/SAFETY.md.
package mutants
