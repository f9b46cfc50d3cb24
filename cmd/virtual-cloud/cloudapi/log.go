package cloudapi

import "time"

// A LogEntry is one thing that happened. Each is written before the call that
// caused it is answered, and the log is never rewritten. Calls that only read
// are not logged, except where a fault hit them.
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

// What is logged besides the API's operations.
const (
	LogStart  = "start"  // a run of the cloud begins; its instances start from none
	LogBoot   = "boot"   // an instance is running
	LogKnobs  = "knobs"  // the knobs were changed
	LogTokens = "tokens" // the API tokens were replaced
)

// The events of a [LogEntry].
const (
	// EventBegin starts a create or delete that may take time. One of created,
	// existing, deleted or refused ends it.
	EventBegin = "begin"
	// EventHeld and EventReleased frame the time that a create is held.
	EventHeld     = "held"
	EventReleased = "released"
	// EventCreated is the moment from which an instance exists, and EventDeleted
	// the one from which it does not.
	EventCreated = "created"
	EventDeleted = "deleted"
	// EventExisting is a call that found its work done: a create returned an
	// instance made earlier, an initialize changed nothing.
	EventExisting = "existing"
	// EventRefused is a call that changed nothing. Status and Code say why.
	EventRefused = "refused"
	// EventFault is a fault rule at work. Detail is "before" when nothing was done
	// and "after" when the call did its work; Code is "dropped" when the
	// connection was closed instead of an answer.
	EventFault = "fault"
	// EventClientGone says that nobody was left to hear the answer.
	EventClientGone = "client_gone"

	EventInitialized = "initialized"
	EventRunning     = "running"
	EventChanged     = "changed"
	EventStarted     = "started"
)

// CodeDropped is the Code of a log entry where the connection was closed.
const CodeDropped = "dropped"

// Stats are figures since the cloud started.
type Stats struct {
	Created int `json:"created"`
	Deleted int `json:"deleted"`
	Live    int `json:"live"` // pending, running and deleting
	Pending int `json:"pending"`
	Running int `json:"running"`
	// Existing counts creates that returned an instance made earlier.
	Existing int `json:"existing"`
	// Duplicates counts live instances of whose machine uid or name there is an
	// older live one.
	Duplicates       int `json:"duplicates"`
	DuplicatesByUID  int `json:"duplicatesByUID"`
	DuplicatesByName int `json:"duplicatesByName"`
	// DuplicatesEver counts those that were duplicates when they were created,
	// deleted ones included.
	DuplicatesEver int `json:"duplicatesEver"`
	// ConcurrentCreates counts creates at work, held ones included.
	ConcurrentCreates    int `json:"concurrentCreates"`
	MaxConcurrentCreates int `json:"maxConcurrentCreates"`
	// Held counts creates that are held.
	Held int `json:"held"`
	// Requests counts calls by operation, refused ones included.
	Requests map[string]int `json:"requests"`
	// Refused counts refusals by code.
	Refused map[string]int `json:"refused"`
	// Faults counts calls that a fault rule hit.
	Faults int `json:"faults"`
	// Hidden counts how often a list left out an instance for its age.
	Hidden int `json:"hidden"`
}
