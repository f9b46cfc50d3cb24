// Package fetch answers drivers that fetch classes, the secrets of classes, and the
// values for a machine's user data. A driver only gets what classes of its own provider
// refer to, and secrets only sealed.
//
// The package also announces changed classes and secrets to drivers, and stores the
// control plane's key. Every replica of the manager serves fetches, not only the leader.
// Package dispatch sends operations.
package fetch
