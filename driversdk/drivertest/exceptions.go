package drivertest

import (
	"fmt"
	"slices"
)

// validExceptions returns what is wrong with a list of exceptions.
func validExceptions(list []Exception) (errs []error) {
	seen := map[string]bool{}
	for n, e := range list {
		switch {
		case e.Clause == "":
			errs = append(errs, fmt.Errorf("exception %d names no clause", n+1))
		case !isClause(e.Clause):
			errs = append(errs, fmt.Errorf("exception %d names the unknown clause %q", n+1, e.Clause))
		case seen[e.Clause]:
			errs = append(errs, fmt.Errorf("clause %s has two exceptions: merge them", e.Clause))
		case e.Why == "" || e.Cost == "":
			errs = append(errs, fmt.Errorf("the exception of clause %s must say why the driver breaks it, and what that costs the operator", e.Clause))
		}
		seen[e.Clause] = true
	}

	return errs
}

// exceptionOf returns a clause's exception; nil if it has none.
func exceptionOf(list []Exception, clause string) *Exception {
	n := slices.IndexFunc(list, func(e Exception) bool { return e.Clause == clause })
	if n < 0 {
		return nil
	}

	return &list[n]
}
