package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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
	poolsVariable = "DRIVER_CONFORMANCE_TEST_POOLS" // URL of the cloud with the node groups
	apiToken      = "token-of-the-test"
)

// atOnce is how many tests run at a time: they wait for what does not come, and
// leave the cores alone meanwhile.
const atOnce = 8

func TestMain(m *testing.M) {
	identity := os.Getenv(childVariable)
	if identity == "" {
		flag.Parse()
		if err := flag.Set("test.parallel", strconv.Itoa(atOnce)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
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

	client, err := cloudapi.NewClient(os.Getenv(poolsVariable), apiToken)
	if err != nil {
		return err
	}

	return driversdk.Serve(ctx, driversdk.Config{
		Provider: virtual.Provider, CreateIdentity: driver.Identity, Kind: virtual.Kind, APIVersions: []string{virtual.APIVersion},
		NATS: driversdk.NATSConfig{URLs: []string{os.Getenv("NATS_URL")}}, Clusters: []string{"default", "other"},
		Slots: 4, LogLevel: slog.LevelError,
	}, virtual.Pooled{Driver: driver, Cloud: client})
}

// startCloud runs a virtual cloud.
func startCloud(t *testing.T) (url string, admin *cloudapi.Admin) {
	t.Helper()
	c, err := cloud.New(t.Context(), cloud.Options{Knobs: cloudapi.Knobs{BootDelay: cloudapi.Duration(50 * time.Millisecond)}, Logger: bustest.Quiet()})
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
	for identity, skipped := range map[string][]string{
		"token": {"IDENTITY-2", "SUBJECT-3"}, "unique_name": {"IDENTITY-1", "SUBJECT-3"}, "none": {"IDENTITY-", "SUBJECT-3"},
	} {
		t.Run(identity, func(t *testing.T) {
			t.Parallel()
			wantConforming(t, checked{
				provider: virtual.Provider, otherCluster: "other", nodeGroup: "checked", otherNodeGroup: "another",
				command: []string{os.Args[0]}, env: childVariable + "=" + identity, skipped: skipped,
			})
		})
	}
}

// What the examples in Node.js do not do, and what binds full replicas alone.
var (
	notInNodeJS = []string{
		"INITIALIZE-", "STATUS-4", "VOLUMEIDS-", "VALIDATE-", "MIGRATECLASS-", "LIST-3", "IDENTITY-2",
		"GROUP-", "INSTANCES-", "RESIZE-", "REMOVE-",
	}
	notPlain = []string{
		"SUBJECT-1", "SUBJECT-2", "ENV-6", "ENV-7", "RUN-", "RESULT-2", "RESULT-4", "RESULT-5", "RESULT-6", "ACCEPT-", "BUSY-", "CANCEL-", "OPS-",
		"CHANGED-", "CLAIM-", "FENCE-", "SESSION-", "HELLO-", "IDENTITY-1",
	}
)

// The examples in Node.js share nothing with us but the contract.
func TestNodeJS(t *testing.T) {
	t.Parallel()
	for example, skipped := range map[string][]string{
		"driver-nodejs":      slices.Concat(notInNodeJS, notPlain, []string{"STATUS-", "FETCH-2", "FETCH-3"}),
		"driver-nodejs-full": append([]string{"SUBJECT-3"}, notInNodeJS...),
	} {
		t.Run(example, func(t *testing.T) {
			t.Parallel()
			wantConforming(t, checked{provider: "nodejs", command: nodeCommand(t, example), env: tokenFile(t), skipped: skipped})
		})
	}
}

// nodeCommand is the command line of an example in Node.js.
func nodeCommand(t *testing.T, example string) []string {
	t.Helper()
	dir := filepath.Join("..", "..", ".out", "nodejs", example)
	if _, err := os.Stat(filepath.Join(dir, "node_modules")); err != nil {
		t.Fatalf("its packages are not installed: %v; run: make nodejs", err)
	}

	return []string{"node", filepath.Join(dir, "driver.mjs")}
}

// tokenFile is where the plain example finds the cloud's token, for its environment.
func tokenFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(apiToken), 0o600); err != nil {
		t.Fatal(err)
	}

	return "CLOUD_TOKEN_FILE=" + file
}

// A checked driver is one of the virtual cloud.
type checked struct {
	provider, otherCluster    string
	nodeGroup, otherNodeGroup string
	command                   []string
	env                       string
	skipped                   []string // how the ids of clauses begin
	tags                      string   // JSON of one more field of the provider spec
	except                    []drivertest.Exception
}

// addPools gives the cloud two pools, one of an instance that has to stay, and one of
// none. It returns how many instances that are.
func addPools(t *testing.T, url string) int {
	t.Helper()
	client, err := cloudapi.NewClient(url, apiToken)
	if err != nil {
		t.Fatal(err)
	}
	for _, pool := range []cloudapi.Pool{{Name: "checked", Min: 1, Max: 4}, {Name: "another", Max: 1}} {
		pool.MachineType, pool.Region = "small", "moon"
		if _, err := client.PutPool(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client.ResizePool(t.Context(), "checked", cloudapi.ResizeRequest{RequestID: "first", Size: 1}); err != nil {
		t.Fatal(err)
	}

	return 1
}

// wantConforming runs the whole suite on a driver.
func wantConforming(t *testing.T, c checked) {
	t.Helper()
	srv := bustest.Server(t, embedded.Options{})
	url, admin := startCloud(t)
	kept := addPools(t, url)
	var output bytes.Buffer
	d := newDriver(c.command, []string{"NATS_URL=" + srv.URL()}, &output)
	d.env = append(d.env, c.env, poolsVariable+"="+url)
	if err := d.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.kill()
		if t.Failed() {
			t.Logf("output of the driver:\n%s", output.String())
		}
	})
	spec := fmt.Appendf(nil, specFormat, url)
	if c.tags != "" {
		spec = fmt.Appendf(bytes.TrimSuffix(spec, []byte("}")), `,"tags":%s}`, c.tags)
	}
	report := drivertest.Run(t, drivertest.Config{
		NATS: bus.Config{URLs: []string{srv.URL()}}, Provider: c.provider, OtherCluster: c.otherCluster, Repeat: 2, Except: c.except,
		NodeGroup: c.nodeGroup, OtherNodeGroup: c.otherNodeGroup,
		Class: drivertest.Class{
			Namespace: "ns", Name: "small", ProviderSpec: spec,
			SecretRef: drivertest.Reference{Namespace: "ns", Name: "cloud"},
		},
		Secrets: []drivertest.Secret{{Namespace: "ns", Name: "cloud", Data: map[string][]byte{
			"apiToken": []byte(apiToken), "userData": []byte("join <<BOOTSTRAP_TOKEN>>"),
		}}},
		Bootstrap: map[string]string{"<<BOOTSTRAP_TOKEN>>": "abcdef.0123456789abcdef"},
		Cloud:     lookInto(url, admin), Process: d,
	})
	var want, skipped []string
	for _, clause := range drivertest.Clauses() {
		if slices.ContainsFunc(c.skipped, func(id string) bool { return strings.HasPrefix(clause.ID, id) }) {
			want = append(want, clause.ID)
		}
	}
	for _, f := range report.Of(drivertest.Skipped) {
		skipped = append(skipped, f.ID)
	}
	if diff := cmp.Diff(want, skipped); diff != "" {
		t.Errorf("skipped clauses (-want +got):\n%s", diff)
	}
	bustest.Eventually(t, "no instance is left in the cloud but those of the pools", func() bool {
		stats, err := admin.Stats(t.Context())

		return err == nil && stats.Live == kept
	})
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

// wantAtEnd looks for texts behind the line that counts.
func wantAtEnd(t *testing.T, out string, texts ...string) {
	t.Helper()
	end := out[strings.LastIndex(out, "\n\n")+1:]
	for _, text := range texts {
		if !strings.Contains(end, text) {
			t.Errorf("the report does not end with %q:\n%s", text, end)
		}
	}
}

func TestCommand(t *testing.T) {
	t.Setenv(childVariable, "token")
	url, _ := startCloud(t)
	addPools(t, url)
	t.Setenv(poolsVariable, url)
	class, secret := writeFiles(t, url, apiToken)
	junit := filepath.Join(t.TempDir(), "report.xml")
	out, err := command(t, "--class", class, "--secret", secret, "--node-group", "checked", "--junit", junit,
		"--only", "CREATE-1,DELETE-1,FETCH-4,REMOVE-2,REMOVE-3", "--", os.Args[0])
	if err != nil || !strings.Contains(out, "3 clauses passed, 0 failed, 0 excepted, 1 skipped, 1 bind mcm") {
		t.Errorf("a driver that keeps the contract: %v\n%s", err, out)
	}
	wantAtEnd(t, out, "1 skipped clauses bind it", "  REMOVE-3: needs a second node group (Config.OtherNodeGroup, --other-node-group)",
		fmt.Sprint(len(drivertest.Clauses())-5)+" more clauses were not asked for")
	report, err := os.ReadFile(junit)
	if err != nil || !strings.Contains(string(report), `tests="5" failures="0" skipped="2"`) {
		t.Errorf("JUnit: %v\n%s", err, report)
	}

	strict := []string{"--class", class, "--secret", secret, "--strict", "--only", "LIST-2,LIST-3,SUBJECT-3"}
	out, err = command(t, slices.Concat(strict, []string{"--", os.Args[0]})...)
	if !errors.Is(err, errBroken) || !strings.Contains(out, "1 clauses passed, 1 failed, 0 excepted, 1 skipped") || !strings.Contains(out, "FAIL    LIST-3") {
		t.Errorf("a clause that could not be checked, where none may be skipped: %v\n%s", err, out)
	}
	out, err = command(t, slices.Concat(strict, []string{"--may-skip", "LIST-3", "--", os.Args[0]})...)
	if err != nil || !strings.Contains(out, "1 clauses passed, 0 failed, 0 excepted, 2 skipped") {
		t.Errorf("a clause that could not be checked, and that may be skipped: %v\n%s", err, out)
	}
	wantAtEnd(t, out, "1 skipped clauses do not bind this driver", "  SUBJECT-3: binds plain drivers", "1 skipped clauses bind it", "  LIST-3: needs")

	out, err = command(t, slices.Concat(strict, []string{"--except", writeExceptions(t, "LIST-3"), "--", os.Args[0]})...)
	if err != nil || !strings.Contains(out, "1 clauses passed, 0 failed, 1 excepted, 1 skipped") {
		t.Errorf("a clause that counts as broken, and has an exception: %v\n%s", err, out)
	}
	wantAtEnd(t, out, "except  LIST-3", "excepted: it serves one cluster", "the cost: one driver for each cluster")

	// Those of which the help says that no flag lends what they take.
	inCloud := "RESULT-3,STATUS-3,FENCE-3,IDENTITY-1"
	out, err = command(t, "--class", class, "--secret", secret, "--strict", "--only", inCloud, "--may-skip", inCloud, "--", os.Args[0])
	if err != nil {
		t.Errorf("clauses that take a look into the cloud, and may be skipped: %v\n%s", err, out)
	}
	wantAtEnd(t, out, "4 skipped clauses bind it", "FENCE-3 RESULT-3: needs a cloud that holds a create up (Config.Cloud.Hold)",
		"(Config.Cloud.Duplicate)", "(Config.Cloud.Tokens)")

	class, secret = writeFiles(t, url, "another-token")
	out, err = command(t, "--class", class, "--secret", secret, "--junit", junit, "--only", "CREATE-1", "--", os.Args[0])
	if err == nil || !strings.Contains(err.Error(), "mend the credentials") || out != "" {
		t.Errorf("want one error that says what to mend for a driver that its cloud refuses, and no clause: %v\n%s", err, out)
	}
	if strings.Contains(fmt.Sprint(err), "another-token") {
		t.Errorf("the error shows a secret: %v", err)
	}
}

// writeExceptions writes a file with the exception of one clause.
func writeExceptions(t *testing.T, clause string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "exceptions.yaml")
	text := "- clause: " + clause + "\n  why: it serves one cluster\n  cost: one driver for each cluster\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	return file
}

// A driver without node groups has one line for all of their clauses.
func TestCommand_NoNodeGroups(t *testing.T) {
	t.Parallel()
	url, _ := startCloud(t)
	class, secret := writeFiles(t, url, apiToken)
	log := filepath.Join(t.TempDir(), "driver.log")
	var only []string
	for _, c := range drivertest.Clauses() {
		if c.ID == "LIST-2" || strings.HasPrefix(c.ID, "GROUP-") || strings.HasPrefix(c.ID, "REMOVE-") {
			only = append(only, c.ID)
		}
	}
	driver := "echo started; exec " + strings.Join(nodeCommand(t, "driver-nodejs-full"), " ")
	out, err := command(t, "--class", class, "--secret", secret, "--driver-log", log, "--only", strings.Join(only, ","), "--", "sh", "-c", driver)
	if err != nil || !strings.Contains(out, "pass    LIST-2") || strings.Count(out, "\nskip ") != 1 {
		t.Errorf("want a line for LIST-2 and one for the rest: %v\n%s", err, out)
	}
	if text, err := os.ReadFile(log); err != nil || !strings.HasPrefix(string(text), "started\n") {
		t.Errorf("the log of the driver: %v\n%s", err, text)
	}
}

// The help fits a terminal, as its examples are copied from there.
func TestCommand_Help(t *testing.T) {
	t.Parallel()
	const most = 92
	for line := range strings.Lines(help) {
		if len(line) > most {
			t.Errorf("a line of the help has %d characters, want at most %d: %s", len(line), most, line)
		}
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
		"argument":         {"says where it belongs", []string{"driver"}, "command line after --"},
		"driver log":       {"there is none to write", []string{"--class", class, "--driver-log=driver.log"}, "command line after --"},
		"no such file":     {"names it", []string{"--class=/nowhere"}, "/nowhere"},
		"wrong kind":       {"says what is wanted", []string{"--class", secret}, "MachineClass"},
		"other provider":   {"names both", []string{"--class", class, "--provider=acme"}, "has provider virtual, but --provider is acme"},
		"secret missing":   {"names it", []string{"--class", class, "--", "true"}, "ns/cloud"},
		"one group twice":  {"wants another", []string{"--class", class, "--secret", secret, "--node-group=a", "--other-node-group=a", "--", "true"}, "node group"},
		"unknown clause":   {"names it", []string{"--class", class, "--secret", secret, "--only=NO-1", "--", "true"}, "NO-1"},
		"may skip":         {"says what it needs", []string{"--class", class, "--secret", secret, "--may-skip=FENCE-3", "--", "true"}, "strict"},
		"exception":        {"names the clause", []string{"--class", class, "--secret", secret, "--except", writeExceptions(t, "NO-2"), "--", "true"}, "NO-2"},
		"no exceptions":    {"says what is wanted", []string{"--class", class, "--secret", secret, "--except", class, "--", "true"}, "list of exceptions"},
		"no such driver":   {"names it", []string{"--class", class, "--secret", secret, "--", "/nowhere/driver"}, "/nowhere/driver"},
		"driver that ends": {"says so at once", []string{"--class", class, "--secret", secret, "--", "false"}, "exited without being stopped"},
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
