package bus

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// What the golden frames are about. Maps have one entry: the order of more is
// nobody's promise.
const (
	goldenCluster   = "default"
	goldenProvider  = "nodejs"
	goldenReplica   = "r1"
	goldenUID       = "0b4f6a52-6a1e-4c0e-9f0e-2f6f4c3f9a11"
	goldenOwner     = "9d3f7c1e-2b54-4a86-8d0a-5c1b7e6f4a22"
	goldenOperation = goldenUID + ".create.0"
	goldenReply     = "mcm.v1.default.reply.nodejs.CALLER.TOKEN"
	goldenInbox     = "_INBOX_driver.nodejs.X.1"
)

func goldenMachine() *driverv1.Machine {
	return &driverv1.Machine{
		Namespace: "ns", Name: "m1.example", Uid: goldenUID, Labels: map[string]string{"pool": "a"}, Annotations: map[string]string{"k": "v"},
		NodeTemplate: &driverv1.NodeTemplate{
			Labels: map[string]string{"role": "worker"}, Annotations: map[string]string{"n": "1"},
			Taints: []*driverv1.Taint{{Key: "dedicated", Value: "db", Effect: "NoSchedule"}},
		},
	}
}

func goldenClass() *driverv1.ClassReference {
	return &driverv1.ClassReference{
		Class:             &driverv1.ObjectReference{Namespace: "ns", Name: "small", Uid: "c-uid", ResourceVersion: "7"},
		Secret:            &driverv1.ObjectReference{Namespace: "ns", Name: "boot", Uid: "b-uid", ResourceVersion: "8"},
		CredentialsSecret: &driverv1.ObjectReference{Namespace: "ns", Name: "cloud", Uid: "s-uid", ResourceVersion: "9"},
	}
}

func goldenInstance() *driverv1.Instance {
	return &driverv1.Instance{
		ProviderId: "virtual:///moon/i-1", NodeName: "m1.example", MachineName: "m1.example", MachineUid: goldenUID, Owner: goldenOwner,
		Addresses: []*driverv1.Address{{Type: "InternalIP", Address: "10.0.0.1"}},
	}
}

// goldenRequests are what mcm sends to replicas, as Caller does.
func goldenRequests(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	w := &sentWire{}
	c := &Caller{conn: w, cfg: CallerConfig{Cluster: goldenCluster, Owner: goldenOwner, Epoch: func() uint64 { return 3 }}}
	c.streams = &streams{c: c, seen: map[string]*stream{goldenProvider: {made: goldenTime(-60)}}}
	frames := map[string]*nats.Msg{}
	for name, k := range goldenCalls() {
		k.c, k.op, k.number = c, OperationOf(k.req.Body), max(k.number, 1)
		k.req.Provider, k.req.Namespace, k.req.Timeout = goldenProvider, "ns", time.Minute
		if k.req.OperationID == "" {
			k.req.OperationID = "READ"
		}
		replica := ""
		if k.tree == TreeReplica {
			replica = goldenReplica
		}
		subject, err := k.subject(k.tree, replica)
		if err == nil {
			err = c.publish(subject, goldenReply, k.req.TraceParent, k.envelope(k.tree, goldenTime(0)))
		}
		if err != nil {
			t.Fatal(err)
		}
		frames[name] = w.take()
	}
	if err := c.Acknowledge(goldenProvider, goldenReplica, goldenOperation); err != nil {
		t.Fatal(err)
	}
	frames["control-ack"] = w.take()
	if err := c.control(goldenProvider, goldenReplica, verbCancel, &driverv1.Envelope{
		OperationId: goldenOperation, Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: goldenOperation}},
	}); err != nil {
		t.Fatal(err)
	}
	frames["control-cancel"] = w.take()
	frames["control-ops"] = goldenMessage(t, "mcm.v1.default.replica.nodejs.r1.ops", goldenReply, &driverv1.Envelope{
		OperationId: goldenOperation, Attempt: 1, Epoch: 3, Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: goldenOperation}},
	})

	return frames
}

// A goldenCall is a call about to be sent to a tree.
type goldenCall struct {
	call

	tree Tree
}

func goldenCalls() map[string]*goldenCall {
	machine, class := goldenMachine(), goldenClass()
	made := goldenMachine()
	made.ProviderId, made.NodeName, made.LastKnownState = "virtual:///moon/i-1", "m1.example", "state"
	of := func(tree Tree, name, id string, body *driverv1.Envelope) *goldenCall {
		return &goldenCall{tree: tree, call: call{req: &Request{Name: name, OperationID: id, Body: body}}}
	}
	one := func(id string, body *driverv1.Envelope) *goldenCall { return of(TreeDriver, "m1.example", id, body) }
	cls := func(body *driverv1.Envelope) *goldenCall { return of(TreeDriver, "small", "", body) }
	create := func(tree Tree, terms *driverv1.ClaimTerms) *goldenCall {
		k := of(tree, "m1.example", goldenOperation, &driverv1.Envelope{
			Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{Machine: machine, Class: class}},
		})
		k.op, k.terms = driverv1.Operation_OPERATION_CREATE, terms

		return k
	}
	after := func(sequence uint64) *driverv1.ClaimTerms { return &driverv1.ClaimTerms{Sequence: &sequence} }
	replacing := func(k *goldenCall, sequence uint64) *goldenCall {
		k.terms = after(sequence)

		return k
	}
	traced, recovering, attached, doubted := create(TreeDriver, after(0)), create(TreeReplica, after(43)), create(TreeReplica, nil), create(TreeReplica, after(45))
	traced.req.TraceParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	recovering.number, recovering.again = 2, true
	attached.again = true
	doubted.number, doubted.again, doubted.doubted = 3, true, true

	return map[string]*goldenCall{
		"request-create": traced, "request-create-plain": create(TreePlain, after(0)),
		"request-create-recover": recovering, "request-create-attach": attached, "request-create-earlier-may-run": doubted,
		"request-initialize": replacing(one(goldenUID+".initialize.1", &driverv1.Envelope{Body: &driverv1.Envelope_Initialize{
			Initialize: &driverv1.InitializeRequest{Machine: made, Class: class},
		}}), 44),
		"request-delete": replacing(one(goldenUID+".delete.2", &driverv1.Envelope{Body: &driverv1.Envelope_Delete{
			Delete: &driverv1.DeleteRequest{Machine: made, Class: class},
		}}), 46),
		"request-status":   one("", &driverv1.Envelope{Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{Machine: made, Class: class}}}),
		"request-list":     cls(&driverv1.Envelope{Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: class}}}),
		"request-validate": cls(&driverv1.Envelope{Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: class}}}),
		"request-volumeids": one("", &driverv1.Envelope{Body: &driverv1.Envelope_VolumeIds{VolumeIds: &driverv1.VolumeIDsRequest{
			Volumes: []*driverv1.PersistentVolume{{Name: "pv1", Spec: []byte(`{"csi":{"driver":"d","volumeHandle":"v1"}}`)}},
		}}}),
		"request-migrateclass": cls(&driverv1.Envelope{Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
			Kind: "OldMachineClass", ApiVersion: "machine.sapcloud.io/v1alpha1", Object: []byte(`{"spec":{}}`),
		}}}),
	}
}

// goldenAnswers are what a replica answers, as its outbox sends it.
func goldenAnswers(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	w := &sentWire{}
	s := &outbox{part: part{conn: w, cfg: &ServerConfig{Replica: goldenReplica}, log: quietLog()}}
	in := func(contentType string, env *driverv1.Envelope) *nats.Msg {
		if err := s.sendTo(goldenReply, contentType, goldenOperation, 1, env); err != nil {
			t.Fatal(err)
		}

		return w.take()
	}
	answer := func(env *driverv1.Envelope) *nats.Msg { return in("", env) }
	result := func(r *driverv1.Result) *nats.Msg { return answer(resultFrame(r)) }
	unknown := failure(driverv1.Code_CODE_UNAVAILABLE, "the cloud's answer was lost")
	unknown.OutcomeUnknown, unknown.Status.RetryAfter = true, durationpb.New(2500*time.Millisecond)
	earlier := failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota, and an earlier call may still run")
	earlier.OutcomeUnknown, earlier.NoEffect = true, true
	ok, instance := &driverv1.Status{}, goldenInstance()
	list := func() *driverv1.Result {
		return &driverv1.Result{Status: ok, Payload: &driverv1.Result_List{List: &driverv1.ListResponse{Instances: []*driverv1.Instance{instance, instance}}}}
	}
	ended, fenced := goldenState(true), goldenState(false)
	ended.Code, fenced.Fenced, fenced.LastProgress = driverv1.Code_CODE_RESOURCE_EXHAUSTED, true, "creating instance m1"
	uninitialized := failure(driverv1.Code_CODE_UNINITIALIZED, "not initialised")
	uninitialized.Payload = &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{Instance: instance}}

	return map[string]*nats.Msg{
		"answer-accepted":         answer(acceptedFrame()),
		"answer-progress":         answer(&driverv1.Envelope{Body: &driverv1.Envelope_Progress{Progress: &driverv1.Progress{Message: "creating instance m1"}}}),
		"answer-busy":             answer(&driverv1.Envelope{Body: &driverv1.Envelope_Busy{Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_CLAIM}}}),
		"answer-failed":           result(failure(driverv1.Code_CODE_RESOURCE_EXHAUSTED, "no quota\nfor small")),
		"answer-failed-json":      in(contentTypeJSON, resultFrame(failure(driverv1.Code_CODE_UNAUTHENTICATED, "the token is refused"))),
		"answer-outcome-unknown":  result(unknown),
		"answer-no-effect":        result(earlier),
		"answer-status-not-ready": result(uninitialized),
		"answer-create": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Create{
			Create: &driverv1.CreateResponse{Instance: instance, LastKnownState: "state"},
		}}),
		"answer-initialize": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{
			Instance: instance, LastKnownState: "state",
		}}}),
		"answer-delete": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Delete{
			Delete: &driverv1.DeleteResponse{LastKnownState: "state"},
		}}),
		"answer-list":         result(list()),
		"answer-list-json":    in(contentTypeJSON, resultFrame(list())),
		"answer-volumeids":    result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_VolumeIds{VolumeIds: &driverv1.VolumeIDsResponse{VolumeIds: []string{"v1"}}}}),
		"answer-validate":     result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_Validate{Validate: &driverv1.ValidateResponse{Warnings: []string{"zone is deprecated"}}}}),
		"answer-migrateclass": result(&driverv1.Result{Status: ok, Payload: &driverv1.Result_MigrateClass{MigrateClass: &driverv1.MigrateClassResponse{MachineClass: []byte(`{}`)}}}),
		"answer-ops": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{
			Operations: []*driverv1.OperationState{goldenState(true)}, Result: &driverv1.Result{Status: ok},
		}}}),
		"answer-ops-all": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{
			Operations: []*driverv1.OperationState{fenced, ended}, Omitted: 4,
		}}}),
		"answer-ops-nothing": answer(&driverv1.Envelope{Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{}}}),
	}
}

func goldenState(settled bool) *driverv1.OperationState {
	return &driverv1.OperationState{
		OperationId: goldenOperation, Attempt: 1, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "ns", Name: "m1.example",
		Settled: settled, Elapsed: durationpb.New(1500 * time.Millisecond),
	}
}

// goldenRecords are what stands in the operations stream.
func goldenRecords(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	record := func(subject string, env *driverv1.Envelope, expected uint64, ttl time.Duration) *nats.Msg {
		m, err := message(subject, env, expected, ttl)
		if err != nil {
			t.Fatal(err)
		}
		m.Reply = goldenInbox

		return m
	}
	claimed, err := claimSubject(goldenCluster, goldenProvider, goldenUID)
	if err != nil {
		t.Fatal(err)
	}
	claim := func(state driverv1.Claim_State, outcome *driverv1.Outcome) *driverv1.Envelope {
		c := &driverv1.Claim{
			OperationId: goldenOperation, Attempt: 1, Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "ns", Name: "m1.example",
			Provider: goldenProvider, Replica: goldenReplica, Epoch: 3, State: state, ClaimedAt: timestamppb.New(goldenTime(0)), Outcome: outcome,
		}
		if state == driverv1.Claim_STATE_SETTLED || state == driverv1.Claim_STATE_RELEASED {
			c.EndedAt = timestamppb.New(goldenTime(4 * time.Second))
		}

		return &driverv1.Envelope{OperationId: goldenOperation, Attempt: 1, Replica: goldenReplica, Body: &driverv1.Envelope_Claim{Claim: c}}
	}

	return map[string]*nats.Msg{
		"record-claim":       record(claimed, claim(driverv1.Claim_STATE_RUNNING, nil), 0, 0),
		"record-claim-begun": record(claimed, claim(driverv1.Claim_STATE_BEGUN, nil), 42, 0),
		"record-claim-settled": record(claimed, claim(driverv1.Claim_STATE_SETTLED, &driverv1.Outcome{
			ProviderId: "virtual:///moon/i-1", NodeName: "m1.example", Addresses: goldenInstance().GetAddresses(),
			Sealed: &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")},
		}), 43, 0),
		"record-claim-failed": record(claimed, claim(driverv1.Claim_STATE_SETTLED, &driverv1.Outcome{
			Code: driverv1.Code_CODE_RESOURCE_EXHAUSTED, RetryAfter: durationpb.New(2500 * time.Millisecond),
			Sealed: &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")},
		}), 43, 0),
		"record-claim-released": record(claimed, claim(driverv1.Claim_STATE_RELEASED, nil), 43, 0),
	}
}

// goldenNotices are fetches, sessions, and what mcm tells everybody.
func goldenNotices(t *testing.T) map[string]*nats.Msg {
	t.Helper()
	class, nonce := goldenClass(), []byte("0123456789abcdef")
	fetch := func(what string, env *driverv1.Envelope) *nats.Msg {
		return goldenMessage(t, wildcard(goldenCluster, TreeFetch, goldenProvider, what), goldenInbox, env)
	}
	answer := func(env *driverv1.Envelope) *nats.Msg { return goldenMessage(t, goldenInbox, "", env) }
	box := &driverv1.Sealed{Sender: "XSENDER", Box: []byte("xkv1…")}
	session := wildcard(goldenCluster, TreeSession, goldenProvider, goldenReplica)

	return map[string]*nats.Msg{
		"fetch-class": fetch(fetchClass, &driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{FetchClass: &driverv1.FetchClassRequest{Class: class.GetClass()}}}),
		"fetch-secret": fetch(fetchSecret, &driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{FetchSecret: &driverv1.FetchSecretRequest{
			Class: class.GetClass(), Secret: class.GetSecret(), Recipient: "XRECIPIENT", Nonce: nonce,
		}}}),
		"fetch-bootstrap": fetch(fetchBootstrap, &driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{FetchBootstrap: &driverv1.FetchBootstrapRequest{
			OperationId: goldenOperation, Namespace: "ns", Machine: "m1.example", MachineUid: goldenUID, Recipient: "XRECIPIENT", Nonce: nonce,
		}}}),
		"fetched-class": answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: &driverv1.FetchClassResponse{
			Status: &driverv1.Status{}, Class: &driverv1.Class{
				Reference: class.GetClass(), Provider: goldenProvider, ProviderSpec: []byte(`{"region":"moon"}`), Labels: map[string]string{"a": "b"},
				Annotations: map[string]string{"k": "v"}, NodeTemplate: &driverv1.ClassNodeTemplate{
					InstanceType: "small", Region: "moon", Zone: "moon-a", Architecture: "amd64",
					Capacity: map[string]string{"cpu": "2"}, VirtualCapacity: map[string]string{"example.com/gpu": "1"},
				},
			},
		}}}),
		"fetched-secret":    answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: &driverv1.FetchSecretResponse{Status: &driverv1.Status{}, Sealed: box}}}),
		"fetched-bootstrap": answer(&driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: &driverv1.FetchBootstrapResponse{Status: &driverv1.Status{}, Sealed: box}}}),
		"notice-session": goldenMessage(t, session, "", &driverv1.Envelope{Replica: goldenReplica, Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: goldenCluster, Provider: goldenProvider, Replica: goldenReplica, Sequence: 12, StartedAt: timestamppb.New(goldenTime(-time.Minute)),
			Version: "0.1.0", Protocol: spoken.highest, ProtocolMin: spoken.lowest, Slots: 8, Running: 1, ClaimSequence: 7, ClaimStreamMade: timestamppb.New(goldenTime(-60)), CreateIdentity: driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN,
			SettleTime: durationpb.New(5 * time.Second), Kind: "Small", ApiVersions: []string{"example.com/v1"},
			Capabilities: []driverv1.Operation{driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_LIST},
			Operations:   []*driverv1.OperationState{goldenState(false)}, Hostname: "h1", Epoch: 3,
			Deleting: 1, Omitted: 2,
		}}}),
		"notice-session-last": goldenMessage(t, session, "", &driverv1.Envelope{Replica: goldenReplica, Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: goldenCluster, Provider: goldenProvider, Replica: goldenReplica, Sequence: 99, Protocol: spoken.highest, ProtocolMin: spoken.lowest, Slots: 8, Draining: true, Stopped: true,
		}}}),
		"notice-hello": goldenMessage(t, wildcard(goldenCluster, TreeHello), "", &driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{
			Cluster: goldenCluster, ClusterUid: "k-uid", Epoch: 3, ProtocolMin: spoken.lowest, ProtocolMax: spoken.highest, Key: "XKEY", Mcm: "mcm-0", Version: "0.1.0", Scope: "ns",
		}}}),
		"notice-changed": goldenMessage(t, wildcard(goldenCluster, TreeChanged, goldenProvider), "", &driverv1.Envelope{Body: &driverv1.Envelope_Changed{
			Changed: &driverv1.Changed{Kind: driverv1.Changed_KIND_SECRET, Reference: class.GetSecret()},
		}}),
		"notice-audit": goldenMessage(t, "mcm.v1.default.audit.nodejs.create.ns.m1~example", "", &driverv1.Envelope{
			OperationId: goldenOperation, Body: &driverv1.Envelope_Audit{Audit: &driverv1.Audit{
				OperationId: goldenOperation, Operation: driverv1.Operation_OPERATION_CREATE, Cluster: goldenCluster, Provider: goldenProvider,
				Namespace: "ns", Name: "m1.example", Attempts: 2, Replica: goldenReplica, Status: &driverv1.Status{}, StartedAt: timestamppb.New(goldenTime(0)),
				Waited: durationpb.New(10 * time.Millisecond), Took: durationpb.New(4 * time.Second), ProviderId: "virtual:///moon/i-1",
			}},
		}),
	}
}
