package driversdk

import (
	"context"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// A ClassValidator is a [Driver] that knows more of a class than that its
// provider spec decodes: that an image exists, that the credentials are accepted.
// It changes nothing [VALIDATE-1]. A faulty field is [InvalidArgument] with a
// text that names it [VALIDATE-2]; warnings are faults that do not keep the class
// from being used.
type ClassValidator[S any] interface {
	ValidateClass(ctx context.Context, class *Class[S]) (warnings []string, err error)
}

// validate decodes the class, which is a check by itself.
func (h *handler[S]) validate(ctx context.Context, c *call) (*driverv1.Result, error) {
	class, err := h.class(ctx, c, c.task.Request.GetValidate().GetClass())
	if err != nil {
		return nil, err
	}
	response := &driverv1.ValidateResponse{}
	if driver, ok := h.driver.(ClassValidator[S]); ok {
		warnings, invalid := spanned(ctx, "ValidateClass", func(ctx context.Context) ([]string, error) {
			return driver.ValidateClass(ctx, class)
		})
		for _, w := range warnings {
			response.Warnings = append(response.Warnings, c.scrub.text(w))
		}
		err = invalid
	}

	return &driverv1.Result{Payload: &driverv1.Result_Validate{Validate: response}}, err
}
