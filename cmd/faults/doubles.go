package main

import (
	"fmt"
	"time"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// oldestLook is how long an instance may have been there when another one is made for
// its machine, where nothing identifies a create.
//
// Each attempt looks for itself, not before it has begun, and sends its one create
// before its deadline, operationTimeout after that; whatever earlier attempts have seen
// does not count. The link may delay what it has sent, and the cloud makes the instance
// at the end of a slow call. The look shows what was there listLag before it. The rest
// is for a busy machine, on which a process is late to send what it was allowed to.
const oldestLook = operationTimeout + mostDelay + slowCall + listLag + 5*time.Second

// doubles returns what a cloud's log says of instances that were made for a machine
// which had one, and must not have been: so many of each machine.
//
// With a token or a unique name that is every one, whatever was collected later.
// Where nothing identifies a create, what is promised is that it looks first: a second
// instance beside one that no look can have missed is wrong. Others are collected, and
// in the end there must be none; surplus is how many were and had to be, so that a run
// shows whether it has come to that at all.
func doubles(log []cloudapi.LogEntry) (found []finding, surplus int) {
	type machine struct {
		made, wrong, beside int
		live                map[string]time.Time // when they came to be, by id
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
		surplus += max(0, m.beside-max(0, len(m.live)-1)) // the rest is still there
	}
	return found, surplus
}

// wrong tells why the instance of an entry must not have been made, which is the nth
// of its machine, beside those that are there; empty when it may.
func wrong(e cloudapi.LogEntry, nth int, there map[string]time.Time) string {
	if e.Identity != cloudapi.IdentityNone {
		if nth > 1 {
			return fmt.Sprintf("is number %d, with identity %s", nth, e.Identity)
		}
		return ""
	}
	for id, since := range there {
		if age := e.Time.Sub(since); age > oldestLook {
			return fmt.Sprintf("was made beside %s, which had been there for %s", id, age.Round(time.Millisecond))
		}
	}
	return ""
}
