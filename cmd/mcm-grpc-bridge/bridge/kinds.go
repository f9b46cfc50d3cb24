package bridge

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/machinebus/machinebus/bus"
)

// Kinds are the providers of the kinds of classes of 2018. It is the value of a flag.
type Kinds map[string]string

// DefaultKinds returns the kinds that the machine controller manager had.
func DefaultKinds() Kinds {
	return Kinds{
		"AWSMachineClass":       "aws",
		"AzureMachineClass":     "azure",
		"GCPMachineClass":       "gcp",
		"OpenStackMachineClass": "openstack",
		"AlicloudMachineClass":  "alicloud",
		"PacketMachineClass":    "packet",
	}
}

// String returns what Set takes.
func (k Kinds) String() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(k)) {
		parts = append(parts, kind+"="+k[kind])
	}

	return strings.Join(parts, ",")
}

// Set adds or replaces kinds: Kind=provider, with commas.
func (k Kinds) Set(text string) error {
	for part := range strings.SplitSeq(text, ",") {
		kind, provider, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || kind == "" {
			return fmt.Errorf("%q: want Kind=provider", part)
		}
		if err := bus.ValidToken("provider", provider); err != nil || provider != strings.ToLower(provider) {
			return fmt.Errorf("%q: want a provider in lower case, as MachineClass.provider has it", part)
		}
		k[kind] = provider
	}

	return nil
}
