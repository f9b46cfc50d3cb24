package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/cmd/driver-virtual/virtual"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloud"
	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
	"github.com/machinebus/machinebus/driversdk/drivertest"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The virtual driver runs as a process, which is this test's own program.
const (
	childVariable = "DRIVER_CONFORMANCE_TEST_IDENTITY"
	apiToken      = "token-of-the-test"
)

func TestMain(m *testing.M) {
	identity := os.Getenv(childVariable)
	if identity == "" {
		os.Exit(m.Run())
	}
	if err := serve(identity); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve is driver-virtual's main.
func serve(identity string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	driver := &virtual.Driver{}
	if err := driver.UnmarshalText([]byte(identity)); err != nil {
		return err
	}

	return driversdk.Serve(ctx, driversdk.Config{
		Provider: virtual.Provider, CreateIdentity: driver.Identity, Kind: virtual.Kind, APIVersions: []string{virtual.APIVersion},
		NATS: driversdk.NATSConfig{URLs: []string{os.Getenv("NATS_URL")}}, Clusters: []string{"default", "other"},
		Slots: 4, LogLevel: slog.LevelError,
	}, driver)
}

// startCloud runs a virtual cloud.
func startCloud(t *testing.T) (url string, admin *cloudapi.Admin) {
	t.Helper()
	c, err := cloud.New(t.Context(), cloud.Options{Knobs: cloudapi.Knobs{}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(cloud.NewHandler(c, apiToken))
	t.Cleanup(server.CloseClientConnections)
	if admin, err = cloudapi.NewAdmin(server.URL, apiToken); err != nil {
		t.Fatal(err)
	}

	return server.URL, admin
}

const specFormat = `{"apiVersion":"virtual.machinebus.io/v1alpha1","kind":"VirtualMachineSpec",
	"endpoint":%q,"machineType":"small","region":"moon"}`

// lookInto lets the suite see what the bus does not show.
func lookInto(url string, admin *cloudapi.Admin) drivertest.Cloud {
	return drivertest.Cloud{
		Hold: func(ctx context.Context, machine string) (func(), error) {
			names, none := []string{machine}, []string{}
			_, err := admin.Patch(ctx, cloudapi.KnobsPatch{Hold: &names})

			return func() {
				_, _ = admin.Patch(context.WithoutCancel(ctx), cloudapi.KnobsPatch{Hold: &none}) // a check fails that waits for it
			}, err
		},
		Held: func(ctx context.Context, _ string) error {
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for {
				stats, err := admin.Stats(ctx)
				if err != nil || stats.Held > 0 {
					return err
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		},
		Duplicate: func(ctx context.Context, m *driverv1.Machine) error {
			client, err := cloudapi.NewClient(url, apiToken)
			if err != nil {
				return err
			}
			list, err := client.List(ctx, cloudapi.Filter{Name: m.GetName()})
			if err != nil || len(list) != 1 {
				return errors.Join(err, fmt.Errorf("%d instances of %s", len(list), m.GetName()))
			}
			_, err = client.Create(ctx, cloudapi.CreateRequest{
				Name: m.GetName(), MachineType: "small", Region: "moon", Tags: list[0].Tags, Identity: cloudapi.IdentityNone,
			})

			return err
		},
		Tokens: func(ctx context.Context, machine string) ([]string, error) {
			var tokens []string
			entries, err := admin.Log(ctx, 0)
			for _, e := range entries {
				if e.Name == machine && e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated {
					tokens = append(tokens, e.Token)
				}
			}

			return tokens, err
		},
	}
}

// The reference driver keeps the contract, however its creates are identified.
func TestVirtual(t *testing.T) {
	t.Parallel()
	for _, identity := range []string{"token", "unique_name", "none"} {
		t.Run(identity, func(t *testing.T) {
			t.Parallel()
			wantConforming(t, virtual.Provider, "other", []string{os.Args[0]}, childVariable+"="+identity)
		})
	}
}

// The examples in Node.js share nothing with us but the contract.
func TestNodeJS(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte(apiToken), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, example := range []string{"driver-nodejs", "driver-nodejs-full"} {
		t.Run(example, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join("..", "..", ".out", "nodejs", example)
			if _, err := os.Stat(filepath.Join(dir, "node_modules")); err != nil {
				t.Fatalf("its packages are not installed: %v; run: make nodejs", err)
			}
			wantConforming(t, "nodejs", "", []string{"node", filepath.Join(dir, "driver.mjs")}, "CLOUD_TOKEN_FILE="+token)
		})
	}
}

// wantConforming runs the whole suite on a driver of the virtual cloud.
func wantConforming(t *testing.T, provider, otherCluster string, command []string, env string) {
	t.Helper()
	srv := bustest.Server(t, embedded.Options{StoreDir: t.TempDir()})
	url, admin := startCloud(t)
	var output bytes.Buffer
	d := newDriver(command, srv.URL(), &output)
	d.env = append(d.env, env)
	if err := d.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.kill()
		if t.Failed() {
			t.Logf("output of the driver:\n%s", output.String())
		}
	})
	drivertest.Run(t, drivertest.Config{
		NATS: bus.Config{URLs: []string{srv.URL()}}, Provider: provider, OtherCluster: otherCluster, Repeat: 2,
		Class: drivertest.Class{
			Namespace: "ns", Name: "small", ProviderSpec: fmt.Appendf(nil, specFormat, url),
			SecretRef: drivertest.Reference{Namespace: "ns", Name: "cloud"},
		},
		Secrets: []drivertest.Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{
			"apiToken": []byte(apiToken), "userData": []byte("join <<BOOTSTRAP_TOKEN>>"),
		}}},
		Bootstrap: map[string]string{"<<BOOTSTRAP_TOKEN>>": "abcdef.0123456789abcdef"},
		Cloud:     lookInto(url, admin), Process: d,
	})
	if stats, err := admin.Stats(t.Context()); err != nil || stats.Live != 0 {
		t.Errorf("instances left in the cloud: %+v, %v", stats, err)
	}
}

// writeFiles writes a class and a secret as for kubectl.
func writeFiles(t *testing.T, cloudURL, token string) (class, secret string) {
	t.Helper()
	dir := t.TempDir()
	class, secret = filepath.Join(dir, "class.yaml"), filepath.Join(dir, "secret.yaml")
	texts := map[string]string{
		class: fmt.Sprintf("# a comment\n---\nkind: MachineClass\nmetadata: {name: small, namespace: ns}\nprovider: Virtual\n"+
			"providerSpec: "+specFormat+"\nsecretRef: {name: cloud}\n", cloudURL),
		secret: "kind: Secret\nmetadata: {name: cloud, namespace: ns}\nstringData: {apiToken: " + token + "}\n",
	}
	for file, text := range texts {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	return class, secret
}

// command runs the program.
func command(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	err := cmd.ExecuteContext(t.Context())

	return out.String(), err
}

func TestCommand(t *testing.T) {
	t.Setenv(childVariable, "token")
	url, _ := startCloud(t)
	class, secret := writeFiles(t, url, apiToken)
	junit := filepath.Join(t.TempDir(), "report.xml")
	out, err := command(t, "--class", class, "--secret", secret, "--junit", junit, "--only", "CREATE-1,DELETE-1,FETCH-4", "--", os.Args[0])
	if err != nil || !strings.Contains(out, "2 clauses passed, 0 failed, 0 skipped, 1 bind mcm") {
		t.Errorf("a driver that keeps the contract: %v\n%s", err, out)
	}
	report, err := os.ReadFile(junit)
	if err != nil || !strings.Contains(string(report), `tests="3" failures="0" skipped="1"`) {
		t.Errorf("JUnit: %v\n%s", err, report)
	}

	class, secret = writeFiles(t, url, "another-token")
	out, err = command(t, "--class", class, "--secret", secret, "--junit", junit, "--only", "CREATE-1", "--", os.Args[0])
	if !errors.Is(err, errBroken) || !strings.Contains(out, "FAIL  CREATE-1") || !strings.Contains(out, "NOT CLEANED UP") {
		t.Errorf("a driver that its cloud refuses: %v\n%s", err, out)
	}
	if strings.Contains(out, "another-token") {
		t.Errorf("the report shows a secret:\n%s", out)
	}
}

func TestCommand_BadInput(t *testing.T) {
	t.Parallel()
	class, secret := writeFiles(t, "http://127.0.0.1:1", apiToken)
	cases := map[string]struct {
		reason string
		args   []string
		says   string
	}{
		"no class":         {"says which flag", nil, "--class"},
		"argument":         {"says where it belongs", []string{"driver"}, "comes after --"},
		"no such file":     {"names it", []string{"--class=/nowhere"}, "/nowhere"},
		"wrong kind":       {"says what is wanted", []string{"--class", secret}, "MachineClass"},
		"other provider":   {"names both", []string{"--class", class, "--provider=acme"}, "virtual, not acme"},
		"secret missing":   {"names it", []string{"--class", class, "--", "true"}, "ns/cloud"},
		"unknown clause":   {"names it", []string{"--class", class, "--secret", secret, "--only=NO-1", "--", "true"}, "NO-1"},
		"no such driver":   {"names it", []string{"--class", class, "--secret", secret, "--", "/nowhere/driver"}, "/nowhere/driver"},
		"driver that ends": {"says so at once", []string{"--class", class, "--secret", secret, "--", "false"}, "ended by itself"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := command(t, tc.args...); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%s: want %q in the error, have %v", tc.reason, tc.says, err)
			}
		})
	}
}
