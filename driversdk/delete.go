package driversdk

import (
	"context"

	driverv1 "github.com/machinebus/machinebus/proto/machinebus/driver/v1"
)

func (h *handler[S]) delete(ctx context.Context, c *call) (*driverv1.Result, error) {
	body := c.task.Request.GetDelete()
	req, err := h.request(ctx, c, body.GetMachine(), body.GetClass())
	if err != nil {
		return nil, err
	}
	if err := req.BeginMutation(ctx); err != nil {
		return nil, err
	}
	_, err = spanned(ctx, "Delete", func(ctx context.Context) (struct{}, error) { return struct{}{}, h.driver.Delete(ctx, req) })

	return &driverv1.Result{Payload: &driverv1.Result_Delete{Delete: &driverv1.DeleteResponse{
		LastKnownState: c.scrub.text(req.Machine.LastKnownState),
	}}}, err
}
