package main

import (
	"maps"
	"slices"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// flagsWithoutEffect are flags of the machine controller manager's two programs that mean
// nothing here, with the reason. Old command lines have them: mcm takes any value, and warns.
var flagsWithoutEffect = map[string]string{
	"cloud-provider":             "mcm serves every provider that has a driver on the bus",
	"contention-profiling":       "the profiles of --profiling have no contention",
	"controller-start-interval":  "all controllers start at once",
	"kube-api-content-type":      "mcm chooses it for each kind of object",
	"leader-elect-resource-lock": "the lock is a Lease",
}

// An ignoredValue takes any value of a flag without effect.
type ignoredValue struct{}

func (ignoredValue) String() string   { return "" }
func (ignoredValue) Set(string) error { return nil }
func (ignoredValue) Type() string     { return "value" }

func addFlagsWithoutEffect(fs *pflag.FlagSet) {
	for name, why := range flagsWithoutEffect {
		f := fs.VarPF(ignoredValue{}, name, "", "no effect: "+why)
		f.Hidden = true
		if name == "contention-profiling" {
			f.NoOptDefVal = "true" // it may stand alone
		}
	}
}

// warnOfFlagsWithoutEffect warns of each such flag that was given.
func warnOfFlagsWithoutEffect(fs *pflag.FlagSet) {
	for _, name := range slices.Sorted(maps.Keys(flagsWithoutEffect)) {
		if fs.Changed(name) {
			klog.Background().Info("flag --"+name+" has no effect: remove it", "why", flagsWithoutEffect[name])
		}
	}
}
