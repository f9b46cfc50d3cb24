package drivertest

import (
	"context"
	"fmt"
	"slices"
)

// A Clause is one MUST of the contract.
type Clause struct {
	// ID is how the contract calls it, such as "CREATE-1".
	ID string
	// Says is its gist.
	Says string
	// Manager: it binds the manager alone, and drivers cannot break it.
	Manager bool

	who   party
	check func(context.Context, *suite) error
}

// A party is the kind of drivers that a clause binds.
type party int

const (
	all     party = iota // full replicas and plain drivers
	full                 // replicas that send sessions
	plainly              // drivers that only answer
	groups               // replicas that serve node groups
	nobody               // the manager only
)

// A skip says why a clause was not checked.
type skip struct {
	reason  string
	unbound bool // it does not bind the driver
}

func (s skip) Error() string { return s.reason }

// skipf is for a clause that binds the driver, and could not be looked at.
func skipf(format string, args ...any) error { return skip{reason: fmt.Sprintf(format, args...)} }

// unboundf is for a clause that does not bind the driver, by what it says of itself.
func unboundf(format string, args ...any) error {
	return skip{reason: fmt.Sprintf(format, args...), unbound: true}
}

// byProcess says what lets a driver be stopped and started.
const byProcess = "(Config.Process, or its command line after -- of driver-conformance)"

// Clauses returns every clause of the contract, by id.
func Clauses() []Clause {
	all := slices.Clone(clauses())
	slices.SortFunc(all, func(a, b Clause) int { return compareIDs(a.ID, b.ID) })

	return all
}

func clauseOf(id string) (Clause, bool) {
	for _, c := range clauses() {
		if c.ID == id {
			return c, true
		}
	}

	return Clause{}, false
}

// clauses stand in the order of their checks. What leaves traces, ends the process,
// or is only seen once the others have been checked, comes late.
func clauses() []Clause {
	return slices.Concat(messageClauses, cloudClauses, attemptClauses, fetchClauses, claimClauses, groupClauses, witnessClauses, lifeClauses)
}

var messageClauses = []Clause{
	{ID: "SUBJECT-1", Says: "listens on the provider's driver tree in queue group driver", who: full, check: checkQueue},
	{ID: "SUBJECT-2", Says: "listens on its replica tree", who: full, check: checkReplicaTree},
	{ID: "SUBJECT-3", Says: "a plain driver answers each request with one result, in queue group driver", who: plainly, check: checkQueue},
	{ID: "SUBJECT-4", Says: "answers below the provider's reply tree only", check: checkReplyTree},
	{ID: "ENV-1", Says: "JSON goes with the header Content-Type: application/json", check: checkContentType},
	{ID: "ENV-2", Says: "answers JSON with JSON", check: checkJSON},
	{ID: "ENV-3", Says: "sends no empty frame", check: checkEmpty},
	{ID: "ENV-4", Says: "ignores unknown fields and answers unknown bodies with Unimplemented", check: checkUnknown},
	{ID: "ENV-6", Says: "refuses mutations of a lower epoch with Aborted, outcome unknown, and serves reads", who: full, check: checkEpoch},
	{ID: "HELLO-2", Says: "answers busy while the manager that leads speaks none of its versions of the contract", who: full, check: checkProtocol},
	{ID: "ENV-8", Says: "answers stale mutations busy", check: checkStale},
}

var cloudClauses = []Clause{
	{ID: "CREATE-1", Says: "Create is idempotent", check: checkCreateTwice},
	{ID: "ENV-9", Says: "with recover, finds what an earlier attempt made", check: checkRecover},
	{ID: "CREATE-2", Says: "an instance of the name that belongs to another machine is left alone", check: checkNamesake},
	{ID: "CREATE-3", Says: "success means that the instance was accepted for good", check: checkCreatedForGood},
	{ID: "CREATE-4", Says: "nothing is started after the deadline", check: checkDeadline},
	{ID: "IDENTITY-1", Says: "passes the operation id to the cloud as idempotency token", who: full, check: checkToken},
	{ID: "IDENTITY-2", Says: "names the instance by the machine alone", who: full, check: checkUniqueName},
	{ID: "MACHINE-1", Says: "records the machine's uid with the instance", check: checkUID},
	{ID: "OWNER-1", Says: "records the owner with the instance, and lists it", check: checkOwner},
	{ID: "INITIALIZE-1", Says: "Initialize is idempotent", check: checkInitialize},
	{ID: "STATUS-1", Says: "Status changes nothing", check: checkStatusChangesNothing},
	{ID: "STATUS-2", Says: "Status of an absent instance is NotFound", check: checkStatusAbsent},
	{ID: "STATUS-3", Says: "Status of several instances is OutOfRange", check: checkStatusSeveral},
	{ID: "STATUS-4", Says: "Status of an instance that is not initialized is Uninitialized", check: checkStatusUninitialized},
	{ID: "LIST-1", Says: "List changes nothing", check: checkListChangesNothing},
	{ID: "LIST-2", Says: "List contains what was made", check: checkListContains},
	{ID: "LIST-3", Says: "List contains nothing of other control planes", check: checkListForeign},
	{ID: "DELETE-1", Says: "Delete of an absent instance succeeds", check: checkDeleteAbsent},
	{ID: "DELETE-2", Says: "Delete finds the instance by provider id, else by name and uid", check: checkDeleteFinds},
	{ID: "DELETE-3", Says: "what Delete removed does not come back", check: checkDeleteForGood},
	{ID: "VOLUMEIDS-1", Says: "volumes of other providers are left out", check: checkVolumeIDs},
	{ID: "VALIDATE-1", Says: "Validate changes nothing", check: checkValidate},
	{ID: "VALIDATE-2", Says: "a faulty field is InvalidArgument and named", check: checkFaultyField},
	{ID: "MIGRATECLASS-1", Says: "MigrateClass changes nothing", check: checkMigrateClass},
}

var attemptClauses = []Clause{
	{ID: "RUN-1", Says: "one mutation of a machine at a time", who: full, check: checkOneAtATime},
	{ID: "RUN-2", Says: "what runs already is not run again; its frames go to who asked last", who: full, check: checkAttach},
	{ID: "RESULT-2", Says: "keeps a mutation's result until it is acknowledged", who: full, check: checkKept},
	{ID: "ACCEPT-1", Says: "says at once that it has a mutation", who: full, check: checkAccepts},
	{ID: "ACCEPT-2", Says: "says so of a read that takes its time", who: full, check: checkAcceptsSlowRead},
	{ID: "BUSY-1", Says: "queues nothing that it has no slot for", who: full, check: checkSlots},
	{ID: "CANCEL-1", Says: "a cancelled operation still gets its result", who: full, check: checkCancel},
	{ID: "OPS-1", Says: "does not take an attempt later that it said it does not hold, or that it is fenced", who: full, check: checkDenial},
	{ID: "RESULT-3", Says: "says when it does not know the outcome", check: checkOutcomeUnknown},
	{ID: "RESULT-5", Says: "does not know it while an earlier create may run", who: full, check: checkDoubted},
	{ID: "RESULT-6", Says: "says when that is all that it does not know", who: full, check: checkNoEffect},
}

var fetchClauses = []Clause{
	{ID: "REF-1", Says: "fetches the version that a request names", check: checkVersions},
	{ID: "CHANGED-1", Says: "forgets what has changed", who: full, check: checkChanged},
	{ID: "FETCH-2", Says: "refuses a secret with another nonce", check: checkNonce},
	{ID: "FETCH-3", Says: "opens seals with the key that it trusts", check: checkForged},
	{ID: "FETCH-5", Says: "what a fetch was answered is not told of an instance", check: checkRefused},
	{ID: "FETCH-4", Says: "unsealed answers need the operator's leave and TLS", Manager: true, who: nobody},
}

var claimClauses = []Clause{
	{ID: "CLAIM-1", Says: "claims before it accepts", who: full, check: checkClaims},
	{ID: "CLAIM-2", Says: "expects the sequence that the request names", who: full, check: checkTerms},
	{ID: "CLAIM-3", Says: "is busy when the claim is refused", who: full, check: checkRefusedClaim},
	{ID: "CLAIM-4", Says: "calls no cloud without a claim", who: full, check: checkNoClaimNoCall},
	{ID: "CLAIM-5", Says: "puts the outcome in the place of its own claim only", who: full, check: checkOutcomeStored},
	{ID: "CLAIM-6", Says: "refuses a mutation without terms for its claim", who: full, check: checkNoTerms},
	{ID: "FENCE-1", Says: "starts nothing before its claim says so, in the place of its own", who: full, check: checkFence},
	{ID: "FENCE-2", Says: "starts nothing by an acknowledgement that came too late", who: full, check: checkLate},
	{ID: "FENCE-3", Says: "cuts off no call at the cloud for it; asked for again, its result counts once it is stored", who: full, check: checkFencedCall},
	{ID: "RESULT-4", Says: "does not keep a result that it does not know", who: full, check: checkUnknownNotKept},
}

// groupClauses are those of proto/machinebus/nodegroup/v1.
var groupClauses = []Clause{
	{ID: "GROUP-1", Says: "listens on the provider's tree of node groups in queue group driver", who: groups, check: checkGroupQueue},
	{ID: "GROUP-2", Says: "answers each request about node groups once, with its request id", who: groups, check: checkGroupAnswers},
	{ID: "GROUP-3", Says: "answers them below the provider's reply tree only", who: groups, check: checkGroupReplyTree},
	{ID: "GROUP-4", Says: "node groups outlive the replica", who: groups, check: checkGroupOutlives},
	{ID: "GROUP-5", Says: "ignores unknown fields and answers unknown bodies with Unimplemented", who: groups, check: checkGroupUnknown},
	{ID: "GROUP-6", Says: "refuses a stale resize or delete with Aborted", who: groups, check: checkGroupStale},
	{ID: "GROUP-7", Says: "ids of groups are made of letters, digits and ._/-", who: groups, check: checkGroupsListed("GROUP-7")},
	{ID: "GROUP-8", Says: "0 <= min_size <= max_size, 0 < max_size", who: groups, check: checkGroupsListed("GROUP-8")},
	{ID: "GROUP-9", Says: "instances being deleted do not count for target_size", who: groups, check: checkTargetSize},
	{ID: "GROUP-10", Says: "a template has cpu and memory", who: groups, check: checkGroupsListed("GROUP-10")},
	{ID: "INSTANCES-1", Says: "instances to come are listed", who: groups, check: checkInstancesListed},
	{ID: "INSTANCES-2", Says: "an instance that can join is listed by its provider id", who: groups, check: checkInstanceIDs},
	{ID: "INSTANCES-3", Says: "delete takes an instance for as long as it is listed", who: groups, check: checkDeleteComing},
	{ID: "RESIZE-1", Says: "a resize from another size than the group has is Aborted, in one step", who: groups, check: checkResizeStep},
	{ID: "RESIZE-2", Says: "more than max_size is OutOfRange", who: groups, check: checkResizeAbove},
	{ID: "RESIZE-3", Says: "a resize takes no instance that has come: FailedPrecondition", who: groups, check: checkResizeDown},
	{ID: "RESIZE-4", Says: "a resize that is asked for again is not done again", who: groups, check: checkResizeAgain},
	{ID: "REMOVE-1", Says: "removes the named instances and none else, all of them or none", who: groups, check: checkRemoveNamed},
	{ID: "REMOVE-2", Says: "one that is gone or going does not lower the target size once more", who: groups, check: checkRemoveAgain},
	{ID: "REMOVE-3", Says: "an instance of another group is InvalidArgument", who: groups, check: checkRemoveForeign},
	{ID: "REMOVE-4", Says: "a target size below min_size is FailedPrecondition", who: groups, check: checkRemoveBelow},
}

// witnessClauses are held against everything that was seen meanwhile.
var witnessClauses = []Clause{
	{ID: "HELLO-1", Says: "sends a session at once when it hears of a new mcm", who: full, check: checkHello},
	{ID: "ENV-5", Says: "frames carry operation id and attempt", check: checkWitnessed("ENV-5")},
	{ID: "ENV-7", Says: "everything it sends carries the replica", who: full, check: checkWitnessed("ENV-7")},
	{ID: "INSTANCE-1", Says: "instances have a provider id", check: checkWitnessed("INSTANCE-1")},
	{ID: "INSTANCE-2", Says: "listed instances have a machine name", check: checkWitnessed("INSTANCE-2")},
	{ID: "MACHINE-2", Says: "last_known_state holds no secret", check: checkWitnessed("MACHINE-2")},
	{ID: "PROGRESS-1", Says: "progress holds no secret", check: checkWitnessed("PROGRESS-1")},
	{ID: "STATUSTEXT-1", Says: "texts of errors hold no secret", check: checkTexts},
	{ID: "FETCH-1", Says: "asks to be answered below its own inbox prefix", check: checkInbox},
	{ID: "RESULT-1", Says: "exactly one result for each accepted request", check: checkResults},
}

var lifeClauses = []Clause{
	{ID: "SESSION-1", Says: "sends sessions all the time, also while it drains and when it stops", who: full, check: checkSessions},
	{ID: "SESSION-2", Says: "replica ids are unique, and new with each process", who: full, check: checkReplicaIDs},
}

// compareIDs sorts by name, then by number.
func compareIDs(a, b string) int {
	nameA, numberA := splitID(a)
	nameB, numberB := splitID(b)
	switch {
	case nameA != nameB && nameA < nameB, nameA == nameB && numberA < numberB:
		return -1
	case a == b:
		return 0
	default:
		return 1
	}
}

func splitID(id string) (name string, number int) {
	for n := len(id) - 1; n >= 0; n-- {
		if id[n] == '-' {
			_, _ = fmt.Sscanf(id[n+1:], "%d", &number) // ids of the catalogue all end in a number

			return id[:n], number
		}
	}

	return id, 0
}

// applies tells whether a clause binds the driver that is looked at.
func (s *suite) applies(c Clause) error {
	switch c.who {
	case full:
		if s.plain {
			return unboundf("binds replicas that send sessions, and this is a plain driver")
		}
	case plainly:
		if !s.plain {
			return unboundf("binds plain drivers, and this one sends sessions")
		}
	case groups:
		if !s.servesGroups() {
			return unboundf("the driver serves no node groups: OPERATION_NODE_GROUPS is not among its capabilities")
		}
	case nobody:
		return unboundf("binds the manager")
	case all:
	}

	return nil
}
