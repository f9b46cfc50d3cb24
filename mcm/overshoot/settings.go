package overshoot

import (
	"errors"
	"fmt"
	"time"
)

// Settings say when sets are frozen. A set's limit is the sum of its deployment's replicas
// and surge, or twice its own replicas if it has no deployment.
type Settings struct {
	// A freeze begins with Up machines above the limit, and ends with Down fewer.
	Up, Down int
	// Period is the time between two counts of a set without an event.
	Period time.Duration
	// CountDeleted also counts machines in deletion, as the machine controller manager does: a
	// set that is scaled in fast is frozen until they are gone.
	CountDeleted bool
}

// DefaultSettings returns the settings of the machine controller manager.
func DefaultSettings() Settings { return Settings{Up: 2, Down: 1, Period: time.Minute} }

// Validate returns an error that names the flags of all invalid settings.
func (s Settings) Validate() error {
	var errs []error
	if s.Up < 0 {
		errs = append(errs, fmt.Errorf("--safety-up must not be negative, it is %d", s.Up))
	}
	if s.Down < 0 {
		errs = append(errs, fmt.Errorf("--safety-down must not be negative, it is %d", s.Down))
	}
	if s.Period <= 0 {
		errs = append(errs, fmt.Errorf("--machine-safety-overshooting-period must be positive, not %s", s.Period))
	}

	return errors.Join(errs...)
}
