// Package safety finds instances that belong to no machine, and has them
// deleted, so that nobody pays for them for ever. Deleting one that is in use is
// much worse than keeping one that is not, so whatever is doubtful ends in
// keeping: see [Collector], and README.md for each doubt.
//
// It also marks Nodes that belong to no machine. It does not look after sets that
// have too many machines; the controller of machine sets does.
package safety
