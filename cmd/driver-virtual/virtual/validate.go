package virtual

import (
	"context"
	"fmt"

	"github.com/machinebus/machinebus/driversdk"
)

// ValidateClass checks that the cloud answers and accepts the credentials. The fields
// were checked when the class was decoded.
func (d *Driver) ValidateClass(ctx context.Context, class *driversdk.Class[Spec]) ([]string, error) {
	var warnings []string
	if len(class.Secret[apiTokenKey]) == 0 {
		warnings = append(warnings,
			fmt.Sprintf("the secret has no key %s: only a cloud without tokens will answer", apiTokenKey))
	}
	_, err := d.List(ctx, class)

	return warnings, err
}
