package machine_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	"github.com/machinebus/machinebus/mcm/machine"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// The tables below say what follows when an operation ends with a code: a row for
// every code of every operation. Users of the machine controller manager know
// these reactions; where one differs, its reason says why.

// A reaction is one row.
type reaction struct {
	reason string
	after  after // when there is a next try; nil when the machine goes on
	forget bool  // what the driver said at an earlier try is dropped
	abort  bool  // of deletions: the text says so
}

// An after is the setting that says when an operation is tried again.
type after func(machine.Retry) time.Duration

func short(r machine.Retry) time.Duration     { return r.Short }
func medium(r machine.Retry) time.Duration    { return r.Medium }
func long(r machine.Retry) time.Duration      { return r.Long }
func exhausted(r machine.Retry) time.Duration { return r.ResourceExhausted }

// unheardOf is a code that later versions may have. Its number is all that is
// known, and that it is a failure.
const unheardOf driverv1.Code = 99

var createReactions = map[driverv1.Code]reaction{
	driverv1.Code_CODE_OK: {reason: "it is made"},

	driverv1.Code_CODE_RESOURCE_EXHAUSTED: {reason: "the autoscaler looks elsewhere meanwhile", after: exhausted},

	driverv1.Code_CODE_UNKNOWN:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_DEADLINE_EXCEEDED: {reason: "it may pass", after: short},
	driverv1.Code_CODE_ABORTED:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_UNAVAILABLE:       {reason: "it may pass", after: short},
	driverv1.Code_CODE_CANCELED:          {reason: "a replica that stops says so, which no driver did when it was part of the manager", after: short},

	driverv1.Code_CODE_INVALID_ARGUMENT:    {reason: "a person must correct something", after: medium, forget: true},
	driverv1.Code_CODE_NOT_FOUND:           {reason: "an image, say, that does not exist", after: medium, forget: true},
	driverv1.Code_CODE_ALREADY_EXISTS:      {reason: "an instance that does not fit is in the way", after: medium, forget: true},
	driverv1.Code_CODE_PERMISSION_DENIED:   {reason: "a person must correct something", after: medium, forget: true},
	driverv1.Code_CODE_FAILED_PRECONDITION: {reason: "a person must correct something", after: medium, forget: true},
	driverv1.Code_CODE_OUT_OF_RANGE:        {reason: "several instances match; package safety looks into that", after: medium, forget: true},
	driverv1.Code_CODE_UNIMPLEMENTED:       {reason: "it will not be so soon", after: medium, forget: true},
	driverv1.Code_CODE_INTERNAL:            {reason: "the driver is broken", after: medium, forget: true},
	driverv1.Code_CODE_DATA_LOSS:           {reason: "the driver is broken", after: medium, forget: true},
	driverv1.Code_CODE_UNAUTHENTICATED:     {reason: "a person must correct something", after: medium, forget: true},
	driverv1.Code_CODE_UNINITIALIZED:       {reason: "a create has no such end", after: medium, forget: true},
	unheardOf:                              {reason: "a code that cannot be read", after: medium, forget: true},
}

var initializeReactions = map[driverv1.Code]reaction{
	driverv1.Code_CODE_OK:            {reason: "it is ready"},
	driverv1.Code_CODE_UNIMPLEMENTED: {reason: "there is nothing to do"},

	driverv1.Code_CODE_CANCELED:            {reason: "any error", after: short},
	driverv1.Code_CODE_UNKNOWN:             {reason: "any error", after: short},
	driverv1.Code_CODE_INVALID_ARGUMENT:    {reason: "any error", after: short},
	driverv1.Code_CODE_DEADLINE_EXCEEDED:   {reason: "any error", after: short},
	driverv1.Code_CODE_NOT_FOUND:           {reason: "the instance may not be in the provider's lists yet: it is not skipped", after: short},
	driverv1.Code_CODE_ALREADY_EXISTS:      {reason: "any error", after: short},
	driverv1.Code_CODE_PERMISSION_DENIED:   {reason: "any error", after: short},
	driverv1.Code_CODE_RESOURCE_EXHAUSTED:  {reason: "any error: the instance has its place", after: short},
	driverv1.Code_CODE_FAILED_PRECONDITION: {reason: "any error", after: short},
	driverv1.Code_CODE_ABORTED:             {reason: "any error", after: short},
	driverv1.Code_CODE_OUT_OF_RANGE:        {reason: "any error", after: short},
	driverv1.Code_CODE_INTERNAL:            {reason: "any error", after: short},
	driverv1.Code_CODE_UNAVAILABLE:         {reason: "any error", after: short},
	driverv1.Code_CODE_DATA_LOSS:           {reason: "any error", after: short},
	driverv1.Code_CODE_UNAUTHENTICATED:     {reason: "any error", after: short},
	driverv1.Code_CODE_UNINITIALIZED:       {reason: "any error", after: short},
	unheardOf:                              {reason: "it is Internal like all that cannot be read, and no worse than that", after: short},
}

var deleteReactions = map[driverv1.Code]reaction{
	driverv1.Code_CODE_OK:        {reason: "it is gone"},
	driverv1.Code_CODE_NOT_FOUND: {reason: "it was gone"},

	driverv1.Code_CODE_UNKNOWN:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_DEADLINE_EXCEEDED: {reason: "it may pass", after: short},
	driverv1.Code_CODE_ABORTED:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_UNAVAILABLE:       {reason: "it may pass", after: short},
	driverv1.Code_CODE_CANCELED:          {reason: "a replica that stops says so, which no driver did when it was part of the manager", after: short},

	driverv1.Code_CODE_INVALID_ARGUMENT:    {reason: "a person must correct something", after: long, abort: true},
	driverv1.Code_CODE_ALREADY_EXISTS:      {reason: "a delete has no such end", after: long, abort: true},
	driverv1.Code_CODE_PERMISSION_DENIED:   {reason: "a person must correct something", after: long, abort: true},
	driverv1.Code_CODE_RESOURCE_EXHAUSTED:  {reason: "of requests, perhaps: no hurry", after: long, abort: true},
	driverv1.Code_CODE_FAILED_PRECONDITION: {reason: "a person must correct something", after: long, abort: true},
	driverv1.Code_CODE_OUT_OF_RANGE:        {reason: "several instances match", after: long, abort: true},
	driverv1.Code_CODE_UNIMPLEMENTED:       {reason: "it will not be so soon", after: long, abort: true},
	driverv1.Code_CODE_INTERNAL:            {reason: "the driver is broken", after: long, abort: true},
	driverv1.Code_CODE_DATA_LOSS:           {reason: "the driver is broken", after: long, abort: true},
	driverv1.Code_CODE_UNAUTHENTICATED:     {reason: "a person must correct something", after: long, abort: true},
	driverv1.Code_CODE_UNINITIALIZED:       {reason: "a delete has no such end", after: long, abort: true},
	unheardOf:                              {reason: "a code that cannot be read", after: long, abort: true},
}

// Of a status before creation, whose other rows are TestStatusBeforeCreation's.
var findReactions = map[driverv1.Code]reaction{
	driverv1.Code_CODE_OK:            {reason: "it is there and ready"},
	driverv1.Code_CODE_NOT_FOUND:     {reason: "it is yet to be made"},
	driverv1.Code_CODE_UNIMPLEMENTED: {reason: "create finds what there is"},
	driverv1.Code_CODE_UNINITIALIZED: {reason: "it is there and not ready"},

	driverv1.Code_CODE_RESOURCE_EXHAUSTED: {reason: "as a create", after: exhausted},

	driverv1.Code_CODE_UNKNOWN:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_DEADLINE_EXCEEDED: {reason: "it may pass", after: short},
	driverv1.Code_CODE_ABORTED:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_UNAVAILABLE:       {reason: "it may pass", after: short},
	driverv1.Code_CODE_CANCELED:          {reason: "a replica that stops says so", after: short},

	driverv1.Code_CODE_INVALID_ARGUMENT:    {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_ALREADY_EXISTS:      {reason: "a status has no such end", after: medium},
	driverv1.Code_CODE_PERMISSION_DENIED:   {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_FAILED_PRECONDITION: {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_OUT_OF_RANGE:        {reason: "several instances match", after: medium},
	driverv1.Code_CODE_INTERNAL:            {reason: "the driver is broken", after: medium},
	driverv1.Code_CODE_DATA_LOSS:           {reason: "the driver is broken", after: medium},
	driverv1.Code_CODE_UNAUTHENTICATED:     {reason: "a person must correct something", after: medium},
	unheardOf:                              {reason: "a code that cannot be read; the status says so all the same", after: medium},
}

// Of a status before deletion, whose other rows are TestStatusBeforeDeletion's.
var findNodeReactions = map[driverv1.Code]reaction{
	driverv1.Code_CODE_OK:            {reason: "its Node is drained first"},
	driverv1.Code_CODE_NOT_FOUND:     {reason: "something else of it may be left"},
	driverv1.Code_CODE_UNIMPLEMENTED: {reason: "delete finds what there is"},
	driverv1.Code_CODE_UNINITIALIZED: {reason: "it never was a Node"},

	driverv1.Code_CODE_UNKNOWN:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_DEADLINE_EXCEEDED: {reason: "it may pass", after: short},
	driverv1.Code_CODE_ABORTED:           {reason: "it may pass", after: short},
	driverv1.Code_CODE_UNAVAILABLE:       {reason: "it may pass", after: short},
	driverv1.Code_CODE_CANCELED:          {reason: "a replica that stops says so", after: short},

	driverv1.Code_CODE_INVALID_ARGUMENT:    {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_ALREADY_EXISTS:      {reason: "a status has no such end", after: medium},
	driverv1.Code_CODE_PERMISSION_DENIED:   {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_RESOURCE_EXHAUSTED:  {reason: "of requests, perhaps", after: medium},
	driverv1.Code_CODE_FAILED_PRECONDITION: {reason: "a person must correct something", after: medium},
	driverv1.Code_CODE_OUT_OF_RANGE:        {reason: "several instances match", after: medium},
	driverv1.Code_CODE_INTERNAL:            {reason: "the driver is broken", after: medium},
	driverv1.Code_CODE_DATA_LOSS:           {reason: "the driver is broken", after: medium},
	driverv1.Code_CODE_UNAUTHENTICATED:     {reason: "a person must correct something", after: medium},
	unheardOf:                              {reason: "it is Internal like all that cannot be read, and no worse than that", after: medium},
}

// codeName is what a failure with a code is called in texts.
func codeName(code driverv1.Code) string {
	if code == unheardOf {
		return "Internal"
	}

	return bus.CodeName(code)
}

// rowName suits a subtest and, in lower case, a machine.
func rowName(code driverv1.Code) string {
	if code == unheardOf {
		return "UnheardOf"
	}

	return bus.CodeName(code)
}

// A table is one of the above at work: a machine for every row.
type table struct {
	*rig

	op       driverv1.Operation
	rows     map[driverv1.Code]reaction
	machines map[driverv1.Code]*v1alpha1.Machine
	mended   atomic.Bool
}

// newTable prepares the machines. No next try comes by itself.
func newTable(t *testing.T, op driverv1.Operation, rows map[driverv1.Code]reaction) *table {
	t.Helper()
	for number := range driverv1.Code_name {
		if _, ok := rows[driverv1.Code(number)]; !ok {
			t.Errorf("there is no row for %s", rowName(driverv1.Code(number)))
		}
	}
	r := newRig(t)
	r.settings.Retry = machine.Retry{Short: time.Hour, Medium: 2 * time.Hour, Long: 3 * time.Hour, ResourceExhausted: 4 * time.Hour}
	r.settings.DrainPolicy.Timeout = 10 * time.Hour
	tab := &table{rig: r, op: op, rows: rows, machines: map[driverv1.Code]*v1alpha1.Machine{}}
	for code := range rows {
		tab.machines[code] = r.machine(strings.ToLower(rowName(code)))
	}

	return tab
}

// fail begins to answer operations of the kind as each machine's row says.
func (tab *table) fail() {
	byName := map[string]driverv1.Code{}
	for code, m := range tab.machines {
		byName[m.Name] = code
	}
	tab.cloud.answer(func(_ context.Context, task *replica.Task) *driverv1.Result {
		if task.Operation != tab.op || tab.mended.Load() {
			return nil
		}
		m := bus.MachineOf(task.Request)
		switch code := byName[m.GetName()]; {
		case tab.op == status && (code == driverv1.Code_CODE_OK || code == driverv1.Code_CODE_UNINITIALIZED):
			return foundAs(m, m.GetName(), code)
		case code == driverv1.Code_CODE_OK:
			return nil
		default:
			return failure(code)
		}
	})
}

// failures is how many rows have a next try.
func (tab *table) failures() int {
	n := 0
	for _, row := range tab.rows {
		if row.after != nil {
			n++
		}
	}

	return n
}

// each checks every row: by ok those of machines that go on, and the others by
// what they show.
func (tab *table) each(
	t *testing.T, event string, want func(code driverv1.Code, row reaction) shown, ok func(t *testing.T, m *v1alpha1.Machine),
) {
	t.Helper()
	for code, row := range tab.rows {
		t.Run(rowName(code), func(t *testing.T) {
			m := tab.machines[code]
			if row.after == nil {
				ok(t, m)
				for _, text := range tab.events(t, m) {
					if strings.HasPrefix(text, event) {
						t.Errorf("%s, although %s", text, row.reason)
					}
				}

				return
			}
			tab.event(t, m, event, fmt.Sprintf("failed with %s (driver replica", codeName(code)))
			tab.event(t, m, event, fmt.Sprintf("next try in %s: no luck", row.after(tab.settings.Retry)))
			got := tab.get(t, m)
			if got == nil {
				t.Fatalf("the machine is gone: %s", row.reason)
			}
			if diff := cmp.Diff(want(code, row), show(got)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", row.reason, diff)
			}
		})
	}
}

// goOn lets every operation succeed, and corrects the class, so that no one has to
// wait for the next try.
func (tab *table) goOn(t *testing.T) {
	t.Helper()
	tab.mended.Store(true)
	class := tab.class()
	tab.change(t, class, func() { class.ProviderSpec.Raw = []byte(`{"size":"m"}`) })
}

// A shown is what a Machine shows of an operation.
type shown struct {
	Phase             v1alpha1.MachinePhase
	Type              v1alpha1.MachineOperationType
	State             v1alpha1.MachineState
	ErrorCode         string
	Text, Remembered  string
	HasInstance, Ends bool
}

func show(m *v1alpha1.Machine) shown {
	last := m.Status.LastOperation

	return shown{
		m.Status.CurrentStatus.Phase, last.Type, last.State, last.ErrorCode, last.Description, m.Status.LastKnownState,
		m.Spec.ProviderID != "", m.DeletionTimestamp != nil,
	}
}

func TestCreateReactions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	tab := newTable(t, create, createReactions)
	for _, m := range tab.machines {
		tab.create(t, m)
		before := m.DeepCopy()
		m.Status.LastKnownState = "of before"
		if err := tab.Status().Patch(t.Context(), m, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	tab.fail()
	tab.startDriver(t)
	tab.startManager(t)
	tab.each(t, "FailedCreate", func(code driverv1.Code, row reaction) shown {
		want := shown{
			Phase: v1alpha1.MachineCrashLoopBackOff, Type: "Create", State: "Failed", ErrorCode: codeName(code),
			Text:       "Cloud provider message - machine codes error: code = [" + codeName(code) + "] message = [no luck]",
			Remembered: "of before",
		}
		if row.forget {
			want.Remembered = ""
		}

		return want
	}, func(t *testing.T, m *v1alpha1.Machine) {
		t.Helper()
		tab.phase(t, m, v1alpha1.MachinePending)
	})
	tab.goOn(t)
	for _, m := range tab.machines {
		if got := tab.phase(t, m, v1alpha1.MachinePending); got.Status.LastKnownState != "made" {
			t.Errorf("%s: what the driver said of its success is stored as %q", m.Name, got.Status.LastKnownState)
		}
	}
	if n, want := tab.cloud.count(create), len(tab.rows)+tab.failures(); n != want {
		t.Errorf("%d creates, want %d: each machine's first, and a second of those that failed", n, want)
	}
}

func TestInitializeReactions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	tab := newTable(t, initialize, initializeReactions)
	for _, m := range tab.machines {
		tab.create(t, m)
	}
	tab.fail()
	tab.startDriver(t)
	tab.startManager(t)
	tab.each(t, "FailedInitialize", func(code driverv1.Code, _ reaction) shown {
		return shown{
			Phase: v1alpha1.MachineCrashLoopBackOff, Type: "Create", State: "Failed", ErrorCode: codeName(code),
			Text:        "Provider error: machine codes error: code = [" + codeName(code) + "] message = [no luck]. Initialize VM Instance",
			Remembered:  "made",
			HasInstance: true,
		}
	}, func(t *testing.T, m *v1alpha1.Machine) {
		t.Helper()
		tab.phase(t, m, v1alpha1.MachinePending)
	})
	tab.goOn(t)
	for _, m := range tab.machines {
		tab.phase(t, m, v1alpha1.MachinePending)
	}
	if _, made := tab.cloud.has(); made != len(tab.rows) {
		t.Errorf("%d instances made for %d machines", made, len(tab.rows))
	}
	if n, want := tab.cloud.count(initialize), len(tab.rows)+tab.failures(); n != want {
		t.Errorf("%d initializations, want %d: each machine's first, and a second of those that failed", n, want)
	}
}

func TestDeleteReactions(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	tab := newTable(t, remove, deleteReactions)
	for _, m := range tab.machines {
		tab.create(t, m)
	}
	tab.fail()
	tab.startDriver(t)
	tab.startManager(t)
	for _, m := range tab.machines {
		tab.phase(t, m, v1alpha1.MachinePending)
		tab.delete(t, m)
	}
	tab.each(t, "FailedDelete", func(code driverv1.Code, row reaction) shown {
		text := "machine codes error: code = [" + codeName(code) + "] message = [no luck]. "
		if row.abort {
			text += "Aborting operation. "
		}

		return shown{
			Phase: v1alpha1.MachineTerminating, Type: "Delete", State: "Failed", ErrorCode: codeName(code),
			Text: text + "Initiate VM deletion", Remembered: "made", HasInstance: true, Ends: true,
		}
	}, func(t *testing.T, m *v1alpha1.Machine) {
		t.Helper()
		tab.gone(t, m)
	})
	tab.goOn(t)
	for _, m := range tab.machines {
		tab.gone(t, m)
	}
	if n, want := tab.cloud.count(remove), len(tab.rows)+tab.failures(); n != want {
		t.Errorf("%d deletes, want %d: each machine's first, and a second of those that failed", n, want)
	}
}

func TestStatusReactionsBeforeCreation(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	tab := newTable(t, status, findReactions)
	for _, m := range tab.machines {
		tab.crashed(t, m)
	}
	tab.fail()
	tab.startDriver(t)
	tab.startManager(t)
	tab.each(t, "FailedStatus", func(code driverv1.Code, _ reaction) shown {
		return shown{
			Phase: v1alpha1.MachineCrashLoopBackOff, Type: "Create", State: "Failed", ErrorCode: codeName(code),
			Text:       "Cloud provider message - machine codes error: code = [" + codeName(code) + "] message = [no luck]",
			Remembered: "half made",
		}
	}, func(t *testing.T, m *v1alpha1.Machine) {
		t.Helper()
		tab.phase(t, m, v1alpha1.MachinePending)
	})
	for code, m := range tab.machines {
		if tab.rows[code].after == nil {
			continue
		}
		if n := tab.cloud.of(create, m); n != 0 {
			t.Errorf("%s: something was made without knowing what there is", m.Name)
		}
	}
	tab.goOn(t)
	for _, m := range tab.machines {
		tab.phase(t, m, v1alpha1.MachinePending)
	}
}

func TestStatusReactionsBeforeDeletion(t *testing.T) { //nolint:tparallel // what follows the rows must wait for them
	t.Parallel()
	tab := newTable(t, status, findNodeReactions)
	for _, m := range tab.machines {
		m.Finalizers = []string{v1alpha1.FinalizerName}
		tab.crashed(t, m)
		tab.delete(t, m)
	}
	tab.fail()
	tab.startDriver(t)
	tab.startManager(t)
	tab.each(t, "FailedStatus", func(code driverv1.Code, _ reaction) shown {
		return shown{
			Phase: v1alpha1.MachineTerminating, Type: "Delete", State: "Failed", ErrorCode: codeName(code),
			Text: "machine codes error: code = [" + codeName(code) + "] message = [no luck]. " +
				"Set machine status to termination. Now, getting VM Status",
			Remembered: "half made", Ends: true,
		}
	}, func(t *testing.T, m *v1alpha1.Machine) {
		t.Helper()
		tab.gone(t, m)
	})
	tab.goOn(t)
	for _, m := range tab.machines {
		tab.gone(t, m)
		if n := tab.cloud.of(remove, m); n != 1 {
			t.Errorf("%s: %d deletes, want 1", m.Name, n)
		}
	}
}

// What a driver must not answer is its fault, and is tried again as such.
func TestUnusableInstances(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		reason, text string
		instance     *driverv1.Instance
		noTarget     bool
	}{
		"no instance": {"there is nothing to go on with", "created an instance without a provider id", nil, false},
		"no provider id": {
			"it could never be found again", "created an instance without a provider id", &driverv1.Instance{NodeName: "n"}, false,
		},
		"no node name": {
			"its Node would not be known", "created instance virtual://i without a node name", &driverv1.Instance{ProviderId: "virtual://i"}, false,
		},
		"no node name, no nodes": {"there are no Nodes", "", &driverv1.Instance{ProviderId: "virtual://i"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.noTarget, r.settings.Retry.Medium = c.noTarget, time.Hour
			r.cloud.failOnce(create, func(*driverv1.Machine) *driverv1.Result {
				return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: c.instance}}}
			})
			r.startDriver(t)
			r.startManager(t)
			m := r.machine("a")
			r.create(t, m)
			if c.text == "" {
				r.phase(t, m, v1alpha1.MachineAvailable)

				return
			}
			r.event(t, m, "FailedCreate", "failed with Internal")
			r.event(t, m, "FailedCreate", "next try in 1h0m0s: driver of provider virtual "+c.text)
			want := shown{
				Phase: v1alpha1.MachineCrashLoopBackOff, Type: "Create", State: "Failed", ErrorCode: "Internal",
				Text: "Cloud provider message - machine codes error: code = [Internal] message = [driver of provider virtual " + c.text + "]",
			}
			if diff := cmp.Diff(want, show(r.get(t, m))); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.reason, diff)
			}
		})
	}
}
