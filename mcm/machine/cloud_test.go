package machine_test

import (
	"context"
	"sync"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/replica"
	"github.com/machinebus/machinebus/mcm/api/v1alpha1"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A cloud is the one thing here that is not real: it keeps instances in memory,
// together with a driver for it.
type cloud struct {
	mu        sync.Mutex
	instances map[string]string // providerID by machine uid
	made      int               // instances ever made
	tasks     []*replica.Task   // every operation that came

	// on is asked first; a result that is not nil is the answer.
	on           func(ctx context.Context, t *replica.Task) *driverv1.Result
	noInitialize bool
	entered      chan *replica.Task // gets every create that is held
}

func newCloud() *cloud {
	return &cloud{instances: map[string]string{}, entered: make(chan *replica.Task, 100)}
}

func (c *cloud) capabilities() []driverv1.Operation {
	all := []driverv1.Operation{
		driverv1.Operation_OPERATION_CREATE, driverv1.Operation_OPERATION_DELETE, driverv1.Operation_OPERATION_STATUS,
	}
	if c.noInitialize {
		return all
	}

	return append(all, driverv1.Operation_OPERATION_INITIALIZE)
}

func (c *cloud) handle(ctx context.Context, t *replica.Task) *driverv1.Result {
	c.mu.Lock()
	c.tasks = append(c.tasks, t)
	on := c.on
	c.mu.Unlock()
	if on != nil {
		if result := on(ctx, t); result != nil {
			return result
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	m := bus.MachineOf(t.Request)
	switch t.Operation {
	case driverv1.Operation_OPERATION_STATUS:
		if _, there := c.instances[m.GetUid()]; !there {
			return &driverv1.Result{Status: &driverv1.Status{Code: driverv1.Code_CODE_NOT_FOUND}}
		}

		return found(m)
	case driverv1.Operation_OPERATION_DELETE:
		delete(c.instances, m.GetUid())

		return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{}}}
	case driverv1.Operation_OPERATION_INITIALIZE:
		return &driverv1.Result{Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{}}}
	default:
		if _, there := c.instances[m.GetUid()]; !there {
			c.instances[m.GetUid()] = "virtual://" + m.GetName()
			c.made++
		}

		return &driverv1.Result{Payload: &driverv1.Result_Create{Create: &driverv1.CreateResponse{
			LastKnownState: "made",
			Instance: &driverv1.Instance{
				ProviderId: "virtual://" + m.GetName(), NodeName: m.GetName(),
				Addresses: []*driverv1.Address{{Type: "InternalIP", Address: "10.0.0.1"}},
			},
		}}}
	}
}

// found is what a driver says of a machine's instance that is there.
func found(m *driverv1.Machine) *driverv1.Result {
	return &driverv1.Result{Payload: &driverv1.Result_InstanceStatus{InstanceStatus: &driverv1.StatusResponse{
		Instance: &driverv1.Instance{
			ProviderId: "virtual://" + m.GetName(), NodeName: m.GetName(),
			Addresses: []*driverv1.Address{{Type: "InternalIP", Address: "10.0.0.1"}},
		},
	}}}
}

// failLate makes the next instance, and says that it has failed to.
func (c *cloud) failLate(code driverv1.Code) {
	var once sync.Once
	c.answer(func(_ context.Context, t *replica.Task) (result *driverv1.Result) {
		if t.Operation == create {
			once.Do(func() {
				c.mu.Lock()
				defer c.mu.Unlock()
				m := bus.MachineOf(t.Request)
				c.instances[m.GetUid()] = "virtual://" + m.GetName()
				c.made++
				result = failure(code)
			})
		}

		return result
	})
}

// answerStatus sets what the driver says of a machine's instance.
func (c *cloud) answerStatus(say func(*driverv1.Machine) *driverv1.Result) {
	c.answer(func(_ context.Context, t *replica.Task) *driverv1.Result {
		if t.Operation == status {
			return say(bus.MachineOf(t.Request))
		}

		return nil
	})
}

// answer sets what is asked first.
func (c *cloud) answer(on func(ctx context.Context, t *replica.Task) *driverv1.Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.on = on
}

// failOnce fails the first operation of a kind for each machine with what the
// machine's annotation "fail" says.
func (c *cloud) failOnce(op driverv1.Operation, failure func(*driverv1.Machine) *driverv1.Result) {
	var mu sync.Mutex
	seen := map[string]bool{}
	c.answer(func(_ context.Context, t *replica.Task) *driverv1.Result {
		m := bus.MachineOf(t.Request)
		mu.Lock()
		defer mu.Unlock()
		if t.Operation != op || seen[m.GetUid()] {
			return nil
		}
		seen[m.GetUid()] = true

		return failure(m)
	})
}

// hold keeps every create until open is closed.
func (c *cloud) hold(open <-chan struct{}) {
	c.answer(func(ctx context.Context, t *replica.Task) *driverv1.Result {
		if t.Operation != driverv1.Operation_OPERATION_CREATE {
			return nil
		}
		c.entered <- t
		select {
		case <-open:
			return nil
		case <-ctx.Done():
			return &driverv1.Result{Status: bus.StatusOf(ctx.Err())}
		}
	})
}

// has returns how many instances exist, and how many were ever made.
func (c *cloud) has() (instances, made int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	return len(c.instances), c.made
}

// operations returns how many different operations of a kind came: one may be
// sent more than once, but only under its one id.
func (c *cloud) operations(op driverv1.Operation) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := map[string]bool{}
	for _, t := range c.tasks {
		if t.Operation == op {
			ids[t.Request.GetOperationId()] = true
		}
	}

	return len(ids)
}

// count returns how many operations of a kind came.
func (c *cloud) count(op driverv1.Operation) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, t := range c.tasks {
		if t.Operation == op {
			n++
		}
	}

	return n
}

// of is count for one machine.
func (c *cloud) of(op driverv1.Operation, m *v1alpha1.Machine) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, t := range c.tasks {
		if t.Operation == op && bus.MachineOf(t.Request).GetName() == m.Name {
			n++
		}
	}

	return n
}
