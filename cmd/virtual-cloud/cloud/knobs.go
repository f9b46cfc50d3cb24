package cloud

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"path"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// Knobs returns the current knobs.
func (c *Cloud) Knobs() cloudapi.Knobs {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.knobs
}

// Patch changes the knobs that p names. Held creates continue if the patterns no longer
// match; latencies apply from the next call.
func (c *Cloud) Patch(p cloudapi.KnobsPatch) (cloudapi.Knobs, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := c.knobs
	set(&k.CreateLatency, p.CreateLatency)
	set(&k.DeleteLatency, p.DeleteLatency)
	set(&k.CreateEffect, p.CreateEffect)
	set(&k.BootDelay, p.BootDelay)
	set(&k.ListLag, p.ListLag)
	set(&k.Quota, p.Quota)
	set(&k.RequestsPerSecond, p.RequestsPerSecond)
	set(&k.Hold, p.Hold)
	set(&k.Faults, p.Faults)
	set(&k.NodeNotReady, p.NodeNotReady)
	set(&k.NodeSilent, p.NodeSilent)
	set(&k.NodeRefuse, p.NodeRefuse)
	entry := cloudapi.LogEntry{Op: cloudapi.LogKnobs, Event: cloudapi.EventChanged}
	if err := checkKnobs(&k); err != nil {
		return cloudapi.Knobs{}, c.refuse(entry, invalid(err))
	}
	detail, err := json.Marshal(p)
	if err != nil {
		return cloudapi.Knobs{}, c.refuse(entry, invalid(err))
	}
	entry.Detail = string(detail)
	if err := c.record(entry); err != nil {
		return cloudapi.Knobs{}, err
	}
	c.apply(k)

	return c.knobs, nil
}

func set[T any](knob, value *T) {
	if value != nil {
		*knob = *value
	}
}

// apply sets checked knobs. Their lists are replaced and never written to, so that copies
// may be read without the lock. c.mu is held.
func (c *Cloud) apply(k cloudapi.Knobs) {
	for _, list := range []*[]string{&k.Hold, &k.NodeNotReady, &k.NodeSilent, &k.NodeRefuse} {
		if *list == nil {
			*list = []string{} // not null in JSON
		}
	}
	if k.Faults == nil {
		k.Faults = []cloudapi.Fault{}
	}
	if k.RequestsPerSecond != c.knobs.RequestsPerSecond {
		c.limiter = newLimiter(k.RequestsPerSecond)
	}
	c.knobs = k
	c.releaseIf(func(name string) bool { return !matchesAny(k.Hold, name) })
	c.listener.Knobs(k)
}

// newLimiter returns a limiter that allows one second's calls at once.
func newLimiter(perSecond float64) *rate.Limiter {
	if perSecond == 0 {
		return rate.NewLimiter(rate.Inf, 1)
	}

	return rate.NewLimiter(rate.Limit(perSecond), int(math.Ceil(perSecond)))
}

// admit counts a call and refuses it above the rate limit.
func (c *Cloud) admit(op string) *cloudapi.Error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Requests[op]++
	r := c.limiter.Reserve()
	wait := r.Delay()
	if wait == 0 {
		return nil
	}
	r.Cancel()
	err := refusal(http.StatusTooManyRequests, cloudapi.CodeRateLimited,
		"more than %g requests per second; try again in %s", c.knobs.RequestsPerSecond, wait.Round(time.Millisecond))
	err.RetryAfter = wait
	// Not logged: nothing happened, and there may be very many.
	c.stats.Refused[err.Code]++

	return err
}

func checkKnobs(k *cloudapi.Knobs) error {
	for name, d := range map[string]cloudapi.Duration{
		"createLatency": k.CreateLatency, "deleteLatency": k.DeleteLatency, "bootDelay": k.BootDelay, "listLag": k.ListLag,
	} {
		if d < 0 {
			return fmt.Errorf("knob %s is %s; it cannot be negative", name, time.Duration(d))
		}
	}
	if k.CreateEffect != cloudapi.EffectStart && k.CreateEffect != cloudapi.EffectEnd {
		return fmt.Errorf("knob createEffect is %q; use start or end", string(k.CreateEffect))
	}
	if k.Quota < 0 {
		return errors.New("knob quota is negative; use 0 for no limit")
	}
	// Above, the burst would overflow.
	if !(k.RequestsPerSecond >= 0 && k.RequestsPerSecond <= 1e9) {
		return errors.New("knob requestsPerSecond must be between 0, for no limit, and 1e9")
	}
	for name, patterns := range map[string][]string{
		"hold": k.Hold, "nodeNotReady": k.NodeNotReady, "nodeSilent": k.NodeSilent, "nodeRefuse": k.NodeRefuse,
	} {
		for _, p := range patterns {
			if err := checkPattern("knob "+name, p); err != nil {
				return err
			}
		}
	}
	for n := range k.Faults {
		if err := checkFault(&k.Faults[n]); err != nil {
			return fmt.Errorf("knob faults[%d]: %w", n, err)
		}
	}

	return nil
}

func checkFault(f *cloudapi.Fault) error {
	operations := []string{
		"*", cloudapi.OpCreate, cloudapi.OpGet, cloudapi.OpList, cloudapi.OpDelete, cloudapi.OpInitialize, cloudapi.OpPool,
	}
	switch {
	case !slices.Contains(operations, f.Operation):
		return fmt.Errorf("operation is %q; use one of %q", f.Operation, operations)
	case f.Next < 0:
		return errors.New("next is negative; use 0 for no limit")
	case !(f.Probability >= 0 && f.Probability <= 1):
		return errors.New("probability must be between 0, for always, and 1")
	case f.Status != 0 && (f.Status < 400 || f.Status > 599):
		return fmt.Errorf("status is %d; use one of 400 to 599", f.Status)
	case f.RetryAfter < 0:
		return errors.New("retryAfter is negative")
	}

	return checkPattern("name", f.Name)
}

func checkPattern(what, pattern string) error {
	if _, err := path.Match(pattern, ""); err != nil {
		return fmt.Errorf("%s: %q is not a pattern; use * ? and [a-z] as in path.Match", what, pattern)
	}

	return nil
}

func invalid(err error) *cloudapi.Error {
	return refusal(http.StatusBadRequest, cloudapi.CodeInvalidArgument, "%v", err)
}
