package orphans_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/bustest"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/orphans"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// listReactions say what follows when a list ends with a code. All errors are
// alike: nothing is known of the class. In the machine controller manager nothing
// is known of any class then; here the others are looked at all the same.
var listReactions = map[driverv1.Code]string{
	driverv1.Code_CODE_OK:                  "what it shows counts",
	driverv1.Code_CODE_CANCELED:            "left alone",
	driverv1.Code_CODE_UNKNOWN:             "left alone",
	driverv1.Code_CODE_INVALID_ARGUMENT:    "left alone",
	driverv1.Code_CODE_DEADLINE_EXCEEDED:   "left alone",
	driverv1.Code_CODE_NOT_FOUND:           "left alone: it does not mean that there are no instances",
	driverv1.Code_CODE_ALREADY_EXISTS:      "left alone",
	driverv1.Code_CODE_PERMISSION_DENIED:   "left alone",
	driverv1.Code_CODE_RESOURCE_EXHAUSTED:  "left alone",
	driverv1.Code_CODE_FAILED_PRECONDITION: "left alone",
	driverv1.Code_CODE_ABORTED:             "left alone",
	driverv1.Code_CODE_OUT_OF_RANGE:        "left alone",
	driverv1.Code_CODE_UNIMPLEMENTED:       "left alone",
	driverv1.Code_CODE_INTERNAL:            "left alone",
	driverv1.Code_CODE_UNAVAILABLE:         "left alone",
	driverv1.Code_CODE_DATA_LOSS:           "left alone",
	driverv1.Code_CODE_UNAUTHENTICATED:     "left alone",
	driverv1.Code_CODE_UNINITIALIZED:       "left alone",
}

// refusing makes a class for each row, whose lists end as it says; the rig's own
// class is the row OK.
func (r *rig) refusing() (classes map[driverv1.Code]string) {
	r.t.Helper()
	classes, r.cloud.refuse = map[driverv1.Code]string{}, map[string]driverv1.Code{}
	for number, name := range driverv1.Code_name {
		code := driverv1.Code(number)
		if _, ok := listReactions[code]; !ok {
			r.t.Errorf("there is no row for %s", name)
		}
		classes[code] = "small"
		if code == driverv1.Code_CODE_OK {
			continue
		}
		classes[code] = strings.ToLower(bus.CodeName(code))
		r.cloud.refuse[classes[code]] = code
		r.create(&v1alpha1.MachineClass{
			ObjectMeta: metav1.ObjectMeta{Namespace: r.namespace, Name: classes[code]}, Provider: provider,
			ProviderSpec: runtime.RawExtension{Raw: []byte(`{}`)},
		})
	}

	return classes
}

func TestListReactions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	r := newRig(t)
	classes := r.refusing()
	r.made("kept")
	r.cloud.add(orphanID, "gone", "gone-uid")
	var mu sync.Mutex
	var log strings.Builder
	r.Pass(logr.NewContext(t.Context(), funcr.New(func(_, args string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(&log, args)
	}, funcr.Options{})))
	for code, reason := range listReactions {
		t.Run(bus.CodeName(code), func(t *testing.T) {
			left := fmt.Sprintf(`"cannot list the instances of the class; none of them is deleted" `+
				`"class"={"name"=%q "namespace"=%q} "code"=%q "err"="no luck"`, classes[code], r.namespace, bus.CodeName(code))
			if got, want := strings.Contains(log.String(), left), code != driverv1.Code_CODE_OK; got != want {
				t.Errorf("%s; the log says\n%s", reason, log.String())
			}
		})
	}
	r.event(orphans.EventOrphanFound, orphanID)
	if got := r.metric("mcm_safety_orphan_passes_total"); got != `mcm_safety_orphan_passes_total{outcome="done"} 1` {
		t.Errorf("metric is %q", got)
	}
}

// What could not be listed is listed again before the next turn.
func TestListIsTriedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Settings.Period, r.Settings.Retry, r.Now = time.Hour, time.Millisecond, time.Now
	classes := r.refusing()
	r.start()
	for _, class := range classes {
		bustest.Eventually(t, "a second list of class "+class, func() bool {
			r.cloud.mu.Lock()
			defer r.cloud.mu.Unlock()

			return r.cloud.listed[class] > 1
		})
	}
}
