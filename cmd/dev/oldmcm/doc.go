// Package oldmcm pins the machine controller manager that end-to-end tests replace by mcm: its
// manager, and in the folder controller its provider process with the sample driver. It is a
// module of its own, of no release: no program here links either.
package oldmcm

import _ "github.com/gardener/machine-controller-manager/pkg/util/provider/app" // its version is that of the manager
