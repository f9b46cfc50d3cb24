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
// which had one, and must not have been.
//
// With a token or a unique name that is every one, whatever was collected later.
// Where nothing identifies a create, what is promised is that it looks first: a second
// instance beside one that no look can have missed is wrong. Others are collected, and
// in the end there must be none.
func doubles(log []cloudapi.LogEntry) (wrong []string) {
	made := map[string]int{}
	live := map[string]map[string]time.Time{} // when they came to be, by machine uid and id
	for _, e := range log {
		switch {
		case e.Op == cloudapi.OpCreate && e.Event == cloudapi.EventCreated:
			made[e.MachineUID]++
			if made[e.MachineUID] > 1 && e.Identity != cloudapi.IdentityNone {
				wrong = append(wrong, fmt.Sprintf("instance %d of machine %s (%s), with identity %s", made[e.MachineUID], e.Name, e.MachineUID, e.Identity))
			}
			if e.Identity == cloudapi.IdentityNone {
				wrong = append(wrong, overlooked(e, live[e.MachineUID])...)
			}
			if live[e.MachineUID] == nil {
				live[e.MachineUID] = map[string]time.Time{}
			}
			live[e.MachineUID][e.ID] = e.Time
		case e.Event == cloudapi.EventDeleted:
			delete(live[e.MachineUID], e.ID)
		}
	}
	return wrong
}

// overlooked returns the instances, by when they came to be, that the create of another
// one must have seen.
func overlooked(e cloudapi.LogEntry, there map[string]time.Time) (wrong []string) {
	for id, since := range there {
		if age := e.Time.Sub(since); age > oldestLook {
			wrong = append(wrong, fmt.Sprintf("instance %s of machine %s (%s) was made beside %s, which had been there for %s",
				e.ID, e.Name, e.MachineUID, id, age.Round(time.Millisecond)))
		}
	}
	return wrong
}
