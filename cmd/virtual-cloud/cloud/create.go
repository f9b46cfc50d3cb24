package cloud

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// creation is one running create.
type creation struct {
	req      cloudapi.CreateRequest // without user data
	checksum string                 // of the user data
	entry    cloudapi.LogEntry      // common fields of its log entries
}

// Create creates an instance, or returns the one of the request's idempotency token,
// with existing true. It takes the create latency.
func (c *Cloud) Create(req cloudapi.CreateRequest) (_ cloudapi.Instance, existing bool, _ error) {
	if req.Identity == "" {
		req.Identity = c.identity
	}
	checksum := sha256.Sum256(req.UserData)
	req.UserData = nil
	w := &creation{req: req, checksum: hex.EncodeToString(checksum[:]), entry: cloudapi.LogEntry{
		Op: cloudapi.OpCreate, Name: req.Name, Token: req.IdempotencyToken, Identity: req.Identity,
		MachineUID: req.Tags[cloudapi.TagMachineUID],
	}}
	if err := checkCreate(&req); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()

		return cloudapi.Instance{}, false, c.refuse(w.entry, err)
	}

	return c.create(w)
}

func checkCreate(req *cloudapi.CreateRequest) *cloudapi.Error {
	var missing string
	switch "" {
	case req.Name:
		missing = "name"
	case req.MachineType:
		missing = "machineType"
	case req.Region:
		missing = "region"
	case req.IdempotencyToken:
		if req.Identity == cloudapi.IdentityToken {
			missing = "idempotencyToken"
		}
	}
	if missing != "" {
		return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "%s is missing", missing)
	}
	if err := checkIdentity(req.Identity); err != nil {
		return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "identity: %v", err)
	}

	return nil
}

func (c *Cloud) create(w *creation) (_ cloudapi.Instance, existing bool, _ error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.record(with(w.entry, cloudapi.EventBegin)); err != nil {
		return cloudapi.Instance{}, false, err
	}
	found, mine, err := c.claim(w)
	if err != nil {
		return cloudapi.Instance{}, false, c.refuse(w.entry, err)
	}
	if found != nil {
		entry := with(w.entry, cloudapi.EventExisting)
		entry.ID = found.ID
		c.note(entry)
		c.stats.Existing++

		return found.Instance, true, nil
	}
	made, err := c.runCreate(w, mine)
	mine.settle(c, made)
	if err != nil {
		return cloudapi.Instance{}, false, c.refuse(w.entry, err)
	}

	return made.Instance, false, nil
}

// runCreate waits for the create latency, and creates the instance before or after that,
// as the knobs say. c.mu is held, but not while it waits.
func (c *Cloud) runCreate(w *creation, mine *claim) (*instance, *cloudapi.Error) {
	// Running creates count against the quota; those with an instance count once.
	unborn := c.stats.ConcurrentCreates - c.bornEarly
	if quota := c.knobs.Quota; quota > 0 && c.stats.Live+unborn >= quota {
		return nil, refusal(http.StatusForbidden, cloudapi.CodeQuotaExceeded,
			"the quota of %d instances is used up; delete some, or raise the knob quota", quota)
	}
	c.stats.ConcurrentCreates++
	c.stats.MaxConcurrentCreates = max(c.stats.MaxConcurrentCreates, c.stats.ConcurrentCreates)
	defer func() { c.stats.ConcurrentCreates-- }()

	latency := time.Duration(c.knobs.CreateLatency)
	var made *instance
	if c.knobs.CreateEffect == cloudapi.EffectStart {
		var err *cloudapi.Error
		if made, err = c.addInstance(w); err != nil {
			return nil, err
		}
		c.bornEarly++
		defer func() { c.bornEarly-- }()
		mine.settle(c, made) // a repetition of the create need not wait for its answer
	}
	h := c.hold(w)
	c.mu.Unlock()
	err := h.wait(c)
	if err == nil {
		err = c.pause(latency)
	}
	c.mu.Lock()
	switch {
	case made != nil:
		return made, nil // a shutdown does not undo it
	case err != nil:
		return nil, err
	}

	return c.addInstance(w)
}

// addInstance adds the create's instance. c.mu is held.
func (c *Cloud) addInstance(w *creation) (*instance, *cloudapi.Error) {
	id, n := newID(), uint32(c.stats.Created)+1
	i := &instance{token: w.req.IdempotencyToken, Instance: cloudapi.Instance{
		ID: id, Name: w.req.Name, MachineType: w.req.MachineType, Region: w.req.Region, Zone: w.req.Zone,
		Tags: w.req.Tags, UserDataSHA256: w.checksum,
		State: cloudapi.StatePending, CreatedAt: time.Now().UTC(), NodeName: w.req.Name,
		ProviderID: "virtual:///" + w.req.Region + "/" + id,
		Addresses: []cloudapi.Address{
			{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.%d", byte(n>>16), byte(n>>8), byte(n))},
			{Type: "Hostname", Address: w.req.Name},
		},
	}}
	entry := with(w.entry, cloudapi.EventCreated)
	entry.ID = id
	if err := c.record(entry); err != nil {
		return nil, err
	}
	if byUID, byName := duplicateOf(c.order, i); byUID || byName {
		c.stats.DuplicatesEver++
	}
	c.stats.Created++
	c.stats.Live++
	c.instances[id] = i
	c.order = append(c.order, i)
	i.boot = time.AfterFunc(time.Duration(c.knobs.BootDelay), func() { c.booted(i) })

	return i, nil
}

// booted is called by the instance's timer.
func (c *Cloud) booted(i *instance) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i.State != cloudapi.StatePending || c.ctx.Err() != nil {
		return
	}
	i.State = cloudapi.StateRunning
	c.note(cloudapi.LogEntry{
		Op: cloudapi.LogBoot, Event: cloudapi.EventRunning, Name: i.Name, ID: i.ID,
		MachineUID: i.Tags[cloudapi.TagMachineUID],
	})
	c.listener.Booted(i.Instance)
}

func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails

	return "i-" + hex.EncodeToString(b[:])
}

// with returns a log entry with an event.
func with(entry cloudapi.LogEntry, event string) cloudapi.LogEntry {
	entry.Event = event

	return entry
}
