package mcmdriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/gardener/machine-controller-manager/pkg/apis/machine/v1alpha1"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/driver"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/codes"
	"github.com/gardener/machine-controller-manager/pkg/util/provider/machinecodes/status"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/driversdk"
)

// A scripted driver answers as its fields say, and keeps what it was asked.
type scripted struct {
	driver.Driver

	status    *driver.GetMachineStatusResponse
	statusErr error
	listed    map[string]string
	created   *driver.CreateMachineResponse
	createErr error
	deleted   *driver.DeleteMachineResponse
	deleteErr error

	calls   []string
	machine *v1alpha1.Machine
	class   *v1alpha1.MachineClass
	secret  *corev1.Secret
}

func (s *scripted) GetMachineStatus(_ context.Context, req *driver.GetMachineStatusRequest) (*driver.GetMachineStatusResponse, error) {
	s.calls = append(s.calls, "status")
	s.machine, s.class, s.secret = req.Machine, req.MachineClass, req.Secret

	return s.status, s.statusErr
}

func (s *scripted) CreateMachine(_ context.Context, req *driver.CreateMachineRequest) (*driver.CreateMachineResponse, error) {
	s.calls = append(s.calls, "create")
	s.machine, s.class, s.secret = req.Machine, req.MachineClass, req.Secret

	return s.created, s.createErr
}

func (s *scripted) DeleteMachine(context.Context, *driver.DeleteMachineRequest) (*driver.DeleteMachineResponse, error) {
	return s.deleted, s.deleteErr
}

func (s *scripted) ListMachines(context.Context, *driver.ListMachinesRequest) (*driver.ListMachinesResponse, error) {
	s.calls = append(s.calls, "list")

	return &driver.ListMachinesResponse{MachineList: s.listed}, nil
}

func newRequest() *request {
	return &request{
		OperationID: "uid-1.create.0",
		Machine: driversdk.Machine{
			Namespace: "ns", Name: "m1", UID: "uid-1", Labels: map[string]string{"node": "n1"}, Annotations: map[string]string{"a": "1"},
			LastKnownState: "before",
			NodeTemplate: driversdk.NodeTemplate{
				Labels: map[string]string{"pool": "p"}, Taints: []driversdk.Taint{{Key: "k", Value: "v", Effect: "NoSchedule"}},
			},
		},
		Class: &driversdk.Class[json.RawMessage]{
			Namespace: "ns", Name: "small", UID: "uid-c", ResourceVersion: "7", Labels: map[string]string{"l": "1"},
			SecretRef: driversdk.SecretReference{Namespace: "ns", Name: "cloud", UID: "uid-s"}, Spec: json.RawMessage(`{"ami":"x","tags":{"Name":"m1"}}`),
			Secret: driversdk.Secret{"userData": []byte("<<TOKEN>>"), "key": []byte("k")},
			NodeTemplate: driversdk.ClassNodeTemplate{
				InstanceType: "t3", Region: "eu", Zone: "a", Architecture: "arm64", Capacity: map[string]string{"cpu": "2"},
			},
		},
		UserData: driversdk.UserData("token"),
	}
}

// What a driver gets is what the machine controller manager would have given it.
func TestCreate_Objects(t *testing.T) {
	t.Parallel()
	s := &scripted{
		statusErr: status.Error(codes.NotFound, "none"), created: &driver.CreateMachineResponse{ProviderID: "aws:///i-1", NodeName: "n1", LastKnownState: "made"},
	}
	req := newRequest()
	made, err := New(s, "AWS").Create(t.Context(), req)
	if err != nil || made.ProviderID != "aws:///i-1" || made.NodeName != "n1" || req.Machine.LastKnownState != "made" {
		t.Fatalf("made %+v, state %q, %v", made, req.Machine.LastKnownState, err)
	}
	arm := "arm64"
	for what, pair := range map[string][2]any{
		"calls": {[]string{"status", "create"}, s.calls},
		"machine": {&v1alpha1.Machine{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: "m1", UID: "uid-1", Labels: map[string]string{"node": "n1"},
				Annotations: map[string]string{"a": "1", AnnotationOperationID: "uid-1.create.0", AnnotationMachineUID: "uid-1"},
			},
			Spec: v1alpha1.MachineSpec{
				Class: v1alpha1.ClassSpec{Kind: "MachineClass", Name: "small"},
				NodeTemplateSpec: v1alpha1.NodeTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"pool": "p"}},
					Spec:       corev1.NodeSpec{Taints: []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}}},
				},
			},
			Status: v1alpha1.MachineStatus{LastKnownState: "before"},
		}, s.machine},
		"class": {&v1alpha1.MachineClass{
			ObjectMeta:   metav1.ObjectMeta{Namespace: "ns", Name: "small", UID: "uid-c", ResourceVersion: "7", Labels: map[string]string{"l": "1"}},
			SecretRef:    &corev1.SecretReference{Namespace: "ns", Name: "cloud"},
			Provider:     "AWS",
			ProviderSpec: runtime.RawExtension{Raw: []byte(`{"ami":"x","tags":{"Name":"m1","machinebus-machine-uid":"uid-1","machinebus-operation-id":"uid-1.create.0"}}`)},
			NodeTemplate: &v1alpha1.NodeTemplate{
				InstanceType: "t3", Region: "eu", Zone: "a", Architecture: &arm, Capacity: corev1.ResourceList{"cpu": resource.MustParse("2")},
			},
		}, s.class},
		"secret": {&corev1.Secret{Data: map[string][]byte{"userData": []byte("token"), "key": []byte("k")}}, s.secret},
	} {
		if diff := cmp.Diff(pair[0], pair[1]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
}

// The status is asked first, as a create that is asked again must not make a second instance.
func TestCreate_StatusFirst(t *testing.T) {
	t.Parallel()
	there := &driver.GetMachineStatusResponse{ProviderID: "aws:///i-1"}
	for name, tc := range map[string]struct {
		reason    string
		driver    scripted
		created   bool
		code      driversdk.Code
		wantFound string
	}{
		"none":                    {"it is to be made", scripted{statusErr: status.Error(codes.NotFound, "none")}, true, driversdk.OK, "aws:///i-2"},
		"there":                   {"it is the machine's", scripted{status: there}, false, driversdk.OK, "aws:///i-1"},
		"not initialized":         {"the manager initializes it next", scripted{status: there, statusErr: status.Error(codes.Uninitialized, "")}, false, driversdk.OK, "aws:///i-1"},
		"not initialized, and no": {"that controller would have panicked", scripted{statusErr: status.Error(codes.Uninitialized, "")}, false, driversdk.Internal, ""},
		"several":                 {"a third would make it worse", scripted{statusErr: status.Error(codes.OutOfRange, "2")}, false, driversdk.OutOfRange, ""},
		"cloud away":              {"nothing is known", scripted{statusErr: status.Error(codes.Unavailable, "away")}, false, driversdk.Unavailable, ""},
		"no status, not listed":   {"the list says that there is none", scripted{statusErr: status.Error(codes.Unimplemented, ""), listed: map[string]string{"aws:///i-9": "m9"}}, true, driversdk.OK, "aws:///i-2"},
		"no status, listed":       {"the list has it", scripted{statusErr: status.Error(codes.Unimplemented, ""), listed: map[string]string{"aws:///i-1": "m1"}}, false, driversdk.OK, "aws:///i-1"},
		"no status, twice":        {"a third would make it worse", scripted{statusErr: status.Error(codes.Unimplemented, ""), listed: map[string]string{"a": "m1", "b": "m1"}}, false, driversdk.OutOfRange, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.driver.created = &driver.CreateMachineResponse{ProviderID: "aws:///i-2"}
			got, err := New(&tc.driver, "AWS").Create(t.Context(), newRequest())
			created := tc.driver.calls[len(tc.driver.calls)-1] == "create"
			if created != tc.created || driversdk.CodeOf(err) != tc.code || err == nil && got.ProviderID != tc.wantFound {
				t.Errorf("%s: created %t, %+v, %v", tc.reason, created, got, err)
			}
		})
	}
}

// A machine without a provider id is not the instance that has none either.
func TestGetListed_ByProviderID(t *testing.T) {
	t.Parallel()
	s := &scripted{statusErr: status.Error(codes.Unimplemented, ""), listed: map[string]string{"aws:///i-1": "another name", "aws:///i-2": "m1"}}
	req := newRequest()
	req.Machine.ProviderID = "aws:///i-1"
	if got, err := New(s, "AWS").Get(t.Context(), req); err != nil || got.ProviderID != "aws:///i-1" {
		t.Errorf("got %+v, %v; want the instance of the machine's provider id", got, err)
	}
}

func TestCodes(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		err    error
		code   driversdk.Code
		text   string
	}{
		"coded":            {"the usual", status.Error(codes.ResourceExhausted, "no capacity"), driversdk.ResourceExhausted, "no capacity"},
		"brackets":         {"that project cannot read it", status.Error(codes.NotFound, "image [a] of ] none"), driversdk.NotFound, "image [a] of ] none"},
		"wrapped":          {"drivers do so", fmt.Errorf("create: %w", status.Error(codes.Unauthenticated, "bad key")), driversdk.Unauthenticated, "bad key"},
		"text only":        {"it came over a process boundary", errors.New("machine codes error: code = [Aborted] message = [busy]"), driversdk.Aborted, "busy"},
		"uninitialized":    {"the code that gRPC lacks", status.Error(codes.Uninitialized, "later"), driversdk.Uninitialized, "later"},
		"ok":               {"an error is no success", status.Error(codes.OK, "fine"), driversdk.Internal, "fine"},
		"unknown code":     {"of a newer version", status.Error(codes.Code(99), "new"), driversdk.Unknown, "new"},
		"none":             {"a bare error", errors.New("broken"), driversdk.Unknown, "broken"},
		"cut off":          {"the context's", context.DeadlineExceeded, driversdk.DeadlineExceeded, "context deadline exceeded"},
		"status of no one": {"the cloud's text is not a code", errors.New("node [a] is [b] of [c]"), driversdk.Unknown, "node [a] is [b] of [c]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := coded(tc.err); driversdk.CodeOf(got) != tc.code || got.Error() != tc.text {
				t.Errorf("%s: %v %q, want %v %q", tc.reason, driversdk.CodeOf(got), got, tc.code, tc.text)
			}
		})
	}
	if coded(nil) != nil {
		t.Error("no error has become one")
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		driver scripted
		code   driversdk.Code
		state  string
	}{
		"gone":      {"nothing is left to do", scripted{deleteErr: status.Error(codes.NotFound, "none")}, driversdk.OK, "before"},
		"done":      {"its word is kept", scripted{deleted: &driver.DeleteMachineResponse{LastKnownState: "deleted"}}, driversdk.OK, "deleted"},
		"says none": {"the former word stays", scripted{deleted: &driver.DeleteMachineResponse{}}, driversdk.OK, "before"},
		"half done": {"its word comes with the error", scripted{deleted: &driver.DeleteMachineResponse{LastKnownState: "disk left"}, deleteErr: status.Error(codes.Internal, "disk")}, driversdk.Internal, "disk left"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			req := newRequest()
			err := New(&tc.driver, "AWS").Delete(t.Context(), req)
			if driversdk.CodeOf(err) != tc.code || req.Machine.LastKnownState != tc.state {
				t.Errorf("%s: %v, state %q; want %v, %q", tc.reason, err, req.Machine.LastKnownState, tc.code, tc.state)
			}
		})
	}
}

func TestWithTags(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ reason, spec, want string }{
		"tags":      {"they are added", `{"tags":{"a":"1"}}`, `{"tags":{"a":"1","uid":"u"}}`},
		"its own":   {"the user's word stays", `{"tags":{"uid":"mine"}}`, `{"tags":{"uid":"mine"}}`},
		"no tags":   {"the driver may refuse them", `{"a":1}`, `{"a":1}`},
		"a list":    {"network tags of Google Cloud", `{"tags":["a"]}`, `{"tags":["a"]}`},
		"null":      {"no tags", `{"tags":null}`, `{"tags":null}`},
		"not texts": {"the driver says so", `{"tags":{"a":1}}`, `{"tags":{"a":1}}`},
		"no object": {"the driver says so", `[]`, `[]`},
		"not JSON":  {"the driver says so", `{`, `{`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := string(withTags([]byte(tc.spec), map[string]string{"uid": "u"})); got != tc.want {
				t.Errorf("%s: %s, want %s", tc.reason, got, tc.want)
			}
		})
	}
}
