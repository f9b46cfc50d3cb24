package drivertest

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/machinebus/machinebus/driversdk/drivertest/bench"
	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

var createClauses = []Clause{
	{ID: "CREATE-1", Says: "Create is idempotent", check: func(c *check) { c.again(c.first()) }},
	{ID: "ENV-9", Says: "with recover, finds what an earlier attempt made", check: checkRecover},
	{ID: "CREATE-2", Says: "an instance of the name that belongs to another machine is left alone", check: func(c *check) { c.rival() }},
	{ID: "CREATE-3", Says: "success means that the instance was accepted for good", check: checkCreatedForGood},
	{ID: "CREATE-4", Says: "nothing is started after the deadline", check: checkDeadline},
	{ID: "IDENTITY-1", Says: "passes the operation id to the cloud as idempotency token", binds: full, check: checkToken},
	{ID: "IDENTITY-2", Says: "names the instance by the machine alone", binds: full, check: checkUniqueName},
	{ID: "MACHINE-1", Says: "records the machine's uid with the instance", check: checkUID},
	{ID: "OWNER-1", Says: "records the owner with the instance, and lists it", check: checkOwner},
	{ID: "INITIALIZE-1", Says: "Initialize is idempotent", check: checkInitialize},
}

// recovering makes a request one for another attempt, after one that may have had an
// effect.
func recovering(env *driverv1.Envelope) { env.Recover, env.Attempt = true, 2 }

// within gives a request this time to be done in.
func within(timeout time.Duration) bench.Change {
	return func(env *driverv1.Envelope) { env.Timeout = durationpb.New(timeout) }
}

// A made machine is one that has an instance, by an operation that was acknowledged.
type made struct {
	*bench.Machine

	create     *bench.Operation
	providerID string
}

// firstTries is how often an operation of unknown outcome is attempted.
const firstTries = 3

// first makes a machine's instance. On a slow machine the operations stream may not answer in time: the operation is attempted
// again then, as the manager does.
func (c *check) first() *made {
	o := c.NewMachine().Operation(create)
	var result *driverv1.Result
	for attempt := uint32(1); attempt <= firstTries; attempt++ {
		result = o.Run(func(env *driverv1.Envelope) { env.Attempt, env.Recover = attempt, attempt > 1 })
		if !result.GetOutcomeUnknown() {
			break
		}
	}
	m := &made{o.Machine, o, c.Created(result)}
	c.Settle()

	return m
}

// firstNamed is first; from then on requests name the instance by its provider id.
func (c *check) firstNamed() *made {
	m := c.first()
	m.ProviderId = m.providerID

	return m
}

// again repeats a create: with the id it had, and with those of new operations.
func (c *check) again(m *made, changes ...bench.Change) {
	operations := []*bench.Operation{m.create}
	for range c.Repeat {
		operations = append(operations, m.Operation(create))
	}
	for _, o := range operations {
		c.Step("asked again (operation "+o.ID+")", func() {
			if id := c.Created(o.Run(changes...)); id != m.providerID {
				c.Failf("it returned %s, where there was %s already", id, m.providerID)
			}
		})
	}
	m.One(m.providerID)
}

func checkRecover(c *check) {
	c.again(c.first(), recovering)
	fresh := c.NewMachine() // with nothing to be found
	c.Step("with recover and nothing to be found", func() { fresh.One(c.Created(fresh.Do(create, recovering))) })
}

// listed returns an instance in the list; nil if it is not there.
func (c *check) listed(providerID string) *driverv1.Instance {
	for _, i := range c.List() {
		if i.GetProviderId() == providerID {
			return i
		}
	}

	return nil
}

// rival asks for the instance of another machine of a name that is taken, and reports whether the cloud minds.
func (c *check) rival() (taken bool) {
	m := c.first()
	result := m.Namesake().Do(create)
	taken = result.GetStatus().GetCode() == driverv1.Code_CODE_ALREADY_EXISTS
	if !taken {
		c.Want(ok, "another machine of a name that is taken", result)
		if id := result.GetCreate().GetInstance().GetProviderId(); id == m.providerID {
			c.Failf("another machine of the same name was given the instance %s of the first", id)
		}
	}
	i := c.listed(m.providerID)
	if i == nil || i.GetMachineUid() != "" && i.GetMachineUid() != m.GetUid() {
		c.Failf("instance %s was not left alone when another machine of its name was asked for", m.providerID)
	}

	return taken
}

func checkUniqueName(c *check) {
	identifies(c, driverv1.CreateIdentity_CREATE_IDENTITY_UNIQUE_NAME, "unique_name")
	if !c.rival() {
		c.Failf("the cloud let two machines of one name have instances: the name is not what identifies a create")
	}
}

func identifies(c *check, by driverv1.CreateIdentity, name string) {
	if c.Session().GetCreateIdentity() != by {
		c.Unboundf("binds drivers whose create identity is %s", name)
	}
}

func checkToken(c *check) {
	identifies(c, driverv1.CreateIdentity_CREATE_IDENTITY_TOKEN, "token")
	if c.Cloud.Tokens == nil {
		c.Skipf("only the cloud sees the token (Config.Cloud.Tokens)")
	}
	m := c.first()
	tokens, err := c.Cloud.Tokens(c.Context(), m.GetName())
	c.Must(err)
	if !slices.Equal(tokens, []string{m.create.ID}) {
		c.Failf("the cloud was given tokens %q, where the operation is %q", tokens, m.create.ID)
	}
}

func checkCreatedForGood(c *check) {
	m := c.firstNamed()
	m.One(m.providerID)
	c.found(m)
}

// found fails unless status returns the machine's instance, initialized or not.
func (c *check) found(m *made) {
	if !c.Plain && !c.Serves(driverv1.Operation_OPERATION_STATUS) {
		return // list has shown it
	}
	result := m.StatusResult()
	switch code := result.GetStatus().GetCode(); {
	case c.Plain && code == driverv1.Code_CODE_UNIMPLEMENTED:
	case code != ok && code != driverv1.Code_CODE_UNINITIALIZED:
		c.Failf("status was answered %s", bench.Said(result))
	default:
		if id := result.GetInstanceStatus().GetInstance().GetProviderId(); id != m.providerID {
			c.Failf("status returned instance %q, not %q", id, m.providerID)
		}
	}
}

// checkDeadline gives a create less time than any cloud needs, and one less than
// the class can be fetched in.
func checkDeadline(c *check) {
	for _, timeout := range []time.Duration{time.Millisecond, 100 * time.Millisecond} {
		release := func() {}
		if timeout > time.Millisecond {
			release = c.HoldFetches()
		}
		m := c.NewMachine()
		result := m.Do(create, within(timeout))
		release()
		if result.GetStatus().GetCode() == ok || result.GetOutcomeUnknown() {
			continue // it was quicker, or the cloud was at it already
		}
		c.Want(driverv1.Code_CODE_DEADLINE_EXCEEDED, "a create with "+timeout.String()+" to do it in", result)
		c.Pause(bench.Silence) // for what must not start
		m.None("the deadline had passed before anything started")
	}
}

// checkUID looks for an instance by the machine's uid alone.
func checkUID(c *check) {
	m := c.first()
	if i := c.listed(m.providerID); i != nil && i.GetMachineUid() == m.GetUid() {
		return
	}
	if id := m.Namesake().StatusResult().GetInstanceStatus().GetInstance().GetProviderId(); id == m.providerID {
		c.Failf("list does not show the uid of instance %s, and status gives it to another machine of its name", id)
	}
	c.found(m)
}

func checkOwner(c *check) {
	m := c.first()
	i := c.listed(m.providerID)
	if i == nil {
		c.Failf("list does not hold instance %s", m.providerID)
	}
	if i.GetOwner() != bench.OwnerUID {
		c.Failf("instance %s was made for owner %q, and is listed with owner %q", m.providerID, bench.OwnerUID, i.GetOwner())
	}
}

func checkInitialize(c *check) {
	c.Implements(driverv1.Operation_OPERATION_INITIALIZE)
	m := c.firstNamed()
	for range c.Repeat {
		m.Initialize()
	}
	m.One(m.providerID)
}
