package caller

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/machinebus/machinebus/bus"
	"github.com/machinebus/machinebus/bus/internal/opstream"
	"github.com/machinebus/machinebus/bus/replica"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A modelCloud is the provider, and the judge: it sees every mutation that a
// replica begins. With idempotency tokens it makes one instance of one create's id,
// however often it is asked; with unique names one of a machine at a time; with neither
// one each time.
type modelCloud struct {
	mu         sync.Mutex
	rng        *rand.Rand
	identity   driverv1.CreateIdentity
	calls      map[string][]*cloudCall           // by machine
	used       map[string]bool                   // operation ids of creates that have made an instance: they make no second one
	instances  map[string]string                 // operation id of the create, by machine
	answers    map[string]map[driverv1.Code]bool // what replicas came to, by operation id
	settled    map[string]uint64                 // how many operations of a machine have an outcome
	settledAt  map[string]time.Time              // since when the last of them has one
	done       map[string]bool                   // operation ids of creates whose success is stored
	claims     map[string]*driverv1.Claim        // the newest by machine, as the stream has taken them
	violations []string
	begun      int
}

// A cloudCall is one mutation at the cloud.
type cloudCall struct {
	by      string
	id      string
	claim   uint64      // the place of the claim under which it was accepted, among all records
	live    bool        // its call has not returned
	begun   time.Time   // when the record was stored that it begins; zero for none
	stopped func() bool // its attempt can begin nothing more; modelCloud.mu is held
}

func newModelCloud(seed uint64, identity driverv1.CreateIdentity) *modelCloud {
	return &modelCloud{
		identity: identity, done: map[string]bool{}, claims: map[string]*driverv1.Claim{},
		rng:   rand.New(rand.NewPCG(seed, 2)),
		calls: map[string][]*cloudCall{}, instances: map[string]string{}, used: map[string]bool{},
		answers: map[string]map[driverv1.Code]bool{}, settled: map[string]uint64{}, settledAt: map[string]time.Time{},
	}
}

func (c *modelCloud) violatef(format string, args ...any) {
	c.violations = append(c.violations, fmt.Sprintf(format, args...))
}

func (c *modelCloud) some(most time.Duration) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()

	return time.Duration(c.rng.Int64N(int64(most)))
}

func (c *modelCloud) chance(perMille int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.rng.IntN(1000) < perMille
}

// handle is the driver of a replica.
func (c *modelCloud) handle(ctx context.Context, r *modelReplica, t *replica.Task) *driverv1.Result {
	return c.work(ctx, r.port, t.Request, func(machine string) (*cloudCall, error) { return c.begin(r, t, machine) })
}

// work is what a driver does at a port. It begins each call to the cloud by begin.
func (c *modelCloud) work(
	ctx context.Context, at *port, env *driverv1.Envelope, begin func(machine string) (*cloudCall, error),
) *driverv1.Result {
	machine, id, op := bus.MachineOf(env).GetUid(), env.GetOperationId(), bus.OperationOf(env)
	if err := at.nap(ctx, c.some(200*time.Millisecond)); err != nil { // it fetches its class
		return c.answer(id, bus.CodeOf(err)) // nothing was begun
	}
	if c.chance(50) {
		return c.answer(id, driverv1.Code_CODE_UNAVAILABLE) // there is no class, or the cloud does not answer its look
	}
	if env.GetRecover() && op == driverv1.Operation_OPERATION_CREATE {
		c.mu.Lock()
		there := c.has(machine, id)
		c.mu.Unlock()
		if there {
			return c.answer(id, driverv1.Code_CODE_OK)
		}
	}
	calls := 1 + c.some(2) // some drivers make two calls
	if op == driverv1.Operation_OPERATION_CREATE && c.identity == driverv1.CreateIdentity_CREATE_IDENTITY_NONE {
		calls = 1 // which would make two instances
	}
	for range calls {
		call, err := begin(machine)
		if err != nil {
			return c.answer(id, bus.CodeOf(err))
		}
		fails := c.chance(200)
		took := c.some(time.Second)
		if c.chance(300) {
			took += c.some(4 * time.Second)
		}
		time.AfterFunc(took, func() { c.effect(call, machine, op, fails) })
		err = at.nap(ctx, took+time.Microsecond)
		c.mu.Lock()
		call.live = false
		made := op == driverv1.Operation_OPERATION_CREATE && c.has(machine, id)
		c.mu.Unlock()
		switch {
		case err != nil:
			return bus.Failure(bus.CodeOf(err), "cut off")
		case fails && !made: // whatever becomes of another call that is still at the cloud
			return c.answer(id, driverv1.Code_CODE_RESOURCE_EXHAUSTED)
		}
	}

	return c.answer(id, driverv1.Code_CODE_OK)
}

// begin is a call to the cloud, and the moment at which it is judged.
func (c *modelCloud) begin(r *modelReplica, t *replica.Task, machine string) (*cloudCall, error) {
	if err := r.port.pass(); err != nil {
		return nil, err
	}
	id := t.Request.GetOperationId()
	if err := t.BeginMutation(); err != nil {
		return nil, err
	}
	claim := r.port.n.orderOf(t.Claim())
	c.mu.Lock()
	defer c.mu.Unlock()
	call := &cloudCall{by: r.name, id: id, claim: claim, begun: r.port.n.begunAt(claim), live: true, stopped: func() bool {
		is := c.claims[machine]

		return r.port.crashed() || is.GetReplica() != r.name || is.GetOperationId() != id
	}}
	c.judge(call, machine)

	return call, nil
}

// inFlight reports whether a call begins within the time that the acknowledgement of its
// record may take: another attempt may have come meanwhile, which knows of the call. A
// create that nothing tells apart has no such excuse, as the other attempt waits for it.
func (c *modelCloud) inFlight(call *cloudCall) bool {
	if c.identity == driverv1.CreateIdentity_CREATE_IDENTITY_NONE && strings.Contains(call.id, ".create.") {
		return false
	}

	return !call.begun.IsZero() && time.Since(call.begun) <= time.Second
}

// judge says what is wrong about a call that begins. c.mu is held.
func (c *modelCloud) judge(call *cloudCall, machine string) {
	c.begun++
	id := call.id
	inFlight := c.inFlight(call)
	n, _ := opstream.OperationNumber(id)
	if n < c.settled[machine] && (!inFlight || !call.begun.Before(c.settledAt[machine])) {
		c.violatef("%s begins at %s after its outcome was stored", id, call.by)
	}
	for _, other := range c.calls[machine] {
		switch {
		case other.by == call.by && other.id == id:
		case inFlight && other.claim > call.claim:
		case other.claim > call.claim:
			c.violatef("%s begins at %s (claim %d) after %s has begun at %s (claim %d)",
				id, call.by, call.claim, other.id, other.by, other.claim)
		case other.live && !other.stopped():
			c.violatef("%s begins at %s (claim %d) while %s is live at %s (claim %d), which is not fenced",
				id, call.by, call.claim, other.id, other.by, other.claim)
		}
	}
	c.calls[machine] = append(c.calls[machine], call)
}

// effect is what a call comes to, whatever became of the replica that made it.
func (c *modelCloud) effect(call *cloudCall, machine string, op driverv1.Operation, fails bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case fails:
	case op == driverv1.Operation_OPERATION_CREATE && c.makes(call, machine):
		c.used[call.id] = true
		if made, ok := c.instances[machine]; ok {
			c.violatef("%s makes a second instance beside that of %s", call.id, made)
		}
		c.instances[machine] = call.id
	case op == driverv1.Operation_OPERATION_DELETE:
		delete(c.instances, machine)
	}
}

// has reports to a driver that looks whether the instance of this create exists:
// a token's instance, or that of the machine. c.mu is held.
func (c *modelCloud) has(machine, id string) bool {
	made, ok := c.instances[machine]
	if c.identity == driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN {
		return made == id
	}

	return ok
}

// makes reports whether a create makes an instance. c.mu is held.
func (c *modelCloud) makes(call *cloudCall, machine string) bool {
	switch c.identity {
	case driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN:
		return !c.used[call.id]
	case driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME:
		_, there := c.instances[machine]
		// A name is free again once the machine is gone. What a lost call makes then is
		// collected as an orphan: nothing that comes over a bus can prevent it.
		late := c.done[call.id] && (!call.live || call.stopped())

		return !there && !late
	default:
		return true
	}
}

// answer notes what a replica says to an operation.
func (c *modelCloud) answer(id string, code driverv1.Code) *driverv1.Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.came(id, code)
	result := bus.Failure(code, "of "+id)
	if code == driverv1.Code_CODE_OK && strings.Contains(id, ".create.") {
		result.Payload = &driverv1.Result_Create{Create: &driverv1.CreateResponse{Instance: &driverv1.Instance{ProviderId: "i-" + id}}}
	}

	return result
}

// came notes what an operation has come to. c.mu is held.
func (c *modelCloud) came(id string, code driverv1.Code) {
	if c.answers[id] == nil {
		c.answers[id] = map[driverv1.Code]bool{}
	}
	c.answers[id][code] = true
}

// outcome judges what the manager stores.
func (c *modelCloud) outcome(machine, id string, result *driverv1.Result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if result == nil {
		c.violatef("%s ended without a driver's word", id)

		return
	}
	code := result.GetStatus().GetCode()
	if !c.answers[id][code] {
		c.violatef("outcome %s of %s is none that a replica came to", bus.CodeName(code), id)
	}
	if made := result.GetCreate().GetInstance().GetProviderId(); code == driverv1.Code_CODE_OK && strings.Contains(id, ".create.") && made != "i-"+id {
		c.violatef("outcome of %s is that of %s", id, made)
	}
	if code == driverv1.Code_CODE_OK && strings.Contains(id, ".create.") {
		c.done[id] = true
	}
	if n, _ := opstream.OperationNumber(id); n+1 > c.settled[machine] {
		c.settled[machine], c.settledAt[machine] = n+1, time.Now()
	}
}

// onPut judges what is written in the place of a claim.
func (c *modelCloud) onPut(_ string, before, after []byte) {
	a, err := bus.Decode(after, "")
	if err != nil || a.GetClaim().GetOperationId() == "" {
		return // a manager's look whether the stream takes writes
	}
	var was *driverv1.Claim // nil where there was none, or it went with an older store
	if b, err := bus.Decode(before, ""); err == nil {
		was = b.GetClaim()
	}
	is := a.GetClaim()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.claims[machineOfID(is.GetOperationId())] = is
	if was.GetState() == driverv1.Claim_STATE_SETTLED && was.GetOperationId() == is.GetOperationId() {
		c.violatef("the stored outcome of %s is lost: attempt %d at %s replaces it", is.GetOperationId(), is.GetAttempt(), is.GetReplica())
	}
}

// left judges what remains when everything has ended.
func (c *modelCloud) left() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for machine, id := range c.instances {
		c.violatef("instance of %s is left of machine %s, which is gone", id, machine)
	}
}

// machineOfID returns the machine that an operation's id begins with.
func machineOfID(id string) string {
	machine, _, _ := strings.Cut(id, ".")

	return machine
}
