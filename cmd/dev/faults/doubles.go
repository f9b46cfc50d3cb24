package main

import (
	"fmt"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// oldestLook is the greatest age of an instance beside which another one may be created
// for its machine, if nothing identifies a create.
//
// Each attempt lists the instances after its start, and sends its only create before
// its deadline, operationTimeout later. The link may delay the request, and the cloud
// creates the instance at the end of a slow call. The list shows the instances that
// existed listLag before it. The rest allows for a busy machine, on which a process
// sends late.
const oldestLook = operationTimeout + mostDelay + slowCall + listLag + 5*time.Second

// doubles returns the findings in a cloud's log about second instances of a machine that
// must not have been created.
//
// With a token or a unique name that is every second instance, even if it was collected
// later. If nothing identifies a create, the driver lists the instances first: a second
// instance is wrong if the list must have shown the first. Others are collected; surplus
// counts them, to show whether the run got into that situation.
func doubles(log []cloudapi.LogEntry) (found []finding, surplus int) {
	type machine struct {
		made, wrong, beside int
		live                map[string]time.Time // time of creation by id
	}
	machines := map[string]*machine{}
	for _, e := range log {
		m := machines[e.MachineUID]
		if m == nil {
			m = &machine{live: map[string]time.Time{}}
			machines[e.MachineUID] = m
		}
		switch {
		case e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated:
			m.made++
			if text := wrong(e, m.made, m.live); text != "" {
				m.wrong++
				found = append(found, foundf(doubled, e.MachineUID, m.wrong, "instance %s of machine %s (%s) %s", e.ID, e.Name, e.MachineUID, text))
			} else if len(m.live) > 0 {
				m.beside++
			}
			m.live[e.ID] = e.Time
		case e.Event == cloudapi.EventDeleted:
			delete(m.live, e.ID)
		}
	}
	for _, m := range machines {
		surplus += max(0, m.beside-max(0, len(m.live)-1)) // the others still exist
	}
	return found, surplus
}

// wrong returns why the instance of an entry, the nth of its machine, must not have been
// created beside the existing ones; "" if it may have been.
func wrong(e cloudapi.LogEntry, nth int, there map[string]time.Time) string {
	if e.Identity != cloudapi.IdentityNone {
		if nth > 1 {
			return fmt.Sprintf("is number %d, with identity %s", nth, e.Identity)
		}
		return ""
	}
	for id, since := range there {
		if age := e.Time.Sub(since); age > oldestLook {
			return fmt.Sprintf("was created although %s had existed for %s", id, age.Round(time.Millisecond))
		}
	}
	return ""
}
