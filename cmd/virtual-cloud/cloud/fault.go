package cloud

import (
	"cmp"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// strike returns the fault that a call meets, and nil without one. A fault that
// stops the call is logged here, one that comes after by [Cloud.struck].
func (c *Cloud) strike(op, name string) *cloudapi.Fault {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n, f := range c.knobs.Faults {
		if !applies(&f, op, name) {
			continue
		}
		if f.Next > 0 {
			faults := slices.Clone(c.knobs.Faults)
			faults[n].Next--
			if faults[n].Next == 0 {
				faults = slices.Delete(faults, n, n+1)
			}
			c.knobs.Faults = faults
		}
		c.stats.Faults++
		if !f.After {
			c.noteFault(&f, cloudapi.LogEntry{Op: op, Name: name, Detail: "before"})
		}

		return &f
	}

	return nil
}

// struck logs a fault that hits a call which did its work.
func (c *Cloud) struck(f *cloudapi.Fault, entry cloudapi.LogEntry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	entry.Detail = "after"
	c.noteFault(f, entry)
}

func (c *Cloud) noteFault(f *cloudapi.Fault, entry cloudapi.LogEntry) {
	entry.Event = cloudapi.EventFault
	if f.Drop {
		entry.Code = cloudapi.CodeDropped
	} else {
		e := faultError(f)
		entry.Status, entry.Code = e.Status, e.Code
	}
	c.note(entry)
}

func applies(f *cloudapi.Fault, op, name string) bool {
	return (f.Operation == "*" || f.Operation == op) &&
		(f.Name == "" || matches(f.Name, name)) &&
		(f.Probability == 0 || rand.Float64() < f.Probability)
}

func faultError(f *cloudapi.Fault) *cloudapi.Error {
	err := refusal(cmp.Or(f.Status, http.StatusInternalServerError), cmp.Or(f.Code, cloudapi.CodeInternal),
		"%s", cmp.Or(f.Message, "a fault rule says so"))
	err.RetryAfter = time.Duration(f.RetryAfter)

	return err
}
