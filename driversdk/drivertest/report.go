package drivertest

import (
	"encoding/xml"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// A Verdict is what came of checking a clause.
type Verdict string

// The verdicts.
const (
	Passed   Verdict = "pass"
	Failed   Verdict = "FAIL"
	Excepted Verdict = "except" // the driver breaks the clause, and an exception says why
	Skipped  Verdict = "skip"
	Manager  Verdict = "mcm" // the clause binds the manager alone
)

// A Finding is what came of one clause.
type Finding struct {
	Clause

	Verdict Verdict
	// Detail says what is wrong, or why the clause was not checked.
	Detail string
	// Unbound: it was skipped because it does not bind this driver; other skipped
	// ones do, and could not be checked.
	Unbound bool
	// Exception is the clause's; nil if it has none.
	Exception *Exception
	Took      time.Duration
}

// String is one line of a report, or more where a failure needs them.
func (f Finding) String() string {
	lines := []string{fmt.Sprintf("%-6s  %-14s  %s", f.Verdict, f.ID, f.Says)}
	if f.Detail != "" {
		lines = append(lines, strings.Split(f.Detail, "\n")...)
	}
	switch e := f.Exception; {
	case e == nil:
	case f.Verdict == Excepted:
		lines = append(lines, "excepted: "+e.Why, "the cost: "+e.Cost)
	case f.Verdict == Passed:
		lines = append(lines, "it passed: its exception is not needed")
	}

	return strings.Join(lines, "\n                        ")
}

// A Report is what came of checking a driver.
type Report struct {
	Provider string
	// Replica is the one that was looked at; empty for a plain driver.
	Replica string
	Plain   bool
	// Findings are in the order of the checks.
	Findings []Finding
	// Left says what could not be cleaned up; empty when nothing was left.
	Left string
	// Notes are what a person should know and what fails no run, such as creates whose outcome is unknown.
	Notes []string
	Took  time.Duration
}

// OK reports whether the driver keeps the contract as far as it was checked, but for its
// exceptions, and nothing was left behind.
func (r *Report) OK() bool { return r.Left == "" && len(r.Of(Failed)) == 0 }

// Of returns the findings with a verdict, by clause id.
func (r *Report) Of(v Verdict) []Finding {
	var found []Finding
	for _, f := range r.Findings {
		if f.Verdict == v {
			found = append(found, f)
		}
	}
	slices.SortFunc(found, func(a, b Finding) int { return compareIDs(a.ID, b.ID) })

	return found
}

// Unneeded returns the findings of clauses that passed and have an exception. They are no fault, as an exception permits and
// does not demand: a list may serve several drivers. Remove it if it serves this driver alone, as it would hide a later fault.
func (r *Report) Unneeded() []Finding {
	return slices.DeleteFunc(r.Of(Passed), func(f Finding) bool { return f.Exception == nil })
}

// WriteSummary writes what a reader of the findings still wants to know: how many
// clauses there are of each verdict, what is wrong, and what was not looked at and why.
func (r *Report) WriteSummary(w io.Writer) error {
	kind := "full replica " + r.Replica
	if r.Plain {
		kind = "plain driver"
	}
	var text strings.Builder
	fmt.Fprintf(&text, "\n%s (%s): %d clauses passed, %d failed, %d excepted, %d skipped, %d bind mcm, in %s\n", r.Provider, kind,
		len(r.Of(Passed)), len(r.Of(Failed)), len(r.Of(Excepted)), len(r.Of(Skipped)), len(r.Of(Manager)), r.Took.Round(100*time.Millisecond))
	r.writeSkipped(&text, "do not bind this driver", true)
	r.writeSkipped(&text, "bind it and could not be checked, which strict counts as broken unless they may be skipped", false)
	if left := len(clauses()) - len(r.Findings); left > 0 {
		fmt.Fprintf(&text, "%d more clauses were not asked for, or not reached\n", left)
	}
	if idle := r.Unneeded(); len(idle) > 0 {
		fmt.Fprintf(&text, "%d clauses passed and need no exception: %s\n", len(idle), joinIDs(idle))
	}
	for _, f := range slices.Concat(r.Of(Excepted), r.Of(Failed)) {
		fmt.Fprintf(&text, "%s\n", f)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&text, "note: %s\n", note)
	}
	if r.Left != "" {
		fmt.Fprintf(&text, "NOT CLEANED UP: %s\n", r.Left)
	}
	if _, err := io.WriteString(w, text.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}

	return nil
}

func joinIDs(findings []Finding) string {
	ids := make([]string, len(findings))
	for n, f := range findings {
		ids[n] = f.ID
	}

	return strings.Join(ids, " ")
}

// writeSkipped writes which clauses were skipped, those with one reason on one line.
func (r *Report) writeSkipped(text *strings.Builder, what string, unbound bool) {
	var reasons []string
	ids := map[string][]string{}
	n := 0
	for _, f := range r.Of(Skipped) {
		if f.Unbound != unbound {
			continue
		}
		n++
		if ids[f.Detail] == nil {
			reasons = append(reasons, f.Detail)
		}
		ids[f.Detail] = append(ids[f.Detail], f.ID)
	}
	if n == 0 {
		return
	}
	fmt.Fprintf(text, "%d skipped clauses %s:\n", n, what)
	for _, reason := range reasons {
		fmt.Fprintf(text, "  %s: %s\n", strings.Join(ids[reason], " "), reason)
	}
}

// The elements of JUnit's format, as CI systems read it.
type (
	junitSuite struct {
		XMLName  xml.Name    `xml:"testsuite"`
		Name     string      `xml:"name,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Skipped  int         `xml:"skipped,attr"`
		Time     string      `xml:"time,attr"`
		Cases    []junitCase `xml:"testcase"`
		Output   string      `xml:"system-out,omitempty"`
	}
	junitCase struct {
		Class   string     `xml:"classname,attr"`
		Name    string     `xml:"name,attr"`
		Time    string     `xml:"time,attr"`
		Failure *junitText `xml:"failure,omitempty"`
		Skipped *junitText `xml:"skipped,omitempty"`
	}
	junitText struct {
		Message string `xml:"message,attr"`
	}
)

// WriteJUnit writes the report in the XML format that CI systems read.
func (r *Report) WriteJUnit(w io.Writer) error {
	suite := junitSuite{Name: "driver-conformance." + r.Provider, Time: seconds(r.Took), Output: strings.Join(r.Notes, "\n")}
	for _, f := range r.Findings {
		c := junitCase{Class: suite.Name, Name: f.ID + " " + f.Says, Time: seconds(f.Took)}
		switch f.Verdict {
		case Failed:
			c.Failure = &junitText{f.Detail}
			suite.Failures++
		case Excepted:
			c.Skipped = &junitText{fmt.Sprintf("excepted: %s; the cost: %s; found: %s", f.Exception.Why, f.Exception.Cost, f.Detail)}
			suite.Skipped++
		case Skipped, Manager:
			c.Skipped = &junitText{f.Detail}
			suite.Skipped++
		case Passed:
		}
		suite.Cases = append(suite.Cases, c)
	}
	if r.Left != "" {
		suite.Cases = append(suite.Cases, junitCase{Class: suite.Name, Name: "cleaned up", Failure: &junitText{r.Left}})
		suite.Failures++
	}
	suite.Tests = len(suite.Cases)
	text, err := xml.MarshalIndent(suite, "", "  ")
	if err != nil {
		return fmt.Errorf("write JUnit: %w", err)
	}
	if _, err := fmt.Fprintf(w, "%s%s\n", xml.Header, text); err != nil {
		return fmt.Errorf("write JUnit: %w", err)
	}

	return nil
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()) }
