package cloudapi

import "time"

// A LogEntry is one event. It is written before the call that caused it is answered, and
// never rewritten. Calls that only read are not logged unless a fault applied.
type LogEntry struct {
	Seq      uint64    `json:"seq"` // from 1 in each run of the cloud, without gaps
	Time     time.Time `json:"time"`
	Op       string    `json:"op"` // one of the Op and Log constants
	Event    string    `json:"event"`
	Name     string    `json:"name,omitempty"`
	ID       string    `json:"id,omitempty"`
	Token    string    `json:"token,omitempty"` // the idempotency token
	Identity Identity  `json:"identity,omitempty"`
	// MachineUID is the value of the tag [TagMachineUID].
	MachineUID string `json:"machineUID,omitempty"`
	Status     int    `json:"status,omitempty"`
	Code       string `json:"code,omitempty"`
	Detail     string `json:"detail,omitempty"`
}

// Events that are logged besides the API's operations.
const (
	LogStart  = "start"  // a run of the cloud begins, without instances
	LogBoot   = "boot"   // an instance is running
	LogKnobs  = "knobs"  // the knobs were changed
	LogTokens = "tokens" // the API tokens were replaced
)

// The events of a [LogEntry].
const (
	// EventBegin starts a create or delete that may take time. One of created,
	// existing, deleted or refused ends it.
	EventBegin = "begin"
	// EventHeld and EventReleased are the start and end of a create's being held.
	EventHeld     = "held"
	EventReleased = "released"
	// An instance exists from EventCreated until EventDeleted.
	EventCreated = "created"
	EventDeleted = "deleted"
	// EventExisting is a call whose work was already done: a create returned an existing
	// instance, an initialize changed nothing.
	EventExisting = "existing"
	// EventRefused is a call that changed nothing. Status and Code are the reason.
	EventRefused = "refused"
	// EventFault is a fault. Detail is "before" if nothing was done, and "after" if the
	// call did its work; Code is "dropped" if the connection was closed.
	EventFault = "fault"
	// EventClientGone means that the client disconnected before the answer.
	EventClientGone = "client_gone"

	EventInitialized = "initialized"
	EventRunning     = "running"
	EventChanged     = "changed"
	EventStarted     = "started"
)

// CodeDropped is the Code of a log entry for a fault that closed the connection.
const CodeDropped = "dropped"

// Stats are figures since the cloud started.
type Stats struct {
	Created int `json:"created"`
	Deleted int `json:"deleted"`
	Live    int `json:"live"` // pending, running and deleting
	Pending int `json:"pending"`
	Running int `json:"running"`
	// Existing counts creates that returned an existing instance.
	Existing int `json:"existing"`
	// Duplicates counts live instances with the machine uid or name of an older live one.
	Duplicates       int `json:"duplicates"`
	DuplicatesByUID  int `json:"duplicatesByUID"`
	DuplicatesByName int `json:"duplicatesByName"`
	// DuplicatesEver counts instances that were duplicates when they were created,
	// including deleted ones.
	DuplicatesEver int `json:"duplicatesEver"`
	// ConcurrentCreates counts running creates, including held ones.
	ConcurrentCreates    int `json:"concurrentCreates"`
	MaxConcurrentCreates int `json:"maxConcurrentCreates"`
	// Held counts creates that are held.
	Held int `json:"held"`
	// Requests counts calls by operation, including refused ones.
	Requests map[string]int `json:"requests"`
	// Refused counts refusals by code.
	Refused map[string]int `json:"refused"`
	// Faults counts calls to which a fault rule applied.
	Faults int `json:"faults"`
	// Hidden counts how often a list omitted an instance because of the list lag.
	Hidden int `json:"hidden"`
}
