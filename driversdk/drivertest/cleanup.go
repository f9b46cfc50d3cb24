package drivertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// cleanUpLimit bounds what is done once checking has ended, for whatever reason.
const cleanUpLimit = 2 * time.Minute

// cleanUp removes what the machines so far may have, and gives node groups their sizes back. What it cannot do stays for
// the next time.
func (c *check) cleanUp() {
	c.Must(errors.Join(c.Try(c.RemoveMachines), c.Try(c.restoreGroups)))
}

// wantAlive fails if the driver does not answer a list, whatever the answer, or if what could not be cleaned up is still there.
func (c *check) wantAlive(cleaned error) {
	if err := c.Try(func() { c.ListResult() }); err != nil {
		c.Failf("the driver answers no more: %w: read its log", err)
	}
	if cleaned == nil {
		return
	}
	c.Settle()
	stays := true
	_ = c.Try(func() { stays = c.Stays() }) // a list that fails shows nothing
	if stays || c.suite.groups.touched {
		c.Must(cleaned)
	}
}

// finally removes what is left, also when checking was interrupted, and reports what a person has to do about the rest.
func (s *suite) finally(ctx context.Context, report *Report) {
	limit := cleanUpLimit + 2*(s.bench.Timeout+s.bench.LateInstance+s.bench.Session().GetSettleTime().AsDuration())
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errors.New("cleaning up took too long"))
	defer cancel()
	removed := s.run(ctx, func(c *check) { c.RemoveMachines() })
	restored := s.run(ctx, (*check).restoreGroups)
	left := s.run(ctx, func(c *check) { c.RemoveLeftovers() })
	if removed != nil && left == nil && report.listVouches() {
		report.Notes = append(report.Notes, fmt.Sprintf("a delete failed, and then the list showed that nothing is left: %v", removed))
		removed = nil
	}
	if err := errors.Join(removed, restored, left); err != nil {
		report.Left = err.Error()
	}
	if names := s.bench.Unclear(); len(names) > 0 {
		report.Notes = append(report.Notes, fmt.Sprintf("creates of %d machines have an unknown outcome: an instance may still come, as the suite waited "+
			"only %s for it (Config.LateInstance, --late-instance). Look in the cloud for machines named %s, and delete them",
			len(names), s.bench.LateInstance, strings.Join(names, ", ")))
	}
}

// listVouches reports whether an empty list means that there is no instance: the driver's list was not seen to leave one out.
func (r *Report) listVouches() bool {
	return !slices.ContainsFunc(r.Findings, func(f Finding) bool {
		return f.ID == "LIST-2" && (f.Verdict == Failed || f.Verdict == Excepted)
	})
}
