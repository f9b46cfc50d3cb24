package driversdk

import (
	"context"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

// An Initializer is a [Driver] whose instances need something done once they
// exist. It may be asked again at any time after creation and must be idempotent
// [INITIALIZE-1].
type Initializer[S any] interface {
	Initialize(ctx context.Context, req *Request[S]) (*Instance, error)
}

func (h *handler[S]) initialize(ctx context.Context, c *call, driver Initializer[S]) (*driverv1.Result, error) {
	body := c.task.Request.GetInitialize()
	req, err := h.request(ctx, c, body.GetMachine(), body.GetClass())
	if err != nil {
		return nil, err
	}
	if err := req.BeginMutation(ctx); err != nil {
		return nil, err
	}
	done, err := spanned(ctx, "Initialize", func(ctx context.Context) (*Instance, error) { return driver.Initialize(ctx, req) })
	instance, err := c.checked("Initialize", done, err)

	return &driverv1.Result{Payload: &driverv1.Result_Initialize{Initialize: &driverv1.InitializeResponse{
		Instance: instance, LastKnownState: c.scrub.text(req.Machine.LastKnownState),
	}}}, err
}
