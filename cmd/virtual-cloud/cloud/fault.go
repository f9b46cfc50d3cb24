package cloud

import (
	"cmp"
	"math/rand/v2"
	"net/http"
	"slices"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// faultFor returns the fault of a call, or nil. It logs a fault that prevents the call;
// [Cloud.logLateFault] logs one that loses its answer.
func (c *Cloud) faultFor(op, name string) *cloudapi.Fault {
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

// logLateFault logs a fault that loses the answer of a call which did its work.
func (c *Cloud) logLateFault(f *cloudapi.Fault, entry cloudapi.LogEntry) {
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
		"%s", cmp.Or(f.Message, "a fault rule made the call fail"))
	err.RetryAfter = time.Duration(f.RetryAfter)

	return err
}
