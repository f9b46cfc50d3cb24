package virtual

import (
	"context"
	"fmt"

	"github.com/machinebus/machinebus/driversdk"
)

// ValidateClass asks the cloud whether it is there and takes the credentials.
// The fields were checked when the class was decoded.
func (d *Driver) ValidateClass(ctx context.Context, class *driversdk.Class[Spec]) ([]string, error) {
	var warnings []string
	if len(class.Secret[apiTokenKey]) == 0 {
		warnings = append(warnings,
			fmt.Sprintf("the secret has no key %s: only a cloud that asks for none will answer", apiTokenKey))
	}
	_, err := d.List(ctx, class)

	return warnings, err
}
