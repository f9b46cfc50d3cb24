package cloud

import (
	"path"
	"slices"

	"github.com/machinebus/machinebus/cmd/virtual-cloud/cloudapi"
)

// held is a create that waits because of the knob hold.
type held struct {
	entry cloudapi.LogEntry
	freed chan struct{}
}

// hold registers a create if the knob hold matches its name; nil means it may continue.
// c.mu is held.
func (c *Cloud) hold(w *creation) *held {
	if !matchesAny(c.knobs.Hold, w.req.Name) {
		return nil
	}
	h := &held{entry: w.entry, freed: make(chan struct{})}
	c.held = append(c.held, h)
	c.note(with(h.entry, cloudapi.EventHeld))

	return h
}

func (h *held) wait(c *Cloud) *cloudapi.Error {
	if h == nil {
		return nil
	}
	select {
	case <-h.freed:
		return nil
	case <-c.ctx.Done():
		return errShutdown()
	}
}

// Release releases the held creates whose name matches pattern, and returns their
// number.
func (c *Cloud) Release(pattern string) (int, error) {
	if err := checkPattern("name", pattern); err != nil {
		return 0, invalid(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.releaseIf(func(name string) bool { return matches(pattern, name) }), nil
}

// releaseIf releases the held creates for whose name may returns true. c.mu is held.
func (c *Cloud) releaseIf(may func(name string) bool) int {
	before := len(c.held)
	c.held = slices.DeleteFunc(c.held, func(h *held) bool {
		if !may(h.entry.Name) {
			return false
		}
		c.note(with(h.entry, cloudapi.EventReleased))
		close(h.freed)

		return true
	})

	return before - len(c.held)
}

// matches reports whether name matches a pattern that has been checked.
func matches(pattern, name string) bool {
	ok, err := path.Match(pattern, name)

	return err == nil && ok
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, name) })
}
