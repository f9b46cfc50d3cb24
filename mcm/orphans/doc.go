// Package orphans finds instances that belong to no machine and has them deleted, so that
// they do not cost money for ever. To delete an instance in use is much worse than to keep
// an unused one, so the package keeps an instance whenever it is in doubt: see [Collector],
// and README.md.
//
// It also marks Nodes that belong to no machine.
package orphans
