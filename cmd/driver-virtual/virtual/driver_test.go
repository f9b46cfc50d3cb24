package virtual

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
	"github.com/machinebus/machinebus/driversdk"
)

func TestDriver_Life(t *testing.T) {
	t.Parallel()
	for identity, name := range identities {
		t.Run(string(name), func(t *testing.T) {
			t.Parallel()
			w, d := newWorld(t, cloudapi.Knobs{}), &Driver{Identity: identity}
			made, err := d.Create(t.Context(), w.request("m1", "create.0"))
			if err != nil {
				t.Fatal(err)
			}
			id, err := idOf(made.ProviderID)
			if err != nil {
				t.Fatal(err)
			}
			inCloud, err := w.user.Get(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(map[string]string{
				"team": "demo", tagUID: "uid-m1", tagCluster: "east", tagOwner: "owner-uid", tagNamespace: "ns", tagMachine: "m1", tagClass: "ns/small",
			}, inCloud.Tags); diff != "" {
				t.Errorf("tags (-want +got):\n%s", diff)
			}

			again, err := d.Create(t.Context(), w.request("m1", "create.1"))
			if err != nil || again.ProviderID != made.ProviderID {
				t.Errorf("another create of the machine returns its instance [CREATE-1]: have %v, %v", again, err)
			}
			found, err := d.Get(t.Context(), w.request("m1", "status"))
			if driversdk.CodeOf(err) != driversdk.Uninitialized || found == nil || found.ProviderID != made.ProviderID {
				t.Errorf("an instance that is not initialized [STATUS-4]: have %v, %v", found, err)
			}
			for range 2 {
				if _, err := d.Initialize(t.Context(), w.request("m1", "initialize.0")); err != nil {
					t.Errorf("initialize, again and again [INITIALIZE-1]: %v", err)
				}
			}
			if found, err = d.Get(t.Context(), w.request("m1", "status")); err != nil {
				t.Errorf("an initialized instance: %v", err)
			}
			if diff := cmp.Diff(made, found, cmpopts.IgnoreFields(driversdk.Instance{}, "Addresses")); diff != "" {
				t.Errorf("get differs from create (-create +get):\n%s", diff)
			}
			list, err := d.List(t.Context(), w.class())
			if err != nil || len(list) != 1 || list[0].MachineName != "m1" || list[0].Owner != "owner-uid" || list[0].MachineUID != "uid-m1" {
				t.Errorf("list: have %v, %v", list, err)
			}
			for range 2 {
				if err := d.Delete(t.Context(), w.request("m1", "delete.0")); err != nil {
					t.Errorf("delete, also of an absent instance [DELETE-1]: %v", err)
				}
			}
			if _, err := d.Get(t.Context(), w.request("m1", "status")); driversdk.CodeOf(err) != driversdk.NotFound {
				t.Errorf("an absent instance [STATUS-2]: have %v", err)
			}
			if n := w.live(); n != 0 {
				t.Errorf("want an empty cloud, have %d instances", n)
			}
		})
	}
}

// A cloud that loses the answer of a create that took effect.
func TestDriver_LostAnswer(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason   string
		identity driversdk.CreateIdentity
		code     driversdk.Code
	}{
		"token":       {"the same token finds what it made", driversdk.IdentityToken, driversdk.OK},
		"unique name": {"the name that is taken is the machine's own", driversdk.IdentityUniqueName, driversdk.OK},
		"none":        {"asking again could make a second one", driversdk.IdentityNone, driversdk.Unknown},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, d := newWorld(t, cloudapi.Knobs{ListLag: cloudapi.Duration(time.Hour)}), &Driver{Identity: tc.identity}
			w.fault(cloudapi.Fault{Operation: cloudapi.OpCreate, Next: 1, After: true, Drop: true})
			_, err := d.Create(t.Context(), w.request("m1", "create.0"))
			if got := driversdk.CodeOf(err); got != tc.code {
				t.Errorf("%s: want %v, have %v", tc.reason, tc.code, err)
			}
			if n := w.live(); n != 1 {
				t.Errorf("%s: want one instance, have %d", tc.reason, n)
			}
		})
	}
}

func TestDriver_NotOurs(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{}), &Driver{Identity: driversdk.IdentityUniqueName}
	other := w.plant("m1", map[string]string{tagUID: "uid-m1", tagCluster: "west", tagClass: "ns/small", tagMachine: "m1"})

	if _, err := d.Create(t.Context(), w.request("m1", "create.0")); driversdk.CodeOf(err) != driversdk.AlreadyExists {
		t.Errorf("a name that another control plane has [CREATE-2]: have %v", err)
	}
	if list, err := d.List(t.Context(), w.class()); err != nil || len(list) != 0 {
		t.Errorf("another control plane's instances are not listed [LIST-3]: have %v, %v", list, err)
	}
	req := w.request("m1", "delete.0")
	req.Machine.ProviderID = other.ProviderID
	if _, err := d.Get(t.Context(), req); driversdk.CodeOf(err) != driversdk.NotFound {
		t.Errorf("another driver's provider id: have %v", err)
	}
	if err := d.Delete(t.Context(), req); err != nil || w.live() != 1 {
		t.Errorf("another control plane's instance stays: %v, %d left", err, w.live())
	}
}

func TestDriver_Surplus(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{}), &Driver{Identity: driversdk.IdentityNone}
	tags := tags(w.request("m1", ""))
	oldest := w.plant("m1", tags)
	w.plant("m1", tags)
	w.plant("m1", tags)

	if _, err := d.Get(t.Context(), w.request("m1", "status")); driversdk.CodeOf(err) != driversdk.OutOfRange {
		t.Errorf("three instances [STATUS-3]: have %v", err)
	}
	if _, err := d.Create(t.Context(), w.request("m1", "create.0")); driversdk.CodeOf(err) != driversdk.OutOfRange || w.live() != 3 {
		t.Errorf("a first attempt removes nothing: %v, %d left", err, w.live())
	}
	req := w.request("m1", "create.0")
	req.Recover = true
	if made, err := d.Create(t.Context(), req); err != nil || made.ProviderID != oldest.ProviderID || w.live() != 1 {
		t.Errorf("recover keeps the oldest alone: have %v, %v, %d left", made, err, w.live())
	}
	w.plant("m1", tags)
	if err := d.Delete(t.Context(), w.request("m1", "delete.0")); err != nil || w.live() != 0 {
		t.Errorf("delete removes them all: %v, %d left", err, w.live())
	}
}

// A list that lags does not keep an instance from being removed by provider id.
func TestDriver_DeleteByProviderID(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{ListLag: cloudapi.Duration(time.Hour)}), &Driver{Identity: driversdk.IdentityToken}
	made, err := d.Create(t.Context(), w.request("m1", "create.0"))
	if err != nil {
		t.Fatal(err)
	}
	recreated := w.request("m1", "delete.0")
	recreated.Machine.UID, recreated.Machine.ProviderID = "uid-of-m1-recreated", made.ProviderID
	if found, err := d.Get(t.Context(), recreated); found == nil || found.ProviderID != made.ProviderID {
		t.Errorf("get by provider id: %v, %v", found, err)
	}
	if err := d.Delete(t.Context(), recreated); err != nil || w.live() != 0 {
		t.Errorf("delete by provider id: %v, %d left", err, w.live())
	}
	untagged := w.plant("m2", map[string]string{tagCluster: "east", tagClass: "ns/small"})
	orphan := w.request("m2", "delete.0")
	orphan.Machine.UID, orphan.Machine.ProviderID = "orphan-2", untagged.ProviderID // as orphan collection asks
	if err := d.Delete(t.Context(), orphan); err != nil || w.live() != 0 {
		t.Errorf("delete an instance that says no uid: %v, %d left", err, w.live())
	}
	orphan.Machine.ProviderID = "aws:///eu/i-1"
	if err := d.Delete(t.Context(), orphan); driversdk.CodeOf(err) != driversdk.InvalidArgument {
		t.Errorf("another provider's id: have %v", err)
	}
}

func TestDriver_Codes(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		reason string
		fault  cloudapi.Fault
		code   driversdk.Code
	}{
		"quota":      {"the autoscaler must know", cloudapi.Fault{Status: http.StatusForbidden, Code: cloudapi.CodeQuotaExceeded}, driversdk.ResourceExhausted},
		"rate limit": {"passes", cloudapi.Fault{Status: http.StatusTooManyRequests, Code: cloudapi.CodeRateLimited}, driversdk.Unavailable},
		"internal":   {"the cloud's fault", cloudapi.Fault{}, driversdk.Internal},
		"gateway":    {"not the cloud's words", cloudapi.Fault{Status: http.StatusBadGateway, Code: "HTTP"}, driversdk.Unavailable},
		"foreign 404": {
			"who is not the cloud must not make an instance look gone",
			cloudapi.Fault{Status: http.StatusNotFound, Code: "HTTP"},
			driversdk.FailedPrecondition,
		},
		"forbidden": {"by a proxy", cloudapi.Fault{Status: http.StatusForbidden, Code: "HTTP"}, driversdk.PermissionDenied},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, cloudapi.Knobs{})
			tc.fault.Operation = "*"
			w.fault(tc.fault)
			d := &Driver{Identity: driversdk.IdentityToken}
			if _, err := d.Create(t.Context(), w.request("m1", "create.0")); driversdk.CodeOf(err) != tc.code {
				t.Errorf("%s: want %v, have %v", tc.reason, tc.code, err)
			}
			if _, err := d.Get(t.Context(), w.request("m1", "status")); driversdk.CodeOf(err) != tc.code {
				t.Errorf("%s: get: want %v, have %v", tc.reason, tc.code, err)
			}
		})
	}
}

func TestCoded(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		reason string
		err    error
		code   driversdk.Code
	}{
		"none":     {"is no error", nil, driversdk.OK},
		"fenced":   {"the SDK's own word", driversdk.Errorf(driversdk.Aborted, "fenced"), driversdk.Aborted},
		"wrapped":  {"as the SDK's own", fmt.Errorf("create: %w", driversdk.Errorf(driversdk.Aborted, "fenced")), driversdk.Aborted},
		"canceled": {"the context's", fmt.Errorf("create: %w", context.Canceled), driversdk.Canceled},
		"deadline": {"the context's", context.DeadlineExceeded, driversdk.DeadlineExceeded},
		"refused":  {"the cloud's", &cloudapi.Error{Code: cloudapi.CodeQuotaExceeded}, driversdk.ResourceExhausted},
		"unknown":  {"says nothing, so the cloud's word counts", driversdk.NewError(driversdk.Unknown, &cloudapi.Error{Code: cloudapi.CodeConflict}), driversdk.Aborted},
		"lost":     {"its outcome is unknown", io.ErrUnexpectedEOF, driversdk.Unknown},
	} {
		if got := coded(tc.err); driversdk.CodeOf(got) != tc.code || tc.err != nil && !errors.Is(got, tc.err) {
			t.Errorf("%s: want %v, have %v (%v): %s", name, tc.code, driversdk.CodeOf(got), got, tc.reason)
		}
	}
}

// A cloud that fails after the work is done is asked again under the same token, and
// where there is none the driver does not say that nothing was made.
func TestDriver_FailedAfterwards(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{ListLag: cloudapi.Duration(time.Hour)}), &Driver{Identity: driversdk.IdentityToken}
	w.fault(cloudapi.Fault{Operation: cloudapi.OpCreate, After: true, Next: 1})
	if made, err := d.Create(t.Context(), w.request("m1", "create.0")); err != nil || made == nil || w.live() != 1 {
		t.Errorf("create = %v, %v, with %d instances; want the one that was made", made, err, w.live())
	}
	for name, tc := range map[string]struct {
		reason string
		err    error
		want   bool
	}{
		"none":          {"it is answered", nil, false},
		"server error":  {"it may have failed when the work was done", &cloudapi.Error{Status: 500, Code: cloudapi.CodeInternal}, true},
		"gateway":       {"what is behind it was asked, perhaps", &cloudapi.Error{Status: 502, Code: "HTTP"}, true},
		"shutting down": {"the cloud says that it did nothing", &cloudapi.Error{Status: 503, Code: cloudapi.CodeUnavailable}, false},
		"rate limit":    {"the cloud refused", &cloudapi.Error{Status: 429, Code: cloudapi.CodeRateLimited}, false},
		"no answer":     {"it was sent", io.ErrUnexpectedEOF, true},
		"no connection": {"it was not sent", &net.OpError{Op: "dial", Err: io.EOF}, false},
	} {
		if got := lost(tc.err); got != tc.want {
			t.Errorf("%s: lost: %v; %s", name, got, tc.reason)
		}
	}
}

func TestDriver_Unreachable(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{}), &Driver{Identity: driversdk.IdentityToken}
	ctx, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	if _, err := d.Create(ctx, w.request("m1", "create.0")); driversdk.CodeOf(err) != driversdk.DeadlineExceeded {
		t.Errorf("a deadline that has passed [CREATE-4]: have %v", err)
	}
	req := w.request("m1", "create.0")
	req.Class.Spec.Endpoint = "http://127.0.0.1:1"
	if _, err := d.Create(t.Context(), req); driversdk.CodeOf(err) != driversdk.Unavailable {
		t.Errorf("a cloud that is not there: have %v", err)
	}
}

func TestDriver_ValidateClass(t *testing.T) {
	t.Parallel()
	w, d := newWorld(t, cloudapi.Knobs{}), &Driver{}
	if warnings, err := d.ValidateClass(t.Context(), w.class()); err != nil || len(warnings) != 0 {
		t.Errorf("a good class: have %q, %v", warnings, err)
	}
	class := w.class()
	class.Secret = driversdk.Secret{}
	if warnings, err := d.ValidateClass(t.Context(), class); driversdk.CodeOf(err) != driversdk.Unauthenticated || len(warnings) != 1 {
		t.Errorf("no credentials: have %q, %v", warnings, err)
	}
}

func TestSpec_Validate(t *testing.T) {
	t.Parallel()
	good := Spec{Endpoint: "http://127.0.0.1:1", MachineType: "small", Region: "moon"}
	cases := map[string]struct {
		reason string
		change func(*Spec)
		err    string
	}{
		"good":        {"nothing to say", func(*Spec) {}, ""},
		"endpoint":    {"no URL", func(s *Spec) { s.Endpoint = "127.0.0.1:1" }, "endpoint: want a URL"},
		"type":        {"needed", func(s *Spec) { s.MachineType = "" }, "machineType is missing"},
		"region":      {"part of the provider id", func(s *Spec) { s.Region = "a/b" }, `region: want a name without slashes, have "a/b"`},
		"stolen tags": {"would give an instance another owner", func(s *Spec) { s.Tags = map[string]string{tagUID: "x"} }, "are reserved for the driver"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spec := good
			tc.change(&spec)
			err := spec.Validate()
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Errorf("%s: want %q, have %v", tc.reason, tc.err, err)
			}
		})
	}
}

func TestDriver_VolumeIDs(t *testing.T) {
	t.Parallel()
	got, err := (&Driver{}).VolumeIDs(t.Context(), []driversdk.PersistentVolume{
		{Name: "ours", Spec: []byte(`{"csi":{"driver":"virtual.machinebus.io","volumeHandle":"v-1"}}`)},
		{Name: "other driver", Spec: []byte(`{"csi":{"driver":"ebs.csi.aws.com","volumeHandle":"v-2"}}`)},
		{Name: "no csi", Spec: []byte(`{"nfs":{"server":"x"}}`)},
	})
	if diff := cmp.Diff([]string{"v-1"}, got); diff != "" || err != nil {
		t.Errorf("another provider's volumes are left out [VOLUMEIDS-1]: %v\n%s", err, diff)
	}
}

func TestDriver_Identity(t *testing.T) {
	t.Parallel()
	for identity, name := range identities {
		d := &Driver{}
		if err := d.UnmarshalText([]byte(name)); err != nil || d.Identity != identity {
			t.Errorf("%s: have %v, %v", name, d.Identity, err)
		}
	}
	if err := (&Driver{}).UnmarshalText([]byte("luck")); err == nil {
		t.Error("want an error that says what there is")
	}
}
