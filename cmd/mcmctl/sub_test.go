package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/bus/caller"
	"github.com/machinebus/machinebus/bus/embedded"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/cmd/mcmctl/message"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// following runs `mcmctl sub` and returns once it listens.
func following(t *testing.T, args ...string) (out *output, stop context.CancelFunc, done <-chan error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bounded)
	t.Cleanup(cancel)
	var errOut output
	out = &output{}
	end := make(chan error, 1)
	go func() { end <- execute(ctx, out, &errOut, append([]string{"sub"}, args...)...) }()
	bustest.Eventually(t, "mcmctl to listen", func() bool {
		return strings.Contains(errOut.String(), "listening to") || len(end) > 0
	})

	return out, cancel, end
}

// meet returns a caller that knows its driver.
func meet(t *testing.T, url string) *caller.Caller {
	t.Helper()
	client, err := caller.New(connectTo(t, url), caller.Config{Cluster: "default", Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatalf("caller.New(...): %v", err)
	}
	t.Cleanup(client.Close)
	bustest.Eventually(t, "the driver", func() bool { return len(client.Replicas()) == 1 })

	return client
}

func TestSub(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{Provider: "virtual", Replica: "one"},
		func(context.Context, *replica.Task) *driverv1.Result {
			return &driverv1.Result{Payload: &driverv1.Result_Create{
				Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "virtual://1"}},
			}}
		})
	client := meet(t, url)
	all, _, allDone := following(t, "--nats-url", url, "--count", "5")
	lines, _, linesDone := following(t, "reply.>", "--nats-url", url, "--count", "2", "-o", "json")
	beats, stopBeats, beatsDone := following(t, "session.virtual.*", "--nats-url", url)
	if _, err := client.Call(t.Context(), createRequest("m1.example")); err != nil {
		t.Fatalf("Caller.Call(...): %v", err)
	}

	t.Run("Table", func(t *testing.T) {
		t.Parallel()
		if err := <-allDone; err != nil {
			t.Fatalf("mcmctl sub: %v", err)
		}
		token := regexp.MustCompile(`^[0-9:.]{12}|(reply\.virtual)\.\S+`)
		got := strings.Split(strings.TrimSpace(token.ReplaceAllString(all.String(), "$1")), "\n")
		for i, line := range got {
			got[i] = strings.TrimSpace(token.ReplaceAllString(line, "$1"))
		}
		want := []string{
			"mcm.v1.default.driver.virtual.create.default.m1~example  " +
				"create uid-m1.example.create.0 attempt 1 class default/small timeout 20s",
			"mcm.v1.default.claim.virtual.uid-m1-example  claim uid-m1.example.create.0 attempt 1 by one: running",
			"mcm.v1.default.reply.virtual  accepted uid-m1.example.create.0 attempt 1 by one",
			"mcm.v1.default.claim.virtual.uid-m1-example  claim uid-m1.example.create.0 attempt 1 by one: settled OK",
			"mcm.v1.default.reply.virtual  result uid-m1.example.create.0 attempt 1 by one: OK virtual://1",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("the request, its claim and its frames, without signs of life: -want, +got:\n%s", diff)
		}
	})
	t.Run("JSON", func(t *testing.T) {
		t.Parallel()
		if err := <-linesDone; err != nil {
			t.Fatalf("mcmctl sub: %v", err)
		}
		var got []string
		for line := range strings.SplitSeq(strings.TrimSpace(lines.String()), "\n") {
			var row message.Row
			if err := json.Unmarshal([]byte(line), &row); err != nil || row.Time == "" || row.Tree != "reply" {
				t.Fatalf("want a message of the reply tree, got %v:\n%s", err, line)
			}
			got = append(got, string(row.Message))
		}
		want := []string{
			`{"accepted":{},"attempt":1,"operationId":"uid-m1.example.create.0","replica":"one"}`,
			`{"attempt":1,"operationId":"uid-m1.example.create.0","replica":"one",` +
				`"result":{"create":{"instance":{"providerId":"virtual://1"}}}}`,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want, +got:\n%s", diff)
		}
	})
	t.Run("Sessions", func(t *testing.T) {
		t.Parallel()
		bustest.Eventually(t, "a session", func() bool { return strings.Contains(beats.String(), "session one runs") })
		stopBeats()
		if err := <-beatsDone; err != nil {
			t.Errorf("want an interrupted sub to end well, got: %v", err)
		}
	})
}

func TestSubStrangers(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	out, _, done := following(t, "mcm.v1.>", "--nats-url", url, "--count", "3", "-o", "json")
	client, err := caller.New(connectTo(t, url), caller.Config{Cluster: "default", Operations: &caller.StreamConfig{Memory: true}, Logger: bustest.Quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn := bustest.Raw(t, url)
	for _, data := range []string{"+ACK", "", "{}"} {
		if err := conn.Publish("mcm.v1.stranger", []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err != nil {
		t.Fatalf("mcmctl sub: %v", err)
	}
	var got []message.Row
	for line := range strings.SplitSeq(strings.TrimSpace(out.String()), "\n") {
		var row message.Row
		if err := json.Unmarshal([]byte(line), &row); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		got = append(got, row)
	}
	if !strings.Contains(got[0].Error, "2b 41 43 4b") || got[0].Message != nil {
		t.Errorf("want an error that shows the bytes, got %+v", got[0])
	}
	if !strings.Contains(string(got[1].Message), "no responders") {
		t.Errorf("want the empty message explained, got %+v", got[1])
	}
	if string(got[2].Message) != "{}" {
		t.Errorf("want the JSON as it came, got %+v", got[2])
	}
}

func TestSubNodeGroups(t *testing.T) {
	t.Parallel()
	url := startBus(t)
	startReplica(t, url, replica.Config{
		Provider: "virtual", Replica: "one", Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_NODE_GROUPS},
	}, func(_ context.Context, t *replica.Task) *driverv1.Result {
		return &driverv1.Result{Payload: &driverv1.Result_NodeGroups{NodeGroups: &driverv1.NodeGroupsResponse{
			Body: &driverv1.NodeGroupsResponse_Resize{
				Resize: &driverv1.NodeGroupResizeResponse{TargetSize: t.Request.GetNodeGroups().GetResize().GetTarget()},
			},
		}}}
	})
	out, _, done := following(t, "--nats-url", url, "--count", "2")
	client, err := caller.New(connectTo(t, url), caller.Config{Cluster: "default", Name: "autoscaler", Logger: bustest.Quiet()})
	if err != nil {
		t.Fatalf("caller.New(...): %v", err)
	}
	defer client.Close()
	bustest.Eventually(t, "the replica", func() bool { return len(client.Replicas()) == 1 })
	_, err = client.Call(t.Context(), caller.Request{Provider: "virtual", OperationID: "q", Body: &driverv1.Envelope{
		Body: &driverv1.Envelope_NodeGroups{NodeGroups: &driverv1.NodeGroupsRequest{Body: &driverv1.NodeGroupsRequest_Resize{
			Resize: &driverv1.NodeGroupResizeRequest{Group: "pool/a", ExpectedTarget: 2, Target: 4},
		}}},
	}})
	if err != nil {
		t.Fatalf("Call(...): %v", err)
	}
	if err := <-done; err != nil {
		t.Fatalf("mcmctl sub: %v", err)
	}
	random := regexp.MustCompile(`(?m)^[0-9:.]{12} {2}|(autoscaler\.)\S+`)
	got := random.ReplaceAllString(out.String(), "$1")
	want := "mcm.v1.default.nodegroup.virtual.resize  node_groups q attempt 1 resize group pool/a from 2 to 4 timeout 1m0s\n" +
		"mcm.v1.default.reply.virtual.autoscaler.  result q attempt 1 by one: OK target 4\n"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("a request about node groups and its answer: -want, +got:\n%s", diff)
	}
}

func TestSubForbidden(t *testing.T) {
	t.Parallel()
	config := filepath.Join(t.TempDir(), "nats.conf")
	users := `authorization { users: [{user: "u", password: "s3cret", permissions: {subscribe: "mcm.v1.other.>"}}] }`
	if err := os.WriteFile(config, []byte(users), 0o600); err != nil {
		t.Fatal(err)
	}
	url := bustest.Server(t, embedded.Options{ConfigFile: config}).URL()
	cases := map[string]struct {
		reason string
		url    string
		want   []string
	}{
		"Subject": {
			"the server's refusal names the subject", strings.Replace(url, "//", "//u:s3cret@", 1),
			[]string{"mcm.v1.default.>", "use credentials that may subscribe there"},
		},
		"Password": {
			"wrong credentials are distinguished from a server that does not run", strings.Replace(url, "//", "//u:s3cret0@", 1),
			[]string{"refused the credentials"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, stderr, err := mcmctl(t, "sub", "--nats-url", tc.url, "--cluster", "default", "--for", "5s")
			if err == nil {
				t.Fatalf("%s: want an error", tc.reason)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%s\nwant %q in: %v", tc.reason, want, err)
				}
			}
			if strings.Contains(err.Error()+stderr, "s3cret") {
				t.Errorf("the password is shown: %v\n%s", err, stderr)
			}
		})
	}
}

func TestSubject(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		args   []string
		want   string
		beats  bool
	}{
		"All":     {"everything of the chosen clusters", nil, "mcm.v1.*.>", false},
		"Tail":    {"what follows the cluster", []string{"audit.>"}, "mcm.v1.*.audit.>", false},
		"Session": {"a subject that names the tree shows it", []string{"session.*.one"}, "mcm.v1.*.session.*.one", true},
		"Hello":   {"also as the last token", []string{"hello"}, "mcm.v1.*.hello", true},
		"Full":    {"a full subject stands", []string{"mcm.v1.a.session.>"}, "mcm.v1.a.session.>", true},
		"Service": {"also one of NATS's own", []string{"$SRV.>"}, "$SRV.>", false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &follower{}
			if got := f.subject("*", tc.args); got != tc.want || f.beats != tc.beats {
				t.Errorf("%s: want %s %t, got %s %t", tc.reason, tc.want, tc.beats, got, f.beats)
			}
		})
	}
}
