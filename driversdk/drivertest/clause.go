package drivertest

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A Clause is one MUST of the contract.
type Clause struct {
	// ID is how the contract calls it, such as "CREATE-1".
	ID string
	// Says is its gist.
	Says string
	// Manager: it binds the manager alone, and drivers cannot break it.
	Manager bool

	binds party
	check func(*check)
}

// A party is the kind of drivers that a clause binds.
type party int

const (
	all     party = iota // full replicas and plain drivers
	full                 // replicas that send sessions
	plainly              // drivers that only answer
	groups               // replicas that serve node groups
	manager              // the manager only
)

// Clauses returns every clause of the contract, by id.
func Clauses() []Clause {
	return slices.SortedFunc(slices.Values(clauses()), func(a, b Clause) int { return compareIDs(a.ID, b.ID) })
}

// clauses stand in the order of their checks. What leaves traces, ends the process,
// or is only seen once the others have been checked, comes late.
func clauses() []Clause {
	return slices.Concat(messageClauses, createClauses, readClauses, deleteClauses, attemptClauses, outcomeClauses, fetchClauses,
		claimClauses, fenceClauses, groupClauses, witnessClauses, sessionClauses)
}

// isClause reports whether the contract has a clause of this id.
func isClause(id string) bool {
	return slices.ContainsFunc(clauses(), func(c Clause) bool { return c.ID == id })
}

// compareIDs sorts by name, then by number.
func compareIDs(a, b string) int {
	nameA, numberA := splitID(a)
	nameB, numberB := splitID(b)

	return cmp.Or(cmp.Compare(nameA, nameB), cmp.Compare(numberA, numberB))
}

func splitID(id string) (name string, number int) {
	name, digits, _ := strings.Cut(id, "-")
	number, _ = strconv.Atoi(digits) // ids of the catalogue all end in a number

	return name, number
}

// applies ends the check if a clause does not bind the driver.
func (c *check) applies(clause Clause) {
	switch clause.binds {
	case full:
		if c.Plain {
			c.Unboundf("binds replicas that send sessions, and this is a plain driver")
		}
	case plainly:
		if !c.Plain {
			c.Unboundf("binds plain drivers, and this one sends sessions")
		}
	case groups:
		if !c.Serves(driverv1.Operation_OPERATION_NODE_GROUPS) {
			c.Unboundf("the driver serves no node groups: OPERATION_NODE_GROUPS is not among its capabilities")
		}
	case manager:
		c.Unboundf("binds the manager")
	case all:
	}
}
