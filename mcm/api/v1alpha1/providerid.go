package v1alpha1

import "path"

// SameInstance reports whether two provider ids are of one instance. Providers and their
// cloud-controller-managers may write the part before the instance's own id differently,
// such as with a region or a zone.
func SameInstance(a, b string) bool { return a == b || path.Base(a) == path.Base(b) }
