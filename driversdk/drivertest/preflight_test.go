package drivertest

import (
	"strings"
	"testing"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
)

// What keeps every clause from being checked is one error, which says what to mend.
func TestCheck_Preflight(t *testing.T) {
	t.Parallel()
	wrongToken := []Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{"token": []byte("a-wrong-token")}}}
	for name, tc := range map[string]struct {
		reason string
		traits traits
		change func(*Config)
		says   []string
	}{
		"class":       {"the driver refuses it", traits{}, func(c *Config) { c.Class.ProviderSpec = []byte(`{"size":"conformance"}`) }, []string{"size: want text", "mend MachineClass ns/small"}},
		"credentials": {"the cloud refuses them", traits{}, func(c *Config) { c.Secrets = wrongToken }, []string{"Unauthenticated", "mend the credentials", "--secret"}},
		"plain":       {"the same of a driver that only answers", traits{plain: true}, func(c *Config) { c.Secrets = wrongToken }, []string{"mend the credentials"}},
		"cloud":       {"it cannot be reached", traits{away: true}, func(*Config) {}, []string{"connection refused", "can reach its cloud (its flags, or MachineClass ns/small)"}},
		"bus":         {"no server is there", traits{}, func(c *Config) { c.NATS.URLs = []string{"nats://127.0.0.1:1"} }, []string{"127.0.0.1:1", "is the server running"}},
		"provider":    {"nothing serves it", traits{}, func(c *Config) { c.Provider, c.Wait = "other", 1 }, []string{`provider "other"`, "check that it runs"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			srv := bustest.Server(t, embedded.Options{})
			startProcess(t, srv.URL(), tc.traits)
			cfg := testConfig(srv.URL())
			tc.change(&cfg)
			_, err := Check(t.Context(), cfg, func(f Finding) { t.Errorf("a clause was checked: %s", f) })
			for _, text := range tc.says {
				if err == nil || !strings.Contains(err.Error(), text) {
					t.Errorf("%s: want %q in the error, have %v", tc.reason, text, err)
				}
			}
		})
	}
}
