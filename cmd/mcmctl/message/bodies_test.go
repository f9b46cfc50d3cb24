package message

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A body is one kind of envelope, and what it is shown as.
type body struct {
	envelope *driverv1.Envelope
	json     string
	summary  string
}

func ref(name string) *driverv1.ObjectReference {
	return &driverv1.ObjectReference{Namespace: "ns", Name: name}
}

func class() *driverv1.ClassReference { return &driverv1.ClassReference{Class: ref("small")} }

func instance() *driverv1.Instance { return &driverv1.Instance{ProviderId: "virtual://1"} }

// requests are what mcm asks.
var requests = map[string]body{
	"create": {
		&driverv1.Envelope{
			OperationId: "u.create.0", Attempt: 2, Recover: true, Timeout: durationpb.New(time.Minute),
			Body: &driverv1.Envelope_Create{Create: &driverv1.CreateRequest{
				Machine: &driverv1.Machine{Name: "m1", Labels: map[string]string{"a": "b"}}, Class: class(),
			}},
		},
		`{"attempt":2,"create":{"class":{"class":{"name":"small","namespace":"ns"}},` +
			`"machine":{"labels":{"a":"b"},"name":"m1"}},"operationId":"u.create.0","recover":true,"timeout":"60s"}`,
		"create u.create.0 attempt 2 class ns/small timeout 1m0s recover",
	},
	"initialize": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Body: &driverv1.Envelope_Initialize{
			Initialize: &driverv1.InitializeRequest{},
		}},
		`{"attempt":1,"initialize":{},"operationId":"u"}`, "initialize u attempt 1",
	},
	"delete": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Body: &driverv1.Envelope_Delete{
			Delete: &driverv1.DeleteRequest{Machine: &driverv1.Machine{LastKnownState: "<x>"}},
		}},
		`{"attempt":1,"delete":{"machine":{"lastKnownState":"<x>"}},"operationId":"u"}`, "delete u attempt 1",
	},
	"status": {
		&driverv1.Envelope{OperationId: "u", Body: &driverv1.Envelope_Status{Status: &driverv1.StatusRequest{}}},
		`{"operationId":"u","status":{}}`, "status u attempt 0",
	},
	"list": {
		&driverv1.Envelope{OperationId: "u", Body: &driverv1.Envelope_List{List: &driverv1.ListRequest{Class: class()}}},
		`{"list":{"class":{"class":{"name":"small","namespace":"ns"}}},"operationId":"u"}`,
		"list u attempt 0 class ns/small",
	},
	"volume_ids": {
		&driverv1.Envelope{OperationId: "u", Body: &driverv1.Envelope_VolumeIds{VolumeIds: &driverv1.VolumeIDsRequest{
			Volumes: []*driverv1.PersistentVolume{
				{Name: "json", Spec: []byte(`{"csi": 1}`)}, {Name: "none"}, {Name: "not", Spec: []byte(`{no`)},
			},
		}}},
		`{"operationId":"u","volumeIds":{"volumes":[{"name":"json","spec":{"csi":1}},{"name":"none"},{"name":"not","spec":"e25v"}]}}`,
		"volume_ids u attempt 0",
	},
	"validate": {
		&driverv1.Envelope{OperationId: "u", Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{}}},
		`{"operationId":"u","validate":{}}`, "validate u attempt 0",
	},
	"migrate_class": {
		&driverv1.Envelope{OperationId: "u", Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
			Object: []byte(`{"kind":"AWSMachineClass"}`),
		}}},
		`{"migrateClass":{"object":{"kind":"AWSMachineClass"}},"operationId":"u"}`, "migrate_class u attempt 0",
	},
	"node_groups": groupBodies["resize"],
}

// frames are what replicas answer.
var frames = map[string]body{
	"accepted": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Replica: "r", Body: &driverv1.Envelope_Accepted{
			Accepted: &driverv1.Accepted{},
		}},
		`{"accepted":{},"attempt":1,"operationId":"u","replica":"r"}`, "accepted u attempt 1 by r",
	},
	"progress": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Replica: "r", Body: &driverv1.Envelope_Progress{
			Progress: &driverv1.Progress{Message: "booting"},
		}},
		`{"attempt":1,"operationId":"u","progress":{"message":"booting"},"replica":"r"}`,
		"progress u attempt 1 by r: booting",
	},
	"result": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Replica: "r", Body: &driverv1.Envelope_Result{Result: &driverv1.Result{
			Status:  &driverv1.Status{Code: driverv1.Code_CODE_UNINITIALIZED, Message: "not yet"},
			Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: instance()}},
		}}},
		`{"attempt":1,"operationId":"u","replica":"r","result":{"create":{"instance":{"providerId":"virtual://1"}},` +
			`"status":{"code":"CODE_UNINITIALIZED","message":"not yet"}}}`,
		"result u attempt 1 by r: Uninitialized not yet virtual://1",
	},
	"busy": {
		&driverv1.Envelope{OperationId: "u", Attempt: 1, Replica: "r", Body: &driverv1.Envelope_Busy{
			Busy: &driverv1.Busy{Reason: driverv1.BusyReason_BUSY_REASON_DRAINING},
		}},
		`{"attempt":1,"busy":{"reason":"BUSY_REASON_DRAINING"},"operationId":"u","replica":"r"}`,
		"busy u attempt 1 by r: draining",
	},
}

// fetches are what replicas ask, and the answers.
var fetches = map[string]body{
	"fetch_class": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchClass{FetchClass: &driverv1.FetchClassRequest{Class: ref("small")}}},
		`{"fetchClass":{"class":{"name":"small","namespace":"ns"}}}`, "fetch_class ns/small",
	},
	"fetched_class": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchedClass{FetchedClass: &driverv1.FetchClassResponse{
			Class: &driverv1.Class{Reference: ref("small"), ProviderSpec: []byte(`{"cpu":2}`)},
		}}},
		`{"fetchedClass":{"class":{"providerSpec":{"cpu":2},"reference":{"name":"small","namespace":"ns"}}}}`,
		"fetched_class OK ns/small",
	},
	"fetch_secret": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchSecret{FetchSecret: &driverv1.FetchSecretRequest{
			Class: ref("small"), Secret: ref("key"), Nonce: []byte("abc"),
		}}},
		`{"fetchSecret":{"class":{"name":"small","namespace":"ns"},"nonce":"YWJj","secret":{"name":"key","namespace":"ns"}}}`,
		"fetch_secret ns/key of class ns/small",
	},
	"fetched_secret": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchedSecret{FetchedSecret: &driverv1.FetchSecretResponse{
			Sealed: &driverv1.Sealed{Sender: "X", Box: make([]byte, 312)},
		}}},
		`{"fetchedSecret":{"sealed":{"box":"<sealed 312 bytes>","sender":"X"}}}`, "fetched_secret OK sealed 312 bytes",
	},
	"fetch_bootstrap": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchBootstrap{FetchBootstrap: &driverv1.FetchBootstrapRequest{
			Namespace: "ns", Machine: "m1",
		}}},
		`{"fetchBootstrap":{"machine":"m1","namespace":"ns"}}`, "fetch_bootstrap ns/m1",
	},
	"fetched_bootstrap": {
		&driverv1.Envelope{Body: &driverv1.Envelope_FetchedBootstrap{FetchedBootstrap: &driverv1.FetchBootstrapResponse{
			Status: &driverv1.Status{Code: driverv1.Code_CODE_PERMISSION_DENIED, Message: "no"},
		}}},
		`{"fetchedBootstrap":{"status":{"code":"CODE_PERMISSION_DENIED","message":"no"}}}`,
		"fetched_bootstrap PermissionDenied no",
	},
}

// controls are what is said around operations.
var controls = map[string]body{
	"session": {
		&driverv1.Envelope{Replica: "r", Body: &driverv1.Envelope_Session{Session: &driverv1.Session{
			Cluster: "default", Replica: "r", Running: 1, Slots: 4, Draining: true, Stopped: true,
			Operations: []*driverv1.OperationState{{OperationId: "u", Operation: driverv1.Operation_OPERATION_CREATE}},
		}}},
		`{"replica":"r","session":{"cluster":"default","draining":true,` +
			`"operations":[{"operation":"OPERATION_CREATE","operationId":"u"}],` +
			`"replica":"r","running":1,"slots":4,"stopped":true}}`,
		"session r runs 1 of 4, holds 1 of default, draining, stopped",
	},
	"hello": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Hello{Hello: &driverv1.Hello{Cluster: "default", Epoch: 3, Mcm: "mcm-0"}}},
		`{"hello":{"cluster":"default","epoch":"3","mcm":"mcm-0"}}`, "hello mcm-0 leads default, epoch 3",
	},
	"changed": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Changed{Changed: &driverv1.Changed{
			Kind: driverv1.Changed_KIND_SECRET, Reference: ref("key"),
		}}},
		`{"changed":{"kind":"KIND_SECRET","reference":{"name":"key","namespace":"ns"}}}`, "changed secret ns/key",
	},
	"ops": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Ops{Ops: &driverv1.OpsRequest{OperationId: "u"}}},
		`{"ops":{"operationId":"u"}}`, "ops u",
	},
	"ops_held": {
		&driverv1.Envelope{Replica: "r", Body: &driverv1.Envelope_OpsHeld{OpsHeld: &driverv1.OpsResponse{}}},
		`{"opsHeld":{},"replica":"r"}`, "ops_held 0 by r",
	},
	"cancel": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Cancel{Cancel: &driverv1.Cancel{OperationId: "u"}}},
		`{"cancel":{"operationId":"u"}}`, "cancel u",
	},
	"acknowledge": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Acknowledge{Acknowledge: &driverv1.Acknowledge{OperationId: "u"}}},
		`{"acknowledge":{"operationId":"u"}}`, "acknowledge u",
	},
	"audit": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Audit{Audit: &driverv1.Audit{
			Operation: driverv1.Operation_OPERATION_CREATE, Namespace: "ns", Name: "m1", Attempts: 2, Replica: "r",
			Waited: durationpb.New(20 * time.Millisecond), Took: durationpb.New(3 * time.Second),
		}}},
		`{"audit":{"attempts":2,"name":"m1","namespace":"ns","operation":"OPERATION_CREATE","replica":"r",` +
			`"took":"3s","waited":"0.020s"}}`,
		"audit create ns/m1 attempts 2 by r waited 20ms took 3s: OK",
	},
	"claim": {
		&driverv1.Envelope{Body: &driverv1.Envelope_Claim{Claim: &driverv1.Claim{
			OperationId: "u.create.0", Attempt: 2, Replica: "r", State: driverv1.Claim_STATE_SETTLED, Outcome: &driverv1.Outcome{},
		}}},
		`{"claim":{"attempt":2,"operationId":"u.create.0","outcome":{},"replica":"r","state":"STATE_SETTLED"}}`,
		"claim u.create.0 attempt 2 by r: settled OK",
	},
}
