package driversdk

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// ableDriver has every ability there is.
type ableDriver struct{ testDriver }

func (d *ableDriver) Get(_ context.Context, req *Request[testSpec]) (*Instance, error) {
	return &Instance{ProviderID: "acme://" + req.Machine.Name}, Errorf(Uninitialized, "not initialized")
}

func (d *ableDriver) Initialize(_ context.Context, req *Request[testSpec]) (*Instance, error) {
	req.Progress("step with correct-horse-battery")
	req.SetLastKnownState("initialized")

	return &Instance{ProviderID: req.Machine.ProviderID}, nil
}

func (d *ableDriver) ValidateClass(context.Context, *Class[testSpec]) ([]string, error) {
	return []string{"old image"}, Errorf(InvalidArgument, "image: gone")
}

func (d *ableDriver) VolumeIDs(_ context.Context, volumes []PersistentVolume) ([]string, error) {
	return []string{volumes[0].Name + string(volumes[0].Spec)}, nil
}

func (d *ableDriver) MigrateClass(_ context.Context, old OldClass) (json.RawMessage, error) {
	return json.RawMessage(old.APIVersion + old.Kind + string(old.Object)), nil
}

func TestServe_Abilities(t *testing.T) { //nolint:tparallel // the cases share a replica
	t.Parallel()
	w := start(t, &ableDriver{}, nil)
	var all []driverv1.Operation
	for op := driverv1.Operation_OPERATION_CREATE; op <= driverv1.Operation_OPERATION_MIGRATE_CLASS; op++ {
		all = append(all, op)
	}
	if diff := cmp.Diff(all, w.session(func(*driverv1.Session) bool { return true }).GetCapabilities()); diff != "" {
		t.Errorf("what is implemented is advertised (-want +got):\n%s", diff)
	}

	class := &driverv1.ClassReference{
		Class:  w.store.setClass("c", "1", `{"size":"s"}`),
		Secret: w.store.setSecret("s", "1", map[string]string{"token": "correct-horse-battery"}),
	}
	m := machine("m1")
	m.ProviderId = "acme://m1"
	instance := &driverv1.Instance{ProviderId: "acme://m1"}
	cases := map[string]struct {
		reason string
		ask    *driverv1.Envelope
		want   *driverv1.Result
	}{
		"status": {
			"the instance comes with the error [STATUS-4]",
			status(m, class),
			&driverv1.Result{
				Status:  &driverv1.Status{Code: Uninitialized, Message: "not initialized"},
				Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{Instance: instance}},
			},
		},
		"initialize": {
			"with its state",
			&driverv1.Envelope{Body: &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: m, Class: class}}},
			&driverv1.Result{Payload: &driverv1.Result_Initialize{
				Initialize: &driverv1.InitializeResponse{Instance: instance, LastKnownState: "initialized"},
			}},
		},
		"validate": {
			"warnings come with the error",
			&driverv1.Envelope{OperationId: "v", Body: &driverv1.Envelope_Validate{Validate: &driverv1.ValidateRequest{Class: class}}},
			&driverv1.Result{
				Status:  &driverv1.Status{Code: InvalidArgument, Message: "image: gone"},
				Payload: &driverv1.Result_Validate{Validate: &driverv1.ValidateResponse{Warnings: []string{"old image"}}},
			},
		},
		"volume ids": {
			"name and spec arrive",
			&driverv1.Envelope{OperationId: "i", Body: &driverv1.Envelope_VolumeIds{VolumeIds: &driverv1.VolumeIDsRequest{
				Volumes: []*driverv1.PersistentVolume{{Name: "pv", Spec: []byte(`{}`)}},
			}}},
			&driverv1.Result{Payload: &driverv1.Result_VolumeIds{VolumeIds: &driverv1.VolumeIDsResponse{VolumeIds: []string{"pv{}"}}}},
		},
		"migrate class": {
			"the object arrives",
			&driverv1.Envelope{OperationId: "c", Body: &driverv1.Envelope_MigrateClass{MigrateClass: &driverv1.MigrateClassRequest{
				Kind: "Kind", ApiVersion: "v1", Object: []byte(`{}`),
			}}},
			&driverv1.Result{Payload: &driverv1.Result_MigrateClass{
				MigrateClass: &driverv1.MigrateClassResponse{MachineClass: []byte("v1Kind{}")},
			}},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, w.ask(tc.ask).result(), protocmp.Transform()); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tc.reason, diff)
			}
		})
	}

	e := w.ask(&driverv1.Envelope{Body: &driverv1.Envelope_Initialize{Initialize: &driverv1.InitializeRequest{Machine: m, Class: class}}})
	if first := e.frame(); first.GetAccepted() == nil {
		t.Errorf("first frame: have %v", first)
	}
	if got := e.frame().GetProgress().GetMessage(); got != "step with [redacted]" {
		t.Errorf("progress is passed on without secrets [PROGRESS-1]: have %q", got)
	}
	e.result()
}
