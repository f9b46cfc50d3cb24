package v1alpha1

import "path"

// SameInstance tells whether two provider ids mean one instance. Providers and
// their cloud-controller-managers may write what comes before its own id in
// different ways, such as a region here and a zone there.
func SameInstance(a, b string) bool { return a == b || path.Base(a) == path.Base(b) }
