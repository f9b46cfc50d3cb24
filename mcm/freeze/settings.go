package freeze

import (
	"errors"
	"fmt"
	"time"
)

// Settings say when sets are frozen. A set's limit is what its deployment's
// replicas and surge allow, or twice its own replicas if it has no deployment.
type Settings struct {
	// Up is how many machines above the limit freeze a set, and Down how many
	// fewer than that end the freeze.
	Up, Down int
	// Period is how often sets are counted without a cause.
	Period time.Duration
}

// DefaultSettings are those of the machine controller manager.
func DefaultSettings() Settings { return Settings{Up: 2, Down: 1, Period: time.Minute} }

// Validate names all settings that cannot be worked with, by their flags.
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
